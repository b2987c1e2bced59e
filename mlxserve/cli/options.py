"""Options that more than one command takes."""

import re
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from mlxserve import config
from mlxserve.config import Duration, EngineConfig, ServerConfig, Setting, parse_size
from mlxserve.errors import ConfigError

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


def parse_duration_option(text: str) -> Duration:
    try:
        return Duration(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no duration; write for example 300, 5m, 1h30m or -1") from error


def load_config(**flags: Any) -> tuple[EngineConfig, ServerConfig]:
    """config.load_config, with a flag that is at fault told as wrong usage.

    Raises:
        typer.BadParameter: a flag's value is out of range; names the flag.
        ConfigError: the environment's or the file's is.
    """
    return build(config.resolve(flags))


def build(settings: Mapping[str, Setting]) -> tuple[EngineConfig, ServerConfig]:
    """config.build; raises as load_config()."""
    try:
        return config.build(settings)
    except ConfigError as error:
        flags = [name for name, setting in settings.items() if setting.origin == "flag"]
        if not flags or not _are_valid_without_flags():
            raise
        text = re.sub(rf"\b({'|'.join(flags)})\b", lambda match: _flag(match[0]), str(error))
        raise typer.BadParameter(text) from error


def _are_valid_without_flags() -> bool:
    try:
        config.load_config()
    except ConfigError:
        return False
    return True


def _flag(setting: str) -> str:
    return "--no-prefix-caching" if setting == "enable_prefix_caching" else f"--{setting.replace('_', '-')}"
