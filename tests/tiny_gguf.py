"""Writes tiny GGUF files as llama.cpp's converter would, with the float32 weights they stand for."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, TokenType

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
HEAD_DIM = {"llama": 16, "qwen2": 16, "qwen3": 32}
CONTEXT, ROPE_THETA, EPSILON = 512, 500000.0, 1e-5
SPECIALS = ("<|begin|>", "<|end|>", "<|turn|>", "<note>")
MERGES = ("h e", "Ġ t", "Ġt he", "l l", "he ll")


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in order of byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


TOKENS = [*SPECIALS, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
TOKEN_TYPES = [TokenType.CONTROL] * 3 + [TokenType.USER_DEFINED] + [TokenType.NORMAL] * (len(TOKENS) - 4)


@dataclass
class TinyGguf:
    """What goes into the file; change it before write()."""

    architecture: str
    type: GGMLQuantizationType
    tied: bool = True
    permute: bool = True
    """Interleave q and k rows, as files of architecture llama have them."""
    rope_freqs: np.ndarray | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    """Keys to add or replace; None leaves a key out."""
    tensors: dict[str, tuple[np.ndarray, GGMLQuantizationType] | None] = field(default_factory=dict)
    """Tensors to add or replace, by GGUF name; None leaves one out."""
    seed: int = 0
    expected: dict[str, np.ndarray] = field(default_factory=dict)
    """mlx-lm name -> the values the file stands for; filled by write()."""

    def config(self) -> dict[str, Any]:
        return {
            "model_type": self.architecture,
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "intermediate_size": INNER,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM[self.architecture],
            "rms_norm_eps": float(np.float32(EPSILON)),
            "vocab_size": len(TOKENS),
            "max_position_embeddings": CONTEXT,
            "rope_theta": ROPE_THETA,
            "tie_word_embeddings": self.tied,
        }

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.architecture)
        prefix = self.architecture
        metadata: dict[str, Any] = {
            f"{prefix}.block_count": LAYERS,
            f"{prefix}.context_length": CONTEXT,
            f"{prefix}.embedding_length": HIDDEN,
            f"{prefix}.feed_forward_length": INNER,
            f"{prefix}.attention.head_count": HEADS,
            f"{prefix}.attention.head_count_kv": KV_HEADS,
            f"{prefix}.attention.key_length": HEAD_DIM[self.architecture],
            f"{prefix}.attention.value_length": HEAD_DIM[self.architecture],
            f"{prefix}.attention.layer_norm_rms_epsilon": EPSILON,
            f"{prefix}.rope.freq_base": ROPE_THETA,
            f"{prefix}.rope.dimension_count": HEAD_DIM[self.architecture],
            "general.quantization_version": 2,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": TOKENS,
            "tokenizer.ggml.token_type": [int(type_) for type_ in TOKEN_TYPES],
            "tokenizer.ggml.merges": list(MERGES),
            "tokenizer.ggml.bos_token_id": 0,
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.ggml.eot_token_id": 2,
            **self.metadata,
        }
        for key, value in metadata.items():
            add_value(writer, key, value)
        for name, (data, type_) in self._all_tensors().items():
            writer.add_tensor(name, data, raw_dtype=type_)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _all_tensors(self) -> dict[str, tuple[np.ndarray, GGMLQuantizationType]]:
        rng = np.random.default_rng(self.seed)
        head_dim = HEAD_DIM[self.architecture]
        queries, keys = HEADS * head_dim, KV_HEADS * head_dim
        shapes = {"token_embd.weight": ("model.embed_tokens.weight", (len(TOKENS), HIDDEN))}
        shapes["output_norm.weight"] = ("model.norm.weight", (HIDDEN,))
        if not self.tied:
            shapes["output.weight"] = ("lm_head.weight", (len(TOKENS), HIDDEN))
        layer = {
            "attn_norm.weight": ("input_layernorm.weight", (HIDDEN,)),
            "attn_q.weight": ("self_attn.q_proj.weight", (queries, HIDDEN)),
            "attn_k.weight": ("self_attn.k_proj.weight", (keys, HIDDEN)),
            "attn_v.weight": ("self_attn.v_proj.weight", (keys, HIDDEN)),
            "attn_output.weight": ("self_attn.o_proj.weight", (HIDDEN, queries)),
            "ffn_norm.weight": ("post_attention_layernorm.weight", (HIDDEN,)),
            "ffn_gate.weight": ("mlp.gate_proj.weight", (INNER, HIDDEN)),
            "ffn_up.weight": ("mlp.up_proj.weight", (INNER, HIDDEN)),
            "ffn_down.weight": ("mlp.down_proj.weight", (HIDDEN, INNER)),
        }
        if self.architecture == "qwen2":
            for part, rows in (("q", queries), ("k", keys), ("v", keys)):
                layer[f"attn_{part}.bias"] = (f"self_attn.{part}_proj.bias", (rows,))
        if self.architecture == "qwen3":
            for part in "qk":
                layer[f"attn_{part}_norm.weight"] = (f"self_attn.{part}_norm.weight", (head_dim,))
        for index in range(LAYERS):
            for name, (place, shape) in layer.items():
                shapes[f"blk.{index}.{name}"] = (f"model.layers.{index}.{place}", shape)

        tensors: dict[str, tuple[np.ndarray, GGMLQuantizationType]] = {}
        for name, (place, shape) in shapes.items():
            values = rng.standard_normal(shape, dtype=np.float32) * np.float32(0.3)
            if len(shape) == 1:
                values += 1.0
            type_ = self.type if len(shape) == 2 else GGMLQuantizationType.F32
            raw = gguf.quants.quantize(values, type_)
            self.expected[place] = gguf.quants.dequantize(raw, type_)
            if self.architecture == "llama" and self.permute and name.endswith(("attn_q.weight", "attn_k.weight")):
                raw = permute(raw, HEADS if "attn_q" in name else KV_HEADS)
            tensors[name] = (raw, type_)
        if self.rope_freqs is not None:
            tensors["rope_freqs.weight"] = (self.rope_freqs, GGMLQuantizationType.F32)
        return {name: tensor for name, tensor in {**tensors, **self.tensors}.items() if tensor is not None}


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """LlamaModel.permute of llama.cpp's converter: the rows of each head, its two halves interleaved."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
        case _:
            raise TypeError(key)
