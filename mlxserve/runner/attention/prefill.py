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
        """queries (n, Hq, Dk) at positions start .. start + n - 1, keys (Hkv, start + n, Dk), values likewise.

        Returns (n, Hq, Dv)."""
        ...


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, chunk: ChunkInputs, scale: float, attention: ChunkAttention
) -> mx.array:
    """queries (n, Hq, Dk) of one chunk, keys and values one layer's pools. Returns (n, Hq, Dv)."""
    end = chunk.start + chunk.num_tokens
    return attention(queries, _gather(keys, chunk.blocks, end), _gather(values, chunk.blocks, end), chunk.start, scale)


def _gather(pool: mx.array, blocks: mx.array, end: int) -> mx.array:
    """The first `end` positions of a sequence as one array, (Hkv, end, D)."""
    _, num_kv_heads, block_size, dim = pool.shape
    # Head by head, so that a head's positions come out side by side and nothing is copied a second time.
    head_blocks = blocks * num_kv_heads + mx.arange(num_kv_heads)[:, None]
    gathered = pool.reshape(-1, block_size, dim)[head_blocks]
    return gathered.reshape(num_kv_heads, -1, dim)[:, :end]


def fused_attention(queries: mx.array, keys: mx.array, values: mx.array, start: int, scale: float) -> mx.array:
    """ChunkAttention by MLX's own fused kernel (its causal mask aligns the last query with the last key)."""
    queries = queries.swapaxes(0, 1)
    output = mx.fast.scaled_dot_product_attention(queries[None], keys[None], values[None], scale=scale, mask="causal")
    return output[0].swapaxes(0, 1)


class TiledAttention:
    """ChunkAttention in tiles of queries with a vectorised exp.

    MLX's CPU attention computes the whole matrix of a chunk, masked half included, through a scalar exp. Here scores
    stand with the keys in rows, (Hkv, keys, queries): MLX takes maximum and sum over rows three times as fast as
    within them. The last keys of a tile are the tile's own, so the mask is the same triangle everywhere.
    """

    def __init__(self, shifted_exp: ShiftedExp) -> None:
        self._shifted_exp = shifted_exp

    def __call__(self, queries: mx.array, keys: mx.array, values: mx.array, start: int, scale: float) -> mx.array:
        num_tokens, num_heads, _ = queries.shape
        num_kv_heads = keys.shape[0]
        group = num_heads // num_kv_heads
        grouped = (queries * scale).reshape(num_tokens, num_kv_heads, group, -1).swapaxes(0, 1)
        is_future = mx.arange(TILE)[:, None] > mx.arange(TILE * group) // group
        triangle = mx.where(is_future, MASKED, 0.0)
        tiles = []
        for first in range(0, num_tokens, TILE):
            size = min(TILE, num_tokens - first)
            seen = start + first + size
            query = grouped[:, first : first + size].reshape(num_kv_heads, size * group, -1)
            scores = keys[:, :seen] @ query.swapaxes(-1, -2)
            scores = scores.at[:, -size:].add(triangle[:size, : size * group])
            weights = self._shifted_exp(scores, scores.max(axis=1, keepdims=True))
            output = weights.swapaxes(-1, -2) @ values[:, :seen]
            output = output / weights.sum(axis=1)[:, :, None]
            tiles.append(output.reshape(num_kv_heads, size, group, -1).swapaxes(0, 1))
        return mx.concatenate(tiles).reshape(num_tokens, num_heads, -1)
