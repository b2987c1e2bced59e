"""Puts an engine together for a loaded model: runner, cache size, scheduler, warm-up. Runs on the engine thread."""

import dataclasses
import hashlib
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata

import mlx.core as mx

from mlxserve.config import EngineConfig, cache_dir
from mlxserve.core.pieces import Pieces, finish
from mlxserve.engine import warm_up
from mlxserve.engine.engine import Engine, Runner
from mlxserve.engine.kv_disk import KVDisk, ModelDisk
from mlxserve.errors import ModelLoadError
from mlxserve.kv.block_pool import INITIAL_BLOCKS, BlockPool
from mlxserve.kv.layer_group import FullAttentionGroup
from mlxserve.kv.manager import KVManager
from mlxserve.runner import cpu_ops, device, probe
from mlxserve.runner.attention import paths
from mlxserve.runner.attention.prefill import TiledAttention, fused_attention
from mlxserve.runner.block_io import BlockIO, block_layout
from mlxserve.runner.device import Device
from mlxserve.runner.draft_model import DraftModel
from mlxserve.runner.fallback_runner import FallbackRunner
from mlxserve.runner.kv_format import KVFormat, kv_format
from mlxserve.runner.kv_storage import KVStorage, LayerShape
from mlxserve.runner.model_runner import ModelRunner
from mlxserve.runner.paged_model import Kernels, PagedModel, UnsupportedByBlockCache
from mlxserve.runner.rotary import Rotations
from mlxserve.scheduler.budget import PrefillBudget
from mlxserve.scheduler.drafting import Drafting
from mlxserve.scheduler.scheduler import Scheduler
from mlxserve.store.block_file import BlockFormat
from mlxserve.store.fingerprint import weights_fingerprint
from mlxserve.store.loader import LoadedModel

logger = logging.getLogger(__name__)

PATHS_FILE = "attention-paths.json"
"""In the cache folder: which way of decode attention was fastest for which shapes."""
INITIAL_CACHE_BYTES = 512 * 1024 * 1024
HEADROOM = 0.1
"""Share of the memory budget left to the arrays of a step."""
MAX_FALLBACK_SEQS = 4
"""Sequences a model on mlx-lm's own caches runs at a time: these caches grow outside of any accounting."""


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    engine: Engine
    context_length: int
    """Tokens a sequence may have: the model's length, or less where the settings or the cache's memory say so."""
    uses_block_cache: bool
    has_draft_model: bool = False
    can_embed: bool = False
    """Whether requests may ask for an embedding."""
    bytes_per_block: int = 0
    """Of its KV blocks, the draft model's part included; 0 without a block cache."""


def configure_device() -> Device:
    """Find the device and set MLX's limits for it. Call once, before anything is loaded."""
    found = device.detect()
    device.configure(found)
    return found


def build_engine(
    loaded: LoadedModel,
    config: EngineConfig,
    found: Device,
    context_length: int,
    *,
    draft: LoadedModel | None = None,
    run_ahead: bool | None = None,
    kv_disk: KVDisk | None = None,
) -> BuiltEngine:
    """build_pieces() at once."""
    pieces = build_pieces(loaded, config, found, context_length, draft=draft, run_ahead=run_ahead, kv_disk=kv_disk)
    return finish(pieces)


def build_pieces(
    loaded: LoadedModel,
    config: EngineConfig,
    found: Device,
    context_length: int,
    *,
    draft: LoadedModel | None = None,
    run_ahead: bool | None = None,
    kv_disk: KVDisk | None = None,
    kv_bytes: int | None = None,
) -> Pieces[BuiltEngine]:
    """An engine that has run its kernels once and knows about how long its steps take.

    `draft`: a smaller model of the same vocabulary that makes drafts for it.
    `run_ahead`: whether streams are computed one step ahead of their results, where the model allows it; None: whatever
    measures faster. `kv_disk`: where to keep blocks beyond the process.
    `kv_bytes`: memory the cache may take at most; None: what the settings say, or the device's budget leaves.

    Raises:
        ModelLoadError: the memory that is left does not hold a cache for one sequence of useful length; `kv_bits` is
            set and the model's cache cannot be quantised; or there is a draft model and one of the two runs on mlx-lm's
            own caches.
    """
    started = time.perf_counter()
    runner: Runner
    ahead_runner: ModelRunner | None = None
    disk: ModelDisk | None = None
    models = [loaded, *([] if draft is None else [draft])]
    # Before they are tuned for the device, which changes their modules.
    fingerprints: list[str] = []
    if kv_disk is not None:
        for each in models:
            fingerprints.append(weights_fingerprint(each.model))
            yield
    try:
        paged = yield from paged_pieces(loaded, config, found, device_kernels(loaded, found))
    except UnsupportedByBlockCache as reason:
        if config.kv_bits is not None:
            raise ModelLoadError(
                f"the KV cache of {loaded.name} cannot be quantised, since it runs on mlx-lm's own caches ({reason}); "
                "leave kv_bits out for this model",
                model=loaded.name,
            ) from reason
        logger.info("%s runs on mlx-lm's own caches, without batching: %s", loaded.name, reason)
        if draft is not None:
            raise ModelLoadError(
                f"{loaded.name} runs on mlx-lm's own caches ({reason}), where nothing can be drafted; "
                "serve it without draft_model",
                model=loaded.name,
            ) from reason
        runner = FallbackRunner(loaded.model, max_pass_tokens=found.max_pass_tokens)
        config = dataclasses.replace(config, max_num_seqs=min(config.max_num_seqs, MAX_FALLBACK_SEQS))
        max_blocks = initial_blocks = bytes_per_block = 0
    else:
        draft_model = None if draft is None else (yield from _draft_model(draft, loaded, config, found))
        storages = [paged.storage, *([] if draft_model is None else [draft_model.storage])]
        if kv_disk is not None:
            disk = _model_disk(models, fingerprints, config, storages, kv_disk)
        runner = ahead_runner = ModelRunner(
            paged,
            max_pass_tokens=found.max_pass_tokens,
            draft_model=draft_model,
            block_io=None if disk is None else BlockIO(storages, disk),
        )
        bytes_per_block = sum(storage.bytes_per_block for storage in storages)
        if kv_bytes is None:
            kv_bytes = config.kv_cache_bytes if config.kv_cache_bytes is not None else _room_beside_weights(found)
        max_blocks = _max_blocks(loaded, config, kv_bytes, bytes_per_block)
        initial_blocks = _initial_blocks(config, max_blocks, bytes_per_block)
        context_length = min(context_length, (max_blocks - 1) * config.block_size)
    budget = PrefillBudget(
        max_prefill_tokens=config.max_prefill_tokens or found.max_prefill_tokens,
        target_itl=config.target_itl_ms / 1000,
    )
    num_blocks = (initial_blocks,) if max_blocks else ()
    yield from warm_up.run(runner, budget, config, num_blocks, has_draft_model=draft is not None)
    if ahead_runner is not None:
        if run_ahead is None:
            run_ahead = yield from warm_up.gains_by_running_ahead(ahead_runner, config, num_blocks)
        if not run_ahead:
            ahead_runner = None
    logger.info(
        "%s is ready: context length %d, %s, warm-up %.1f s",
        loaded.name,
        context_length,
        f"{max_blocks} KV blocks of {config.block_size} tokens" if max_blocks else "no block cache",
        time.perf_counter() - started,
    )
    drafting = Drafting(budget, takes_drafts=max_blocks > 0, has_draft_model=draft is not None)
    make_scheduler = _scheduler_maker(loaded.name, config, budget, drafting, max_blocks, initial_blocks, disk)
    return BuiltEngine(
        Engine(runner, make_scheduler, ahead_runner),
        context_length,
        uses_block_cache=max_blocks > 0,
        has_draft_model=draft is not None,
        can_embed=runner.can_embed,
        bytes_per_block=bytes_per_block,
    )


def _draft_model(draft: LoadedModel, loaded: LoadedModel, config: EngineConfig, found: Device) -> Pieces[DraftModel]:
    try:
        paged = yield from paged_pieces(draft, config, found, device_kernels(draft, found))
    except UnsupportedByBlockCache as reason:
        raise ModelLoadError(
            f"{draft.name} cannot be the draft model, as it runs on mlx-lm's own caches ({reason}); choose another",
            model=draft.name,
        ) from reason
    # Never evaluated: the shape is known without.
    return DraftModel(paged, vocab_size=loaded.model(mx.array([[0]])).shape[-1])


def device_kernels(loaded: LoadedModel, found: Device) -> Kernels:
    """The device's own functions, and a model that uses them."""
    if found.is_metal:
        return Kernels(_shifted_exp, fused_attention)
    cpu_ops.install(sys.modules[type(module).__module__] for module in loaded.model.modules())
    return Kernels(cpu_ops.shifted_exp, TiledAttention(cpu_ops.shifted_exp), Rotations())


def paged_model(loaded: LoadedModel, config: EngineConfig, found: Device, kernels: Kernels) -> PagedModel:
    """paged_pieces() at once."""
    return finish(paged_pieces(loaded, config, found, kernels))


def paged_pieces(loaded: LoadedModel, config: EngineConfig, found: Device, kernels: Kernels) -> Pieces[PagedModel]:
    """The model over an empty block cache, with the ways of attention that are fastest for it.

    Several over one model share their kernels.

    Raises:
        UnsupportedByBlockCache: the model needs more than the block cache does.
        ModelLoadError: `kv_bits` does not suit its heads.
    """
    shapes = probe.layer_shapes(loaded.model)
    yield
    findings = yield from probe.check_equivalence(loaded.model, shapes, kernels, loaded.context_length)
    kernels = dataclasses.replace(kernels, kv_format=_kv_format(loaded, config, shapes))
    paged = PagedModel(loaded.model, shapes, config.block_size, kernels)
    paged.can_mix = findings.can_mix
    first = shapes[0]
    shape = paths.AttentionShape(
        findings.num_heads,
        first.num_kv_heads,
        first.key_dim,
        first.value_dim,
        config.block_size,
        first.dtype,
        kernels.kv_format,
    )
    candidates = paths.candidates(kernels.kv_format, kernels.shifted_exp)
    paged.choose_path = paths.choose(candidates, shape, found.name, cache_dir() / PATHS_FILE)
    return paged


def _kv_format(loaded: LoadedModel, config: EngineConfig, shapes: Sequence[LayerShape]) -> KVFormat:
    found = kv_format(config.kv_bits)
    try:
        for shape in shapes:
            shape.bytes_per_token(found)
    except ValueError as error:
        raise ModelLoadError(
            f"kv_bits={config.kv_bits} does not suit {loaded.name}: {error}", model=loaded.name
        ) from error
    return found


def _model_disk(
    models: Sequence[LoadedModel],
    fingerprints: Sequence[str],
    config: EngineConfig,
    storages: Sequence[KVStorage],
    kv_disk: KVDisk,
) -> ModelDisk | None:
    """The blocks on disk of a model, or of it and its draft model, if any can be kept.

    Their key changes with whatever could change what is in a block of given tokens.
    """
    layout = block_layout(storages)
    parts = {
        "weights": fingerprints,
        "configs": [model.config for model in models],
        "code": metadata.version("mlx-lm"),
        "block_size": config.block_size,
        "kv_bits": config.kv_bits,
        "layout": {name: dataclasses.astuple(array) for name, array in layout.items()},
    }
    key = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]
    return kv_disk.open_model(BlockFormat(key, layout), config.block_size)


@mx.compile
def _shifted_exp(scores: mx.array, maximum: mx.array) -> mx.array:
    return mx.exp(scores - maximum)


def _room_beside_weights(found: Device) -> int:
    """Bytes that the device's budget leaves: active memory holds the weights of this and any other model, and their
    caches."""
    return int(found.memory_budget * (1 - HEADROOM)) - mx.get_active_memory()


def _max_blocks(loaded: LoadedModel, config: EngineConfig, available: int, bytes_per_block: int) -> int:
    """Blocks the pool may grow to, scratch block included."""
    max_blocks = max(available, 0) // bytes_per_block
    if max_blocks < 2:
        raise ModelLoadError(
            f"{max(available, 0) / 1e6:.0f} MB are left for the KV cache and one block of {config.block_size} tokens "
            f"takes {bytes_per_block / 1e6:.1f} MB; choose a smaller model, or raise kv_cache_bytes if it is set",
            model=loaded.name,
        )
    return max_blocks


def _initial_blocks(config: EngineConfig, max_blocks: int, bytes_per_block: int) -> int:
    """Blocks to begin with. Growing copies the pool, which streams feel; a server begins with room for some of them."""
    roomy = INITIAL_CACHE_BYTES // bytes_per_block if config.max_num_seqs > 1 else 0
    return min(max_blocks, max(roomy, INITIAL_BLOCKS))


def _scheduler_maker(
    name: str,
    config: EngineConfig,
    budget: PrefillBudget,
    drafting: Drafting,
    max_blocks: int,
    initial_blocks: int,
    disk: ModelDisk | None,
) -> Callable[[], Scheduler]:
    def make() -> Scheduler:
        if disk is not None:
            disk.forget_reads()
        groups = [FullAttentionGroup(BlockPool(max_blocks, initial_blocks), config.block_size)] if max_blocks else []
        kv = KVManager(
            groups,
            block_size=config.block_size,
            model_id=name if disk is None else disk.format.model,
            enable_prefix_caching=config.enable_prefix_caching,
            disk=disk,
        )
        return Scheduler(config, kv, budget, drafting)

    return make
