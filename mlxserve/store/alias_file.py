"""A models.toml: read and checked, and for the user's own one written, with its comments kept."""

import fcntl
import os
import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mlxserve.core.sampling_params import SamplingParams
from mlxserve.errors import ConfigError, InvalidParameter
from mlxserve.store.model_source import HubRepo, LocalPath, Location, ModelSource, PackageFile
from mlxserve.store.template_check import check_template

if TYPE_CHECKING:
    from tomlkit import TOMLDocument

ALIAS = re.compile(r"[a-z0-9][a-z0-9._:-]*")
MAX_NAME_LENGTH = 200
_REPO_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
REPO = re.compile(rf"{_REPO_PART}/{_REPO_PART}")
REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]*")
GGUF_TAG = re.compile(r"[A-Za-z0-9_]{1,32}")
_PACKAGE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SAMPLING_KEYS = (
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
WHOLE_SAMPLING_KEYS = ("top_k", "repeat_last_n")
_TEXTS = ("system", "template", "license")
FIELDS = {"source", "adapter", "context_length", "sampling", "description", "stop", *_TEXTS}
ADAPTER_FIELDS = {"adapter", "description"}
"""Of an entry without a source: an adapter alone."""


class Aliases(NamedTuple):
    models: dict[str, ModelSource]
    """By alias."""
    adapters: dict[str, Location]
    """By alias: adapters without a model, for any base that they fit."""


def read(file: Path, *, required: bool) -> Aliases:
    """The entries of a file.

    Raises:
        ConfigError: the file cannot be read or an entry is wrong; names file, line, alias and field. Also if it is
            `required` and not there.
    """
    try:
        text = file.read_text(encoding="utf-8")
        entries = tomllib.loads(text)
    except FileNotFoundError:
        if not required:
            return Aliases({}, {})
        raise ConfigError(f"{file} is missing; install mlxserve again") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    aliases = Aliases({}, {})
    for alias, content in entries.items():
        entry, name = _Entry(file, text, alias), canonical(alias)
        if name in aliases.models or name in aliases.adapters:
            raise entry.wrong("name", "is there twice; upper and lower case are the same, and so is :latest")
        if isinstance(content, dict) and "adapter" in content and "source" not in content:
            aliases.adapters[name] = entry.adapter_alone(content)
        else:
            aliases.models[name] = entry.source(content)
    return aliases


def canonical(name: str) -> str:
    """An alias as it is looked up: in lower case, without `:latest`."""
    return name.lower().removesuffix(":latest")


def name_problem(name: str) -> str | None:
    """Why a new alias cannot have this canonical name, which stands after it in a sentence; None if it can.

    One that stands in the file already is good if ALIAS matches it: so it can be used, and removed.
    """
    if len(name) > MAX_NAME_LENGTH:
        return f"has {len(name)} characters, and a name at most {MAX_NAME_LENGTH}"
    if not ALIAS.fullmatch(name) or ".." in name:
        return "cannot be a name: it begins with a letter or digit, and single . _ : - are allowed behind it"
    if name.endswith(".gguf"):
        return "cannot be a name: what ends in .gguf is a file"
    return None


def put(file: Path, source: ModelSource) -> None:
    """Write `source` under its name, in place of an entry of that name.

    Raises:
        ConfigError: the file is there and is wrong, or the name cannot be an alias.
        OSError: it cannot be written.
    """
    import tomlkit

    if (problem := name_problem(source.name)) is not None:
        raise ConfigError(f"{source.name!r} {problem}")
    with _editing(file) as document:
        for key in [key for key in document if canonical(key) == source.name]:
            document.remove(key)
        table = tomlkit.table()
        for key, value in _fields(source).items():
            if isinstance(value, dict):
                value = tomlkit.inline_table()
                value.update(_fields(source)[key])
            elif isinstance(value, str) and "\n" in value:
                value = tomlkit.string(value, multiline=True)
            table.add(key, value)
        if len(document):
            document.add(tomlkit.nl())
        document.add(source.name, table)


def remove(file: Path, name: str) -> None:
    """Take the entry of that name out.

    Raises:
        ConfigError: the file is wrong.
        OSError: it cannot be written.
    """
    with _editing(file) as document:
        for key in [key for key in document if canonical(key) == name]:
            document.remove(key)


def _fields(source: ModelSource) -> dict[str, Any]:
    fields = {
        "source": _table(source.location),
        "adapter": None if source.adapter is None else _table(source.adapter),
        "context_length": source.context_length,
        "sampling": dict(source.sampling),
        "stop": list(source.stop),
        "description": source.description,
        "system": source.system,
        "template": source.template,
        "license": source.license,
    }
    return {key: value for key, value in fields.items() if value not in (None, "", [], {})}


def _table(location: Location) -> dict[str, str]:
    match location:
        case HubRepo(repo, revision, gguf):
            return {"repo": repo, "revision": revision} | ({} if gguf is None else {"gguf": gguf})
        case PackageFile(package, file):
            return {"package": package, "file": file}
        case LocalPath(path):
            return {"path": str(path)}


@contextmanager
def _editing(file: Path) -> Iterator["TOMLDocument"]:
    """The document, written back when the block ends well. Processes take turns; a reader never sees half a file."""
    import tomlkit

    file.parent.mkdir(parents=True, exist_ok=True)
    with (file.parent / f".{file.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # What is wrong must be told before anything is written, in the words of whoever reads the file later.
        read(file, required=False)
        document = tomlkit.parse(file.read_text(encoding="utf-8")) if file.exists() else tomlkit.document()
        yield document
        partial = file.with_name(f".{file.name}.partial")
        partial.write_text(tomlkit.dumps(document), encoding="utf-8")
        os.replace(partial, file.resolve())


def _keys(dotted: str) -> list[str]:
    """The parts of a TOML key, without their quotes."""
    return [part.strip("\"'") for part in re.findall(r"\"[^\"]*\"|'[^']*'|[^.\s\"']+", dotted)]


@dataclass(frozen=True, slots=True)
class _Entry:
    """One alias while it is checked."""

    file: Path
    text: str
    alias: str

    def wrong(self, field_name: str, problem: str) -> ConfigError:
        return ConfigError(f"{self.file}{self._line(field_name)}: [{self.alias}] {field_name}: {problem}")

    def _line(self, field_name: str) -> str:
        """ ", line N" of the field, or else of the table it is in; tomllib does not tell where a value stood."""
        path = [self.alias, *field_name.split(".")]
        found, depth = 0, 0
        for number, line in enumerate(self.text.splitlines(), 1):
            if header := re.match(r"\s*\[(.*)\]", line):
                keys = _keys(header[1])
                if path[: len(keys)] == keys:
                    depth, found = len(keys), number
                else:
                    depth = len(path)
            elif depth < len(path) and (key := re.match(r"\s*([^=#]+?)\s*=", line)):
                keys = _keys(key[1])
                if keys == path[depth : depth + len(keys)]:
                    return f", line {number}"
        return f", line {found}" if found else ""

    def adapter_alone(self, entry: dict[str, Any]) -> Location:
        self._name()
        if more := sorted(entry.keys() - ADAPTER_FIELDS):
            known = ", ".join(sorted(ADAPTER_FIELDS))
            raise self.wrong(more[0], f"an adapter without a source has only {known}; with a source it is a model")
        self._description(entry)
        return self._adapter(entry["adapter"])

    def source(self, entry: Any) -> ModelSource:
        name = self._name()
        if not isinstance(entry, dict):
            raise self.wrong("entry", f"must be a table, not {entry!r}")
        for key, value in entry.items():
            if key not in FIELDS:
                hint = f'; a name with a dot must be quoted: ["{self.alias}.{key}"]' if isinstance(value, dict) else ""
                raise self.wrong(key, f"unknown field (known: {', '.join(sorted(FIELDS))}){hint}")
        context_length = entry.get("context_length")
        if context_length is not None and (type(context_length) is not int or context_length < 1):
            raise self.wrong("context_length", f"must be a positive whole number, not {context_length!r}")
        for key in _TEXTS:
            if key in entry and not (isinstance(entry[key], str) and entry[key]):
                raise self.wrong(key, f"must be text, not {entry[key]!r}")
        if "template" in entry:
            try:
                check_template(entry["template"])
            except InvalidParameter as error:
                raise self.wrong("template", str(error)) from error
        return ModelSource(
            name,
            self._location(entry.get("source")),
            context_length,
            self._sampling(entry),
            self._description(entry),
            system=entry.get("system"),
            template=entry.get("template"),
            stop=self._stop(entry.get("stop", [])),
            license=entry.get("license"),
            adapter=self._adapter(entry["adapter"]) if "adapter" in entry else None,
        )

    def _name(self) -> str:
        name = canonical(self.alias)
        if not ALIAS.fullmatch(name):
            raise self.wrong("name", "only letters, digits and . _ : - are allowed")
        return name

    def _description(self, entry: dict[str, Any]) -> str:
        description = entry.get("description", "")
        if not isinstance(description, str) or "\n" in description:
            raise self.wrong("description", "must be one line of text")
        return description

    def _stop(self, stop: Any) -> tuple[str, ...]:
        if not isinstance(stop, list) or not all(isinstance(each, str) and each for each in stop):
            raise self.wrong("stop", f"must be a list of texts, not {stop!r}")
        return tuple(stop)

    def _location(self, source: Any) -> Location:
        self._check_table("source", source)
        match source:
            case {"repo": repo, **rest} if rest.keys() <= {"revision", "gguf"}:
                revision, gguf = self._revision("source", source), source.get("gguf")
                if gguf is not None and not GGUF_TAG.fullmatch(gguf):
                    raise self.wrong("source.gguf", f"{gguf!r} is not a quantisation like Q8_0")
                return HubRepo(repo, revision, None if gguf is None else gguf.upper())
            case {"package": package, "file": file, **rest} if not rest:
                if not _PACKAGE.fullmatch(package):
                    raise self.wrong("source.package", f"{package!r} is not the name of a top-level package")
                if Path(file).is_absolute() or ".." in Path(file).parts:
                    raise self.wrong("source.file", f"{file!r} is not inside the package")
                return PackageFile(package, file)
            case {"path": path, **rest} if not rest:
                return LocalPath(Path(path).expanduser())
        raise self.wrong(
            "source", f"needs repo (and revision, gguf), or package and file, or path; it has {sorted(source)}"
        )

    def _adapter(self, adapter: Any) -> Location:
        self._check_table("adapter", adapter)
        match adapter:
            case {"repo": repo, **rest} if rest.keys() <= {"revision"}:
                return HubRepo(repo, self._revision("adapter", adapter), is_adapter=True)
            case {"path": path, **rest} if not rest:
                return LocalPath(Path(path).expanduser())
        raise self.wrong("adapter", f"needs path, or repo (and revision); it has {sorted(adapter)}")

    def _check_table(self, field_name: str, table: Any) -> None:
        if not isinstance(table, dict):
            problem = "is missing" if table is None else f"must be a table, not {table!r}"
            raise self.wrong(field_name, f'{problem}; write {field_name} = {{ repo = "org/name" }}')
        for key, value in table.items():
            if not isinstance(value, str) or not value:
                raise self.wrong(f"{field_name}.{key}", f"must be text, not {value!r}")

    def _revision(self, field_name: str, table: dict[str, str]) -> str:
        """Of a table whose repository is checked with it."""
        repo, revision = table["repo"], table.get("revision", "main")
        if not REPO.fullmatch(repo) or ".." in repo:
            raise self.wrong(f"{field_name}.repo", f"{repo!r} is not of the form org/name")
        if not REVISION.fullmatch(revision) or ".." in revision:
            raise self.wrong(f"{field_name}.revision", f"{revision!r} is not a branch, tag or commit")
        return revision

    def _sampling(self, entry: dict[str, Any]) -> dict[str, float | int]:
        sampling = entry.get("sampling", {})
        if not isinstance(sampling, dict):
            raise self.wrong("sampling", f"must be a table, not {sampling!r}")
        for key, value in sampling.items():
            if key not in SAMPLING_KEYS:
                raise self.wrong(f"sampling.{key}", f"unknown field (known: {', '.join(SAMPLING_KEYS)})")
            if type(value) not in ((int,) if key in WHOLE_SAMPLING_KEYS else (int, float)):
                raise self.wrong(f"sampling.{key}", f"must be a number, not {value!r}")
        try:
            SamplingParams(**sampling)
        except InvalidParameter as error:
            raise self.wrong(f"sampling.{error.param}", str(error)) from error
        return sampling
