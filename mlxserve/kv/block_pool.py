"""The blocks of one layer group: who holds them, what they contain, which one goes next.

Every block except block 0 is in exactly one state:

| state  | references | content                       | leaves it by                              |
|--------|------------|-------------------------------|-------------------------------------------|
| free   | 0          | none                          | take()                                    |
| cached | 0          | published, answers prefix hits| hold() on a hit, or eviction by take()    |
| used   | >= 1       | none yet, or published        | release() of the last reference           |

Block 0 is scratch: padding writes go there, nobody ever holds it.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from mlxserve.errors import ConfigError, EngineError
from mlxserve.kv.block_hash import BlockHash

INITIAL_BLOCKS = 16
MAX_IDLE_SHARE = 3
"""The pool does not grow past this many times the blocks in use only to keep what nobody holds."""


class CacheIntegrityError(EngineError):
    """The books of the KV cache do not add up: a bug, and no answer computed from it can be trusted."""


@dataclass(frozen=True, slots=True)
class BlockContent:
    """What a block holds: `token_ids` at the positions after the block named `parent`."""

    parent: BlockHash
    token_ids: tuple[int, ...]
    hash: BlockHash | None
    """The block's own name when it is full; None while it is partly filled."""


@dataclass(slots=True)
class _Block:
    ref_count: int = 0
    content: BlockContent | None = None


class BlockPool:
    """Reference-counted blocks, least recently used first out. It starts small and doubles up to `max_blocks`.

    Raises:
        ConfigError: `max_blocks` leaves no block beside the scratch block.
    """

    def __init__(self, max_blocks: int, initial_blocks: int = INITIAL_BLOCKS) -> None:
        if max_blocks < 2:
            raise ConfigError(
                f"the KV cache has room for {max_blocks} blocks and needs 2 at least: "
                "raise kv_cache_bytes, or lower block_size"
            )
        self.max_blocks = max_blocks
        self.num_evicted = 0
        """Cached blocks that were handed out for something else, since the pool was made."""
        self.num_shared = 0
        """Blocks with more than one reference."""
        self._blocks: list[_Block] = [_Block()]
        self._free: list[int] = []
        # OrderedDict and not dict: a dict whose first key is deleted again and again scans over the holes.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._by_hash: dict[BlockHash, int] = {}
        self._children: dict[BlockHash, dict[int, None]] = {}
        self._add_blocks(min(max(initial_blocks, 2), max_blocks) - 1)

    @property
    def num_blocks(self) -> int:
        """Blocks that exist now, the scratch block included."""
        return len(self._blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return len(self._blocks) - 1 - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """How many times take() can succeed from here: by a free block, by growing, by eviction."""
        return len(self._free) + len(self._cached) + self.max_blocks - len(self._blocks)

    def ref_count(self, block_id: int) -> int:
        return self._blocks[block_id].ref_count

    def take(self) -> int:
        """Hand out a block with no content and one reference: a free one, else the least recently used cached one or
        a new one.

        Raises:
            EngineError: none is left; ask `num_available` first.
        """
        if not self._free and self._should_grow():
            self._add_blocks(min(len(self._blocks), self.max_blocks - len(self._blocks)))
        if self._free:
            block_id = self._free.pop()
        elif self._cached:
            block_id, _ = self._cached.popitem(last=False)
            self._drop_content(block_id)
            self.num_evicted += 1
        else:
            raise EngineError(f"all {self.max_blocks} KV blocks are in use")
        self._blocks[block_id].ref_count = 1
        return block_id

    def hold(self, block_id: int) -> None:
        """Add a reference to a block found by find() or find_tail()."""
        block = self._blocks[block_id]
        if block.ref_count == 0:
            del self._cached[block_id]
        block.ref_count += 1
        self.num_shared += block.ref_count == 2

    def release(self, block_id: int) -> None:
        """Drop a reference. With the last one the block becomes cached if its content was published, else free."""
        block = self._blocks[block_id]
        if block.ref_count == 0:
            raise CacheIntegrityError(f"KV block {block_id} was released more often than held")
        block.ref_count -= 1
        self.num_shared -= block.ref_count == 1
        if block.ref_count > 0:
            return
        if block.content is None:
            self._free.append(block_id)
        else:
            self._cached[block_id] = None

    def publish(self, block_id: int, content: BlockContent) -> None:
        """Let a block answer prefix hits. Nothing happens when another block answers for all of it already."""
        if content.hash is not None:
            known = content.hash in self._by_hash
        else:
            tail = self.find_tail(content.parent, content.token_ids)
            known = tail is not None and tail[1] == len(content.token_ids)
        if known:
            return
        self._drop_content(block_id)
        self._blocks[block_id].content = content
        self._children.setdefault(content.parent, {})[block_id] = None
        if content.hash is not None:
            self._by_hash[content.hash] = block_id

    def find(self, block_hash: BlockHash) -> int | None:
        """The full block of that name."""
        return self._by_hash.get(block_hash)

    def find_tail(self, parent: BlockHash, token_ids: Sequence[int]) -> tuple[int, int] | None:
        """The block after `parent` that shares the most leading tokens with `token_ids`, and how many it shares."""
        best: tuple[int, int] | None = None
        for block_id in self._children.get(parent, ()):
            content = self._blocks[block_id].content
            shared = _num_shared(content.token_ids, token_ids) if content is not None else 0
            if shared > (best[1] if best is not None else 0):
                best = (block_id, shared)
        return best

    def check_integrity(self, holders: Counter[int]) -> None:
        """Compare every count with the others and with `holders`, the references by block that the owner knows of.

        Raises:
            CacheIntegrityError: something does not add up.
        """
        used = {block_id for block_id, block in enumerate(self._blocks) if block.ref_count > 0}
        free, cached = set(self._free), set(self._cached)
        _check(len(free) == len(self._free), "a block is free twice")
        _check(free | cached | used == set(range(1, self.num_blocks)), "free + cached + used is not all blocks but 0")
        _check(len(free) + len(cached) + len(used) == self.num_blocks - 1, "a block is in two states")
        _check(self.num_blocks <= self.max_blocks, "the pool is larger than max_blocks")
        shared = sum(block.ref_count > 1 for block in self._blocks)
        _check(shared == self.num_shared, f"{shared} blocks are shared and {self.num_shared} are counted")
        for block_id, block in enumerate(self._blocks):
            _check(
                block.ref_count == holders[block_id],
                f"block {block_id} has {block.ref_count} references and {holders[block_id]} holders",
            )
            _check(block_id not in free or block.content is None, f"free block {block_id} has content")
            _check(block_id not in cached or block.content is not None, f"cached block {block_id} has no content")
            if block.content is not None:
                name = block.content.hash
                _check(name is None or self._by_hash.get(name) == block_id, f"the hash of block {block_id} is lost")
                _check(block_id in self._children.get(block.content.parent, ()), "a block is unknown to its parent")
        with_content = [block.content for block in self._blocks if block.content is not None]
        _check(len(self._by_hash) == sum(content.hash is not None for content in with_content), "a hash names no block")
        _check(sum(map(len, self._children.values())) == len(with_content), "a parent names a block without content")

    def _should_grow(self) -> bool:
        """Whether a new block is better than the oldest cached one: growing copies the whole pool."""
        if len(self._blocks) >= self.max_blocks:
            return False
        return not self._cached or self.num_used * MAX_IDLE_SHARE >= len(self._blocks)

    def _add_blocks(self, count: int) -> None:
        first = len(self._blocks)
        self._blocks.extend(_Block() for _ in range(count))
        self._free.extend(reversed(range(first, first + count)))

    def _drop_content(self, block_id: int) -> None:
        block = self._blocks[block_id]
        if block.content is None:
            return
        if block.content.hash is not None:
            del self._by_hash[block.content.hash]
        siblings = self._children[block.content.parent]
        del siblings[block_id]
        if not siblings:
            del self._children[block.content.parent]
        block.content = None


def _num_shared(a: Sequence[int], b: Sequence[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise CacheIntegrityError(f"KV block pool: {message}")
