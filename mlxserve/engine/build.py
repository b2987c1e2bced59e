"""Puts an engine together for a loaded model: runner, cache size, scheduler, warm-up. Runs on the engine thread."""

import dataclasses
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from mlxserve.config import EngineConfig
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.core.step import DecodeRow, PrefillChunk, ScheduledStep
from mlxserve.engine.engine import Engine, Runner
from mlxserve.errors import ModelLoadError
from mlxserve.kv.block_pool import INITIAL_BLOCKS, BlockPool
from mlxserve.kv.layer_group import FullAttentionGroup
from mlxserve.kv.manager import KVManager
from mlxserve.runner import cpu_ops, device, probe
from mlxserve.runner.attention.prefill import TiledAttention, fused_attention
from mlxserve.runner.device import Device
from mlxserve.runner.fallback_runner import FallbackRunner
from mlxserve.runner.model_runner import ModelRunner
from mlxserve.runner.paged_model import Kernels, PagedModel, UnsupportedByBlockCache
from mlxserve.runner.rotary import Rotations
from mlxserve.scheduler.budget import PrefillBudget
from mlxserve.scheduler.scheduler import Scheduler
from mlxserve.store.loader import LoadedModel

logger = logging.getLogger(__name__)

HEADROOM = 0.1
"""Share of the memory budget left to the arrays of a step."""
MAX_FALLBACK_SEQS = 4
"""Sequences a model on mlx-lm's own caches runs at a time: these caches grow outside of any accounting."""
WARM_UP_CHUNKS = (16, 64, 256)
WARM_UP_ROWS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    engine: Engine
    context_length: int
    """Tokens a sequence may have: the model's length, or less where the settings or the cache's memory say so."""
    uses_block_cache: bool


def configure_device() -> Device:
    """Find the device and set MLX's limits for it. Call once, before anything is loaded."""
    found = device.detect()
    device.configure(found)
    logger.info("device: %s, memory budget %.1f GB", found.name, found.memory_budget / 1e9)
    return found


def build_engine(loaded: LoadedModel, config: EngineConfig, found: Device, context_length: int) -> BuiltEngine:
    """An engine that has run its kernels once and knows about how long its steps take.

    Raises:
        ModelLoadError: the memory that is left does not hold a cache for one sequence of useful length.
    """
    started = time.perf_counter()
    runner: Runner
    try:
        paged = _paged_model(loaded, config, found)
    except UnsupportedByBlockCache as reason:
        logger.info("%s runs on mlx-lm's own caches, without batching: %s", loaded.name, reason)
        runner = FallbackRunner(loaded.model, max_pass_tokens=found.max_pass_tokens)
        config = dataclasses.replace(config, max_num_seqs=min(config.max_num_seqs, MAX_FALLBACK_SEQS))
        max_blocks = 0
    else:
        runner = ModelRunner(paged, max_pass_tokens=found.max_pass_tokens)
        max_blocks = _max_blocks(loaded, config, found, paged.storage.bytes_per_block)
        context_length = min(context_length, (max_blocks - 1) * config.block_size)
    budget = PrefillBudget(
        max_prefill_tokens=config.max_prefill_tokens or found.max_prefill_tokens,
        target_itl=config.target_itl_ms / 1000,
    )
    _warm_up(runner, budget, config, num_groups=min(max_blocks, 1))
    logger.info(
        "%s is ready: context length %d, %s, warm-up %.1f s",
        loaded.name,
        context_length,
        f"{max_blocks} KV blocks of {config.block_size} tokens" if max_blocks else "no block cache",
        time.perf_counter() - started,
    )
    return BuiltEngine(
        Engine(runner, _scheduler_maker(loaded.name, config, budget, max_blocks)), context_length, max_blocks > 0
    )


def _paged_model(loaded: LoadedModel, config: EngineConfig, found: Device) -> PagedModel:
    if found.is_metal:
        kernels = Kernels(_shifted_exp, fused_attention)
    else:
        kernels = Kernels(cpu_ops.shifted_exp, TiledAttention(cpu_ops.shifted_exp), Rotations())
        cpu_ops.install(sys.modules[type(module).__module__] for module in loaded.model.modules())
    shapes = probe.layer_shapes(loaded.model)
    probe.check_equivalence(loaded.model, shapes, kernels, loaded.context_length)
    return PagedModel(loaded.model, shapes, config.block_size, kernels)


@mx.compile
def _shifted_exp(scores: mx.array, maximum: mx.array) -> mx.array:
    return mx.exp(scores - maximum)


def _max_blocks(loaded: LoadedModel, config: EngineConfig, found: Device, bytes_per_block: int) -> int:
    """Blocks the pool may grow to, scratch block included."""
    available = config.kv_cache_bytes
    if available is None:
        # Active memory holds the weights of this and any other model, and their caches.
        available = int(found.memory_budget * (1 - HEADROOM)) - mx.get_active_memory()
    max_blocks = max(available, 0) // bytes_per_block
    if max_blocks < 2:
        raise ModelLoadError(
            f"{max(available, 0) / 1e6:.0f} MB are left for the KV cache and one block of {config.block_size} tokens "
            f"takes {bytes_per_block / 1e6:.1f} MB; choose a smaller model, or raise kv_cache_bytes if it is set",
            model=loaded.name,
        )
    return max_blocks


def _scheduler_maker(
    model_id: str, config: EngineConfig, budget: PrefillBudget, max_blocks: int
) -> Callable[[], Scheduler]:
    def make() -> Scheduler:
        groups = [FullAttentionGroup(BlockPool(max_blocks), config.block_size)] if max_blocks else []
        kv = KVManager(
            groups,
            block_size=config.block_size,
            model_id=model_id,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        return Scheduler(config, kv, budget)

    return make


def _warm_up(runner: Runner, budget: PrefillBudget, config: EngineConfig, num_groups: int) -> None:
    """Run a spread of steps on the scratch block: kernels get compiled, and the cost model its first measurements.

    Each load runs twice; only the second is measured.
    """
    longest = max(WARM_UP_CHUNKS)
    tables = ((0,) * (longest // config.block_size + 1),) * num_groups
    greedy = SamplingParams(temperature=0.0)
    # Alone, a prompt is never weighed against streams: nothing to measure, only kernels to compile.
    sizes = WARM_UP_CHUNKS if config.max_num_seqs > 1 else WARM_UP_CHUNKS[:1]
    loads: list[tuple[tuple[PrefillChunk, ...], tuple[DecodeRow, ...]]] = [
        ((PrefillChunk("warm-up-0", (0,) * size, 0, tables),), ()) for size in sizes
    ]
    # Rows of a runner with caches of its own go on where the chunk of the same request ended.
    num_rows = [count for count in WARM_UP_ROWS if count <= config.max_num_seqs] if num_groups else [1]
    for count in num_rows:
        rows = tuple(DecodeRow(f"warm-up-{i}", 0, longest, tables, greedy, 0, 0) for i in range(count))
        loads.append(((), rows))
    num_blocks = (INITIAL_BLOCKS,) * num_groups
    for prefill, decode in loads:
        step = ScheduledStep(0, (), prefill, decode, num_blocks)
        runner.run(step)
        budget.observe(step, runner.run(step))
    runner.run(ScheduledStep(0, (), (), (), num_blocks, released=("warm-up-0",)))
