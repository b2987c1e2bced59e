"""Computes a ScheduledStep on the block cache: copies, then prefill chunks, then all decode rows at once."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxserve.core.step import DecodeRow, PrefillChunk, ScheduledStep, StepResult
from mlxserve.errors import EngineError
from mlxserve.runner import drafts
from mlxserve.runner.draft_model import DraftModel
from mlxserve.runner.paged_model import PagedModel, Piece, Row
from mlxserve.runner.sampler import SampleOutput, Sampler

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
    begin: float
    prefilled: float | None
    """time.perf_counter() when its first and its decode work could begin; None: they were one pass."""
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
    """`max_pass_tokens`: prefill tokens of one forward pass; a step with more is done in several."""

    def __init__(self, model: PagedModel, *, max_pass_tokens: int, draft_model: DraftModel | None = None) -> None:
        self._model = model
        self._draft_model = draft_model
        self._max_pass_tokens = max_pass_tokens
        self._sampler = Sampler()
        self._num_steps = 0

    def run(self, step: ScheduledStep) -> StepResult:
        return self.finish(self.start(step, None))

    def start(self, step: ScheduledStep, after: StartedStep | None) -> StartedStep:
        """Do all of a step but wait for its decode rows.

        With `after`, the step before, which may be under way: the graph of this one is built meanwhile, and given to
        the device when that one has ended. Not earlier: writing to a pool that a step under way still reads copies it.
        """
        begin = time.perf_counter()
        storage = self._model.storage
        storage.grow(step.num_blocks[0])
        if step.copies:
            storage.copy(step.copies)
        if self._draft_model is not None:
            self._draft_model.prepare(step.num_blocks[0], step.copies)
        passes = list(_passes(step.prefill, self._max_pass_tokens))
        if self._draft_model is not None:
            for pieces in passes:
                self._draft_model.prefill(pieces)
        # Rows read the weights anyway: the last chunks come along for less than a pass of their own.
        mixed = passes.pop() if passes and step.decode and self._model.can_mix else None
        for pieces in passes:
            self._model.prefill(pieces)
            mx.eval(storage.arrays())
        prefilled = time.perf_counter() if mixed is None else None
        rows = step.decode if self._draft_model is None else self._draft_model.fill(step.decode)
        positions = drafts.expand(rows)
        logits = None
        if mixed is not None:
            logits = self._model.prefill(mixed, [_known(row) for row in positions])
        elif positions:
            logits = self._logits(positions, after)
        if after is not None:
            begin = prefilled = after.wait()
        # Not before the wait: for some rows the sampler evaluates the logits, and with them the writes to the pool.
        sampled = None if logits is None else self._sampler.sample(logits, positions)
        if sampled is not None:
            mx.async_eval(sampled.arrays(), storage.arrays())  # type: ignore[no-untyped-call]
        self._num_steps += 1
        if self._num_steps % STEPS_BETWEEN_CLEARS == 0:
            mx.clear_cache()
        return StartedStep(step, rows, sampled, begin, prefilled)

    def finish(self, started: StartedStep) -> StepResult:
        """Wait for a step's tokens."""
        end = started.wait()
        tokens = () if started.sampled is None else drafts.accept(started.rows, started.sampled.collect())
        if started.prefilled is None:
            return StepResult(started.step.step_id, tokens, end - started.begin, None)
        return StepResult(started.step.step_id, tokens, started.prefilled - started.begin, end - started.prefilled)

    def reset(self) -> None:
        self._model.storage.clear()
        if self._draft_model is not None:
            self._draft_model.reset()

    def _logits(self, rows: Sequence[DecodeRow], after: StartedStep | None) -> mx.array:
        return self._model.decode(
            _token_ids(rows, after), [row.start for row in rows], [row.block_tables[0] for row in rows]
        )


def _known(row: DecodeRow) -> Row:
    if row.token_id is None:
        raise EngineError("a step with prefill cannot be built ahead of the result before it")
    return row.token_id, row.start, row.block_tables[0]


def _token_ids(rows: Sequence[DecodeRow], after: StartedStep | None) -> list[int] | mx.array:
    """The rows' tokens; those not known yet are taken from the step before, where they are being computed."""
    known = [row.token_id for row in rows if row.token_id is not None]
    if len(known) == len(rows):
        return known
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
