"""Failed steps and wrong books on the engine thread: who gets an error, who goes on, and when an engine is dead."""

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import Callable

import pytest
from helpers_engine import TIMEOUT, FakeRunner, Gate, add_engine, engine_thread, expected_ids, held, on_loop, settled
from helpers_engine_thread import ids_of, prompt, submit
from helpers_scheduler import make_request

from mlxserve.core.request import FinishReason
from mlxserve.core.step import ScheduledStep
from mlxserve.engine.engine_thread import MAX_FAILURES_IN_A_ROW
from mlxserve.errors import EngineDead, EngineError
from mlxserve.kv.block_pool import CacheIntegrityError


class Failing:
    """Raises in the steps it is told to, counted from 0, and in all later ones once they run out."""

    def __init__(self, *which: bool, error: BaseException | None = None) -> None:
        self._which = list(which)
        self._error = error or RuntimeError("out of memory")

    def __call__(self, *_: object) -> None:
        if not self._which or self._which.pop(0):
            raise self._error


def fails_if(condition: Callable[[ScheduledStep], bool]) -> Callable[[ScheduledStep], None]:
    def before_step(step: ScheduledStep) -> None:
        if condition(step):
            raise RuntimeError("out of memory")

    return before_step


# --- a step fails ---


@on_loop
async def test_a_failed_step_ends_its_requests_and_no_others(caplog: pytest.LogCaptureFixture) -> None:
    runner = FakeRunner()
    runner.before_step = fails_if(lambda step: len(runner.steps) == 4)
    async with engine_thread() as thread:
        handle = await add_engine(thread, runner, max_num_seqs=2)
        with held(Gate()) as gate:
            thread.call(gate)
            clients = [submit(thread, handle, make_request(f"r{i}", prompt(10 * i), max_tokens=6)) for i in range(1, 6)]
        for client in clients[:2]:
            error = await client.end()
            assert type(error) is EngineError
            assert "RuntimeError: out of memory" in str(error)
            assert len(client.token_ids) == 3
        for i, client in enumerate(clients[2:], 3):
            assert await client.end() is FinishReason.LENGTH
            assert client.token_ids == expected_ids(prompt(10 * i), 6)
        assert handle.death is None
    assert "engine of m failed; rebuilding it" in caplog.text


@on_loop
async def test_a_running_request_outside_of_the_failed_step_goes_on_as_if_nothing_had_happened() -> None:
    runner = FakeRunner()
    failed: list[set[str]] = []

    def before_step(step: ScheduledStep) -> None:
        stands_in = ids_of(step)
        if not failed and "stream" in stands_in and "late" not in stands_in and handle.engine.stats().num_running == 3:
            failed.append(stands_in)
            raise RuntimeError("out of memory")

    runner.before_step = before_step
    async with engine_thread() as thread:
        handle = await add_engine(thread, runner, max_prefill_tokens=100, target_itl_ms=0.001)
        with held(Gate()) as gate:
            thread.call(gate)
            stream = submit(thread, handle, make_request("stream", prompt(1, 3), max_tokens=50))
            early = submit(thread, handle, make_request("early", prompt(100, 150), max_tokens=5))
            late = submit(thread, handle, make_request("late", prompt(300, 150), max_tokens=5))
        assert type(await stream.end()) is type(await early.end()) is EngineError
        assert await late.end() is FinishReason.LENGTH
        assert late.token_ids == expected_ids(prompt(300, 150), 5)
    assert failed == [{"stream", "early"}]


@on_loop
async def test_seed_and_output_index_go_on_after_another_requests_failure() -> None:
    """What a row of a request preempted at the time holds afterwards is what the draws depend on."""
    runner = FakeRunner()
    runner.before_step = gate = Gate()
    async with engine_thread() as thread:
        handle = await add_engine(thread, runner, max_num_seqs=1)
        with held(gate):
            lost = submit(thread, handle, make_request("lost", prompt(1), max_tokens=30))
            kept = submit(thread, handle, make_request("kept", prompt(50), max_tokens=4, seed=99))
            await gate.arrival()
            runner.before_step = fails_if(lambda step: "lost" in ids_of(step))
        assert type(await lost.end()) is EngineError
        assert await kept.end() is FinishReason.LENGTH
    rows = [row for step in runner.steps for row in step.decode if row.request_id == "kept"]
    assert [(row.output_index, row.seed) for row in rows] == [(0, 99), (1, 99), (2, 99), (3, 99)]


@on_loop
async def test_an_engine_that_fails_again_and_again_is_dead() -> None:
    runner = FakeRunner()
    runner.before_step = Failing()
    async with engine_thread() as thread:
        handle = await add_engine(thread, runner, max_num_seqs=1)
        with held(Gate()) as gate:
            thread.call(gate)
            clients = [submit(thread, handle, make_request(f"r{i}", prompt(i))) for i in range(5)]
        ends = [await client.end() for client in clients]
        assert [type(end) for end in ends] == [EngineError] * MAX_FAILURES_IN_A_ROW + [EngineDead] * 2
        assert "3 times in a row; last: RuntimeError: out of memory" in handle.death
        assert len(runner.steps) == MAX_FAILURES_IN_A_ROW
        assert isinstance(await submit(thread, handle, make_request("after", prompt(1))).end(), EngineDead)
        thread.abort(handle, "after", FinishReason.CANCELLED)
        # The other engines of the thread are well.
        other = await add_engine(thread, FakeRunner(), name="other")
        assert await submit(thread, other, make_request("r", prompt(1), max_tokens=2)).end() is FinishReason.LENGTH


@on_loop
async def test_failures_are_in_a_row_only_without_a_computed_step_between() -> None:
    runner = FakeRunner()
    runner.before_step = Failing(True, True, False, True, True, False, False)
    async with engine_thread() as thread:
        handle = await add_engine(thread, runner)
        ends = [await submit(thread, handle, make_request("r", prompt(1), max_tokens=2)).end() for _ in range(4)]
        assert [type(end) for end in ends] == [EngineError] * 4
        assert await submit(thread, handle, make_request("r", prompt(1), max_tokens=2)).end() is FinishReason.LENGTH
        assert handle.death is None


@on_loop
async def test_deadlines_that_pass_between_failures_do_not_make_the_engine_well() -> None:
    runner = FakeRunner()
    runner.before_step = Failing()
    async with engine_thread() as thread:
        handle = await add_engine(thread, runner)
        for _ in range(MAX_FAILURES_IN_A_ROW):
            late = submit(thread, handle, make_request("late", prompt(1), deadline=0.0))
            assert await late.end() is FinishReason.TIMEOUT
            await submit(thread, handle, make_request("r", prompt(1))).end()
        assert handle.death is not None


@on_loop
async def test_an_engine_that_cannot_be_rebuilt_is_dead() -> None:
    runner = FakeRunner()
    runner.before_step = Failing()
    runner.before_reset = Failing(error=RuntimeError("no device"))
    async with engine_thread() as thread:
        handle = await add_engine(thread, runner, max_num_seqs=1)
        with held(Gate()) as gate:
            thread.call(gate)
            clients = [submit(thread, handle, make_request(f"r{i}", prompt(i))) for i in range(3)]
        for client in clients:
            assert isinstance(await client.end(), EngineDead)
        assert handle.death == "the engine of m cannot be rebuilt: no device"


@on_loop
async def test_a_dead_engine_is_let_go() -> None:
    """A model that is loaded again needs the memory of the one that died."""
    runner = FakeRunner()
    runner.before_step = Failing()
    reference = weakref.ref(runner)
    logging.disable(logging.CRITICAL)  # log records hold tracebacks, and these the engine
    try:
        async with engine_thread() as thread:
            handle = await add_engine(thread, runner)
            for _ in range(MAX_FAILURES_IN_A_ROW):
                await submit(thread, handle, make_request("r", prompt(1))).end()
            del runner, handle
            await settled(thread)
            gc.collect()
            assert reference() is None
    finally:
        logging.disable(logging.NOTSET)


# --- the engine's own books are wrong ---


@pytest.mark.parametrize("method", ["step", "abort"])
@on_loop
async def test_wrong_books_end_every_request_and_the_engine_starts_over(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = FakeRunner()
    runner.before_step = gate = Gate()
    async with engine_thread() as thread:
        handle = await add_engine(thread, runner, max_num_seqs=1)
        with held(gate):
            clients = [submit(thread, handle, make_request(f"r{i}", prompt(i))) for i in range(3)]
            await gate.arrival()

            def fail(*_: object) -> None:
                monkeypatch.undo()
                raise CacheIntegrityError("the books do not add up")

            monkeypatch.setattr(handle.engine, method, fail)
            thread.abort(handle, "r2", FinishReason.CANCELLED)
        ends = [await client.end() for client in clients]
        cancelled = method == "step"
        assert [type(end) for end in ends[:2]] == [EngineError] * 2
        assert ends[2] is FinishReason.CANCELLED if cancelled else type(ends[2]) is EngineError
        assert handle.engine.stats().num_blocks_used == 0
        again = submit(thread, handle, make_request("r0", prompt(7), max_tokens=2))
        assert await again.end() is FinishReason.LENGTH


@on_loop
async def test_books_found_wrong_when_idle_are_made_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with engine_thread() as thread:
        handle = await add_engine(thread, FakeRunner())
        first = submit(thread, handle, make_request("r", prompt(1), max_tokens=2))
        await first.end()
        checked = threading.Event()

        def fail() -> None:
            monkeypatch.undo()
            checked.set()
            raise CacheIntegrityError("the books do not add up")

        monkeypatch.setattr(handle.engine, "check_integrity", fail)
        await settled(thread)
        assert await asyncio.to_thread(checked.wait, TIMEOUT)
        second = submit(thread, handle, make_request("r", prompt(1), max_tokens=2))
        assert await second.end() is FinishReason.LENGTH
    assert "the books do not add up" in caplog.text
