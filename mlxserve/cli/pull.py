"""`mlxserve pull`: fetch a model, or bring it up to date."""

from typing import Annotated

import typer

from mlxserve.cli import console, logs
from mlxserve.cli.load_display import LoadDisplay
from mlxserve.cli.models import open_library
from mlxserve.errors import ModelError


def pull(
    models: Annotated[list[str], typer.Argument(metavar="MODEL", help="Alias, org/name[:Q8_0][@revision].")],
) -> None:
    """Download models, or bring them up to date; files are verified.

    An interrupted download goes on where it stopped.

    Example: mlxserve pull qwen3-4b
    """
    logs.configure("warning")
    library = open_library()
    failed = False
    for name in models:
        display = LoadDisplay()
        try:
            with display.loading(name, "looking for"):
                library.pull(name, display.progress)
        except KeyboardInterrupt:
            console.notice(f"Stopped; `mlxserve pull {name}` goes on from here.")
            console.leave(130)
        except ModelError as error:
            console.notice(f"Error: {error}")
            failed = True
            continue
        console.notice("success")
    if failed:
        raise typer.Exit(1)
