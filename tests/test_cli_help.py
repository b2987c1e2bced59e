"""The help pages: each fits a screen and is the one in tests/data/help.

`MLXSERVE_TEST_RENEW=1 python -m pytest tests/test_cli_help.py` writes these files anew.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from mlxserve.cli.app import app

FOLDER = Path(__file__).parent / "data" / "help"
RENEW = bool(os.environ.get("MLXSERVE_TEST_RENEW"))

Command = tuple[str, ...]


def walk(command: Any, path: Command = ()) -> Iterator[tuple[Command, Any]]:
    """Every command there is, by the words that name it."""
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        if not child.hidden:
            yield from walk(child, (*path, name))


COMMANDS = dict(walk(typer.main.get_command(app)))


def page(path: Command) -> str:
    root = COMMANDS[()]
    context = root.context_class(root, info_name="mlxserve", terminal_width=80)
    for depth, name in enumerate(path, 1):
        command = COMMANDS[path[:depth]]
        context = command.context_class(command, info_name=name, parent=context)
    return COMMANDS[path].get_help(context) + "\n"


def file_of(path: Command) -> Path:
    return FOLDER / f"{'-'.join(('mlxserve', *path))}.txt"


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_is_the_golden_page(path: Command) -> None:
    if RENEW:
        FOLDER.mkdir(parents=True, exist_ok=True)
        file_of(path).write_text(page(path), encoding="utf-8")
    assert file_of(path).read_text(encoding="utf-8") == page(path), "see the top of this file"


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_fits_a_terminal_and_has_an_example(path: Command) -> None:
    lines = page(path).splitlines()
    assert len(lines) <= 23, "24, less one for the next prompt"
    assert max(map(len, lines)) <= 80
    assert "Example: " in page(path)
    assert not any(line.endswith("...") for line in lines if line.startswith("  ")), "a cut sentence"


def test_there_is_no_page_of_a_command_that_is_gone() -> None:
    expected = {file_of(path) for path in COMMANDS}
    if RENEW:
        for file in set(FOLDER.iterdir()) - expected:
            file.unlink()
    assert set(FOLDER.iterdir()) == expected
