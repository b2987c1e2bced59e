"""`mlxserve rm`, `cp` and `create`: names and files of the models of this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlxserve import config
from mlxserve.cli import console, logs
from mlxserve.cli.addresses import client_url
from mlxserve.cli.models import open_library
from mlxserve.cli.options import Host, Port
from mlxserve.errors import ConfigError, MlxserveError

if TYPE_CHECKING:
    from mlxserve.engine.library import Library
    from mlxserve.store.model_source import Location

PROBE_SECONDS = 1.0
HIDE_HELP = "Also a name that comes with mlxserve."


def rm(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...")],
    force: Annotated[bool, typer.Option("--force", help="Also if a server has it loaded.")] = False,
    host: Host = None,
    port: Port = None,
) -> None:
    """Remove your names of models, and files no other name needs.

    Folders, .gguf files and Python packages stay.

    Example: mlxserve rm mlx-community/Qwen3-4B-4bit
    """
    logs.configure("warning")
    _, server_config = config.load_config(host=host, port=port)
    from mlxserve.cli.model_view import size

    library = open_library()
    loaded = set() if force else _loaded_locations(library, server_config)
    failed = False
    for name in models:
        try:
            freed = library.remove(name, loaded)
        except MlxserveError as error:
            console.notice(f"Error: {error}")
            failed = True
            continue
        print(f"deleted '{name}'" + (f", {size(freed)} freed" if freed else ""))
    if failed:
        raise typer.Exit(1)


def cp(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Name, folder or .gguf file.")],
    destination: Annotated[str, typer.Argument(metavar="NAME", help="The new name.")],
    force: Annotated[bool, typer.Option("--force", help=HIDE_HELP)] = False,
) -> None:
    """Give a model another name. Example: mlxserve cp qwen3-4b mine"""
    copied = open_library().copy(source, destination, allow_paths=True, may_hide=force)
    print(f"copied '{source}' to '{copied.name}'")


def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The new name.")],
    base: Annotated[str | None, typer.Option("--from", metavar="MODEL", help="Name, folder or .gguf file.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", metavar="FILE", help="Modelfile to read.")] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    template: Annotated[str | None, typer.Option(metavar="FILE", help="Chat template, in Jinja.")] = None,
    parameter: Annotated[list[str] | None, typer.Option(metavar="K=V", help="A default; may be repeated.")] = None,
    license: Annotated[str | None, typer.Option(metavar="TEXT", help="Licence.")] = None,
    force: Annotated[bool, typer.Option("--force", help=HIDE_HELP)] = False,
) -> None:
    """Name a model with its own system message, template or defaults.

    Example: mlxserve create pirate --from qwen3-4b --system 'Arr.'
    """
    from mlxserve.store.modelfile import Modelfile, read_modelfile

    given = read_modelfile(file) if file is not None else Modelfile()
    origin = base or given.base
    if origin is None:
        raise ConfigError("name the model to begin with: --from MODEL, or -f FILE with a FROM line")
    created = open_library().create(
        name,
        origin,
        system=system if system is not None else given.system,
        template=_read(template) if template is not None else given.template,
        parameters={**given.parameters, **_parameters(parameter or [])},
        license=license or given.license,
        allow_paths=True,
        may_hide=force,
    )
    print(f"created '{created.name}' from {created.source.location}")


def _parameters(pairs: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--parameter takes NAME=VALUE, as temperature=0.2, not {pair!r}")
        if name.strip() == "stop":
            found.setdefault("stop", []).append(value)
        else:
            found[name.strip()] = value.strip()
    return found


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def _loaded_locations(library: "Library", server_config: config.ServerConfig) -> "set[Location]":
    """What the server, if one runs, has in memory."""
    import httpx

    key = server_config.api_key
    address = client_url(server_config.host, server_config.port)
    try:
        reply = httpx.get(
            f"{address}/api/ps",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=PROBE_SECONDS,
            trust_env=False,
        )
        names = {entry["name"] for entry in reply.json()["models"]} if reply.status_code == 200 else set()
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return set()
    found: set[Location] = set()
    for name in names:
        try:
            found |= library.registry.locations(name)
        except MlxserveError:
            continue
    return found
