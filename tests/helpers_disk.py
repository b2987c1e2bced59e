"""KV blocks on disk for tests: a disk without files, as unreliable as its seed says, and the real one."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mlxserve.core.stats import DiskStats
from mlxserve.core.step import BlockSave
from mlxserve.engine.engine import Engine
from mlxserve.engine.kv_disk import KVDisk, open_kv_disk
from mlxserve.kv.block_hash import BlockHash

MAX_WRITES = 3
TIMEOUT = 20.0
"""Seconds any one wait may take before it counts as a hang."""

States = tuple[int, ...]
"""What a FakeRunner keeps in a block."""


@dataclass
class FakeDisk:
    """BlockDisk for the books, and for a FakeRunner where its blocks go to and come from.

    Reads and writes end at some later look at the news. Blocks get lost, as by another's damage, and reads fail.
    """

    seed: int = 0
    max_blocks: int = 1000
    chance_of_loss: float = 0.0
    is_on: bool = True
    blocks: dict[BlockHash, States] = field(default_factory=dict)
    num_loaded: int = 0
    num_lost: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._truth: dict[BlockHash, States] = {}
        self._writing: dict[BlockHash, States] = {}
        self._reading: list[BlockHash] = []
        self._ready: dict[bytes, States] = {}

    @property
    def num_free_slots(self) -> int:
        return MAX_WRITES - len(self._writing) if self.is_on else 0

    @property
    def has_news(self) -> bool:
        return bool(self._writing or self._reading)

    def has(self, name: BlockHash) -> bool:
        return self.is_on and name in self.blocks

    def knows(self, name: BlockHash) -> bool:
        return name in self.blocks or name in self._writing

    def touch(self, name: BlockHash) -> None:
        assert self.knows(name)

    def read(self, name: BlockHash) -> None:
        assert name not in self._reading, "asked twice"
        self._reading.append(name)

    def finished_reads(self) -> list[tuple[BlockHash, bool]]:
        for name in [name for name in self._writing if self._random.random() < 0.5]:
            states = self._writing.pop(name)
            if self.is_on and not self._is_lost():
                self.blocks[name] = states
                while len(self.blocks) > self.max_blocks:
                    del self.blocks[self._random.choice(list(self.blocks))]
        finished = [name for name in self._reading if self._random.random() < 0.5]
        self._reading = [name for name in self._reading if name not in finished]
        for name in finished:
            if not self.is_on or self._is_lost():
                self.blocks.pop(name, None)
            elif name in self.blocks:
                self._ready[name] = self.blocks[name]
        return [(name, name in self._ready) for name in finished]

    def discard(self, name: BlockHash) -> None:
        self._ready.pop(name, None)

    def stats(self) -> DiskStats:
        return DiskStats(self.is_on, len(self.blocks), 0, self.num_loaded, len(self._truth), self.num_lost)

    def take(self, name: bytes) -> States:
        self.num_loaded += 1
        return self._ready.pop(name)

    def give(self, save: BlockSave, states: States) -> None:
        name = BlockHash(save.name)
        assert not self.knows(name), "a block was saved twice"
        assert self.num_free_slots > 0
        assert self._truth.setdefault(name, states) == states, "two contents of one name"
        self._writing[name] = states

    def check_empty(self) -> None:
        """Nothing that was read lies around."""
        assert not self._reading
        assert not self._ready

    def _is_lost(self) -> bool:
        lost = self._random.random() < self.chance_of_loss
        self.num_lost += lost
        return lost


@contextmanager
def opened(root: Path, max_bytes: int = 1_000_000_000) -> Iterator[KVDisk]:
    """The real disk in a folder, as a process has it from its start to its end."""
    disk = open_kv_disk(root, max_bytes, wake=lambda: None)
    disk.start()
    try:
        yield disk
    finally:
        disk.close()


def save_all(engine: Engine) -> None:
    """Step an engine without requests until it has handed all its blocks to the disk, as the engine thread does."""
    end = time.monotonic() + TIMEOUT
    while engine.num_unsaved_blocks:
        assert time.monotonic() < end, "the disk takes no more blocks"
        if engine.has_work:
            engine.step()
            engine.check_integrity()
        else:
            time.sleep(0.001)


def block_files(root: Path) -> list[Path]:
    return sorted(root.glob("*/*.safetensors"))
