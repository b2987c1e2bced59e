"""Which files of a hub repository make a model, and why one cannot be used: decided by names, before any download.

Only data is wanted: safetensors or one GGUF file, JSON, tokenizer files, chat templates, licences. Never Python files
or pickles.
"""

import ast
import fnmatch
import functools
import importlib.util
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

PATTERNS = (
    "model*.safetensors",
    "*.json",
    "*.jinja",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "merges.txt",
    "vocab.txt",
)
POOLING = "1_Pooling/config.json"
"""How hidden states become embeddings (store/pooling.py): the one file of a subfolder that is wanted."""
ADAPTER = ("adapter_config.json", "adapters.safetensors")
"""What mlx-lm writes and reads as an adapter."""
INDEX = "model.safetensors.index.json"
"""Which tensor is in which of several files."""
MAX_NAMED = 3
"""Of several missing files, so many are named."""
NOTICES = ("README.md", "LICENSE*")
"""What says which licence it is under."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")

GGUF_PREFERENCE = ("Q8_0", "F16", "BF16", "Q4_1", "Q4_0", "F32")
"""The quantisations that can be read. The first one a repository has is taken: files called Q4_0 and Q4_1 mostly hold
their largest tensors in types that cannot."""

GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")

_TAG = re.compile(r"(?:^|[-._])((?:I?Q\d\w*|MXFP4|TQ\d_\d|BF16|F16|F32|FP16|FP32))(?=[-.]|$)", re.IGNORECASE)


def wanted(names: Sequence[str], gguf: str | None) -> list[str]:
    """The files to fetch of those in a repository; nothing in subfolders, which hold other formats of the weights."""
    top = [name for name in names if "/" not in name]
    if gguf is None and _matching(top, ["model*.safetensors"]):
        return [*_matching(top, [*PATTERNS, *NOTICES]), *(name for name in names if name == POOLING)]
    chosen = choose_gguf(top, gguf)
    return [chosen, *_matching(top, NOTICES)] if chosen is not None else []


def wanted_adapter(names: Sequence[str]) -> list[str]:
    """The files to fetch of those in a repository with an adapter."""
    return _matching([name for name in names if "/" not in name], [*ADAPTER, *NOTICES])


def adapter_refusal(names: Sequence[str]) -> str | None:
    """Why a repository with these files cannot be used as an adapter; None if it can."""
    missing = [name for name in ADAPTER if name not in names]
    if not missing:
        return None
    others = " (it has one of another library, PEFT; convert it to mlx-lm's format)"
    is_peft = "adapter_model.safetensors" in names or "adapter_model.bin" in names
    return f"has no {' and no '.join(missing)}, so it is no adapter of mlx-lm" + (others if is_peft else "")


def refusal(names: Sequence[str], gguf: str | None) -> str | None:
    """Why a repository with these files cannot be used, and what to use instead; None if it looks well."""
    top = [name for name in names if "/" not in name]
    quantizations = _quantizations(top)
    if gguf is not None or (quantizations and not _matching(top, ["model*.safetensors"])):
        if choose_gguf(top, gguf) is not None:
            return None
        readable = [tag for tag in GGUF_PREFERENCE if choose_gguf(top, tag)]
        if not quantizations:
            return "has no GGUF files" + ("; leave the quantisation out of the name" if wanted(top, None) else "")
        instead = (
            f"use {' or '.join(':' + tag for tag in readable)}"
            if readable
            else "look for an MLX version of the model: mlxserve search NAME"
        )
        what = "has no GGUF file that can be read" if gguf is None else f"has no GGUF file of {gguf} that can be read"
        return f"{what} (it has {', '.join(quantizations)}; {', '.join(GGUF_PREFERENCE)} can be read): {instead}"
    if not _matching(top, ["model*.safetensors"]):
        if adapter_refusal(names) is None:
            return (
                "holds an adapter and no model; name it in your models.toml, adapter = { repo = ... }, "
                "and put that name behind a model's: MODEL+ADAPTER"
            )
        if _matching(names, [*PICKLES, *("*/" + pattern for pattern in PICKLES)]):
            return (
                "has its weights as pickles, which can run code when they are read; "
                "use a repository with safetensors: mlxserve search NAME finds MLX ones"
            )
        return "has no weights in model*.safetensors or GGUF files; mlxserve runs MLX and safetensors repositories"
    if "config.json" not in top:
        return "has no config.json beside its weights; mlxserve runs MLX and safetensors repositories"
    if _matching(top, ["tokenization_*.py"]) and not {"tokenizer.json", "tokenizer.model"} & set(top):
        return "has a tokenizer written in Python, which mlxserve never runs; use a version of it with a tokenizer.json"
    if not set(TOKENIZERS) & set(top):
        return "has no tokenizer (tokenizer.json); use a repository with one"
    return None


def gguf_refusal(architecture: str) -> str | None:
    """Why GGUF files of an architecture, as general.architecture has it, cannot be used; None if they can."""
    if architecture in GGUF_ARCHITECTURES:
        return None
    return (
        f"architecture {architecture!r} is not supported in GGUF files ({', '.join(GGUF_ARCHITECTURES)} are); "
        "look for the model as an MLX or safetensors repository"
    )


def config_refusal(config: Any) -> str | None:
    """Why a model of this config.json cannot be used; None if it can."""
    if not isinstance(config, dict):
        return "has a config.json that is no JSON object"
    if "model_file" in config:
        return f"needs its own code ({config['model_file']!r}), which mlxserve never runs"
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        return "has a config.json without a model_type"
    if model_type in mlx_lm_types():
        return None
    if "auto_map" in config:
        return (
            f"needs its own code: the model type {model_type!r} is not one of mlx-lm's, and what comes with a "
            "repository is never run"
        )
    return f"is of the model type {model_type!r}, which mlx-lm does not know; a newer one may: pip install -U mlx-lm"


def index_refusal(index: Any, names: Collection[str]) -> str | None:
    """Why weights of this model.safetensors.index.json in a repository with these files cannot be used."""
    parts = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(parts, dict) or not all(isinstance(part, str) for part in parts.values()):
        return f"has a {INDEX} without a weight_map"
    files = sorted(set(parts.values()))
    if outside := [file for file in files if "/" in file or "\\" in file]:
        return f"has a {INDEX} that names files of other folders ({outside[0]!r})"
    if missing := [file for file in files if file not in names]:
        return f"lacks files that its {INDEX} names: {', '.join(missing[:MAX_NAMED])}" + (
            f" and {len(missing) - MAX_NAMED} more" if len(missing) > MAX_NAMED else ""
        )
    return None


def choose_gguf(names: Iterable[str], quantization: str | None) -> str | None:
    """The GGUF file of a quantisation, or the best one; None if there is none that can be read. Never one of parts."""
    by_tag: dict[str, str] = {}
    for name in sorted(names):
        if name.lower().endswith(".gguf") and "mmproj" not in name.lower() and "-of-" not in name:
            by_tag.setdefault(gguf_tag(name) or "", name)
    if quantization is not None:
        return by_tag.get(quantization) if quantization in GGUF_PREFERENCE else None
    # One whose name does not tell is looked at when it is here.
    return next((by_tag[tag] for tag in (*GGUF_PREFERENCE, "") if tag in by_tag), None)


def gguf_tag(name: str) -> str | None:
    """The quantisation in the name of a GGUF file: 'Q4_K_M'."""
    tags = _TAG.findall(name.removesuffix(".gguf"))
    return tags[-1].upper().replace("FP16", "F16").replace("FP32", "F32") if tags else None


@functools.cache
def mlx_lm_types() -> frozenset[str]:
    """The model types mlx-lm has files for or maps to one, read from its source: importing it would import mlx."""
    spec = importlib.util.find_spec("mlx_lm")
    types: set[str] = set()
    for folder in map(Path, (spec and spec.submodule_search_locations) or ()):
        # Modules without arguments of a model are parts that models share.
        files = (folder / "models").glob("*.py")
        types |= {path.stem for path in files if re.search(r"\bModelArgs\b", path.read_text(encoding="utf-8"))}
        for node in ast.parse((folder / "utils.py").read_text(encoding="utf-8")).body:
            match node:
                case ast.Assign([ast.Name("MODEL_REMAPPING")], value):
                    types |= set(ast.literal_eval(value))
                case ast.Assign([ast.Name("MODEL_ARCHITECTURE_REMAPPING")], value):
                    types |= {model_type for model_type, _ in ast.literal_eval(value)}
    return frozenset(types)


def _quantizations(names: Iterable[str]) -> list[str]:
    return sorted({gguf_tag(name) or "unknown" for name in names if name.lower().endswith(".gguf")})


def _matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    patterns = list(patterns)
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
