"""Drafts in the runner: rows and their drafts in one pass, what counts of them, and the draft model."""

import dataclasses
import random

import mlx.core as mx
import pytest
import tiny_models
from tiny_models import BLOCK_CACHE, CONTEXT_LENGTH, CPU_KERNELS, GREEDY

from mlxserve.core.request import Speculation
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.core.step import DecodeRow, DraftOrder, PrefillChunk, SampledToken, ScheduledStep
from mlxserve.engine.build import BuiltEngine, build_engine
from mlxserve.errors import EngineError, ModelLoadError
from mlxserve.runner import device, drafts, probe
from mlxserve.runner.draft_model import DraftModel
from mlxserve.runner.model_runner import ModelRunner
from mlxserve.runner.paged_model import PagedModel

SEEDED = SamplingParams(temperature=1.0, top_p=0.95, seed=5, num_logprobs=3)
TABLES = {"a": (3, 1, 2, 7, 8), "b": (4, 6, 5, 9, 10)}
PROMPTS = {"a": tiny_models.prompt(19, seed=1), "b": tiny_models.prompt(30, seed=2)}


def paged(seed: int = 0) -> PagedModel:
    model = tiny_models.build("llama", seed=seed)
    return PagedModel(model, probe.layer_shapes(model), 16, CPU_KERNELS)


def row(name: str, token_ids: list[int], sampling: SamplingParams, **fields: object) -> DecodeRow:
    output_index = len(token_ids) - len(PROMPTS[name])
    start = len(token_ids) - 1
    return DecodeRow(name, token_ids[-1], start, (TABLES[name],), sampling, 9, output_index, **fields)  # type: ignore[arg-type]


def prefill() -> tuple[PrefillChunk, ...]:
    return tuple(PrefillChunk(name, tuple(ids[:-1]), 0, (TABLES[name],)) for name, ids in PROMPTS.items())


def step(step_id: int, *rows: DecodeRow, prefill: tuple[PrefillChunk, ...] = ()) -> ScheduledStep:
    return ScheduledStep(step_id, (), prefill, rows, (12,))


def plain_answers(sampling: SamplingParams, num_tokens: int) -> dict[str, list[SampledToken]]:
    """Of both prompts, a token in each step."""
    runner = ModelRunner(paged(), max_pass_tokens=256)
    runner.run(step(0, prefill=prefill()))
    answers: dict[str, list[SampledToken]] = {name: [] for name in PROMPTS}
    for step_id in range(1, num_tokens + 1):
        rows = [row(name, PROMPTS[name] + ids(answer), sampling) for name, answer in answers.items()]
        for answer, tokens in zip(answers.values(), runner.run(step(step_id, *rows)).tokens, strict=True):
            answer += tokens
    return answers


def ids(tokens: list[SampledToken]) -> list[int]:
    return [token.token_id for token in tokens]


def same(one: SampledToken, other: SampledToken) -> bool:
    if one.logprobs is None or other.logprobs is None:
        return one == other
    return (one.token_id, one.logprobs.logprob) == (other.token_id, pytest.approx(other.logprobs.logprob, abs=1e-4))


# --- rows with drafts ---


def test_a_row_and_its_drafts_become_the_rows_of_later_steps() -> None:
    plain = DecodeRow("a", 5, 30, ((1, 2, 3),), SEEDED, 7, 4)
    drafted = dataclasses.replace(plain, request_id="b", draft_token_ids=(8, 9))
    assert drafts.expand([plain, drafted]) == [
        plain,
        DecodeRow("b", 5, 30, ((1, 2, 3),), SEEDED, 7, 4),
        DecodeRow("b", 8, 31, ((1, 2, 3),), SEEDED, 7, 5),
        DecodeRow("b", 9, 32, ((1, 2, 3),), SEEDED, 7, 6),
    ]


def test_what_counts_ends_with_the_first_token_that_is_no_draft() -> None:
    plain = DecodeRow("a", 5, 30, ((1, 2, 3),), SEEDED, 7, 4)
    rows = [dataclasses.replace(plain, draft_token_ids=draft) for draft in ((1, 2), (), (1, 2), (3, 4, 5))]
    tokens = [SampledToken(token_id) for token_id in (1, 2, 3, 4, 1, 9, 2, 6, 4, 5, 6)]
    assert [ids(list(accepted)) for accepted in drafts.accept(rows, tokens)] == [[1, 2, 3], [4], [1, 9], [6]]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("is_mixed", [False, True], ids=["rows alone", "beside a chunk"])
def test_answers_with_any_drafts_are_those_without(sampling: SamplingParams, is_mixed: bool) -> None:
    """Drafts are right up to a random place and then anything: a step overwrites what the last one got wrong."""
    rng = random.Random(3)
    expected = plain_answers(sampling, 30)
    runner = ModelRunner(paged(), max_pass_tokens=256)
    runner.run(step(0, prefill=prefill()))
    answers: dict[str, list[SampledToken]] = {name: [] for name in PROMPTS}
    num_steps, num_accepted = 0, 0
    while min(map(len, answers.values())) < 20:
        num_steps += 1
        rows = []
        for name, answer in answers.items():
            right = ids(expected[name])[len(answer) : len(answer) + rng.randrange(6)]
            wrong = [rng.randrange(2, 400) for _ in range(rng.randrange(3))]
            room = len(TABLES[name]) * 16 - len(PROMPTS[name]) - len(answer)
            guesses = tuple((right + wrong)[:room])
            rows.append(row(name, PROMPTS[name] + ids(answer), sampling, draft_token_ids=guesses))
        other = (PrefillChunk("c", tuple(tiny_models.prompt(20)), 0, ((11, 11),)),) if is_mixed else ()
        result = runner.run(step(num_steps, *rows, prefill=other))
        for answer, tokens in zip(answers.values(), result.tokens, strict=True):
            num_accepted += len(tokens) - 1
            answer += tokens
            del answer[24:]
    for name, answer in answers.items():
        assert all(same(*pair) for pair in zip(answer, expected[name], strict=False))
    assert num_accepted > num_steps


def test_nothing_runs_ahead_of_a_step_with_drafts() -> None:
    runner = ModelRunner(paged(), max_pass_tokens=256)
    runner.run(step(0, prefill=prefill()))
    started = runner.start(step(1, row("a", PROMPTS["a"], GREEDY, draft_token_ids=(4, 5))), None)
    unknown = dataclasses.replace(row("a", PROMPTS["a"], GREEDY), token_id=None, start=len(PROMPTS["a"]))
    with pytest.raises(EngineError, match="without drafts"):
        runner.start(step(2, unknown), started)


# --- the draft model ---


@pytest.mark.parametrize("num_missing", [0, 1, 12])
def test_the_draft_model_goes_on_greedily_from_what_it_is_told(num_missing: int) -> None:
    draft = DraftModel(paged(seed=4), tiny_models.VOCABULARY)
    draft.prepare(12, ())
    draft.prefill([(ids[: len(ids) - 1 - num_missing], 0, TABLES[name]) for name, ids in PROMPTS.items()])
    rows = []
    for (name, prompt_ids), num_tokens in zip(PROMPTS.items(), (5, 2), strict=True):
        missing = tuple(prompt_ids[len(prompt_ids) - 1 - num_missing : -1])
        rows.append(row(name, prompt_ids, GREEDY, draft_order=DraftOrder(num_tokens, missing)))
    plain = row("a", PROMPTS["a"], GREEDY)
    first, untouched, second = draft.fill([rows[0], plain, rows[1]])
    assert untouched is plain
    model = tiny_models.build("llama", seed=4)
    for filled, prompt_ids, num_tokens in ((first, PROMPTS["a"], 5), (second, PROMPTS["b"], 2)):
        expected = tiny_models.reference(model, prompt_ids, num_tokens)
        assert len(expected) == num_tokens
        assert (list(filled.draft_token_ids), filled.draft_order) == (expected, None)


def test_ids_that_the_larger_model_does_not_have_are_never_guessed() -> None:
    draft = DraftModel(paged(seed=4), 5)
    draft.prepare(12, ())
    (filled,) = draft.fill([row("a", PROMPTS["a"][:1], GREEDY, draft_order=DraftOrder(15))])
    assert max(filled.draft_token_ids) < 5


def engine(
    *, draft_seed: int | None, name: str = "llama", draft_name: str = "llama", **settings: object
) -> BuiltEngine:
    draft = None if draft_seed is None else tiny_models.loaded(tiny_models.build(draft_name, seed=draft_seed))
    loaded = tiny_models.loaded(tiny_models.build(name))
    config = tiny_models.engine_config(target_itl_ms=1e6, **settings)
    return build_engine(loaded, config, device.detect(), CONTEXT_LENGTH, draft=draft)


def requests(speculation: Speculation, sampling: SamplingParams = GREEDY) -> list[tiny_models.Request]:
    made = [tiny_models.make_request(f"{n}", tiny_models.prompt(n, seed=n), 40, sampling) for n in (1, 17, 33, 70)]
    for request in made:
        request.speculation = speculation
    return made


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.8, seed=11)], ids=["greedy", "seeded"])
@pytest.mark.parametrize("draft_seed", [0, 1], ids=["equal", "random"])
def test_a_draft_model_changes_no_answer(draft_seed: int, sampling: SamplingParams) -> None:
    """In a batch, with prefix hits the second time."""
    plain = tiny_models.run_ids(engine(draft_seed=None).engine, requests(Speculation.OFF, sampling))
    built = engine(draft_seed=draft_seed)
    for _ in range(2):
        drafted = requests(Speculation.DRAFT, sampling)
        assert tiny_models.run_ids(built.engine, drafted) == plain
        if draft_seed == 0 and sampling is GREEDY:
            # All but near ties, which the two compute in batches of other sizes.
            assert all(r.num_accepted_tokens > 0.9 * r.num_draft_tokens > 0 for r in drafted)
    assert built.engine.stats().num_prefix_hit_tokens > 0
    assert built.engine.stats().num_draft_tokens > 0


def test_a_preempted_request_and_its_draft_model_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tiny_models.run_ids(engine(draft_seed=None).engine, requests(Speculation.OFF))
    bytes_per_token = 3 * 2 * (16 + 16) * 4 * 2
    small = engine(draft_seed=0, kv_cache_bytes=9 * 16 * bytes_per_token)
    drafted = requests(Speculation.DRAFT)
    assert tiny_models.run_ids(small.engine, drafted) == plain
    assert small.engine.stats().num_preemptions > 0
    assert all(request.num_accepted_tokens > 0.8 * request.num_draft_tokens for request in drafted)


def test_both_caches_are_in_the_memory_that_is_allowed() -> None:
    alone, pair = engine(draft_seed=None, kv_cache_bytes=10**6), engine(draft_seed=1, kv_cache_bytes=10**6)
    assert pair.engine.stats().max_blocks == alone.engine.stats().max_blocks // 2
    assert (alone.has_draft_model, pair.has_draft_model) == (False, True)


@pytest.mark.parametrize(("name", "draft_name"), [("gemma3", "llama"), ("llama", "gemma3")])
def test_models_on_their_own_caches_are_refused(name: str, draft_name: str) -> None:
    assert "gemma3" not in BLOCK_CACHE
    with pytest.raises(ModelLoadError, match="mlx-lm's own caches"):
        engine(draft_seed=1, name=name, draft_name=draft_name)


def test_a_rebuilt_engine_drafts_again() -> None:
    built = engine(draft_seed=0)
    first = tiny_models.run_ids(built.engine, requests(Speculation.DRAFT))
    built.engine.rebuild(keep_requests=False)
    mx.clear_cache()
    again = requests(Speculation.DRAFT)
    assert tiny_models.run_ids(built.engine, again) == first
    assert all(request.num_accepted_tokens > 0 for request in again)
