"""A process that writes and reads KV blocks on disk until it is killed. Arguments: folder, bound in bytes, seed."""

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from mlxserve.core.block_data import ArrayLayout
from mlxserve.core.step import BlockSave
from mlxserve.engine.kv_disk import ModelDisk, open_kv_disk
from mlxserve.kv.block_hash import BlockHash
from mlxserve.store import block_folder
from mlxserve.store.block_file import BlockFormat

LAYOUT = {"0.0": ArrayLayout("F32", (25_000,), 100_000), "1.0": ArrayLayout("F32", (25_000,), 100_000)}
FORMAT = BlockFormat("c" * 32, LAYOUT)


def give(disk: ModelDisk, name: BlockHash, parent: BlockHash) -> None:
    """Have a block of that name written, whose contents follow from it."""
    disk.give(BlockSave(name, parent, (1,)), {array: name * (100_000 // len(name)) for array in LAYOUT})


def slowly(stock_write_all: Callable[[BinaryIO, bytes | memoryview], None]) -> Callable[..., None]:
    """So that most kills come in the middle of a file."""

    def write_all(file: BinaryIO, part: bytes | memoryview) -> None:
        for half in (part[: len(part) // 2], part[len(part) // 2 :]):
            stock_write_all(file, half)
            time.sleep(0.001)

    return write_all


def main(root: Path, max_bytes: int, seed: int) -> None:
    rng = random.Random(seed)
    block_folder._write_all = slowly(block_folder._write_all)
    kv_disk = open_kv_disk(root, max_bytes, wake=lambda: None)
    kv_disk.start()
    disk = kv_disk.open_model(FORMAT, block_size=8)
    assert disk is not None, kv_disk.failure
    names = [BlockHash(rng.randbytes(16))]
    is_reading = is_announced = False
    while True:
        for name, is_right in disk.finished_reads():
            assert is_right
            disk.discard(name)
            is_reading = False
        if disk.num_free_slots:
            names.append(BlockHash(rng.randbytes(16)))
            give(disk, names[-1], rng.choice(names[-10:-1] or names))
        name = rng.choice(names[-30:])
        if disk.has(name) and not is_reading:
            disk.read(name)
            is_reading = True
        if disk.stats().num_writes > 2 and not is_announced:
            print("writing", flush=True)
            is_announced = True


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
