"""How many bytes a token of context takes, worked out of a model's config, as mlx-lm's caches hold it.

A plain layer keeps a key and a value for each KV head: 2 x KV heads x head size values a token. Layers with a window
keep the latest tokens only; latent attention (MLA) keeps one compressed vector and the rotary part of the key;
recurrent layers keep a state of fixed size, which is not counted.
"""

from dataclasses import dataclass
from typing import Any

_FULL = {"full_attention", "attention", "full", "global"}
_WINDOWED = {"sliding_attention", "chunked_attention", "local_attention"}
_PATTERNS = {"gemma3_text": 6, "gemma3": 6, "cohere2": 4}
"""Every so manieth layer attends to everything, where the config does not say."""
_UNCOMPRESSED_LATENT = {"deepseek_v2", "minicpm3"}
"""Models of latent attention whose cache holds the keys and values made of the latent vector."""
_VECTOR_OVERHEAD = 4
"""Bytes of scale and bias of a quantised vector (runner/kv_format.py)."""


@dataclass(frozen=True, slots=True)
class CacheLayers:
    """Layers that keep the same."""

    count: int
    num_vectors: int
    """Vectors a token and layer: keys and values of each KV head."""
    num_values: int
    """Elements of these vectors together."""
    window: int | None = None
    """Tokens that are kept; None: all."""

    def bytes_per_token(self, bits: int) -> float:
        overhead = _VECTOR_OVERHEAD * self.num_vectors if bits < 16 else 0
        return self.count * (self.num_values * bits / 8 + overhead)


@dataclass(frozen=True, slots=True)
class KVEstimate:
    layers: tuple[CacheLayers, ...]
    can_quantise: bool
    """Whether `kv_bits` is possible, as far as can be told: for plain layers only."""

    def bytes_per_token(self, bits: int) -> int:
        """While no window is full."""
        return round(sum(layers.bytes_per_token(bits) for layers in self.layers))

    def bytes_of(self, num_tokens: int, bits: int) -> int:
        """Of a sequence."""
        return round(
            sum(layers.bytes_per_token(bits) * min(num_tokens, layers.window or num_tokens) for layers in self.layers)
        )


def estimate_kv(config: dict[str, Any], architecture: str) -> KVEstimate | None:
    """From a config.json, or the metadata of a GGUF file; None if it does not say enough."""
    if "general.architecture" in config:
        config = _gguf_config(config, architecture)
    text = config.get("text_config")
    if isinstance(text, dict):
        config = {**config, **text}
    num_layers = _count(config, "num_hidden_layers", "n_layers", "n_layer", "num_layers")
    num_heads = _count(config, "num_attention_heads", "n_heads", "n_head")
    hidden = _count(config, "hidden_size", "n_embd", "d_model", "dim")
    if num_layers is None or num_heads is None:
        return None
    latent = _count(config, "kv_lora_rank")
    rope = _count(config, "qk_rope_head_dim") or 0
    if latent is not None:
        if config.get("model_type", architecture) in _UNCOMPRESSED_LATENT:
            values = num_heads * (
                (_count(config, "qk_nope_head_dim") or 0) + rope + (_count(config, "v_head_dim") or 0)
            )
        else:
            values = latent + rope
        vectors = 2
    else:
        head_dim = _count(config, "head_dim") or (hidden // num_heads if hidden else None)
        if head_dim is None:
            return None
        vectors = 2 * (_count(config, "num_key_value_heads", "num_kv_heads", "n_kv_heads") or num_heads)
        values = vectors * head_dim
    num_full, num_windowed = _kinds(config, num_layers)
    window = _count(config, "sliding_window", "attention_chunk_size") if num_windowed else None
    layers = [CacheLayers(num_full, vectors, values)] if num_full else []
    if num_windowed:
        layers.append(CacheLayers(num_windowed, vectors, values, window))
    return KVEstimate(tuple(layers), can_quantise=latent is None and num_full == num_layers)


def _kinds(config: dict[str, Any], num_layers: int) -> tuple[int, int]:
    """Layers that keep everything, and those that keep a window; the rest keep no keys."""
    for key in ("layer_types", "layers_block_type"):
        kinds = config.get(key)
        if isinstance(kinds, list) and len(kinds) == num_layers:
            return sum(kind in _FULL for kind in kinds), sum(kind in _WINDOWED for kind in kinds)
    if interval := _count(config, "full_attention_interval"):
        return num_layers // interval, 0
    model_type = config.get("model_type")
    if model_type == "gpt_oss":
        return num_layers // 2, num_layers - num_layers // 2
    pattern = _count(config, "sliding_window_pattern") or _PATTERNS.get(str(model_type))
    if pattern and config.get("sliding_window"):
        return num_layers // pattern, num_layers - num_layers // pattern
    return num_layers, 0


def _gguf_config(metadata: dict[str, Any], architecture: str) -> dict[str, Any]:
    names = {
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "hidden_size": "embedding_length",
    }
    return {key: metadata.get(f"{architecture}.{name}") for key, name in names.items()}


def _count(config: dict[str, Any], *keys: str) -> int | None:
    for key in keys:
        value = config.get(key)
        if type(value) is int and value > 0:
            return value
    return None
