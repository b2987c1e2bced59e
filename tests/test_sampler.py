"""The sampler against an independent float64 reference, and its promise that rows do not affect each other."""

import dataclasses

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.core.sampling_params import SamplingParams
from mlxserve.core.step import DecodeRow, SampledToken
from mlxserve.runner import sampler as sampler_module
from mlxserve.runner.sampler import Sampler, uniform

ALMOST_ONE = 1 - 2.0**-24


def decode_row(params: SamplingParams, seed: int = 0, output_index: int = 0) -> DecodeRow:
    return DecodeRow("request", 0, 0, ((1,),), params, seed, output_index)


def sample(logits: np.ndarray | mx.array, rows: list[DecodeRow], num_candidates: int = 1024) -> list[int]:
    output = Sampler(num_candidates).sample(mx.array(logits), rows)
    mx.eval(output.arrays())
    assert output.token_ids.dtype == mx.int32
    tokens = output.collect()
    assert [token.token_id for token in tokens] == output.token_ids.tolist()
    return output.token_ids.tolist()


def reference_distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """(V,) float64 probabilities after temperature, top-k, top-p and min-p, by the definitions in SamplingParams."""
    scaled = logits.astype(np.float64) / params.temperature
    order = np.lexsort((np.arange(len(scaled)), -scaled))
    kept = np.exp(scaled[order] - scaled.max())
    if params.top_k:
        kept = kept[: params.top_k]
    kept = kept / kept.sum()
    if params.top_p < 1.0:
        reached = np.cumsum(kept) >= params.top_p * (1 - 1e-6)
        kept = kept[: int(np.argmax(reached)) + 1] if reached.any() else kept
        kept = kept / kept.sum()
    kept = kept[kept >= params.min_p * kept[0]]
    probabilities = np.zeros(len(scaled))
    probabilities[order[: len(kept)]] = kept / kept.sum()
    return probabilities


def on_a_grid(monkeypatch: pytest.MonkeyPatch, logits: np.ndarray, params: SamplingParams, **kwargs: int) -> np.ndarray:
    """(V,) shares of the tokens when the uniform numbers are an even grid: the distribution to 1 / 4096."""
    monkeypatch.setattr(sampler_module, "uniform", lambda seed, index: (index + 0.5) / 4096)
    rows = [decode_row(params, output_index=index) for index in range(4096)]
    tokens = sample(np.broadcast_to(logits, (4096, len(logits))), rows, **kwargs)
    return np.bincount(tokens, minlength=len(logits)) / 4096


CUTS = {
    "temperature": SamplingParams(temperature=0.7),
    "hot": SamplingParams(temperature=3.0),
    "top_k": SamplingParams(temperature=0.9, top_k=5),
    "top_k 1": SamplingParams(temperature=2.0, top_k=1),
    "top_k above V": SamplingParams(temperature=0.9, top_k=1000),
    "top_p": SamplingParams(temperature=0.9, top_p=0.8),
    "small top_p": SamplingParams(temperature=0.9, top_p=0.01),
    "top_p next to 1": SamplingParams(temperature=1.5, top_p=0.999),
    "min_p": SamplingParams(temperature=1.2, min_p=0.1),
    "min_p 1": SamplingParams(temperature=1.2, min_p=1.0),
    "top_k top_p": SamplingParams(temperature=1.3, top_k=12, top_p=0.7),
    "top_k min_p": SamplingParams(temperature=1.3, top_k=12, min_p=0.2),
    "top_p min_p": SamplingParams(temperature=1.3, top_p=0.95, min_p=0.05),
    "all": SamplingParams(temperature=1.1, top_k=20, top_p=0.9, min_p=0.02),
    "top_k above V, top_p": SamplingParams(temperature=1.1, top_k=1000, top_p=0.9),
}


@pytest.mark.parametrize("num_candidates", [4, 1024], ids=["few candidates", "many candidates"])
@pytest.mark.parametrize("params", CUTS.values(), ids=CUTS.keys())
def test_distribution_is_the_reference_one(monkeypatch, params, num_candidates):
    logits = np.random.default_rng(1).normal(size=60).astype(np.float32) * 2.5
    expected = reference_distribution(logits, params)
    shares = on_a_grid(monkeypatch, logits, params, num_candidates=num_candidates)
    assert np.abs(shares - expected).max() <= 1.01 / 4096
    assert not shares[expected == 0].any()


@pytest.mark.parametrize("num_candidates", [3, 1024], ids=["few candidates", "many candidates"])
@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=2), [1, 2]),
        (SamplingParams(top_k=3), [1, 2, 4]),
        (SamplingParams(top_k=5), [1, 2, 4, 6, 0]),
        (SamplingParams(top_p=0.18), [1]),
        (SamplingParams(top_p=0.2), [1, 2]),
        (SamplingParams(top_p=0.5), [1, 2, 4]),
        (SamplingParams(min_p=0.9), [1, 2, 4, 6]),
    ],
)
def test_among_equal_logits_the_smaller_token_id_is_kept(monkeypatch, params, kept, num_candidates):
    logits = np.array([0, 1, 1, 0, 1, 0, 1, 0], np.float32)
    shares = on_a_grid(monkeypatch, logits, params, num_candidates=num_candidates)
    assert sorted(np.flatnonzero(shares)) == sorted(kept)


def test_positive_and_negative_zero_are_equal_logits(monkeypatch):
    logits = np.array([-1, -0.0, 0.0, 0.0, -0.0], np.float32)
    assert list(np.flatnonzero(on_a_grid(monkeypatch, logits, SamplingParams(top_k=2)))) == [1, 2]


def test_top_p_of_equal_logits_keeps_no_token_too_many(monkeypatch):
    shares = on_a_grid(monkeypatch, np.zeros(13, np.float32), SamplingParams(top_p=7 / 13))
    assert list(np.flatnonzero(shares)) == list(range(7))


@pytest.mark.parametrize(
    ("params", "num_ranked"),
    [
        ([SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(min_p=0.5)], []),
        ([SamplingParams(top_k=10)] * 3, [16]),
        ([SamplingParams(top_k=17)] * 3, [200]),
        ([SamplingParams(top_p=0.05)] * 3, [16]),
        ([SamplingParams(top_p=0.9, min_p=0.99)] * 3, [16]),
        ([SamplingParams(top_p=0.05), SamplingParams(top_p=0.9), SamplingParams(top_p=0.05)], [16, 128, 200]),
    ],
)
def test_no_row_ranks_more_tokens_than_it_needs(monkeypatch, params, num_ranked):
    counts = []
    most_likely = sampler_module.most_likely
    monkeypatch.setattr(
        sampler_module, "most_likely", lambda logits, count: counts.append(count) or most_likely(logits, count)
    )
    logits = np.tile(np.linspace(0, 1, 200, dtype=np.float32), (3, 1))
    sample(logits, [decode_row(row_params) for row_params in params], num_candidates=16)
    assert counts == num_ranked


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_greedy_is_argmax(dtype):
    logits = mx.array(np.random.default_rng(2).normal(size=(16, 500)).astype(np.float32)).astype(dtype)
    rows = [decode_row(SamplingParams(temperature=0.0, top_k=3, top_p=0.5, seed=index)) for index in range(16)]
    assert sample(logits, rows) == np.argmax(np.array(logits.astype(mx.float32)), axis=-1).tolist()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("params", CUTS.values(), ids=CUTS.keys())
def test_half_precision_logits_are_sampled_as_their_float32_values(dtype, params):
    logits = mx.array(np.random.default_rng(3).normal(size=(32, 300)).astype(np.float32) * 3).astype(dtype)
    rows = [decode_row(params, seed=index) for index in range(32)]
    assert sample(logits, rows) == sample(logits.astype(mx.float32), rows)


def test_draws_follow_the_distribution():
    """Chi-square, 19 degrees of freedom: above 51 by chance once in ten thousand choices of the fixed seeds."""
    logits = np.random.default_rng(4).normal(size=20).astype(np.float32)
    for params in (SamplingParams(temperature=0.8), SamplingParams(temperature=0.8, top_k=19, top_p=0.99999)):
        expected = reference_distribution(logits, params) * 20_000
        by_index = [decode_row(params, seed=7, output_index=index) for index in range(20_000)]
        by_seed = [decode_row(params, seed=index, output_index=3) for index in range(20_000)]
        for rows in (by_index, by_seed):
            counts = np.bincount(sample(np.broadcast_to(logits, (20_000, 20)), rows), minlength=20)
            seen = expected > 0
            assert counts[~seen].sum() == 0
            assert ((counts - expected)[seen] ** 2 / expected[seen]).sum() < 51


def test_uniform_numbers_are_even_and_exact_in_float32():
    for numbers in ([uniform(0, index) for index in range(64_000)], [uniform(seed, 0) for seed in range(64_000)]):
        assert all(0 <= number < 1 and number == np.float32(number) for number in numbers)
        counts = np.histogram(numbers, bins=64, range=(0, 1))[0]
        assert ((counts - 1000.0) ** 2 / 1000).sum() < 120  # 63 degrees of freedom, p = 2e-5
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02
    assert uniform(2**64 - 1, 10**6) != uniform(2**64 - 2, 10**6)


def test_no_seed_is_another_one_shifted():
    """Seeds one step of the generator apart, which plain SplitMix64 would make overlap."""
    step = 0x9E3779B97F4A7C15
    assert [uniform(step, index) for index in range(4)] != [uniform(0, index) for index in range(1, 5)]


@pytest.mark.parametrize("num_candidates", [64, 1024], ids=["rows that fall back", "no fallback"])
def test_a_row_gets_the_same_token_alone_and_in_a_shuffled_batch(num_candidates):
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(32, 700)).astype(np.float32) * rng.uniform(0.3, 5, size=(32, 1)).astype(np.float32)
    choices = [*CUTS.values(), SamplingParams(temperature=0.0), SamplingParams(top_p=0.9), SamplingParams(top_k=300)]
    rows = []
    for index in range(32):
        params = dataclasses.replace(choices[index % len(choices)], num_logprobs=(None, 0, 3)[index % 3])
        rows.append(decode_row(params, seed=int(rng.integers(2**63)), output_index=index))
    alone = [sample(logits[index : index + 1], [row], num_candidates)[0] for index, row in enumerate(rows)]
    for _ in range(3):
        order = rng.permutation(32)
        together = sample(logits[order], [rows[index] for index in order], num_candidates)
        assert together == [alone[index] for index in order]


def test_logprobs_are_those_of_the_unmodified_distribution():
    logits = np.random.default_rng(6).normal(size=(5, 400)).astype(np.float32) * 4
    asks = (None, 0, 2, 20, None)
    params = [
        SamplingParams(temperature=3.0, top_k=2, num_logprobs=asks[0]),
        SamplingParams(temperature=3.0, num_logprobs=asks[1]),
        SamplingParams(temperature=0.0, num_logprobs=asks[2]),
        SamplingParams(temperature=0.1, top_p=0.9, num_logprobs=asks[3]),
        SamplingParams(temperature=0.0, num_logprobs=asks[4]),
    ]
    tokens = Sampler().sample(mx.array(logits), [decode_row(p, seed=index) for index, p in enumerate(params)]).collect()
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    for token, ask, row in zip(tokens, asks, exact, strict=True):
        if ask is None:
            assert token.logprobs is None
            continue
        assert token.logprobs.logprob == pytest.approx(row[token.token_id], abs=1e-4)
        best = np.argsort(-row, kind="stable")[:ask]
        assert [token_id for token_id, _ in token.logprobs.top] == best.tolist()
        assert [logprob for _, logprob in token.logprobs.top] == pytest.approx(row[best].tolist(), abs=1e-4)


def test_more_logprobs_than_tokens_give_them_all():
    token = Sampler().sample(mx.zeros((1, 3)), [decode_row(SamplingParams(num_logprobs=20))]).collect()[0]
    assert [token_id for token_id, _ in token.logprobs.top] == [0, 1, 2]


def test_tokens_are_plain_python_numbers():
    (token,) = Sampler().sample(mx.array([[0.0, 5.0]]), [decode_row(SamplingParams(temperature=0.0))]).collect()
    assert token == SampledToken(1)
    assert type(token.token_id) is int


EXTREMES = {
    "all but one impossible": [-np.inf, -np.inf, 0, -np.inf],
    "two possible": [-np.inf, 3, -np.inf, 3],
    "huge": [3e38, -3e38, 3e38, 0],
    "small differences": [1e-6, 0, -1e-6, 1e-7],
    "equal": [7, 7, 7, 7],
    "far apart": [0, -200, -500, 10_000],
}


@pytest.mark.parametrize("number", [0.0, 0.5, ALMOST_ONE, 1.0], ids=["0", "half", "almost 1", "rounded up to 1"])
@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1.0, 100.0])
@pytest.mark.parametrize("logits", EXTREMES.values(), ids=EXTREMES.keys())
def test_extreme_logits_give_only_possible_tokens(monkeypatch, logits, temperature, number):
    monkeypatch.setattr(sampler_module, "uniform", lambda seed, index: number)
    values = np.array(logits, np.float32)
    with np.errstate(over="ignore"):
        scaled = (values.astype(np.float64) - float(values.max())) / temperature
    possible = set(np.flatnonzero(scaled > -104).tolist())  # exp(-104) is 0 in float32
    cuts = [{}, {"top_k": 3}, {"top_k": 9}, {"top_p": 0.999}, {"min_p": 1e-9}, {"top_k": 3, "top_p": 0.5, "min_p": 0.1}]
    rows = [decode_row(SamplingParams(temperature=temperature, **cut)) for cut in cuts]
    for num_candidates in (2, 1024):
        assert set(sample(np.tile(values, (len(cuts), 1)), rows, num_candidates)) <= possible


@pytest.mark.parametrize("vocab_size", [1, 2, 255, 256, 257, 49_152])
def test_the_ends_of_the_cumulative_distribution(monkeypatch, vocab_size):
    """The first and the last possible token, with impossible ones before, between and after them."""
    rng = np.random.default_rng(8)
    logits = rng.normal(size=vocab_size).astype(np.float32)
    logits[rng.random(vocab_size) < 0.5] = -np.inf
    logits[vocab_size // 2] = 0.0
    possible = np.flatnonzero(logits > -np.inf)
    for number, expected in ((0.0, possible[0]), (ALMOST_ONE, possible[-1])):
        monkeypatch.setattr(sampler_module, "uniform", lambda seed, index, number=number: number)
        assert sample(logits[None], [decode_row(SamplingParams())]) == [expected]


def test_a_long_flat_tail_is_not_lost_to_rounding(monkeypatch):
    """One token with half of the mass, then 200,000 that a plain float32 running sum would add too coarsely."""
    logits = np.zeros(200_001, np.float32)
    logits[0] = np.log(200_000)
    monkeypatch.setattr(sampler_module, "uniform", lambda seed, index: index / 8)
    rows = [decode_row(SamplingParams(), output_index=index) for index in range(8)]
    tokens = sample(np.broadcast_to(logits, (8, 200_001)), rows)
    assert tokens[:4] == [0, 0, 0, 0]
    assert tokens[4:] == pytest.approx([1, 50_001, 100_001, 150_001], abs=5)
