"""What a new engine does before its first request: compile its kernels, and measure what the scheduler goes by.

All steps here work on the scratch block, so they leave nothing behind.
"""

import dataclasses
import logging
import statistics
import time
from collections.abc import Sequence

from mlxserve.config import EngineConfig
from mlxserve.core.pieces import Pieces
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.core.step import BlockTable, DecodeRow, DraftOrder, PrefillChunk, ScheduledStep
from mlxserve.engine.engine import Runner
from mlxserve.runner.model_runner import ModelRunner
from mlxserve.scheduler.budget import PrefillBudget

logger = logging.getLogger(__name__)

CHUNKS = (16, 64, 256)
ROWS = (1, 2, 4, 8)
DRAFTS = (1, 3, 7, 15)
"""Beside one row: what a stream alone may get."""
MIXED = ((1, 48, 0), (4, 24, 0), (8, 96, 0), (4, 64, 1536))
"""(rows, tokens of a chunk, its position): the last tells what a long prefix costs, before a stream has to."""
START = max(CHUNKS)
"""Position of all decode rows."""
AHEAD_STEPS = 6
MIN_GAIN = 0.02
"""Running ahead costs a discarded row where a stream ends; it has to be worth more."""


def run(
    runner: Runner,
    budget: PrefillBudget,
    config: EngineConfig,
    num_blocks: tuple[int, ...],
    *,
    has_draft_model: bool = False,
) -> Pieces[None]:
    """Run a spread of steps twice: the first compiles, the second tells the budget how long they take.

    `num_blocks`: the initial size of each group's pool, which the runner makes on the way.
    """
    num_groups = len(num_blocks)
    # Alone, a prompt is never weighed against streams: nothing to measure, only kernels to compile.
    sizes = CHUNKS if config.max_num_seqs > 1 else CHUNKS[:1]
    tables = _tables(config, num_groups)
    loads: list[tuple[Sequence[PrefillChunk], Sequence[DecodeRow]]] = [
        ((PrefillChunk("warm-up-0", (0,) * size, 0, tables),), ()) for size in sizes
    ]
    # Rows of a runner with caches of its own go on where the chunk of the same request ended.
    loads += [((), _rows(count, tables)) for count in ROWS[: None if num_groups else 1] if count <= config.max_num_seqs]
    if num_groups:
        loads += [
            ((PrefillChunk("warm-up-chunk", (0,) * size, start, tables),), _rows(count, tables))
            for count, size, start in MIXED
            if count <= config.max_num_seqs
        ]
        loads += [((), _row_with_drafts(count, tables, by_model=False)) for count in DRAFTS]
        if has_draft_model:
            loads += [((), _row_with_drafts(count, tables, by_model=True)) for count in DRAFTS]
    for prefill, decode in loads:
        step = _step(prefill, decode, num_blocks)
        runner.run(step)
        yield
        budget.observe(step, runner.run(step))
        yield
    runner.run(_step((), (), num_blocks, released=("warm-up-0",)))


def gains_by_running_ahead(runner: ModelRunner, config: EngineConfig, num_blocks: tuple[int, ...]) -> Pieces[bool]:
    """Whether streams go faster when a step is built while the one before it is computed. Measured, in turns."""
    tables = _tables(config, len(num_blocks))
    known = _step((), _rows(1, tables), num_blocks)
    unknown = _step((), _rows(1, tables, token_id=None), num_blocks)
    plain: list[float] = []
    ahead: list[float] = []
    for _ in range(AHEAD_STEPS):
        began = time.perf_counter()
        runner.run(known)
        runner.run(known)
        plain.append(time.perf_counter() - began)
        began = time.perf_counter()
        first = runner.start(known, None)
        second = runner.start(unknown, first)
        runner.finish(first)
        runner.finish(second)
        ahead.append(time.perf_counter() - began)
        yield
    ratio = statistics.median(ahead) / statistics.median(plain)
    logger.debug("a pair of decode steps takes %.2f of its time when the second is built ahead", ratio)
    return ratio < 1 - MIN_GAIN


def _tables(config: EngineConfig, num_groups: int) -> tuple[BlockTable, ...]:
    longest = max([START, *(start + size for _, size, start in MIXED)])
    return ((0,) * (longest // config.block_size + 1),) * num_groups


def _rows(count: int, tables: tuple[BlockTable, ...], token_id: int | None = 0) -> tuple[DecodeRow, ...]:
    greedy = SamplingParams(temperature=0.0)
    return tuple(DecodeRow(f"warm-up-{index}", token_id, START, tables, greedy, 0, 0) for index in range(count))


def _row_with_drafts(count: int, tables: tuple[BlockTable, ...], *, by_model: bool) -> tuple[DecodeRow, ...]:
    (row,) = _rows(1, tables)
    if by_model:
        return (dataclasses.replace(row, draft_order=DraftOrder(count)),)
    return (dataclasses.replace(row, draft_token_ids=(0,) * count),)


def _step(
    prefill: Sequence[PrefillChunk],
    decode: Sequence[DecodeRow],
    num_blocks: tuple[int, ...],
    released: tuple[str, ...] = (),
) -> ScheduledStep:
    return ScheduledStep(0, (), tuple(prefill), tuple(decode), num_blocks, released)
