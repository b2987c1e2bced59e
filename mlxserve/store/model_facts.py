"""What the files of a model say about it, read without its weights and without mlx."""

import hashlib
import json
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mlxserve.errors import ModelLoadError
from mlxserve.store.gguf_file import GgufFile
from mlxserve.store.gguf_weights import SUPPORTED
from mlxserve.store.repo_files import gguf_refusal
from mlxserve.store.safetensors_header import BadHeader, TensorInfo, read_header

CONTEXT_KEYS = ("max_position_embeddings", "max_seq_len", "max_sequence_length", "seq_length", "n_positions", "n_ctx")
FALLBACK_CONTEXT_LENGTH = 8192
"""For the rare model that does not say how long its context is."""
MAX_LICENSE_LENGTH = 100_000

GGUF_TYPES = frozenset(type_.name for type_ in SUPPORTED)
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
_NOT_OF_TEXT = re.compile(r"(?:model\.)?(?:vision_|visual\.|audio_|multi_modal_projector|mm_)")
"""Tensors that mlx-lm, which reads and writes text only, leaves out."""
_SCALES = (".scales", ".biases")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    path: Path
    size: int
    """Bytes on disk."""
    modified: float
    """Unix time."""
    digest: str
    """64 hexadecimal digits that change when a file does."""
    format: Literal["gguf", "safetensors"]
    architecture: str
    num_parameters: int
    weight_bytes: int
    """Of what is loaded, as the files have it."""
    quantization: str
    context_length: int
    embedding_length: int | None
    chat_template: str | None
    license: str | None
    config: dict[str, Any] = field(repr=False, hash=False)
    """config.json, or what a GGUF file says in its words."""
    tokens_file: Path | None
    """File with the tokens: tokenizer.json, or the GGUF file."""
    expert_parameters: int = 0
    """Parameters of routed experts, of which a token uses some."""
    unreadable_types: tuple[str, ...] = ()
    """Types of tensors in a GGUF file that cannot be read."""
    lookup_bytes: int = 0
    """Bytes of an embedding table that is not the output matrix, too: a token reads one row of it."""

    def has_token(self, token: str) -> bool:
        """Whether the vocabulary may have a token: looked for in the file's bytes, since parsing a large one takes
        a second."""
        if self.tokens_file is None:
            return False
        wanted = token.encode()
        if self.format == "safetensors":
            wanted = json.dumps(token, ensure_ascii=False).encode()
        with self.tokens_file.open("rb") as stream:
            # The tokens of a GGUF file stand in its head.
            return wanted in stream.read(None if self.format == "safetensors" else 16 << 20)


def read_facts(path: Path, name: str, *, advice: str = "pull the model again") -> ModelFacts:
    """The facts of a folder in mlx-lm's format or of a .gguf file. `advice`: what to do if its weights are damaged.

    Raises:
        ModelLoadError: the files are missing or damaged.
    """
    try:
        return _of_folder(path, name, advice) if path.is_dir() else _of_gguf(path, name)
    except OSError as error:
        raise ModelLoadError(f"{error.filename or path} cannot be read: {error.strerror}", model=name) from error


def require_readable(facts: ModelFacts, name: str) -> None:
    """Refuse a GGUF file that cannot be loaded.

    Raises:
        ModelLoadError: its architecture, or a type of its tensors; says what to use instead.
    """
    if facts.format != "gguf":
        return
    reason = unreadable(facts.architecture, facts.unreadable_types)
    if reason is not None:
        raise ModelLoadError(f"{facts.path}: {reason}", model=name)


def unreadable(architecture: str, unreadable_types: tuple[str, ...]) -> str | None:
    """Why a GGUF file cannot be loaded, and what to use instead; None if it can."""
    if not unreadable_types:
        return gguf_refusal(architecture)
    return (
        f"it holds tensors of the types {', '.join(unreadable_types)}, which cannot be read "
        f"({', '.join(sorted(GGUF_TYPES))} can); take a file of Q8_0 or F16, or an MLX version of the model"
    )


def unreadable_types(file: GgufFile) -> tuple[str, ...]:
    return tuple(sorted({tensor.type.name for tensor in file.tensors.values()} - GGUF_TYPES))


def context_length(config: dict[str, Any]) -> int | None:
    """Tokens the model was made for, as its config says."""
    for source in (config, config.get("text_config")):
        for key in CONTEXT_KEYS:
            value = source.get(key) if isinstance(source, dict) else None
            if isinstance(value, int) and value > 0:
                return value
    return None


def _of_folder(folder: Path, name: str, advice: str) -> ModelFacts:
    config = _json(folder / "config.json", name)
    tensors: dict[str, TensorInfo] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        try:
            tensors |= read_header(file)
        except BadHeader as error:
            raise ModelLoadError(f"{file}: {error}; {advice}", model=name) from error
    if not tensors:
        raise ModelLoadError(f"{folder}: it has no weights (model*.safetensors)", model=name)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return facts_of_tensors(
        tensors,
        config,
        path=folder,
        size=sum(path.stat().st_size for path in files),
        modified=max(path.stat().st_mtime for path in files),
        digest=_digest(files),
        chat_template=_folder_template(folder, name),
        license=_folder_license(folder),
        tokens_file=next((path for path in files if path.name == "tokenizer.json"), None),
    )


def facts_of_tensors(
    tensors: dict[str, TensorInfo],
    config: dict[str, Any],
    *,
    path: Path,
    size: int,
    modified: float,
    digest: str,
    chat_template: str | None = None,
    license: str | None = None,
    tokens_file: Path | None = None,
) -> ModelFacts:
    """The facts of a model in safetensors, of which there is at least one tensor."""
    text = config.get("text_config")
    hidden = (text if isinstance(text, dict) else config).get("hidden_size")
    counts = _parameters(tensors, config)
    return ModelFacts(
        path=path,
        size=size,
        modified=modified,
        digest=digest,
        format="safetensors",
        architecture=str(config.get("model_type", "unknown")),
        num_parameters=sum(counts.values()),
        weight_bytes=sum(tensor.num_bytes for key, tensor in tensors.items() if not _NOT_OF_TEXT.match(key)),
        quantization=_quantization(config, tensors),
        context_length=context_length(config) or FALLBACK_CONTEXT_LENGTH,
        embedding_length=hidden if isinstance(hidden, int) else None,
        chat_template=chat_template,
        license=license,
        config=config,
        tokens_file=tokens_file,
        expert_parameters=sum(count for key, count in counts.items() if _is_expert(key)),
        lookup_bytes=_lookup_bytes(tensors),
    )


def _of_gguf(path: Path, name: str) -> ModelFacts:
    file = GgufFile.open(path, model=name)
    architecture = file.require("general.architecture", str)
    prefix = architecture + "."
    config = {key: value for key, value in file.metadata.items() if not isinstance(value, list)}
    length = file.get(prefix + "context_length", int, 0)
    counts = {key: math.prod(tensor.shape) for key, tensor in file.tensors.items()}
    return ModelFacts(
        path=path,
        size=path.stat().st_size,
        modified=path.stat().st_mtime,
        digest=_digest([path]),
        format="gguf",
        architecture=architecture,
        num_parameters=sum(counts.values()),
        weight_bytes=sum(tensor.num_bytes for tensor in file.tensors.values()),
        quantization=file.most_common_type,
        context_length=length or FALLBACK_CONTEXT_LENGTH,
        embedding_length=file.get(prefix + "embedding_length", int) or None,
        chat_template=file.get("tokenizer.chat_template", str),
        license=file.get("general.license", str),
        config=config,
        tokens_file=path,
        expert_parameters=sum(count for key, count in counts.items() if "_exps." in key),
        unreadable_types=unreadable_types(file),
        lookup_bytes=file.tensors["token_embd.weight"].num_bytes
        if {"token_embd.weight", "output.weight"} <= file.tensors.keys()
        else 0,
    )


def _json(file: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}", model=name) from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} is not a JSON object", model=name)
    return content


def _parameters(tensors: dict[str, TensorInfo], config: dict[str, Any]) -> dict[str, int]:
    """Parameters by tensor. Of a quantised layer, `weight` holds several in each 32-bit word; its scales are none."""
    counts = {}
    for key, tensor in tensors.items():
        if key.endswith(_SCALES):
            continue
        count = math.prod(tensor.shape)
        if tensor.dtype == "U32" and key.endswith(".weight") and key.removesuffix("weight") + "scales" in tensors:
            count = count * 32 // _bits(config, key.removesuffix(".weight"))
        counts[key] = count
    return counts


def _bits(config: dict[str, Any], layer: str) -> int:
    scheme = config.get("quantization")
    own = scheme.get(layer) if isinstance(scheme, dict) else None
    for source in (own, scheme):
        bits = source.get("bits") if isinstance(source, dict) else None
        if isinstance(bits, int) and bits > 0:
            return bits
    return 4


def _quantization(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> str:
    scheme = config.get("quantization")
    if isinstance(scheme, dict) and "bits" in scheme:
        mode = scheme.get("mode", "affine")
        return f"{scheme['bits']}-bit" if mode == "affine" else str(mode)
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        sizes[tensor.dtype] += tensor.num_bytes
    dtype = sizes.most_common(1)[0][0]
    return _DTYPES.get(dtype, dtype)


def _is_expert(key: str) -> bool:
    return ("switch_mlp." in key or ".experts." in key) and "shared_expert" not in key


def _lookup_bytes(tensors: dict[str, TensorInfo]) -> int:
    if not any("lm_head." in key for key in tensors):
        return 0
    return sum(tensor.num_bytes for key, tensor in tensors.items() if "embed_tokens." in key)


def _folder_template(folder: Path, name: str) -> str | None:
    if (file := folder / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    for file in (folder / "chat_template.json", folder / "tokenizer_config.json"):
        template = _json(file, name).get("chat_template") if file.is_file() else None
        if isinstance(template, str):
            return template
        if isinstance(template, list):
            named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
            if isinstance(named.get("default"), str):
                return str(named["default"])
    return None


def _folder_license(folder: Path) -> str | None:
    """The name in the README's front matter, or the text of a LICENSE file."""
    readme = folder / "README.md"
    if readme.is_file():
        head = readme.read_text(encoding="utf-8", errors="replace").partition("\n---")[0]
        names = dict(re.findall(r"^(license|license_name):[ \t]*[\"']?([^\"'\n]+?)[\"']?[ \t]*$", head, re.MULTILINE))
        if head.startswith("---") and (found := names.get("license_name") or names.get("license")):
            return str(found)
    for file in sorted(folder.glob("LICENSE*")):
        return file.read_text(encoding="utf-8", errors="replace")[:MAX_LICENSE_LENGTH]
    return None


def _digest(files: list[Path]) -> str:
    """Of names, sizes and times; a file of the hub's cache is known by the hash that names its blob."""
    digest = hashlib.sha256()
    for file in files:
        status = file.stat()
        known = file.resolve().name if file.is_symlink() else f"{status.st_size} {status.st_mtime_ns}"
        digest.update(f"{file.name} {known};".encode())
    return digest.hexdigest()
