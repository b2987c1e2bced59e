"""Models on lease, in simulated time: nobody is forgotten, memory is never overdrawn, and what fails is told."""

import asyncio
import os
import random
from collections import Counter
from pathlib import Path

import pytest
from helpers_clock import simulated

from mlxserve.engine.model_cache import Entry, ModelCache
from mlxserve.engine.residency import Residency, Resident, UnloadReason
from mlxserve.errors import CapacityError, EngineDead, ModelLoadError, ModelNotFound, RequestTimeout
from mlxserve.store.model_source import LocalPath, ModelSource

SEED = int(os.environ.get("MLXSERVE_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
HOUR = 3600.0
KEEP_ALIVE = 300.0
SIZES = {"a": 30, "b": 40, "c": 50, "d": 1000}
"""Of weights."""
KV_BYTES = 10


def source(name: str) -> ModelSource:
    return ModelSource(name, LocalPath(Path(name)))


class Model:
    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.death: str | None = None
        self.num_users = 0


class Store:
    """Loads in ten seconds, unloads in two, and counts what is in memory."""

    def __init__(self, residency: Residency, pinned: tuple[str, ...] = ()) -> None:
        self.residency = residency
        self.pinned = pinned
        self.memory = 0
        self.loads: list[str] = []
        self.unloads: list[tuple[str, UnloadReason]] = []
        self.failures: list[Exception] = []
        """What the next loads raise."""
        self.broken: Exception | None = None

    async def measure(self, source: ModelSource) -> Resident:
        await asyncio.sleep(0.1)
        if source.name not in SIZES:
            raise ModelNotFound("no such file", model=source.name)
        return Resident(source, SIZES[source.name] + KV_BYTES, KEEP_ALIVE, source.name in self.pinned)

    async def load(self, source: ModelSource, resident: Resident) -> Model:
        self.loads.append(source.name)
        weights = SIZES[source.name]
        self._take(weights)
        taken = weights
        try:
            await asyncio.sleep(6.0)
            if self.failures:
                raise self.failures.pop(0)
            kv_bytes = self.residency.kv_share(resident, weights, KV_BYTES)
            assert kv_bytes >= KV_BYTES
            self._take(kv_bytes)
            taken += kv_bytes
            await asyncio.sleep(4.0)
        except BaseException:
            self.memory -= taken
            raise
        return Model(source.name, taken)

    async def unload(self, model: Model, reason: UnloadReason) -> None:
        self.unloads.append((model.name, reason))
        assert model.num_users == 0 or model.death is not None, "somebody uses it"
        await asyncio.sleep(2.0)
        self.memory -= model.size

    def death(self, model: Model) -> str | None:
        return model.death

    def _take(self, size: int) -> None:
        self.memory += size
        assert self.memory <= self.residency.budget, "over budget"


def make(
    budget: int = 100, *, max_models: int | None = None, max_wait: float | None = None, pinned: tuple[str, ...] = ()
) -> tuple[ModelCache[Model], Store]:
    residency = Residency(budget, max_models)
    store = Store(residency, pinned)
    return ModelCache(store, residency, max_wait=max_wait), store


async def use(cache: ModelCache[Model], name: str, seconds: float, keep_alive: float | None = None) -> Entry[Model]:
    entry = await cache.acquire(source(name), keep_alive)
    entry.model.num_users += 1
    try:
        await asyncio.sleep(seconds)
    finally:
        entry.model.num_users -= 1
        cache.release(entry)
    return entry


def names(cache: ModelCache[Model]) -> list[str]:
    return [entry.model.name for entry in cache]


@simulated
async def test_an_idle_model_goes_after_its_keep_alive() -> None:
    cache, store = make()
    await use(cache, "a", 1.0)
    await asyncio.sleep(KEEP_ALIVE - 1)
    assert names(cache) == ["a"]
    await asyncio.sleep(4)
    assert (names(cache), store.memory, store.unloads) == ([], 0, [("a", "expired")])


@simulated
async def test_keep_alive_of_zero_unloads_as_soon_as_nobody_uses_it() -> None:
    cache, store = make()
    long = asyncio.create_task(use(cache, "a", 100.0))
    await use(cache, "a", 1.0, keep_alive=0.0)
    await asyncio.sleep(50)
    assert names(cache) == ["a"]
    await long
    await asyncio.sleep(3)
    assert (names(cache), store.unloads) == ([], [("a", "expired")])


@simulated
async def test_a_negative_keep_alive_is_for_ever_and_yet_makes_room() -> None:
    cache, store = make(100)
    await use(cache, "c", 1.0, keep_alive=-1.0)
    await asyncio.sleep(24 * HOUR)
    assert names(cache) == ["c"]
    await use(cache, "b", 1.0)
    assert store.unloads == [("c", "evicted")]


@simulated
async def test_who_asks_while_a_model_is_unloaded_gets_it_anew() -> None:
    cache, store = make()
    await use(cache, "a", 1.0)
    (entry,) = cache
    unloading = asyncio.create_task(cache.unload(entry))
    await asyncio.sleep(1.0)
    assert store.unloads == [("a", "stopped")]
    assert (await use(cache, "a", 1.0)).model is not entry.model
    await unloading
    assert store.loads == ["a", "a"]


@simulated
async def test_an_unload_waits_for_those_who_use_the_model_and_the_others_for_it() -> None:
    cache, _ = make()
    user = asyncio.create_task(use(cache, "a", 100.0))
    await asyncio.sleep(20)
    (entry,) = cache
    unloading = asyncio.create_task(cache.unload(entry))
    late = asyncio.create_task(use(cache, "a", 1.0))
    await asyncio.sleep(50)
    assert not unloading.done()
    assert not late.done()
    assert (await user).model is not (await late).model
    assert unloading.done()


@simulated
async def test_new_requests_for_a_model_that_must_go_wait_behind_and_load_it_again() -> None:
    cache, store = make(100)
    user = asyncio.create_task(use(cache, "c", 100.0))
    await asyncio.sleep(20)
    other = asyncio.create_task(use(cache, "b", 1.0))
    await asyncio.sleep(1)
    again = [asyncio.create_task(use(cache, "c", 1.0)) for _ in range(3)]
    await asyncio.sleep(50)
    assert [task.done() for task in (user, other, *again)] == [False] * 5
    await asyncio.gather(user, other, *again)
    assert store.loads == ["c", "b", "c"]


@simulated
async def test_a_steady_stream_of_requests_for_one_model_starves_no_other() -> None:
    cache, _ = make(100)
    stop = asyncio.Event()

    async def client() -> None:
        while not stop.is_set():
            await use(cache, "c", 7.0)

    clients = [asyncio.create_task(client()) for _ in range(5)]
    await asyncio.sleep(60)
    async with asyncio.timeout(60):
        await use(cache, "b", 1.0)
    stop.set()
    await asyncio.gather(*clients)


@simulated
async def test_waiting_for_room_ends_with_the_requests_time() -> None:
    cache, _ = make(100, max_wait=30.0)
    user = asyncio.create_task(use(cache, "c", 200.0))
    await asyncio.sleep(20)
    with pytest.raises(RequestTimeout, match=r"made room for b in 30 s"):
        await use(cache, "b", 1.0)
    assert cache._residency.can_lease(next(iter(cache)).resident), "nobody waits for its room any more"
    await use(cache, "c", 1.0)
    await user


@simulated
async def test_a_load_that_takes_longer_is_waited_for() -> None:
    cache, _ = make(max_wait=5.0)
    await use(cache, "a", 1.0)


@pytest.mark.parametrize("after", [0.05, 5.0, 10.1])
@simulated
async def test_a_cancelled_request_leaves_no_lease(after: float) -> None:
    cache, store = make()
    task = asyncio.create_task(cache.acquire(source("a"), None))
    await asyncio.sleep(after)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(20)
    assert sum(entry.resident.num_leases for entry in cache) == 0
    await asyncio.sleep(KEEP_ALIVE)
    assert (names(cache), store.memory) == ([], 0)


@simulated
async def test_a_request_cancelled_in_the_moment_it_is_served_leaves_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, _ = make()
    task = asyncio.create_task(cache.acquire(source("a"), None))
    lease = cache._residency.lease

    def lease_and_cancel(resident: Resident, keep_alive: float | None) -> None:
        lease(resident, keep_alive)
        asyncio.get_running_loop().call_soon(task.cancel)  # Runs before the task goes on.

    monkeypatch.setattr(cache._residency, "lease", lease_and_cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    (entry,) = cache
    assert entry.resident.num_leases == 0


@simulated
async def test_a_failed_load_is_told_to_all_and_tried_again() -> None:
    cache, store = make()
    store.failures.append(ModelLoadError("damaged", model="a"))
    results = await asyncio.gather(*(use(cache, "a", 1.0) for _ in range(3)), return_exceptions=True)
    assert [type(result) for result in results] == [ModelLoadError] * 3
    assert store.memory == 0
    await use(cache, "a", 1.0)


@simulated
async def test_what_cannot_be_loaded_is_told() -> None:
    cache, _ = make(100, pinned=("c",))
    with pytest.raises(ModelNotFound):
        await use(cache, "unknown", 1.0)
    with pytest.raises(ModelLoadError, match="d needs"):
        await use(cache, "d", 1.0)
    await use(cache, "c", 1.0)
    with pytest.raises(CapacityError, match="c, which must stay"):
        await use(cache, "b", 1.0)


@simulated
async def test_a_dead_model_is_replaced_although_its_users_are_not_done() -> None:
    cache, store = make()
    user = asyncio.create_task(use(cache, "a", 1000.0))
    await asyncio.sleep(20)
    (entry,) = cache
    entry.model.death = "out of memory"
    async with asyncio.timeout(20):
        assert (await use(cache, "a", 1.0)).model is not entry.model
    assert store.unloads == [("a", "died")]
    assert cache.deaths == {}
    await user
    assert [each.resident.num_leases for each in cache] in ([0], [])


@pytest.mark.parametrize("after", [0.05, 5.0, 25.0, 61.0], ids=["measuring", "loading", "waiting", "evicting"])
@simulated
async def test_close_answers_everybody(after: float) -> None:
    cache, store = make(100)
    tasks = [asyncio.create_task(use(cache, "c", 50.0))]
    tasks += [asyncio.create_task(use(cache, name, 1.0)) for name in ("b", "c", "a")]
    await asyncio.sleep(after)
    await cache.close()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, EngineDead | Entry)
    assert store.memory == sum(entry.model.size for entry in cache)


@pytest.mark.parametrize(("budget", "max_models"), [(100, None), (140, None), (400, 2), (400, None)])
@simulated
async def test_an_hour_of_random_requests(budget: int, max_models: int | None) -> None:
    print(f"replay with MLXSERVE_TEST_SEED={SEED}")
    rng = random.Random(SEED)
    cache, store = make(budget, max_models=max_models)
    outcomes: Counter[str] = Counter()

    async def client() -> None:
        name, seconds = rng.choice("abc"), rng.expovariate(1 / 8)
        keep_alive = rng.choice([None, None, 0.0, 20.0, -1.0])
        try:
            entry = await use(cache, name, seconds, keep_alive)
            assert entry.model.name == name
            outcomes["served"] += 1
        except ModelLoadError:
            outcomes["refused"] += 1

    async def mischief() -> None:
        while True:
            await asyncio.sleep(rng.uniform(20, 60))
            alive = [entry for entry in cache if entry.model.death is None]
            match rng.choice(["fail", "die", "unload"]):
                case "fail":
                    store.failures.append(ModelLoadError("damaged", model="x"))
                case "die" if alive:
                    rng.choice(alive).model.death = "out of memory"
                case "unload" if alive:
                    await cache.unload(rng.choice(alive))

    troublemaker = asyncio.create_task(mischief())
    loop, clients, cancelled = asyncio.get_running_loop(), [], []
    while loop.time() < HOUR:
        await asyncio.sleep(rng.expovariate(1 / 5))
        clients.append(asyncio.create_task(client()))
        if rng.random() < 0.1:
            loop.call_later(rng.uniform(0, 30), clients[-1].cancel)
            cancelled.append(clients[-1])
    async with asyncio.timeout(HOUR):
        results = await asyncio.gather(*clients, return_exceptions=True)
    troublemaker.cancel()
    errors = [result for result in results if isinstance(result, Exception)]
    assert errors == []
    assert outcomes["served"] > 300
    assert sum(outcomes.values()) >= len(clients) - len(cancelled), "a request was lost"
    assert all(entry.resident.num_leases == 0 for entry in cache)
    # Whoever was cancelled last may have left a load behind that goes on.
    while cache._tasks:  # noqa: ASYNC110 -- simulated time; nothing tells of the last one
        await asyncio.sleep(1)
    for entry in cache:
        await cache.unload(entry)
    assert (store.memory, cache._residency.used) == (0, 0)
    await cache.close()
