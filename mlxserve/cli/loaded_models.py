"""`mlxserve ps` and `mlxserve stop`: the models in a running server's memory."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from mlxserve.cli import console
from mlxserve.cli.options import Host, Json, Port, load_config
from mlxserve.cli.server_client import ServerClient, open_client
from mlxserve.cli.table import print_table
from mlxserve.errors import ModelNotFound

FOREVER_SECONDS = 50 * 365 * 86400
"""A model that stays longer than this stays for ever: the dialect has no other way to say so."""

Entry = dict[str, Any]
"""One model as the server tells of it."""


def ps(
    as_json: Json = False,
    host: Host = None,
    port: Port = None,
) -> None:
    """List the models in a server's memory. Example: mlxserve ps --port 8080"""
    console.make_stdout_lenient()
    _, server_config = load_config(host=host, port=port)
    with open_client(server_config) as client:
        models = _loaded(client)
    if as_json:
        print(json.dumps(models, indent=2))
        return
    now = datetime.now(UTC)
    print_table(
        ("NAME", "ID", "SIZE", "RESERVED", "PROCESSOR", "CONTEXT", "UNTIL"), [_row(model, now) for model in models]
    )


def stop(
    model: Annotated[list[str], typer.Argument(metavar="MODEL", help="Name, as `mlxserve ps` shows it.")],
    host: Host = None,
    port: Port = None,
) -> None:
    """Unload models of a server. Example: mlxserve stop qwen3-4b

    Answers that are under way are given first.
    """
    console.make_stdout_lenient()
    _, server_config = load_config(host=host, port=port)
    # No limit: the server answers when the model's last request has ended.
    with open_client(server_config, timeout=None) as client:
        loaded = {_canonical(str(entry.get("name"))) for entry in _loaded(client)}
        for name in model:
            if _canonical(name) not in loaded:
                raise ModelNotFound(f"{name} is not loaded; `mlxserve ps` lists what is", model=name)
        for name in model:
            client.post("/api/generate", "done", {"model": name, "keep_alive": 0, "stream": False})
            print(f"stopped '{name}'")


def _loaded(client: ServerClient) -> list[Entry]:
    models = client.get("/api/ps", "models")["models"]
    return [model for model in models if isinstance(model, dict)] if isinstance(models, list) else []


def _canonical(name: str) -> str:
    """Names that differ in case or in the default tag are the same."""
    return name.lower().removesuffix(":latest")


def _row(model: Entry, now: datetime) -> Sequence[str]:
    size, gpu_size = model.get("size") or 0, model.get("size_vram") or 0
    return (
        console.clean(str(model.get("name", ""))),
        console.clean(str(model.get("digest", ""))).removeprefix("sha256:")[:12],
        format_bytes(size),
        format_bytes(model.get("size_reserved") or size),
        _processor(size, gpu_size),
        str(model.get("context_length") or ""),
        until(model.get("expires_at"), now),
    )


def _processor(size: int, gpu_size: int) -> str:
    if not size or gpu_size >= size:
        return "100% GPU" if gpu_size else "100% CPU"
    percent = round(100 * gpu_size / size)
    return "100% CPU" if not percent else f"{100 - percent}%/{percent}% CPU/GPU"


def format_bytes(size: float) -> str:
    """Decimal, as Ollama prints sizes: 512 B, 1.2 KB, 397 MB, 4.7 GB."""
    unit = "B"
    for larger in ("KB", "MB", "GB", "TB"):
        # What would be rounded to 1000 is 1.0 of the next.
        if size < 999.5:
            break
        size, unit = size / 1000, larger
    return f"{size:.1f} {unit}" if unit != "B" and size < 9.95 else f"{size:.0f} {unit}"


def until(expires_at: str | None, now: datetime) -> str:
    """When a model is unloaded, in words; `expires_at` as RFC 3339."""
    try:
        expires = datetime.fromisoformat(expires_at or "")
        seconds = (expires if expires.tzinfo else expires.replace(tzinfo=UTC)).timestamp() - now.timestamp()
    except (ValueError, OverflowError, TypeError):
        return "Forever"
    if seconds > FOREVER_SECONDS or expires.year == 1:
        return "Forever"
    if seconds <= 0:
        return "Stopping..."
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1)):
        count = int(seconds // length)
        if count:
            return f"{count} {unit}{'' if count == 1 else 's'} from now"
    return "Less than a second"
