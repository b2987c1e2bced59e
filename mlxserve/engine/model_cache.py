"""Models on lease: whoever asks for one waits until it is in memory. Event loop only.

Who may be in memory is for engine.residency to say; what loading and unloading are is for the `ModelStore`.
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from mlxserve.engine.residency import Action, Load, Refuse, Residency, Resident, State, Unload, UnloadReason
from mlxserve.errors import EngineDead, RequestTimeout
from mlxserve.store.model_source import ModelSource, Weights

logger = logging.getLogger(__name__)

M = TypeVar("M")


class ModelStore(Protocol[M]):
    """Where models come from and go to. What it raises is told to all who wait for the model."""

    async def measure(self, source: ModelSource) -> Resident:
        """Find the files and tell what the model will take."""
        ...

    async def load(self, source: ModelSource, resident: Resident) -> M:
        """Load it. It may change the resident's size to one for which there is room."""
        ...

    async def unload(self, model: M, reason: UnloadReason) -> None:
        """Give its memory back."""
        ...

    def death(self, model: M) -> str | None:
        """Why it computes nothing any more; None while it is well."""
        ...


@dataclass(slots=True, eq=False)
class Entry(Generic[M]):
    """A model in memory."""

    resident: Resident
    model: M
    gone: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class _Waiter(Generic[M]):
    source: ModelSource
    keep_alive: float | None
    entry: "asyncio.Future[Entry[M]]"


class ModelCache(Generic[M]):
    """Everyone who acquires a model gets it or an error, in the order of residency; nobody is forgotten."""

    def __init__(self, store: ModelStore[M], residency: Residency, *, max_wait: float | None = None) -> None:
        """`max_wait`: seconds that somebody waits at most for others to make room; None: no limit."""
        self._store = store
        self._residency = residency
        self._max_wait = max_wait
        self._entries: dict[Weights, Entry[M]] = {}
        self._waiters: dict[Weights, list[_Waiter[M]]] = {}
        self._tasks: dict[Weights, asyncio.Task[None]] = {}
        """What is under way with a model: it is measured, loaded or unloaded."""
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self.deaths: dict[Weights, str] = {}
        """Models that died and were not loaded again since."""

    def __iter__(self) -> Iterator[Entry[M]]:
        """The models in memory, those on their way out included, the one loaded first first."""
        return iter(list(self._entries.values()))

    def find(self, weights: Weights) -> Entry[M] | None:
        return self._entries.get(weights)

    async def acquire(self, source: ModelSource, keep_alive: float | None) -> Entry[M]:
        """The model, until release().

        Raises:
            RequestTimeout: nobody made room for it in time.
            EngineDead: the cache was closed.
            Exception: whatever the store raised.
        """
        loop = asyncio.get_running_loop()
        waiter: _Waiter[M] = _Waiter(source, keep_alive, loop.create_future())
        self._waiters.setdefault(source.weights, []).append(waiter)
        timer = None if self._max_wait is None else loop.call_later(self._max_wait, self._expire, waiter)
        self.advance()
        try:
            return await waiter.entry
        except asyncio.CancelledError:
            self._leave(waiter)
            if waiter.entry.done() and not waiter.entry.cancelled() and waiter.entry.exception() is None:
                self.release(waiter.entry.result())
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def release(self, entry: Entry[M]) -> None:
        self._residency.release(entry.resident, self._now())
        self.advance()

    async def unload(self, entry: Entry[M]) -> None:
        """Wait until those who use a model are done and it is gone; who asks for it meanwhile gets it anew."""
        self._residency.stop(entry.resident)
        self.advance()
        await entry.gone.wait()

    def advance(self) -> None:
        """Bring everything up to date after a change: serve who waits, begin what is to be done, set the timer."""
        if self._is_closed:
            return
        for weights, waiters in list(self._waiters.items()):
            self._serve(weights, waiters)
        while (action := self._residency.next_action(self._now())) is not None:
            self._begin(action)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        expiry = self._residency.next_expiry()
        if expiry is not None:
            self._timer = asyncio.get_running_loop().call_at(expiry, self.advance)

    async def close(self) -> None:
        """Tell everybody who waits, give up loads, and let models on their way out go."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for weights in list(self._waiters):
            self._fail(weights, EngineDead("the server is stopping"))
        tasks = list(self._tasks.items())
        for weights, task in tasks:
            if weights not in self._entries:
                task.cancel()
        await asyncio.gather(*(task for _, task in tasks), return_exceptions=True)
        for entry in self._entries.values():
            entry.gone.set()

    def _serve(self, weights: Weights, waiters: list[_Waiter[M]]) -> None:
        """Give them what is there, or see to it that it will be."""
        entry, resident = self._entries.get(weights), self._residency.find(weights)
        if entry is not None and entry.resident.state is State.LOADED and self._store.death(entry.model) is not None:
            # Whoever has it on lease has been told, and gets nothing more of it.
            self._begin(self._residency.drop(entry.resident))
        elif entry is not None and self._residency.can_lease(entry.resident):
            del self._waiters[weights]
            for waiter in waiters:
                if not waiter.entry.done():
                    self._residency.lease(entry.resident, waiter.keep_alive)
                    waiter.entry.set_result(entry)
        elif resident is None and weights not in self._tasks:
            self._spawn(weights, self._measure(weights, waiters[0].source))

    def _begin(self, action: Action) -> None:
        match action:
            case Load(resident):
                self._spawn(resident.source.weights, self._load(resident))
            case Unload(resident, reason):
                entry = self._entries[resident.source.weights]
                if (death := self._store.death(entry.model)) is not None:
                    self.deaths[resident.source.weights] = death
                self._spawn(resident.source.weights, self._unload(entry, reason))
            case Refuse(resident, error):
                self._fail(resident.source.weights, error)

    def _spawn(self, weights: Weights, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks[weights] = task

        def done(_: asyncio.Task[None]) -> None:
            if self._tasks.get(weights) is task:
                del self._tasks[weights]
            self.advance()

        task.add_done_callback(done)

    async def _measure(self, weights: Weights, source: ModelSource) -> None:
        try:
            resident = await self._store.measure(source)
        except Exception as error:
            self._fail(weights, error)
            return
        if self._waiters.get(weights):
            self._residency.want(resident)

    async def _load(self, resident: Resident) -> None:
        weights = resident.source.weights
        try:
            model = await self._store.load(resident.source, resident)
        except BaseException as error:
            self._residency.gone(resident)
            if isinstance(error, Exception):
                self._fail(weights, error)
                return
            raise
        self.deaths.pop(weights, None)
        self._entries[weights] = Entry(resident, model)
        self._residency.loaded(resident, self._now())

    async def _unload(self, entry: Entry[M], reason: UnloadReason) -> None:
        try:
            await self._store.unload(entry.model, reason)
        except Exception:
            logger.exception("%s could not be unloaded as it should", entry.resident.source.name)
        finally:
            self._residency.gone(entry.resident)
            del self._entries[entry.resident.source.weights]
            entry.gone.set()

    def _leave(self, waiter: _Waiter[M]) -> None:
        """Somebody does not wait any more."""
        weights = waiter.source.weights
        waiters = self._waiters.get(weights, [])
        if waiter in waiters:
            waiters.remove(waiter)
            if not waiters:
                del self._waiters[weights]
                if (resident := self._residency.find(weights)) is not None:
                    self._residency.withdraw(resident)
                self.advance()

    def _expire(self, waiter: _Waiter[M]) -> None:
        resident = self._residency.find(waiter.source.weights)
        # A load that has begun is waited for: the time of a request counts from when its model is there.
        if waiter.entry.done() or (resident is not None and resident.state is State.LOADING):
            return
        name = waiter.source.name
        waiter.entry.set_exception(
            RequestTimeout(f"no other model made room for {name} in {self._max_wait:g} s; try again, or unload one")
        )
        self._leave(waiter)

    def _fail(self, weights: Weights, error: Exception) -> None:
        """Tell everybody who waits for a model that it cannot be had."""
        for waiter in self._waiters.pop(weights, []):
            if not waiter.entry.done():
                waiter.entry.set_exception(error)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
