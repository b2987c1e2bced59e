"""A KV block away from the device: plain bytes, as the runner reads and writes them and the disk keeps them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from mlxserve.core.step import BlockSave


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """What one array of a block looks like."""

    dtype: str
    """As safetensors names it: `F32`, `BF16`, `U32`."""
    shape: tuple[int, ...]
    num_bytes: int


BlockLayout = Mapping[str, ArrayLayout]
"""The arrays of one block by name, in order. All blocks of a model have the same."""

BlockData = Mapping[str, bytes | memoryview]
"""The bytes of each array, row-major and little-endian."""


class BlockTransfer(Protocol):
    """Where the runner gets blocks that were read, and leaves blocks to be written. Neither waits for the disk."""

    def take(self, name: bytes) -> BlockData:
        """A block that was read and checked; each can be taken once.

        Raises:
            EngineError: there is none of that name.
        """
        ...

    def give(self, save: BlockSave, data: BlockData) -> None: ...
