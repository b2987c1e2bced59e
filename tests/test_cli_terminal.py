"""The conversation in a terminal: keys, paste, Ctrl-C, history, completion."""

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_terminal import Terminal
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from mlxserve.cli.prompt_reader import WORDS, CommandCompleter, PromptReader
from mlxserve.cli.repl_help import HELP, SET_HELP, SHOW_HELP


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


def test_thoughts_and_markdown(terminal: Terminal) -> None:
    terminal.expect(">>>")
    terminal.type("ponder\r")
    terminal.expect("Thinking...\r\nHm, let me see.\r\n...done thinking.\r\n\r\n")
    terminal.expect("42\r\n")
    terminal.expect(">>>")
    terminal.expect("51 of 77 token")
    terminal.type("markdown\r")
    terminal.expect("Some text\r\nand more.")
    terminal.expect(" • one\r\n • two\r\n")
    terminal.expect(">>>")
    terminal.type("/set nomarkdown\r")
    terminal.expect("lines broken at words.")
    terminal.expect(">>>")
    terminal.type("markdown\r")
    terminal.expect("# Title\r\n\r\nSome *text*\r\n")
    terminal.expect(">>>")
    terminal.type("/bye\r")
    assert terminal.wait() == 0


def test_tab_completes_commands(terminal: Terminal) -> None:
    terminal.expect(">>>")
    # Only now: completion runs beside the typing, and what it would have said of an older line is dropped.
    terminal.type("/sho\t")
    terminal.expect("w")
    terminal.type(" inf\t")
    terminal.expect("o")
    terminal.type("\r")
    terminal.expect("model            fake\r\n")
    terminal.expect(">>>")
    terminal.type("/bye\r")
    assert terminal.wait() == 0


def test_editing_keys(terminal: Terminal) -> None:
    terminal.expect(">>>")
    # To the beginning, delete, to the end, back over a word, over a character.
    terminal.type("xabc def ghij\x01\x1b[3~\x05\x17Z!\x7f\r")
    terminal.expect("You said: abc def Z\r\n")
    terminal.expect(">>>")
    terminal.type("/bye\r")
    assert terminal.wait() == 0


def test_one_answer_in_a_terminal(tmp_path: Path) -> None:
    terminal = Terminal("run", "m", "ponder", "--hidethinking", "--no-markdown", cache=tmp_path)
    try:
        assert "Thinking" not in terminal.expect("42\r\n")
        assert terminal.wait() == 0
    finally:
        terminal.close()


def test_words_of_commands() -> None:
    def completions(line: str) -> list[str]:
        event = CompleteEvent(completion_requested=True)
        return [found.text for found in CommandCompleter().get_completions(Document(line), event)]

    assert completions("/set no") == ["noformat", "nothink", "nomarkdown", "nowordwrap", "nohistory"]
    assert completions("/set parameter top") == ["top_p", "top_k"]
    assert completions("/l") == ["/load", "/list"]
    assert completions("hello /l") == []
    assert completions(f"/file {Path(__file__).parent}/helpers_term") == ["inal.py"]


@pytest.mark.parametrize("words", [*WORDS.values()], ids=" ".join)
def test_completed_words_are_known_commands(words: tuple[str, ...]) -> None:
    known = HELP + SET_HELP + SHOW_HELP + "/exit"
    assert all(word in known for word in words)


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
