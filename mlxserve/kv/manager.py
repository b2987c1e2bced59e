"""The KV cache as the scheduler sees it: prefix hits, block tables, publishing. Counts and block ids, never arrays."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mlxserve.core.request import Request
from mlxserve.core.stats import DiskStats
from mlxserve.core.step import BlockCopy, BlockLoad, BlockSave, BlockTable
from mlxserve.kv.block_hash import BlockHash, block_hash, root_hash
from mlxserve.kv.block_pool import BlockContent, CacheIntegrityError
from mlxserve.kv.disk_tier import BlockDisk, DiskTier
from mlxserve.kv.layer_group import LayerGroup, TailMatch


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """How much of a request's tokens the cache holds: whole blocks, then part of one block in each group."""

    num_tokens: int
    hashes: tuple[BlockHash, ...] = ()
    tails: tuple[TailMatch, ...] = ()
    """One for each group, all of the same number of tokens; empty for none."""
    is_growing: bool = False
    """A running request is computing the next block, or it is on its way from disk: who waits for it need not compute
    it again."""


@dataclass(slots=True)
class _Sequence:
    """What the manager remembers of a request from its first lookup to free()."""

    root: BlockHash
    hashes: list[BlockHash] = field(default_factory=list)
    num_published_blocks: int = 0
    tail: BlockHash | None = None
    """Name of the tokens between the last full block and the last token, whose decode row chooses the next one. None if
    there are none, or some request has computed them."""
    growing_hit: PrefixHit | None = None
    asked_disk: bool = False
    """Once is enough: what was brought from disk and evicted before the request could start is computed."""


class KVManager:
    """Block tables of all running requests, over the layer groups of one model.

    With no groups (the runner keeps the cache itself) every question is answered by "yes" and every table is empty.
    A request has tables from admit() to free(); free() may be called in any state.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        *,
        block_size: int,
        model_id: str,
        enable_prefix_caching: bool = True,
        disk: BlockDisk | None = None,
    ) -> None:
        """`model_id` names everything a block depends on beside its tokens; with a `disk` also across restarts."""
        self._groups = tuple(groups)
        self._block_size = block_size
        self._model_id = model_id
        self._enable_prefix_caching = enable_prefix_caching and bool(groups)
        self._sequences: dict[str, _Sequence] = {}
        self._computing: dict[BlockHash, str] = {}
        self._tier = DiskTier(groups, disk) if disk is not None and self._enable_prefix_caching else None

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def max_tokens(self) -> int | None:
        """Positions that one request can have with the cache to itself; None for no limit."""
        return min((group.max_tokens for group in self._groups), default=None)

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Blocks that exist now in each group, scratch block included."""
        return tuple(group.pool.num_blocks for group in self._groups)

    @property
    def max_blocks(self) -> int:
        return sum(group.pool.max_blocks for group in self._groups)

    @property
    def num_used_blocks(self) -> int:
        return sum(group.pool.num_used for group in self._groups)

    @property
    def num_shared_blocks(self) -> int:
        """Of the used ones, those that several requests hold."""
        return sum(group.pool.num_shared for group in self._groups)

    @property
    def num_cached_blocks(self) -> int:
        return sum(group.pool.num_cached for group in self._groups)

    @property
    def num_unsaved_blocks(self) -> int:
        """Blocks that are still to be written to disk, evicted ones among them."""
        return 0 if self._tier is None else self._tier.num_unsaved

    @property
    def can_save(self) -> bool:
        """Whether plan_saves() might have something."""
        return self._tier is not None and self._tier.can_save

    @property
    def has_disk_news(self) -> bool:
        """Whether the disk has done something since poll_disk()."""
        return self._tier is not None and self._tier.has_news

    @property
    def disk_stats(self) -> DiskStats | None:
        return None if self._tier is None else self._tier.stats()

    @property
    def num_evicted_blocks(self) -> int:
        return sum(group.pool.num_evicted for group in self._groups)

    def find_cached_prefix(self, request: Request) -> PrefixHit:
        """The longest cached prefix of the request's tokens. It never covers the last one, which must be computed."""
        if not self._enable_prefix_caching:
            return PrefixHit(0)
        sequence = self._sequence(request)
        if sequence.growing_hit is not None and self._is_computing_after(sequence, sequence.growing_hit):
            return sequence.growing_hit
        self._extend_hashes(sequence, request, request.num_tokens // self._block_size)
        sequence.tail = self._tail_name(sequence, request)
        if request.wants_whole_prompt:
            return PrefixHit(0)
        num_blocks = min((request.num_tokens - 1) // self._block_size, len(sequence.hashes))
        while num_blocks > (shortest := min(g.match_blocks(sequence.hashes[:num_blocks]) for g in self._groups)):
            num_blocks = shortest
        hit = PrefixHit(num_blocks * self._block_size, tuple(sequence.hashes[:num_blocks]))
        if self._is_computing_after(sequence, hit):
            sequence.growing_hit = PrefixHit(hit.num_tokens, hit.hashes, is_growing=True)
            return sequence.growing_hit
        sequence.growing_hit = None
        if self._is_coming_from_disk(request, sequence, hit):
            return PrefixHit(hit.num_tokens, hit.hashes, is_growing=True)
        return self._with_tails(request, sequence, hit)

    def can_admit(self, request: Request, hit: PrefixHit, reserve: int = 0) -> bool:
        """Whether blocks for all of the request's tokens can be had, with `reserve` left in each group."""
        return all(
            group.can_admit(hit.hashes, tail, request.num_tokens, reserve)
            for group, tail in zip(self._groups, self._tails(hit), strict=True)
        )

    def admit(self, request: Request, hit: PrefixHit) -> list[BlockCopy]:
        """Open tables that cover all of the request's tokens; its first `hit.num_tokens` need no computing.

        The copies must run before anything else of the step; until finish_copies() their sources are pinned.
        """
        copies = []
        for index, (group, tail) in enumerate(zip(self._groups, self._tails(hit), strict=True)):
            group.admit(request.request_id, hit.hashes, tail, request.num_tokens)
            if tail is not None:
                target = group.table(request.request_id)[len(hit.hashes)]
                copies.append(BlockCopy(index, tail.block_id, target, tail.num_tokens))
        if not self._enable_prefix_caching:
            return copies
        sequence = self._sequence(request)
        if self._tier is not None:
            self._tier.touch(hit.hashes)
        sequence.num_published_blocks = len(hit.hashes)
        if hit.num_tokens == request.num_tokens - 1:
            sequence.tail = None
        for name in [*sequence.hashes[len(hit.hashes) :], *self._tail_names(sequence)]:
            self._computing.setdefault(name, request.request_id)
        return copies

    def finish_copies(self, copies: Iterable[BlockCopy]) -> None:
        """The step with these copies ran."""
        for copy in copies:
            self._groups[copy.group].unpin(copy.source)

    def can_extend(self, request: Request, num_tokens: int) -> bool:
        return all(group.can_extend(request.request_id, num_tokens) for group in self._groups)

    def extend(self, request: Request, num_tokens: int) -> None:
        """Make the request's tables cover `num_tokens` positions."""
        for group in self._groups:
            group.extend(request.request_id, num_tokens)

    def num_spare_tokens(self, request: Request) -> int | None:
        """Positions the tables could cover at nobody's expense, by free blocks alone; None for no limit."""
        return min((group.num_spare_tokens(request.request_id) for group in self._groups), default=None)

    def trim(self, request: Request) -> None:
        """Give back what was there for drafts that turned out wrong: blocks past those of the request's tokens."""
        for group in self._groups:
            group.trim(request.request_id, request.num_tokens)

    def block_tables(self, request: Request) -> tuple[BlockTable, ...]:
        return tuple(group.table(request.request_id) for group in self._groups)

    def publish(self, request: Request) -> None:
        """Let the full blocks up to `num_computed_tokens` answer hits. Only what a finished forward wrote counts."""
        if not self._enable_prefix_caching:
            return
        sequence = self._sequence(request)
        num_full_blocks = request.num_computed_tokens // self._block_size
        self._extend_hashes(sequence, request, num_full_blocks)
        for index in range(sequence.num_published_blocks, num_full_blocks):
            name = sequence.hashes[index]
            self._publish_block(request, index, self._parent(sequence, index), name)
            self._stop_computing(name, request)
            # A salt keeps blocks from everybody else: they are not put where they outlive the process.
            if self._tier is not None and request.cache_salt is None:
                self._tier.add_published(name, self._parent(sequence, index))
        sequence.num_published_blocks = max(sequence.num_published_blocks, num_full_blocks)
        tail_index, num_tail_tokens = divmod(request.num_computed_tokens, self._block_size)
        if sequence.tail is not None and request.num_uncomputed_tokens <= 1:
            # Its owner goes on writing behind it. That does not touch what others may copy.
            if num_tail_tokens > 0:
                self._publish_block(request, tail_index, self._parent(sequence, tail_index), None)
            self._stop_computing(sequence.tail, request)
            sequence.tail = None

    def free(self, request: Request) -> None:
        """Give back the request's blocks. Published ones stay hittable, and so does the partly filled last one."""
        sequence = self._sequences.pop(request.request_id, None)
        if self._tier is not None:
            self._tier.forget(request.request_id)
        if not any(group.has_table(request.request_id) for group in self._groups):
            return
        if self._enable_prefix_caching and sequence is not None:
            index, num_tail_tokens = divmod(request.num_computed_tokens, self._block_size)
            if num_tail_tokens > 0:
                self._publish_block(request, index, self._parent(sequence, index), None)
            for name in [*sequence.hashes[sequence.num_published_blocks :], *self._tail_names(sequence)]:
                self._stop_computing(name, request)
        for group in self._groups:
            group.free(request.request_id)

    def poll_disk(self) -> None:
        """Take what the disk has read and written meanwhile."""
        if self._tier is not None:
            self._tier.poll()

    def plan_saves(self, *, is_busy: bool) -> list[BlockSave]:
        """Blocks to be written to disk, fewer when requests are there. They must be read before the step writes any."""
        return [] if self._tier is None else self._tier.plan_saves(is_busy=is_busy)

    def plan_loads(self, *, num_running: int) -> list[BlockLoad]:
        """Blocks from disk for requests that wait, as long as a block is left for each that runs.

        They must be written before anything else of the step runs; finish_loads() lets them answer hits.
        """
        return [] if self._tier is None else self._tier.plan_loads(num_running=num_running)

    def finish_loads(self, loads: Iterable[BlockLoad]) -> None:
        """The step with these loads ran."""
        if self._tier is not None:
            self._tier.finish_loads(loads)

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Raises CacheIntegrityError unless exactly the running requests hold blocks and all counts agree."""
        request_ids = {request.request_id for request in running}
        for group in self._groups:
            group.check_integrity(request_ids)
        if not request_ids.issuperset(self._computing.values()):
            raise CacheIntegrityError("a block is said to be computed by a request that does not run")

    def _sequence(self, request: Request) -> _Sequence:
        sequence = self._sequences.get(request.request_id)
        if sequence is None:
            sequence = _Sequence(root_hash(self._model_id, request.cache_salt))
            self._sequences[request.request_id] = sequence
        return sequence

    def _extend_hashes(self, sequence: _Sequence, request: Request, num_blocks: int) -> None:
        for index in range(len(sequence.hashes), num_blocks):
            sequence.hashes.append(block_hash(self._parent(sequence, index), self._block_tokens(request, index)))

    def _tail_name(self, sequence: _Sequence, request: Request) -> BlockHash | None:
        index, num_tokens = divmod(request.num_tokens - 1, self._block_size)
        if num_tokens == 0 or index < len(sequence.hashes):
            return None
        return block_hash(self._parent(sequence, index), self._block_tokens(request, index)[:num_tokens])

    def _tail_names(self, sequence: _Sequence) -> tuple[BlockHash, ...]:
        return () if sequence.tail is None else (sequence.tail,)

    def _parent(self, sequence: _Sequence, index: int) -> BlockHash:
        return sequence.hashes[index - 1] if index > 0 else sequence.root

    def _block_tokens(self, request: Request, index: int) -> tuple[int, ...]:
        start = index * self._block_size
        return tuple(request.token_ids[start : start + self._block_size])

    def _publish_block(self, request: Request, index: int, parent: BlockHash, name: BlockHash | None) -> None:
        num_written = request.num_computed_tokens - index * self._block_size
        content = BlockContent(parent, self._block_tokens(request, index)[:num_written], name)
        for group in self._groups:
            group.publish(request.request_id, index, content)

    def _is_coming_from_disk(self, request: Request, sequence: _Sequence, hit: PrefixHit) -> bool:
        """Whether blocks behind the hit are on their way; the first time, those that lie on disk are sent for."""
        tier = self._tier
        if tier is None:
            return False
        if sequence.asked_disk:
            return tier.is_fetching(request.request_id)
        sequence.asked_disk = True
        contents: list[BlockContent] = []
        for index in range(len(hit.hashes), min((request.num_tokens - 1) // self._block_size, len(sequence.hashes))):
            name = sequence.hashes[index]
            if not tier.has(name):
                break
            contents.append(BlockContent(self._parent(sequence, index), self._block_tokens(request, index), name))
        if not contents:
            return False
        # What is in memory must not be evicted for what comes after it.
        for group in self._groups:
            group.touch(hit.hashes)
        tier.fetch(request.request_id, contents)
        return True

    def _with_tails(self, request: Request, sequence: _Sequence, hit: PrefixHit) -> PrefixHit:
        index = len(hit.hashes)
        token_ids = self._block_tokens(request, index)[: request.num_tokens - 1 - hit.num_tokens]
        matches = [group.match_tail(self._parent(sequence, index), token_ids) for group in self._groups]
        found = [match for match in matches if match is not None]
        if len(found) < len(self._groups):
            return hit
        num_tokens = min(match.num_tokens for match in found)
        tails = tuple(TailMatch(match.block_id, num_tokens) for match in found)
        with_tails = PrefixHit(hit.num_tokens + num_tokens, hit.hashes, tails)
        # The pinned source is one block more than the request needs: a request that just fits must do without.
        return with_tails if self.can_admit(request, with_tails) else hit

    def _tails(self, hit: PrefixHit) -> tuple[TailMatch | None, ...]:
        return hit.tails or (None,) * len(self._groups)

    def _is_computing_after(self, sequence: _Sequence, hit: PrefixHit) -> bool:
        index = len(hit.hashes)
        name = sequence.hashes[index] if index < len(sequence.hashes) else sequence.tail
        return name in self._computing

    def _stop_computing(self, name: BlockHash, request: Request) -> None:
        if self._computing.get(name) == request.request_id:
            del self._computing[name]
