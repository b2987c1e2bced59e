"""The engine thread on a fake runner: whatever happens, every request that was submitted gets one last event."""

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import Callable

import pytest
from helpers_engine import (
    TIMEOUT,
    Client,
    FakeRunner,
    Gate,
    add_engine,
    engine_thread,
    expected_ids,
    held,
    on_loop,
    settled,
)
from helpers_scheduler import make_request

from mlxserve.core.request import FinishReason, Request
from mlxserve.core.step import ScheduledStep
from mlxserve.engine.engine_thread import MAX_FAILURES_IN_A_ROW, EngineHandle, EngineThread
from mlxserve.errors import ContextLengthExceeded, EngineDead, EngineError, InvalidParameter, QueueFull
from mlxserve.kv.block_pool import CacheIntegrityError


def prompt(first: int, length: int = 20) -> list[int]:
    return list(range(first, first + length))


def submit(thread: EngineThread, handle: EngineHandle, request: Request) -> Client:
    client = Client()
    thread.submit(handle, request, client)
    return client


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


def ids_of(step: ScheduledStep) -> set[str]:
    return {chunk.request_id for chunk in step.prefill} | {row.request_id for row in step.decode}


# --- well ---


@on_loop
async def test_tokens_arrive_in_order_and_then_the_reason() -> None:
    async with engine_thread() as thread:
        handle = await add_engine(thread, FakeRunner())
        requests = [make_request(f"r{i}", prompt(10 * i), max_tokens=5 + i) for i in range(1, 6)]
        clients = [submit(thread, handle, request) for request in requests]
        for request, client in zip(requests, clients, strict=True):
            assert await client.end() is FinishReason.LENGTH
            assert client.token_ids == expected_ids(request.prompt_token_ids, request.sampling.max_tokens)


@on_loop
async def test_a_step_is_one_delivery(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner()
    loop = asyncio.get_running_loop()
    deliver, deliveries = loop.call_soon_threadsafe, []

    def call_soon_threadsafe(callback: Callable[..., object], *args: object, **kwargs: object) -> asyncio.Handle:
        if callback.__name__ == "_call_sinks":
            deliveries.append(args)
        return deliver(callback, *args, **kwargs)

    monkeypatch.setattr(loop, "call_soon_threadsafe", call_soon_threadsafe)
    async with engine_thread() as thread:
        handle = await add_engine(thread, runner)
        with held(Gate()) as gate:
            # All are in the inbox before the first step.
            thread.call(gate)
            clients = [submit(thread, handle, make_request(f"r{i}", [i], max_tokens=4)) for i in range(1, 8)]
        for client in clients:
            await client.end()
    assert len(deliveries) == 4


@on_loop
async def test_what_the_engine_refuses_reaches_the_sink_as_its_last_event() -> None:
    async with engine_thread() as thread:
        handle = await add_engine(thread, FakeRunner(), max_num_seqs=1, max_queue=1)
        with held(Gate()) as gate:
            thread.call(gate)
            first = submit(thread, handle, make_request("a", prompt(1), max_tokens=3))
            same_id = submit(thread, handle, make_request("a", prompt(1)))
            too_long = submit(thread, handle, make_request("b", prompt(1), max_tokens=10_000))
            second = submit(thread, handle, make_request("c", prompt(2), max_tokens=3))
            too_many = submit(thread, handle, make_request("d", prompt(1)))
        assert isinstance(await same_id.end(), InvalidParameter)
        assert isinstance(await too_long.end(), ContextLengthExceeded)
        assert isinstance(await too_many.end(), QueueFull)
        assert await first.end() is await second.end() is FinishReason.LENGTH


@on_loop
async def test_engines_take_turns() -> None:
    turns: list[str] = []
    async with engine_thread() as thread:
        handles = []
        for name in ("a", "b"):
            runner = FakeRunner()
            runner.before_step = lambda step, name=name: turns.append(name)
            handles.append(await add_engine(thread, runner, name=name))
        with held(Gate()) as gate:
            thread.call(gate)
            clients = [submit(thread, handle, make_request("r", prompt(5), max_tokens=4)) for handle in handles]
        for client in clients:
            assert await client.end() is FinishReason.LENGTH
            assert client.token_ids == expected_ids(prompt(5), 4)
    assert turns[:2] == ["a", "b"]


@on_loop
async def test_calls_run_on_the_thread_and_give_back_what_they_return_or_raise() -> None:
    async with engine_thread() as thread:
        name = await asyncio.wrap_future(thread.call(lambda: threading.current_thread().name))
        assert name == "mlxserve-engine"
        with pytest.raises(ZeroDivisionError):
            await asyncio.wrap_future(thread.call(lambda: 1 // 0))
        assert thread.death is None


# --- cancelled ---


@on_loop
async def test_abort_before_it_is_scheduled() -> None:
    runner = FakeRunner()
    async with engine_thread() as thread:
        handle = await add_engine(thread, runner)
        with held(Gate()) as gate:
            thread.call(gate)
            client = submit(thread, handle, make_request("r", prompt(1)))
            thread.abort(handle, "r", FinishReason.CANCELLED)
        assert await client.end() is FinishReason.CANCELLED
        assert runner.steps == []


@pytest.mark.parametrize("num_steps", [1, 3, 6])
@on_loop
async def test_abort_while_it_is_computed(num_steps: int) -> None:
    """In prefill (48 tokens, 16 a step), with the first token, in decode: the next step releases it, without a row."""
    runner = FakeRunner()
    runner.before_step = gate = Gate()
    async with engine_thread() as thread:
        handle = await add_engine(thread, runner, max_prefill_tokens=16)
        with held(gate):
            client = submit(thread, handle, make_request("r", prompt(1, 49), max_tokens=20))
            for _ in range(num_steps - 1):
                await gate.arrival()
                gate.let_go()
            await gate.arrival()
            thread.abort(handle, "r", FinishReason.CANCELLED)
            gate.let_go()
            await gate.arrival()
            assert await client.end() is FinishReason.CANCELLED
            assert runner.steps[-1].released == ("r",)
            assert ids_of(runner.steps[-1]) == set()
            assert handle.engine.stats().num_blocks_used == 0
        assert len(client.token_ids) == max(0, num_steps - 2)


@on_loop
async def test_abort_after_the_end_and_of_unknown_ids_does_nothing() -> None:
    async with engine_thread() as thread:
        handle = await add_engine(thread, FakeRunner())
        client = submit(thread, handle, make_request("r", prompt(1), max_tokens=2))
        assert await client.end() is FinishReason.LENGTH
        thread.abort(handle, "r", FinishReason.CANCELLED)
        thread.abort(handle, "nobody", FinishReason.CANCELLED)
        await settled(thread)
        assert thread.death is None


@on_loop
async def test_an_id_used_again_right_after_an_abort_is_another_request() -> None:
    async with engine_thread() as thread:
        handle = await add_engine(thread, FakeRunner())
        with held(Gate()) as gate:
            thread.call(gate)
            first = submit(thread, handle, make_request("r", prompt(1)))
            thread.abort(handle, "r", FinishReason.CANCELLED)
            second = submit(thread, handle, make_request("r", prompt(50), max_tokens=3))
        assert await first.end() is FinishReason.CANCELLED
        assert await second.end() is FinishReason.LENGTH
        assert second.token_ids == expected_ids(prompt(50), 3)
        assert thread.death is None


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


# --- the thread ends ---


@on_loop
async def test_a_killed_thread_answers_everybody() -> None:
    runner, gate = FakeRunner(), Gate()
    released = threading.Event()

    def die_at_the_gate(step: ScheduledStep) -> None:
        gate()
        raise SystemExit("killed")

    runner.before_step = die_at_the_gate
    thread = EngineThread(asyncio.get_running_loop(), released.set)
    thread.start()
    handle, other = await add_engine(thread, runner, max_num_seqs=1), await add_engine(thread, FakeRunner())
    clients = [submit(thread, handle, make_request(f"r{i}", prompt(i))) for i in range(2)]
    await gate.arrival()
    # These are in the inbox when it dies.
    clients.append(submit(thread, other, make_request("r", prompt(1))))
    call = thread.call(lambda: None)
    gate.open()
    for client in clients:
        error = await client.end()
        assert isinstance(error, EngineDead)
        assert "the engine thread died: SystemExit: killed" in str(error)
    with pytest.raises(EngineDead):
        await asyncio.wrap_future(call)
    assert thread.death is not None
    assert await asyncio.to_thread(released.wait, TIMEOUT)
    assert isinstance(await submit(thread, handle, make_request("after", prompt(1))).end(), EngineDead)
    with pytest.raises(EngineDead):
        await asyncio.wrap_future(thread.call(lambda: None))
    thread.abort(handle, "after", FinishReason.CANCELLED)
    await asyncio.to_thread(thread.stop)


@on_loop
async def test_stop_answers_requests_in_flight_and_messages_in_the_inbox() -> None:
    runner = FakeRunner()
    released = threading.Event()
    runner.before_step = gate = Gate()
    thread = EngineThread(asyncio.get_running_loop(), released.set)
    thread.start()
    handle = await add_engine(thread, runner, max_num_seqs=1)
    clients = [submit(thread, handle, make_request(f"r{i}", prompt(i))) for i in range(2)]
    await gate.arrival()
    stopping = asyncio.create_task(asyncio.to_thread(thread.stop))
    while thread._inbox.empty():  # noqa: ASYNC110 -- another thread puts it there
        await asyncio.sleep(0.001)
    cancelled_call, call = thread.call(lambda: None), thread.call(lambda: None)
    assert cancelled_call.cancel()
    clients.append(submit(thread, handle, make_request("late", prompt(1))))
    gate.open()
    await asyncio.wait_for(stopping, TIMEOUT)
    for client in clients:
        error = await client.end()
        assert isinstance(error, EngineDead)
        assert str(error) == "the server is stopping"
    with pytest.raises(EngineDead):
        await asyncio.wrap_future(call)
    assert released.is_set()


def test_a_loop_that_was_closed_meanwhile_stops_nothing() -> None:
    runner = FakeRunner()
    runner.before_step = gate = Gate()
    loop = asyncio.new_event_loop()
    thread = EngineThread(loop, release_device=lambda: None)
    thread.start()

    async def start() -> EngineHandle:
        handle = await add_engine(thread, runner)
        submit(thread, handle, make_request("r", prompt(1), max_tokens=3))
        await gate.arrival()
        return handle

    handle = loop.run_until_complete(asyncio.wait_for(start(), TIMEOUT))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    gate.open()
    thread.call(lambda: None).result(TIMEOUT)
    thread.submit(handle, make_request("after", prompt(1), max_tokens=10_000), lambda item: None)
    thread.stop()
    assert thread.death == "the server is stopping"
