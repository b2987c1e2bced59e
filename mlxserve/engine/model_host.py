"""The models of this process: found by name, loaded when they are asked for, unloaded when nobody needs them."""

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mlxserve.config import EngineConfig, kv_disk_dir
from mlxserve.core.stats import EngineStats, Observer, StepRecord
from mlxserve.engine import build
from mlxserve.engine.engine_thread import EngineThread
from mlxserve.engine.journal import Journal
from mlxserve.engine.kv_disk import KVDisk, open_kv_disk
from mlxserve.engine.library import Library, digest_of
from mlxserve.engine.loading import LoadedEngine, Loading
from mlxserve.engine.model_cache import Entry, ModelCache
from mlxserve.engine.residency import Residency, State
from mlxserve.engine.served_model import ServedModel
from mlxserve.errors import DownloadError, EngineDead, ModelNotFound
from mlxserve.runner import device
from mlxserve.runner.device import Device
from mlxserve.store import hub
from mlxserve.store.machine import this_machine
from mlxserve.store.model_source import HubRepo, Location, ModelSource
from mlxserve.store.registry import Registry

logger = logging.getLogger(__name__)

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
class LoadedName:
    """A name that a model in memory was asked for by."""

    name: str
    context_length: int
    digest: str
    """As Library has it for this name."""


@dataclass(frozen=True, slots=True)
class LoadedInfo:
    """A model in memory."""

    name: str
    """The one it was loaded under; others may stand for it too."""
    size: int
    """Bytes of its weights and of its KV cache as it is now. Weights that several share, a base and its adapters, count
    with the first of them alone, so that sizes add up."""
    weight_bytes: int
    reserved: int
    """Bytes that count against the memory budget: its weights and its KV cache at its largest."""
    on_gpu: bool
    """Whether this memory is a GPU's; on a Mac it is that, and the CPU's as well."""
    context_length: int
    expires_at: float | None
    """Unix seconds when it goes unless it is asked for again; None: it stays, or requests are using it."""
    digest: str
    """64 hexadecimal digits that change when a file does."""
    architecture: str
    family: str
    num_parameters: int
    quantization: str
    format: str
    """gguf or safetensors."""
    num_in_flight: int
    names: tuple[LoadedName, ...]
    """The one it was loaded under first, then the others."""


@dataclass(frozen=True, slots=True)
class HealthStatus:
    ok: bool
    detail: str


class Lease:
    """A model that stays loaded until this is released."""

    def __init__(self, model: ServedModel, entry: Entry[LoadedEngine], cache: ModelCache[LoadedEngine]) -> None:
        self.model = model
        self._entry: Entry[LoadedEngine] | None = entry
        self._cache = cache

    def release(self) -> None:
        """Once is enough. When nobody has it on lease any more, its keep-alive begins."""
        entry, self._entry = self._entry, None
        if entry is not None:
            self._cache.release(entry)


class ModelHost:
    """Loads models on first use and keeps them for as long as memory, settings and their users allow.

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
        self._is_closed = False
        self._thread: EngineThread | None = None
        self._loading: Loading | None = None
        self._cache: ModelCache[LoadedEngine] | None = None
        self._residency: Residency | None = None
        self._on_gpu = False
        self._kv_disk: KVDisk | None = None

    async def start(self) -> None:
        """Start the engine thread, and open the folder of KV blocks if there is to be one.

        Raises:
            ModelNotFound: `pin` names a model that there is not.
        """
        config, loop = self._config, asyncio.get_running_loop()
        self._thread = EngineThread(loop, device.release)
        self._thread.start()
        if config.kv_disk is not None:
            self._kv_disk = await loop.run_in_executor(
                None, open_kv_disk, kv_disk_dir(config), config.kv_disk, self._thread.wake
            )
            self._kv_disk.start()
        found = await asyncio.wrap_future(self._thread.call(build.configure_device))
        self._on_gpu = found.is_metal
        residency = Residency(_budget(config, found), config.max_loaded_models)
        self._residency = residency
        self._loading = Loading(
            self._thread,
            found,
            self,
            residency,
            config=config,
            executor=self._executor,
            kv_disk=self._kv_disk,
            observer=self._observer,
        )
        self._cache = ModelCache(self._loading, residency, max_wait=config.request_timeout)

    async def acquire(self, name: str, *, keep_alive: float | None = None) -> Lease:
        """The model of that name on lease, loaded if it is not yet; who asks meanwhile waits for the same load.

        `keep_alive`: seconds that it stays loaded when nobody has it on lease any more; negative: until there is need
        for its memory; None: what the request before said, at first the setting.

        Raises:
            ModelNotFound: no model goes by this name, or it is not on this machine and must not be fetched.
            DownloadError, ModelLoadError: it cannot be had; the next call tries again.
            CapacityError: the models that are pinned leave no room for it.
            RequestTimeout: no other model made room for it within `request_timeout`.
            EngineDead: the host is closed, also while it loads.
        """
        cache, thread = self._cache, self._thread
        if self._is_closed:
            raise EngineDead("the server is stopping")
        if cache is None or thread is None:
            raise EngineDead("the model host is not started")
        source = self.resolve(name)
        if thread.death is not None:
            raise EngineDead(thread.death)
        entry = await cache.acquire(source, keep_alive)
        return Lease(self._served(entry.model, source, thread), entry, cache)

    async def preload(self, name: str, *, keep_alive: float | None = None) -> None:
        """Load a model, if it is not loaded yet, and let its keep-alive begin. Raises as acquire()."""
        lease = await self.acquire(name, keep_alive=keep_alive)
        lease.release()

    async def unload(self, name: str) -> None:
        """Let a model's requests end, unload it, and wait until it is gone. Who asks for it meanwhile loads it again.

        Raises:
            ModelNotFound: it is not loaded.
        """
        source = self.resolve(name)
        entry = None if self._cache is None else self._cache.find(source.weights)
        if self._cache is None or entry is None:
            raise ModelNotFound(f"{source.name} is not loaded", model=name)
        await self._cache.unload(entry)

    def loaded(self) -> list[LoadedInfo]:
        """The models in memory, the one loaded first first."""
        origin = time.time() - time.monotonic()
        infos = []
        counted: set[Location] = set()
        for entry in self._entries():
            engine, description, expires_at = entry.model, entry.model.description, entry.resident.expires_at
            shares_base = engine.base in counted
            weight_bytes = engine.own_bytes + (0 if shares_base else engine.base_bytes)
            counted.add(engine.base)
            infos.append(
                LoadedInfo(
                    name=description.name,
                    size=weight_bytes + engine.num_kv_bytes,
                    weight_bytes=weight_bytes,
                    reserved=entry.resident.size + (0 if shares_base else entry.resident.shared_size),
                    on_gpu=self._on_gpu,
                    context_length=engine.describe(entry.resident.source).context_length,
                    expires_at=None if expires_at is None else origin + expires_at,
                    digest=engine.digest,
                    architecture=description.architecture,
                    family=description.architecture,
                    num_parameters=description.num_parameters,
                    quantization=description.quantization,
                    format=description.format,
                    num_in_flight=engine.num_in_flight,
                    names=self._names(entry),
                )
            )
        return infos

    def locations(self) -> set[Location]:
        """What is in memory, or about to be: models and adapters."""
        sources = [each.source for each in self._residency or () if each.state is not State.LEAVING]
        return {each for source in sources for each in (source.location, source.adapter) if each is not None}

    def models(self) -> list[ModelInfo]:
        """The loaded models by each name they were asked for, then those that could be loaded without a download."""
        infos = [
            ModelInfo(name, each.created, each.context_length, loaded=True, description=source.description)
            for entry in self._entries()
            for name in dict.fromkeys([entry.resident.source.name, *entry.model.served])
            if (source := self._find(name)) is not None
            for each in [entry.model.describe(source)]
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
        deaths = [entry.model.handle.death for entry in self._entries()]
        past = [] if self._cache is None else self._cache.deaths.values()
        for death in (*deaths, *past):
            if death is not None:
                return HealthStatus(False, death)
        return HealthStatus(True, "ok")

    def stats(self) -> dict[str, EngineStats]:
        """Of each loaded model, by the name it was loaded under."""
        return {entry.model.handle.name: entry.model.handle.engine.stats() for entry in self._entries()}

    def steps(self) -> dict[str, list[StepRecord]]:
        """The latest steps of each loaded model, oldest first."""
        return {entry.model.handle.name: list(entry.model.handle.engine.records) for entry in self._entries()}

    @property
    def num_in_flight(self) -> int:
        """Requests that were accepted and have not ended."""
        return sum(entry.model.num_in_flight for entry in self._cache or ())

    async def close(self, timeout: float) -> None:
        """Give up loads, let requests finish for up to `timeout` seconds, cancel the rest, end the engine thread.

        KV blocks that are to be kept on disk get another loading.SAVE_SECONDS."""
        self._is_closed = True
        if self._cache is not None and self._loading is not None:
            served = [model for entry in self._cache for model in entry.model.served.values()]
            await asyncio.gather(self._cache.close(), *(model.drain(timeout) for model in served))
            await asyncio.gather(*(self._loading.save_blocks(entry.model.handle) for entry in self._entries()))
            self._loading.close()
        loop = asyncio.get_running_loop()
        if self._thread is not None:
            await loop.run_in_executor(None, self._thread.stop)
        if self._kv_disk is not None:
            kv_disk, self._kv_disk = self._kv_disk, None
            await loop.run_in_executor(None, kv_disk.close)
        # Prompts still there are tokenised in vain: cancelled, they would look as if their clients had gone.
        self._executor.shutdown(wait=False)

    def resolve(self, name: str) -> ModelSource:
        """What a name stands for. Raises ModelNotFound."""
        return self._registry.resolve(name, allow_paths=self._allow_paths)

    def _find(self, name: str) -> ModelSource | None:
        """What a name stands for; None if it was taken out of models.toml meanwhile."""
        try:
            return self.resolve(name)
        except ModelNotFound:
            return None

    def locate(self, source: ModelSource) -> Path:
        """Where a model or adapter is, fetched if that is allowed. Blocks. Raises ModelNotFound, DownloadError."""
        if not self._allow_downloads and isinstance(source.location, HubRepo):
            try:
                return hub.ensure_local(source, local_files_only=True)
            except DownloadError as error:
                raise ModelNotFound(str(error), model=source.name) from error
        return hub.ensure_local(source, self._progress)

    def _entries(self) -> list[Entry[LoadedEngine]]:
        """The models in memory without those on their way out."""
        return [entry for entry in self._cache or () if entry.resident.state is State.LOADED]

    def _names(self, entry: Entry[LoadedEngine]) -> tuple[LoadedName, ...]:
        first, engine = entry.resident.source, entry.model
        others = [source for name in engine.served if name != first.name and (source := self._find(name)) is not None]
        return tuple(
            LoadedName(source.name, engine.describe(source).context_length, digest_of(source, engine.digest))
            for source in (self._find(first.name) or first, *others)
        )

    def _served(self, engine: LoadedEngine, source: ModelSource, thread: EngineThread) -> ServedModel:
        served = engine.served.get(source.name)
        if served is None:
            served = engine.served[source.name] = ServedModel(
                engine.describe(source),
                engine.tokenizer_of(source),
                thread=thread,
                handle=engine.handle,
                config=self._config,
                executor=self._executor,
                observer=self._observer,
                journal=self.journal,
            )
        return served


def _budget(config: EngineConfig, found: Device) -> int:
    """Bytes that all models may take; says so in the log."""
    if config.memory_budget is None:
        budget, origin = int(found.memory_budget * (1 - build.HEADROOM)), "the device's, less room for a step's arrays"
    else:
        budget, origin = config.memory_budget, "memory_budget"
    logger.info("device: %s, %.2f GB for models (%s)", found.name, budget / 1e9, origin)
    memory = this_machine().memory
    if budget > memory:
        logger.warning(
            "memory_budget is %.1f GB and this machine has %.1f GB of memory: the system will page, or end the server",
            budget / 1e9,
            memory / 1e9,
        )
    return budget
