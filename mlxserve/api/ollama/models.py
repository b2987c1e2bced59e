"""Models as Ollama lists and describes them."""

import json
from typing import TYPE_CHECKING, Any

from mlxserve.api.ollama.times import FOREVER, timestamp

if TYPE_CHECKING:
    from mlxserve.engine.library import StoredModel
    from mlxserve.engine.model_host import LoadedInfo

_OPTION_NAMES = {"repetition_penalty": "repeat_penalty", "context_length": "num_ctx"}
"""Parameters of models.toml that Ollama has under another name."""


def tagged(name: str) -> str:
    """A name with its tag, without which Ollama has none: `:latest` if it says no other."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def listed(model: "StoredModel") -> dict[str, Any]:
    """An entry of /api/tags."""
    return {
        **_identity(model.name, model.size, model.digest),
        "modified_at": _timestamp(model.modified),
        "details": _details(model.format, model.family, model.num_parameters, model.quantization),
    }


def loaded(info: "LoadedInfo") -> list[dict[str, Any]]:
    """The entries of /api/ps for one model in memory: one for each of its names."""
    entry = {
        "details": _details(info.format, info.family, info.num_parameters, info.quantization),
        "expires_at": FOREVER if info.expires_at is None else _timestamp(info.expires_at),
        "size_vram": info.size if info.on_gpu else 0,
        "size_reserved": info.reserved,
    }
    return [
        {**_identity(each.name, info.size, each.digest), **entry, "context_length": each.context_length}
        for each in info.names
    ]


def shown(model: "StoredModel") -> dict[str, Any]:
    """/api/show."""
    return {
        "license": model.license or "",
        "modelfile": _modelfile(model),
        "parameters": "\n".join(f"{key:<30} {value}" for key, value in _parameters(model)),
        "template": model.template or "",
        "system": model.system or "",
        "details": _details(model.format, model.family, model.num_parameters, model.quantization),
        "model_info": _model_info(model),
        "capabilities": list(model.capabilities),
        "modified_at": _timestamp(model.modified),
    }


def parameter_size(count: int) -> str:
    """A number of parameters as it is spoken of: 134.5M, 7.6B."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return str(count)


def _identity(name: str, size: int, digest: str) -> dict[str, Any]:
    return {"name": tagged(name), "model": tagged(name), "size": size, "digest": digest}


def _details(format: str, family: str, num_parameters: int, quantization: str) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": format,
        "family": family,
        "families": [family],
        "parameter_size": parameter_size(num_parameters),
        "quantization_level": quantization,
    }


def _model_info(model: "StoredModel") -> dict[str, Any]:
    info = {
        "general.architecture": model.architecture,
        "general.basename": model.name,
        "general.parameter_count": model.num_parameters,
        f"{model.architecture}.context_length": model.context_length,
        f"{model.architecture}.embedding_length": model.embedding_length,
    }
    return {key: value for key, value in info.items() if value is not None}


def _parameters(model: "StoredModel") -> list[tuple[str, str]]:
    """Names and values as a Modelfile has them: texts as JSON, a list as one line for each of its texts."""
    lines = []
    for key, value in model.parameters.items():
        for each in value if isinstance(value, (list, tuple)) else [value]:
            lines.append((_OPTION_NAMES.get(key, key), json.dumps(each, ensure_ascii=False)))
    return lines


def _modelfile(model: "StoredModel") -> str:
    lines = [f"FROM {model.name}"]
    for keyword, text in (("TEMPLATE", model.template), ("SYSTEM", model.system), ("LICENSE", model.license)):
        if text:
            lines.append(f'{keyword} """{text}"""')
    lines += [f"PARAMETER {key} {value}" for key, value in _parameters(model)]
    return "\n".join(lines) + "\n"


def _timestamp(unix_time: float) -> str:
    return timestamp(round(unix_time * 1e6) * 1000)
