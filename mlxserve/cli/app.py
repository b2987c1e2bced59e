"""The command line: its commands, and how failures are shown."""

import errno
import logging
import os
import sys
import traceback
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from mlxserve import __version__
from mlxserve.cli import console
from mlxserve.cli.bench import bench
from mlxserve.cli.command import Command
from mlxserve.cli.completion import completion, prepare_completion
from mlxserve.cli.doctor import doctor
from mlxserve.cli.edit_models import cp, create, rm
from mlxserve.cli.loaded_models import ps, stop
from mlxserve.cli.models import list_models, search, show
from mlxserve.cli.pull import pull
from mlxserve.cli.run import RunCommand, run
from mlxserve.cli.serve import serve
from mlxserve.cli.service import service
from mlxserve.cli.settings import show_config
from mlxserve.cli.top import top
from mlxserve.errors import MlxserveError


class RootGroup(TyperGroup):
    """Its help is the list of commands, which alone nearly fills a screen; the options stand in the first line."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[--version]", "[--help]", "COMMAND", "[ARGS]..."]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)


app = typer.Typer(
    name="mlxserve",
    cls=RootGroup,
    help="Example: mlxserve run qwen3-4b 'Why is the sky blue?'",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command(cls=RunCommand)(run)
app.command(cls=Command)(serve)
app.command(cls=Command)(pull)
app.command("list", cls=Command)(list_models)
app.command("ls", cls=Command, hidden=True)(list_models)
app.command(cls=Command)(show)
app.command(cls=Command)(search)
app.command(cls=Command)(cp)
app.command(cls=Command)(create)
app.command(cls=Command)(rm)
app.command(cls=Command)(ps)
app.command(cls=Command)(stop)
app.command(cls=Command)(top)
app.add_typer(bench, name="bench")
app.command(cls=Command)(doctor)
app.command("config", cls=Command)(show_config)
app.command(cls=Command)(completion)
app.add_typer(service, name="service")


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
    # "PyTorch was not found" is nothing to be told of: mlxserve uses the tokenizers only.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    prepare_completion()
    try:
        _run()
    except BrokenPipeError:
        console.abandon_stdout()
        sys.exit(0)
    except MlxserveError as error:
        _fail(str(error))
    except OSError as error:
        _fail(_os_error(error))
    except Exception as error:
        _fail(f"{type(error).__name__}: {error}. This is a fault of mlxserve; MLXSERVE_DEBUG=1 shows where.")


def _run() -> NoReturn:
    """Run the command and raise SystemExit; or BrokenPipeError, where nobody reads stdout any more."""
    try:
        app(prog_name="mlxserve")
    except SystemExit as ended:
        # Typer makes exit code 1 of it.
        if isinstance(ended.__context__, BrokenPipeError):
            raise ended.__context__ from None
        if sys.stdout is not None:
            # Now, and not when Python ends: then it could only complain.
            sys.stdout.flush()
        raise
    raise AssertionError("typer exits")


def _os_error(error: OSError) -> str:
    if console.is_stdout_broken():
        return f"standard output cannot be written: {error.strerror}"
    if error.errno == errno.ENOSPC and error.filename is None:
        return f"standard output or a file cannot be written: {error.strerror}"
    return str(error)


def _fail(message: str) -> None:
    if os.environ.get("MLXSERVE_DEBUG", "0") != "0" or logging.getLogger("mlxserve").isEnabledFor(logging.DEBUG):
        traceback.print_exc()
    print(f"Error: {message}", file=sys.stderr)
    sys.exit(1)
