"""Files of small models as the hub has them: valid to their headers, never to be loaded."""

import json
import struct
from typing import Any

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def safetensors(tensors: dict[str, tuple[str, list[int], int]], fill: bytes = b"\0") -> bytes:
    """name -> (type, shape, bytes)."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + fill * end


def weights(part: int, rows: int = 1000, fill: bytes = b"\0") -> bytes:
    """A matrix of `rows` x 64 bfloat16 values."""
    return safetensors({f"model.layers.{part}.w.weight": ("BF16", [rows, 64], rows * 128)}, fill)


def gguf_head(architecture: str, tensor_type: int) -> bytes:
    """A GGUF file of one tensor of 256 values, with nothing behind its header but zeros."""
    key, value, name = b"general.architecture", architecture.encode(), b"token_embd.weight"
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + struct.pack("<Q", len(key)) + key + struct.pack("<I", 8)
    head += struct.pack("<Q", len(value)) + value + struct.pack("<Q", len(name)) + name
    return head + struct.pack("<IQIQ", 1, 256, tensor_type, 0) + bytes(4096)


INFILL_TOKENS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def model_files(*, fill: bytes = b"a") -> dict[str, bytes]:
    """An MLX repository, with files beside the model that must never be fetched."""
    parts = {f"model-0000{part}-of-00002.safetensors": weights(part, 1000 * part, fill) for part in (1, 2)}
    index = {"weight_map": {str(number): name for number, name in enumerate(parts)}}
    return {
        **parts,
        "config.json": json.dumps(CONFIG).encode(),
        "tokenizer.json": json.dumps({"added_tokens": [{"content": token} for token in INFILL_TOKENS]}).encode(),
        "tokenizer_config.json": json.dumps({"chat_template": TEMPLATE}).encode(),
        "model.safetensors.index.json": json.dumps(index).encode(),
        "README.md": b"---\nlicense: apache-2.0\n---\nreadme",
        "modeling_own.py": b"raise SystemExit('never')",
        "pytorch_model.bin": b"pickle",
        "consolidated.safetensors": b"the same again",
        "1_Pooling/config.json": b'{"pooling_mode_lasttoken": true}',
        "original/model.safetensors": b"the same again",
    }


WANTED = {
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors.index.json",
    "README.md",
    "1_Pooling/config.json",
}
WANTED |= {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
