import random

import pytest

from mlxserve.core.sampling_params import SamplingParams
from mlxserve.core.step import DecodeRow, PrefillChunk, ScheduledStep, StepResult
from mlxserve.scheduler.budget import PrefillBudget, StepLoad

GREEDY = SamplingParams(temperature=0.0)


def make_step(chunks: list[tuple[int, int]], rows: list[int]) -> ScheduledStep:
    """Chunks are (start, tokens), rows are positions."""
    return ScheduledStep(
        step_id=0,
        copies=(),
        prefill=tuple(PrefillChunk("p", (0,) * count, start, ()) for start, count in chunks),
        decode=tuple(DecodeRow("d", 0, start, (), GREEDY, 0, 0) for start in rows),
        num_blocks=(),
    )


def prefill_seconds(load: StepLoad) -> float:
    return 0.005 * load.num_chunks + 0.5e-3 * load.prefill_tokens + 2e-7 * load.prefill_context


def decode_seconds(load: StepLoad) -> float:
    return 0.010 * (load.decode_rows > 0) + 1e-3 * load.decode_rows + 1e-6 * load.decode_context


def observe(budget: PrefillBudget, step: ScheduledStep, factor: float = 1.0) -> None:
    load = StepLoad.of(step)
    budget.observe(step, StepResult(0, (), factor * prefill_seconds(load), factor * decode_seconds(load)))


def warmed_up(**settings: float) -> PrefillBudget:
    budget = PrefillBudget(max_prefill_tokens=2048, target_itl=0.1, **settings)  # type: ignore[arg-type]
    for count in (16, 128, 1024):
        for start in (0, 1024, 8192):
            observe(budget, make_step([(start, count)], []))
    for num_rows in (1, 4, 16):
        for start in (10, 1000, 8000):
            observe(budget, make_step([], [start] * num_rows))
    return budget


def load_of(chunks: list[tuple[int, int]], rows: list[int]) -> StepLoad:
    return StepLoad.of(make_step(chunks, rows))


def test_the_load_of_a_step() -> None:
    assert load_of([(10, 3), (0, 2)], [4, 0]) == StepLoad(2, 5, (11 + 12 + 13) + (1 + 2), 2, 5 + 1)


def test_prediction_carries_over_to_other_loads() -> None:
    budget = warmed_up()
    for load in (load_of([(300, 700)], [50] * 7), load_of([(0, 50), (2000, 300)], [4000] * 3), load_of([], [123])):
        assert budget.predict(load) == pytest.approx(prefill_seconds(load) + decode_seconds(load), rel=0.02)


def test_with_nothing_decoding_the_step_is_as_large_as_allowed() -> None:
    budget = warmed_up()
    assert budget.num_tokens(StepLoad(), 0) == 2048
    assert budget.num_tokens(load_of([(0, 2000)], []), 0) == 48
    assert budget.num_tokens(load_of([(0, 2040)], []), 0) == 0


def test_beside_streams_the_largest_chunk_that_keeps_the_target() -> None:
    budget = warmed_up()
    for start in (0, 1000, 3000):
        load = load_of([], [500, 600])
        count = budget.num_tokens(load, start)
        assert 32 < count < 2048
        assert budget.predict(load.with_chunk(start, count)) <= 0.1 < budget.predict(load.with_chunk(start, count + 1))


def test_what_a_step_does_already_is_counted() -> None:
    budget = warmed_up()
    first = budget.num_tokens(load_of([], [500]), 0) // 2
    second = budget.num_tokens(load_of([(0, first)], [500]), 0)
    assert 0 < second < first
    assert budget.predict(load_of([(0, first), (0, second)], [500])) <= 0.1


def test_slow_decoding_gets_a_multiple_of_its_own_step() -> None:
    budget = warmed_up(decode_multiple=3.0)
    load = load_of([], [8000] * 16)
    decode = budget.predict(load)
    count = budget.num_tokens(load, 0)
    assert 3 * decode > 0.1
    assert budget.predict(load.with_chunk(0, count)) == pytest.approx(3 * decode, rel=0.01)


def test_prefill_always_advances_but_only_one_chunk_gets_the_minimum() -> None:
    budget = PrefillBudget(max_prefill_tokens=2048, target_itl=0.001, decode_multiple=1.0)
    assert budget.num_tokens(load_of([], [5]), 0) == 16
    observe(budget, make_step([(0, 100)], []))
    observe(budget, make_step([], [5]))
    assert budget.num_tokens(load_of([], [5]), 0) == 16
    assert budget.num_tokens(load_of([(0, 16)], [5]), 0) == 0
    assert PrefillBudget(max_prefill_tokens=8, target_itl=0.001).num_tokens(load_of([], [5]), 0) == 8


def test_hiccups_do_not_change_the_model() -> None:
    budget = warmed_up()
    rng = random.Random(1)
    load = load_of([(0, 512)], [100] * 4)
    expected = budget.predict(load)
    for _ in range(300):
        step = make_step([(rng.randrange(4000), rng.randrange(32, 512))], [rng.randrange(2000)] * rng.randrange(1, 8))
        observe(budget, step, factor=100.0 if rng.random() < 0.1 else rng.uniform(0.95, 1.05))
    assert budget.predict(load) == pytest.approx(expected, rel=0.1)


def test_one_hiccup_among_few_measurements_counts_for_nothing() -> None:
    budget = PrefillBudget(max_prefill_tokens=2048, target_itl=0.1)
    step = make_step([], [100] * 4)
    for factor in (1.0, 1.0, 1.0, 1.0, 100.0):
        observe(budget, step, factor)
    load = StepLoad.of(step)
    assert budget.predict(load) == pytest.approx(decode_seconds(load), rel=0.01)


def test_a_machine_that_became_slower_is_noticed() -> None:
    budget = warmed_up()
    load = load_of([(0, 512)], [100] * 4)
    before = budget.predict(load)
    for factor in (3.0, 1.0):
        for _ in range(20):
            observe(budget, make_step([(0, 500)], [100] * 4), factor)
            budget.predict(load)
        assert budget.predict(load) == pytest.approx(factor * before, rel=0.1)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_impossible_times_are_left_out(seconds: float) -> None:
    budget = warmed_up()
    load = load_of([(0, 512)], [100] * 4)
    before = budget.predict(load)
    for _ in range(10):
        budget.observe(make_step([(0, 512)], [100] * 4), StepResult(0, (), seconds, seconds))
    assert budget.predict(load) == before
