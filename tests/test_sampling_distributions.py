"""Penalties, bias, bans and typical_p: by a few lines of numpy, and by chi-square over many draws of fixed seeds."""

import dataclasses
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.core.request import Request
from mlxserve.core.sampling_params import SamplingParams, sample_seed
from mlxserve.core.step import DecodeRow
from mlxserve.errors import EngineError, InvalidParameter
from mlxserve.runner import sampler as sampler_module
from mlxserve.runner.adjustment import adjust, needs_adjusting
from mlxserve.runner.sampler import Sampler

VOCABULARY = 40
EOS = 3
NUM_DRAWS = 20_000
PROMPT = [7, 9, 9, 30, 11, 12, 7]
ANSWER = [5, 9, 5, 5, 21, 0, 12, 5, 9]


def make_row(
    params: SamplingParams,
    *,
    prompt: Sequence[int] = PROMPT,
    answer: Sequence[int] = ANSWER,
    seed: int = 0,
    knows_last: bool = True,
) -> DecodeRow:
    """The row that chooses the token after `answer`, made as the scheduler makes it."""
    request = Request("r", list(prompt), params, frozenset({EOS}), seed, 1000, 0.0)
    request.token_ids += answer
    start = request.num_tokens - 1
    last = request.token_ids[-1] if knows_last else None
    banned = request.banned_token_ids(len(answer))
    return DecodeRow("r", last, start, ((1,),), params, seed, len(answer), request.penalty_history(start), banned)


def adjusted(logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], answer: Sequence[int]) -> np.ndarray:
    """(V,) float64 after steps 1 to 4, token by token."""
    result = logits.astype(np.float64)
    for token_id, bias in params.logit_bias:
        result[token_id] += bias
    tokens = [*prompt, *answer]
    window = {-1: tokens, 0: []}.get(params.repeat_last_n, tokens[-max(params.repeat_last_n, 1) :])
    for token_id in set(window):
        if result[token_id] > 0:
            result[token_id] /= params.repetition_penalty
        else:
            result[token_id] *= params.repetition_penalty
    for token_id in set(answer):
        result[token_id] -= params.presence_penalty + params.frequency_penalty * answer.count(token_id)
    if len(answer) < params.min_tokens:
        result[[*({EOS} if not params.ignore_eos else ()), *params.stop_token_ids]] = -np.inf
    return result


def distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """(V,) float64 probabilities of steps 5 to 7 of adjusted logits, set by set as SamplingParams says."""
    scaled = logits / params.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    if params.typical_p < 1:
        surprise = -np.log(np.where(p > 0, p, 1e-300))
        order = np.argsort(np.abs(surprise - (p * surprise).sum()), kind="stable")
        p = keep(p, order[: int(np.argmax(np.cumsum(p[order]) >= params.typical_p)) + 1])
    order = np.argsort(-p, kind="stable")
    if params.top_k:
        p = keep(p, order[: params.top_k])
    if params.top_p < 1:
        p = keep(p, order[: int(np.argmax(np.cumsum(p[order]) >= params.top_p)) + 1])
    return keep(p, np.flatnonzero(p >= params.min_p * p.max()))


def keep(p: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    kept = np.zeros_like(p)
    kept[token_ids] = p[token_ids]
    return kept / kept.sum()


def random_logits(seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=VOCABULARY) * 1.5).astype(np.float32)


BIAS = ((9, 1.5), (5, -2.0), (33, 2.5), (12, -100.0))
PARAMETERS = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 6},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.15},
    "typical_p": {"typical_p": 0.6},
    "narrow typical_p": {"typical_p": 0.05, "temperature": 1.4},
    "repetition": {"repetition_penalty": 1.8},
    "repetition below 1": {"repetition_penalty": 0.6},
    "repetition in a window": {"repetition_penalty": 2.0, "repeat_last_n": 4},
    "repetition of the last": {"repetition_penalty": 3.0, "repeat_last_n": 1},
    "window into the prompt": {"repetition_penalty": 1.5, "repeat_last_n": 12},
    "window beyond the start": {"repetition_penalty": 1.5, "repeat_last_n": 500},
    "window of nothing": {"repetition_penalty": 1.5, "repeat_last_n": 0},
    "presence": {"presence_penalty": 1.2},
    "frequency": {"frequency_penalty": 0.5},
    "rewards": {"presence_penalty": -0.5, "frequency_penalty": -0.4},
    "bias": {"logit_bias": BIAS},
    "min_tokens": {"min_tokens": 10, "stop_token_ids": frozenset({9, 20})},
    "min_tokens reached": {"min_tokens": 9, "stop_token_ids": frozenset({9})},
    "min_tokens without eos": {"min_tokens": 10, "ignore_eos": True, "stop_token_ids": frozenset({20})},
    "penalties": {"repetition_penalty": 1.3, "repeat_last_n": 6, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "penalties, bias and cuts": {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.4,
        "logit_bias": BIAS,
        "temperature": 0.9,
        "top_k": 20,
        "top_p": 0.9,
    },
    "all": {
        "repetition_penalty": 1.2,
        "repeat_last_n": 8,
        "presence_penalty": 0.4,
        "frequency_penalty": -0.2,
        "logit_bias": BIAS,
        "min_tokens": 40,
        "typical_p": 0.93,
        "temperature": 1.2,
        "top_k": 25,
        "top_p": 0.95,
        "min_p": 0.02,
    },
}
CASES = {name: SamplingParams(**fields) for name, fields in PARAMETERS.items()}


@pytest.mark.parametrize("answer", [[], [5], ANSWER], ids=["no answer yet", "one token", "some tokens"])
def test_adjusted_logits_are_those_of_numpy(answer: list[int]) -> None:
    """All rows in one call, with the last token known, and with it on the device only."""
    params = [each for each in CASES.values() if needs_adjusting(make_row(each, answer=answer))]
    assert len(params) >= 10
    logits = np.stack([random_logits(seed) for seed in range(len(params))])
    expected = np.stack([adjusted(row, each, PROMPT, answer) for row, each in zip(logits, params, strict=True)])
    known = [make_row(each, answer=answer) for each in params]
    unknown = [make_row(each, answer=answer, knows_last=False) for each in params]
    last = mx.array([[*PROMPT, *answer][-1]] * len(params), dtype=mx.int32)
    for rows, token_ids in ((known, None), (unknown, last)):
        np.testing.assert_allclose(np.array(adjust(mx.array(logits), rows, token_ids)), expected, rtol=1e-5, atol=1e-5)


def test_a_row_that_wants_nothing_is_not_adjusted() -> None:
    for name in ("temperature", "typical_p", "window of nothing", "min_tokens reached"):
        assert not needs_adjusting(make_row(CASES[name]))
        assert make_row(CASES[name]).history == ()


def test_a_history_is_no_longer_than_its_penalties_look() -> None:
    lengths = {name: len(make_row(CASES[name]).history) for name in CASES}
    assert lengths["repetition"] == len(PROMPT + ANSWER) - 1
    assert lengths["repetition in a window"] == 3
    assert lengths["presence"] == lengths["frequency"] == lengths["penalties"] == len(ANSWER) - 1
    assert lengths["bias"] == lengths["repetition of the last"] == 0


def test_tokens_that_the_model_does_not_have_are_left_alone() -> None:
    params = SamplingParams(repetition_penalty=2.0, logit_bias=((VOCABULARY + 5, 3.0), (2, 1.0)))
    row = make_row(params, prompt=[VOCABULARY, 4], answer=[])
    expected = random_logits(0).astype(np.float64)
    expected[2] += 1.0
    expected[4] = expected[4] / 2 if expected[4] > 0 else expected[4] * 2
    np.testing.assert_allclose(np.array(adjust(mx.array(random_logits(0))[None], [row]))[0], expected, rtol=1e-6)


def test_a_row_whose_last_token_nobody_knows_fails() -> None:
    with pytest.raises(EngineError, match="neither known"):
        adjust(mx.zeros((1, VOCABULARY)), [make_row(CASES["presence"], knows_last=False)])


def chi_square(logits: np.ndarray, drawn_with: SamplingParams, expected_with: SamplingParams) -> tuple[float, float]:
    """Of NUM_DRAWS rows of fixed seeds in one call; and a bound that chance passes less than once in 10,000 times."""
    expected = NUM_DRAWS * distribution(adjusted(logits, expected_with, PROMPT, ANSWER), expected_with)
    row = make_row(drawn_with)
    rows = [dataclasses.replace(row, seed=sample_seed(1, index)) for index in range(NUM_DRAWS)]
    output = Sampler().sample(mx.broadcast_to(mx.array(logits), (NUM_DRAWS, VOCABULARY)), rows)
    counts = np.bincount(np.array(output.token_ids), minlength=VOCABULARY)
    if counts[expected == 0].any():
        return np.inf, 0.0
    # Rare tokens share a cell: counts below some 5 are not normal enough.
    cells = [(counts[token_id], expected[token_id]) for token_id in np.flatnonzero(expected >= 8)]
    rare = (expected > 0) & (expected < 8)
    cells += [(counts[rare].sum(), expected[rare].sum())] if rare.any() else []
    degrees = max(len(cells) - 1, 1)
    return sum((seen - wanted) ** 2 / wanted for seen, wanted in cells), degrees + 4 * np.sqrt(2 * degrees) + 7


@pytest.mark.parametrize("name", CASES)
def test_draws_have_the_distribution_of_the_reference(name: str) -> None:
    statistic, bound = chi_square(random_logits(50 + list(CASES).index(name)), CASES[name], CASES[name])
    assert statistic < bound


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("temperature", {"temperature": 0.75}),
        ("typical_p", {"typical_p": 0.7}),
        ("repetition", {"repetition_penalty": 2.5}),
        ("repetition in a window", {"repetition_penalty": 2.0, "repeat_last_n": -1}),
        ("window into the prompt", {"repetition_penalty": 1.5, "repeat_last_n": 8}),
        ("presence", {"presence_penalty": 0.8}),
        ("frequency", {"frequency_penalty": 0.8}),
        ("bias", {"logit_bias": BIAS[:2]}),
        ("min_tokens", {"min_tokens": 9}),
    ],
)
def test_the_statistic_tells_parameters_apart(name: str, other: dict[str, object]) -> None:
    statistic, bound = chi_square(random_logits(7), SamplingParams(**other), CASES[name])  # type: ignore[arg-type]
    assert statistic > bound


@pytest.mark.parametrize("knows_last", [True, False], ids=["known", "on the device"])
def test_a_mixed_batch_gives_each_row_what_it_gets_alone(knows_last: bool) -> None:
    rng = np.random.default_rng(5)
    names = [*CASES, *CASES]
    greedy = [dataclasses.replace(CASES[name], temperature=0.0) for name in names[: len(names) // 3]]
    params = [*(CASES[name] for name in names[len(greedy) :]), *greedy, SamplingParams(temperature=0.0)]
    logits = np.stack([random_logits(100 + index) for index in range(len(params))])
    answers = [rng.integers(0, VOCABULARY, size=rng.integers(1, 30)).tolist() for _ in params]
    rows = [
        make_row(each, answer=answer, seed=index, knows_last=knows_last)
        for index, (each, answer) in enumerate(zip(params, answers, strict=True))
    ]
    last = mx.array([answer[-1] for answer in answers], dtype=mx.int32)

    def tokens(indices: Sequence[int]) -> list[int]:
        token_ids = None if knows_last else last[mx.array(indices)]
        chosen = Sampler().sample(mx.array(logits[indices]), [rows[index] for index in indices], token_ids)
        return chosen.token_ids.tolist()

    alone = [tokens([index])[0] for index in range(len(rows))]
    for _ in range(3):
        order = rng.permutation(len(rows)).tolist()
        assert tokens(order) == [alone[index] for index in order]
    for index, each in enumerate(params):
        if each.is_greedy:
            assert alone[index] == np.argmax(adjusted(logits[index], each, PROMPT, answers[index]))


def test_rows_without_wishes_cost_nothing_beside_rows_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rows that ask for it are adjusted or ranked by typicality; a plain greedy row gets an argmax."""
    sizes: dict[str, list[int]] = {"adjust": [], "_keep_typical": []}
    for name, seen in sizes.items():
        stock = getattr(sampler_module, name)

        def spy(logits, rows, *rest, stock=stock, seen=seen):
            seen.append(len(rows))
            return stock(logits, rows, *rest)

        monkeypatch.setattr(sampler_module, name, spy)
    greedy = SamplingParams(temperature=0.0)
    wishes = [
        greedy,
        greedy,
        CASES["presence"],
        SamplingParams(),
        CASES["typical_p"],
        dataclasses.replace(greedy, typical_p=0.5),
    ]
    rows = [make_row(params) for params in wishes]
    Sampler().sample(mx.array(np.stack([random_logits(0)] * len(rows))), rows)
    assert sizes == {"adjust": [1], "_keep_typical": [1]}


def test_a_bias_of_100_decides_and_one_of_minus_100_forbids() -> None:
    for params in (
        SamplingParams(logit_bias=((17, 100.0),)),
        SamplingParams(temperature=0.0, logit_bias=((17, 100.0),)),
    ):
        rows = [make_row(params, seed=seed) for seed in range(200)]
        logits = mx.broadcast_to(mx.array(random_logits(1)), (200, VOCABULARY))
        assert set(Sampler().sample(logits, rows).token_ids.tolist()) == {17}


def test_half_precision_logits_are_adjusted_in_float32() -> None:
    logits = mx.array(random_logits(2)).astype(mx.bfloat16)[None]
    params = SamplingParams(temperature=0.0, logit_bias=((4, 100.0), (6, 99.9)))
    assert Sampler().sample(logits, [make_row(params)]).token_ids.tolist() == [4]


def test_logprobs_are_those_of_the_model_whatever_the_penalties() -> None:
    logits = random_logits(4)
    rows = [make_row(dataclasses.replace(CASES["all"], num_logprobs=3))]
    (token,) = Sampler().sample(mx.array(logits)[None], rows).collect()
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum())
    assert token.logprobs.logprob == pytest.approx(exact[token.token_id], abs=1e-5)
    assert [token_id for token_id, _ in token.logprobs.top] == np.argsort(-exact)[:3].tolist()


def test_seeds_of_samples_are_fixed_and_apart() -> None:
    assert sample_seed(5, 0) == 5
    assert sample_seed(5, 1) == sample_seed(5, 1)
    seeds = {sample_seed(seed, index) for seed in (0, 1, 2**64 - 1) for index in range(16)}
    assert len(seeds) == 48
    assert all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty"),
        ({"repeat_last_n": -2}, "repeat_last_n"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"typical_p": 0.0}, "typical_p"),
        ({"typical_p": 1.5}, "typical_p"),
        ({"logit_bias": ((1, 101.0),)}, "logit_bias"),
        ({"logit_bias": ((1, float("nan")),)}, "logit_bias"),
        ({"logit_bias": ((1, 1.0), (1, 2.0))}, "logit_bias"),
        ({"logit_bias": tuple((token_id, 0.0) for token_id in range(1025))}, "logit_bias"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"stop_token_ids": frozenset(range(257))}, "stop_token_ids"),
    ],
)
def test_values_out_of_range_are_refused_by_name(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidParameter, match=param) as caught:
        SamplingParams(**fields)  # type: ignore[arg-type]
    assert caught.value.param == param


def test_the_smallest_typical_p_keeps_one_token() -> None:
    logits = mx.array([[0.0, 1.0, 2.0, 8.0]] * 2)
    rows = [make_row(SamplingParams(typical_p=typical_p)) for typical_p in (1e-300, 1e-12)]
    assert Sampler().sample(logits, rows).token_ids.tolist() == [3, 3]
