"""The probe: a model that does with its cache what the block cache does not do is refused, however well it hides it."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny_models
from mlx_lm.models.base import create_attention_mask, create_causal_mask, scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, RotatingKVCache
from tiny_models import CPU_KERNELS

from mlxserve.core.pieces import finish
from mlxserve.engine import build
from mlxserve.runner import cpu_ops, probe
from mlxserve.runner.attention.prefill import fused_attention
from mlxserve.runner.paged_model import Kernels, PagedModel, UnsupportedByBlockCache

VOCABULARY, HIDDEN, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 80, 32, 4, 2, 8
METAL_KERNELS = Kernels(build._shifted_exp, fused_attention)
WINDOW = 1000
"""Longer than the probe's sequence: no value of a short one differs."""


class Layer(nn.Module):
    """An attention layer in mlx-lm's manner, with one quirk."""

    def __init__(self, quirk: str, index: int) -> None:
        super().__init__()
        self.quirk, self.index = quirk, index
        self.num_kv_heads = 4 if quirk == "heads differ" and index == 1 else NUM_KV_HEADS
        self.q_proj = nn.Linear(HIDDEN, NUM_HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, self.num_kv_heads * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, self.num_kv_heads * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(NUM_HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.rope = nn.RoPE(HEAD_DIM)
        self.sinks = mx.zeros((NUM_HEADS,))

    def __call__(self, x: mx.array, mask: Any, caches: list[Any]) -> mx.array:
        batch, length, _ = x.shape
        cache, quirk = caches[self.index], self.quirk

        def heads(projection: nn.Linear, count: int) -> mx.array:
            return projection(x).reshape(batch, length, count, HEAD_DIM).transpose(0, 2, 1, 3)

        queries = self.rope(heads(self.q_proj, NUM_HEADS), offset=cache.offset)
        keys = self.rope(heads(self.k_proj, self.num_kv_heads), offset=cache.offset)
        values = heads(self.v_proj, self.num_kv_heads)
        if quirk == "scale by position":  # right only for a plain number, and alike near the start
            far = 0.0 if isinstance(cache.offset, mx.array) else float(cache.offset // 16_384)
            queries = queries * (1.0 + 0.5 * far)
        if quirk == "branch on position" and cache.offset > 8192:
            queries = queries * 2
        written = cache.update_and_fetch(keys, values)
        if quirk == "write twice":
            written = cache.update_and_fetch(keys, values)
        keys, values = written
        if quirk == "shared keys" and self.index == 1:
            keys, values = caches[0].last
        if quirk == "shared keys" and self.index == 0:
            caches[0].last = keys, values
        if quirk == "keys changed after":
            keys = keys * 1.0
        extra: dict[str, Any] = {}
        if quirk == "sinks":
            extra = {"sinks": self.sinks}
        if quirk == "unknown argument":
            extra = {"softcap": 30.0}
        if quirk == "own attention" or (quirk == "own attention in one layer" and self.index == 1):
            output = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.4, mask=mask)
        else:
            output = scaled_dot_product_attention(queries, keys, values, cache=cache, scale=0.4, mask=mask, **extra)
        return self.o_proj(output.transpose(0, 2, 1, 3).reshape(batch, length, -1))


class Quirky(nn.Module):
    """Two such layers. `faint` makes their part in the logits so small that no comparison of values would find it."""

    def __init__(self, quirk: str = "none", *, faint: bool = False) -> None:
        super().__init__()
        self.quirk, self.share = quirk, 1e-6 if faint else 1.0
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = [Layer(quirk, index) for index in range(2)]
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        mx.random.seed(0)
        self.update(nn.utils.tree_map(lambda array: mx.random.normal(array.shape) / 4, self.parameters()))

    def __call__(self, token_ids: mx.array, cache: list[Any]) -> mx.array:
        h = self.embed(token_ids)
        mask = create_attention_mask(h, cache[0], window_size=WINDOW if self.quirk == "window" else None)
        if self.quirk == "own mask":
            mask = create_causal_mask(token_ids.shape[1], 0, WINDOW)
        for layer in self.layers:
            h = h + layer(h, mask, cache) * self.share
        if self.quirk == "state of its own":
            self.seen = getattr(self, "seen", 0) + token_ids.shape[1]
            h = h + self.seen
        return self.head(h)

    def make_cache(self) -> list[Any]:
        last = {"rotating": RotatingKVCache(WINDOW), "own cache": OwnCache()}.get(self.quirk, KVCache())
        return [KVCache(), last]


class OwnCache(KVCache):
    """Who knows what it does."""


def check(model: Any, kernels: Kernels = CPU_KERNELS, context_length: int = 32_768) -> None:
    finish(probe.check_equivalence(model, probe.layer_shapes(model), kernels, context_length))


@pytest.fixture(autouse=True)
def unknown_arguments_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-lm's function refuses them; a later version of it may not."""
    stock = scaled_dot_product_attention

    def lenient(*args: Any, softcap: float | None = None, **kwargs: Any) -> mx.array:
        return stock(*args, **kwargs)

    monkeypatch.setitem(globals(), "scaled_dot_product_attention", lenient)


@pytest.mark.parametrize("kernels", [CPU_KERNELS, METAL_KERNELS], ids=["cpu", "metal"])
@pytest.mark.parametrize("context_length", [32_768, 24, 8])
def test_a_plain_model_passes(kernels: Kernels, context_length: int) -> None:
    model = Quirky()
    shapes = probe.layer_shapes(model)
    assert [(shape.num_kv_heads, shape.key_dim, shape.value_dim) for shape in shapes] == [(2, 8, 8)] * 2
    check(model, kernels, context_length)


@pytest.mark.parametrize(
    ("quirk", "reason"),
    [
        ("rotating", "its layers keep RotatingKVCache"),
        ("own cache", "its layers keep OwnCache"),
        ("heads differ", "different numbers of key/value heads"),
        ("window", "sliding window"),
        ("own mask", "mask of its own"),
        ("sinks", "sinks"),
        ("unknown argument", "passes softcap"),
        ("write twice", "more than once"),
        ("shared keys", "other keys and values"),
        ("keys changed after", "other keys and values"),
        ("own attention", "attend in a way of their own"),
        ("own attention in one layer", "attend in a way of their own"),
        ("branch on position", "a pass over it failed"),
    ],
)
@pytest.mark.parametrize("faint", [False, True])
def test_quirks_are_refused_by_what_the_model_does(quirk: str, reason: str, faint: bool) -> None:
    with pytest.raises(UnsupportedByBlockCache, match=reason):
        check(Quirky(quirk, faint=faint))


@pytest.mark.parametrize("quirk", ["scale by position", "state of its own"])
def test_quirks_are_refused_by_their_answers(quirk: str) -> None:
    with pytest.raises(UnsupportedByBlockCache, match="its answers differ"):
        check(Quirky(quirk))


def test_near_positions_alone_would_not_show_a_scale() -> None:
    """What the far pass of the probe is for."""
    check(Quirky("scale by position"), context_length=16_000)


def without_mask(queries: mx.array, keys: mx.array, values: mx.array, start: int, scale: float) -> mx.array:
    queries = queries.swapaxes(0, 1)[None]
    return mx.fast.scaled_dot_product_attention(queries, keys[None], values[None], scale=scale)[0].swapaxes(0, 1)


def flat_exp(scores: mx.array, maximum: mx.array) -> mx.array:
    return mx.exp((scores - maximum) / 2)


@pytest.mark.parametrize("kernels", [Kernels(flat_exp, fused_attention), Kernels(cpu_ops.shifted_exp, without_mask)])
def test_wrong_kernels_are_refused(kernels: Kernels) -> None:
    """The probe runs the attention functions too: a fault in one of them shows."""
    with pytest.raises(UnsupportedByBlockCache, match="its answers differ"):
        check(Quirky(), kernels)


def test_a_view_is_of_no_use_outside_of_a_pass() -> None:
    model = Quirky()
    paged = PagedModel(model, probe.layer_shapes(model), 8, CPU_KERNELS)
    with pytest.raises(UnsupportedByBlockCache, match="outside of a forward pass"):
        model(mx.array([[1]]), cache=paged._views)


def test_models_of_mlx_lm_with_plain_caches_pass() -> None:
    """By name, so that a probe that became too strict shows here and not as a slow server."""
    for name in tiny_models.BLOCK_CACHE:
        check(tiny_models.build(name), context_length=tiny_models.CONTEXT_LENGTH)
