"""What goes to disk and what comes back: blocks are saved behind the requests, and read for those that wait.

A block that comes back goes this way, and a request waits until all it hopes for have gone it or were given up:

| state   | in       | leaves it by                                                        |
|---------|----------|---------------------------------------------------------------------|
| wanted  | a chain  | plan_loads() asks the disk for it                                   |
| reading | _reading | poll(): it was read and is right, or it cannot be had               |
| ready   | _ready   | plan_loads() gives it a block in each group and puts it into a step |
| loading | _loading | finish_loads(): the step ran, the block is cached like any other    |
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from mlxserve.core.stats import DiskStats
from mlxserve.core.step import BlockLoad, BlockSave
from mlxserve.kv.block_hash import BlockHash
from mlxserve.kv.block_pool import BlockContent
from mlxserve.kv.layer_group import LayerGroup

SAVES_ALONE = 4
"""Blocks that a step hands to the disk when there are no requests."""
STEPS_BETWEEN_SAVES = 4
"""Beside requests one block in so many steps: streams wait while it is copied, a millisecond or two."""
LOADS_BESIDE_REQUESTS, LOADS_ALONE = 2, 8
"""Blocks from disk that a step writes into the cache."""
MAX_READ_AHEAD = 16
"""Blocks that lie in host memory on their way back; the disk reads while earlier ones are written into the cache."""


class BlockDisk(Protocol):
    """The blocks of one model on disk. No method waits for it; when it fails, it has nothing and takes nothing."""

    @property
    def is_on(self) -> bool:
        """False: it failed, for good."""
        ...

    @property
    def num_free_slots(self) -> int:
        """How many blocks it would take now to write them."""
        ...

    @property
    def has_news(self) -> bool:
        """Whether the disk has done something since finished_reads() was last called."""
        ...

    def has(self, name: BlockHash) -> bool:
        """Whether it can be asked for this block."""
        ...

    def knows(self, name: BlockHash) -> bool:
        """Whether the block need not be saved: it is there or being written."""
        ...

    def touch(self, name: BlockHash) -> None:
        """The block was used where it is in memory."""
        ...

    def read(self, name: BlockHash) -> None: ...

    def finished_reads(self) -> list[tuple[BlockHash, bool]]:
        """Blocks asked for, and whether they are there and right. Those that are must be loaded or discarded."""
        ...

    def discard(self, name: BlockHash) -> None:
        """Nobody wants this block any more that was read."""
        ...

    def stats(self) -> DiskStats: ...


class DiskTier:
    def __init__(self, groups: Sequence[LayerGroup], disk: BlockDisk) -> None:
        self._groups = tuple(groups)
        self._disk = disk
        self._unsaved: OrderedDict[BlockHash, BlockHash] = OrderedDict()
        """Parents of published blocks by name, in the order of publishing."""
        self._num_steps = 0
        self._chains: dict[str, deque[BlockContent]] = {}
        """What waiting requests hope for, by request id, in order of position."""
        self._reading: set[BlockHash] = set()
        self._ready: set[BlockHash] = set()
        self._loading: dict[BlockHash, BlockContent] = {}

    @property
    def num_unsaved(self) -> int:
        return len(self._unsaved) if self._disk.is_on else 0

    @property
    def can_save(self) -> bool:
        return bool(self._unsaved) and self._disk.num_free_slots > 0

    @property
    def has_news(self) -> bool:
        return self._disk.has_news

    def stats(self) -> DiskStats:
        return self._disk.stats()

    # --- to disk ---

    def add_published(self, name: BlockHash, parent: BlockHash) -> None:
        """A full block that may be saved once there is time."""
        self._unsaved[name] = parent
        # More than there are in memory cannot be saved: the oldest are gone.
        while len(self._unsaved) > self._groups[0].pool.max_blocks:
            self._unsaved.popitem(last=False)

    def touch(self, names: Sequence[BlockHash]) -> None:
        """These leading blocks of a sequence were used."""
        for name in reversed(names):
            if self._disk.knows(name):
                self._disk.touch(name)
                return

    def plan_saves(self, *, is_busy: bool) -> list[BlockSave]:
        """Blocks for the disk, oldest first; before a step hands out blocks, also some that it is about to evict."""
        saves: list[BlockSave] = []
        self._num_steps += 1
        limit = SAVES_ALONE
        if is_busy:
            limit = int(self._num_steps % STEPS_BETWEEN_SAVES == 0)
        limit = min(limit, self._disk.num_free_slots)
        while self._unsaved and len(saves) < limit:
            name, parent = self._unsaved.popitem(last=False)
            blocks = self._blocks(name)
            if blocks is not None and not self._disk.knows(name):
                saves.append(BlockSave(name, parent, blocks))
        return saves

    # --- from disk ---

    def has(self, name: BlockHash) -> bool:
        return self._disk.has(name)

    def fetch(self, request_id: str, contents: Iterable[BlockContent]) -> None:
        """Bring the blocks that follow what a waiting request found in memory."""
        self._chains[request_id] = deque(contents)

    def is_fetching(self, request_id: str) -> bool:
        return request_id in self._chains

    def forget(self, request_id: str) -> None:
        """The request waits no more."""
        self._chains.pop(request_id, None)

    def poll(self) -> None:
        """Take what the disk has read since the last call."""
        for name, is_right in self._disk.finished_reads():
            if name not in self._reading:
                self._disk.discard(name)
                continue
            self._reading.remove(name)
            if is_right:
                self._ready.add(name)
            else:
                self._give_up(name)

    def plan_loads(self, *, num_running: int) -> list[BlockLoad]:
        """Blocks that are ready, as long as a block is left for each running request. Asks for the next ones."""
        loads: list[BlockLoad] = []
        limit = LOADS_BESIDE_REQUESTS if num_running else LOADS_ALONE
        self._trim()
        for content in self._wanted(self._ready):
            if len(loads) == limit:
                break
            name = _name(content)
            if any(group.pool.num_available <= num_running for group in self._groups):
                # Who waits for room is to wait in the queue, where nobody is passed over for ever.
                self._give_up(name)
                break
            self._ready.remove(name)
            self._loading[name] = content
            loads.append(BlockLoad(name, tuple(group.pin_new() for group in self._groups)))
        for content in self._wanted(None):
            name = _name(content)
            if len(self._reading) + len(self._ready) >= MAX_READ_AHEAD:
                break
            if self._disk.has(name):
                self._reading.add(name)
                self._disk.read(name)
            else:
                self._give_up(name)
        self._trim()
        wanted = {content.hash for chain in self._chains.values() for content in chain}
        for name in self._ready - wanted:
            self._ready.remove(name)
            self._disk.discard(name)
        return loads

    def finish_loads(self, loads: Iterable[BlockLoad]) -> None:
        """The step with these loads ran."""
        for load in loads:
            content = self._loading.pop(BlockHash(load.name))
            for group, block_id in zip(self._groups, load.blocks, strict=True):
                group.fill_pinned(block_id, content)
        self._trim()

    def _wanted(self, state: set[BlockHash] | None) -> list[BlockContent]:
        """Blocks of all chains that are in this state, None: in none yet; none behind one that must come first."""
        found: dict[BlockHash, BlockContent] = {}
        for chain in self._chains.values():
            for content in chain:
                name = _name(content)
                if name in self._loading or self._blocks(name) is not None:
                    continue
                is_in_state = name in state if state is not None else name not in self._reading | self._ready
                if is_in_state:
                    found.setdefault(name, content)
                elif state is not None:
                    break
        return list(found.values())

    def _give_up(self, name: BlockHash) -> None:
        """No chain will have this block, nor any behind it."""
        for chain in self._chains.values():
            if any(content.hash == name for content in chain):
                while chain.pop().hash != name:
                    pass

    def _trim(self) -> None:
        """Drop leading blocks that are in memory by now, and chains that are done."""
        for request_id, chain in list(self._chains.items()):
            while chain and self._blocks(_name(chain[0])) is not None:
                chain.popleft()
            if not chain:
                del self._chains[request_id]

    def _blocks(self, name: BlockHash) -> tuple[int, ...] | None:
        """The block of that name in each group, None if some group has none."""
        found = [group.pool.find(name) for group in self._groups]
        blocks = tuple(block_id for block_id in found if block_id is not None)
        return blocks if len(blocks) == len(found) else None


def _name(content: BlockContent) -> BlockHash:
    if content.hash is None:
        raise ValueError("only full blocks have a name")
    return content.hash
