"""A model on disk -> a model in memory: MLX and safetensors folders, and GGUF files.

Nothing a folder contains is ever executed, and every weight is in memory, none lazy, when load() returns.
"""

import json
import logging
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.utils import get_total_parameters, load_model
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mlxserve.core.request import Pooling
from mlxserve.errors import ModelLoadError
from mlxserve.store import gguf, gguf_tokenizer, pooling
from mlxserve.store.gguf_file import GgufFile
from mlxserve.store.model_facts import CONTEXT_KEYS, FALLBACK_CONTEXT_LENGTH
from mlxserve.store.pooling import UnsupportedPooling
from mlxserve.store.safetensors_header import BadHeader, read_header

logger = logging.getLogger(__name__)

DtypePolicy = Literal["keep", "float32"]
"""keep: weights as the files have them, quantised ones quantised (Metal). float32: everything plain float32 (CPU)."""

_PLAIN_LAYERS = {
    nn.QuantizedLinear: nn.Linear,
    nn.QuantizedEmbedding: nn.Embedding,
    QuantizedSwitchLinear: SwitchLinear,
    QuantizedMultiLinear: MultiLinear,
}
"""Quantised layer -> the layer with the same weight unquantised."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, with what the engine must know about it."""

    name: str
    model: nn.Module = field(repr=False)
    """mlx-lm's module, all weights evaluated."""
    config: dict[str, Any] = field(repr=False)
    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    """Its chat_template is None if the model has none."""
    eos_token_ids: frozenset[int]
    context_length: int
    """Tokens the model was made for, prompt and answer together."""
    num_parameters: int
    weight_bytes: int
    """Bytes of the weights in memory."""
    quantization: str
    """How the files hold the weights: 'Q4_1', '4-bit', 'mxfp4', 'bfloat16'."""
    architecture: str
    """mlx-lm's model type: 'llama', 'qwen3'."""
    pooling: Pooling = Pooling.LAST
    """How its hidden states become an embedding."""
    makes_embeddings: bool = False
    """Whether that is what it was made for."""


def load(source_path: Path, *, name: str, dtype_policy: DtypePolicy) -> LoadedModel:
    """Load a folder in mlx-lm's format or a .gguf file.

    Raises:
        ModelLoadError: the files are missing, damaged, unsupported, or need code from the repository.
    """
    if source_path.is_dir():
        return _load_folder(_Folder(source_path, name), dtype_policy)
    if source_path.exists():
        return _load_gguf(GgufFile.open(source_path, model=name), dtype_policy)
    raise ModelLoadError(f"{source_path}: no such file or folder", model=name)


def _load_gguf(file: GgufFile, dtype_policy: DtypePolicy) -> LoadedModel:
    config = gguf.read_config(file)
    try:
        declared = pooling.of_gguf(file.get(f"{config['model_type']}.pooling_type", int, None))
    except UnsupportedPooling as error:
        raise file.unusable(str(error)) from error
    tokenizer = gguf_tokenizer.build_tokenizer(file)
    model = gguf.build_model(file, config, quantized=dtype_policy == "keep")
    return _finish(
        file.model,
        model,
        config,
        tokenizer,
        eos_token_ids=gguf_tokenizer.eos_token_ids(file),
        quantization=file.most_common_type,
        declared_pooling=declared,
    )


@dataclass(frozen=True, slots=True)
class _Folder:
    path: Path
    model: str

    def unusable(self, reason: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {reason}", model=self.model)

    def read_json(self, name: str) -> dict[str, Any] | None:
        """The object in a JSON file, None if there is no such file.

        Raises:
            ModelLoadError: it cannot be read or is not an object.
        """
        try:
            content = json.loads((self.path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise self.unusable(f"{name} cannot be read: {error}") from error
        if not isinstance(content, dict):
            raise self.unusable(f"{name} is not a JSON object")
        return content


def _load_folder(folder: _Folder, dtype_policy: DtypePolicy) -> LoadedModel:
    declared = folder.read_json("config.json")
    if declared is None:
        raise folder.unusable("it has no config.json, so it is not a model folder")
    _check_runnable(folder, declared)
    _check_weight_files(folder)
    tokenizer = _load_tokenizer(folder)
    try:
        declared_pooling = pooling.of_folder(folder.path)
    except UnsupportedPooling as error:
        raise folder.unusable(str(error)) from error
    try:
        model, config = load_model(folder.path, lazy=True, trust_remote_code=False)
        quantization = _describe_quantization(model, config)
        if dtype_policy == "float32":
            _to_float32(model)
        # The whole module tree and not only its parameters: RoPE frequencies and other constants are lazy too.
        mx.eval(model)
    except Exception as error:  # mlx-lm and mlx raise whatever the files led them to
        own_code = " (it comes with its own code, which mlxserve never runs)" if "auto_map" in declared else ""
        raise folder.unusable(f"mlx-lm cannot load it{own_code}: {type(error).__name__}: {error}") from error
    mx.clear_cache()
    eos_token_ids = _eos_token_ids(declared, folder.read_json("generation_config.json") or {}, tokenizer)
    return _finish(
        folder.model,
        model,
        config,
        tokenizer,
        eos_token_ids=eos_token_ids,
        quantization=quantization,
        declared_pooling=declared_pooling,
    )


def _finish(
    name: str,
    model: nn.Module,
    config: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    *,
    eos_token_ids: frozenset[int],
    quantization: str,
    declared_pooling: Pooling | None,
) -> LoadedModel:
    if not eos_token_ids:
        logger.warning("%s names no end-of-sequence token: answers end only at max_tokens or a stop string", name)
    return LoadedModel(
        name=name,
        model=model,
        config=config,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids,
        context_length=_context_length(name, model, config),
        num_parameters=get_total_parameters(model),
        weight_bytes=sum(array.nbytes for _, array in tree_flatten(model.parameters())),
        quantization=quantization,
        architecture=config["model_type"],
        pooling=declared_pooling or Pooling.LAST,
        makes_embeddings=declared_pooling is not None,
    )


def _check_runnable(folder: _Folder, config: dict[str, Any]) -> None:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not re.fullmatch(r"[\w-]+", model_type):
        raise folder.unusable(f"config.json has no usable model_type ({model_type!r})")
    if "model_file" in config:
        raise folder.unusable(f"it needs its own code ({config['model_file']!r}), which mlxserve never runs")


def _check_weight_files(folder: _Folder) -> None:
    """Look at every weight file's header: MLX reads lazily, and past the end of a file that was cut short.

    Raises:
        ModelLoadError: no safetensors, a missing part, or a damaged file.
    """
    files = sorted(folder.path.glob("model*.safetensors"))
    if not files:
        raise folder.unusable(_reason_without_weights(folder.path))
    if index := folder.read_json("model.safetensors.index.json"):
        parts = index.get("weight_map")
        if not isinstance(parts, dict):
            raise folder.unusable("model.safetensors.index.json has no weight_map")
        missing = {str(part) for part in parts.values()} - {file.name for file in files}
        if missing:
            raise folder.unusable(f"weight files are missing: {', '.join(sorted(missing))}; finish the download")
    for file in files:
        try:
            read_header(file)
        except BadHeader as error:
            raise ModelLoadError(f"{file}: {error}; download it again", model=folder.model) from error


def _reason_without_weights(path: Path) -> str:
    if any(path.glob("*.gguf")):
        return "it has no model*.safetensors, but GGUF files; name one of those instead of the folder"
    if any(file for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in path.glob(pattern)):
        return "its weights are pickles, which can run code when they are read; use a repository with safetensors"
    return "it has no weights (model*.safetensors)"


def _load_tokenizer(folder: _Folder) -> PreTrainedTokenizerBase:
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model", "tokenizer_config.json")
    if not any((folder.path / name).exists() for name in names):
        raise folder.unusable("it has no tokenizer (tokenizer.json); copy the one of the original model into it")
    try:
        return AutoTokenizer.from_pretrained(folder.path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises whatever the files led it to
        raise folder.unusable(f"its tokenizer cannot be loaded: {type(error).__name__}: {error}") from error


def _to_float32(model: nn.Module) -> None:
    """Make every weight plain float32, one layer at a time: at any moment only one layer is there twice.

    Raises:
        NotImplementedError: a quantised layer without a plain counterpart.
    """
    modules = model.named_modules()
    while modules:
        path, module = modules.pop()
        if "scales" in module:
            plain = _dequantized(path, module)
            model.update_modules(tree_unflatten([(path, plain)]))
            module = plain
        for key, value in module.items():
            if isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating):
                module[key] = value.astype(mx.float32)
                mx.eval(module[key])


def _dequantized(path: str, layer: nn.Module) -> nn.Module:
    plain_class = _PLAIN_LAYERS.get(type(layer))
    if plain_class is None or layer.get("global_scale") is not None:
        raise NotImplementedError(f"{path}: {type(layer).__name__} cannot be dequantised for the CPU")
    scales, biases = layer.scales, layer.biases
    if layer.mode == "affine":
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    weight = mx.dequantize(layer.weight, scales, biases, layer.group_size, layer.bits, layer.mode, dtype=mx.float32)
    plain = plain_class(*reversed(weight.shape))
    plain.weight = weight
    if "bias" in layer:
        plain.bias = layer.bias
    else:
        plain.pop("bias", None)
    return plain


def _describe_quantization(model: nn.Module, config: dict[str, Any]) -> str:
    scheme = config.get("quantization")
    if isinstance(scheme, dict) and "bits" in scheme:
        mode = scheme.get("mode", "affine")
        return f"{scheme['bits']}-bit" if mode == "affine" else str(mode)
    largest = max((array for _, array in tree_flatten(model.parameters())), key=lambda array: array.size)
    return str(largest.dtype).removeprefix("mlx.core.")


def _eos_token_ids(
    config: dict[str, Any], generation_config: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    text_config = config.get("text_config") or {}
    sources = (
        config.get("eos_token_id"),
        text_config.get("eos_token_id"),
        generation_config.get("eos_token_id"),
        tokenizer.eos_token_id,
    )
    ids: set[int] = set()
    for source in sources:
        ids.update(source if isinstance(source, list) else () if source is None else (source,))
    return frozenset(ids)


def _context_length(name: str, model: nn.Module, config: dict[str, Any]) -> int:
    arguments = getattr(model, "args", None)
    defaults = vars(arguments) if arguments is not None else {}
    for source in (config, config.get("text_config"), defaults, defaults.get("text_config")):
        for key in CONTEXT_KEYS:
            value = source.get(key) if isinstance(source, dict) else None
            if isinstance(value, int) and value > 0:
                return value
    logger.warning("%s does not say how long its context is; taking %d tokens", name, FALLBACK_CONTEXT_LENGTH)
    return FALLBACK_CONTEXT_LENGTH
