"""Generations that are cancelled, late, failed or drained: each gets one end, and nothing is left behind."""

import asyncio
import random

import pytest
from helpers_engine import TIMEOUT, FakeRunner, Gate, Recorder, expected_text, held, on_loop
from helpers_generation import CAT, assert_finished, go_on, hold_tokeniser
from helpers_served import Served, read, serving

from mlxserve.core.generation import TextDelta
from mlxserve.core.request import FinishReason
from mlxserve.core.step import ScheduledStep
from mlxserve.engine import prompt_reader
from mlxserve.errors import EngineDead, EngineError, MlxserveError, RequestCancelled, RequestTimeout

# --- cancelled ---


@pytest.mark.parametrize("num_steps", [0, 1, 5, 9])
@pytest.mark.parametrize("while_reading", [False, True])
@on_loop
async def test_cancel_while_it_waits_and_in_prefill_and_in_decode(num_steps: int, while_reading: bool) -> None:
    runner = FakeRunner()
    runner.before_step = gate = Gate()
    async with serving(runner, max_num_seqs=1, max_prefill_tokens=8) as served:
        with held(gate):
            first = await served.start("first", max_tokens=3)
            await gate.arrival()
            # 38 tokens, 8 in a step, behind one that takes three steps.
            generation = await served.start("r", "the dog ate the log and " * 4, max_tokens=30)
            if num_steps:
                await go_on(gate, 2 + num_steps)
            reading = asyncio.create_task(read(generation)) if while_reading else None
            await asyncio.sleep(0)
            generation.cancel()
            answer = await (reading or read(generation))
            assert isinstance(answer.error, RequestCancelled)
            generation.cancel()
        assert_finished(await read(first), FinishReason.LENGTH, CAT[:3])
        await served.idle()
        assert served.observer.outcomes() == {"first": "length", "r": "cancelled"}


@on_loop
async def test_cancel_after_the_end_changes_nothing() -> None:
    async with serving() as served:
        generation = await served.start(max_tokens=4)
        await served.idle()
        assert isinstance(await anext(generation), TextDelta)
        generation.cancel()
        assert_finished(await read(generation), FinishReason.LENGTH, "")
        generation.cancel()
        assert served.observer.outcomes() == {"r": "length"}


@on_loop
async def test_cancel_while_tokenising_submits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as served:
        with held(hold_tokeniser(monkeypatch)) as gate:
            starting = asyncio.create_task(served.start())
            await gate.arrival()
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
        await asyncio.to_thread(served.executor.shutdown)
        await served.settled()
        assert served.runner.steps == []
        assert served.observer.outcomes() == {"r": "cancelled"}


# --- deadlines ---


@on_loop
async def test_a_deadline_while_tokenising(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as served:
        generation = await served.start(timeout=1e-9)
        answer = await read(generation)
        assert isinstance(answer.error, RequestTimeout)
        assert served.runner.steps == []
        assert served.observer.outcomes() == {"r": "timeout"}


@pytest.mark.parametrize("num_steps", [0, 1, 9])
@on_loop
async def test_a_deadline_while_it_waits_and_in_prefill_and_in_decode(
    num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = FakeRunner()
    runner.before_step = gate = Gate()
    async with serving(runner, max_num_seqs=1, max_prefill_tokens=8, request_timeout=1000.0) as served:
        with held(gate):
            first = await served.start("first", max_tokens=3)
            await gate.arrival()
            generation = await served.start("r", "the dog ate the log and " * 4, max_tokens=30)
            if num_steps:
                await go_on(gate, 2 + num_steps)
            generation._request.deadline = 0.0
        answer = await read(generation)
        assert isinstance(answer.error, RequestTimeout)
        assert (answer.text != "") == (num_steps == 9)
        assert_finished(await read(first), FinishReason.LENGTH, CAT[:3])
        await served.idle()
        assert served.observer.outcomes() == {"first": "length", "r": "timeout"}


@on_loop
async def test_a_deadline_after_the_last_token_takes_nothing_away() -> None:
    async with serving() as served:
        generation = await served.start(max_tokens=5, timeout=1000.0)
        await served.idle()
        generation._request.deadline = 0.0
        await served.settled()
        assert_finished(await read(generation), FinishReason.LENGTH, CAT[:5])


# --- failures ---


@on_loop
async def test_a_failed_step_reaches_its_requests_and_no_others() -> None:
    runner = FakeRunner()

    def fail(step: ScheduledStep) -> None:
        if len(runner.steps) == 4:
            raise RuntimeError("out of memory")

    runner.before_step = fail
    async with serving(runner, max_num_seqs=2) as served:
        with held(Gate()) as gate:
            served.thread.call(gate)
            generations = [await served.start(f"r{i}", f"the dog {i}", max_tokens=9) for i in range(5)]
        answers = [await read(generation) for generation in generations]
        for i, answer in enumerate(answers):
            if i < 2:
                assert type(answer.error) is EngineError
                assert answer.text == expected_text(f"the dog {i}", 3)
            else:
                assert_finished(answer, FinishReason.LENGTH, expected_text(f"the dog {i}", 9))
        await served.idle()
        ends = ["EngineError"] * 2 + ["length"] * 3
        assert served.observer.outcomes() == {f"r{i}": end for i, end in enumerate(ends)}


@on_loop
async def test_a_dead_thread_answers_everybody_and_takes_nothing_more() -> None:
    runner, gate = FakeRunner(), Gate()

    def die(step: ScheduledStep) -> None:
        gate()
        raise SystemExit("killed")

    async with serving(runner, max_num_seqs=1) as served:
        runner.before_step = die
        with held(gate):
            generations = [await served.start(f"r{i}") for i in range(3)]
            reading = asyncio.create_task(read(generations[0]))
            await gate.arrival()
        for answer in (await reading, await read(generations[1]), await read(generations[2])):
            assert isinstance(answer.error, EngineDead)
        with pytest.raises(EngineDead, match="killed"):
            await served.start("late")
        assert served.observer.outcomes() == dict.fromkeys(["r0", "r1", "r2", "late"], "EngineDead")


@on_loop
async def test_an_engine_that_dies_while_a_prompt_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as served:
        with held(hold_tokeniser(monkeypatch)) as gate:
            starting = asyncio.create_task(served.start())
            await gate.arrival()
            served.model._handle.death = "it is dead"
        with pytest.raises(EngineDead, match="it is dead"):
            await starting


@on_loop
async def test_an_unforeseen_error_of_the_tokeniser_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(prompt_reader, "encode_prompt", fail)
    async with serving() as served:
        with pytest.raises(ZeroDivisionError):
            await served.start()
        assert served.observer.outcomes() == {"r": "ZeroDivisionError"}
        assert served.model.num_in_flight == 0


# --- draining ---


@on_loop
async def test_drain_waits_for_what_is_running() -> None:
    runner = FakeRunner()
    runner.before_step = gate = Gate()
    async with serving(runner) as served:
        with held(gate):
            reading = asyncio.create_task(read(await served.start()))
            await gate.arrival()
            draining = asyncio.create_task(served.model.drain(TIMEOUT))
            await asyncio.sleep(0)
            with pytest.raises(EngineDead, match="stopping"):
                await served.start("late")
        await draining
        assert_finished(await reading, FinishReason.LENGTH, CAT[:8])


@on_loop
async def test_drain_without_time_cancels() -> None:
    runner = FakeRunner()
    runner.before_step = gate = Gate()
    async with serving(runner) as served:
        with held(gate):
            reading = asyncio.create_task(read(await served.start("read")))
            unread = await served.start("unread")
            await gate.arrival()
            await served.model.drain(0.0)
            for answer in (await reading, await read(unread)):
                assert isinstance(answer.error, RequestCancelled)
                assert "stopping" in str(answer.error)
        await served.idle()
        assert served.observer.outcomes() == {"read": "cancelled", "unread": "cancelled"}


@on_loop
async def test_drain_without_requests_is_over_at_once() -> None:
    async with serving() as served:
        await served.model.drain(TIMEOUT)
        with pytest.raises(EngineDead, match="stopping"):
            await served.start("late")


@on_loop
async def test_a_prompt_in_the_tokeniser_is_refused_after_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as served:
        with held(hold_tokeniser(monkeypatch)) as gate:
            starting = asyncio.create_task(served.start())
            await gate.arrival()
            await served.model.drain(0.0)
        with pytest.raises(EngineDead, match="stopping"):
            await starting
        await served.settled()
        assert served.runner.steps == []


# --- everything at once ---


class Crowd:
    """Requests of all kinds whose readers are slow, go away or never come, on an engine whose steps fail."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.runner = FakeRunner()
        self.runner.before_step = self.fail_some
        self.observer = Recorder()

    def fail_some(self, step: ScheduledStep) -> None:
        # Never twice in a row: this is about requests that fail and not about an engine that dies.
        if step.step_id % 2 and self.random.random() < 0.1:
            raise RuntimeError("out of memory")

    async def client(self, served: Served, i: int) -> str:
        rng = random.Random(self.random.random())
        prompt, num_tokens = f"the dog {rng.randrange(30)} " * rng.choice([1, 3, 9]), rng.choice([1, 5, 20])
        expected = expected_text(prompt, num_tokens)
        stop = rng.choice([(), (expected[3:5],)]) if num_tokens > 5 else ()
        timeout = rng.choice([None, None, None, 1e-9, 0.02])
        generation = await served.start(f"r{i}", prompt, max_tokens=num_tokens, stop=stop, timeout=timeout)
        behaviour = rng.choice(["read", "read", "slow", "leave", "never"])
        before = ""
        if behaviour == "never":
            await asyncio.sleep(rng.choice([0.0, 0.01, 0.1]))
            generation.cancel()
        elif behaviour == "slow":
            await asyncio.sleep(rng.choice([0.01, 0.1]))
        elif behaviour == "leave":
            first = await anext(generation)
            generation.cancel()
            if not isinstance(first, TextDelta):
                return str(first.reason)
            before = first.text
        answer = await read(generation)
        text = before + answer.text
        if answer.finished is not None:
            assert text == (expected[: expected.index(stop[0])] if stop else expected)
            return str(answer.finished.reason)
        assert expected.startswith(text)
        return outcome_of(answer.error)


def outcome_of(error: MlxserveError) -> str:
    return {RequestTimeout: "timeout", RequestCancelled: "cancelled"}.get(type(error), type(error).__name__)


@on_loop
async def test_a_crowd_on_a_failing_engine_gets_one_end_each() -> None:
    seed = random.randrange(2**32)
    print(f"{seed=}")
    crowd = Crowd(seed)
    async with serving(crowd.runner, observer=crowd.observer, max_num_seqs=8, max_queue=200, max_blocks=60) as served:

        async def client(i: int) -> tuple[str, str]:
            try:
                return f"r{i}", await crowd.client(served, i)
            except MlxserveError as error:
                return f"r{i}", outcome_of(error)

        ends = dict(await asyncio.gather(*(client(i) for i in range(300))))
        assert crowd.observer.outcomes() == ends
        assert {"length", "stop", "cancelled", "timeout", "EngineError", "QueueFull"} <= set(ends.values())
        assert served.model.num_in_flight == 0
        assert served.model.death is None
        await served.idle()
