"""How requests end in the scheduler: deadlines, aborts, stop tokens, and steps that failed."""

import math
import random

import pytest
from helpers_scheduler import (
    BLOCK_SIZE,
    NO_EOS,
    Driver,
    chunk_sizes,
    decoding,
    expected_tokens,
    make_kv,
    make_request,
    make_scheduler,
    prompt,
)

from mlxserve.core.request import FinishReason, RequestStatus
from mlxserve.core.step import SampledToken, ScheduledStep, StepResult
from mlxserve.errors import EngineError, QueueFull
from mlxserve.kv.manager import KVManager

# --- ends ---


def test_deadlines_end_waiting_and_running_requests() -> None:
    driver = Driver(make_scheduler(max_num_seqs=1))
    driver.add(
        make_request("running", prompt(20), max_tokens=30, deadline=5.0, **NO_EOS),
        make_request("waiting", prompt(3), deadline=5.0),
    )
    driver.step()
    driver.now = 5.0
    step = driver.step()
    assert driver.outcomes == {"running": FinishReason.TIMEOUT, "waiting": FinishReason.TIMEOUT}
    assert step is not None
    # Only what a runner has heard of is released.
    assert (step.released, step.prefill, step.decode) == (("running",), (), ())
    assert not driver.scheduler.has_work
    assert driver.scheduler.schedule(6.0) is None


def test_abort_in_flight_drops_the_row() -> None:
    driver = Driver(make_scheduler())
    driver.add(make_request("a", prompt(20), **NO_EOS), make_request("b", prompt(9, 300), **NO_EOS))
    driver.step()
    driver.step(between=lambda: driver.scheduler.abort("a", FinishReason.CANCELLED))
    assert driver.outcomes == {"a": FinishReason.CANCELLED}
    assert (len(driver.received["a"]), len(driver.received["b"])) == (1, 2)
    step = driver.step()
    assert step is not None
    assert step.released == ("a",)
    driver.run()


def test_an_id_used_again_in_flight_does_not_get_the_old_row() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", prompt(20)))
    step = scheduler.schedule(0.0)
    assert step is not None
    scheduler.abort("a", FinishReason.CANCELLED)
    again = make_request("a", prompt(5))
    scheduler.add(again)
    runner_result = StepResult(step.step_id, ((SampledToken(7),),), 0.01, 0.01)
    outputs = scheduler.update(step, runner_result, 0.0)
    assert [output.finish_reason for output in outputs] == [FinishReason.CANCELLED]
    assert again.num_output_tokens == 0
    scheduler.check_integrity()


def test_abort_of_unknown_and_ended_requests_does_nothing() -> None:
    driver = Driver(make_scheduler())
    driver.scheduler.abort("nobody", FinishReason.CANCELLED)
    driver.add(make_request("a", prompt(3)))
    driver.run()
    driver.scheduler.abort("a", FinishReason.CANCELLED)
    assert driver.scheduler.take_finished() == []
    assert not driver.scheduler.has_work


def test_stop_tokens_and_eos_end_with_stop() -> None:
    alone = expected_tokens(make_request("a", prompt(9), max_tokens=20, **NO_EOS))
    driver = Driver(make_scheduler())
    driver.add(make_request("a", prompt(9), max_tokens=20, eos_token_ids=frozenset({alone[11]})))
    driver.run()
    assert driver.outcomes == {"a": FinishReason.STOP}
    assert driver.requests["a"].token_ids[-1] == alone[11]


def test_a_result_of_another_step_is_refused() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", prompt(20)))
    step = scheduler.schedule(0.0)
    assert step is not None
    for wrong in (
        StepResult(step.step_id + 1, ((SampledToken(1),),), 0.1, 0.1),
        StepResult(step.step_id, (), 0.1, 0.1),
    ):
        with pytest.raises(EngineError, match="does not belong"):
            scheduler.update(step, wrong, 0.0)
    scheduler.update(step, StepResult(step.step_id, ((SampledToken(1),),), 0.1, 0.1), 0.0)
    with pytest.raises(EngineError, match="does not belong"):
        scheduler.update(step, StepResult(step.step_id, ((SampledToken(1),),), 0.1, 0.1), 0.0)


def test_a_runner_that_keeps_its_own_cache_needs_no_blocks() -> None:
    scheduler = make_scheduler(kv=KVManager([], block_size=BLOCK_SIZE, model_id="m"), max_num_seqs=1)
    assert scheduler.max_total_tokens is None
    request = make_request("a", prompt(500), max_tokens=2, **NO_EOS)
    scheduler.add(request)
    for _ in range(2):
        step = scheduler.schedule(0.0)
        assert step is not None
        assert (step.num_blocks, step.decode[0].block_tables) == ((), ())
        scheduler.update(step, StepResult(step.step_id, ((SampledToken(1),),), 0.1, 0.1), 0.0)
    assert request.finish_reason is FinishReason.LENGTH
    released = scheduler.schedule(0.0)
    assert released is not None
    assert released.released == ("a",)
    assert scheduler.stats().max_blocks == 0


def test_retry_after_follows_how_fast_requests_end() -> None:
    driver = Driver(make_scheduler(max_queue=1, max_num_seqs=1))
    for i in range(12):
        driver.add(make_request(f"r{i}", prompt(3), max_tokens=1))
        driver.run()
        driver.now += 10.0
    driver.add(make_request("next", prompt(3)), make_request("waiting", prompt(3)))
    with pytest.raises(QueueFull) as full:
        driver.add(make_request("refused", prompt(3)))
    assert math.isclose(full.value.retry_after, 10.0, rel_tol=0.2)


def test_a_pool_shared_by_the_whole_kv_is_what_the_stats_say() -> None:
    kv = make_kv(32)
    driver = Driver(make_scheduler(kv=kv))
    driver.add(make_request("a", prompt(20), max_tokens=4, **NO_EOS))
    driver.step()
    stats = driver.scheduler.stats()
    assert (stats.num_running, stats.num_blocks_used, stats.num_blocks_cached, stats.max_blocks) == (1, 3, 0, 32)
    driver.run()
    stats = driver.scheduler.stats()
    assert (stats.num_running, stats.num_blocks_used, stats.num_blocks_cached) == (0, 0, 3)


def test_the_queue_holds_max_queue_requests_beside_those_a_step_can_start() -> None:
    driver = Driver(make_scheduler(max_queue=2, max_num_seqs=3))
    driver.add(*(make_request(f"r{i}", prompt(3, 100 * i), **NO_EOS) for i in range(1, 6)))
    for _ in range(2):
        with pytest.raises(QueueFull):
            driver.add(make_request("refused", prompt(3)))
        driver.step()
    assert (driver.scheduler.stats().num_running, driver.scheduler.stats().num_waiting) == (3, 2)


# --- a step that failed ---


def fail_step(driver: Driver, *, max_blocks: int = 64, **settings: object) -> ScheduledStep:
    """Give out a step that never runs, and go on with another scheduler and an empty cache."""
    step = driver.scheduler.schedule(driver.now)
    assert step is not None
    scheduler = make_scheduler(max_blocks, **settings)
    driver.collect(scheduler.take_over(driver.scheduler))
    driver.scheduler = scheduler
    driver.runner.blocks.clear()
    scheduler.check_integrity()
    return step


def test_the_requests_of_a_failed_step_end_and_all_others_are_computed_anew() -> None:
    settings = {"max_num_seqs": 3, "max_prefill_tokens": 40, "target_itl_ms": 1.0}
    driver = Driver(make_scheduler(**settings))
    stream = make_request("stream", prompt(3), max_tokens=20, **NO_EOS)
    chunk = make_request("chunk", prompt(60, 200), max_tokens=9, **NO_EOS)
    running = make_request("running", prompt(60, 300), max_tokens=9, **NO_EOS)
    waiting = make_request("waiting", prompt(9, 400), max_tokens=9, **NO_EOS)
    driver.add(stream, chunk, running, waiting)
    driver.step()
    step = fail_step(driver, **settings)
    assert (decoding(step), chunk_sizes(step).keys()) == (["stream"], {"chunk"})
    assert driver.outcomes == {"stream": FinishReason.ERROR, "chunk": FinishReason.ERROR}
    assert stream.status is chunk.status is RequestStatus.FINISHED
    assert (running.status, running.num_computed_tokens) == (RequestStatus.WAITING, 0)
    following = driver.step()
    assert following is not None
    assert following.step_id == step.step_id + 1
    assert [piece.start for piece in following.prefill] == [0, 0]
    driver.run()
    assert driver.outcomes["running"] is driver.outcomes["waiting"] is FinishReason.LENGTH


def test_an_answer_goes_on_where_it_was_when_another_step_failed() -> None:
    driver = Driver(make_scheduler(10, max_num_seqs=4))
    old = make_request("old", prompt(30), max_tokens=40, **NO_EOS)
    answered = make_request("answered", prompt(20, 200), max_tokens=20, seed=7, **NO_EOS)
    driver.add(old, answered)
    while answered.num_preemptions == 0:
        driver.step()
    before = driver.scheduler.stats()
    received, first_scheduled = list(driver.received["answered"]), answered.first_scheduled_time
    assert len(received) > 1
    fail_step(driver, max_blocks=10, max_num_seqs=4)
    driver.add(make_request("newest", prompt(3, 300), priority=-5))
    step = driver.step()
    assert step is not None
    # The tokens it had are prefilled with its prompt, and the next random number is the one that was due.
    row = next(row for row in step.decode if row.request_id == "answered")
    assert (row.start, row.output_index, row.seed) == (20 + len(received) - 1, len(received), 7)
    assert next(iter(chunk_sizes(step))) == "answered"
    driver.run()
    assert driver.received["answered"][: len(received)] == received
    assert (driver.outcomes["answered"], driver.outcomes["old"]) == (FinishReason.LENGTH, FinishReason.ERROR)
    assert (answered.first_scheduled_time, answered.num_cached_tokens) == (first_scheduled, 0)
    after = driver.scheduler.stats()
    assert after.num_steps > before.num_steps
    assert after.num_preemptions == before.num_preemptions
    assert after.num_prefix_queried_tokens == before.num_prefix_queried_tokens + 3


def test_what_ended_before_a_failed_step_is_told_so() -> None:
    driver = Driver(make_scheduler(max_num_seqs=1))
    driver.add(make_request("a", prompt(20)), make_request("late", prompt(9), deadline=1.0))
    driver.now = 1.0
    fail_step(driver, max_num_seqs=1)
    assert driver.outcomes == {"a": FinishReason.ERROR, "late": FinishReason.TIMEOUT}
    assert not driver.scheduler.has_work


def test_a_load_with_failing_steps_computes_what_each_request_gives_alone() -> None:
    seed = random.randrange(2**32)
    print(f"{seed=}")
    rng = random.Random(seed)
    ends_of_survivors = set()
    for _ in range(30):
        survivors: set[str] = set()
        max_blocks = rng.choice([9, 14, 30])
        settings = {"max_num_seqs": rng.choice([1, 3, 8]), "max_prefill_tokens": rng.choice([5, 20, 100])}
        driver = Driver(make_scheduler(max_blocks, **settings), seed)
        for i in range(20):
            driver.add(make_request(f"r{i}", [rng.randrange(12) for _ in range(rng.choice([1, 9, 40]))], max_tokens=9))
            for _ in range(rng.choice([0, 2])):
                driver.step()
            if driver.scheduler.has_work and rng.random() < 0.3:
                fail_step(driver, max_blocks=max_blocks, **settings)
                survivors.update(name for name in driver.requests if name not in driver.outcomes)
        driver.run()
        assert len(driver.outcomes) == 20
        ends_of_survivors.update(driver.outcomes[name] for name in survivors)
    assert {FinishReason.STOP, FinishReason.LENGTH} <= ends_of_survivors
