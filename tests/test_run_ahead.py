"""One step ahead: each step is given to the device before the result of the one before it is looked at."""

import pickle
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from helpers_arrivals import serve
from helpers_scheduler import BLOCK_SIZE, Driver, FakeRunner, Started, expected_tokens, make_request, make_scheduler

from mlxserve.core.request import FinishReason, Request
from mlxserve.core.step import SampledToken, ScheduledStep, StepResult
from mlxserve.engine.engine import Engine
from mlxserve.scheduler.scheduler import Scheduler

NO_EOS = {"eos_token_ids": frozenset()}


def prompt(length: int, first: int = 100) -> list[int]:
    return list(range(first, first + length))


def stream(request_id: str, length: int = 9, *, max_tokens: int = 30, **fields: object) -> Request:
    """A request that ends by length, with a prompt of its own."""
    return make_request(request_id, prompt(length, 100 * ord(request_id[0])), max_tokens=max_tokens, **NO_EOS | fields)


def given_out(scheduler: Scheduler, now: float = 0.0) -> ScheduledStep:
    step = scheduler.schedule(now)
    assert step is not None
    return step


def with_streams(*requests: Request, max_blocks: int = 64, runs_ahead: bool = False, **settings: object) -> Driver:
    """A driver whose requests all got their first token."""
    driver = Driver(make_scheduler(max_blocks, **settings), runs_ahead=runs_ahead)
    driver.add(*requests)
    driver.step()
    return driver


def result_of(step: ScheduledStep, token_id: int = 7) -> StepResult:
    return StepResult(step.step_id, ((SampledToken(token_id),),) * len(step.decode), 0.0, 0.01)


# --- what the scheduler gives out ---


def test_a_step_ahead_goes_on_one_token_after_the_step_before() -> None:
    a, b = stream("a", seed=5), stream("b", 15, seed=6)
    scheduler = with_streams(a, b).scheduler
    step = given_out(scheduler)
    ahead = scheduler.schedule_ahead(step, 0.0)
    assert ahead is not None
    assert (ahead.step_id, ahead.copies, ahead.prefill, ahead.released) == (step.step_id + 1, (), (), ())
    assert pickle.loads(pickle.dumps(ahead)) == ahead
    for row, before in zip(ahead.decode, step.decode, strict=True):
        assert row.token_id is None
        assert (row.request_id, row.seed, row.sampling) == (before.request_id, before.seed, before.sampling)
        assert (row.start, row.output_index) == (before.start + 1, before.output_index + 1)
        assert row.start < len(row.block_tables[0]) * BLOCK_SIZE
    # b crosses into its third block, which the step before had no need of.
    assert (len(step.decode[1].block_tables[0]), len(ahead.decode[1].block_tables[0])) == (2, 3)
    scheduler.check_integrity()
    scheduler.update(step, result_of(step), 0.0)
    scheduler.update(ahead, result_of(ahead), 0.0)
    assert a.token_ids[-2:] == b.token_ids[-2:] == [7, 7]


def test_a_step_with_a_chunk_is_waited_for() -> None:
    scheduler = make_scheduler(max_prefill_tokens=16)
    scheduler.add(stream("a", 40))
    assert scheduler.schedule_ahead(given_out(scheduler), 0.0) is None


def test_who_could_start_is_waited_for_and_who_could_not_is_not() -> None:
    for max_num_seqs, is_ahead in ((2, False), (1, True)):
        driver = with_streams(stream("a"), max_num_seqs=max_num_seqs)
        step = given_out(driver.scheduler)
        driver.scheduler.add(stream("b"))
        assert (driver.scheduler.schedule_ahead(step, 0.0) is not None) == is_ahead


@pytest.mark.parametrize("late", ["running", "waiting"])
def test_a_passed_deadline_is_waited_for(late: str) -> None:
    deadlines = {"running": None, "waiting": None} | {late: 5.0}
    driver = with_streams(stream("a", deadline=deadlines["running"]), max_num_seqs=1)
    driver.scheduler.add(stream("b", deadline=deadlines["waiting"]))
    step = given_out(driver.scheduler)
    assert driver.scheduler.schedule_ahead(step, 5.0) is None
    assert driver.scheduler.schedule_ahead(step, 4.9) is not None


def test_a_lack_of_blocks_is_waited_for_and_ends_in_preemption() -> None:
    # Six blocks: three for each, and the fourth of either is not there.
    a, b = stream("a"), stream("b")
    driver = with_streams(a, b, max_blocks=7, runs_ahead=True)
    while b.num_preemptions == 0:
        is_ahead = driver.in_flight is not None
        assert is_ahead == (BLOCK_SIZE + 2 < b.num_tokens <= 3 * BLOCK_SIZE)
        driver.step()
    assert not is_ahead
    driver.run()
    driver.check_rows()
    assert a.num_preemptions == 0


def test_what_reaches_its_length_is_not_computed_again() -> None:
    driver = with_streams(stream("a", max_tokens=2), stream("b", max_tokens=3))
    step = given_out(driver.scheduler)
    ahead = driver.scheduler.schedule_ahead(step, 0.0)
    assert ahead is not None
    assert [row.request_id for row in ahead.decode] == ["b"]
    driver.scheduler.update(step, result_of(step), 0.0)
    # Now the last row of all is under way.
    assert driver.scheduler.schedule_ahead(ahead, 0.0) is None


def test_an_end_found_late_costs_one_row() -> None:
    alone = expected_tokens(stream("a", BLOCK_SIZE, max_tokens=40))
    # The last token opens a block, which the discarded row writes to.
    eos = next(i for i in range(2 * BLOCK_SIZE, len(alone), BLOCK_SIZE) if alone[i] not in alone[BLOCK_SIZE:i])
    a = stream("a", BLOCK_SIZE, max_tokens=40, eos_token_ids=frozenset({alone[eos]}))
    driver = Driver(make_scheduler(), runs_ahead=True)
    driver.add(a)
    while not driver.outcomes:
        driver.step()
    assert driver.outcomes == {"a": FinishReason.STOP}
    assert driver.runner.num_rows["a"] == a.num_output_tokens + 1
    # Its blocks are free at once; the step in flight is still to come in.
    assert driver.scheduler.stats().num_blocks_used == 0
    assert driver.in_flight is not None
    assert driver.scheduler.has_work
    driver.run()
    assert driver.in_flight is None
    assert driver.steps[-1].released == ("a",)
    # What the discarded row wrote does not answer for anything.
    again = make_request("again", [*a.token_ids, 300, 301])
    driver.add(again)
    driver.run()
    assert again.num_cached_tokens == a.num_tokens - 1


def test_a_freed_block_is_taken_while_the_discarded_row_that_writes_to_it_is_under_way() -> None:
    """The row that takes the block comes after the discarded one, in the order of the device."""
    alone = expected_tokens(stream("a", BLOCK_SIZE - 1, max_tokens=2))
    assert alone[-1] != alone[-2]
    # Both have two blocks of the four there are when a ends; b's next position needs the one that a has just opened.
    a = stream("a", BLOCK_SIZE - 1, max_tokens=20, eos_token_ids=frozenset(alone[-1:]))
    b = stream("b", 2 * BLOCK_SIZE - 2, max_tokens=12)
    driver = with_streams(a, b, max_blocks=5, runs_ahead=True)
    driver.step()
    assert driver.outcomes == {"a": FinishReason.STOP}
    assert driver.in_flight is not None
    discarded, _ = driver.in_flight[0].decode
    driver.step()
    assert driver.in_flight is not None
    (row,) = driver.in_flight[0].decode
    assert (discarded.request_id, discarded.start, row.request_id, row.start) == ("a", BLOCK_SIZE, "b", 2 * BLOCK_SIZE)
    assert discarded.block_tables[0][-1] == row.block_tables[0][-1]
    driver.run()
    assert driver.outcomes["b"] is FinishReason.LENGTH


def test_abort_of_a_request_in_both_steps() -> None:
    driver = with_streams(stream("a"), stream("b"), runs_ahead=True)
    driver.step()
    assert driver.in_flight is not None
    driver.step(between=lambda: driver.scheduler.abort("a", FinishReason.CANCELLED))
    assert driver.outcomes == {"a": FinishReason.CANCELLED}
    assert driver.in_flight is not None
    assert [row.request_id for row in driver.in_flight[0].decode] == ["a", "b"]
    assert driver.scheduler.stats().num_running == 1
    driver.step()
    assert driver.in_flight is not None
    assert (driver.in_flight[0].released, len(driver.in_flight[0].decode)) == (("a",), 1)
    driver.run()
    driver.check_rows()
    assert driver.runner.num_rows["a"] == len(driver.received["a"]) + 2
    assert driver.scheduler.stats().num_blocks_used == 0


def test_an_id_used_again_gets_neither_of_the_old_rows() -> None:
    scheduler = with_streams(stream("a"), stream("b")).scheduler
    step = given_out(scheduler)
    ahead = scheduler.schedule_ahead(step, 0.0)
    assert ahead is not None
    scheduler.abort("a", FinishReason.CANCELLED)
    again = make_request("a", prompt(3, 5000))
    scheduler.add(again)
    outputs = [output for taken in (step, ahead) for output in scheduler.update(taken, result_of(taken), 0.0)]
    assert [(output.request_id, not output.tokens) for output in outputs] == [
        ("a", True),
        ("b", False),
        ("b", False),
    ]
    assert (again.num_output_tokens, again.finish_reason) == (0, None)
    assert given_out(scheduler).prefill[0].token_ids == tuple(again.token_ids[:-1])


def test_work_is_left_until_the_last_flight_is_in() -> None:
    scheduler = with_streams(stream("a")).scheduler
    step = given_out(scheduler)
    ahead = scheduler.schedule_ahead(step, 0.0)
    assert ahead is not None
    scheduler.abort("a", FinishReason.CANCELLED)
    scheduler.update(step, result_of(step), 0.0)
    released = given_out(scheduler)
    assert released.released == ("a",)
    scheduler.update(released, result_of(released), 0.0)
    assert scheduler.has_work
    assert scheduler.schedule(0.0) is None
    assert scheduler.update(ahead, result_of(ahead), 0.0) == []
    assert not scheduler.has_work


def test_take_over_ends_what_stood_in_either_step_once_and_keeps_the_rest() -> None:
    ends_late, goes_on, waits = stream("a"), stream("b"), stream("c")
    driver = with_streams(ends_late, goes_on, waits, max_num_seqs=2)
    failed = driver.scheduler
    step = given_out(failed)
    ahead = failed.schedule_ahead(step, 0.0)
    assert ahead is not None
    # What ended with the first step is not lost with the second.
    ends_late.eos_token_ids = frozenset({7})
    outputs = failed.update(step, result_of(step), 0.0)
    assert [(output.request_id, output.finish_reason) for output in outputs] == [("a", FinishReason.STOP), ("b", None)]
    scheduler = make_scheduler(max_num_seqs=2)
    outputs = scheduler.take_over(failed)
    assert [(output.request_id, output.finish_reason) for output in outputs] == [("b", FinishReason.ERROR)]
    scheduler.check_integrity()
    step = given_out(scheduler)
    assert step.step_id == ahead.step_id + 1
    assert [row.request_id for row in step.decode] == ["c"]


# --- the engine around it ---


class FailingRunner(FakeRunner):
    """Raises in the calls whose numbers are given, counting start() and finish() together."""

    def __init__(self, failing_calls: Sequence[int] = ()) -> None:
        super().__init__()
        self._failing_calls = set(failing_calls)
        self._num_calls = 0
        self.failed_in: Counter[str] = Counter()

    def start(self, step: ScheduledStep, after: Started | None, masks: object = None) -> Started:
        self._count("start" if after is None else "start ahead")
        return super().start(step, after)

    def finish(self, started: Started) -> StepResult:
        self._count("finish")
        return super().finish(started)

    def _count(self, what: str) -> None:
        self._num_calls += 1
        if self._num_calls in self._failing_calls:
            self.failed_in[what] += 1
            raise RuntimeError("out of memory")


def fake_engine(runner: FakeRunner, requests: Sequence[Request], max_blocks: int = 64, **settings: object) -> Engine:
    for request in requests:
        runner.add(request)
    return Engine(runner, lambda: make_scheduler(max_blocks, **settings), ahead_runner=runner)


def test_the_engine_starts_each_step_before_it_waits_for_the_one_before() -> None:
    requests = [stream("a", max_tokens=4)]
    runner = FakeRunner()
    engine = fake_engine(runner, requests)
    serve(engine, [(0, request) for request in requests])
    # The prompt's step is waited for; the last of all only tells the runner that the request ended.
    order = ["start 0", "finish 0", "start 1", "start 2", "finish 1", "start 3", "finish 2", "finish 3"]
    assert [f"{call} {step_id}" for call, step_id in runner.calls] == [*order, "start 4", "finish 4"]


def test_a_last_step_in_flight_is_work_that_gives_nothing() -> None:
    alone = expected_tokens(stream("a", max_tokens=5))
    request = stream("a", eos_token_ids=frozenset({alone[-1]}))
    runner = FakeRunner()
    engine = fake_engine(runner, [request])
    engine.add(request)
    while not request.finish_reason:
        assert engine.has_work
        engine.step()
    assert engine.has_work
    assert engine.step() == []
    assert engine.has_work
    assert engine.step() == []
    assert not engine.has_work
    assert engine.step() == []
    assert runner.num_rows["a"] == request.num_output_tokens + 1


@pytest.mark.parametrize(("failing_call", "where"), [(3, "start"), (4, "start ahead"), (5, "finish"), (7, "finish")])
def test_a_failure_loses_what_is_in_flight_and_nothing_else(failing_call: int, where: str) -> None:
    """Calls: start 0, finish 0, start 1, start 2, finish 1, start 3, finish 2, where 0 is the step of the prompt."""
    lost, kept = stream("lost", max_tokens=20), stream("kept", max_tokens=20)
    runner = FailingRunner([failing_call])
    engine = fake_engine(runner, [lost, kept], max_num_seqs=1)
    answers = serve(engine, [(0, lost), (0, kept)])
    assert runner.failed_in == {where: 1}
    assert answers.reasons == {"lost": FinishReason.ERROR, "kept": FinishReason.LENGTH}
    assert expected_tokens(kept)[kept.num_prompt_tokens :] == answers.ids("kept")
    assert engine.num_failures_in_a_row == 0


def test_failures_at_random_places_of_random_loads() -> None:
    seed = random.randrange(2**32)
    print(f"{seed=}")
    rng = random.Random(seed)
    failed_in: Counter[str] = Counter()
    ends: Counter[FinishReason] = Counter()
    for _ in range(60):
        requests = [
            make_request(f"r{i}", [rng.randrange(12) for _ in range(rng.choice([1, 9, 30]))], max_tokens=12)
            for i in range(12)
        ]
        runner = FailingRunner(rng.sample(range(1, 100), 4))
        engine = fake_engine(runner, requests, rng.choice([8, 14, 30]), max_num_seqs=rng.choice([1, 3, 8]))
        answers = serve(engine, [(rng.randrange(40), request) for request in requests])
        assert answers.num_failures == runner.failed_in.total()
        for request in requests:
            expected = expected_tokens(request)[request.num_prompt_tokens :]
            is_lost = answers.reasons[request.request_id] is FinishReason.ERROR
            got = answers.ids(request.request_id)
            assert got == expected[: len(got)] if is_lost else got == expected
        failed_in += runner.failed_in
        ends += Counter(answers.reasons.values())
    assert failed_in.keys() == {"start", "start ahead", "finish"}
    assert ends.keys() == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR}
