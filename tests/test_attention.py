"""Attention over block tables, for decode rows and prefill chunks, against a float64 reference."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from tiny_models import CPU_KERNELS, STOCK_KERNELS

from mlxserve.runner.attention import decode, prefill
from mlxserve.runner.attention.decode import DecodeInputs, bucket
from mlxserve.runner.attention.prefill import ChunkInputs
from mlxserve.runner.paged_model import Kernels, row_bucket

NUM_HEADS, NUM_KV_HEADS, KEY_DIM, VALUE_DIM = 6, 2, 16, 24
SCALE = 0.3
BLOCK_SIZE = 8
BOTH_KERNELS = pytest.mark.parametrize("kernels", [CPU_KERNELS, STOCK_KERNELS], ids=["cpu", "stock"])


class Pool:
    """Random keys and values of one layer, and what attention over a table must give, in float64."""

    def __init__(self, seed: int, block_size: int, num_blocks: int = 64) -> None:
        print(f"seed {seed}")
        self.random = np.random.default_rng(seed)
        self.block_size = block_size
        shape = (num_blocks, NUM_KV_HEADS, block_size)
        self.keys = self.random.normal(size=(*shape, KEY_DIM)).astype(np.float32)
        self.values = self.random.normal(size=(*shape, VALUE_DIM)).astype(np.float32)
        # Nobody may see what padding wrote to the scratch block.
        self.keys[0], self.values[0] = 50.0, 1e6
        self.free = list(self.random.permutation(np.arange(1, num_blocks)))

    def table(self, length: int) -> tuple[int, ...]:
        """Blocks for `length` positions and one more, which must not be read."""
        return tuple(int(self.free.pop()) for _ in range(-(-length // self.block_size) + 1))

    def queries(self, count: int) -> np.ndarray:
        return self.random.normal(size=(count, NUM_HEADS, KEY_DIM)).astype(np.float32) * 3

    def arrays(self) -> tuple[mx.array, mx.array]:
        return mx.array(self.keys), mx.array(self.values)

    def expected(self, query: np.ndarray, table: Sequence[int], position: int) -> np.ndarray:
        """query (Hq, Dk) at a position -> (Hq, Dv)."""
        keys = self.keys[list(table)].swapaxes(0, 1).reshape(NUM_KV_HEADS, -1, KEY_DIM)[:, : position + 1]
        values = self.values[list(table)].swapaxes(0, 1).reshape(NUM_KV_HEADS, -1, VALUE_DIM)[:, : position + 1]
        group = NUM_HEADS // NUM_KV_HEADS
        scores = np.einsum("hd,hnd->hn", query.astype(np.float64), keys.repeat(group, axis=0)) * SCALE
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return np.einsum("hn,hnd->hd", weights / weights.sum(axis=-1, keepdims=True), values.repeat(group, axis=0))


@BOTH_KERNELS
@pytest.mark.parametrize("block_size", [8, 64])
@pytest.mark.parametrize("starts", [[0], [7], [8], [100], [0, 0], [5, 64, 63], [130, 0, 8, 1, 31], [3] * 8])
def test_decode_attention(starts: list[int], block_size: int, kernels: Kernels) -> None:
    pool = Pool(sum(starts), block_size)
    tables = [pool.table(start + 1) for start in starts]
    num_rows = row_bucket(len(starts))
    queries = pool.queries(num_rows)
    inputs = DecodeInputs.build(starts, tables, block_size, num_rows)
    positions = mx.array([*starts, *[0] * (num_rows - len(starts))])
    pairs = decode.derive(inputs, positions, NUM_KV_HEADS, block_size)
    found = np.array(decode.attend(mx.array(queries), *pool.arrays(), pairs, SCALE, kernels.shifted_exp))
    assert found.shape == (num_rows, NUM_HEADS, VALUE_DIM)
    for row, (start, table) in enumerate(zip(starts, tables, strict=True)):
        np.testing.assert_allclose(found[row], pool.expected(queries[row], table, start), atol=2e-5)


@BOTH_KERNELS
@pytest.mark.parametrize("block_size", [8, 64])
@pytest.mark.parametrize(("start", "num_tokens"), [(0, 1), (0, 64), (0, 130), (5, 1), (64, 64), (63, 65), (100, 3)])
def test_prefill_attention(start: int, num_tokens: int, block_size: int, kernels: Kernels) -> None:
    pool = Pool(start + num_tokens, block_size)
    table = pool.table(start + num_tokens)
    queries = pool.queries(num_tokens)
    chunk = ChunkInputs.build(0, num_tokens, start, table, block_size)
    found = np.array(prefill.attend(mx.array(queries), *pool.arrays(), chunk, SCALE, kernels.chunk_attention))
    assert found.shape == (num_tokens, NUM_HEADS, VALUE_DIM)
    for index in range(num_tokens):
        np.testing.assert_allclose(found[index], pool.expected(queries[index], table, start + index), atol=2e-5)


@BOTH_KERNELS
def test_attention_with_scores_far_apart(kernels: Kernels) -> None:
    """Scores of some thousands: no overflow, and the blocks of a row are merged at the right scale."""
    pool = Pool(1, BLOCK_SIZE)
    pool.keys *= 100
    tables = [pool.table(50), pool.table(20)]
    queries = pool.queries(2)
    pairs = decode.derive(DecodeInputs.build([49, 19], tables, BLOCK_SIZE, 2), mx.array([49, 19]), 2, BLOCK_SIZE)
    found = np.array(decode.attend(mx.array(queries), *pool.arrays(), pairs, SCALE, kernels.shifted_exp))
    for row, position in enumerate((49, 19)):
        np.testing.assert_allclose(found[row], pool.expected(queries[row], tables[row], position), atol=1e-3)


def test_buckets_are_few_and_close() -> None:
    sizes = [bucket(count) for count in range(1, 4097)]
    assert sizes[:4] == [1, 2, 3, 4]
    assert sizes == sorted(sizes)
    assert all(count <= size <= max(count + 3, count * 9 / 8) for count, size in enumerate(sizes, start=1))
    assert len(set(sizes[:32])) == 12
    assert len(set(sizes)) < 75
    rows = [row_bucket(count) for count in range(1, 257)]
    assert all(count <= size <= count * 3 / 2 for count, size in enumerate(rows, start=1))
    assert len(set(rows)) < 20
