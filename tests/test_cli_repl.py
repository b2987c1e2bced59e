"""The conversation: its logic with a scripted reader, and the terminal itself through a pseudo-terminal."""

import asyncio
import os
import pty
import re
import select
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_cli import FINISHED, FakeBackend

from mlxserve.cli.answer_view import Style
from mlxserve.cli.commands import Commands
from mlxserve.cli.load_display import LoadDisplay
from mlxserve.cli.parameters import ChatParameters
from mlxserve.cli.prompt_reader import LineAbandoned, PromptReader
from mlxserve.cli.repl import Repl
from mlxserve.cli.repl_help import HELP, SET_HELP, SHOW_HELP
from mlxserve.cli.session import Session
from mlxserve.cli.statistics import statistics_lines
from mlxserve.errors import ConfigError, ModelNotFound

REPOSITORY = Path(__file__).parent.parent


class ScriptedReader:
    """Reads lines from a list; an exception in it is raised, the end of it is Ctrl-D."""

    def __init__(self, lines: list[str | BaseException]) -> None:
        self._lines = iter(lines)
        self.prompts: list[str] = []
        self.notes: list[str] = []
        self.keeps_history = True

    async def read(self, prompt: str, note: str = "") -> str:
        self.prompts.append(prompt)
        self.notes.append(note)
        line = next(self._lines, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    def keep_history(self, wanted: bool) -> None:
        self.keeps_history = wanted


@dataclass
class Conversation:
    """What came of one: the first backend and those that were opened later, the reader, what was saved."""

    backend: FakeBackend
    reader: ScriptedReader
    session: Session
    opened: dict[str, FakeBackend]
    saved: list[tuple[str, str, str | None, dict[str, Any]]]


def talk(*lines: str | BaseException, verbose: bool = False, style: Style | None = None) -> Conversation:
    backend, reader = FakeBackend(), ScriptedReader(list(lines))
    facts = asyncio.run(backend.facts())
    session = Session(
        "m",
        backend,
        facts,
        parameters=ChatParameters(seed=1),
        system="be brief",
        style=style or Style(),
        verbose=verbose,
        load_seconds=2.5,
    )
    conversation = Conversation(backend, reader, session, {}, [])

    async def open_model(name: str) -> FakeBackend:
        if name == "unknown":
            raise ModelNotFound("no model is called 'unknown'", model=name)
        opened = conversation.opened[name] = FakeBackend()
        opened.is_broken = name == "broken"
        return opened

    def save(name: str, base: str, *, system: str | None, parameters: dict[str, Any]) -> None:
        if name == "taken":
            raise ConfigError("there is one of that name")
        conversation.saved.append((name, base, system, parameters))

    commands = Commands(session, reader, open_model=open_model, save=save, display=LoadDisplay())
    asyncio.run(Repl(session, reader, commands).run())
    return conversation


def converse(*lines: str | BaseException, verbose: bool = False) -> tuple[FakeBackend, ScriptedReader]:
    conversation = talk(*lines, verbose=verbose)
    return conversation.backend, conversation.reader


def test_messages_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    backend, _ = converse("first", "second")
    assert [messages for messages, _ in backend.requests] == [
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "first"}],
        [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "first"},
            {"role": "assistant", "content": "You said: first"},
            {"role": "user", "content": "second"},
        ],
    ]
    assert capsys.readouterr().out == "You said: first\n\nYou said: second\n\n\n"


@pytest.mark.parametrize(
    ("lines", "message", "prompts"),
    [
        (['"""one', "two", 'three"""'], "one\ntwo\nthree", [">>> ", "... ", "... "]),
        (['"""', "  one", "", "two", '"""'], "  one\n\ntwo", [">>> ", "... ", "... ", "... ", "... "]),
        (['"""one"""'], "one", [">>> "]),
        (['what does """ mean?'], 'what does """ mean?', [">>> "]),
        (["pasted\nin one"], "pasted\nin one", [">>> "]),
        ([" spaced "], "spaced", [">>> "]),
    ],
)
def test_messages_of_several_lines(lines: list[str], message: str, prompts: list[str]) -> None:
    backend, reader = converse(*lines)
    assert [request[0][-1]["content"] for request in backend.requests] == [message]
    assert reader.prompts == [*prompts, ">>> "]


def test_empty_lines_ask_nothing() -> None:
    backend, _ = converse("", "   ")
    assert backend.requests == []


def test_interrupts_at_the_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    backend, reader = converse(
        KeyboardInterrupt(), LineAbandoned(), '"""half', KeyboardInterrupt(), '"""half', LineAbandoned(), "whole"
    )
    assert [request[0][-1]["content"] for request in backend.requests] == ["whole"]
    assert capsys.readouterr().out.count("Use Ctrl-D or /bye to leave.") == 1
    assert reader.prompts.count("... ") == 2


@pytest.mark.parametrize("word", ["/bye", "/exit"])
def test_leaving(word: str) -> None:
    backend, _ = converse(word, "not read any more")
    assert backend.requests == []


def test_set_system(capsys: pytest.CaptureFixture[str]) -> None:
    backend, _ = converse("/set system be long", "one", '/set system """be', 'two lines"""', "two", "/show system")
    assert [request[0][0]["content"] for request in backend.requests] == ["be long", "be\ntwo lines"]
    assert capsys.readouterr().out.endswith("be\ntwo lines\n\n")


def test_set_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    backend, _ = converse(
        "/set parameter temperature 0.2",
        '/set parameter stop "a b" c',
        "/set parameter temperature hot",
        "/set parameter warmth 1",
        "/set parameter",
        '/set parameter stop "a',
        "hello",
        "/show parameters",
    )
    assert backend.requests[0][1] == ChatParameters(seed=1, temperature=0.2, stop=("a b", "c"))
    out, err = capsys.readouterr()
    assert "Set parameter temperature to 0.2." in out
    assert "Set parameter stop to a b, c." in out
    assert out.count("Usage: /set parameter <name> <value>") == 2
    assert err.count("Error: ") == 2
    assert out.endswith('  temperature      0.2\n  seed             1\n  stop             ["a b", "c"]\n\n')


def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    converse("/show info", "/show template", "/show parameters", "/show")
    out = capsys.readouterr().out
    assert "  model            fake\n  context length   77\n{{ messages }}\n" in out
    assert "  temperature      0.7  (default of the model)\n  seed             1\n" in out
    assert out.endswith(f"{SHOW_HELP}\n\n")


def test_verbose_and_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    converse("one", "/set verbose", "two", "three", "/set quiet", "four")
    with_load = "\n" + "\n".join(statistics_lines(FINISHED, 2.5)) + "\n"
    assert capsys.readouterr().err == with_load + "\n" + "\n".join(statistics_lines(FINISHED)) + "\n"


def test_clear_keeps_the_system_message() -> None:
    backend, _ = converse("one", "/clear", "two")
    assert [message["role"] for message in backend.requests[1][0]] == ["system", "user"]


def test_history_can_be_switched() -> None:
    assert converse("/set nohistory")[1].keeps_history is False
    assert converse("/set nohistory", "/set history")[1].keeps_history is True


@pytest.mark.parametrize("line", ["/x", "/set x", "/set verbose loud", "/show x", "/byebye now"])
def test_unknown_commands(capsys: pytest.CaptureFixture[str], line: str) -> None:
    backend, _ = converse(line)
    command = " ".join(line.split()[:2]) if line.startswith(("/set", "/show")) else line.split()[0]
    command = "/set verbose" if "verbose" in line else command
    assert capsys.readouterr().out == f"Unknown command '{command}'. Type /? for help\n\n"
    assert backend.requests == []


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    converse("/?", "/help", "/set", "/set system")
    assert capsys.readouterr().out == f"{HELP}\n{HELP}\n{SET_HELP}\n{SET_HELP}\n\n"


def test_a_failed_question_is_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    backend, _ = converse("fail", "again")
    assert [message["content"] for message in backend.requests[1][0]] == ["be brief", "again"]
    assert capsys.readouterr().err == "Error: the fake failed as it was told to\n"


def test_answers_cannot_steer_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    converse("controls")
    assert capsys.readouterr().out == "[2Jred1m\ttab\n\n\n"


# --- the terminal


class Terminal:
    """A command in a pseudo-terminal: type() into it, expect() text from it."""

    def __init__(self, *args: str, cache: Path) -> None:
        # 80 x 24 as a terminal says it; prompt-toolkit draws nothing in one of size 0.
        self._fd, child = pty.openpty()
        os.system(f"stty rows 24 cols 80 < {os.ttyname(child)}")
        env = {name: value for name, value in os.environ.items() if not name.startswith("MLXSERVE_")}
        env |= {"MLXSERVE_CACHE_DIR": str(cache), "MLXSERVE_CONFIG_DIR": str(cache)}
        env |= {"PYTHONPATH": str(REPOSITORY), "TERM": "xterm", "NO_COLOR": "1"}
        command = [sys.executable, str(REPOSITORY / "tests" / "fake_cli.py"), *args]
        self._process = subprocess.Popen(
            command, stdin=child, stdout=child, stderr=child, env=env, start_new_session=True, preexec_fn=_own_terminal
        )
        os.close(child)
        self._seen = ""

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def expect(self, text: str) -> str:
        """Wait for `text` and return what came before it, without escape sequences."""
        deadline = time.monotonic() + 30
        while text not in self._seen:
            ready, _, _ = select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no {text!r} after {self._seen!r}"
            new = self._read()
            assert new, f"ended without {text!r} after {self._seen!r}"
            self._seen += re.sub(r"\x1b(\[[0-9;?]*[a-zA-Z]|[=>])", "", new.decode())
        before, _, self._seen = self._seen.partition(text)
        return before

    def wait(self) -> int:
        while self._read():
            pass
        return self._process.wait(timeout=30)

    def _read(self) -> bytes:
        try:
            return os.read(self._fd, 65536)
        except OSError:  # how Linux tells the end
            return b""

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._fd)


def _own_terminal() -> None:
    """In the child: make the pseudo-terminal its controlling one, so that Ctrl-C becomes a signal."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


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
