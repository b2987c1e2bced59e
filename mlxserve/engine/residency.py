"""Who may be in memory: the books of the model host. No asyncio, no MLX, and no clock: the time comes with each call.

| state   | memory counts | leases | leaves it by                                           |
|---------|---------------|--------|--------------------------------------------------------|
| WAITING | no            | none   | Load, when it is first in line and there is room       |
| LOADING | yes           | none   | loaded(), or gone() when the load failed               |
| LOADED  | yes           | any    | Unload, once nobody has it on lease                    |
| LEAVING | yes           | none   | gone(), when its memory is free                        |

Who needs room comes first come first served. For the first in line, models go that nobody uses, the least recently used
one first, and, where these are not enough, as soon as those who use them are done. From the moment one is chosen nobody
else gets it, so it is done some time, however many ask for it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from mlxserve.errors import CapacityError, MlxserveError, ModelLoadError
from mlxserve.store.model_source import Location, ModelSource, Weights

UnloadReason = Literal["expired", "evicted", "stopped", "died"]


class State(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    LOADED = "loaded"
    LEAVING = "leaving"


@dataclass(slots=True, eq=False, weakref_slot=True)
class Resident:
    """One model that is in memory, or on its way in or out."""

    source: ModelSource
    """As the name has it that it was first asked for by."""
    size: int
    """Bytes of weights that are its own and of its KV cache at most: an estimate until it is loaded."""
    keep_alive: float
    """Seconds it stays after its last lease; negative: until there is need for its memory."""
    is_pinned: bool = False
    """It goes only when somebody says so."""
    state: State = State.WAITING
    num_leases: int = 0
    last_used: float = 0.0
    is_new: bool = True
    """Nobody had it yet since it was loaded: who waited for it gets it, whoever needs its room by now."""
    is_stopping: bool = False
    """It is to go as soon as nobody uses it."""
    shared_size: int = 0
    """Bytes of weights beside `size` that it has together with all others of its location."""

    @property
    def expires_at(self) -> float | None:
        """When it goes if nobody asks for it; None while it is in use, and for one that stays."""
        stays = self.num_leases > 0 or self.is_pinned or self.keep_alive < 0
        return None if stays else self.last_used + self.keep_alive


@dataclass(frozen=True, slots=True)
class Load:
    resident: Resident


@dataclass(frozen=True, slots=True)
class Unload:
    resident: Resident
    reason: UnloadReason


@dataclass(frozen=True, slots=True)
class Refuse:
    """It can not be loaded, now or ever; it is forgotten."""

    resident: Resident
    error: MlxserveError


Action = Load | Unload | Refuse


class Residency:
    """What is done about it is the caller's business: next_action() until there is none, after each change."""

    def __init__(self, budget: int, max_models: int | None = None) -> None:
        """`budget`: bytes of all models together. `max_models`: how many of them at most; None: as many as fit."""
        self.budget = budget
        self.max_models = max_models
        self._residents: dict[Weights, Resident] = {}
        """In the order in which they were asked for."""

    def __iter__(self) -> Iterator[Resident]:
        return iter(self._residents.values())

    @property
    def used(self) -> int:
        """Bytes that are taken, or promised to a load."""
        return _num_bytes(self._in_memory())

    def find(self, weights: Weights) -> Resident | None:
        return self._residents.get(weights)

    def want(self, resident: Resident) -> None:
        """Put a model into the line of those that wait for room."""
        self._residents[resident.source.weights] = resident

    def withdraw(self, resident: Resident) -> None:
        """Nobody waits for it any more. One whose load has begun is loaded all the same."""
        if resident.state is State.WAITING:
            self._forget(resident)

    def kv_share(self, resident: Resident, weight_bytes: int, useful_bytes: int, most_bytes: int | None = None) -> int:
        """Bytes for the KV cache of a model being loaded, which are its own from now on.

        `weight_bytes`: of its weights without those that are shared.
        With `max_models`, each model gets an equal part of the budget, its weights included: so one that comes in the
        place of another finds the room that this one had. Else it gets half of what the weights leave. If that is less
        than `useful_bytes`, it is those, or all there is; if it is more than `most_bytes`, it is those.
        """
        room = max(0, self.budget - self.used + resident.size - weight_bytes)
        if self.max_models is None:
            part = room // 2
        else:
            location = resident.source.location
            sharing = any(each is not resident and each.source.location == location for each in self._in_memory())
            part = self.budget // self.max_models - weight_bytes - (0 if sharing else resident.shared_size)
        share = min(room, max(useful_bytes, part))
        if most_bytes is not None:
            share = min(share, most_bytes)
        resident.size = weight_bytes + share
        return share

    def loaded(self, resident: Resident, now: float) -> None:
        resident.state = State.LOADED
        resident.last_used = now

    def gone(self, resident: Resident) -> None:
        """Its memory is free again."""
        self._forget(resident)

    def can_lease(self, resident: Resident) -> bool:
        """Whether somebody new may have it: it is there, and not about to go."""
        if resident.state is not State.LOADED or resident.is_stopping:
            return False
        # Else two models that both have requests could evict one another in turns, and serve none of them.
        return resident.is_new or resident not in self._victims()

    def lease(self, resident: Resident, keep_alive: float | None) -> None:
        """`keep_alive` None: what was said before."""
        resident.num_leases += 1
        resident.is_new = False
        if keep_alive is not None:
            resident.keep_alive = keep_alive

    def release(self, resident: Resident, now: float) -> None:
        resident.num_leases -= 1
        resident.last_used = now

    def stop(self, resident: Resident) -> None:
        """Let it go as soon as nobody uses it."""
        resident.is_stopping = True

    def drop(self, resident: Resident) -> "Unload":
        """It computes nothing any more: let it go at once, whoever has it on lease."""
        resident.state = State.LEAVING
        return Unload(resident, "died")

    def next_expiry(self) -> float | None:
        """When next_action() must be called even if nothing happens."""
        times = [each.expires_at for each in self._residents.values() if each.state is State.LOADED]
        return min((time for time in times if time is not None), default=None)

    def next_action(self, now: float) -> Action | None:
        """What is to be done now; the books say already that it is under way."""
        for each in self._residents.values():
            if each.state is State.LOADED and each.num_leases == 0 and (reason := self._reason_to_go(each, now)):
                each.state = State.LEAVING
                return Unload(each, reason)
        head = self._head
        if head is None:
            return None
        if (error := self._never(head)) is not None:
            self._forget(head)
            return Refuse(head, error)
        if self._fits(head, lambda _: True):
            head.state = State.LOADING
            return Load(head)
        victim = next((each for each in self._victims() if each.num_leases == 0), None)
        if victim is None:
            return None
        victim.state = State.LEAVING
        return Unload(victim, "evicted")

    @property
    def _head(self) -> Resident | None:
        return next((each for each in self._residents.values() if each.state is State.WAITING), None)

    def _in_memory(self) -> list[Resident]:
        return [each for each in self._residents.values() if each.state is not State.WAITING]

    def _forget(self, resident: Resident) -> None:
        weights = resident.source.weights
        if self._residents.get(weights) is resident:
            del self._residents[weights]

    def _reason_to_go(self, resident: Resident, now: float) -> UnloadReason | None:
        if resident.is_stopping:
            return "stopped"
        expires_at = resident.expires_at
        return "expired" if expires_at is not None and expires_at <= now else None

    def _fits(self, head: Resident, stays: Callable[[Resident], bool]) -> bool:
        """Whether it fits beside those of the others that stay."""
        staying = [each for each in self._in_memory() if stays(each)]
        if self.max_models is not None and len(staying) >= self.max_models:
            return False
        return _num_bytes([*staying, head]) <= self.budget

    def _victims(self) -> list[Resident]:
        """Who must go for the first in line, besides those on their way out; those that can go at once come first."""
        head = self._head
        if head is None:
            return []
        candidates = [each for each in self._in_memory() if each.state is State.LOADED and not each.is_pinned]
        candidates.sort(key=lambda each: (each.num_leases > 0, each.last_used))
        going = [each for each in self._in_memory() if each.state is State.LEAVING]
        victims: list[Resident] = []
        while candidates and not self._fits(head, lambda each: each not in going and each not in victims):
            victims.append(candidates.pop(0))
        return victims

    def _never(self, head: Resident) -> MlxserveError | None:
        """Why it cannot be loaded, whoever goes."""
        if self._fits(head, lambda each: each.is_pinned and each.state is not State.LEAVING):
            return None
        size = _num_bytes([head])
        needed = f"{head.source.name} needs {_gigabytes(size)} for its weights and the smallest useful KV cache"
        if size > self.budget:
            return ModelLoadError(
                f"{needed}, and models may take {_gigabytes(self.budget)} here: choose a smaller model or more "
                "quantisation, or raise memory_budget",
                model=head.source.name,
            )
        pinned = [each for each in self._in_memory() if each.is_pinned]
        names = ", ".join(each.source.name for each in pinned)
        taken = f"{_gigabytes(_num_bytes(pinned))} of {_gigabytes(self.budget)}"
        limit = "" if self.max_models is None else f", of {self.max_models} models at most"
        return CapacityError(
            f"{needed}, and {names}, which must stay (pin), take {taken}{limit}: unload one of them, or pin fewer"
        )


def _num_bytes(residents: Iterable[Resident]) -> int:
    """That they take together: what those of one location share counts once."""
    shared: dict[Location, int] = {}
    own = 0
    for each in residents:
        own += each.size
        location = each.source.location
        shared[location] = max(shared.get(location, 0), each.shared_size)
    return own + sum(shared.values())


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
