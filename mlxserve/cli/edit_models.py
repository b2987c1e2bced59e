"""`mlxserve rm`, `cp` and `create`: names and files of the models of this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlxserve import config
from mlxserve.cli import console, logs
from mlxserve.cli.addresses import client_url
from mlxserve.cli.models import open_library
from mlxserve.cli.options import Host, Port, load_config
from mlxserve.errors import ConfigError, InvalidParameter, MlxserveError, ModelInUse

if TYPE_CHECKING:
    from mlxserve.engine.library import Library
    from mlxserve.store.model_source import Location

PROBE_SECONDS = 1.0
HIDE_HELP = "Also a name that comes with mlxserve."


def rm(
    models: Annotated[list[str], typer.Argument(metavar="MODEL", help="Your name, or org/name.")],
    force: Annotated[bool, typer.Option("--force", help="Also if a server has it loaded.")] = False,
    host: Host = None,
    port: Port = None,
) -> None:
    """Remove your names of models, and files no other name needs.

    Folders, .gguf files and Python packages stay.

    Example: mlxserve rm mlx-community/Qwen3-4B-4bit
    """
    logs.configure("warning")
    _, server_config = load_config(host=host, port=port)
    from mlxserve.cli.model_view import size

    library = open_library()
    failed = False
    for name in models:
        try:
            if not force:
                _refuse_loaded(library, name, server_config)
            freed = library.remove(name)
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
        raise typer.BadParameter("name the model to begin with: --from MODEL, or -f FILE with a FROM line")
    parameters = _parameters(parameter or [])
    created = open_library().create(
        name,
        origin,
        system=system if system is not None else given.system,
        template=_read(template) if template is not None else given.template,
        parameters={**given.parameters, **parameters},
        license=license or given.license,
        allow_paths=True,
        may_hide=force,
    )
    print(f"created '{created.name}' from {created.source.location}")


def _parameters(pairs: list[str]) -> dict[str, Any]:
    """Raises typer.BadParameter: no such parameter, or a value that it cannot have."""
    from mlxserve.store.model_parameters import parse_parameters

    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise typer.BadParameter(f"--parameter takes NAME=VALUE, as temperature=0.2, not {pair!r}")
        if name.strip() == "stop":
            found.setdefault("stop", []).append(value)
        else:
            found[name.strip()] = value.strip()
    try:
        parse_parameters(found)
    except InvalidParameter as error:
        raise typer.BadParameter(f"--parameter {error}") from error
    return found


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def _refuse_loaded(library: "Library", name: str, server_config: config.ServerConfig) -> None:
    """Ask the server, if one runs, what it has loaded.

    Raises:
        ModelInUse: a model of which this is the last name, or whose files would be removed with it.
    """
    import httpx

    from mlxserve.engine.library import share_files

    unshared = library.unshared(name)
    if not unshared:
        return
    key = server_config.api_key
    address = client_url(server_config.host, server_config.port)
    try:
        reply = httpx.get(
            f"{address}/api/ps",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=PROBE_SECONDS,
            trust_env=False,
        )
        loaded = {entry["name"] for entry in reply.json()["models"]} if reply.status_code == 200 else set()
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return
    in_use = sorted(
        each
        for each in loaded
        if any(share_files(mine, other) for mine in unshared for other in _locations(library, each))
    )
    if in_use:
        names = " ".join(each.removesuffix(":latest") for each in in_use)
        raise ModelInUse(
            f"{name} is in use: the server at {address} has {names} loaded; stop that first "
            f"(mlxserve stop {names}), or use --force",
            model=name,
        )


def _locations(library: "Library", loaded: str) -> "set[Location]":
    """Of a loaded model; none of one whose name only the server knows."""
    try:
        return library.registry.locations(loaded)
    except MlxserveError:
        return set()
