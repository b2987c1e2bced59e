"""GGUF files as mlx-lm models: llama, qwen2 and qwen3, with the weights the file holds, to the bit.

Names and layouts are llama.cpp's (convert_hf_to_gguf.py), read backwards. Whatever of the architecture's metadata is
not understood here is refused, never ignored.
"""

import importlib
import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from gguf.constants import GGMLQuantizationType

from mlxserve.core.pieces import Pieces
from mlxserve.store.gguf_file import GgufFile, GgufTensor
from mlxserve.store.gguf_weights import BITS, GROUP_SIZE, SUPPORTED, dequantize, repack
from mlxserve.store.repo_files import gguf_refusal

_HARMLESS_KEYS = frozenset({"vocab_size", "rope.scaling.finetuned", "pooling_type"})
"""Keys of the architecture that change no number computed here; the loader reads pooling_type."""

# Llama 3's scaling of low frequencies (rope_scaling of Llama 3.1 to 3.3). The converter writes only its result, the
# tensor rope_freqs.weight. These constants go into it; the factor, 8 or 32, can be read off.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
_ROPE_FREQS = "rope_freqs.weight"


def read_config(file: GgufFile) -> dict[str, Any]:
    """The config dict that mlx-lm's model class of this architecture takes.

    Raises:
        ModelLoadError: another architecture, a missing or impossible value, or a feature that is not supported.
    """
    architecture = file.require("general.architecture", str)
    if reason := gguf_refusal(architecture):
        raise file.unusable(reason)
    if file.get("split.count", int, 1) > 1:
        raise file.unusable("it is one part of a split file; merge the parts with llama-gguf-split --merge")
    if file.get("general.quantization_version", int, 2) != 2:
        raise file.unusable("its quantisation version is not 2; convert the model again with a current llama.cpp")
    hyper = _Hyperparameters(file, architecture)
    hidden_size, num_heads = hyper.count("embedding_length"), hyper.count("attention.head_count")
    num_kv_heads = hyper.count("attention.head_count_kv", num_heads)
    head_dim = hyper.count("attention.key_length", hidden_size // num_heads)
    if not hyper.get("attention.causal", bool, True):
        raise file.unusable("it is not a causal model, so it cannot generate text")
    if num_heads % num_kv_heads or head_dim % 2:
        raise file.unusable(f"{num_heads} heads of {head_dim} values over {num_kv_heads} KV heads is impossible")
    for key in ("attention.value_length", "rope.dimension_count"):
        if hyper.count(key, head_dim) != head_dim:
            raise file.unusable(f"{architecture}.{key} differs from the head size {head_dim}, which is not supported")
    if architecture == "qwen2" and head_dim * num_heads != hidden_size:
        raise file.unusable(f"a head size of {head_dim} is not supported for qwen2")
    config = {
        "model_type": architecture,
        "hidden_size": hidden_size,
        "num_hidden_layers": hyper.count("block_count"),
        "intermediate_size": hyper.count("feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": hyper.positive("attention.layer_norm_rms_epsilon"),
        "vocab_size": len(file.require("tokenizer.ggml.tokens", list)),
        "max_position_embeddings": hyper.count("context_length"),
        "rope_theta": hyper.positive("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if config["num_hidden_layers"] > len(file.tensors):
        raise file.unusable(f"it claims {config['num_hidden_layers']} layers with {len(file.tensors)} tensors")
    if scaling := _rope_scaling(file, hyper, config):
        config["rope_scaling"] = scaling
    hyper.refuse_unread()
    return config


def build_pieces(file: GgufFile, config: dict[str, Any], *, quantized: bool, size: float) -> Pieces[nn.Module]:
    """mlx-lm's model with the file's weights, read some `size` bytes at a time.

    Args:
        quantized: Keep Q4_0, Q4_1 and Q8_0 as MLX's affine quantisation (same codes, float16 scales and biases) and
            give every other weight the file's one type for activations. Otherwise everything becomes float32.

    Raises:
        ModelLoadError: a tensor is missing, unknown, of an unsupported type or the wrong shape, or cut short.
    """
    places = _check_tensors(file, config)
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    if quantized:
        layers = {place.removesuffix(".weight"): BITS.get(tensor.type) for place, tensor in places.items()}

        def scheme(path: str, layer: nn.Module) -> bool | dict[str, int]:
            bits = layers.get(path)
            return {"group_size": GROUP_SIZE, "bits": bits} if bits else False

        nn.quantize(model, class_predicate=scheme)
    dtype = _compute_dtype(file) if quantized else mx.float32
    weights: dict[str, mx.array] = {}
    num_bytes = 0
    for place, tensor in places.items():
        raw = _unpermuted(tensor, file.read(tensor), config)
        try:
            if quantized and tensor.type in BITS:
                for name, array in zip(("weight", "scales", "biases"), repack(raw, tensor.type), strict=True):
                    weights[f"{place.removesuffix('weight')}{name}"] = mx.array(array)
            else:
                values = dequantize(raw, tensor.type).reshape(tensor.shape)
                weights[place] = mx.array(values).astype(dtype)
                mx.eval(weights[place])
        except ValueError as error:
            raise file.unusable(f"tensor {tensor.name}: {error}") from error
        num_bytes += tensor.num_bytes
        if num_bytes >= size:
            num_bytes = 0
            yield
    model.load_weights(list(weights.items()))
    model.eval()
    return model


class _Hyperparameters:
    """The keys under the architecture's name, remembering which were read."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self.prefix = architecture + "."
        self.read: set[str] = set(_HARMLESS_KEYS)

    def get(self, key: str, kind: type, default: Any) -> Any:
        self.read.add(key)
        if default is None:
            return self.file.require(self.prefix + key, kind)
        return self.file.get(self.prefix + key, kind, default)

    def count(self, key: str, default: int | None = None) -> int:
        value: int = self.get(key, int, default)
        if value < 1:
            raise self.file.unusable(f"{self.prefix}{key} is {value}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = float(self.get(key, float, default))
        if not (value > 0 and math.isfinite(value)):
            raise self.file.unusable(f"{self.prefix}{key} is {value}")
        return value

    def refuse_unread(self) -> None:
        """Whatever is left and is not switched off (0, false) would change the computation."""
        for key, value in self.file.metadata.items():
            if key.startswith(self.prefix) and key.removeprefix(self.prefix) not in self.read and value:
                raise self.file.unusable(f"{key} = {value!r} is a feature that is not supported")


def _rope_scaling(file: GgufFile, hyper: _Hyperparameters, config: dict[str, Any]) -> dict[str, Any] | None:
    kind = hyper.get("rope.scaling.type", str, "none")
    if kind == "none" and hyper.get("rope.scale_linear", float, 1.0) != 1.0:
        raise file.unusable("it scales RoPE by the outdated key rope.scale_linear; convert it with a current llama.cpp")
    if _ROPE_FREQS in file.tensors:
        if kind != "none":
            raise file.unusable(f"RoPE scaling {kind!r} together with {_ROPE_FREQS} is not supported")
        return _llama3_scaling(file, config)
    match kind:
        case "none":
            return None
        case "linear":
            return {"rope_type": "linear", "factor": hyper.positive("rope.scaling.factor")}
        case "yarn":
            return {
                "rope_type": "yarn",
                "factor": hyper.positive("rope.scaling.factor"),
                "original_max_position_embeddings": hyper.count("rope.scaling.original_context_length"),
            }
    raise file.unusable(f"RoPE scaling {kind!r} is not supported")


def _llama3_scaling(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """The scaling whose frequency divisors are the file's.

    Raises:
        ModelLoadError: they are not Llama 3's.
    """
    tensor, head_dim = file.tensors[_ROPE_FREQS], config["head_dim"]
    if tensor.type is not GGMLQuantizationType.F32:
        raise file.unusable(f"{_ROPE_FREQS} has type {tensor.type.name} instead of F32")
    divisors = file.read(tensor).view(np.float32).reshape(-1)
    factor = max(float(divisors.max()), 1.0)
    wavelengths = 2 * math.pi * config["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((_LLAMA3_CONTEXT / wavelengths - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4, atol=0.0):
        raise file.unusable(f"{_ROPE_FREQS} holds RoPE factors that are not those of Llama 3, which is not supported")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }


def _check_tensors(file: GgufFile, config: dict[str, Any]) -> dict[str, GgufTensor]:
    """Every weight of the model by mlx-lm's name, after a look at all names, types and shapes."""
    expected = _expected_tensors(config)
    for name, tensor in file.tensors.items():
        if name == _ROPE_FREQS:
            continue
        if name not in expected:
            raise file.unusable(f"tensor {name} is not part of a {config['model_type']} model as supported here")
        _check_type(file, tensor)
        if tensor.shape != expected[name][1]:
            raise file.unusable(f"tensor {name} has shape {tensor.shape} instead of {expected[name][1]}")
    for name in expected:
        if name not in file.tensors:
            raise file.unusable(f"tensor {name} is missing")
    return {place: file.tensors[name] for name, (place, _) in expected.items()}


def _check_type(file: GgufFile, tensor: GgufTensor) -> None:
    if tensor.type not in SUPPORTED:
        raise file.unusable(
            f"tensor {tensor.name} has type {tensor.type.name}, which is not supported; use a file with "
            f"{', '.join(type_.name for type_ in SUPPORTED)}"
        )


def _expected_tensors(config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """GGUF name -> (mlx-lm name, shape) of every weight the model has."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim, architecture = config["head_dim"], config["model_type"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    layer: dict[str, tuple[str, tuple[int, ...]]] = {
        "attn_norm.weight": ("input_layernorm.weight", (hidden,)),
        "attn_q.weight": ("self_attn.q_proj.weight", (queries, hidden)),
        "attn_k.weight": ("self_attn.k_proj.weight", (keys, hidden)),
        "attn_v.weight": ("self_attn.v_proj.weight", (keys, hidden)),
        "attn_output.weight": ("self_attn.o_proj.weight", (hidden, queries)),
        "ffn_norm.weight": ("post_attention_layernorm.weight", (hidden,)),
        "ffn_gate.weight": ("mlp.gate_proj.weight", (inner, hidden)),
        "ffn_up.weight": ("mlp.up_proj.weight", (inner, hidden)),
        "ffn_down.weight": ("mlp.down_proj.weight", (hidden, inner)),
    }
    if architecture == "qwen2":
        layer["attn_q.bias"] = ("self_attn.q_proj.bias", (queries,))
        layer["attn_k.bias"] = ("self_attn.k_proj.bias", (keys,))
        layer["attn_v.bias"] = ("self_attn.v_proj.bias", (keys,))
    if architecture == "qwen3":
        layer["attn_q_norm.weight"] = ("self_attn.q_norm.weight", (head_dim,))
        layer["attn_k_norm.weight"] = ("self_attn.k_norm.weight", (head_dim,))
    tensors = {
        "token_embd.weight": ("model.embed_tokens.weight", (vocab, hidden)),
        "output_norm.weight": ("model.norm.weight", (hidden,)),
    }
    if not config["tie_word_embeddings"]:
        tensors["output.weight"] = ("lm_head.weight", (vocab, hidden))
    for index in range(config["num_hidden_layers"]):
        for name, (place, shape) in layer.items():
            tensors[f"blk.{index}.{name}"] = (f"model.layers.{index}.{place}", shape)
    return tensors


def _unpermuted(tensor: GgufTensor, raw: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """For llama, q and k rows in the order of mlx-lm: the two halves of each head, where the file interleaves them."""
    heads = {"attn_q.weight": "num_attention_heads", "attn_k.weight": "num_key_value_heads"}
    kind = tensor.name.split(".", 2)[-1]
    if config["model_type"] != "llama" or kind not in heads:
        return raw
    pairs = raw.reshape(config[heads[kind]], config["head_dim"] // 2, 2, raw.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(raw.shape)


def _compute_dtype(file: GgufFile) -> mx.Dtype:
    """The type of activations on a GPU: float16 beside quantised weights, whose scales are float16; else the file's."""
    types = {tensor.type for tensor in file.tensors.values()}
    if types & BITS.keys():
        return mx.float16
    if GGMLQuantizationType.BF16 in types:
        return mx.bfloat16
    return mx.float16 if GGMLQuantizationType.F16 in types else mx.float32
