"""What a request asks of the sampler, through whole engines: in company, after a preemption, with chunks, run ahead."""

import functools
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny_models
from helpers_arrivals import serve
from test_sampling_distributions import adjusted

from mlxserve.core.request import FinishReason, Request
from mlxserve.core.sampling_params import SamplingParams, sample_seed
from mlxserve.core.step import TokenLogprobs
from mlxserve.engine import warm_up
from mlxserve.engine.build import build_engine
from mlxserve.engine.engine import Engine
from mlxserve.runner import device, scoring
from mlxserve.runner.paged_model import PagedModel

BLOCK_SIZE = 16
BYTES_PER_BLOCK = BLOCK_SIZE * 3 * 2 * (16 + 16) * 4
MAX_TOKENS = 24

WISHES = {
    "plain": SamplingParams(seed=1),
    "repetition": SamplingParams(seed=2, repetition_penalty=1.4),
    "window": SamplingParams(seed=3, repetition_penalty=1.6, repeat_last_n=9, temperature=0.8),
    "presence, frequency": SamplingParams(seed=4, presence_penalty=0.8, frequency_penalty=0.7, top_k=30),
    "bias, typical": SamplingParams(seed=5, logit_bias=((5, 4.0), (9, -100.0)), typical_p=0.8),
    "min_tokens": SamplingParams(seed=6, min_tokens=12, stop_token_ids=frozenset(range(100)), frequency_penalty=-1.5),
    "greedy, penalties": SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5),
    "greedy": SamplingParams(temperature=0.0),
}


@functools.cache
def model(name: str = "llama") -> nn.Module:
    return tiny_models.build(name)


def build(
    monkeypatch: pytest.MonkeyPatch,
    name: str = "llama",
    *,
    runs_ahead: bool = False,
    num_blocks: int = 600,
    **settings: object,
) -> Engine:
    config = tiny_models.engine_config(block_size=BLOCK_SIZE, kv_cache_bytes=num_blocks * BYTES_PER_BLOCK, **settings)
    with monkeypatch.context() as patched:
        patched.setattr(warm_up, "gains_by_running_ahead", tiny_models.decided(runs_ahead))
        loaded = tiny_models.loaded(model(name))
        return build_engine(loaded, config, device.detect(), tiny_models.CONTEXT_LENGTH).engine


def requests() -> list[Request]:
    """32 with prompts of their own, four of each kind."""
    made = []
    for index, (name, sampling) in enumerate([*WISHES.items()] * 4):
        prompt_ids = tiny_models.prompt(20 + 5 * (index % 7), seed=index)
        params = replace(sampling, seed=None if sampling.seed is None else sampling.seed + 1000 * index)
        made.append(tiny_models.make_request(f"{name} {index}", prompt_ids, MAX_TOKENS, params))
    return made


@functools.cache
def alone() -> dict[str, list[int]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        engine = build(monkeypatch, max_num_seqs=1, enable_prefix_caching=False, max_prefill_tokens=2048)
        return tiny_models.run_ids(engine, requests())


@pytest.mark.slow
@pytest.mark.parametrize("runs_ahead", [False, True], ids=["waits", "runs ahead"])
@pytest.mark.parametrize(
    ("num_blocks", "settings"),
    [(600, {"max_prefill_tokens": 2048}), (600, {"max_prefill_tokens": 16}), (12, {"max_prefill_tokens": 64})],
    ids=["batch of 32", "chunked prefill", "preemption"],
)
def test_the_same_seed_gives_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, num_blocks: int, settings: dict[str, object], runs_ahead: bool
) -> None:
    engine = build(monkeypatch, runs_ahead=runs_ahead, num_blocks=num_blocks, max_num_seqs=32, **settings)
    assert tiny_models.run_ids(engine, requests()) == alone()
    assert (engine.stats().num_preemptions > 0) == (num_blocks == 12)


def test_every_kind_of_wish_has_an_effect() -> None:
    """Else the test above would compare answers that nothing decides."""
    plain = {request.request_id: request for request in requests()}
    with pytest.MonkeyPatch.context() as monkeypatch:
        engine = build(monkeypatch)
        stripped = [
            tiny_models.make_request(
                name,
                each.prompt_token_ids,
                MAX_TOKENS,
                SamplingParams(temperature=each.sampling.temperature, seed=each.seed),
            )
            for name, each in plain.items()
        ]
        without = tiny_models.run_ids(engine, stripped)
    for wish in WISHES:
        changed = any(without[name] != ids for name, ids in alone().items() if name.rsplit(" ", 1)[0] == wish)
        assert changed == (wish not in ("plain", "greedy")), wish


def test_greedy_answers_under_penalties_are_those_of_numpy_over_mlx_lms_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run ahead, where the last token of a history is only on the device."""
    params = SamplingParams(
        temperature=0.0, repetition_penalty=1.3, repeat_last_n=20, presence_penalty=0.6, frequency_penalty=0.8
    )
    prompt_ids = tiny_models.prompt(37, seed=3)
    engine = build(monkeypatch, runs_ahead=True)
    answer = tiny_models.run_ids(engine, [tiny_models.make_request("a", prompt_ids, MAX_TOKENS, params)])["a"]
    logits = np.array(model()(mx.array([prompt_ids + answer]))[0])
    for index, token_id in enumerate(answer):
        scores = adjusted(logits[len(prompt_ids) - 1 + index], params, prompt_ids, answer[:index])
        assert scores[token_id] > scores.max() - tiny_models.NEAR_TIE
    assert answer != tiny_models.reference(model(), prompt_ids, MAX_TOKENS)


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["waits", "runs ahead"])
def test_nothing_ends_an_answer_before_min_tokens(monkeypatch: pytest.MonkeyPatch, runs_ahead: bool) -> None:
    engine = build(monkeypatch, runs_ahead=runs_ahead)
    prompt_ids = tiny_models.prompt(20)
    for min_tokens in (0, 1, 7):
        eos, stops = frozenset(range(200)), frozenset(range(200, 419))
        params = SamplingParams(seed=8, min_tokens=min_tokens, stop_token_ids=stops)
        request = replace(tiny_models.make_request(f"{min_tokens}", prompt_ids, 20, params), eos_token_ids=eos)
        answers = serve(engine, [(0, request)])
        # Only token 419 can be chosen; then nearly every other one ends it.
        assert answers.ids(f"{min_tokens}")[:min_tokens] == [419] * min_tokens
        assert len(answers.ids(f"{min_tokens}")) >= max(min_tokens, 1)
        assert answers.reasons[f"{min_tokens}"] is FinishReason.STOP


# --- log-probabilities of prompts ---


def prompt_logprobs(engine: Engine, requests: Sequence[Request]) -> dict[str, tuple[TokenLogprobs, ...]]:
    """Run to the end; what came with each first token. Nothing comes with any other."""
    for request in requests:
        engine.add(request)
    found: dict[str, tuple[TokenLogprobs, ...]] = {}
    while engine.has_work:
        for output in engine.step():
            if output.tokens and output.request_id not in found:
                found[output.request_id] = output.prompt_logprobs
            else:
                assert output.prompt_logprobs == ()
        engine.check_integrity()
    return found


def check_prompt_logprobs(name: str, prompt_ids: list[int], found: tuple[TokenLogprobs, ...], num_top: int) -> None:
    logits = np.array(model(name)(mx.array([prompt_ids]))[0]).astype(np.float64)
    exact = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert len(found) == len(prompt_ids) - 1
    for position, logprobs in enumerate(found):
        assert logprobs.logprob == pytest.approx(exact[position, prompt_ids[position + 1]], abs=1e-3)
        best = np.sort(exact[position])[::-1][:num_top]
        assert [logprob for _, logprob in logprobs.top] == pytest.approx(best.tolist(), abs=1e-3)
        assert [exact[position, token_id] for token_id, _ in logprobs.top] == pytest.approx(best.tolist(), abs=1e-3)


@pytest.mark.parametrize("name", ["llama", "gemma3"], ids=["block cache", "own caches"])
@pytest.mark.parametrize("max_prefill_tokens", [16, 2048])
def test_prompt_logprobs_are_those_of_mlx_lm(
    monkeypatch: pytest.MonkeyPatch, name: str, max_prefill_tokens: int
) -> None:
    engine = build(monkeypatch, name, max_prefill_tokens=max_prefill_tokens)
    prompts = {
        "long": tiny_models.prompt(150, seed=1),
        "two": [5, 6],
        "one": [7],
        "other": tiny_models.prompt(90, seed=2),
    }
    asks = {"long": 3, "two": 0, "one": 2, "other": None}
    made = [
        tiny_models.make_request(key, ids, 3, SamplingParams(temperature=0.0, prompt_logprobs=asks[key]))
        for key, ids in prompts.items()
    ]
    found = prompt_logprobs(engine, made)
    assert found["one"] == found["other"] == ()
    for key in ("long", "two"):
        check_prompt_logprobs(name, prompts[key], found[key], asks[key] or 0)


def test_a_cached_prompt_is_scored_all_the_same_and_stays_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(monkeypatch)
    prompt_ids = tiny_models.prompt(70)
    plain, asking = SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, prompt_logprobs=1)
    made = [tiny_models.make_request(f"{index}", prompt_ids, 4, (plain, asking, plain)[index]) for index in range(3)]
    for request in made:
        found = prompt_logprobs(engine, [request])
        if request.sampling.prompt_logprobs is not None:
            check_prompt_logprobs("llama", prompt_ids, found[request.request_id], 1)
    assert [request.num_cached_tokens for request in made] == [0, 0, 69]


def test_a_preempted_prompt_is_scored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(monkeypatch, num_blocks=12, max_prefill_tokens=16, max_num_seqs=8)
    asking = SamplingParams(temperature=0.0, prompt_logprobs=0)
    made = [tiny_models.make_request(f"{i}", tiny_models.prompt(40, seed=i), 100, asking) for i in range(6)]
    found = prompt_logprobs(engine, made)
    assert engine.stats().num_preemptions > 0
    for request in made:
        check_prompt_logprobs("llama", request.prompt_token_ids, found[request.request_id], 0)


def test_logits_of_a_prompt_are_made_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only for the request that asks; the others' chunks have none."""
    sizes: list[int] = []
    stock = PagedModel.head

    def head(self: PagedModel, hidden: mx.array) -> mx.array:
        sizes.append(hidden.shape[0])
        return stock(self, hidden)

    engine = build(monkeypatch, max_prefill_tokens=2048)
    monkeypatch.setattr(PagedModel, "head", head)
    monkeypatch.setattr(scoring, "MAX_SCORED_TOKENS", 32)
    asking = SamplingParams(temperature=0.0, prompt_logprobs=0)
    made = [tiny_models.make_request("asks", tiny_models.prompt(150, seed=1), 2, asking)]
    made += [tiny_models.make_request(f"{i}", tiny_models.prompt(100, seed=i), 2) for i in range(2, 5)]
    tiny_models.run(engine, made)
    assert max(sizes) == 32
    assert sum(sizes) == 149


# --- several samples of one prompt ---


@pytest.mark.parametrize("num_prompt_tokens", [5, 16, 17, 33, 40, 48])
def test_samples_compute_their_prompt_once_and_share_its_blocks(
    monkeypatch: pytest.MonkeyPatch, num_prompt_tokens: int
) -> None:
    engine = build(monkeypatch, max_prefill_tokens=16)
    prompt_ids = tiny_models.prompt(num_prompt_tokens, seed=4)
    sampling = SamplingParams(temperature=1.0)
    made = [
        replace(tiny_models.make_request(f"{i}", prompt_ids, 2 * BLOCK_SIZE, sampling), seed=sample_seed(9, i))
        for i in range(8)
    ]
    for request in made:
        engine.add(request)
    most_used = 0
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        most_used = max(most_used, engine.stats().num_blocks_used)
    computed = sum(num_prompt_tokens - request.num_cached_tokens for request in made)
    # Each computes its last prompt token, for the logits; all but the first one nothing else.
    assert computed == num_prompt_tokens + 7
    num_shared = (num_prompt_tokens - 1) // BLOCK_SIZE
    num_own = -(-(num_prompt_tokens + 2 * BLOCK_SIZE - 1) // BLOCK_SIZE) - num_shared
    assert most_used <= num_shared + 8 * num_own
    assert len({tuple(request.token_ids) for request in made}) == 8


def test_a_sample_whose_first_one_goes_away_computes_the_prompt_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(monkeypatch, max_prefill_tokens=16)
    prompt_ids = tiny_models.prompt(60, seed=4)
    made = [tiny_models.make_request(f"{i}", prompt_ids, 4) for i in range(3)]
    for request in made:
        engine.add(request)
    engine.step()
    engine.abort("0", FinishReason.CANCELLED)
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    expected = tiny_models.reference(model(), prompt_ids, 4)
    assert [request.token_ids[60:] for request in made[1:]] == [expected, expected]
