"""Options that more than one command takes."""

from typing import Annotated

import typer

from mlxserve.config import parse_duration, parse_size

Host = Annotated[str | None, typer.Option(metavar="H", help="Address of the server.  [127.0.0.1]")]
Port = Annotated[int | None, typer.Option(metavar="N", help="Port of the server.  [11711]")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

# Hidden: the help would not fit a screen with them; docs/cli.md has them.
Speculation = Annotated[str | None, typer.Option(metavar="KIND", hidden=True)]
Threads = Annotated[int | None, typer.Option(metavar="N", hidden=True)]
DraftModel = Annotated[str | None, typer.Option(metavar="M", hidden=True)]


def parse_size_option(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no size; write for example 512, 1.5M or 20GB") from error


def parse_duration_option(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: {error}") from error
