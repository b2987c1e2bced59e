"""Stages of a request: they add up, and each wait is blamed on the stage that caused it."""

import random
import time

import pytest
from helpers_clock import DELAY, Clock
from helpers_engine import CONTEXT_LENGTH, FakeRunner, Gate, held, on_loop
from helpers_served import Served, read, serving

from mlxserve.core.generation import TextDelta, Timings
from mlxserve.core.step import ScheduledStep
from mlxserve.engine import engine, engine_thread, generation, prompt_reader, served_model
from mlxserve.engine.timeline import Timeline
from mlxserve.errors import ContextLengthExceeded, EngineError

STAMPS = ("received", "tokenised", "scheduled", "first_token", "first_delivery", "last_token", "finished")
STAGES = ("front_end", "queue", "prefill", "delivery", "decode")


def make_timeline(*times: float | None) -> Timeline:
    return Timeline(**dict(zip(STAMPS, times, strict=True)))  # type: ignore[arg-type]


def test_stages_are_differences_of_neighbouring_stamps() -> None:
    timings = make_timeline(10.0, 11.0, 13.0, 17.0, 25.0, 41.0, 73.0).timings()
    assert timings == Timings(front_end=1.0, queue=2.0, prefill=4.0, delivery=8.0, decode=24.0, total=63.0)
    assert timings.time_to_first_token == 15.0


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ((10.0, None, None, None, None, None, 12.0), Timings(2.0, 0.0, 0.0, 0.0, 0.0, 2.0)),
        ((10.0, 11.0, None, None, None, None, 15.0), Timings(1.0, 4.0, 0.0, 0.0, 0.0, 5.0)),
        ((10.0, 11.0, 12.0, None, None, None, 18.0), Timings(1.0, 1.0, 6.0, 0.0, 0.0, 8.0)),
        ((10.0, 11.0, 12.0, 13.0, None, 13.0, 19.0), Timings(1.0, 1.0, 1.0, 6.0, 0.0, 9.0)),
    ],
)
def test_the_stage_a_request_ended_in_gets_the_rest(times: tuple[float | None, ...], expected: Timings) -> None:
    assert make_timeline(*times).timings() == expected


def test_stages_add_up_wherever_a_request_ended() -> None:
    seed = random.randrange(2**32)
    print(f"{seed=}")
    rng = random.Random(seed)
    for _ in range(500):
        times = sorted(rng.choice([rng.random(), 0.5]) for _ in STAMPS)
        num_reached = rng.randrange(1, len(STAMPS))
        reached = [at if index < num_reached else None for index, at in enumerate(times[:-1])]
        timeline = make_timeline(*reached, times[-1])
        timings = timeline.timings()
        assert min(getattr(timings, stage) for stage in STAGES) >= 0.0
        first = timeline.first_delivery if timeline.first_delivery is not None else times[-1]
        assert timings.time_to_first_token == pytest.approx(first - times[0])
        assert timings.total == pytest.approx(times[-1] - times[0])
        computed = timings.front_end + timings.queue + timings.prefill + timings.decode
        assert computed <= timings.total + 1e-9


def test_an_unfinished_timeline_ends_now() -> None:
    timings = Timeline(received=time.monotonic() - DELAY).timings()
    assert timings.front_end == timings.total >= DELAY


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (engine, engine_thread, generation, prompt_reader, served_model):
        monkeypatch.setattr(module, "time", clock)
    return clock


def slowed_stages(timings: Timings) -> list[str]:
    """The stages with a delay, each as often as it has it; checks that nothing else took long."""
    slowed = [stage for stage in STAGES for _ in range(round(getattr(timings, stage) / DELAY))]
    assert timings.total >= DELAY * len(slowed)
    return slowed


def gated() -> tuple[FakeRunner, Gate]:
    runner = FakeRunner()
    runner.before_step = gate = Gate()
    return runner, gate


@on_loop
async def test_a_slow_tokeniser(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = prompt_reader.encode_prompt

    def slow_encode(*args: object) -> list[int]:
        clock.pass_delay()
        return encode(*args)

    monkeypatch.setattr(prompt_reader, "encode_prompt", slow_encode)
    async with serving() as served:
        answer = await read(await served.start())
        assert slowed_stages(answer.finished.timings) == ["front_end"]


@on_loop
async def test_a_prompt_refused_after_a_slow_tokeniser(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_encode(*args: object) -> list[int]:
        clock.pass_delay()
        return [1] * CONTEXT_LENGTH

    monkeypatch.setattr(prompt_reader, "encode_prompt", slow_encode)
    # A request that never got a Timeline stamp ends by the real clock.
    monkeypatch.setattr("mlxserve.engine.timeline.time", clock)
    async with serving() as served:
        with pytest.raises(ContextLengthExceeded):
            await served.start()
        (record,) = served.observer.records
        assert slowed_stages(record.timings) == ["front_end"]


@on_loop
async def test_a_queue(clock: Clock) -> None:
    runner, gate = gated()
    async with serving(runner, max_num_seqs=1) as served:
        with held(gate):
            first = await served.start("first")
            await gate.arrival()
            second = await served.start("second")
            clock.pass_delay()
        assert slowed_stages((await read(first)).finished.timings) == ["prefill"]
        assert slowed_stages((await read(second)).finished.timings) == ["queue"]


@on_loop
async def test_a_slow_prefill_of_several_chunks(clock: Clock) -> None:
    runner, gate = gated()
    async with serving(runner, max_prefill_tokens=8) as served:
        with held(gate):
            generation = await served.start(prompt="the dog ate the log and " * 4)
            for _ in range(3):
                await gate.arrival()
                clock.pass_delay()
                gate.let_go()
            await gate.arrival()
        answer = await read(generation)
        assert slowed_stages(answer.finished.timings) == ["prefill"] * 3


@on_loop
async def test_a_slow_decode(clock: Clock) -> None:
    runner, gate = gated()
    async with serving(runner) as served:
        with held(gate):
            generation = await served.start()
            gate.let_go()
            first = await anext(generation)
            await gate.arrival()
            await gate.arrival()
            clock.pass_delay()
        assert isinstance(first, TextDelta)
        answer = await read(generation)
        assert slowed_stages(answer.finished.timings) == ["decode"]
        assert max(served.observer.intervals) >= DELAY


@on_loop
async def test_a_slow_reader(clock: Clock) -> None:
    async with serving() as served:
        generation = await served.start()
        await served.idle()
        clock.pass_delay()
        timings = (await read(generation)).finished.timings
        assert slowed_stages(timings) == ["delivery"]
        assert timings.time_to_first_token >= DELAY


@on_loop
async def test_a_reader_slow_after_the_first_token(clock: Clock) -> None:
    """No stage of the server took long; only the total shows it."""
    runner, gate = gated()
    async with serving(runner) as served:
        generation = await served.start()
        with held(gate):
            gate.let_go()
            await anext(generation)
        await served.idle()
        clock.pass_delay()
        timings = (await read(generation)).finished.timings
        assert slowed_stages(timings) == []
        assert timings.total >= DELAY


@pytest.mark.parametrize(("num_steps", "stage"), [(0, "queue"), (1, "prefill"), (2, "prefill")])
@on_loop
async def test_cancelled_requests_blame_the_stage_they_ended_in(num_steps: int, stage: str, clock: Clock) -> None:
    runner, gate = gated()
    async with serving(runner, max_prefill_tokens=8) as served:
        with held(gate):
            first = await served.start("first", max_tokens=30)
            await gate.arrival()
            generation = await served.start("r", prompt="the dog ate the log and " * 4)
            for _ in range(num_steps):
                gate.let_go()
                await gate.arrival()
            clock.pass_delay()
            generation.cancel()
            first.cancel()
        assert slowed_stages(record_of(served, "r")) == [stage]


@on_loop
async def test_a_request_computed_anew_keeps_its_stamps(clock: Clock) -> None:
    """What another one's failed step costs it falls into the stage it was in."""
    runner = FakeRunner()
    failed: list[ScheduledStep] = []

    def slow_then_failing(step: ScheduledStep) -> None:
        if len(runner.steps) == 1:
            clock.pass_delay()
        elif not failed and all(chunk.request_id != "kept" for chunk in step.prefill):
            failed.append(step)
            clock.pass_delay()
            raise RuntimeError("out of memory")

    runner.before_step = slow_then_failing
    async with serving(runner, max_prefill_tokens=100, target_itl_ms=0.001) as served:
        with held(Gate()) as gate:
            served.thread.call(gate)
            lost = [await served.start("stream"), await served.start("long", "xyz qrs " * 15)]
            kept = await served.start("kept", "qrs xyz " * 15)
        answer = await read(kept)
        assert slowed_stages(answer.finished.timings) == ["prefill", "prefill"]
        assert [type((await read(generation)).error) for generation in lost] == [EngineError] * 2


def record_of(served: Served, request_id: str) -> Timings:
    return next(record.timings for record in served.observer.records if record.request_id == request_id)
