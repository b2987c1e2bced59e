"""The models of this machine as a user handles them: listed, shown, pulled, copied, removed. Imports no mlx.

One store with other MLX tools: names of the user's models.toml and the shipped one over the hub's cache, package files
and paths. All methods block, on disks and networks: call them from a thread.
"""

import hashlib
import json
import logging
import threading
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mlxserve.errors import (
    DownloadError,
    InvalidParameter,
    ModelError,
    ModelInUse,
    ModelLoadError,
    ModelNotFound,
    UnusableRepository,
)
from mlxserve.store import alias_file, hub
from mlxserve.store.adapter import Adapter, read_adapter
from mlxserve.store.alias_file import canonical
from mlxserve.store.fit import Fit, fit
from mlxserve.store.hub import ProgressCallback
from mlxserve.store.machine import this_machine
from mlxserve.store.model_facts import ModelFacts, read_facts, require_readable
from mlxserve.store.model_parameters import parse_parameters
from mlxserve.store.model_source import HubRepo, Location, ModelSource
from mlxserve.store.registry import Registry
from mlxserve.store.remote_facts import read_remote_facts
from mlxserve.store.template_check import check_template
from mlxserve.text.capabilities import capabilities

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model that can be loaded without a download."""

    name: str
    source: ModelSource
    path: Path
    """A folder or a .gguf file."""
    size: int
    """Bytes on disk, its adapter's included."""
    modified: float
    """Unix time: of its files, or of the user's models.toml where its name is one of that and the file is newer."""
    digest: str
    """64 hexadecimal digits, other ones for other files, and for what a name changes of how they answer."""
    format: str
    """gguf or safetensors."""
    architecture: str
    family: str
    num_parameters: int
    quantization: str
    context_length: int
    embedding_length: int | None
    capabilities: tuple[str, ...]
    license: str | None
    template: str | None
    system: str | None
    parameters: dict[str, Any]
    """Sampling defaults, and `stop`, a list, if there are such."""
    facts: ModelFacts = field(repr=False)
    """Of the model without its adapter."""
    adapter: Adapter | None = None


class Library:
    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    def models(self) -> list[StoredModel]:
        """Every model that is here: under its aliases, and what no alias names under its name on the hub.

        What cannot be read is left out, with a line in the log.

        Raises:
            ConfigError: a models.toml is wrong.
        """
        found: list[StoredModel] = []
        read: dict[Path, ModelFacts] = {}
        aliases = self.registry.aliases
        named = {source.location for source in aliases.values() if isinstance(source.location, HubRepo)}
        sources = [source for _, source in sorted(aliases.items())]
        sources += [ModelSource(str(location), location) for location in hub.cached_repos() if location not in named]
        for source in sources:
            try:
                path = hub.find_local(source)
                if path is None or (source.adapter_source and hub.find_local(source.adapter_source) is None):
                    continue
                if path not in read:
                    read[path] = read_facts(path, source.name)
                found.append(self._stored(source, read[path], _find_adapter(source)))
            except ModelError as error:
                logger.warning("left out of the list: %s: %s", source.name, error)
        return found

    def show(self, name: str, *, allow_paths: bool = False) -> StoredModel:
        """The model of that name.

        Raises:
            ModelNotFound: there is none, or it is not on this machine.
            ModelLoadError: its files or its adapter's are damaged, or no files of the store.
            ConfigError: a models.toml is wrong.
        """
        return self._read(self.registry.resolve(name, allow_paths=allow_paths))

    def pull(self, name: str, progress: ProgressCallback, cancelled: threading.Event | None = None) -> StoredModel:
        """Download the model of that name and its adapter, or bring them up to date; their files are verified.

        Args:
            progress: Called with (bytes here, bytes in all), on this thread.
            cancelled: Set by whoever wants no more of it; what has come is kept.

        Raises:
            ModelNotFound: no name of a model.
            DownloadError: the hub did not give it, or the disk has no room; of its kinds, RepositoryNotFound,
                AccessDenied, UnusableRepository and DownloadCancelled.
            ModelLoadError: what came cannot be loaded: a GGUF file of types or an architecture that cannot be read.
        """
        source = self.registry.resolve(name, allow_paths=False)
        facts = _fetched_facts(source, hub.fetch(source, progress, cancelled))
        require_readable(facts, source.name)
        if source.adapter_source is not None:
            hub.fetch(source.adapter_source, progress, cancelled)
        return self._stored(source, facts, _find_adapter(source))

    def fit(self, name: str, *, allow_paths: bool = False) -> Fit:
        """How the model of that name fits into this machine's memory. Raises as show()."""
        model = self.show(name, allow_paths=allow_paths)
        return fit(model.facts, this_machine(), model.context_length)

    def fit_of_remote(self, name: str) -> Fit:
        """The same of a model that is not here, by what the hub says of its files; nothing is kept of that.

        Raises:
            ModelNotFound: it is no model of the hub, or one with an adapter.
            DownloadError: the hub does not answer, or has no safetensors there that can be used.
        """
        source = self.registry.resolve(name, allow_paths=False)
        if not isinstance(source.location, HubRepo) or source.adapter is not None:
            raise ModelNotFound(f"{name} is no model of the hub", model=name)
        facts = read_remote_facts(source.name, source.location)
        return fit(facts, this_machine(), min(facts.context_length, source.context_length or facts.context_length))

    def remove(self, name: str, loaded: Collection[Location] = ()) -> int:
        """Remove the name, if it is in the user's file, and files from the hub, unless other names need them.

        The name may be that of an adapter. Package files and local folders stay. Returns the bytes that were freed.
        `loaded`: what a server has in memory. The last name of that stays: nothing could be said of it without.

        Raises:
            ModelNotFound: there is no such model here.
            ModelInUse: it is no name of the user's file, and one of these needs its files; or nothing of it is ours;
                or it is the last name of what is loaded; or its files are being downloaded.
        """
        alias = canonical(name)
        is_own = self._is_own(alias)
        unneeded = self.unshared(name) if is_own else {self._removable(name)}
        if any(share_files(each, other) for each in unneeded for other in loaded):
            raise ModelInUse(f"{name} is loaded; stop it first: mlxserve stop {name}", model=name)
        repos = [each for each in unneeded if isinstance(each, HubRepo)]
        with ExitStack() as stack:
            for repo in repos:
                stack.enter_context(hub.without_downloads(name, repo))
            if is_own:
                alias_file.remove(self.registry.user_file, alias)
            was_here = is_own or any(map(_is_here, repos))
            freed = sum(map(hub.delete, repos))
        if not was_here and not freed:
            raise ModelNotFound(f"{name} is not on this machine; mlxserve list shows what is", model=name)
        return freed

    def unshared(self, name: str) -> set[Location]:
        """Of what a name stands for, what no other name needs, too: without it nobody could ask for that.

        Raises:
            ModelNotFound: it is no name of a model or an adapter.
            ConfigError: a models.toml is wrong.
        """
        alias = canonical(name)
        mine = self.registry.locations(name)
        if not self._is_own(alias):
            return mine
        own = {other: source for other, source in self.registry.user_aliases.items() if other != alias}
        sources = [*self.registry.fixed_aliases.values(), *own.values()]
        needed = {each for source in sources for each in (source.location, source.adapter) if each is not None}
        needed |= {location for other, location in self.registry.adapters.items() if other != alias}
        return {each for each in mine if not any(share_files(each, other) for other in needed)}

    def _is_own(self, alias: str) -> bool:
        return alias in self.registry.user_aliases or alias in self.registry.adapters

    def _removable(self, name: str) -> HubRepo:
        """The repository that a name stands for which is none of the user's. Raises as remove()."""
        source = self.registry.resolve(name, allow_paths=False)
        location = source.location
        if source.adapter is not None:
            raise ModelInUse(
                f"{source.name} is a model and an adapter; remove the one that shall go, "
                f"for the adapter: mlxserve rm {source.name.rpartition('+')[2]}",
                model=name,
            )
        if not isinstance(location, HubRepo):
            raise ModelInUse(
                f"{source.name} is {location}, which mlxserve did not put there and does not remove", model=name
            )
        users = sorted(
            alias
            for alias in (*self.registry.user_aliases, *self.registry.adapters)
            if any(share_files(each, location) for each in self.registry.locations(alias))
        )
        if users:
            raise ModelInUse(
                f"the files of {source.name} are those of {', '.join(users)}, too; remove that first: "
                f"mlxserve rm {' '.join(users)}",
                model=name,
            )
        return location

    def copy(self, source: str, destination: str, *, allow_paths: bool = False, may_hide: bool = False) -> StoredModel:
        """Give a model another name, in the user's models.toml. A name that is there is written over.

        `may_hide`: the new name may be one that comes with mlxserve, which stands for something else then.

        Raises:
            ModelNotFound: there is no such model here.
            InvalidParameter: the new name cannot be one, or is the old one.
        """
        model = self.show(source, allow_paths=allow_paths)
        if model.name == canonical(destination):
            raise InvalidParameter(f"{destination!r} is the name it has already; choose another", param="name")
        return self._write(replace(model.source, name=_new_name(destination)), model, may_hide)

    def create(
        self,
        name: str,
        base: str,
        *,
        system: str | None = None,
        template: str | None = None,
        parameters: dict[str, Any] | None = None,
        license: str | None = None,
        allow_paths: bool = False,
        may_hide: bool = False,
    ) -> StoredModel:
        """A name in the user's models.toml for `base` with another system message, template or other defaults.

        What is None stays as `base` has it. `parameters` are Ollama's or our own names. Names as for copy().

        Raises:
            ModelNotFound: `base` is not here.
            InvalidParameter: the name, the template or a parameter is wrong.
        """
        model = self.show(base, allow_paths=allow_paths)
        old = model.source
        changes = parse_parameters(parameters or {})
        if template is not None:
            check_template(template)
        source = replace(
            old,
            name=_new_name(name),
            description="",
            context_length=changes.context_length or old.context_length,
            sampling={**old.sampling, **changes.sampling},
            stop=changes.stop or old.stop,
            system=old.system if system is None else system or None,
            template=old.template if template is None else template or None,
            license=license or old.license,
        )
        return self._write(source, model, may_hide)

    def _write(self, source: ModelSource, taken_from: StoredModel, may_hide: bool) -> StoredModel:
        if source.name in self.registry.adapters:
            raise InvalidParameter(f"{source.name!r} is the name of an adapter; choose another", param="name")
        if source.name in self.registry.fixed_aliases and source.name not in self.registry.user_aliases:
            if source.name == taken_from.source.name:
                problem = f"{source.name!r} is the name of the model itself"
            else:
                problem = f"{source.name!r} is a name that comes with mlxserve, or that this server was started with"
            if not may_hide:
                raise InvalidParameter(
                    f"{problem}; choose another (on the command line --force takes it)", param="name"
                )
        alias_file.put(self.registry.user_file, source)
        return self._stored(source, taken_from.facts, taken_from.adapter)

    def _read(self, source: ModelSource) -> StoredModel:
        path = hub.find_local(source)
        if path is None:
            hint = f"download it first: mlxserve pull {source.name}"
            if not isinstance(source.location, HubRepo):
                hint = f"it should be {source.location}"
            raise ModelNotFound(f"{source.name} is not on this machine; {hint}", model=source.name)
        return self._stored(source, read_facts(path, source.name), _find_adapter(source))

    def _stored(self, source: ModelSource, facts: ModelFacts, adapter: Adapter | None) -> StoredModel:
        model = _stored(source, facts, adapter)
        if source.name not in self.registry.user_aliases:
            return model
        # What is in the file may have been written there at any time up to its last change.
        return replace(model, modified=max(model.modified, self.registry.user_file_modified))


def _fetched_facts(source: ModelSource, path: Path) -> ModelFacts:
    """Of files that were just found to be those of the hub."""
    if not isinstance(source.location, HubRepo):
        return read_facts(path, source.name)
    try:
        advice = f"the repository is broken, and pulling it again does not help; mlxserve rm {source.name} removes it"
        return read_facts(path, source.name, advice=advice)
    except ModelLoadError as error:
        if not path.exists():
            problem = f"files of {source.location} were removed while it was pulled; pull it again"
            raise DownloadError(problem, model=source.name) from error
        # Clients must not learn where models lie here.
        reason = str(error).replace(f"{path}/", "")
        raise UnusableRepository(f"{source.location} cannot be used: {reason}", model=source.name) from error


def _find_adapter(source: ModelSource) -> Adapter | None:
    """Raises ModelNotFound: it has one, which is not here; ModelLoadError: it cannot be used."""
    if source.adapter_source is None:
        return None
    path = hub.find_local(source.adapter_source)
    if path is None:
        hint = f"; download it first: mlxserve pull {source.name}" if isinstance(source.adapter, HubRepo) else ""
        raise ModelNotFound(f"the adapter {source.adapter} is not on this machine{hint}", model=source.name)
    return read_adapter(path, source.name)


def digest_of(source: ModelSource, files_digest: str) -> str:
    """Of a name for files of that digest: theirs, unless the name changes how they answer."""
    changes = (source.system, source.template, source.stop, sorted(source.sampling.items()), source.context_length)
    if changes == (None, None, (), [], None):
        return files_digest
    return hashlib.sha256(json.dumps([files_digest, *changes]).encode()).hexdigest()


def _stored(source: ModelSource, facts: ModelFacts, adapter: Adapter | None) -> StoredModel:
    template = source.template or facts.chat_template
    parameters: dict[str, Any] = dict(source.sampling)
    if source.stop:
        parameters["stop"] = list(source.stop)
    return StoredModel(
        name=source.name,
        source=source,
        path=facts.path,
        size=facts.size if adapter is None else facts.size + adapter.size,
        modified=facts.modified if adapter is None else max(facts.modified, adapter.modified),
        digest=digest_of(source, facts.digest if adapter is None else adapter.digest_on(facts.digest)),
        format=facts.format,
        architecture=facts.architecture,
        family=facts.architecture,
        num_parameters=facts.num_parameters + (0 if adapter is None else adapter.num_parameters),
        quantization=facts.quantization,
        context_length=min(facts.context_length, source.context_length or facts.context_length),
        embedding_length=facts.embedding_length,
        capabilities=capabilities(template, facts.has_token),
        license=source.license or facts.license,
        template=template,
        system=source.system,
        parameters=parameters,
        facts=facts,
        adapter=adapter,
    )


def share_files(first: Location, second: Location) -> bool:
    """Whether the files of one cannot be removed without those of the other."""
    if isinstance(first, HubRepo) and isinstance(second, HubRepo):
        # Files of one quantisation are not removed alone.
        return (first.repo, first.revision) == (second.repo, second.revision)
    return first == second


def _is_here(repo: HubRepo) -> bool:
    try:
        return hub.find_local(ModelSource(str(repo), repo)) is not None
    except ModelError:
        return True


def _new_name(name: str) -> str:
    alias = canonical(name)
    if (problem := alias_file.name_problem(alias)) is not None:
        raise InvalidParameter(f"{name!r} {problem}", param="name")
    return alias
