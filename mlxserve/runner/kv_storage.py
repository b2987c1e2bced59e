"""The arrays behind the block ids: a pool of keys and a pool of values for each layer.

MLX arrays are values. Writing into a pool happens in place only while nothing else refers to it: a second Python
reference, or a reader that is not evaluated yet, makes every write copy the whole pool. So a forward pass takes the
pools out of the storage, and puts the new ones back before it evaluates them; nobody else keeps one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlxserve.core.block_data import ArrayLayout, BlockData, BlockLayout
from mlxserve.core.step import BlockCopy
from mlxserve.errors import EngineError
from mlxserve.runner.kv_format import PLAIN, KVFormat

_DTYPES = {
    "F32": mx.float32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "U32": mx.uint32,
    "U8": mx.uint8,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
"""As safetensors calls the types that a pool may have."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps of one position."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype

    def bytes_per_token(self, kv_format: KVFormat) -> int:
        rows = [kv_format.row(dim, self.dtype) for dim in (self.key_dim, self.value_dim)]
        return self.num_kv_heads * sum(width * dtype.size for width, dtype in rows)


Pools = tuple[list[mx.array], list[mx.array]]
"""Keys (num_blocks, num_kv_heads, block_size, width) of each layer, and values likewise."""


class KVStorage:
    """Pools of all layers of one group. Block 0 is scratch: what padding writes there is never read."""

    def __init__(self, layers: Sequence[LayerShape], block_size: int, kv_format: KVFormat = PLAIN) -> None:
        self._layers = tuple(layers)
        self._format = kv_format
        self.block_size = block_size
        self._num_blocks = 0
        self._pools: Pools | None = None

    @property
    def bytes_per_block(self) -> int:
        return self.block_size * sum(layer.bytes_per_token(self._format) for layer in self._layers)

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def clear(self) -> None:
        """Give all memory back."""
        self._num_blocks = 0
        self._pools = None

    def grow(self, num_blocks: int) -> None:
        """Have at least this many blocks. One pool at a time is copied, so that no more than one is there twice."""
        if num_blocks <= self._num_blocks:
            return
        keys, values = self.take() if self._num_blocks else ([], [])
        for pools, dims in ((keys, "key_dim"), (values, "value_dim")):
            for index, layer in enumerate(self._layers):
                width, dtype = self._format.row(getattr(layer, dims), layer.dtype)
                shape = (num_blocks - self._num_blocks, layer.num_kv_heads, self.block_size, width)
                added = mx.zeros(shape, dtype=dtype)
                if self._num_blocks:
                    pools[index] = mx.concatenate([pools[index], added])
                else:
                    pools.append(added)
                mx.eval(pools[index])
        self._num_blocks = num_blocks
        self.put((keys, values))

    def take(self) -> Pools:
        """The pools, for one forward pass; until put() the storage has none.

        Raises:
            EngineError: a pass before this one took them and failed.
        """
        if self._pools is None:
            raise EngineError("the KV cache was lost in a step that failed")
        pools, self._pools = self._pools, None
        return pools

    def put(self, pools: Pools) -> None:
        """What a forward pass made of the pools it took."""
        self._pools = pools

    def arrays(self) -> Pools:
        """For mx.eval only; a reference that outlives the call makes the next write a copy."""
        if self._pools is None:
            raise EngineError("the KV cache was lost in a step that failed")
        return self._pools

    def block_layout(self) -> BlockLayout:
        """The arrays of one block: its part of each pool, named by the pool's place in `Pools`."""
        return {
            name: ArrayLayout(_DTYPE_NAMES[pool.dtype], pool.shape[1:], pool.nbytes // pool.shape[0])
            for name, pool in self._named_pools()
        }

    def block_bytes(self, block_id: int) -> dict[str, mx.array]:
        """The arrays of one block as (bytes,) of uint8, unevaluated: evaluate them before the pools are written to."""
        # Gathered and not sliced: a slice shares the pool's memory, and while it lives the next write is a copy.
        index = mx.array([block_id])
        return {name: pool[index].reshape(-1).view(mx.uint8) for name, pool in self._named_pools()}

    def write_blocks(self, blocks: Sequence[tuple[int, BlockData]]) -> None:
        """Put contents that block_bytes() gave, of whatever process, into blocks."""
        targets = mx.array([block_id for block_id, _ in blocks])
        for name, pool in self._named_pools():
            joined = mx.array(np.frombuffer(b"".join(data[name] for _, data in blocks), np.uint8))
            pool[targets] = joined.view(pool.dtype).reshape(len(blocks), *pool.shape[1:])
        mx.eval(self.arrays())

    def _named_pools(self) -> list[tuple[str, mx.array]]:
        """Whatever pools there are, as long as they are in blocks along their first axis."""
        named: list[tuple[str, mx.array]] = tree_flatten(self.arrays())
        return named

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks into other blocks, whole: past the positions asked for, the target is written before it is read.

        The sources are gathered and evaluated first. Reading and writing a pool in one graph would copy all of it.
        """
        sources = mx.array([copy.source for copy in copies])
        targets = mx.array([copy.target for copy in copies])
        keys, values = self.take()
        for pools in (keys, values):
            for pool in pools:
                blocks = pool[sources]
                mx.eval(blocks)
                pool[targets] = blocks
        self.put((keys, values))
        mx.eval(self.arrays())
