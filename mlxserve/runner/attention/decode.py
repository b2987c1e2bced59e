"""Decode attention over block tables by two gather_mm: no key or value is copied out of the pool.

The work is a flat list of (row, block) pairs, so a short row is not padded to the longest one. Scores and partial
results are computed for each pair, then merged over the blocks of a row the way flash attention merges tiles: with the
maximum m, the sum of exponentials z and the weighted values o of each pair, the row's answer is
sum(o * exp(m - M)) / sum(z * exp(m - M)) where M is the largest m (Milakov and Gimelshein 2018, Dao et al. 2022).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlxserve.core.step import BlockTable

MASKED = -1e30
"""Added to scores that must not count. Finite, so that a pair of which nothing counts gives zeros and not NaN."""
PADDING_INDEX = 1 << 20
"""Place in the sequence of a padding pair's block: past every length, so all of it is masked."""

ShiftedExp = Callable[[mx.array, mx.array], mx.array]
"""(scores, maximum) -> exp(scores - maximum)."""


class DecodeInputs(NamedTuple):
    """Index arrays of one step's decode rows, the same for every layer. P pairs, B rows."""

    pair_rows: mx.array
    """(P,) the row of each pair."""
    pair_indices: mx.array
    """(P,) which block of its row it is, counted from the start of the sequence."""
    pair_blocks: mx.array
    """(P,) its block id."""
    row_pairs: mx.array
    """(B, blocks of the longest row) the pairs of each row; -1 pads."""

    @classmethod
    def build(
        cls, starts: Sequence[int], tables: Sequence[BlockTable], block_size: int, num_rows: int
    ) -> "DecodeInputs":
        """Rows i attend to positions 0 .. starts[i]; `num_rows` - len(starts) padding rows follow.

        Sizes are rounded up (`bucket`), so that the compiled step is traced for few shapes.
        """
        counts = [start // block_size + 1 for start in starts]
        num_pairs = sum(counts)
        padded = bucket(num_pairs)
        pair_rows = np.zeros(padded, np.int32)
        pair_indices = np.full(padded, PADDING_INDEX, np.int32)
        pair_blocks = np.zeros(padded, np.int32)
        row_pairs = np.full((num_rows, bucket(max(counts))), -1, np.int32)
        # A padding row must merge something: any pair will do, nobody reads the answer.
        row_pairs[:, 0] = 0
        first = 0
        for row, (count, table) in enumerate(zip(counts, tables, strict=True)):
            pairs = slice(first, first + count)
            pair_rows[pairs] = row
            pair_indices[pairs] = np.arange(count)
            pair_blocks[pairs] = table[:count]
            row_pairs[row, :count] = np.arange(first, first + count)
            first += count
        return cls(mx.array(pair_rows), mx.array(pair_indices), mx.array(pair_blocks), mx.array(row_pairs))


class PairInputs(NamedTuple):
    """What each layer's gather_mm needs, derived once a step from DecodeInputs."""

    query_indices: mx.array
    """(P, Hkv) into queries seen as (B * Hkv, G, Dk)."""
    pool_indices: mx.array
    """(P, Hkv) into a pool seen as (num_blocks * Hkv, block_size, D)."""
    mask: mx.array
    """(P, 1, 1, block_size) 0 or MASKED."""
    row_pairs: mx.array
    """(B, N) pairs of each row, 0 where padded."""
    row_mask: mx.array
    """(B, N, 1, 1, 1) 0 or MASKED."""
    weight_indices: mx.array
    """(P, Hkv) into weights seen as (P * Hkv, G, block_size): one after the other."""


def derive(inputs: DecodeInputs, positions: mx.array, num_kv_heads: int, block_size: int) -> PairInputs:
    """`positions` (B,): the last position each row attends to."""
    heads = mx.arange(num_kv_heads)
    limits = positions[inputs.pair_rows] - inputs.pair_indices * block_size
    mask = mx.where(mx.arange(block_size) <= limits[:, None], 0.0, MASKED)
    return PairInputs(
        query_indices=inputs.pair_rows[:, None] * num_kv_heads + heads,
        pool_indices=inputs.pair_blocks[:, None] * num_kv_heads + heads,
        mask=mask[:, None, None],
        row_pairs=mx.maximum(inputs.row_pairs, 0),
        row_mask=mx.where(inputs.row_pairs >= 0, 0.0, MASKED)[:, :, None, None, None],
        weight_indices=mx.arange(inputs.pair_rows.shape[0] * num_kv_heads).reshape(-1, num_kv_heads),
    )


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, pairs: PairInputs, scale: float, shifted_exp: ShiftedExp
) -> mx.array:
    """queries (B, Hq, Dk), keys and values one layer's pools. Returns (B, Hq, Dv); softmax in float32."""
    num_rows, num_heads, _ = queries.shape
    _, num_kv_heads, block_size, _ = keys.shape
    group = num_heads // num_kv_heads

    scores = mx.gather_mm(
        (queries * scale).reshape(num_rows * num_kv_heads, group, -1),
        keys.reshape(-1, block_size, keys.shape[-1]).swapaxes(-1, -2),
        lhs_indices=pairs.query_indices,
        rhs_indices=pairs.pool_indices,
    )
    scores = scores.astype(mx.float32) + pairs.mask  # (P, Hkv, G, block_size)
    flat_values = values.reshape(-1, block_size, values.shape[-1])

    def weigh(weights: mx.array) -> mx.array:
        """(P, Hkv, G, block_size) weights -> (P, Hkv, G, Dv) sums of values."""
        return mx.gather_mm(
            weights.astype(values.dtype).reshape(-1, group, block_size),
            flat_values,
            lhs_indices=pairs.weight_indices,
            rhs_indices=pairs.pool_indices,
        ).astype(mx.float32)

    merged = merge(scores, weigh, pairs, shifted_exp)
    return merged.reshape(num_rows, num_heads, -1).astype(queries.dtype)


def merge(
    scores: mx.array, weigh: Callable[[mx.array], mx.array], pairs: PairInputs, shifted_exp: ShiftedExp
) -> mx.array:
    """Softmax and weighted values over the blocks of each row: (B, Hkv, G, Dv).

    scores (P, Hkv, G, block_size), masked; `weigh` takes weights of that shape to (P, Hkv, G, Dv) sums of values.
    """
    if pairs.row_pairs.shape[0] == 1:  # every pair is of this row: one softmax over all of them, nothing to merge
        weights = shifted_exp(scores, scores.max(axis=(0, 3), keepdims=True))
        total = weights.sum(axis=(0, 3))[..., None]
        return weigh(weights).sum(axis=0, keepdims=True) / total
    maximum = scores.max(axis=-1, keepdims=True)
    weights = shifted_exp(scores, maximum)
    total = weights.sum(axis=-1, keepdims=True)
    partial = weigh(weights)
    row_maximum = maximum[pairs.row_pairs] + pairs.row_mask  # (B, N, Hkv, G, 1)
    # One number for each pair and head: MLX's own exp costs less here than the many operations of a quick one.
    share = mx.exp(row_maximum - row_maximum.max(axis=1, keepdims=True))
    return (partial[pairs.row_pairs] * share).sum(axis=1) / (total[pairs.row_pairs] * share).sum(axis=1)


def bucket(count: int) -> int:
    """`count` rounded up so that few different sizes occur: by a few where that costs little, else by an eighth."""
    if count <= 4:
        return count
    step = 2 if count <= 8 else 4 if count <= 32 else 1 << (count.bit_length() - 4)
    return -(-count // step) * step
