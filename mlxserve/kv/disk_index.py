"""Which blocks lie on disk, how many bytes they take, and which go when another needs the room."""

from collections import Counter, OrderedDict
from dataclasses import dataclass

from mlxserve.kv.block_hash import BlockHash


@dataclass(frozen=True, slots=True)
class DiskKey:
    model: str
    """Key of everything that a block's contents depend on beside its tokens."""
    name: BlockHash


@dataclass(slots=True)
class _Entry:
    parent: DiskKey
    num_bytes: int
    is_written: bool = False
    num_reads: int = 0


class DiskIndex:
    """Files of blocks by key, least recently used first, never more than `max_bytes` of them.

    A block is of no use without those before it, so using one uses its ancestors, and they are always the more recent:
    what goes first has no descendants left.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._entries: OrderedDict[DiskKey, _Entry] = OrderedDict()
        self._num_blocks: Counter[str] = Counter()
        self._num_bytes: Counter[str] = Counter()
        self._total = 0

    @property
    def total_bytes(self) -> int:
        """Of all models, with those that are being written."""
        return self._total

    def num_blocks(self, model: str) -> int:
        return self._num_blocks[model]

    def num_bytes(self, model: str) -> int:
        return self._num_bytes[model]

    def __contains__(self, key: DiskKey) -> bool:
        """Whether the block is there, or about to be."""
        return key in self._entries

    def is_written(self, key: DiskKey) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.is_written

    def add(self, key: DiskKey, parent: BlockHash, num_bytes: int) -> list[DiskKey] | None:
        """Reserve room for a block that is not there yet: returns what must be removed from disk before it is written.

        None: it can have none, unless what is read or written now, or comes before it, were removed.
        """
        ancestors = self._touch(DiskKey(key.model, parent))
        removed = self._to_remove(num_bytes, ancestors)
        if removed is None:
            return None
        for old in removed:
            self.remove(old)
        self._entries[key] = _Entry(DiskKey(key.model, parent), num_bytes)
        self._count(key, 1, num_bytes)
        self._touch(key)
        return removed

    def mark_written(self, key: DiskKey) -> None:
        """The file is whole and can be read."""
        if key in self._entries:
            self._entries[key].is_written = True

    def begin_read(self, key: DiskKey) -> None:
        """The file is used, and stays until end_read() of as many reads as were begun."""
        if key in self._entries:
            self._entries[key].num_reads += 1
            self.touch(key)

    def end_read(self, key: DiskKey) -> None:
        if key in self._entries:
            self._entries[key].num_reads -= 1

    def touch(self, key: DiskKey) -> None:
        """The block was used, and with it all before it."""
        self._touch(key)

    def remove(self, key: DiskKey) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._count(key, -1, -entry.num_bytes)

    def _touch(self, key: DiskKey) -> set[DiskKey]:
        """Returns the block and those before it."""
        touched: set[DiskKey] = set()
        while (entry := self._entries.get(key)) is not None:
            self._entries.move_to_end(key)
            touched.add(key)
            key = entry.parent
        return touched

    def _to_remove(self, num_bytes: int, kept: set[DiskKey]) -> list[DiskKey] | None:
        room = self.max_bytes - self._total
        removed: list[DiskKey] = []
        for key, entry in self._entries.items():
            if room >= num_bytes:
                break
            if entry.is_written and not entry.num_reads and key not in kept:
                removed.append(key)
                room += entry.num_bytes
        return removed if room >= num_bytes else None

    def _count(self, key: DiskKey, num_blocks: int, num_bytes: int) -> None:
        self._num_blocks[key.model] += num_blocks
        self._num_bytes[key.model] += num_bytes
        self._total += num_bytes
