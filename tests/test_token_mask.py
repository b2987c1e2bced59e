"""Masks on logits: against numpy, with vocabularies of other sizes, and in every kind of sampling."""

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.core.constraint import TokenMasks
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.core.step import DecodeRow
from mlxserve.runner.sampler import Sampler
from mlxserve.runner.token_mask import apply_masks

NUM_TOKENS = 96
"""Of the masks: three words."""
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(min_p=0.2),
    SamplingParams(top_k=3),
    SamplingParams(top_k=60),
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=0.999),
    SamplingParams(top_k=9, top_p=0.9, min_p=0.01),
]


def rows_of(constrained: list[bool], params: list[SamplingParams] | None = None) -> list[DecodeRow]:
    params = params or [SamplingParams()] * len(constrained)
    return [
        DecodeRow(f"{index}", 0, 0, ((1,),), row_params, index, index, is_constrained=is_constrained)
        for index, (row_params, is_constrained) in enumerate(zip(params, constrained, strict=True))
    ]


def masks_of(allowed: np.ndarray) -> TokenMasks:
    """From (B, NUM_TOKENS) booleans."""
    return TokenMasks(len(allowed), np.packbits(allowed, axis=1, bitorder="little").tobytes())


@pytest.fixture
def allowed() -> np.ndarray:
    """(6, NUM_TOKENS): rows 1 and 4 without a constraint."""
    allowed = np.random.default_rng(1).random((6, NUM_TOKENS)) < 0.1
    allowed[:, 40] = True
    allowed[[1, 4]] = True
    return allowed


CONSTRAINED = [True, False, True, True, False, True]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("vocab_size", [NUM_TOKENS, 80, 41, 100, 200])
def test_what_is_not_allowed_is_impossible_and_the_rest_unchanged(allowed, vocab_size, dtype):
    logits = mx.array(np.random.default_rng(2).normal(size=(6, vocab_size)).astype(np.float32) * 5).astype(dtype)
    out = apply_masks(logits, rows_of(CONSTRAINED), masks=masks_of(allowed))
    assert out.dtype == dtype
    kept = np.zeros((6, vocab_size), bool)
    width = min(vocab_size, NUM_TOKENS)
    kept[:, :width] = allowed[:, :width]
    kept[~np.array(CONSTRAINED)] = True
    expected = np.where(kept, np.array(logits.astype(mx.float32)), -np.inf)
    np.testing.assert_array_equal(np.array(out.astype(mx.float32)), expected)


def test_every_kind_of_sampling_chooses_what_is_allowed_and_other_rows_what_they_chose(allowed):
    rng = np.random.default_rng(3)
    for number in range(20):
        logits = mx.array(rng.normal(size=(6, 120)).astype(np.float32) * 4)
        params = [SAMPLINGS[int(index)] for index in rng.integers(len(SAMPLINGS), size=6)]
        rows = rows_of(CONSTRAINED, params)
        chosen = Sampler(num_candidates=16).sample(logits, rows, masks=masks_of(allowed)).token_ids.tolist()
        free = Sampler(num_candidates=16).sample(logits, rows).token_ids.tolist()
        for index, is_constrained in enumerate(CONSTRAINED):
            if is_constrained:
                assert chosen[index] < NUM_TOKENS, number
                assert allowed[index, chosen[index]], number
            else:
                assert chosen[index] == free[index], number


def test_a_mask_changes_the_distribution_as_if_the_others_had_no_probability(allowed):
    """Against the sampler on logits that have only the allowed tokens."""
    logits = np.random.default_rng(4).normal(size=(6, NUM_TOKENS)).astype(np.float32)
    only = np.where(allowed, logits, -np.inf)
    for params in SAMPLINGS:
        rows = rows_of([True] * 6, [params] * 6)
        masked = Sampler().sample(mx.array(logits), rows, masks=masks_of(allowed)).token_ids.tolist()
        assert masked == Sampler().sample(mx.array(only), rows).token_ids.tolist()


def test_one_allowed_token_is_chosen(allowed):
    allowed[:] = False
    allowed[np.arange(6), [0, 95, 31, 32, 63, 64]] = True
    logits = mx.array(np.random.default_rng(5).normal(size=(6, 99)).astype(np.float32) * 50)
    for params in SAMPLINGS:
        chosen = Sampler().sample(logits, rows_of([True] * 6, [params] * 6), masks=masks_of(allowed)).token_ids.tolist()
        assert chosen == [0, 95, 31, 32, 63, 64]


def test_logprobs_are_those_of_the_model(allowed):
    logits = np.random.default_rng(6).normal(size=(6, NUM_TOKENS)).astype(np.float32)
    rows = rows_of(CONSTRAINED, [SamplingParams(num_logprobs=2)] * 6)
    exact = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for index, token in enumerate(Sampler().sample(mx.array(logits), rows, masks=masks_of(allowed)).collect()):
        assert token.logprobs is not None
        assert token.logprobs.logprob == pytest.approx(exact[index, token.token_id], abs=1e-5)
        assert [token_id for token_id, _ in token.logprobs.top] == np.argsort(-exact[index])[:2].tolist()
