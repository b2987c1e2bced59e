"""Names of models: aliases from models.toml, hub repositories, and for the local user also paths."""

import difflib
import functools
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxserve.config import config_dir
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.errors import ConfigError, InvalidParameter, ModelNotFound
from mlxserve.store import hub
from mlxserve.store.model_source import HubRepo, LocalPath, Location, ModelSource, PackageFile

MAX_NAME_LENGTH = 200
NUM_SUGGESTIONS = 3

_ALIAS = re.compile(r"[a-z0-9][a-z0-9._:-]*")
_REPO_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REPO = re.compile(rf"{_REPO_PART}/{_REPO_PART}")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]*")
_PACKAGE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SAMPLING_KEYS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "repeat_last_n",
    "presence_penalty",
    "frequency_penalty",
)
_WHOLE_SAMPLING_KEYS = ("top_k", "repeat_last_n")


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

    The files are read on first use; both `resolve` and `available` raise ConfigError if one is wrong.
    """

    def __init__(self, *, user_file: Path | None = None) -> None:
        """`user_file`: the user's models.toml; by default the one in the configuration folder."""
        self._user_file = config_dir() / "models.toml" if user_file is None else user_file

    @functools.cached_property
    def aliases(self) -> dict[str, ModelSource]:
        """Alias -> source, the user's own overriding the shipped ones.

        Raises:
            ConfigError: a file cannot be read or an entry is wrong; names file, line or alias, and field.
        """
        return _read(shipped_file(), required=True) | _read(self._user_file, required=False)

    def resolve(self, name: str, *, allow_paths: bool) -> ModelSource:
        """The model a name stands for.

        A name is an alias (any case, with or without `:latest`); or `org/name` or `org/name@revision` on the hub; or,
        only if `allow_paths`, a local folder or .gguf file, which goes before a repository of the same name.

        Raises:
            ModelNotFound: no such alias, not a name at all, or a path that does not exist.
            ConfigError: a models.toml is wrong.
        """
        if not allow_paths and len(name) > MAX_NAME_LENGTH:
            raise ModelNotFound(f"a model name has at most {MAX_NAME_LENGTH} characters", model=name[:MAX_NAME_LENGTH])
        if not name or any(ord(char) < 32 or ord(char) == 127 for char in name):
            raise ModelNotFound("a model name must not be empty or contain control characters", model=name)
        alias = name.lower().removesuffix(":latest")
        if alias in self.aliases:
            return self.aliases[alias]
        if allow_paths and (path := _as_path(name)) is not None:
            return ModelSource(str(path), LocalPath(path))
        repo, at, revision = name.partition("@")
        if ".." not in name and _REPO.fullmatch(repo) and (not at or _REVISION.fullmatch(revision)):
            return ModelSource(name, HubRepo(repo, revision) if at else HubRepo(repo))
        raise ModelNotFound(self._not_found(name, alias), model=name)

    def available(self) -> list[ModelCard]:
        """The aliases that load without a download: package installed, or whole snapshot in the hub's cache.

        Raises:
            ConfigError: a models.toml is wrong.
        """
        found = ((source, hub.find_local(source)) for _, source in sorted(self.aliases.items()))
        return [ModelCard(source, path) for source, path in found if path is not None]

    def _not_found(self, name: str, alias: str) -> str:
        close = difflib.get_close_matches(alias, self.aliases, n=NUM_SUGGESTIONS, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(sorted(self.aliases))}."
        return f"no model is called {name!r}; {hint} A repository of the hub is named like org/name"


def shipped_file() -> Path:
    """The models.toml of mlxserve itself: inside the installed package, or at the top of a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "models.toml"
    return inside if inside.exists() else package.parent / "models.toml"


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


def _read(file: Path, *, required: bool) -> dict[str, ModelSource]:
    try:
        entries = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not required:
            return {}
        raise ConfigError(f"{file} is missing; install mlxserve again") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    sources: dict[str, ModelSource] = {}
    for alias, entry in entries.items():
        source = _Entry(file, alias).source(entry)
        if source.name in sources:
            raise ConfigError(f"{file}: [{alias}] is there twice; upper and lower case are the same")
        sources[source.name] = source
    return sources


@dataclass(frozen=True, slots=True)
class _Entry:
    """One alias while it is checked."""

    file: Path
    alias: str

    def wrong(self, field_name: str, problem: str) -> ConfigError:
        return ConfigError(f"{self.file}: [{self.alias}] {field_name}: {problem}")

    def source(self, entry: Any) -> ModelSource:
        name = self.alias.lower()
        if not _ALIAS.fullmatch(name):
            raise self.wrong("name", "only letters, digits and . _ : - are allowed")
        if not isinstance(entry, dict):
            raise self.wrong("entry", f"must be a table, not {entry!r}")
        known = {"source", "context_length", "sampling", "description"}
        for key, value in entry.items():
            if key not in known:
                hint = f'; a name with a dot must be quoted: ["{self.alias}.{key}"]' if isinstance(value, dict) else ""
                raise self.wrong(key, f"unknown field (known: {', '.join(sorted(known))}){hint}")
        context_length = entry.get("context_length")
        if context_length is not None and (type(context_length) is not int or context_length < 1):
            raise self.wrong("context_length", f"must be a positive whole number, not {context_length!r}")
        description = entry.get("description", "")
        if not isinstance(description, str) or "\n" in description:
            raise self.wrong("description", "must be one line of text")
        location = self._location(entry.get("source"))
        return ModelSource(name, location, context_length, self._sampling(entry), description)

    def _location(self, source: Any) -> Location:
        if not isinstance(source, dict):
            problem = "is missing" if source is None else f"must be a table, not {source!r}"
            raise self.wrong("source", f'{problem}; write source = {{ repo = "org/name" }}')
        for key, value in source.items():
            if not isinstance(value, str) or not value:
                raise self.wrong(f"source.{key}", f"must be text, not {value!r}")
        match source:
            case {"repo": repo, **rest} if rest.keys() <= {"revision"}:
                revision = source.get("revision", "main")
                if not _REPO.fullmatch(repo) or ".." in repo:
                    raise self.wrong("source.repo", f"{repo!r} is not of the form org/name")
                if not _REVISION.fullmatch(revision) or ".." in revision:
                    raise self.wrong("source.revision", f"{revision!r} is not a branch, tag or commit")
                return HubRepo(repo, revision)
            case {"package": package, "file": file, **rest} if not rest:
                if not _PACKAGE.fullmatch(package):
                    raise self.wrong("source.package", f"{package!r} is not the name of a top-level package")
                if Path(file).is_absolute() or ".." in Path(file).parts:
                    raise self.wrong("source.file", f"{file!r} is not inside the package")
                return PackageFile(package, file)
            case {"path": path, **rest} if not rest:
                return LocalPath(Path(path).expanduser())
        raise self.wrong("source", f"needs repo (and revision), or package and file, or path; it has {sorted(source)}")

    def _sampling(self, entry: dict[str, Any]) -> dict[str, float | int]:
        sampling = entry.get("sampling", {})
        if not isinstance(sampling, dict):
            raise self.wrong("sampling", f"must be a table, not {sampling!r}")
        for key, value in sampling.items():
            if key not in _SAMPLING_KEYS:
                raise self.wrong(f"sampling.{key}", f"unknown field (known: {', '.join(_SAMPLING_KEYS)})")
            if type(value) not in ((int,) if key in _WHOLE_SAMPLING_KEYS else (int, float)):
                raise self.wrong(f"sampling.{key}", f"must be a number, not {value!r}")
        try:
            SamplingParams(**sampling)
        except InvalidParameter as error:
            raise self.wrong(f"sampling.{error.param}", str(error)) from error
        return sampling
