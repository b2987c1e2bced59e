"""The engine thread on a fake runner: whatever happens, every request that was submitted gets one last event."""

import asyncio
import threading
from collections.abc import Callable

import pytest
from helpers_engine import TIMEOUT, FakeRunner, Gate, add_engine, engine_thread, expected_ids, held, on_loop, settled
from helpers_engine_thread import ids_of, prompt, submit
from helpers_scheduler import make_request

from mlxserve.core.request import FinishReason
from mlxserve.core.step import ScheduledStep
from mlxserve.engine.engine_thread import EngineHandle, EngineThread
from mlxserve.errors import ContextLengthExceeded, EngineDead, InvalidParameter, QueueFull

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
