"""Names of models: aliases from models.toml, hub repositories, and for the local user also paths; with an adapter."""

import difflib
import logging
import threading
from dataclasses import dataclass, replace
from pathlib import Path

from mlxserve.config import config_dir
from mlxserve.errors import ConfigError, ModelError, ModelNotFound
from mlxserve.store import alias_file, hub
from mlxserve.store.alias_file import GGUF_TAG, MAX_NAME_LENGTH, REPO, REVISION, Aliases, canonical
from mlxserve.store.model_source import HubRepo, LocalPath, Location, ModelSource

logger = logging.getLogger(__name__)

NUM_SUGGESTIONS = 3


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One model that can be loaded without a download."""

    source: ModelSource
    path: Path
    """Where its files are: a folder or a .gguf file."""

    @property
    def name(self) -> str:
        return self.source.name


class Registry:
    """Every alias there is, and the rules for names that are none.

    The user's file is read again when it has changed. One that is wrong by then is warned of, and what it said before
    holds on; if it is wrong from the start, whatever needs the aliases raises ConfigError.
    """

    def __init__(self, *, user_file: Path | None = None) -> None:
        """`user_file`: the user's models.toml; by default the one in the configuration folder."""
        self.user_file = config_dir() / "models.toml" if user_file is None else user_file
        self._shipped: dict[str, ModelSource] | None = None
        self._user: tuple[tuple[int, int] | None, Aliases] | None = None
        self._added: dict[str, ModelSource] = {}
        self._reading = threading.Lock()

    def check(self) -> None:
        """Read the files now, so that they hold on if they are broken later.

        Raises:
            ConfigError: one is wrong already.
        """
        _ = self.aliases

    def add(self, source: ModelSource) -> None:
        """Let a name stand for `source` in this process."""
        self._added[source.name] = source

    @property
    def shipped_aliases(self) -> dict[str, ModelSource]:
        if self._shipped is None:
            self._shipped = alias_file.read(shipped_file(), required=True).models
        return self._shipped

    @property
    def user_aliases(self) -> dict[str, ModelSource]:
        return self._user_file_aliases.models

    @property
    def user_file_modified(self) -> float:
        """Unix time; 0 while there is none."""
        state = _state(self.user_file)
        return 0.0 if state is None else state[0] / 1e9

    @property
    def adapters(self) -> dict[str, Location]:
        """The user's adapters by alias, to be put behind the name of a base. Raises ConfigError as `aliases`."""
        return self._user_file_aliases.adapters

    @property
    def _user_file_aliases(self) -> Aliases:
        with self._reading:
            state = _state(self.user_file)
            if self._user is None or self._user[0] != state:
                self._user = state, self._read_user_file()
            return self._user[1]

    def _read_user_file(self) -> Aliases:
        try:
            return alias_file.read(self.user_file, required=False)
        except ConfigError as error:
            if self._user is None:
                raise
            logger.warning("%s; the names it had before still hold", error)
            return self._user[1]

    @property
    def fixed_aliases(self) -> dict[str, ModelSource]:
        """The ones that are not the user's to change: shipped, or given to this process."""
        return self.shipped_aliases | self._added

    @property
    def aliases(self) -> dict[str, ModelSource]:
        """Alias -> source, the user's own overriding the shipped ones.

        Raises:
            ConfigError: a file cannot be read or an entry is wrong; names file, line or alias, and field.
        """
        return self.shipped_aliases | self.user_aliases | self._added

    def resolve(self, name: str, *, allow_paths: bool) -> ModelSource:
        """The model a name stands for.

        A name is an alias (any case, with or without `:latest`); or a repository of the hub, `org/name`, with
        `:Q8_0` behind it for its GGUF file of that quantisation, with `@revision` at the end; or, only if
        `allow_paths`, a local folder or .gguf file, which goes before a repository of the same name. Behind any of
        these may be `+` and an adapter: the name it has in models.toml, or, only if `allow_paths`, its folder.

        Raises:
            ModelNotFound: no such alias or adapter, not a name at all, or a path that does not exist.
            ConfigError: a models.toml is wrong.
        """
        if (alias := canonical(name)) in self.aliases:
            return self.aliases[alias]
        if not allow_paths and len(name) > MAX_NAME_LENGTH:
            raise ModelNotFound(f"a model name has at most {MAX_NAME_LENGTH} characters", model=name[:MAX_NAME_LENGTH])
        if not name or any(ord(char) < 32 or ord(char) == 127 for char in name):
            raise ModelNotFound("a model name must not be empty or contain control characters", model=name)
        base, plus, adapter = name.rpartition("+")
        if plus and not base:
            raise ModelNotFound(f"{name!r} has no model before its +: MODEL+ADAPTER", model=name)
        if plus and not (allow_paths and Path(name).expanduser().exists()):
            return self._with_adapter(self._resolve_base(base, allow_paths), adapter, name, allow_paths)
        return self._resolve_base(name, allow_paths)

    def _resolve_base(self, name: str, allow_paths: bool) -> ModelSource:
        alias = canonical(name)
        if alias in self.aliases:
            return self.aliases[alias]
        if allow_paths and (path := _as_path(name)) is not None:
            return ModelSource(str(path), LocalPath(path))
        if ".." not in name and (repo := _as_repo(name)) is not None:
            return ModelSource(str(repo), repo)
        raise ModelNotFound(self._not_found(name, alias), model=name)

    def _with_adapter(self, base: ModelSource, adapter: str, name: str, allow_paths: bool) -> ModelSource:
        if base.adapter is not None:
            raise ModelNotFound(
                f"{base.name} has an adapter already, and {name!r} names another one; a model takes one at a time",
                model=name,
            )
        alias = canonical(adapter)
        if alias in self.adapters:
            return replace(base, name=f"{base.name}+{alias}", adapter=self.adapters[alias])
        path = Path(adapter).expanduser()
        if allow_paths and adapter and path.is_dir():
            return replace(base, name=f"{base.name}+{path.resolve()}", adapter=LocalPath(path.resolve()))
        known = ", ".join(sorted(self.adapters))
        raise ModelNotFound(
            f"no adapter is called {adapter!r}; those of {self.user_file.name} can stand behind a +"
            + (", or a folder that exists" if allow_paths else "")
            + (f" (known are {known})" if known else " (there are none yet)"),
            model=name,
        )

    def locations(self, name: str) -> set[Location]:
        """Where the files are that a name stands for: of a model, of it and its adapter, or of an adapter alone.

        Raises:
            ModelNotFound: it stands for nothing.
            ConfigError: a models.toml is wrong.
        """
        if (adapter := self.adapters.get(canonical(name))) is not None:
            return {adapter}
        source = self.resolve(name, allow_paths=False)
        return {source.location} if source.adapter is None else {source.location, source.adapter}

    def available(self) -> list[ModelCard]:
        """The aliases that load without a download: package installed, or whole snapshot in the hub's cache.

        Raises:
            ConfigError: a models.toml is wrong.
        """
        cards = []
        for _, source in sorted(self.aliases.items()):
            try:
                path = hub.find_local(source)
                has_adapter = source.adapter_source is None or hub.find_local(source.adapter_source) is not None
            except ModelError:
                continue
            if path is not None and has_adapter:
                cards.append(ModelCard(source, path))
        return cards

    def _not_found(self, name: str, alias: str) -> str:
        if alias in self.adapters:
            return f"{alias} is an adapter and no model; put a model's name and + before it: MODEL+{alias}"
        if "+" in name:
            return f"no model is called {name!r}, and a model takes one adapter at a time: MODEL+ADAPTER"
        close = difflib.get_close_matches(alias, self.aliases, n=NUM_SUGGESTIONS, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(sorted(self.aliases))}."
        return f"no model is called {name!r}; {hint} A repository of the hub is named like org/name"


def shipped_file() -> Path:
    """The models.toml of mlxserve itself: inside the installed package, or at the top of a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "models.toml"
    return inside if inside.exists() else package.parent / "models.toml"


def _state(file: Path) -> tuple[int, int] | None:
    """Changes when the file does; None while there is none."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino


def _as_repo(name: str) -> HubRepo | None:
    name, at, revision = name.partition("@")
    repo, colon, tag = name.partition(":")
    if not REPO.fullmatch(repo) or (at and not REVISION.fullmatch(revision)):
        return None
    if colon and not GGUF_TAG.fullmatch(tag):
        return None
    gguf = tag.upper() if colon and tag.lower() != "latest" else None
    return HubRepo(repo, revision if at else "main", gguf)


def _as_path(name: str) -> Path | None:
    """The local path a user means by `name`, None if it does not look like one and nothing is there."""
    path = Path(name).expanduser()
    looks_like_path = name.startswith(("/", "./", "../", "~")) or name in (".", "..") or name.endswith(".gguf")
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path.resolve()
    if not looks_like_path:
        return None
    problem = "is not a folder or a .gguf file" if path.exists() else "does not exist"
    raise ModelNotFound(f"{path} {problem}", model=name)
