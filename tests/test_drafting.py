"""Drafts in the scheduler: who gets how many, what they may take, and what becomes of them."""

import pickle
from collections.abc import Sequence

import pytest
from helpers_scheduler import BLOCK_SIZE, Driver, expected_tokens, make_kv, make_request, make_scheduler
from tiny_models import GREEDY

from mlxserve.core.request import FinishReason, Request, Speculation
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.core.step import DecodeRow, DraftOrder, SampledToken, ScheduledStep, StepResult
from mlxserve.scheduler.budget import PrefillBudget
from mlxserve.scheduler.drafting import MAX_DRAFTS, UNWEIGHED_DRAFTS, Drafting
from mlxserve.scheduler.scheduler import Scheduler

NO_EOS = {"eos_token_ids": frozenset()}
PERIOD = [3, 1, 4, 1, 5]
NGRAM = {"speculation": Speculation.NGRAM, **NO_EOS}
DRAFT = {"speculation": Speculation.DRAFT, **NO_EOS}


def measured_budget(*, row: float, several: float, draft_pass: float = 0.0, target_itl: float = 1.0) -> PrefillBudget:
    """One row takes 40 ms; `several` is what more than one add, `row` what each adds, `draft_pass` a draft's making."""
    budget = PrefillBudget(max_prefill_tokens=512, target_itl=target_itl)
    for num_rows in (1, 2, 4, 8, 16):
        for num_drafts in {0, num_rows - 1}:
            order = DraftOrder(num_drafts) if num_drafts else None
            others = 0 if order else num_rows - 1
            rows = [DecodeRow("a", 1, 20, (), GREEDY, 0, 0, draft_order=order)]
            rows += [DecodeRow("b", 1, 20, (), GREEDY, 0, 0)] * others
            seconds = 0.04 + several * (num_rows > 1) + row * (num_rows - 1) + draft_pass * num_drafts
            budget.observe(ScheduledStep(0, (), (), tuple(rows), ()), StepResult(0, (), 0.0, seconds))
    return budget


def stream(*, repeats: bool = True, speculation: Speculation = Speculation.AUTO, max_tokens: int = 100) -> Request:
    """A request whose answer so far goes on as its prompt does, or one without any repetition."""
    token_ids = PERIOD * 12 if repeats else list(range(100, 160))
    request = make_request("a", token_ids[:30], max_tokens=max_tokens, speculation=speculation, **NO_EOS)
    request.token_ids = token_ids
    request.num_computed_tokens = len(token_ids) - 1
    return request


# --- how many ---


def test_a_repeating_stream_alone_gets_many_and_one_that_does_not_none() -> None:
    drafting = Drafting(measured_budget(row=0.001, several=0.01))
    repeating, other = stream(), stream(repeats=False)
    plan = drafting.plan([repeating])
    assert plan[repeating].token_ids == tuple((PERIOD * 12)[: len(plan[repeating])])
    assert len(plan[repeating]) == MAX_DRAFTS
    assert drafting.plan([other]) == {}
    assert list(drafting.plan([repeating, other])) == [repeating]


def test_the_more_streams_the_fewer_drafts() -> None:
    drafting = Drafting(measured_budget(row=0.004, several=0.001))
    counts = []
    for num_streams in (1, 4, 16, 64):
        streams = [stream() for _ in range(num_streams)]
        counts.append(sum(map(len, drafting.plan(streams).values())) / num_streams)
    assert counts == sorted(counts, reverse=True)
    assert counts[0] >= 7
    assert counts[-1] <= 2


def test_rows_that_cost_what_a_step_costs_are_not_worth_guessing() -> None:
    drafting = Drafting(measured_budget(row=0.05, several=0.0))
    assert drafting.plan([stream()]) == {}
    assert len(drafting.plan([stream(speculation=Speculation.NGRAM)])) == 1


def test_nothing_is_weighed_before_anything_is_measured() -> None:
    drafting = Drafting(PrefillBudget(max_prefill_tokens=512, target_itl=0.1))
    assert drafting.plan([stream()]) == {}
    request = stream(speculation=Speculation.NGRAM)
    assert len(drafting.plan([request])[request]) == UNWEIGHED_DRAFTS


def test_kinds() -> None:
    budget = measured_budget(row=0.001, several=0.005, draft_pass=0.004)
    drafting = Drafting(budget, has_draft_model=True)
    off, ngram, draft = (stream(speculation=kind) for kind in (Speculation.OFF, Speculation.NGRAM, Speculation.DRAFT))
    unrepeated = stream(repeats=False)
    plan = drafting.plan([off, ngram, draft])
    assert set(plan) == {ngram, draft}
    assert (plan[ngram].order, len(plan[ngram].token_ids)) == (None, UNWEIGHED_DRAFTS)
    assert plan[draft].order is not None
    assert (plan[draft].order.num_tokens, plan[draft].token_ids) == (UNWEIGHED_DRAFTS, ())
    # Left to choose, it asks the model where the text tells nothing, and the text where it tells as much.
    chosen = drafting.plan([unrepeated])[unrepeated]
    assert chosen.order is not None
    assert 1 <= chosen.order.num_tokens < UNWEIGHED_DRAFTS
    for request in (ngram, draft, unrepeated, stream()):
        assert Drafting(budget, takes_drafts=False, has_draft_model=True).plan([request]) == {}
    assert Drafting(budget).plan([draft]) == {}


def test_a_slow_draft_model_is_not_asked() -> None:
    drafting = Drafting(measured_budget(row=0.001, several=0.005, draft_pass=0.04), has_draft_model=True)
    assert drafting.plan([stream(repeats=False)]) == {}


def test_a_slow_draft_model_leaves_the_text_its_drafts() -> None:
    """A short match promises less than the model, which is not worth asking."""
    drafting = Drafting(measured_budget(row=0.001, several=0.002, draft_pass=0.04), has_draft_model=True)
    request = make_request("a", [*range(20), 5, 6], max_tokens=100, **NO_EOS)
    request.token_ids.append(7)
    request.num_computed_tokens = 22
    drafts = drafting.plan([request])[request]
    assert (drafts.order, drafts.token_ids[0]) == (None, 8)


def test_a_draft_model_that_is_always_wrong_is_asked_seldom() -> None:
    budget = measured_budget(row=0.001, several=0.005, draft_pass=0.002)
    drafting = Drafting(budget, has_draft_model=True)
    request = stream(repeats=False, max_tokens=2000)
    num_asked = 0
    for token_id in range(1000, 1400):
        drafts = drafting.plan([request]).get(request)
        num_asked += drafts is not None
        row = DecodeRow("a", 0, request.num_tokens - 1, (), GREEDY, 0, 0, draft_order=drafts.order if drafts else None)
        request.token_ids.append(token_id)
        drafting.finish_row(row, request, num_accepted=0)
    assert 2 <= num_asked <= 40
    assert request.num_accepted_tokens == drafting.num_accepted_tokens == 0
    assert request.num_draft_tokens == drafting.num_draft_tokens >= num_asked


def test_drafts_stay_in_the_time_that_prompts_beside_streams_have() -> None:
    """3.6 ms for a row: 15 drafts take 100 ms with the row's own 40, and 2.4 times 40 are 96."""
    for speculation in (Speculation.AUTO, Speculation.NGRAM):
        slow, fast = (Drafting(measured_budget(row=0.009, several=0.0, target_itl=target)) for target in (0.01, 1.0))
        request = stream(speculation=speculation)
        assert 0 < len(slow.plan([request])[request]) < len(fast.plan([request])[request])


def test_nothing_is_guessed_past_the_end_of_the_answer() -> None:
    drafting = Drafting(measured_budget(row=0.001, several=0.0))
    for num_left in (5, 3, 2, 1):
        request = stream(max_tokens=30 + num_left)
        # The token after the last draft ends the answer.
        assert len(drafting.plan([request]).get(request, ())) == num_left - 1


# --- what they may take, and what becomes of them ---


def unhurried(max_blocks: int = 64, **settings: object) -> Scheduler:
    """However long a step takes, it is in time."""
    return make_scheduler(max_blocks, target_itl_ms=1e6, **settings)


def first_step(scheduler: Scheduler, *requests: Request) -> None:
    for request in requests:
        scheduler.add(request)
    step = scheduler.schedule(0.0)
    assert step is not None
    scheduler.update(step, StepResult(step.step_id, ((SampledToken(PERIOD[0]),),) * len(step.decode), 0.1, 0.1), 0.0)


def schedule(scheduler: Scheduler) -> ScheduledStep:
    step = scheduler.schedule(0.0)
    assert step is not None
    scheduler.check_integrity()
    return step


def repeating(request_id: str = "a", *, num_periods: int = 3, max_tokens: int = 40, **fields: object) -> Request:
    return make_request(request_id, PERIOD * num_periods, max_tokens=max_tokens, **(NGRAM | fields))


def answer(step: ScheduledStep, token_ids: Sequence[int]) -> StepResult:
    return StepResult(step.step_id, (tuple(map(SampledToken, token_ids)),), 0.0, 0.01)


def test_a_row_carries_what_the_text_expects() -> None:
    scheduler = unhurried()
    request = repeating()
    first_step(scheduler, request)
    (row,) = schedule(scheduler).decode
    assert (row.token_id, row.start, row.output_index) == (3, 15, 1)
    assert row.draft_token_ids == (1, 4, 1, 5, 3, 1, 4)
    assert row.num_drafts == UNWEIGHED_DRAFTS
    assert row.start + row.num_drafts < len(row.block_tables[0]) * BLOCK_SIZE
    assert pickle.loads(pickle.dumps(row)) == row


def test_accepted_drafts_are_tokens_and_blocks_past_them_go_back() -> None:
    scheduler = unhurried()
    request = repeating()
    first_step(scheduler, request)
    before = scheduler.stats().num_blocks_used
    step = schedule(scheduler)
    assert scheduler.stats().num_blocks_used == before + 1
    (output,) = scheduler.update(step, answer(step, [1, 4, 8]), 0.0)
    assert [token.token_id for token in output.tokens] == [1, 4, 8]
    assert request.token_ids[15:] == [3, 1, 4, 8]
    assert (request.num_computed_tokens, output.num_computed_tokens) == (18, 18)
    assert (output.num_draft_tokens, output.num_accepted_tokens, output.finish_reason) == (7, 2, None)
    # 19 tokens need the third block, which they had need of already.
    assert scheduler.stats().num_blocks_used == 3
    stats = scheduler.stats()
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (7, 2)
    scheduler.check_integrity()


@pytest.mark.parametrize(
    ("fields", "num_tokens", "reason"),
    [
        ({"eos_token_ids": frozenset({4})}, 2, FinishReason.STOP),
        ({"sampling": SamplingParams(temperature=0.0, stop_token_ids=frozenset({1}))}, 1, FinishReason.STOP),
        ({"max_tokens": 4}, 3, FinishReason.LENGTH),
    ],
)
def test_an_end_among_accepted_drafts_cuts_the_rest(
    fields: dict[str, object], num_tokens: int, reason: FinishReason
) -> None:
    scheduler = unhurried()
    request = repeating(**fields)
    first_step(scheduler, request)
    step = schedule(scheduler)
    (row,) = step.decode
    right = [*row.draft_token_ids, 9]
    (output,) = scheduler.update(step, answer(step, right), 0.0)
    assert [token.token_id for token in output.tokens] == right[:num_tokens]
    assert (output.finish_reason, request.finish_reason) == (reason, reason)
    assert request.num_accepted_tokens == output.num_accepted_tokens == min(num_tokens, row.num_drafts)
    assert request.num_computed_tokens == request.num_tokens - 1
    assert scheduler.stats().num_blocks_used == 0
    scheduler.check_integrity()


def test_rejected_positions_answer_no_prefix_hit() -> None:
    """A prompt that goes on as the rejected drafts did finds in the cache what was accepted, and no more."""
    driver = Driver(unhurried())
    request = repeating(max_tokens=3)
    driver.add(request)
    driver.run()
    assert driver.runner.num_drafts["a"] > driver.runner.num_right_drafts["a"]
    again = repeating("b", num_periods=8, max_tokens=2, **{"speculation": Speculation.OFF})
    driver.add(again)
    driver.run()
    shared = 0
    while shared < request.num_computed_tokens and again.token_ids[shared] == request.token_ids[shared]:
        shared += 1
    assert again.num_cached_tokens == shared


def test_drafts_take_only_what_is_free() -> None:
    """Neither does a cached block give way to them, nor is anybody preempted, nor does the pool grow."""
    kv = make_kv(8)
    scheduler = unhurried(kv=kv)
    cached = make_request("cached", list(range(50, 50 + 4 * BLOCK_SIZE)), max_tokens=1, **NO_EOS)
    first_step(scheduler, cached)
    assert kv.num_cached_blocks == 4
    first_step(scheduler, repeating(num_periods=3, max_tokens=30))
    # Seven blocks: four are cached, two are its own, one is free.
    (row,) = schedule(scheduler).decode
    assert row.num_drafts == UNWEIGHED_DRAFTS
    assert kv.num_cached_blocks == 4


def test_drafts_that_no_free_block_holds_are_left_out() -> None:
    kv = make_kv(7)
    scheduler = unhurried(kv=kv)
    cached = make_request("cached", list(range(50, 50 + 4 * BLOCK_SIZE)), max_tokens=1, **NO_EOS)
    first_step(scheduler, cached)
    request = repeating(num_periods=2, max_tokens=30)
    first_step(scheduler, request)
    assert (kv.num_cached_blocks, request.num_tokens) == (4, 11)
    # Positions up to 15 are in its two blocks.
    (row,) = schedule(scheduler).decode
    assert row.num_drafts == 5
    assert kv.num_cached_blocks == 4


def test_drafts_give_way_to_a_request_that_waits() -> None:
    """One block is left: the request that waits gets it, and the drafts are computed in the blocks there are."""
    for waits in (False, True):
        scheduler = unhurried(6)
        request = repeating(num_periods=3, max_tokens=20)
        first_step(scheduler, request)
        if waits:
            scheduler.add(make_request("b", [9] * (BLOCK_SIZE + 1), max_tokens=2, **NO_EOS))
        step = schedule(scheduler)
        row = next(row for row in step.decode if row.request_id == "a")
        assert {row.request_id for row in step.decode} == ({"a", "b"} if waits else {"a"})
        assert row.num_drafts > 0
        assert scheduler.stats().num_preemptions == 0


def test_a_step_with_drafts_is_not_run_ahead_of() -> None:
    scheduler = unhurried()
    first_step(scheduler, repeating())
    step = schedule(scheduler)
    assert step.decode[0].num_drafts > 0
    assert scheduler.schedule_ahead(step, 0.0) is None


def test_steps_without_drafts_are_until_there_is_something_to_guess() -> None:
    scheduler = unhurried()
    request = make_request("a", range(20, 30), max_tokens=40, **NGRAM)
    first_step(scheduler, request)
    step = schedule(scheduler)
    for token_id in (20, 21):
        assert step.decode[0].num_drafts == 0
        ahead = scheduler.schedule_ahead(step, 0.0)
        assert ahead is not None
        scheduler.update(step, answer(step, [token_id]), 0.0)
        step = ahead
    # Its last tokens are 20 21 now, which stood in the prompt: the step in flight is the last for now.
    assert scheduler.schedule_ahead(step, 0.0) is None
    scheduler.update(step, answer(step, [22]), 0.0)
    assert schedule(scheduler).decode[0].draft_token_ids == tuple(range(23, 30))


def test_the_draft_model_is_told_what_it_has_not_computed() -> None:
    scheduler = unhurried(draft_model="d")
    request = make_request("a", range(20, 31), max_tokens=60, **DRAFT)
    first_step(scheduler, request)

    def step_with(token_ids: Sequence[int]) -> DecodeRow:
        step = schedule(scheduler)
        scheduler.update(step, answer(step, token_ids), 0.0)
        (row,) = step.decode
        return row

    # The row of the prompt's last token had no drafts, so the draft model has not seen that token.
    assert step_with([1, 2, 3]).draft_order == DraftOrder(UNWEIGHED_DRAFTS, (30,))
    # Two drafts of seven were right: it has computed these, and the token after them is the row's own.
    assert step_with([1, 2, 3, 4, 5, 6, 7, 8]).draft_order == DraftOrder(UNWEIGHED_DRAFTS, ())
    # All seven were: the last one was nobody's input.
    assert step_with([1]).draft_order == DraftOrder(UNWEIGHED_DRAFTS, (7,))
    assert request.num_accepted_tokens == 9


def test_a_preempted_request_goes_on_drafting() -> None:
    driver = Driver(unhurried(10, draft_model="d"))
    requests = [make_request(name, [ord(name)] * 17, max_tokens=40, **DRAFT) for name in "abc"]
    driver.add(*requests)
    driver.run()
    assert driver.scheduler.stats().num_preemptions > 0
    assert all(request.num_accepted_tokens > 5 for request in requests)
    assert [request.token_ids for request in requests] == [expected_tokens(request) for request in requests]


def test_nothing_is_remembered_of_requests_that_ended() -> None:
    driver = Driver(unhurried(draft_model="d"))
    for kind in Speculation:
        driver.add(repeating(kind.value, speculation=kind))
    driver.add(repeating("aborted"))
    driver.step()
    driver.step()
    driver.scheduler.abort("aborted", FinishReason.CANCELLED)
    driver.run()
    assert driver.scheduler._drafting._states == {}
