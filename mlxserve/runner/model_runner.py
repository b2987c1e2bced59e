"""Computes a ScheduledStep on the block cache: saves, loads, copies, prefill chunks, then all decode rows at once."""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from mlxserve.core.constraint import MaskSource, TokenMasks
from mlxserve.core.step import (
    DecodeRow,
    PrefillChunk,
    ScheduledStep,
    StepResult,
    TokenLogprobs,
)
from mlxserve.errors import EngineError
from mlxserve.runner import drafts
from mlxserve.runner.block_io import BlockIO, Gathered
from mlxserve.runner.draft_model import DraftModel
from mlxserve.runner.paged_model import PagedModel, Piece, Row
from mlxserve.runner.pooling import pool, values
from mlxserve.runner.sampler import SampleOutput, Sampler
from mlxserve.runner.scoring import MAX_SCORED_TOKENS, score

# MLX keeps buffers of freed arrays by size; sizes change as contexts grow, so what no longer fits is let go.
STEPS_BETWEEN_CLEARS = 256


@dataclass(slots=True)
class StartedStep:
    """A step that was given to the device."""

    step: ScheduledStep
    rows: Sequence[DecodeRow]
    """Its decode rows, with all drafts made."""
    sampled: SampleOutput | None
    """Tokens of its decode rows, and of their drafts; None if it has none."""
    masks: TokenMasks | None
    """Of the same; None if no row is constrained."""
    begin: float
    prefilled: float | None
    """time.perf_counter() when its first and its decode work could begin; None: they were one pass."""
    scores: tuple[tuple[TokenLogprobs, ...], ...] = ()
    """StepResult.scores"""
    pooled: tuple[tuple[float, ...], ...] = ()
    """StepResult.pooled"""
    ended: float | None = None
    """time.perf_counter() when it was first seen to have ended: the step after it may begin there."""

    def wait(self) -> float:
        """Wait until it has ended; returns `ended`."""
        if self.sampled is not None:
            mx.eval(self.sampled.arrays())
        if self.ended is None:
            self.ended = time.perf_counter()
        return self.ended


class ModelRunner:
    """`max_pass_tokens`: prefill tokens of one forward pass; a step with more is done in several.
    `block_io`: for steps with saves and loads."""

    def __init__(
        self,
        model: PagedModel,
        *,
        max_pass_tokens: int,
        draft_model: DraftModel | None = None,
        block_io: BlockIO | None = None,
    ) -> None:
        self._model = model
        self._draft_model = draft_model
        self._max_pass_tokens = max_pass_tokens
        self._block_io = block_io
        self._sampler = Sampler()
        self._num_steps = 0

    def run(self, step: ScheduledStep, masks: MaskSource | None = None) -> StepResult:
        return self.finish(self.start(step, None, masks))

    def start(self, step: ScheduledStep, after: StartedStep | None, masks: MaskSource | None = None) -> StartedStep:
        """Do all of a step but wait for its decode rows. `masks` is needed for a step with constrained rows.

        With `after`, the step before, which may be under way: the graph of this one is built meanwhile, and given to
        the device when that one has ended. Not earlier: writing to a pool that a step under way still reads copies it.
        """
        storage = self._model.storage
        storage.grow(step.num_blocks[0])
        saved: Gathered = []
        if self._block_io is not None:
            saved = self._block_io.gather(step)
            if after is None:
                self._block_io.give(saved)
            self._block_io.load(step)
        elif step.saves or step.loads:
            raise EngineError("a step saves or loads blocks, and this runner has no disk")
        begin = time.perf_counter()
        if step.copies:
            storage.copy(step.copies)
        if self._draft_model is not None:
            self._draft_model.prepare(step.num_blocks[0], step.copies)
            for pieces in _passes(step.prefill, self._max_pass_tokens):
                self._draft_model.prefill(pieces)
        scores = tuple(self._prefill_and_score(chunk) for chunk in step.prefill if chunk.scored_ids)
        pooled = self._prefill_and_pool([chunk for chunk in step.prefill if chunk.pooling is not None])
        plain = [chunk for chunk in step.prefill if not chunk.scored_ids and chunk.pooling is None]
        passes = list(_passes(plain, self._max_pass_tokens))
        # Rows read the weights anyway: the last chunks come along for less than a pass of their own.
        mixed = passes.pop() if passes and step.decode and self._model.can_mix else None
        for pieces in passes:
            self._model.prefill(pieces)
            mx.eval(storage.arrays())
        prefilled = time.perf_counter() if mixed is None else None
        rows = step.decode if self._draft_model is None else self._draft_model.fill(step.decode)
        positions = drafts.expand(rows)
        logits = token_ids = None
        if mixed is not None:
            logits = self._model.prefill(mixed, [_known(row) for row in positions])
        elif positions:
            token_ids = _token_ids(positions, after)
            logits = self._logits(positions, token_ids)
        if after is not None:
            begin = prefilled = after.wait()
            # Before the pass that was built above is evaluated: what reads the pools then would make it copy them.
            if self._block_io is not None:
                self._block_io.give(saved)
        # Not before the wait: for some rows the sampler evaluates the logits, and with them the writes to the pool.
        token_masks = None
        if logits is not None and any(row.is_constrained for row in rows):
            # Masks need the token of the step before, and nothing of this one: they are computed beside its logits.
            mx.async_eval(logits, storage.arrays())  # type: ignore[no-untyped-call]
            token_masks = _masks(replace(step, decode=tuple(rows)), after, masks)
        sampled = None if logits is None else self._sampler.sample(logits, positions, token_ids, token_masks)
        if sampled is not None:
            mx.async_eval(sampled.arrays(), storage.arrays())  # type: ignore[no-untyped-call]
        self._num_steps += 1
        if self._num_steps % STEPS_BETWEEN_CLEARS == 0:
            mx.clear_cache()
        return StartedStep(step, rows, sampled, token_masks, begin, prefilled, scores, pooled)

    def finish(self, started: StartedStep) -> StepResult:
        """Wait for a step's tokens."""
        end = started.wait()
        tokens = () if started.sampled is None else drafts.accept(started.rows, started.sampled.collect())
        failures = {} if started.masks is None else drafts.by_row(started.rows, started.masks.failures)
        step_id, begin, prefilled = started.step.step_id, started.begin, started.prefilled
        if prefilled is None:
            return StepResult(step_id, tokens, end - begin, None, started.scores, failures, started.pooled)
        times = prefilled - begin, end - prefilled
        return StepResult(step_id, tokens, *times, started.scores, failures, started.pooled)

    @property
    def can_embed(self) -> bool:
        """Whether chunks may have pooling."""
        return self._model.can_mix

    def reset(self) -> None:
        self._model.storage.clear()
        if self._draft_model is not None:
            self._draft_model.reset()

    def _logits(self, rows: Sequence[DecodeRow], token_ids: mx.array | None) -> mx.array:
        known = [row.token_id for row in rows if row.token_id is not None]
        return self._model.decode(
            known if token_ids is None else token_ids,
            [row.start for row in rows],
            [row.block_tables[0] for row in rows],
        )

    def _prefill_and_score(self, chunk: PrefillChunk) -> tuple[TokenLogprobs, ...]:
        """A chunk in passes of its own, whose hidden states are kept until its scored tokens are scored."""
        scores: list[TokenLogprobs] = []
        # Without a head of its own to call, a pass makes the logits of all its tokens.
        size = self._max_pass_tokens if self._model.can_mix else MAX_SCORED_TOKENS
        for (piece,) in _passes([chunk], size):
            hidden = self._model.prefill_for_head([piece])
            mx.eval(hidden, self._model.storage.arrays())
            scores += score(chunk, piece[1] - chunk.start, hidden, self._model.head)
        return tuple(scores)

    def _prefill_and_pool(self, chunks: Sequence[PrefillChunk]) -> tuple[tuple[float, ...], ...]:
        """Chunks in passes of their own, as many as fit into each; of each chunk what its pooling asks for."""
        states: list[mx.array | None] = [None] * len(chunks)
        ends = list(itertools.accumulate(len(chunk.token_ids) for chunk in chunks))
        first = 0
        for pieces in _passes(chunks, self._max_pass_tokens):
            hidden = self._model.prefill_for_head(pieces)[:, 0].astype(mx.float32)
            past = first + len(hidden)
            for index, (chunk, end) in enumerate(zip(chunks, ends, strict=True)):
                own = hidden[max(end - len(chunk.token_ids) - first, 0) : max(min(end, past) - first, 0)]
                if len(own) > 0:
                    states[index] = pool(chunk.pooling, states[index], own)
            mx.eval(states, self._model.storage.arrays())
            first = past
        return tuple(values(state) for state in states if state is not None)


def _masks(step: ScheduledStep, after: StartedStep | None, masks: MaskSource | None) -> TokenMasks:
    if masks is None:
        raise EngineError("a step with constrained rows needs their masks")
    if after is None or after.sampled is None:
        return masks(step, {})
    token_ids = (token.token_id for token in after.sampled.collect())
    return masks(step, dict(zip((row.request_id for row in after.rows), token_ids, strict=True)))


def _known(row: DecodeRow) -> Row:
    if row.token_id is None:
        raise EngineError("a step with prefill cannot be built ahead of the result before it")
    return row.token_id, row.start, row.block_tables[0]


def _token_ids(rows: Sequence[DecodeRow], after: StartedStep | None) -> mx.array | None:
    """The rows' tokens where they are not known yet, from the step before that is computing them; else None."""
    known = [row.token_id for row in rows if row.token_id is not None]
    if len(known) == len(rows):
        return None
    if known or after is None or after.sampled is None or any(row.num_drafts for row in after.rows):
        raise EngineError("a step ahead needs the step before it, one without drafts, and tokens of that one only")
    row_of = {row.request_id: index for index, row in enumerate(after.rows)}
    return after.sampled.token_ids[mx.array([row_of[row.request_id] for row in rows])]


def _passes(chunks: Sequence[PrefillChunk], max_tokens: int) -> Iterator[list[Piece]]:
    """Cut and pack chunks into forward passes of at most `max_tokens` tokens, in order."""
    pieces: list[Piece] = []
    room = max_tokens
    for chunk in chunks:
        first = 0
        while first < len(chunk.token_ids):
            taken = chunk.token_ids[first : first + room]
            pieces.append((taken, chunk.start + first, chunk.block_tables[0]))
            first += len(taken)
            room -= len(taken)
            if room == 0:
                yield pieces
                pieces, room = [], max_tokens
    if pieces:
        yield pieces
