"""Models as `list` and `show` print them: for people, and as JSON."""

import datetime
import json
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mlxserve.store.size_text import size_text

if TYPE_CHECKING:
    from mlxserve.engine.library import StoredModel
    from mlxserve.store.fit import Fit

size = size_text
ID_LENGTH = 12
COLUMN_GAP = 3
SHORT_LICENSE_LINES = 3
_AGES = (
    ("year", 365 * 86400),
    ("month", 30 * 86400),
    ("week", 7 * 86400),
    ("day", 86400),
    ("hour", 3600),
    ("minute", 60),
)


def count(number: int) -> str:
    """'135M', '4.0B'."""
    if number >= 1e9:
        return f"{number / 1e9:.1f}B"
    return f"{number / 1e6:.0f}M" if number >= 1e6 else f"{number / 1e3:.0f}K"


def age(timestamp: float, now: float | None = None) -> str:
    """'3 days ago'."""
    seconds = (time.time() if now is None else now) - timestamp
    for name, length in _AGES:
        if seconds >= length:
            number = int(seconds // length)
            return f"{number} {name}{'s' if number > 1 else ''} ago"
    return "just now"


def table(rows: Iterable[Sequence[str]]) -> str:
    """Columns side by side; the last one of a row is not padded."""
    rows = [list(row) for row in rows]
    widths = [max(len(row[column]) for row in rows) + COLUMN_GAP for column in range(len(rows[0]))]
    return "\n".join(
        "".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def models_table(models: Sequence["StoredModel"]) -> str:
    rows = [("NAME", "ID", "SIZE", "PARAMETERS", "QUANTIZATION", "CONTEXT", "MODIFIED")]
    rows += [
        (
            model.name,
            model.digest[:ID_LENGTH],
            size(model.size),
            count(model.num_parameters),
            model.quantization,
            str(model.context_length),
            age(model.modified),
        )
        for model in models
    ]
    return table(rows)


def as_json(model: "StoredModel") -> dict[str, Any]:
    """All that is known of a model but its template."""
    modified = datetime.datetime.fromtimestamp(model.modified, datetime.UTC)
    return {
        "name": model.name,
        "source": str(model.source.location),
        "path": str(model.path),
        "adapter": None if model.adapter is None else str(model.adapter.path),
        "size": model.size,
        "modified": modified.isoformat(timespec="seconds"),
        "digest": model.digest,
        "format": model.format,
        "architecture": model.architecture,
        "num_parameters": model.num_parameters,
        "quantization": model.quantization,
        "context_length": model.context_length,
        "embedding_length": model.embedding_length,
        "capabilities": list(model.capabilities),
        "license": model.license,
        "system": model.system,
        "parameters": model.parameters,
        "description": model.source.description,
    }


def fit_as_json(fit: "Fit") -> dict[str, Any]:
    return {
        "fits": fit.fits,
        "machine": fit.machine.name,
        "memory": fit.machine.memory,
        "budget": fit.machine.budget,
        "weights": fit.weight_bytes,
        "max_tokens_per_second": fit.max_tokens_per_second,
        "kv_cache": [
            {
                "bits": cache.bits,
                "bytes_per_token": cache.bytes_per_token,
                "max_context": cache.max_context,
                "streams": {str(length): number for length, number in cache.num_streams.items()},
            }
            for cache in fit.caches
        ],
    }


def print_json(content: Any) -> None:
    print(json.dumps(content, indent=2, ensure_ascii=False))


def details(model: "StoredModel") -> str:
    """The sections of `show`."""
    rows = {
        "architecture": model.architecture,
        "parameters": count(model.num_parameters),
        "context length": str(model.context_length),
        "embedding length": str(model.embedding_length or "unknown"),
        "quantization": model.quantization,
        "size": size(model.size),
        "source": str(model.source.location),
        "path": str(model.path),
        "modified": age(model.modified),
    }
    if model.adapter is not None:
        rows["adapter"] = f"{model.adapter.path}, {count(model.adapter.num_parameters)} parameters"
    sections = [_section("Model", table(rows.items())), _section("Capabilities", "\n".join(model.capabilities))]
    if model.parameters:
        sections.append(_section("Parameters", parameters(model)))
    if model.system:
        sections.append(_section("System", model.system))
    if model.license:
        lines = model.license.strip().splitlines()
        sections.append(_section("License", "\n".join(lines[:SHORT_LICENSE_LINES])))
    return "\n\n".join(sections)


def parameters(model: "StoredModel") -> str:
    """A line each; one for each stop string, in quotes."""
    rows: list[tuple[str, str]] = []
    for name, value in model.parameters.items():
        values = value if isinstance(value, list) else [value]
        rows += [(name, json.dumps(each, ensure_ascii=False)) for each in values]
    return table(rows) if rows else ""


def fit_report(fit: "Fit") -> str:
    """The sections of `show --fit`."""
    machine = fit.machine
    rows = {
        "machine": f"{machine.name}, {size(machine.memory)} of memory, {size(machine.budget)} of it for models",
        "weights": size(fit.weight_bytes) + ("" if fit.fits else ", which do not fit"),
    }
    if fit.max_tokens_per_second is not None and machine.bandwidth is not None:
        rows["decoding"] = (
            f"at most {fit.max_tokens_per_second:.0f} tokens/s a stream: {machine.bandwidth / 1e9:.0f} GB/s over "
            f"{size(fit.bytes_read)} a token"
        )
    sections = [_section("Memory", table(rows.items()))]
    if fit.caches:
        lengths = list(fit.caches[0].num_streams)
        heading = ["", "a token", "longest context", *(f"streams of {length}" for length in lengths)]
        lines = [
            [
                f"{cache.bits}-bit",
                size(cache.bytes_per_token),
                str(cache.max_context),
                *(str(cache.num_streams[length]) for length in lengths),
            ]
            for cache in fit.caches
        ]
        sections.append(_section("KV cache", table([heading, *lines])))
    else:
        sections.append(_section("KV cache", "its config does not tell how much it takes"))
    return "\n\n".join(sections)


def _section(title: str, body: str) -> str:
    return "\n".join([f"  {title}", *(f"    {line}".rstrip() for line in body.splitlines())])
