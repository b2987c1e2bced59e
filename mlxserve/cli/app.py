"""The command line: its commands, and how failures are shown."""

import logging
import os
import sys
import traceback
from typing import Annotated

import typer

from mlxserve import __version__
from mlxserve.cli.bench import bench
from mlxserve.cli.run import RunCommand, run
from mlxserve.cli.serve import serve
from mlxserve.cli.top import top
from mlxserve.errors import MlxserveError

app = typer.Typer(
    name="mlxserve",
    help="Serve language models from one process.\n\nExample: mlxserve run qwen3-4b 'Why is the sky blue?'",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command(cls=RunCommand)(run)
app.command()(serve)
app.command()(top)
app.add_typer(bench, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mlxserve {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command of sys.argv and exit: 0, 1 after `Error: ...` on stderr, 2 for wrong usage, 130 for Ctrl-C."""
    try:
        app()
    except MlxserveError as error:
        _fail(str(error))
    except OSError as error:
        _fail(str(error))
    except Exception as error:
        _fail(f"{type(error).__name__}: {error}. This is a fault of mlxserve; MLXSERVE_DEBUG=1 shows where.")


def _fail(message: str) -> None:
    if os.environ.get("MLXSERVE_DEBUG", "0") != "0" or logging.getLogger("mlxserve").isEnabledFor(logging.DEBUG):
        traceback.print_exc()
    print(f"Error: {message}", file=sys.stderr)
    sys.exit(1)
