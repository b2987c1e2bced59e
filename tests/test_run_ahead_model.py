"""Steps run ahead on a real model: its answers, whether it gains by them, and the memory and time they take."""

from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
import tiny_models
from helpers_arrivals import Answers, serve
from tiny_models import CPU_KERNELS

from mlxserve.config import EngineConfig
from mlxserve.core.constraint import MaskSource
from mlxserve.core.pieces import finish
from mlxserve.core.request import FinishReason, Request
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.core.step import DecodeRow, ScheduledStep, StepResult
from mlxserve.engine import warm_up
from mlxserve.engine.build import BuiltEngine, build_engine
from mlxserve.errors import EngineError
from mlxserve.runner import device, probe
from mlxserve.runner.attention import paths
from mlxserve.runner.model_runner import ModelRunner, StartedStep
from mlxserve.runner.paged_model import PagedModel
from mlxserve.runner.sampler import SampleOutput, Sampler

# --- a real model ---

Engines = Callable[..., tuple[BuiltEngine, BuiltEngine]]


@pytest.fixture
def num_starts_ahead(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How many steps each runner, by its id, was given ahead of a result."""
    counts: Counter[int] = Counter()
    stock = ModelRunner.start

    def start(
        self: ModelRunner, step: ScheduledStep, after: StartedStep | None, masks: MaskSource | None = None
    ) -> StartedStep:
        counts[id(self)] += after is not None
        return stock(self, step, after, masks)

    monkeypatch.setattr(ModelRunner, "start", start)
    return counts


def build(monkeypatch: pytest.MonkeyPatch, name: str, *, runs_ahead: bool, **settings: Any) -> BuiltEngine:
    """An engine on a tiny checkpoint, with the outcome of what it measures given."""
    monkeypatch.setattr(paths, "choose", lambda ways, *_: lambda *_: ways[0])
    monkeypatch.setattr(warm_up, "gains_by_running_ahead", tiny_models.decided(runs_ahead))
    config = tiny_models.engine_config(**settings)
    return build_engine(tiny_models.loaded(tiny_models.build(name)), config, device.detect(), 4096)


def mixed_requests() -> list[Request]:
    """Greedy and sampled in all of the sampler's ways, with and without logprobs, of different lengths."""
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=7),
        SamplingParams(temperature=0.0, num_logprobs=3),
        SamplingParams(temperature=1.3, top_k=20, seed=2**64 - 1, num_logprobs=0),
        SamplingParams(temperature=0.9, top_p=0.8, seed=11),
        SamplingParams(temperature=0.7, min_p=0.05, seed=0, num_logprobs=2),
    ]
    return [
        tiny_models.make_request(f"{i}", tiny_models.prompt(5 + 7 * i, seed=i), 11 + 6 * i, params[i % len(params)])
        for i in range(9)
    ]


def test_answers_equal_those_of_an_engine_that_waits(
    monkeypatch: pytest.MonkeyPatch, num_starts_ahead: Counter[int]
) -> None:
    plain = build(monkeypatch, "llama", runs_ahead=False, max_num_seqs=4)
    expected = serve(plain.engine, [(0, request) for request in mixed_requests()])
    assert num_starts_ahead.total() == 0
    ahead = build(monkeypatch, "llama", runs_ahead=True, max_num_seqs=4)
    for gap in (0, 5):
        num_starts_ahead.clear()
        # Each joins those that run; a salt of its own keeps the second round from hitting on the first.
        arrivals = [(gap * index, request) for index, request in enumerate(mixed_requests())]
        for _, request in arrivals:
            request.cache_salt = f"{gap}"
        check_equal(serve(ahead.engine, arrivals), expected)
        assert num_starts_ahead.total() > 30
    with_logprobs = [token for tokens in expected.tokens.values() for token in tokens if token.logprobs is not None]
    assert len(with_logprobs) > 50


def check_equal(answers: Answers, expected: Answers) -> None:
    assert answers.reasons == expected.reasons
    for name, tokens in expected.tokens.items():
        assert answers.ids(name) == expected.ids(name)
        for got, want in zip(answers.tokens[name], tokens, strict=True):
            assert (got.logprobs is None) == (want.logprobs is None)
            if got.logprobs is not None and want.logprobs is not None:
                assert got.logprobs.logprob == pytest.approx(want.logprobs.logprob, abs=1e-4)
                assert [token_id for token_id, _ in got.logprobs.top] == [token_id for token_id, _ in want.logprobs.top]


def test_stop_tokens_end_answers_where_they_would_without(
    monkeypatch: pytest.MonkeyPatch, num_starts_ahead: Counter[int]
) -> None:
    prompts = {f"{i}": tiny_models.prompt(12 + 3 * i, seed=i) for i in range(4)}
    engine = build(monkeypatch, "llama", runs_ahead=True).engine
    whole = serve(engine, [(0, tiny_models.make_request(name, ids, 40)) for name, ids in prompts.items()])
    requests, expected = [], {}
    for index, (name, ids) in enumerate(prompts.items()):
        answer = whole.ids(name)
        stop = answer[6 + 5 * index]
        expected[name] = answer[: answer.index(stop) + 1]
        params = SamplingParams(temperature=0.0, stop_token_ids=frozenset({stop}))
        requests.append(tiny_models.make_request(name, ids, 40, params))
    num_starts_ahead.clear()
    answers = serve(engine, [(0, request) for request in requests])
    assert num_starts_ahead.total() > 0
    assert {name: answers.ids(name) for name in prompts} == expected
    assert set(answers.reasons.values()) == {FinishReason.STOP}


def test_a_model_on_its_own_caches_never_runs_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(monkeypatch, "gemma3", runs_ahead=True)
    assert not built.uses_block_cache
    request = tiny_models.make_request("a", tiny_models.prompt(10), 8)
    built.engine.add(request)
    # With nothing in flight between steps, each gives its token when it was taken.
    num_tokens = [sum(len(output.tokens) for output in built.engine.step()) for _ in range(8)]
    assert num_tokens == [1] * 8
    assert built.engine._ahead_runner is None
    assert request.token_ids[10:] == tiny_models.reference(tiny_models.build("gemma3"), tiny_models.prompt(10), 8)


@pytest.mark.parametrize(("pair_ahead", "gains"), [(1.5, True), (1.99, False), (2.5, False)])
def test_running_ahead_is_chosen_by_measurement(
    monkeypatch: pytest.MonkeyPatch, pair_ahead: float, gains: bool
) -> None:
    """A runner on a clock of its own: a step takes 1, a pair of which the second is built ahead `pair_ahead`."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(warm_up, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    class TimedRunner:
        def run(self, step: ScheduledStep) -> None:
            clock.now += 1.0

        def start(self, step: ScheduledStep, after: object) -> ScheduledStep:
            assert (after is None) == (step.decode[0].token_id is not None)
            return step

        def finish(self, started: ScheduledStep) -> None:
            clock.now += pair_ahead / 2

    assert finish(warm_up.gains_by_running_ahead(TimedRunner(), EngineConfig(), (16,))) is gains  # type: ignore[arg-type]


# --- memory and time of steps run ahead ---

POOL_BLOCKS = 1500
NUM_STEPS = 200
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "whole": SamplingParams(temperature=1.0),
    "top-p": SamplingParams(temperature=1.0, top_p=0.9),
}


@pytest.fixture
def paged() -> PagedModel:
    """A tiny model with a pool of 74 MB, thousands of times what a step computes with."""
    model = tiny_models.build("llama")
    paged = PagedModel(model, probe.layer_shapes(model), 64, CPU_KERNELS)
    paged.storage.grow(POOL_BLOCKS)
    return paged


def decode_step(index: int, sampling: SamplingParams, *, is_ahead: bool) -> ScheduledStep:
    rows = [
        DecodeRow(
            f"{row}", None if is_ahead else row, index, (tuple(range(1 + 10 * row, 9 + 10 * row)),), sampling, 0, index
        )
        for row in range(4)
    ]
    return ScheduledStep(index, (), (), tuple(rows), (POOL_BLOCKS,))


def run_ahead(runner: ModelRunner, sampling: SamplingParams, num_steps: int) -> list[StepResult]:
    results = []
    started = runner.start(decode_step(0, sampling, is_ahead=False), None)
    for index in range(1, num_steps):
        ahead = runner.start(decode_step(index, sampling, is_ahead=True), started)
        results.append(runner.finish(started))
        started = ahead
    return [*results, runner.finish(started)]


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_steps_run_ahead_copy_no_pool(paged: PagedModel, kind: str) -> None:
    runner = ModelRunner(paged, max_pass_tokens=256)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    run_ahead(runner, SAMPLINGS[kind], NUM_STEPS)
    rise = mx.get_peak_memory() - before
    bytes_per_layer = POOL_BLOCKS * paged.storage.bytes_per_block / 3
    assert bytes_per_layer > 24_000_000
    assert rise < bytes_per_layer / 4


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_nothing_of_a_step_is_evaluated_before_the_one_before_ended(
    paged: PagedModel, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that a step under way reads is copied by whoever writes to it. Some rows make the sampler evaluate."""
    under_way: list[StartedStep] = []
    stock = Sampler.sample

    def sample(self: Sampler, logits: mx.array, rows: Sequence[DecodeRow], *others: Any) -> SampleOutput:
        assert all(started.ended is not None for started in under_way)
        return stock(self, logits, rows, *others)

    monkeypatch.setattr(Sampler, "sample", sample)
    runner = ModelRunner(paged, max_pass_tokens=256)
    under_way.append(runner.start(decode_step(0, SAMPLINGS[kind], is_ahead=False), None))
    assert under_way[0].ended is None
    under_way.append(runner.start(decode_step(1, SAMPLINGS[kind], is_ahead=True), under_way[0]))
    assert under_way[0].ended is not None


def test_measured_times_of_steps_do_not_overlap(paged: PagedModel) -> None:
    """The budget learns from them: were a step's time to reach into the next one, all would seem twice as slow."""
    runner = ModelRunner(paged, max_pass_tokens=256)
    started = [runner.start(decode_step(0, SAMPLINGS["greedy"], is_ahead=False), None)]
    for index in range(1, 6):
        started.append(runner.start(decode_step(index, SAMPLINGS["greedy"], is_ahead=True), started[-1]))
        assert started[-2].ended == started[-1].begin == started[-1].prefilled
        result = runner.finish(started[-2])
        assert started[-2].ended is not None
        assert result.decode_time == started[-2].ended - started[-2].prefilled


def test_tokens_that_are_not_known_are_those_of_the_step_before(paged: PagedModel) -> None:
    ahead = run_ahead(ModelRunner(paged, max_pass_tokens=256), SAMPLINGS["whole"], 8)
    paged.storage.clear()
    runner = ModelRunner(paged, max_pass_tokens=256)
    token_ids: tuple[int, ...] = (0, 1, 2, 3)
    for index, result in enumerate(ahead):
        step = decode_step(index, SAMPLINGS["whole"], is_ahead=False)
        rows = zip(step.decode, token_ids, strict=True)
        known = [
            DecodeRow(r.request_id, token, r.start, r.block_tables, r.sampling, r.seed, index) for r, token in rows
        ]
        token_ids = tuple(t.token_id for (t,) in runner.run(ScheduledStep(index, (), (), tuple(known), (64,))).tokens)
        assert tuple(token.token_id for (token,) in result.tokens) == token_ids


def test_a_step_ahead_of_nothing_fails(paged: PagedModel) -> None:
    runner = ModelRunner(paged, max_pass_tokens=256)
    with pytest.raises(EngineError, match="needs the step before it"):
        runner.start(decode_step(1, SAMPLINGS["greedy"], is_ahead=True), None)
