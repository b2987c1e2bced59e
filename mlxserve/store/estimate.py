"""How much memory a model will take, told from its files' headers."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxserve.errors import ModelLoadError
from mlxserve.store.gguf_file import GgufFile
from mlxserve.store.kv_estimate import estimate_kv
from mlxserve.store.loader import DtypePolicy
from mlxserve.store.safetensors_header import BadHeader, read_header

_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
"""GGUF types that stay quantised, and the bits of a code; every 32 codes get a scale and a bias of 2 bytes each."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes in memory, as a load of these files will make them."""

    weight_bytes: int
    kv_bytes_per_token: int
    """Of all layers (kv_estimate.py); 0 where the config does not say."""
    context_length: int
    """0 where the config does not say."""


def estimate(path: Path, *, dtype_policy: DtypePolicy, kv_bits: int | None = None) -> MemoryEstimate:
    """What a folder or .gguf file will take. Damaged ones count by their size: the load says what is wrong."""
    try:
        if path.is_dir():
            config = json.loads((path / "config.json").read_text(encoding="utf-8"))
            architecture = str(config.get("model_type"))
            weight_bytes = sum(_safetensors_bytes(file, config, dtype_policy) for file in _weight_files(path))
            context_length = {**config, **(config.get("text_config") or {})}.get("max_position_embeddings")
        else:
            file = GgufFile.open(path, model=path.name)
            config, architecture = file.metadata, file.require("general.architecture", str)
            weight_bytes = _gguf_bytes(file, dtype_policy)
            context_length = file.require(f"{architecture}.context_length", int)
        kv_bytes_per_token = _kv_bytes(config, architecture, dtype_policy, kv_bits)
        return MemoryEstimate(weight_bytes, kv_bytes_per_token, int(context_length or 0))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, BadHeader, ModelLoadError):
        return MemoryEstimate(sum(file.stat().st_size for file in _weight_files(path)), 0, 0)


def _weight_files(path: Path) -> list[Path]:
    return sorted(path.glob("model*.safetensors")) if path.is_dir() else [path] if path.exists() else []


def _safetensors_bytes(file: Path, config: dict[str, Any], dtype_policy: DtypePolicy) -> int:
    header = read_header(file)
    if dtype_policy == "keep":
        return sum(tensor.num_bytes for tensor in header.values())
    quantization = config.get("quantization") or {}
    num_values = 0
    for name, tensor in header.items():
        stem, _, kind = name.rpartition(".")
        is_quantised = f"{stem}.scales" in header
        if is_quantised and kind == "scales":
            own = quantization.get(stem)
            group_size = own["group_size"] if isinstance(own, dict) else quantization["group_size"]
            num_values += math.prod(tensor.shape) * group_size
        elif not is_quantised or kind not in ("weight", "biases"):
            num_values += math.prod(tensor.shape)
    return 4 * num_values


def _gguf_bytes(file: GgufFile, dtype_policy: DtypePolicy) -> int:
    total = 0
    for tensor in file.tensors.values():
        num_values = math.prod(tensor.shape)
        bits = _BITS.get(tensor.type.name)
        if dtype_policy == "float32":
            total += 4 * num_values
        elif bits is not None:
            total += num_values * bits // 8 + num_values // 32 * 4
        else:
            total += 2 * num_values
    return total


def _kv_bytes(config: dict[str, Any], architecture: str, dtype_policy: DtypePolicy, kv_bits: int | None) -> int:
    kv = estimate_kv(config, architecture)
    plain = 32 if dtype_policy == "float32" else 16
    return 0 if kv is None else kv.bytes_per_token(plain if kv_bits is None else kv_bits)
