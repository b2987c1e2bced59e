"""What this machine knows of the model that a server runs: its tokenizer, and how its file holds the weights."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from mlxserve.errors import BenchError, ConfigError, MlxserveError, ModelError
from mlxserve.store import hub
from mlxserve.store.gguf_file import GgufFile
from mlxserve.store.gguf_tokenizer import build_tokenizer
from mlxserve.store.registry import Registry

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """`tokenizer` counts tokens; `quantization` is what the report calls the weights."""

    name: str
    tokenizer: Tokenizer
    quantization: str


def find(name: str) -> ModelFiles | None:
    """The files of a model by its name at a server; None where they are not on this machine. Downloads nothing."""
    try:
        return read(name)
    except (BenchError, ModelError):
        return None


def read(name: str) -> ModelFiles:
    """The files of an alias, hub repository, folder, .gguf or tokenizer.json.

    Raises:
        BenchError: they are not here, or hold no tokenizer that can be read.
        ConfigError: a models.toml is wrong.
    """
    if (file := Path(name)).name == TOKENIZER and file.is_file():
        return ModelFiles(name, _read_tokenizer(file), _of_folder(file.parent))
    try:
        path = hub.find_local(Registry().resolve(name, allow_paths=True))
        if path is None:
            raise BenchError(f"the files of {name} are not on this machine; `mlxserve pull {name}` fetches them")
        if path.is_file():
            return _read_gguf(name, path)
    except ConfigError:
        raise
    except MlxserveError as error:
        raise BenchError(f"no tokenizer for {name}: {error}") from error
    return ModelFiles(name, _read_tokenizer(path / TOKENIZER), _of_folder(path))


def _read_gguf(name: str, path: Path) -> ModelFiles:
    file = GgufFile.open(path, model=name)
    tokenizer = Tokenizer.from_str(build_tokenizer(file).backend_tokenizer.to_str())
    return ModelFiles(name, tokenizer, f"{file.most_common_type} in its GGUF file")


def _read_tokenizer(file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more special
        raise BenchError(f"{file} is no tokenizer: {error}") from error


def _of_folder(folder: Path) -> str:
    config = {}
    with contextlib.suppress(OSError, ValueError):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return "; ".join(_described(config)) or "not told by its files"


def _described(config: object) -> Iterator[str]:
    if not isinstance(config, dict):
        return
    quantization = config.get("quantization")
    if isinstance(quantization, dict) and quantization.get("bits"):
        yield f"{quantization['bits']}-bit, groups of {quantization.get('group_size', '?')}"
    elif kind := config.get("dtype") or config.get("torch_dtype"):
        yield str(kind)
