"""The models of this process: found by name, loaded once, served until the host closes."""

import asyncio
import dataclasses
import gc
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mlxserve.config import EngineConfig, kv_disk_dir
from mlxserve.core.request import Speculation
from mlxserve.core.stats import EngineStats, Observer, StepRecord
from mlxserve.engine import build
from mlxserve.engine.build import BuiltEngine
from mlxserve.engine.engine_thread import EngineThread
from mlxserve.engine.journal import Journal
from mlxserve.engine.kv_disk import KVDisk, open_kv_disk
from mlxserve.engine.library import Library
from mlxserve.engine.served_model import ModelDescription, ServedModel
from mlxserve.errors import DownloadError, EngineDead, ModelLoadError, ModelNotFound
from mlxserve.runner import device
from mlxserve.runner.device import Device
from mlxserve.store import hub, loader
from mlxserve.store.fit import fit, require_fit
from mlxserve.store.loader import LoadedModel
from mlxserve.store.machine import this_machine
from mlxserve.store.model_facts import read_facts
from mlxserve.store.model_source import HubRepo, ModelSource
from mlxserve.store.registry import Registry
from mlxserve.text.capabilities import capabilities
from mlxserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

SAVE_SECONDS = 5.0
"""How long a stop waits for KV blocks to go to disk."""
SAVE_POLL = 0.02
TEXT_THREADS = 4
"""Templates and tokenizers share the interpreter; more threads than this only take turns."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One line of a list of models."""

    name: str
    created: int
    """Unix time."""
    context_length: int | None
    loaded: bool
    description: str


@dataclass(frozen=True, slots=True)
class HealthStatus:
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Lease:
    """A model that stays loaded for somebody until they release it."""

    model: ServedModel

    def release(self) -> None:
        pass


class ModelHost:
    """Loads models on first use and keeps them.

    Its methods belong to the event loop that start() ran on. Weights are read on the engine thread, downloads and
    everything about text run on worker threads.
    """

    def __init__(
        self,
        config: EngineConfig,
        registry: Registry,
        *,
        observer: Observer | None = None,
        allow_paths: bool = False,
        allow_downloads: bool = False,
        progress: hub.ProgressCallback | None = None,
        keep_prompts: bool = False,
    ) -> None:
        """`allow_paths`: names may be paths of this machine (the command line; never over HTTP).
        `allow_downloads`: a hub model that is not here is fetched, telling `progress`.
        `keep_prompts`: the journal remembers what prompts said."""
        self._config = config
        self._registry = registry
        self._observer = observer
        self._allow_paths = allow_paths
        self._allow_downloads = allow_downloads
        self._progress = progress
        self.journal = Journal(keep_prompts=keep_prompts)
        """Requests of all models, under way and ended."""
        self.library = Library(registry)
        """The models of this machine, loaded or not."""
        self._executor = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="mlxserve-text")
        self._models: dict[ModelSource, asyncio.Task[ServedModel]] = {}
        self._deaths: dict[ModelSource, str] = {}
        """Models that died and were not loaded again since."""
        self._is_closed = False
        self._thread: EngineThread | None = None
        self._device: Device | None = None
        self._kv_disk: KVDisk | None = None

    async def start(self) -> None:
        """Start the engine thread, and open the folder of KV blocks if there is to be one."""
        loop = asyncio.get_running_loop()
        self._thread = EngineThread(loop, device.release)
        self._thread.start()
        if self._config.kv_disk is not None:
            self._kv_disk = await loop.run_in_executor(
                None, open_kv_disk, kv_disk_dir(self._config), self._config.kv_disk, self._thread.wake
            )
            self._kv_disk.start()
        self._device = await asyncio.wrap_future(self._thread.call(build.configure_device))

    async def get(self, name: str) -> ServedModel:
        """The model of that name, loaded if it is not yet; who asks meanwhile waits for the same load.

        Raises:
            ModelNotFound: no model goes by this name, or it is not on this machine and must not be fetched.
            DownloadError, ModelLoadError: it cannot be had; the next call tries again.
            EngineDead: the host is closed, also while it loads.
        """
        if self._is_closed:
            raise EngineDead("the server is stopping")
        source = self._registry.resolve(name, allow_paths=self._allow_paths)
        task = self._models.get(source)
        if task is None or self._is_lost(source, task):
            task = asyncio.create_task(self._load_observed(source))
            self._models[source] = task
        try:
            # Shielded: one client that goes away must not stop the load for the others.
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise EngineDead("the server is stopping") from None
            raise

    async def acquire(self, name: str, *, keep_alive: float | None = None) -> Lease:
        """The model of that name on lease, loaded if it is not yet. Raises as get()."""
        return Lease(await self.get(name))

    def models(self) -> list[ModelInfo]:
        """The loaded models, then those that could be loaded without a download."""
        infos = [
            ModelInfo(
                model.name, model.description.created, model.context_length, loaded=True, description=source.description
            )
            for source, model in self._loaded()
        ]
        names = {info.name for info in infos}
        for card in self._registry.available():
            if card.name not in names:
                created = int(card.path.stat().st_mtime)
                source = card.source
                infos.append(
                    ModelInfo(source.name, created, source.context_length, loaded=False, description=source.description)
                )
        return infos

    def health(self) -> HealthStatus:
        """Red from the moment an engine cannot compute until its model is loaded again."""
        if self._thread is None or self._thread.death is not None:
            return HealthStatus(False, self._thread.death or "not started" if self._thread else "not started")
        deaths = [model.death for _, model in self._loaded() if model.death is not None]
        for death in (*deaths, *self._deaths.values()):
            return HealthStatus(False, death)
        return HealthStatus(True, "ok")

    def stats(self) -> dict[str, EngineStats]:
        """Of each loaded model, by name."""
        return {model.name: model.stats() for _, model in self._loaded()}

    def steps(self) -> dict[str, list[StepRecord]]:
        """The latest steps of each loaded model, oldest first."""
        return {model.name: model.steps() for _, model in self._loaded()}

    @property
    def num_in_flight(self) -> int:
        """Requests that were accepted and have not ended."""
        return sum(model.num_in_flight for _, model in self._loaded())

    async def close(self, timeout: float) -> None:
        """Give up loads, let requests finish for up to `timeout` seconds, cancel the rest, end the engine thread.

        KV blocks that are to be kept on disk get another SAVE_SECONDS."""
        self._is_closed = True
        for task in self._models.values():
            task.cancel()
        await asyncio.gather(*(model.drain(timeout) for _, model in self._loaded()))
        await self._save_blocks()
        loop = asyncio.get_running_loop()
        if self._thread is not None:
            await loop.run_in_executor(None, self._thread.stop)
        if self._kv_disk is not None:
            kv_disk, self._kv_disk = self._kv_disk, None
            await loop.run_in_executor(None, kv_disk.close)
        # Prompts still there are tokenised in vain: cancelled, they would look as if their clients had gone.
        self._executor.shutdown(wait=False)

    async def _save_blocks(self) -> None:
        """Wait until engines without requests have handed all their blocks to the disk, which they do by themselves."""
        if self._kv_disk is None or self._kv_disk.failure is not None:
            return
        end = time.monotonic() + SAVE_SECONDS
        while any(model.num_unsaved_blocks for _, model in self._loaded()):
            if time.monotonic() > end:
                logger.warning("stopping without having written all KV blocks to disk")
                return
            await asyncio.sleep(SAVE_POLL)

    def _loaded(self) -> list[tuple[ModelSource, ServedModel]]:
        return [
            (source, task.result())
            for source, task in self._models.items()
            if task.done() and not task.cancelled() and task.exception() is None
        ]

    def _is_lost(self, source: ModelSource, task: asyncio.Task[ServedModel]) -> bool:
        """Whether a load ended without a model that can compute."""
        if not task.done():
            return False
        if task.exception() is not None:
            return True
        death = task.result().death
        if death is not None:
            self._deaths[source] = death
        return death is not None

    async def _load_observed(self, source: ModelSource) -> ServedModel:
        started = time.monotonic()
        outcome = "ok"
        try:
            return await self._load(source)
        except BaseException as error:
            outcome = type(error).__name__
            raise
        finally:
            if self._observer is not None:
                self._observer.model_loaded(source.name, outcome, time.monotonic() - started)

    async def _load(self, source: ModelSource) -> ServedModel:
        thread, found = self._thread, self._device
        if thread is None or found is None:
            raise EngineDead("the model host is not started")
        started = time.monotonic()
        loop = asyncio.get_running_loop()
        path = await loop.run_in_executor(None, self._locate, source)
        await loop.run_in_executor(None, _check_fit, source, path, found)
        loaded = await asyncio.wrap_future(
            thread.call(lambda: loader.load(path, name=source.name, dtype_policy=found.dtype_policy))
        )
        if source.template is not None:
            loaded.tokenizer.chat_template = source.template
        tokenizer = await loop.run_in_executor(self._executor, Tokenizer, loaded.tokenizer, loaded.eos_token_ids)
        draft = await self._load_draft(source, tokenizer, thread, found)
        context_length = self._context_length(source, loaded.context_length)
        built = await asyncio.wrap_future(
            thread.call(
                lambda: build.build_engine(
                    loaded, self._config, found, context_length, draft=draft, kv_disk=self._kv_disk
                )
            )
        )
        await asyncio.wrap_future(thread.call(_exempt_from_collection))
        handle = await asyncio.wrap_future(thread.add_engine(source.name, built.engine))
        load_seconds = time.monotonic() - started
        logger.info(
            "loaded %s from %s in %.1f s (%s, %.0f M parameters, %s, %.2f GB)",
            source.name,
            source.location,
            load_seconds,
            loaded.architecture,
            loaded.num_parameters / 1e6,
            loaded.quantization,
            loaded.weight_bytes / 1e9,
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
        )
        self._deaths.pop(source, None)
        return ServedModel(
            description,
            tokenizer,
            thread=thread,
            handle=handle,
            config=self._config,
            executor=self._executor,
            observer=self._observer,
            journal=self.journal,
        )

    async def _load_draft(
        self, source: ModelSource, tokenizer: Tokenizer, thread: EngineThread, found: Device
    ) -> LoadedModel | None:
        """The draft model for a model of that source; each gets one of its own, since its keys and values are its own.

        Raises:
            ModelLoadError: its vocabulary is another one.
        """
        if self._config.draft_model is None:
            return None
        draft_source = self._registry.resolve(self._config.draft_model, allow_paths=self._allow_paths)
        loop = asyncio.get_running_loop()
        path = await loop.run_in_executor(None, self._locate, draft_source)
        draft = await asyncio.wrap_future(
            thread.call(lambda: loader.load(path, name=draft_source.name, dtype_policy=found.dtype_policy))
        )
        draft_tokenizer = await loop.run_in_executor(self._executor, Tokenizer, draft.tokenizer, draft.eos_token_ids)
        difference = tokenizer.difference(draft_tokenizer)
        if difference is not None:
            raise ModelLoadError(
                f"{draft_source.name} cannot be the draft model of {source.name}: {difference}; "
                "choose one of the same family, or leave draft_model out",
                model=source.name,
            )
        return draft

    def _locate(self, source: ModelSource) -> Path:
        if not self._allow_downloads and isinstance(source.location, HubRepo):
            try:
                return hub.ensure_local(source, local_files_only=True)
            except DownloadError as error:
                raise ModelNotFound(str(error), model=source.name) from error
        return hub.ensure_local(source, self._progress)

    def _context_length(self, source: ModelSource, own: int) -> int:
        """The shortest of what the model can do, what its entry says, and what the settings allow."""
        limits = (own, source.context_length, self._config.max_model_len)
        if self._config.max_model_len is not None and self._config.max_model_len > own:
            logger.warning("%s has a context of %d tokens; max_model_len is more and has no effect", source.name, own)
        return min(limit for limit in limits if limit is not None)


def _kinds_of_speculation(built: BuiltEngine) -> frozenset[Speculation]:
    kinds = {Speculation.AUTO, Speculation.OFF}
    if built.uses_block_cache:
        kinds.add(Speculation.NGRAM)
    if built.has_draft_model:
        kinds.add(Speculation.DRAFT)
    return frozenset(kinds)


def _check_fit(source: ModelSource, path: Path, found: Device) -> None:
    """Say how the model fits; raises ModelTooLarge if it cannot be loaded."""
    try:
        facts = read_facts(path, source.name)
    except ModelLoadError:
        # The loader finds the same fault, and knows more to say about it.
        return
    machine = dataclasses.replace(this_machine(), budget=found.memory_budget, is_metal=found.is_metal)
    fitting = fit(facts, machine, source.context_length or facts.context_length)
    logger.info("%s: %s", source.name, fitting.line())
    require_fit(fitting, source.name)


def _exempt_from_collection() -> None:
    """Let Python's cyclic garbage collector pass over everything that is there by now, modules and models.

    It stays, and a full collection that walks it stops all threads, and so every stream, for some 40 ms.
    """
    gc.unfreeze()  # What a model left that is gone by now is collected here, and only here.
    gc.collect()
    gc.freeze()
