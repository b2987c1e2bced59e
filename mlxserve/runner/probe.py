"""Finds out at load what a model keeps of the past, and whether the block cache gives the answers mlx-lm gives."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlxserve.core.pieces import Pieces
from mlxserve.runner.kv_storage import LayerShape
from mlxserve.runner.paged_model import Kernels, LayerView, PagedModel, UnsupportedByBlockCache

logger = logging.getLogger(__name__)

NUM_PROBE_TOKENS = 24
"""Enough for two chunks and a decode row over three blocks of 8."""
PROBE_BLOCK_SIZE = 8
SMALLEST_VOCABULARY = 64
"""Token ids below it exist in every model."""
FAR_POSITION = 20_000
"""Past the positions, 8,192 or 16,384, where some models begin to scale queries with the length of the context."""


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


@dataclass(frozen=True, slots=True)
class Findings:
    """What passes over a model showed."""

    num_heads: int
    """Query heads of a layer."""
    can_mix: bool
    """Chunks and decode rows in one pass give the same answers."""


def check_equivalence(
    model: nn.Module, shapes: list[LayerShape], kernels: Kernels, context_length: int
) -> Pieces[Findings]:
    """Compare the block cache with mlx-lm's cache on short sequences, one at position 0 and one far out.

    Raises:
        UnsupportedByBlockCache: the model does what a LayerView does not offer, or its answers differ.
    """
    far = min(FAR_POSITION, context_length - NUM_PROBE_TOKENS)
    findings = yield from _compare(model, shapes, kernels, make_prompt_cache(model), LayerView)
    if far > 0:
        yield from _compare(
            model, shapes, kernels, [_FarCache(far) for _ in shapes], lambda kernels: _FarView(kernels, far)
        )
    return findings


class _FarCache(KVCache):  # type: ignore[misc]
    """mlx-lm's cache for one pass over a sequence that begins at position `offset`, with nothing before it."""

    def __init__(self, offset: int) -> None:
        super().__init__()
        self.offset = offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        return KVCache().make_mask(*args, **kwargs)


class _FarView(LayerView):
    """A LayerView that tells the model positions `shift` further on."""

    def __init__(self, kernels: Kernels, shift: int) -> None:
        super().__init__(kernels)
        self._shift = shift

    @property
    def offset(self) -> mx.array:
        return super().offset + self._shift


def _compare(
    model: nn.Module,
    shapes: list[LayerShape],
    kernels: Kernels,
    caches: list[KVCache],
    make_view: Callable[[Kernels], LayerView],
) -> Pieces[Findings]:
    """One sequence in one pass over mlx-lm's caches, against two chunks and a decode row over the block cache."""
    token_ids = [(7 * i * i + 3 * i) % SMALLEST_VOCABULARY for i in range(NUM_PROBE_TOKENS)]
    expected = model(mx.array([token_ids]), cache=caches)[0, -1]
    table, last = (3, 1, 2), NUM_PROBE_TOKENS - 1
    mixed: mx.array | None = None
    try:
        paged = PagedModel(model, shapes, PROBE_BLOCK_SIZE, kernels, make_view)
        paged.storage.grow(4)
        for start, end in ((0, 10), (10, last)):
            paged.prefill([(token_ids[start:end], start, table)])
            mx.eval(paged.storage.arrays())
            yield
        logits = paged.decode(token_ids[-1:], [last], [table])[0]
        mx.eval(logits, paged.storage.arrays())
        yield
        if paged.can_mix:
            mixed = paged.prefill([(token_ids[10:last], 10, table)], [(token_ids[-1], last, table)])
            mx.eval(mixed, paged.storage.arrays())
            yield
    except UnsupportedByBlockCache:
        raise
    except Exception as error:  # a model file that computes with its cache in its own way fails in its own way
        raise UnsupportedByBlockCache(f"a pass over it failed: {type(error).__name__}: {error}") from error
    allowed = _tolerance(shapes[0].dtype) * _difference(expected, expected.mean())
    difference = _difference(expected, logits)
    yield
    logger.debug("block cache against mlx-lm: largest difference of logits %.2e, allowed %.2e", difference, allowed)
    if not difference <= allowed:
        raise UnsupportedByBlockCache(
            f"its answers differ: logits by {difference:.3g}, where {allowed:.3g} is rounding"
        )
    can_mix = mixed is not None and mixed.shape == (1, *expected.shape) and _difference(expected, mixed[0]) <= allowed
    return Findings(paged.num_query_heads, can_mix)


def _difference(a: mx.array, b: mx.array) -> float:
    difference: Any = (a.astype(mx.float32) - b.astype(mx.float32)).abs().max().item()
    return float(difference)


def _tolerance(dtype: Any) -> float:
    """Allowed difference as a share of the logits' spread: rounding, far below what a wrong mask or offset does."""
    return 1e-3 if dtype == mx.float32 else 0.1
