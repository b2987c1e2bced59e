"""From a model's files to an engine on the engine thread, and back to nothing."""

import asyncio
import gc
import logging
import time
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

from mlxserve.config import EngineConfig
from mlxserve.core.pieces import Pieces
from mlxserve.core.request import Speculation
from mlxserve.core.stats import Observer
from mlxserve.engine import build
from mlxserve.engine.base_models import BaseModels
from mlxserve.engine.build import BuiltEngine
from mlxserve.engine.engine_thread import EngineHandle, EngineThread
from mlxserve.engine.kv_disk import KVDisk
from mlxserve.engine.model_description import ModelDescription
from mlxserve.engine.residency import Residency, Resident, UnloadReason
from mlxserve.engine.served_model import ServedModel
from mlxserve.errors import MlxserveError, ModelLoadError
from mlxserve.runner import device
from mlxserve.runner.device import Device
from mlxserve.store import adapter_loader, loader
from mlxserve.store.adapter import Adapter, read_adapter
from mlxserve.store.estimate import estimate
from mlxserve.store.fit import Fit, fit, require_fit
from mlxserve.store.loader import LoadedModel
from mlxserve.store.machine import this_machine
from mlxserve.store.model_facts import ModelFacts, read_facts
from mlxserve.store.model_source import Location, ModelSource
from mlxserve.store.size_text import size_text
from mlxserve.text.capabilities import capabilities
from mlxserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")

LEAST_TOKENS = 4096
"""The KV cache that a model is not loaded without holds so many tokens, or its context if that is shorter."""
USEFUL_TOKENS = 32_768
"""A model gets a KV cache for so many where there is room for it, although other models may want that room later."""
SAVE_SECONDS = 5.0
"""How long an unload waits for KV blocks to go to disk."""
SAVE_POLL = 0.02


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a model's files are, its draft model's too, and the memory they will take."""

    path: Path
    facts: ModelFacts | None
    """None: its files are damaged, of which the loader knows more to say."""
    adapter: Adapter | None
    draft: tuple[ModelSource, Path] | None
    base_bytes: int
    """Of weights that all names of its location share."""
    own_bytes: int
    """Of its adapter and its draft model."""
    least_kv_bytes: int
    useful_kv_bytes: int
    most_kv_bytes: int | None
    """What as many requests of full length take as run at a time; None: not known."""
    digest: str


@dataclass(slots=True, eq=False)
class LoadedEngine:
    """A model on the engine thread, by whatever names it goes."""

    handle: EngineHandle
    tokenizer: Tokenizer
    description: ModelDescription
    """As the name it was loaded under has it."""
    base: Location
    base_bytes: int
    """Of weights that it shares with the other engines over its base."""
    own_bytes: int
    """Of its adapter's and draft model's weights."""
    bytes_per_block: int
    """Of its KV cache; 0 where that is outside of any accounting."""
    digest: str
    served: dict[str, ServedModel] = field(default_factory=dict)
    """By name: aliases of the same weights share them and their engine."""

    @property
    def num_kv_bytes(self) -> int:
        """Of its KV cache as it is now."""
        return self.handle.engine.num_blocks * self.bytes_per_block

    @property
    def num_in_flight(self) -> int:
        return sum(served.num_in_flight for served in self.served.values())

    def tokenizer_of(self, source: ModelSource) -> Tokenizer:
        """With the chat template of a name that has its own."""
        return self.tokenizer if source.template is None else self.tokenizer.with_template(source.template)

    def describe(self, source: ModelSource) -> ModelDescription:
        """What a name for it stands for."""
        tokenizer = self.tokenizer_of(source)
        length = self.description.context_length
        return replace(
            self.description,
            name=source.name,
            context_length=length if source.context_length is None else min(length, source.context_length),
            default_sampling=dict(source.sampling),
            capabilities=capabilities(tokenizer.tool_template, tokenizer.has_token),
            system=source.system,
            stop=source.stop,
        )


class Files(Protocol):
    """Where models' files are, and what goes by which name."""

    def resolve(self, name: str) -> ModelSource:
        """Raises ModelNotFound."""
        ...

    def locate(self, source: ModelSource) -> Path:
        """Find the files of a model or adapter, or fetch them: it blocks. Raises ModelNotFound, DownloadError."""
        ...


class Loading:
    """The ModelStore of the host: streams of other models go on while one is loaded. Belongs to the event loop."""

    def __init__(
        self,
        thread: EngineThread,
        found: Device,
        files: Files,
        residency: Residency,
        *,
        config: EngineConfig,
        executor: Executor,
        kv_disk: KVDisk | None,
        observer: Observer | None,
    ) -> None:
        self._thread = thread
        self._device = found
        self._files = files
        self._residency = residency
        self._config = config
        self._executor = executor
        self._kv_disk = kv_disk
        self._observer = observer
        self._bases = BaseModels(thread, self._read)
        self._pinned = {files.resolve(name).weights for name in config.pin}
        self._plans: WeakKeyDictionary[Resident, Plan] = WeakKeyDictionary()

    async def measure(self, source: ModelSource) -> Resident:
        """Raises ModelNotFound, DownloadError: the files cannot be had. ModelLoadError: its adapter cannot be used."""
        started = time.monotonic()
        try:
            plan = await asyncio.get_running_loop().run_in_executor(None, self._plan, source)
        except Exception as error:
            self._note_load(source, type(error).__name__, started)
            raise
        size, is_pinned = plan.own_bytes + plan.least_kv_bytes, source.weights in self._pinned
        resident = Resident(source, size, self._config.keep_alive, is_pinned, shared_size=plan.base_bytes)
        self._plans[resident] = plan
        return resident

    async def load(self, source: ModelSource, resident: Resident) -> LoadedEngine:
        """Raises ModelLoadError: the files cannot be used, or there is no memory for the cache."""
        started = time.monotonic()
        outcome = "ok"
        try:
            return await self._load(source, resident, self._plans[resident])
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, MlxserveError):
                logger.exception("loading failed")
            # Whoever keeps the error, to tell it to those who wait, would keep the weights in its frames.
            _drop_tracebacks(error)
            outcome = type(error).__name__
            if isinstance(error, Exception) and self._thread.death is None:
                await asyncio.wrap_future(self._thread.call(_free))
            raise
        finally:
            self._note_load(source, outcome, started)

    async def unload(self, model: LoadedEngine, reason: UnloadReason) -> None:
        """Take an engine off the thread when its blocks are on disk, and give its memory back to the system."""
        handle = model.handle
        await self.save_blocks(handle)
        await asyncio.wrap_future(self._thread.remove_engine(handle))
        self._bases.give_back(model.base)
        await asyncio.wrap_future(self._thread.call(_free))
        logger.info("unloaded %s: %s", handle.name, reason)
        if self._observer is not None:
            self._observer.model_unloaded(handle.name, reason)

    def death(self, model: LoadedEngine) -> str | None:
        return model.handle.death

    def close(self) -> None:
        """The engine thread is about to end."""
        self._bases.clear()

    async def save_blocks(self, handle: EngineHandle) -> None:
        """Wait until an engine without requests has handed all its blocks to the disk, which it does by itself."""
        end = time.monotonic() + SAVE_SECONDS
        while self._kv_disk is not None and self._kv_disk.failure is None and handle.death is None:
            if self._thread.death is not None or not handle.engine.num_unsaved_blocks:
                return
            if time.monotonic() > end:
                logger.warning("not all KV blocks of %s could be written to disk in time", handle.name)
                return
            await asyncio.sleep(SAVE_POLL)

    def _plan(self, source: ModelSource) -> Plan:
        """Find the files and read their headers. Blocks."""
        path = self._files.locate(source)
        facts = _facts(source, path)
        if facts is not None:
            fitting = self._fit(source, facts)
            if not fitting.fits:
                logger.info("%s: %s", source.name, fitting.line(self._config.kv_bits))
            require_fit(fitting, source.name)
        adapter = None
        if source.adapter_source is not None:
            adapter = read_adapter(self._files.locate(source.adapter_source), source.name)
        draft = None
        if self._config.draft_model is not None:
            draft_source = self._files.resolve(self._config.draft_model)
            if draft_source.adapter is not None:
                raise ModelLoadError(
                    f"the draft model {draft_source.name} has an adapter, which draft models cannot have; "
                    "name its base alone",
                    model=source.name,
                )
            draft = draft_source, self._files.locate(draft_source)
        paths = [path, *([] if draft is None else [draft[1]])]
        estimates = [
            estimate(each, dtype_policy=self._device.dtype_policy, kv_bits=self._config.kv_bits) for each in paths
        ]
        lengths = (estimates[0].context_length or None, source.context_length, self._config.max_model_len)
        longest = min((length for length in lengths if length is not None), default=USEFUL_TOKENS)
        # A block for what is left of the last one, and the scratch block.
        per_token, spare = sum(each.kv_bytes_per_token for each in estimates), 2 * self._config.block_size
        least, useful = ((min(tokens, longest) + spare) * per_token for tokens in (LEAST_TOKENS, USEFUL_TOKENS))
        most = (self._config.max_num_seqs * longest + spare) * per_token or None
        if self._config.kv_cache_bytes is not None:
            least = useful = most = self._config.kv_cache_bytes
        digest = "" if facts is None else facts.digest
        own_bytes = sum(each.weight_bytes for each in estimates[1:])
        if adapter is not None:
            digest = adapter.digest_on(digest)
            own_bytes += adapter.size
        return Plan(path, facts, adapter, draft, estimates[0].weight_bytes, own_bytes, least, useful, most, digest)

    async def _load(self, source: ModelSource, resident: Resident, plan: Plan) -> LoadedEngine:
        started = time.monotonic()
        base, tokenizer = await self._bases.take(source, plan.path)
        try:
            return await self._load_over(base, tokenizer, source, resident, plan, started)
        except BaseException:
            self._bases.give_back(source.location)
            raise

    async def _load_over(
        self,
        base: LoadedModel,
        tokenizer: Tokenizer,
        source: ModelSource,
        resident: Resident,
        plan: Plan,
        started: float,
    ) -> LoadedEngine:
        if plan.adapter is None:
            loaded = adapter_loader.view(base, source.name)
        else:
            policy = self._device.dtype_policy
            loaded = await self._work(adapter_loader.adapt_pieces(base, plan.adapter, source.name, policy))
        draft = None if plan.draft is None else await self._read_draft(source, tokenizer, *plan.draft)
        own_bytes = loaded.weight_bytes + (0 if draft is None else draft.weight_bytes)
        resident.shared_size = base.weight_bytes
        kv_bytes = self._residency.kv_share(resident, own_bytes, plan.useful_kv_bytes, plan.most_kv_bytes)
        if plan.facts is not None:
            logger.info("%s: %s", source.name, self._fit(source, plan.facts, kv_bytes).line(self._config.kv_bits))
        pieces = build.build_pieces(
            loaded,
            self._config,
            self._device,
            self._context_length(source, loaded.context_length),
            draft=draft,
            kv_disk=self._kv_disk,
            kv_bytes=kv_bytes,
        )
        built = await self._work(pieces)
        if not built.uses_block_cache:
            # Nothing bounds mlx-lm's own caches; they are counted as small ones.
            resident.size = min(resident.size, own_bytes + plan.least_kv_bytes)
        await asyncio.wrap_future(self._thread.call(_exempt_from_collection))
        handle = await asyncio.wrap_future(self._thread.add_engine(source.name, built.engine))
        observer = self._observer
        if observer is not None:
            handle.step_sinks.append(lambda step: observer.step_finished(source.name, step))
        load_seconds = time.monotonic() - started
        logger.info(
            "loaded %s from %s in %.1f s (%s, %.0f M parameters, %s, %s, KV cache up to %s)",
            source.name,
            source.location if source.adapter is None else f"{source.location} and {source.adapter}",
            load_seconds,
            loaded.architecture,
            loaded.num_parameters / 1e6,
            loaded.quantization,
            size_text(base.weight_bytes + own_bytes),
            size_text(kv_bytes),
        )
        description = ModelDescription(
            name=source.name,
            context_length=built.context_length,
            architecture=loaded.architecture,
            num_parameters=loaded.num_parameters,
            quantization=loaded.quantization,
            default_sampling=dict(source.sampling),
            load_seconds=load_seconds,
            created=int(time.time()),
            speculation=_kinds_of_speculation(built),
            can_embed=built.can_embed,
            pooling=loaded.pooling,
            capabilities=capabilities(tokenizer.tool_template, tokenizer.has_token),
            system=source.system,
            stop=source.stop,
            format="safetensors" if plan.path.is_dir() else "gguf",
        )
        return LoadedEngine(
            handle,
            tokenizer,
            description,
            source.location,
            base.weight_bytes,
            own_bytes,
            built.bytes_per_block,
            plan.digest,
        )

    async def _read(self, source: ModelSource, path: Path) -> tuple[LoadedModel, Tokenizer]:
        loop = asyncio.get_running_loop()
        files = await loop.run_in_executor(None, lambda: loader.open_files(path, name=source.name))
        loaded = await self._work(loader.load_pieces(files, self._device.dtype_policy))
        tokenizer = await loop.run_in_executor(self._executor, Tokenizer, loaded.tokenizer, loaded.eos_token_ids)
        return loaded, tokenizer

    async def _read_draft(
        self, source: ModelSource, tokenizer: Tokenizer, draft_source: ModelSource, path: Path
    ) -> LoadedModel:
        """The draft model for a model of that source; each gets one of its own, since its keys and values are its own.

        Raises:
            ModelLoadError: its vocabulary is another one.
        """
        draft, draft_tokenizer = await self._read(draft_source, path)
        difference = tokenizer.difference(draft_tokenizer)
        if difference is not None:
            raise ModelLoadError(
                f"{draft_source.name} cannot be the draft model of {source.name}: {difference}; "
                "choose one of the same family, or leave draft_model out",
                model=source.name,
            )
        return draft

    async def _work(self, pieces: Pieces[T]) -> T:
        return await asyncio.wrap_future(self._thread.work(pieces))

    def _fit(self, source: ModelSource, facts: ModelFacts, kv_bytes: int | None = None) -> Fit:
        """How the model fits into what models may take here."""
        machine = replace(this_machine(), budget=self._residency.budget, is_metal=self._device.is_metal)
        return fit(facts, machine, source.context_length or facts.context_length, kv_bytes)

    def _note_load(self, source: ModelSource, outcome: str, started: float) -> None:
        if self._observer is not None:
            self._observer.model_loaded(source.name, outcome, time.monotonic() - started)

    def _context_length(self, source: ModelSource, own: int) -> int:
        """What the model can do, or the shorter length that the settings allow."""
        longest = self._config.max_model_len
        if longest is not None and longest > own:
            logger.warning("%s has a context of %d tokens; max_model_len is more and has no effect", source.name, own)
        return own if longest is None else min(own, longest)


def _facts(source: ModelSource, path: Path) -> ModelFacts | None:
    try:
        return read_facts(path, source.name)
    except ModelLoadError:
        # The loader finds the same fault, and knows more to say about it.
        return None


def _kinds_of_speculation(built: BuiltEngine) -> frozenset[Speculation]:
    kinds = {Speculation.AUTO, Speculation.OFF}
    if built.uses_block_cache:
        kinds.add(Speculation.NGRAM)
    if built.has_draft_model:
        kinds.add(Speculation.DRAFT)
    return frozenset(kinds)


def _drop_tracebacks(error: BaseException | None) -> None:
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _exempt_from_collection() -> None:
    """Let Python's cyclic garbage collector pass over everything that is there by now, modules and models.

    It stays, and a full collection that walks it stops all threads, and so every stream, for some 40 ms.
    """
    gc.unfreeze()  # What a model left that is gone by now is collected here, and in _free().
    gc.collect()
    gc.freeze()


def _free() -> None:
    _exempt_from_collection()
    device.give_back()
