"""Every answer is the reference's, whatever features, sizes and company it is computed with. Failures print their seed.

MLXSERVE_TEST_SEED=n replays; MLXSERVE_TEST_COMBINATIONS=n tries more of them.
"""

import functools
import os
import random
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny_models
from helpers_arrivals import Answers, serve
from helpers_disk import opened, save_all
from tiny_models import GREEDY

from mlxserve.core.request import FinishReason, Request, Speculation
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.core.step import DecodeRow
from mlxserve.engine import warm_up
from mlxserve.engine.build import build_engine
from mlxserve.engine.engine import Engine
from mlxserve.engine.kv_disk import KVDisk
from mlxserve.runner import device
from mlxserve.runner.attention import paths
from mlxserve.runner.model_runner import ModelRunner, StartedStep
from mlxserve.runner.sampler import Sampler

SEED = int(os.environ.get("MLXSERVE_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
NUM_COMBINATIONS = int(os.environ.get("MLXSERVE_TEST_COMBINATIONS", "25"))
BYTES_PER_TOKEN = {None: 3 * 2 * (16 + 16) * 4, 8: 3 * 2 * (20 + 20), 4: 3 * 2 * (12 + 12)}
"""Of the tiny checkpoints by `kv_bits`: layers, key/value heads, a key and a value (float32, or codes and a header)."""
NOISE, NUM_NOISES = 3e-4, 16
"""Added to logits to find out whether rounding, some 30 times less, could decide a draw: one in 10,000 it does."""
QUANTISED_NOISE, QUANTISED_TIE = 0.15, 0.1
"""The same where keys and values are quantised: codes that rounding tips over moved logits by up to 0.02, many of them
together, in 28,800 draws."""


@dataclass(frozen=True)
class Combination:
    model: str
    enable_prefix_caching: bool
    keeps_on_disk: bool
    """Blocks are kept on disk, and the engine is built anew halfway."""
    runs_ahead: bool
    block_size: int
    max_prefill_tokens: int
    is_pool_tiny: bool
    num_requests: int
    max_num_seqs: int
    shared_prefix: int
    samplings: str
    arrivals: str
    attention_path: int
    """Which of the engine's ways of decode attention."""
    draft_seed: int | None
    """Weights of the draft model: 0 are the model's own; None: there is none."""
    kv_bits: int | None

    @classmethod
    def draw(cls, seed: int, rng: random.Random) -> "Combination":
        drawn = cls(
            model=rng.choice(["llama", "qwen3"]),
            enable_prefix_caching=rng.random() < 0.6,
            keeps_on_disk=rng.random() < 0.5,
            runs_ahead=rng.random() < 0.6,
            block_size=rng.choice([16, 32, 64]),
            max_prefill_tokens=rng.choice([16, 64, 2048]),
            is_pool_tiny=rng.random() < 0.5,
            num_requests=rng.randint(1, 8),
            max_num_seqs=rng.choice([1, 3, 8, 32]),
            shared_prefix=rng.choice([0, 0, 24, 64, 90]),
            samplings=rng.choice(["greedy", "seeded", "mixed", "wishes", "wishes"]),
            arrivals=rng.choice(["at once", "evenly", "anyhow"]),
            attention_path=rng.choice([0, 1]),
            draft_seed=rng.choice([None, None, 0, 1]),
            kv_bits=rng.choice([None, 8, 4]),
        )
        if drawn.kv_bits is not None:
            # Its keys are normed. In the llama checkpoint attention is so sharp that one code can decide an answer.
            drawn = replace(drawn, model="qwen3")
        drawn = replace(drawn, keeps_on_disk=drawn.keeps_on_disk and drawn.enable_prefix_caching)
        # Few that are drawn preempt. Every fifth does, or nearly so.
        crowd = {"is_pool_tiny": True, "num_requests": 8, "max_num_seqs": 8, "block_size": 16}
        return replace(drawn, **crowd) if seed % 5 == 0 else drawn


@dataclass(frozen=True)
class Case:
    """A request, when it comes, and what its answer must begin with (all of it, if `is_whole`)."""

    arrival: int
    request: Request
    expected: list[int]
    is_whole: bool
    ties: frozenset[int] = frozenset()
    """Where in `expected` a quantised cache may make it another token; what comes after that is not known."""


@functools.cache
def reference_model(name: str) -> nn.Module:
    return tiny_models.build(name)


@functools.cache
def reference_engine(name: str, kv_bits: int | None) -> Engine:
    """For answers of our own without company: no feature is on."""
    loaded = tiny_models.loaded(tiny_models.build(name))
    config = tiny_models.engine_config(block_size=64, enable_prefix_caching=False, max_num_seqs=1, kv_bits=kv_bits)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(warm_up, "gains_by_running_ahead", tiny_models.decided(False))
        return build_engine(loaded, config, device.detect(), tiny_models.CONTEXT_LENGTH).engine


def seeded_reference(name: str, prompt_ids: list[int], max_tokens: int, sampling: SamplingParams) -> list[int]:
    """The engine's own unbatched answer, up to the first draw that rounding could decide.

    The sampler must choose the same from mlx-lm's logits.
    """
    request = tiny_models.make_request("alone", prompt_ids, max_tokens, sampling)
    request.speculation = Speculation.OFF
    answer = serve(reference_engine(name, None), [(0, request)]).ids("alone")
    logits = reference_model(name)(mx.array([prompt_ids + answer[:-1]]))[0, len(prompt_ids) - 1 :]
    for index, draws in enumerate(noisy_draws(logits, request, answer, NOISE)):
        if len(draws) > 1:
            return answer[:index]
        assert draws == {answer[index]}
    return answer


def row_after(request: Request, token_ids: list[int]) -> DecodeRow:
    request = replace(request)
    request.token_ids = token_ids
    start = len(token_ids) - 1
    output_index = len(token_ids) - request.num_prompt_tokens
    return DecodeRow(
        request_id="",
        token_id=token_ids[-1],
        start=start,
        block_tables=(),
        sampling=request.sampling,
        seed=request.seed,
        output_index=output_index,
        history=request.penalty_history(start),
        banned_token_ids=request.banned_token_ids(output_index),
    )


def make_wishes(rng: random.Random) -> dict[str, Any]:
    """Some of all that a request can ask of the sampler, and of the log-probabilities beside it."""
    wishes: dict[str, Any] = {
        "repetition_penalty": rng.choice([0.8, 1.3]),
        "repeat_last_n": rng.choice([-1, 1, 9, 64]),
        "presence_penalty": rng.choice([-0.3, 0.7]),
        "frequency_penalty": rng.choice([-0.1, 0.5]),
        "logit_bias": tuple((token_id, rng.uniform(-100, 5)) for token_id in rng.sample(range(300), 10)),
        "typical_p": rng.choice([0.5, 0.9]),
        "num_logprobs": rng.choice([0, 3]),
        "prompt_logprobs": rng.choice([0, 2]),
        "min_tokens": rng.choice([1, 4]),
    }
    names = rng.sample(list(wishes), rng.randint(1, 5))
    return {name: wishes[name] for name in names}


def noisy_draws(logits: mx.array, request: Request, answer: list[int], noise: float) -> list[set[int]]:
    """What the sampler may choose from (tokens, vocabulary) logits that are a little different."""
    added = noise * mx.random.normal((NUM_NOISES, *logits.shape), key=mx.random.key(0))
    rows = [row_after(request, request.prompt_token_ids + answer[:index]) for index in range(len(answer))]
    drawn = Sampler().sample((logits + added).flatten(0, 1), rows * NUM_NOISES).collect()
    return [{token.token_id for token in drawn[index :: len(rows)]} for index in range(len(rows))]


def quantised_reference(
    name: str, kv_bits: int, prompt_ids: list[int], max_tokens: int, sampling: SamplingParams
) -> tuple[list[int], frozenset[int]]:
    """The engine's own unbatched answer with this cache, and where in it a tipped code could decide.

    Between those mlx-lm must choose the same, on keys and values that were rounded alike.
    """
    request = tiny_models.make_request("alone", prompt_ids, max_tokens, sampling)
    request.speculation = Speculation.OFF
    answer = serve(reference_engine(name, kv_bits), [(0, request)]).ids("alone")
    model = reference_model(name)
    caches = tiny_models.rounded_caches(model, kv_bits)
    logits = model(mx.array([prompt_ids + answer[:-1]]), cache=caches)[0, len(prompt_ids) - 1 :]
    if sampling == GREEDY:
        second, best = mx.sort(logits, axis=-1)[:, -2:].T
        draws = [{token_id} for token_id in logits.argmax(axis=-1).tolist()]
        ties = frozenset(index for index, gap in enumerate((best - second).tolist()) if gap < QUANTISED_TIE)
    else:
        draws = noisy_draws(logits, request, answer, QUANTISED_NOISE)
        ties = frozenset(index for index, each in enumerate(draws) if len(each) > 1)
    wrong = [index for index, token_id in enumerate(answer) if index not in ties and draws[index] != {token_id}]
    assert not wrong, f"tokens {wrong} of the answer are not mlx-lm's"
    return answer, ties


def make_sampling(combination: Combination, rng: random.Random) -> SamplingParams:
    if combination.samplings == "greedy" or (combination.samplings == "mixed" and rng.random() < 0.5):
        return GREEDY
    fields = rng.choice([{}, {"top_k": 12}, {"top_p": 0.9}, {"min_p": 0.03}, {"top_p": 0.8, "top_k": 40}])
    sampling = SamplingParams(temperature=rng.choice([0.6, 1.0]), seed=rng.randrange(2**64), **fields)
    if combination.samplings != "wishes":
        return sampling
    sampling = replace(sampling, temperature=rng.choice([0.0, 1.0]), **make_wishes(rng))
    # Without tokens that end answers there is nothing that min_tokens could hold back.
    stops = rng.sample(range(tiny_models.VOCABULARY), 20) if sampling.min_tokens else ()
    return replace(sampling, stop_token_ids=frozenset(stops))


def make_case(
    combination: Combination, index: int, prefix: list[int], sample_of: Case | None, rng: random.Random
) -> Case:
    """`sample_of`: a request that comes at the same time and has the same prompt."""
    own = tiny_models.prompt(rng.choice([1, 2, 17, 40, 70]), seed=rng.randrange(1000))
    own *= rng.choice([1, 1, 2])
    prompt_ids = prefix + own if rng.random() < 0.8 else own
    max_tokens = rng.choice([4, 60, 60, 90])
    arrival = {"at once": 0, "evenly": 4 * index, "anyhow": rng.randrange(60)}[combination.arrivals]
    if sample_of is not None:
        prompt_ids, arrival = sample_of.request.prompt_token_ids, sample_of.arrival
    sampling = make_sampling(combination, rng)
    ties: frozenset[int] = frozenset()
    if combination.kv_bits is not None:
        expected, ties = quantised_reference(combination.model, combination.kv_bits, prompt_ids, max_tokens, sampling)
    elif sampling == GREEDY:
        expected = tiny_models.reference(reference_model(combination.model), prompt_ids, max_tokens)
    else:
        expected = seeded_reference(combination.model, prompt_ids, max_tokens, sampling)
    is_whole = len(expected) == max_tokens or (bool(expected) and expected[-1] in sampling.stop_token_ids)
    if expected and not sampling.min_tokens and rng.random() < 0.4:
        stop = rng.choice(expected)
        expected, is_whole = expected[: expected.index(stop) + 1], True
        sampling = replace(sampling, stop_token_ids=frozenset({stop}))
    kinds = [kind for kind in Speculation if kind is not Speculation.DRAFT or combination.draft_seed is not None]
    request = tiny_models.make_request(f"{index}", prompt_ids, max_tokens, sampling)
    request.speculation = rng.choice(kinds)
    return Case(arrival, request, expected, is_whole, ties)


def build(
    monkeypatch: pytest.MonkeyPatch, combination: Combination, cases: list[Case], kv_disk: KVDisk | None
) -> Engine:
    longest = max(case.request.max_total_tokens for case in cases)
    # A tiny pool just holds the longest request (beside the scratch block): others that run with it outgrow it.
    num_blocks = 1 + -(-longest // combination.block_size) if combination.is_pool_tiny else 1000
    num_models = 1 if combination.draft_seed is None else 2
    config = tiny_models.engine_config(
        block_size=combination.block_size,
        max_prefill_tokens=combination.max_prefill_tokens,
        max_num_seqs=combination.max_num_seqs,
        enable_prefix_caching=combination.enable_prefix_caching,
        kv_cache_bytes=num_blocks * combination.block_size * BYTES_PER_TOKEN[combination.kv_bits] * num_models,
        kv_bits=combination.kv_bits,
    )
    loaded = tiny_models.loaded(tiny_models.build(combination.model))
    with monkeypatch.context() as patched:
        patched.setattr(warm_up, "gains_by_running_ahead", tiny_models.decided(combination.runs_ahead))
        patched.setattr(paths, "choose", lambda ways, *_: lambda *_: ways[combination.attention_path])
        patched.setattr(warm_up, "DRAFTS", (3,))
        draft = None
        if combination.draft_seed is not None:
            draft = tiny_models.loaded(tiny_models.build(combination.model, seed=combination.draft_seed))
        return build_engine(
            loaded, config, device.detect(), tiny_models.CONTEXT_LENGTH, draft=draft, kv_disk=kv_disk
        ).engine


def check_answers(cases: list[Case], answers: Answers) -> int:
    """Returns how many tokens could be compared."""
    num_compared = 0
    for case in cases:
        name = case.request.request_id
        got = answers.ids(name)
        pairs = enumerate(zip(got, case.expected, strict=False))
        turn = next((index for index, (token_id, expected) in pairs if token_id != expected), None)
        if turn in case.ties:
            num_compared += turn
        else:
            assert got[: len(case.expected)] == case.expected, f"request {name}"
            assert not case.is_whole or len(got) == len(case.expected)
            num_compared += len(case.expected)
        is_stopped = got[-1] in case.request.sampling.stop_token_ids
        assert answers.reasons[name] is (FinishReason.STOP if is_stopped else FinishReason.LENGTH)
        assert is_stopped or case.request.num_tokens == case.request.max_total_tokens
    return num_compared


@pytest.mark.slow
def test_answers_do_not_depend_on_features_sizes_and_company(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    num_starts_ahead = 0
    stock_start = ModelRunner.start

    def start(self: ModelRunner, step: object, after: StartedStep | None, masks: object = None) -> StartedStep:
        nonlocal num_starts_ahead
        num_starts_ahead += after is not None
        return stock_start(self, step, after, masks)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelRunner, "start", start)
    num_tokens = num_quantised_tokens = num_compared = num_hits = num_from_disk = num_preemptions = 0
    num_drafts = num_accepted = 0
    for number in range(NUM_COMBINATIONS):
        rng = random.Random(SEED + number)
        combination = Combination.draw(SEED + number, rng)
        print(f"replay with MLXSERVE_TEST_SEED={SEED + number} MLXSERVE_TEST_COMBINATIONS=1: {combination}")
        prefix = tiny_models.prompt(combination.shared_prefix, seed=rng.randrange(1000))
        cases: list[Case] = []
        for index in range(combination.num_requests):
            sample_of = cases[-1] if cases and rng.random() < 0.25 else None
            cases.append(make_case(combination, index, prefix, sample_of, rng))
        for _ in range(2 if combination.keeps_on_disk else 1):
            served = [replace(case, request=replace(case.request, prompt_logprobs=[])) for case in cases]
            disk = opened(tmp_path / f"{number}") if combination.keeps_on_disk else nullcontext()
            with disk as kv_disk:
                engine = build(monkeypatch, combination, served, kv_disk)
                before = num_starts_ahead
                answers = serve(engine, [(case.arrival, case.request) for case in served])
                save_all(engine)
            num_compared += check_answers(served, answers)
            num_quantised_tokens += combination.kv_bits is not None and sum(map(len, answers.tokens.values()))

            stats = engine.stats()
            assert combination.enable_prefix_caching or (stats.num_prefix_hit_tokens, stats.num_blocks_cached) == (0, 0)
            assert combination.runs_ahead or num_starts_ahead == before
            assert (stats.disk is not None) == combination.keeps_on_disk
            assert stats.disk is None or (stats.disk.is_on and stats.disk.num_errors == 0)
            num_tokens += sum(map(len, answers.tokens.values()))
            num_hits += stats.num_prefix_hit_tokens
            num_from_disk += stats.disk.num_loaded_tokens if stats.disk is not None else 0
            num_preemptions += stats.num_preemptions
            num_drafts += stats.num_draft_tokens
            num_accepted += stats.num_accepted_tokens
    print(f"{num_tokens} tokens, {num_compared} compared, {num_hits} from the cache, {num_from_disk} from disk,")
    print(
        f"{num_starts_ahead} steps ahead, {num_preemptions} preemptions, {num_accepted} of {num_drafts} drafts right,"
    )
    print(f"{num_quantised_tokens} tokens with quantised caches")
    # Near ties end comparisons; were that the rule, this would test nothing.
    assert num_compared > 0.8 * num_tokens
    if NUM_COMBINATIONS >= 25:
        # The combinations must reach what they are there to test.
        assert num_hits > 0
        assert num_from_disk > 0
        assert num_starts_ahead > 0
        assert num_preemptions > 0
        assert 0 < num_accepted < num_drafts
        assert num_quantised_tokens > 0
