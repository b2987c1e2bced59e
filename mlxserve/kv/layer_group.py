"""Layers that keep the same part of the past share one pool of blocks and one block table a request: a layer group."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mlxserve.core.step import BlockTable
from mlxserve.kv.block_hash import BlockHash
from mlxserve.kv.block_pool import BlockContent, BlockPool, CacheIntegrityError


@dataclass(frozen=True, slots=True)
class TailMatch:
    """A block that can be copied: its first `num_tokens` tokens are the next ones of the request."""

    block_id: int
    num_tokens: int


class LayerGroup(Protocol):
    """What KVManager asks of a group, whatever its layers keep: all of the past, a window of it, or one state.

    `hashes` are names of full blocks in order of position; `num_tokens` counts positions from the start of the
    sequence. can_admit() and can_extend() answer for the call of the same name, which must not fail after it.
    """

    @property
    def pool(self) -> BlockPool: ...

    @property
    def max_tokens(self) -> int:
        """The longest sequence the group can hold with the whole pool to itself."""
        ...

    def match_blocks(self, hashes: Sequence[BlockHash]) -> int:
        """After how many of these blocks a sequence can go on from the cache; as many as possible."""
        ...

    def match_tail(self, parent: BlockHash, token_ids: Sequence[int]) -> TailMatch | None:
        """A block after `parent` that shares the first of `token_ids`."""
        ...

    def can_admit(self, hashes: Sequence[BlockHash], tail: TailMatch | None, num_tokens: int, reserve: int) -> bool:
        """Whether a sequence that hits on `hashes` and `tail` can cover `num_tokens` and leave `reserve` blocks."""
        ...

    def admit(self, request_id: str, hashes: Sequence[BlockHash], tail: TailMatch | None, num_tokens: int) -> None:
        """Open a table over `num_tokens` positions that starts with the blocks named `hashes`; pin the tail's block."""
        ...

    def has_table(self, request_id: str) -> bool: ...

    def can_extend(self, request_id: str, num_tokens: int) -> bool: ...

    def extend(self, request_id: str, num_tokens: int) -> None:
        """Make the table cover `num_tokens` positions."""
        ...

    def num_spare_tokens(self, request_id: str) -> int:
        """Positions the table could cover with free blocks alone: without growing the pool, without an eviction."""
        ...

    def trim(self, request_id: str, num_tokens: int) -> None:
        """Give back the blocks past those that `num_tokens` positions need."""
        ...

    def table(self, request_id: str) -> BlockTable: ...

    def publish(self, request_id: str, index: int, content: BlockContent) -> None:
        """Let the block at `index` of the table, which holds `content` by now, answer prefix hits."""
        ...

    def unpin(self, block_id: int) -> None:
        """The copy from this block has run."""
        ...

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        """Let these blocks, in order of position, be evicted after all others."""
        ...

    def pin_new(self) -> int:
        """Take a block for contents that come from elsewhere; ask the pool's `num_available` first."""
        ...

    def fill_pinned(self, block_id: int, content: BlockContent) -> None:
        """A block of pin_new() holds `content` by now: let it answer prefix hits, and nobody hold it."""
        ...

    def free(self, request_id: str) -> None:
        """Give up the table; published blocks stay hittable."""
        ...

    def check_integrity(self, request_ids: set[str]) -> None:
        """Raises CacheIntegrityError unless exactly these requests have tables and the pool's books agree."""
        ...


class FullAttentionGroup:
    """Layers that keep all of the past: block i of the table holds positions i * block_size and up."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._tables: dict[str, list[int]] = {}
        self._pins: Counter[int] = Counter()

    @property
    def pool(self) -> BlockPool:
        return self._pool

    @property
    def max_tokens(self) -> int:
        return (self._pool.max_blocks - 1) * self._block_size

    def match_blocks(self, hashes: Sequence[BlockHash]) -> int:
        for index, name in enumerate(hashes):
            if self._pool.find(name) is None:
                return index
        return len(hashes)

    def match_tail(self, parent: BlockHash, token_ids: Sequence[int]) -> TailMatch | None:
        found = self._pool.find_tail(parent, token_ids)
        return None if found is None else TailMatch(*found)

    def can_admit(self, hashes: Sequence[BlockHash], tail: TailMatch | None, num_tokens: int, reserve: int) -> bool:
        # A hit on a block nobody holds, and the pin of a tail, take from what is available just as a new block does.
        held = [*self._found(hashes), *([] if tail is None else [tail.block_id])]
        num_taken = sum(self._pool.ref_count(block_id) == 0 for block_id in held)
        return num_taken + self._num_blocks(num_tokens) - len(hashes) + reserve <= self._pool.num_available

    def admit(self, request_id: str, hashes: Sequence[BlockHash], tail: TailMatch | None, num_tokens: int) -> None:
        table = self._found(hashes)
        for block_id in table:
            self._pool.hold(block_id)
        if tail is not None:
            self._pool.hold(tail.block_id)
            self._pins[tail.block_id] += 1
        self._tables[request_id] = table
        self.extend(request_id, num_tokens)

    def has_table(self, request_id: str) -> bool:
        return request_id in self._tables

    def can_extend(self, request_id: str, num_tokens: int) -> bool:
        return self._num_blocks(num_tokens) - len(self._tables[request_id]) <= self._pool.num_available

    def extend(self, request_id: str, num_tokens: int) -> None:
        table = self._tables[request_id]
        while len(table) < self._num_blocks(num_tokens):
            table.append(self._pool.take())

    def num_spare_tokens(self, request_id: str) -> int:
        return (len(self._tables[request_id]) + self._pool.num_free) * self._block_size

    def trim(self, request_id: str, num_tokens: int) -> None:
        table = self._tables[request_id]
        while len(table) > self._num_blocks(num_tokens):
            self._pool.release(table.pop())

    def table(self, request_id: str) -> BlockTable:
        return tuple(self._tables[request_id])

    def publish(self, request_id: str, index: int, content: BlockContent) -> None:
        self._pool.publish(self._tables[request_id][index], content)

    def unpin(self, block_id: int) -> None:
        self._pins[block_id] -= 1
        self._pool.release(block_id)

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        for block_id in reversed(self._found(hashes)):
            self._pool.hold(block_id)
            self._pool.release(block_id)

    def pin_new(self) -> int:
        block_id = self._pool.take()
        self._pins[block_id] += 1
        return block_id

    def fill_pinned(self, block_id: int, content: BlockContent) -> None:
        self._pool.publish(block_id, content)
        self.unpin(block_id)

    def free(self, request_id: str) -> None:
        # Last block first: a chain is useful only from its start, so its tail must be evicted before its head.
        for block_id in reversed(self._tables.pop(request_id)):
            self._pool.release(block_id)

    def check_integrity(self, request_ids: set[str]) -> None:
        if set(self._tables) != request_ids:
            raise CacheIntegrityError(f"block tables without a running request: {set(self._tables) ^ request_ids}")
        holders = Counter(self._pins)
        for table in self._tables.values():
            holders.update(table)
        self._pool.check_integrity(holders)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _found(self, hashes: Sequence[BlockHash]) -> list[int]:
        found = [self._pool.find(name) for name in hashes]
        return [block_id for block_id in found if block_id is not None]
