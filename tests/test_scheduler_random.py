"""Random loads on a small pool against a fake runner that checks every position read. Failures print their seed."""

import os
import random
from dataclasses import replace

import pytest
from helpers_disk import FakeDisk
from helpers_scheduler import BLOCK_SIZE, VOCABULARY, Driver, make_request, make_scheduler

from mlxserve.core.request import FinishReason, Request, RequestStatus, Speculation
from mlxserve.core.step import ScheduledStep
from mlxserve.errors import ContextLengthExceeded, QueueFull
from mlxserve.kv import disk_tier

MAX_STEPS_IN_SYSTEM = 1_500
SEED = int(os.environ.get("MLXSERVE_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)


@pytest.fixture(autouse=True)
def saves_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load is over too soon for blocks that wait their turn."""
    monkeypatch.setattr(disk_tier, "STEPS_BETWEEN_SAVES", 1)


class RandomLoad:
    """Adds, aborts and steps at random, all of it fixed by the seed."""

    def __init__(self, seed: int, *, num_requests: int, runs_ahead: bool, **fixed: int) -> None:
        self.random = random.Random(seed)
        self.num_requests = num_requests
        self.max_blocks = fixed.pop("max_blocks", self.random.choice([9, 14, 24, 60]))
        settings = {
            "max_num_seqs": self.random.choice([1, 3, 6, 16]),
            "max_prefill_tokens": self.random.choice([5, 16, 40, 200]),
            "max_queue": self.random.choice([2, 20, 60]),
            "enable_prefix_caching": self.random.random() < 0.85,
            "target_itl_ms": self.random.choice([1.0, 20.0, 100.0]),
            "draft_model": self.random.choice([None, "d"]),
        }
        has_disk = fixed.pop("has_disk", self.random.random() < 0.5)
        settings["enable_prefix_caching"] |= has_disk
        settings |= fixed
        self.disk: FakeDisk | None = None
        if has_disk:
            chance_of_loss = self.random.choice([0.0, 0.05, 0.3])
            self.disk = FakeDisk(seed, max_blocks=self.random.choice([5, 1000]), chance_of_loss=chance_of_loss)
        self.scheduler = make_scheduler(self.max_blocks, disk=self.disk, **settings)
        self.driver = Driver(self.scheduler, seed, runs_ahead=runs_ahead, disk=self.disk)
        self.histories: list[list[int]] = [[1, 2, 3]]
        self.first_step: dict[str, int] = {}
        self.last_step: dict[str, int] = {}
        self.num_refused = 0

    def run(self) -> None:
        num_created = 0
        while num_created < self.num_requests:
            # Mostly as fast as they are served, sometimes a crowd that the queue refuses.
            is_busy = self.scheduler.stats().num_waiting > 1
            for _ in range(self.random.choice([0, 0, 0, 0, 0, 0, 3] if is_busy else [0, 1, 1, 2, 6])):
                if num_created < self.num_requests:
                    self.add(self.make_request(f"r{num_created}"))
                    num_created += 1
            self.step()
        while self.scheduler.has_work:
            self.step()

    def make_request(self, request_id: str) -> Request:
        rng = self.random
        history = rng.choice(self.histories[-40:])
        prompt = history[: rng.randrange(len(history) + 1)] if rng.random() < 0.5 else list(history)
        prompt = (prompt + [rng.randrange(VOCABULARY) for _ in range(rng.choice([0, 1, 3, 9, 25]))])[:90] or [1]
        return make_request(
            request_id,
            prompt,
            max_tokens=rng.choice([1, 2, 8, 30]),
            arrival_time=self.driver.now,
            deadline=self.driver.now + rng.choice([0.01, 0.2, 1.0]) if rng.random() < 0.1 else None,
            priority=rng.choice([0, 0, 0, 1, -1, 1000, -1000]),
            cache_salt=rng.choice([None, None, None, "a", "b"]),
            speculation=rng.choice([*Speculation]),
        )

    def add(self, request: Request) -> None:
        try:
            self.driver.add(request)
        except (QueueFull, ContextLengthExceeded) as error:
            self.check_refusal(error)
            self.num_refused += 1
        else:
            self.histories.append(request.token_ids)

    def check_refusal(self, error: QueueFull | ContextLengthExceeded) -> None:
        if isinstance(error, QueueFull):
            assert error.retry_after > 0
            assert self.scheduler.stats().num_waiting >= self.scheduler._config.max_queue
        else:
            assert error.num_tokens > error.limit == (self.max_blocks - 1) * BLOCK_SIZE + 1

    def abort_some(self, chance: float) -> None:
        live = [name for name in self.driver.requests if name not in self.driver.outcomes]
        if live and self.random.random() < chance:
            self.scheduler.abort(self.random.choice(live), FinishReason.CANCELLED)

    def step(self) -> None:
        self.abort_some(0.03)
        if self.disk is not None and self.random.random() < 0.0003:
            self.disk.is_on = False
        streams = [
            request.request_id
            for request in self.driver.requests.values()
            if request.status is RequestStatus.RUNNING and request.num_uncomputed_tokens == 1
        ]
        step = self.driver.step(between=lambda: self.abort_some(0.05))
        if step is not None:
            self.check_step(step, streams)
        self.driver.requests = {k: v for k, v in self.driver.requests.items() if k not in self.driver.outcomes}

    def check_step(self, step: ScheduledStep, streams: list[str]) -> None:
        decoding = {row.request_id for row in step.decode}
        for name in streams:
            assert name in decoding or name in step.released, f"{name} streams and got no row in step {step.step_id}"
        assert len(decoding) == len(step.decode)
        assert step.num_prefill_tokens <= self.scheduler._config.max_prefill_tokens
        for name in decoding | {chunk.request_id for chunk in step.prefill}:
            self.first_step.setdefault(name, step.step_id)
            self.last_step[name] = step.step_id
            assert step.step_id - self.first_step[name] <= MAX_STEPS_IN_SYSTEM, f"{name} starves"


def check(seed: int, *, num_requests: int, runs_ahead: bool, **fixed: int) -> RandomLoad:
    print(f"replay with MLXSERVE_TEST_SEED={seed}")
    load = RandomLoad(seed, num_requests=num_requests, runs_ahead=runs_ahead, **fixed)
    load.run()
    load.driver.check_rows()
    assert len(load.driver.outcomes) + load.num_refused == num_requests
    stats = load.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks_used) == (0, 0, 0)
    if load.disk is not None:
        load.disk.check_empty()
    return load


both_ways = pytest.mark.parametrize("runs_ahead", [False, True], ids=["in step", "one step ahead"])


@both_ways
def test_random_loads_compute_what_each_request_gives_alone(runs_ahead: bool) -> None:
    loads = [check(SEED + i, num_requests=120, runs_ahead=runs_ahead) for i in range(40)]
    # The loads must reach what they are there to test.
    assert sum(load.scheduler.stats().num_preemptions for load in loads) > 0
    assert sum(load.scheduler.stats().num_prefix_hit_tokens for load in loads) > 0
    assert sum(load.driver.runner.num_copied_tokens for load in loads) > 0
    disks = [load.disk for load in loads if load.disk is not None]
    assert 0 < len(disks) < len(loads)
    assert sum(disk.num_loaded for disk in disks) > 0
    assert sum(disk.num_lost for disk in disks) > 0
    assert any(step.saves and step.loads and step.decode for load in loads for step in load.driver.steps)
    assert (sum(load.driver.num_steps_ahead for load in loads) > 0) == runs_ahead
    assert sum(load.scheduler.stats().num_draft_tokens for load in loads) > 0
    assert sum(load.scheduler.stats().num_accepted_tokens for load in loads) > 0
    assert {reason for load in loads for reason in load.driver.outcomes.values()} == {
        FinishReason.STOP,
        FinishReason.LENGTH,
        FinishReason.CANCELLED,
        FinishReason.TIMEOUT,
    }


@both_ways
def test_the_same_seed_gives_the_same_steps(runs_ahead: bool) -> None:
    first, second = (check(SEED, num_requests=150, runs_ahead=runs_ahead) for _ in range(2))
    assert first.driver.steps == second.driver.steps
    assert first.driver.outcomes == second.driver.outcomes


@pytest.mark.slow
@both_ways
def test_nothing_leaks_over_ten_thousand_requests(runs_ahead: bool) -> None:
    # Settings that let it end soon: what it needs is many requests, not hard ones.
    settings = {"max_num_seqs": 6, "max_blocks": 24, "max_prefill_tokens": 200, "max_queue": 20, "has_disk": True}
    load = check(SEED, num_requests=10_000, runs_ahead=runs_ahead, **settings)
    assert load.num_refused < 5_000
    kv = load.scheduler._kv
    assert kv._sequences == {}
    assert kv._computing == {}
    assert load.scheduler._flights == {}
    assert kv._tier is not None
    assert (kv._tier._chains, kv._tier._loading, kv._tier._reading, kv._tier._ready) == ({}, {}, set(), set())
    (group,) = kv._groups
    assert group.pool.num_free + group.pool.num_cached == group.pool.num_blocks - 1


@pytest.mark.slow
@both_ways
def test_many_random_loads(runs_ahead: bool) -> None:
    for i in range(200):
        check(SEED + i, num_requests=200, runs_ahead=runs_ahead)


def test_a_wrong_hit_would_be_caught() -> None:
    """The fake runner itself: a block table that names another sequence's block must fail."""
    driver = Driver(make_scheduler())
    driver.add(make_request("a", range(1, 12)), make_request("b", [5] * 11))
    step = driver.scheduler.schedule(0.0)
    assert step is not None
    driver.runner.run(step)
    row = next(row for row in step.decode if row.request_id == "b")
    stolen = replace(row, block_tables=step.decode[0].block_tables)
    with pytest.raises(AssertionError, match="holds something else"):
        driver.runner.run(replace(step, copies=(), prefill=(), decode=(stolen,)))
