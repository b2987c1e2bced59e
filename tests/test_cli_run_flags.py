"""The flags of `run` beside sampling: files, thinking, keep-alive, layout, and warnings."""

from pathlib import Path
from typing import Any

import pytest
from fake_cli import FakeBackend

from mlxserve.cli import run as run_command


@pytest.fixture
def backend(mlxserve: Any, monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    """The fake model that the next command asks."""
    backend = FakeBackend()

    async def open_backend(model: str, **options: Any) -> FakeBackend:
        backend.options = options
        return backend

    monkeypatch.setattr(run_command, "open_backend", open_backend)
    return backend


def test_files_come_first(mlxserve: Any, tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"text of {name}\n")
    files = ("--file", f"{tmp_path}/a.txt", "--file", f"{tmp_path}/b.txt")
    fenced = "a.txt:\n```\ntext of a.txt\n```\n\nb.txt:\n```\ntext of b.txt\n```"
    assert mlxserve("run", "m", *files, "compare", stdin=b"piped\n").stdout.decode() == (
        f"You said: {fenced}\n\npiped\n\ncompare\n"
    )
    assert mlxserve("run", "m", *files).stdout.decode() == f"You said: {fenced}\n"


def test_a_binary_file_is_refused(mlxserve: Any, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\0")
    done = mlxserve("run", "m", "--file", f"{tmp_path}/x", "look")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"is not a text file" in done.stderr


@pytest.mark.parametrize(
    ("flags", "think"),
    [
        ([], None),
        (["--think"], True),
        (["--think=true"], True),
        (["--think=false"], False),
        (["--think=high"], "high"),
    ],
)
def test_think(mlxserve: Any, backend: FakeBackend, flags: list[str], think: bool | str | None) -> None:
    # The word after a bare --think is the prompt.
    assert mlxserve("run", "m", *flags, "hello").stdout == b"You said: hello\n"
    assert backend.requests[0][1].think == think


def test_wrong_efforts_are_told(mlxserve: Any) -> None:
    done = mlxserve("run", "m", "--think=hard", "hello")
    assert (done.returncode, done.stdout) == (2, b"")
    assert (
        done.stderr.splitlines()[-1] == b"Error: Invalid value: --think is true, false, low, medium, high, not 'hard'"
    )


def test_a_pipe_gets_the_answer_alone(mlxserve: Any) -> None:
    done = mlxserve("run", "m", "ponder")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"42\n", b"")
    assert mlxserve("run", "m", "markdown").stdout.startswith(b"# Title\n\nSome *text*\n")


def test_markdown_in_a_pipe_where_it_is_asked_for(mlxserve: Any) -> None:
    assert mlxserve("run", "m", "markdown", "--markdown").stdout.decode() == (
        "Title\n\nSome text\nand more.\n\n • one\n • two\n"
    )
    assert mlxserve("run", "m", "markdown", "--markdown", "--nowordwrap").returncode == 2


@pytest.mark.parametrize(("text", "seconds"), [("5m", 300.0), ("-1", -1.0), ("0", 0.0), ("1h30m", 5400.0)])
def test_keepalive(mlxserve: Any, backend: FakeBackend, text: str, seconds: float) -> None:
    assert mlxserve("run", "m", "--keepalive", text, "hello").returncode == 0
    assert (backend.options["keep_alive"], backend.kept) == (seconds, None)
    # Without a prompt there is no answer to go with; the load itself says it.
    assert mlxserve("run", "m", "--keepalive", text, "").returncode == 0
    assert backend.kept == seconds


def test_wrong_durations_are_wrong_usage(mlxserve: Any) -> None:
    done = mlxserve("run", "m", "--keepalive", "soon", "hello")
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"is no duration" in done.stderr


def test_unknown_variables_are_told(mlxserve: Any) -> None:
    done = mlxserve("run", "m", "hello", MLXSERVE_PROT="1")
    assert done.stdout == b"You said: hello\n"
    assert done.stderr == (
        b"Warning: MLXSERVE_PROT is set and means nothing to mlxserve; did you mean MLXSERVE_PORT?\n"
    )
