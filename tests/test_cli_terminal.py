"""The conversation in a terminal: keys, paste, Ctrl-C, history, completion."""

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_terminal import Terminal

from mlxserve.cli.prompt_reader import PromptReader


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal("run", "m", cache=tmp_path)
    yield terminal
    terminal.close()


def test_conversation_in_a_terminal(terminal: Terminal, tmp_path: Path) -> None:
    terminal.expect(">>>")
    terminal.type("\x03")
    terminal.expect("Use Ctrl-D or /bye to leave.")
    terminal.expect(">>>")
    terminal.type("half a line\x03")
    terminal.expect(">>> half a line")
    terminal.expect(">>>")
    terminal.type('"""two\rlines"""\r')
    terminal.expect("...")
    terminal.expect("You said: two\r\nlines\r\n")
    terminal.expect(">>>")
    terminal.type("\x1b[200~pasted\ntext\x1b[201~\r")
    terminal.expect("You said: pasted\r\ntext\r\n")
    terminal.expect(">>>")
    # Ctrl-C stops the answer, the program goes on, and what was shown of it stays in the conversation.
    terminal.type("endless\r")
    terminal.expect("one")
    terminal.type("\x03")
    terminal.expect(">>>")
    terminal.type("recount\r")
    terminal.expect("| user: endless | assistant: one  | user: recount")
    terminal.expect(">>>")
    terminal.type("\x04")
    assert terminal.wait() == 0
    history = tmp_path / "history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert "+endless" in history.read_text()
    assert "half a line" not in history.read_text()


def test_history_comes_back_in_the_next_session(tmp_path: Path) -> None:
    for keys, answer in (("remember me\r", "You said: remember me"), ("\x1b[A\r", "You said: remember me")):
        terminal = Terminal("run", "m", cache=tmp_path)
        try:
            terminal.expect(">>>")
            terminal.type(keys)
            terminal.expect(answer)
            terminal.expect(">>>")
            terminal.type("\x04")
            assert terminal.wait() == 0
        finally:
            terminal.close()


def test_history_that_cannot_be_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    PromptReader(tmp_path / "file" / "history")
    assert "History is not kept" in capsys.readouterr().err


def test_history_file_is_made_private(tmp_path: Path) -> None:
    path = tmp_path / "history"
    path.write_text("")
    path.chmod(0o644)
    PromptReader(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
