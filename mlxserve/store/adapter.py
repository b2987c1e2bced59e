"""The files of a LoRA adapter in mlx-lm's format, looked at without their weights and without mlx.

The format: adapter_config.json with `fine_tune_type`, `num_layers` (the last ones of the model, -1: all) and
`lora_parameters` (`rank`, `scale`, `dropout`, and `keys`, the layers' names, all linear ones if there are none);
adapters.safetensors with the arrays.
"""

import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxserve.errors import ModelLoadError
from mlxserve.store.repo_files import ADAPTER
from mlxserve.store.safetensors_header import BadHeader, read_header

FINE_TUNE_TYPES = ("lora", "dora")


@dataclass(frozen=True, slots=True)
class Adapter:
    path: Path
    config: dict[str, Any] = field(repr=False, hash=False)
    """What of adapter_config.json changes what the adapter computes."""
    num_parameters: int
    size: int
    """Bytes on disk."""
    modified: float
    """Unix time."""

    @property
    def digest(self) -> str:
        """64 hexadecimal digits that change when a file does."""
        digest = hashlib.sha256()
        for name in ADAPTER:
            status = (self.path / name).stat()
            digest.update(f"{name} {status.st_size} {status.st_mtime_ns};".encode())
        return digest.hexdigest()

    def digest_on(self, base: str) -> str:
        """Of the adapter and a base of that digest together."""
        return hashlib.sha256(f"{base} {self.digest}".encode()).hexdigest()

    def unusable(self, reason: str, name: str) -> ModelLoadError:
        return _unusable(self.path, reason, name)


def read_adapter(folder: Path, name: str) -> Adapter:
    """Look at the adapter in a folder, for the model of that name.

    Raises:
        ModelLoadError: it is none of mlx-lm's, is damaged, or is of a kind that cannot be served.
    """
    config_file, weights_file = (folder / file for file in ADAPTER)
    if not config_file.is_file():
        raise _unusable(folder, f"it has no {config_file.name}, so it is no adapter", name)
    config = _read_config(config_file, name)
    if not weights_file.is_file():
        raise _unusable(folder, _reason_without_weights(folder), name)
    try:
        tensors = read_header(weights_file)
    except BadHeader as error:
        raise ModelLoadError(f"{weights_file}: {error}; get it again", model=name) from error
    if not tensors:
        raise _unusable(folder, f"there are no weights in its {weights_file.name}", name)
    statuses = [file.stat() for file in (config_file, weights_file)]
    return Adapter(
        folder,
        config,
        num_parameters=sum(math.prod(tensor.shape) for tensor in tensors.values()),
        size=sum(status.st_size for status in statuses),
        modified=max(status.st_mtime for status in statuses),
    )


def _read_config(file: Path, name: str) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _unusable(file.parent, f"{file.name} cannot be read: {error}", name) from error
    problem = _problem(config)
    if problem is not None:
        raise _unusable(file.parent, f"{file.name}: {problem}", name)
    kind = config.get("fine_tune_type", "lora")
    return {
        "fine_tune_type": kind,
        "num_layers": config["num_layers"],
        "lora_parameters": config["lora_parameters"],
    }


def _problem(config: Any) -> str | None:
    """What is wrong with an adapter_config.json."""
    if not isinstance(config, dict):
        return "not a JSON object"
    if "peft_type" in config:
        return "it is of another library, PEFT; convert it to mlx-lm's format, or train it with mlx_lm.lora"
    kind = config.get("fine_tune_type", "lora")
    if kind == "full":
        return "fine_tune_type 'full' changes all weights; make a model of it with mlx_lm.fuse and serve that"
    if kind not in FINE_TUNE_TYPES:
        return f"fine_tune_type must be one of {', '.join(FINE_TUNE_TYPES)}, not {kind!r}"
    if type(config.get("num_layers")) is not int:
        return f"num_layers must be a whole number, not {config.get('num_layers')!r}"
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        return f"lora_parameters must be an object, not {parameters!r}"
    rank, keys = parameters.get("rank"), parameters.get("keys")
    if type(rank) is not int or rank < 1:
        return f"lora_parameters.rank must be a positive whole number, not {rank!r}"
    for key in ("scale", "dropout"):
        value = parameters.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return f"lora_parameters.{key} must be a number, not {value!r}"
    if not 0 <= parameters["dropout"] < 1:
        return f"lora_parameters.dropout must be from 0 to below 1, not {parameters['dropout']!r}"
    if keys is not None and not (isinstance(keys, list) and all(isinstance(key, str) for key in keys)):
        return f"lora_parameters.keys must be a list of names of layers, not {keys!r}"
    return None


def _reason_without_weights(folder: Path) -> str:
    if any(folder.glob("*.npz")):
        return "its weights are in an .npz file of an older mlx-lm; train it anew, or save them as adapters.safetensors"
    return "it has no adapters.safetensors"


def _unusable(folder: Path, reason: str, name: str) -> ModelLoadError:
    return ModelLoadError(f"the adapter {folder} cannot be used: {reason}", model=name)
