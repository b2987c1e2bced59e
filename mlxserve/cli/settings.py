"""`mlxserve config`: every setting, its value and where that came from."""

import dataclasses
import json
from typing import Any

from mlxserve import config
from mlxserve.cli import console
from mlxserve.cli.options import Json
from mlxserve.cli.table import print_table
from mlxserve.config import EngineConfig, ServerConfig, Setting

SECRETS = {spec.name for kind in (EngineConfig, ServerConfig) for spec in dataclasses.fields(kind) if not spec.repr}
"""Settings that nothing may print."""


def show_config(as_json: Json = False) -> None:
    """Show every setting, its value and where it came from.

    Example: MLXSERVE_PORT=8080 mlxserve config
    """
    console.make_stdout_lenient()
    for warning in config.unknown_variables():
        console.warn(warning)
    settings = config.resolve({})
    file = config.config_file()
    if as_json:
        rows = {name: {"value": _value(setting), "origin": setting.origin} for name, setting in settings.items()}
        print(json.dumps({"file": str(file), "settings": rows}, indent=2))
    else:
        print(f"config file: {file}{'' if file.exists() else ' (there is none)'}\n")
        print_table(
            ("SETTING", "VALUE", "FROM"),
            [(name, _text(_value(setting)), _origin(setting)) for name, setting in settings.items()],
        )
    # What is out of range is told last, beside the values it is about.
    config.build(settings)


def _value(setting: Setting) -> Any:
    """As JSON has it, and never a secret."""
    if setting.name in SECRETS and setting.value is not None:
        return "********"
    if setting.value is None or isinstance(setting.value, bool | int | float | str):
        return setting.value
    return list(setting.value) if isinstance(setting.value, tuple) else str(setting.value)


def _text(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return str(value).lower()
        case list():
            return ", ".join(value) or "-"
        case _:
            return str(value)


def _origin(setting: Setting) -> str:
    return (
        f"environment ({config.ENV_PREFIX}{setting.name.upper()})"
        if setting.origin == "environment"
        else setting.origin
    )
