"""Prefill attention: a chunk's prefix is gathered out of the pool once, then attended to like a contiguous cache."""

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from mlxserve.core.step import BlockTable
from mlxserve.runner.attention.decode import MASKED, ShiftedExp

TILE = 64
"""Query rows of one product on CPU. A tile sees only its own past, which saves half of a long chunk's work."""


@dataclass(frozen=True, slots=True)
class ChunkInputs:
    """One chunk of a forward pass: tokens `first` .. `first + num_tokens` - 1 of the pass."""

    first: int
    num_tokens: int
    start: int
    """Position of its first token in its sequence."""
    blocks: mx.array
    """(number of blocks that hold positions 0 .. start + num_tokens - 1,)"""

    @classmethod
    def build(cls, first: int, num_tokens: int, start: int, table: BlockTable, block_size: int) -> "ChunkInputs":
        num_blocks = -(-(start + num_tokens) // block_size)
        return cls(first, num_tokens, start, mx.array(table[:num_blocks]))


class ChunkAttention(Protocol):
    def __call__(self, queries: mx.array, keys: mx.array, values: mx.array, start: int, scale: float) -> mx.array:
        """queries (1, Hq, n, Dk) at positions start .. start + n - 1, keys (1, Hkv, start + n, Dk), values likewise.

        Returns (1, Hq, n, Dv)."""
        ...


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, chunk: ChunkInputs, scale: float, attention: ChunkAttention
) -> mx.array:
    """queries (n, Hq, Dk) of one chunk, keys and values one layer's pools. Returns (n, Hq, Dv)."""
    end = chunk.start + chunk.num_tokens
    output = attention(
        queries.swapaxes(0, 1)[None],
        _gather(keys, chunk.blocks, end),
        _gather(values, chunk.blocks, end),
        chunk.start,
        scale,
    )
    return output[0].swapaxes(0, 1)


def _gather(pool: mx.array, blocks: mx.array, end: int) -> mx.array:
    """The first `end` positions of a sequence as one array, (1, Hkv, end, D)."""
    _, num_kv_heads, block_size, dim = pool.shape
    # Head by head, so that a head's positions come out side by side and nothing is copied a second time.
    head_blocks = blocks * num_kv_heads + mx.arange(num_kv_heads)[:, None]
    gathered = pool.reshape(-1, block_size, dim)[head_blocks]
    return gathered.reshape(1, num_kv_heads, -1, dim)[:, :, :end]


def fused_attention(queries: mx.array, keys: mx.array, values: mx.array, start: int, scale: float) -> mx.array:
    """ChunkAttention by MLX's own fused kernel (its causal mask aligns the last query with the last key)."""
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask="causal")


class TiledAttention:
    """ChunkAttention in tiles of queries with a vectorised exp.

    MLX's CPU attention computes the whole matrix of a chunk, masked half included, through a scalar exp.
    """

    def __init__(self, shifted_exp: ShiftedExp) -> None:
        self._shifted_exp = shifted_exp

    def __call__(self, queries: mx.array, keys: mx.array, values: mx.array, start: int, scale: float) -> mx.array:
        _, num_heads, num_tokens, _ = queries.shape
        num_kv_heads, length = keys.shape[1], keys.shape[2]
        group = num_heads // num_kv_heads
        grouped = (queries * scale).reshape(num_kv_heads, group, num_tokens, -1)
        tiles = []
        for first in range(0, num_tokens, TILE):
            size = min(TILE, num_tokens - first)
            seen = min(start + first + size, length)
            query = grouped[:, :, first : first + size].reshape(num_kv_heads, group * size, -1)
            scores = query @ keys[0, :, :seen].swapaxes(-1, -2)
            is_past = mx.arange(start + first, start + first + size)[:, None] >= mx.arange(seen)
            scores = scores.reshape(num_kv_heads, group, size, seen) + mx.where(is_past, 0.0, MASKED)
            scores = scores.reshape(num_kv_heads, group * size, seen)
            weights = self._shifted_exp(scores, scores.max(axis=-1, keepdims=True))
            output = (weights @ values[0, :, :seen]) / weights.sum(axis=-1, keepdims=True)
            tiles.append(output.reshape(num_heads, size, -1))
        return mx.concatenate(tiles, axis=1)[None]
