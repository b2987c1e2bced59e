"""Computes a ScheduledStep on the block cache: copies, then prefill chunks, then all decode rows at once."""

import time
from collections.abc import Iterator, Sequence

import mlx.core as mx

from mlxserve.core.step import BlockTable, DecodeRow, PrefillChunk, SampledToken, ScheduledStep, StepResult
from mlxserve.runner.paged_model import PagedModel
from mlxserve.runner.sampler import Sampler

Piece = tuple[Sequence[int], int, BlockTable]
"""Token ids, position of the first one, block table."""

# MLX keeps buffers of freed arrays by size; sizes change as contexts grow, so what no longer fits is let go.
STEPS_BETWEEN_CLEARS = 256


class ModelRunner:
    """`max_pass_tokens`: prefill tokens of one forward pass; a step with more is done in several."""

    def __init__(self, model: PagedModel, *, max_pass_tokens: int) -> None:
        self._model = model
        self._max_pass_tokens = max_pass_tokens
        self._sampler = Sampler()
        self._num_steps = 0

    def run(self, step: ScheduledStep) -> StepResult:
        started = time.perf_counter()
        storage = self._model.storage
        storage.grow(step.num_blocks[0])
        if step.copies:
            storage.copy(step.copies)
        for pieces in _passes(step.prefill, self._max_pass_tokens):
            self._model.prefill(pieces)
            mx.eval(storage.arrays())
        prefilled = time.perf_counter()
        tokens = self._decode(step.decode) if step.decode else ()
        self._num_steps += 1
        if self._num_steps % STEPS_BETWEEN_CLEARS == 0:
            mx.clear_cache()
        return StepResult(step.step_id, tokens, prefilled - started, time.perf_counter() - prefilled)

    def reset(self) -> None:
        self._model.storage.clear()

    def _decode(self, rows: Sequence[DecodeRow]) -> tuple[SampledToken, ...]:
        logits = self._model.decode(
            [row.token_id for row in rows], [row.start for row in rows], [row.block_tables[0] for row in rows]
        )
        sampled = self._sampler.sample(logits, rows)
        del logits
        mx.eval(sampled.arrays(), self._model.storage.arrays())
        return sampled.collect()


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
