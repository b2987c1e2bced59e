"""Finds out at load what a model keeps of the past, and whether the block cache gives the answers mlx-lm gives."""

import logging
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlxserve.runner.kv_storage import LayerShape
from mlxserve.runner.paged_model import Kernels, PagedModel, UnsupportedByBlockCache

logger = logging.getLogger(__name__)

NUM_PROBE_TOKENS = 24
"""Enough for two chunks and a decode row over three blocks of 8."""
PROBE_BLOCK_SIZE = 8
SMALLEST_VOCABULARY = 64
"""Token ids below it exist in every model."""


def layer_shapes(model: nn.Module) -> list[LayerShape]:
    """What each layer keeps of a position, read off mlx-lm's own caches after one token.

    Raises:
        UnsupportedByBlockCache: some layer keeps something other than all its keys and values.
    """
    caches = make_prompt_cache(model)
    others = {type(cache).__name__ for cache in caches if type(cache) is not KVCache}
    if others:
        raise UnsupportedByBlockCache(f"its layers keep {', '.join(sorted(others))}")
    mx.eval(model(mx.array([[0]]), cache=caches))
    shapes = []
    for cache in caches:
        if cache.keys is None:
            raise UnsupportedByBlockCache("some of its layers keep nothing")
        _, num_kv_heads, _, key_dim = cache.keys.shape
        shapes.append(LayerShape(num_kv_heads, key_dim, cache.values.shape[-1], cache.keys.dtype))
    if len({shape.num_kv_heads for shape in shapes}) > 1:
        raise UnsupportedByBlockCache("its layers have different numbers of key/value heads")
    return shapes


def check_equivalence(model: nn.Module, shapes: list[LayerShape], kernels: Kernels) -> None:
    """Compare the block cache with mlx-lm's cache on one short sequence: two chunks, then a decode row.

    Raises:
        UnsupportedByBlockCache: the model does what a LayerView does not offer, or its answers differ.
    """
    token_ids = [(7 * i * i + 3 * i) % SMALLEST_VOCABULARY for i in range(NUM_PROBE_TOKENS)]
    expected = model(mx.array([token_ids]), cache=make_prompt_cache(model))[0, -1]
    paged = PagedModel(model, shapes, PROBE_BLOCK_SIZE, kernels)
    table = (3, 1, 2)
    paged.storage.grow(4)
    try:
        for start, end in ((0, 10), (10, NUM_PROBE_TOKENS - 1)):
            paged.prefill([(token_ids[start:end], start, table)])
            mx.eval(paged.storage.arrays())
        logits = paged.decode(token_ids[-1:], [NUM_PROBE_TOKENS - 1], [table])[0]
        mx.eval(logits, paged.storage.arrays())
    except UnsupportedByBlockCache:
        raise
    except Exception as error:  # a model file that computes with its cache in its own way fails in its own way
        raise UnsupportedByBlockCache(f"a pass over it failed: {type(error).__name__}: {error}") from error
    expected, logits = expected.astype(mx.float32), logits.astype(mx.float32)
    difference = (expected - logits).abs().max().item()
    spread = (expected - expected.mean()).abs().max().item()
    logger.debug("block cache against mlx-lm: largest difference of logits %.2e of %.2e", difference, spread)
    if not difference <= _tolerance(shapes[0].dtype) * spread:
        raise UnsupportedByBlockCache(f"its answers differ: logits by {difference:.3g} of {spread:.3g}")


def _tolerance(dtype: Any) -> float:
    """Allowed difference as a share of the logits' spread: rounding, far below what a wrong mask or offset does."""
    return 1e-3 if dtype == mx.float32 else 0.1
