"""The one thread that touches MLX, and the two ways across: an inbox in, one delivery per step out.

event loop                                     engine thread
----------                                     -------------
submit(), abort(), call()  --- inbox --->      take all messages
work()                                         a step of the engine, or a piece of the work, whose turn it is
sink(output) for each      <-- call_soon ---   outputs of the step, once per step
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from mlxserve.core.pieces import Pieces
from mlxserve.core.request import FinishReason, Request
from mlxserve.core.stats import StepRecord
from mlxserve.core.step import RequestOutput
from mlxserve.engine.engine import Engine, StepFailed
from mlxserve.engine.turns import Turns
from mlxserve.errors import EngineDead, EngineError, MlxserveError

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_FAILURES_IN_A_ROW = 3
ARRIVAL_WINDOW = 0.01
"""Seconds that an idle engine waits, after a request came in, for others on their way through the tokenizer. Requests
sent together would otherwise be split: the first computed alone, and the rest held back for its stream."""

WAITING_POLL = 0.1
"""Seconds between looks at the deadlines of requests that wait for blocks from disk."""


@dataclass(frozen=True, slots=True)
class Computed:
    """One request's output with the time its step ended (time.monotonic())."""

    output: RequestOutput
    time: float
    step_id: int | None = None
    """None: it ended between steps."""


StepSink = Callable[[StepRecord], None]
"""Told about each computed step of an engine, on the event loop and before what the step did to its requests."""
Sink = Callable[[Computed | MlxserveError], None]
"""Receives everything that happens to one request, on the event loop; an error or a finish reason is the last."""

Delivery = Callable[[], None]
"""A sink with what it receives."""


@dataclass(frozen=True, slots=True)
class _Submit:
    handle: "EngineHandle"
    request: Request
    sink: Sink


@dataclass(frozen=True, slots=True)
class _Abort:
    handle: "EngineHandle"
    request_id: str
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[[], object]
    future: "Future[object]"


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Work:
    """Something long that is done a piece at a time."""

    pieces: Pieces[Any]
    future: "Future[Any]"
    spent: float = 0.0

    def advance(self) -> bool:
        """Do the next piece, and tell whether there may be more."""
        if self.future.cancelled():
            self.pieces.close()
            return False
        try:
            next(self.pieces)
        except StopIteration as end:
            if self.future.set_running_or_notify_cancel():
                self.future.set_result(end.value)
            return False
        except BaseException as error:
            if self.future.set_running_or_notify_cancel():
                self.future.set_exception(error)
            return False
        return True

    def give_up(self, reason: str) -> None:
        self.pieces.close()
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(EngineDead(reason))


class EngineHandle:
    """One engine on the thread, as the event loop sees it. Written by the engine thread, read by anyone."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self._engine: Engine | None = engine
        self.sinks: dict[str, Sink] = {}
        self.spent = 0.0
        """Seconds its steps took (engine.turns)."""
        self.step_sinks: list[StepSink] = []
        """The event loop adds to it before requests come."""
        self.request_ids: set[str] = set()
        """Requests in flight; the event loop writes it."""
        self.num_arriving = 0
        """Requests between the dialect and the inbox; the event loop writes it."""
        self.death: str | None = None
        """Why it computes nothing any more; None while it is well."""

    @property
    def engine(self) -> Engine:
        """Raises EngineDead: it was taken off the thread for good."""
        if self._engine is None:
            raise EngineDead(self.death or f"{self.name} was unloaded")
        return self._engine

    def let_go(self, reason: str) -> None:
        """Forget the engine, and with it the weights: whoever still has this handle keeps neither."""
        self.death = self.death or reason
        self._engine = None


class EngineThread:
    """Owns the device. Engines are added to it, share its time evenly (engine.turns), and are taken off it again.

    Every submitted request's sink is called until it got a finish reason or an error:

    - A step fails: EngineError for the requests that stood in it. The engine is rebuilt and goes on with all others.
    - An engine's books are wrong: EngineError for all of its requests. It is rebuilt and goes on without any.
    - An engine cannot be rebuilt, or fails MAX_FAILURES_IN_A_ROW times: EngineDead. It is taken off the thread.
    - The thread ends: EngineDead for everybody.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, release_device: Callable[[], None]) -> None:
        """`release_device` runs last on the thread."""
        self._loop = loop
        self._release_device = release_device
        self._inbox: queue.SimpleQueue[_Submit | _Abort | _Call | _Stop] = queue.SimpleQueue()
        self._handles: list[EngineHandle] = []
        self._works: list[_Work] = []
        self._turns: Turns[EngineHandle | _Work] = Turns()
        self._thread = threading.Thread(target=self._run, name="mlxserve-engine", daemon=True)
        self._closed = threading.Lock()
        self.death: str | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step it is in and wait for it; requests still there get EngineDead."""
        self._inbox.put(_Stop())
        self._thread.join()

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Run a function on the engine thread, between steps."""
        future: Future[T] = Future()
        self._put(_Call(function, future))  # type: ignore[arg-type]
        return future

    def work(self, pieces: Pieces[T]) -> "Future[T]":
        """Do something long on the engine thread, in turns with the steps of engines. Cancelling it ends it early."""
        work = _Work(pieces, Future())
        begun = self.call(partial(self._works.append, work))
        begun.add_done_callback(lambda _: work.give_up(str(begun.exception())) if begun.exception() else None)
        return work.future

    def wake(self) -> None:
        """Let engines that wait for the disk look at its news. Any thread may call it."""
        self.call(lambda: None)

    def add_engine(self, name: str, engine: Engine) -> "Future[EngineHandle]":
        """Let an engine, made on the thread by call(), take its turns from now on."""

        def add() -> EngineHandle:
            handle = EngineHandle(name, engine)
            self._handles.append(handle)
            return handle

        return self.call(add)

    def remove_engine(self, handle: EngineHandle) -> "Future[None]":
        """Take an engine off the thread and forget it. Requests that it still has get EngineDead."""

        def remove() -> None:
            reason = f"{handle.name} was unloaded"
            self._handles = [other for other in self._handles if other is not handle]
            handle.let_go(reason)
            self._tell_all(handle, EngineDead(reason))

        return self.call(remove)

    def submit(self, handle: EngineHandle, request: Request, sink: Sink) -> None:
        self._put(_Submit(handle, request, sink))

    def abort(self, handle: EngineHandle, request_id: str, reason: FinishReason) -> None:
        self._put(_Abort(handle, request_id, reason))

    def _put(self, message: _Submit | _Abort | _Call) -> None:
        # Under the lock a message is either in the inbox before the thread's last look at it, or refused here.
        with self._closed:
            if self.death is None:
                self._inbox.put(message)
                return
        self._refuse(message)

    def _run(self) -> None:
        reason = "the server is stopping"
        try:
            while self._take_messages():
                self._step_some()
        except BaseException as error:
            logger.critical("engine thread died", exc_info=True)
            reason = f"the engine thread died: {type(error).__name__}: {error}"
        finally:
            with self._closed:
                self.death = reason
            self._end(reason)
            self._handles.clear()
            self._works.clear()
            self._release_device()

    def _take_messages(self) -> bool:
        """Handle every message there is, waiting for one when there is nothing to compute. False: stop."""
        arrivals_until = 0.0
        while True:
            with_work = [handle.engine for handle in self._handles if handle.engine.has_work]
            busy = bool(self._works) or any(not engine.is_waiting for engine in with_work)
            if not busy and self._inbox.empty():
                self._check_integrity()
            try:
                message = self._next_message(busy, arrivals_until, WAITING_POLL if with_work else None)
            except queue.Empty:
                return True
            if isinstance(message, _Stop):
                return False
            if not busy:
                arrivals_until = time.monotonic() + ARRIVAL_WINDOW
            self._handle(message)

    def _next_message(
        self, busy: bool, arrivals_until: float, idle_timeout: float | None
    ) -> _Submit | _Abort | _Call | _Stop:
        """Raises queue.Empty: none is there, and it is time to compute."""
        if not busy:
            return self._inbox.get(timeout=idle_timeout)
        remaining = arrivals_until - time.monotonic()
        if remaining > 0 and any(handle.num_arriving for handle in self._handles):
            return self._inbox.get(timeout=remaining)
        return self._inbox.get_nowait()

    def _handle(self, message: _Submit | _Abort | _Call) -> None:
        match message:
            case _Submit(handle, request, sink):
                if handle.death is not None:
                    self._refuse(message)
                    return
                try:
                    handle.engine.add(request)
                except MlxserveError as error:
                    self._deliver([partial(sink, error)])
                else:
                    handle.sinks[request.request_id] = sink
            case _Abort(handle, request_id, reason):
                if handle.death is None:
                    try:
                        outputs = handle.engine.abort(request_id, reason)
                    except Exception as error:
                        self._fail(handle, error)
                    else:
                        self._give_out(handle, outputs)
            case _Call(function, future):
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(function())
                    except BaseException as error:
                        future.set_exception(error)

    def _step_some(self) -> None:
        # Not inlined in _run: a variable that lives on would keep the weights of a dead engine.
        with_work = [handle for handle in self._handles if handle.engine.has_work]
        computing = [handle for handle in with_work if not handle.engine.is_waiting]
        for handle in with_work:
            if handle not in computing:
                self._step(handle)
        contenders: list[EngineHandle | _Work] = [*computing, *self._works]
        if contenders:
            chosen = self._turns.next(contenders)
            began = time.monotonic()
            if isinstance(chosen, EngineHandle):
                self._step(chosen)
            elif not chosen.advance():
                self._works.remove(chosen)
            self._turns.add(chosen, time.monotonic() - began)

    def _step(self, handle: EngineHandle) -> None:
        last = handle.engine.last_record
        try:
            outputs = handle.engine.step()
        except StepFailed as failure:
            self._fail(handle, failure.__cause__ or failure, keep_requests=True)
        except Exception as error:
            self._fail(handle, error)
        else:
            record = handle.engine.last_record
            self._give_out(handle, outputs, record=None if record is last else record)

    def _give_out(
        self,
        handle: EngineHandle,
        outputs: list[RequestOutput],
        failure: EngineError | None = None,
        record: StepRecord | None = None,
    ) -> None:
        """Deliver outputs; `failure` is what a request that ended with ERROR is told, `record` the step they are of."""
        now = time.monotonic()
        deliveries: list[Delivery] = []
        if record is not None:
            deliveries += [partial(step_sink, record) for step_sink in handle.step_sinks]
        step_id = None if record is None else record.step_id
        for output in outputs:
            ended = output.finish_reason is not None
            sink = handle.sinks.pop(output.request_id) if ended else handle.sinks[output.request_id]
            if failure is not None and output.finish_reason is FinishReason.ERROR:
                deliveries.append(partial(sink, failure))
            else:
                deliveries.append(partial(sink, Computed(output, now, step_id)))
        self._deliver(deliveries)

    def _check_integrity(self) -> None:
        for handle in self._handles:
            try:
                handle.engine.check_integrity()
            except Exception as error:
                self._fail(handle, error)

    def _fail(self, handle: EngineHandle, error: BaseException, *, keep_requests: bool = False) -> None:
        """Rebuild an engine and tell the requests that are lost by its failure; one that keeps failing is dead."""
        logger.error("engine of %s failed; rebuilding it", handle.name, exc_info=error)
        cause = f"{type(error).__name__}: {error}"
        ended: list[RequestOutput] = []
        try:
            ended = handle.engine.rebuild(keep_requests=keep_requests)
        except Exception as rebuild_error:
            handle.death = f"the engine of {handle.name} cannot be rebuilt: {rebuild_error}"
            logger.critical("%s", handle.death, exc_info=True)
        num_failures = handle.engine.num_failures_in_a_row
        if handle.death is None and num_failures >= MAX_FAILURES_IN_A_ROW:
            handle.death = f"the engine of {handle.name} failed {num_failures} times in a row; last: {cause}"
            logger.critical("%s", handle.death)
        failure = EngineError(f"the engine failed while computing this request: {cause}")
        self._give_out(handle, ended, failure)
        if handle.death is not None:
            # The memory of its weights is needed when the model is loaded again.
            self._handles = [other for other in self._handles if other is not handle]
            self._tell_all(handle, EngineDead(handle.death))
        elif not keep_requests:
            self._tell_all(handle, failure)

    def _end(self, reason: str) -> None:
        for handle in self._handles:
            self._tell_all(handle, EngineDead(reason))
        for work in self._works:
            work.give_up(reason)
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return
            if not isinstance(message, _Stop):
                self._refuse(message)

    def _refuse(self, message: _Submit | _Abort | _Call) -> None:
        reason = self.death or (message.handle.death if isinstance(message, _Submit) else None) or "stopped"
        match message:
            case _Submit(sink=sink):
                self._deliver([partial(sink, EngineDead(reason))])
            case _Call(future=future):
                if future.set_running_or_notify_cancel():
                    future.set_exception(EngineDead(reason))

    def _tell_all(self, handle: EngineHandle, error: MlxserveError) -> None:
        sinks, handle.sinks = handle.sinks, {}
        self._deliver([partial(sink, error) for sink in sinks.values()])

    def _deliver(self, deliveries: list[Delivery]) -> None:
        if not deliveries:
            return
        try:
            self._loop.call_soon_threadsafe(_call_sinks, deliveries)
        except RuntimeError:
            logger.debug("event loop is closed; %d outputs have no reader", len(deliveries))


def _call_sinks(deliveries: list[Delivery]) -> None:
    for deliver in deliveries:
        deliver()
