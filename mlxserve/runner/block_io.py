"""Blocks as bytes: what a step saves is copied out of the pools, and what it loads is written into them."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlxserve.core.block_data import BlockLayout, BlockTransfer
from mlxserve.core.step import BlockSave, ScheduledStep
from mlxserve.runner.kv_storage import KVStorage

Gathered = list[tuple[BlockSave, dict[str, mx.array]]]
"""Contents of blocks, (bytes,) of uint8 by name of the array."""


def block_layout(storages: Sequence[KVStorage]) -> BlockLayout:
    """What one block holds in all of these storages, which have the same block ids: a model's and its draft model's."""
    for storage in storages:
        storage.grow(1)
    return {
        f"{index}.{name}": array
        for index, storage in enumerate(storages)
        for name, array in storage.block_layout().items()
    }


class BlockIO:
    """`storages`: those that block_layout() was asked about."""

    def __init__(self, storages: Sequence[KVStorage], transfer: BlockTransfer) -> None:
        self._storages = tuple(storages)
        self._transfer = transfer

    def gather(self, step: ScheduledStep) -> Gathered:
        """What a step saves, unevaluated: to be given before the pools that it reads are written to."""
        if step.saves:
            self._grow(step)
        return [
            (
                save,
                {
                    f"{index}.{name}": array
                    for index, storage in enumerate(self._storages)
                    for name, array in storage.block_bytes(save.blocks[0]).items()
                },
            )
            for save in step.saves
        ]

    def give(self, gathered: Gathered) -> None:
        for save, arrays in gathered:
            mx.eval(arrays)
            self._transfer.give(save, {name: np.asarray(array).tobytes() for name, array in arrays.items()})

    def load(self, step: ScheduledStep) -> None:
        """Write what a step loads into its blocks."""
        if not step.loads:
            return
        self._grow(step)
        blocks = [(load.blocks[0], self._transfer.take(load.name)) for load in step.loads]
        for index, storage in enumerate(self._storages):
            prefix = f"{index}."
            storage.write_blocks(
                [
                    (block_id, {name.removeprefix(prefix): data[name] for name in data if name.startswith(prefix)})
                    for block_id, data in blocks
                ]
            )

    def _grow(self, step: ScheduledStep) -> None:
        for storage in self._storages:
            storage.grow(step.num_blocks[0])
