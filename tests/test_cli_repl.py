"""The conversation, read from a script."""

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_cli import FINISHED, FakeBackend

from mlxserve.cli.answer_view import Style
from mlxserve.cli.commands import Commands
from mlxserve.cli.load_display import LoadDisplay
from mlxserve.cli.parameters import ChatParameters
from mlxserve.cli.prompt_reader import LineAbandoned
from mlxserve.cli.repl import Repl
from mlxserve.cli.repl_help import HELP, SET_HELP, SHOW_HELP
from mlxserve.cli.session import Session
from mlxserve.cli.statistics import statistics_lines
from mlxserve.errors import ConfigError, ModelNotFound


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


# --- models, files, style


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    talk("/list")
    assert capsys.readouterr().out == "  fake\n  other\n\n"


def test_load_goes_on_with_another_model(capsys: pytest.CaptureFixture[str]) -> None:
    conversation = talk("one", "/load other", "two", verbose=True)
    assert conversation.backend.closed
    (messages, parameters), *more = conversation.opened["other"].requests
    assert [message["content"] for message in messages] == ["be brief", "two"], "the conversation begins anew"
    assert (parameters, more) == (ChatParameters(seed=1), [])
    assert conversation.session.model == "other"
    out, err = capsys.readouterr()
    assert "Loaded other. The conversation begins anew.\n" in out
    assert err.count("load duration: ") == 2


def test_load_of_an_unknown_model_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    conversation = talk("one", "/load unknown", "two")
    assert len(conversation.backend.requests) == 2
    assert not conversation.backend.closed
    assert conversation.session.model == "m"
    assert capsys.readouterr().err == "Error: no model is called 'unknown'\n"


def test_load_of_a_broken_model_returns_to_the_old_one(capsys: pytest.CaptureFixture[str]) -> None:
    conversation = talk("one", "/load broken", "two")
    assert list(conversation.opened) == ["broken", "m"]
    messages, _ = conversation.opened["m"].requests[0]
    assert [message["content"] for message in messages] == ["be brief", "one", "You said: one", "two"]
    out, err = capsys.readouterr()
    assert "Going on with m.\n" in out
    assert err == "Error: the fake model is broken\n"


def test_save(capsys: pytest.CaptureFixture[str]) -> None:
    conversation = talk('/set parameter stop "a b"', "/set format json", "/save mine", "/save taken")
    assert conversation.saved == [("mine", "m", "be brief", {"stop": ["a b"]})]
    out, err = capsys.readouterr()
    assert "Saved model, system message and parameters as mine; the conversation is not part of it.\n" in out
    assert "Not part of it either, since they go with each request: seed.\n" in out
    assert err == "Error: there is one of that name\n"


@pytest.mark.parametrize(
    ("line", "usage"), [("/load", "/load MODEL"), ("/save", "/save NAME"), ("/file ", "/file PATH")]
)
def test_commands_that_need_a_word(capsys: pytest.CaptureFixture[str], line: str, usage: str) -> None:
    talk(line)
    assert capsys.readouterr().out == f"Usage: {usage}\n\n"


def test_files_go_before_the_next_message_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("a note")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0")
    backend = talk(f"/file {tmp_path}/notes.txt", f"/file {tmp_path}/picture.png", "fail", "sum up", "more").backend
    asked = [messages[-1]["content"] for messages, _ in backend.requests]
    assert asked == ["notes.txt:\n```\na note\n```\n\nfail", "notes.txt:\n```\na note\n```\n\nsum up", "more"]
    assert "picture.png is not a text file" in capsys.readouterr().err


def test_think(capsys: pytest.CaptureFixture[str]) -> None:
    backend = talk("/set think", "1", "/set think high", "2", "/set nothink", "3", "/set think hard", "4").backend
    assert [parameters.think for _, parameters in backend.requests] == [True, "high", False, False]
    out, err = capsys.readouterr()
    assert "Thinking is on.\n" in out
    assert "Thinking is on, effort high.\n" in out
    assert "Thinking is off.\n" in out
    assert err == "Error: think is true, false, low, medium, high, not 'hard'\n"


@pytest.mark.parametrize(
    ("lines", "layout"),
    [
        (["/set markdown"], "markdown"),
        (["/set nomarkdown"], "wrapped"),
        (["/set nowordwrap"], "plain"),
        (["/set nowordwrap", "/set wordwrap"], "wrapped"),
        (["/set markdown", "/set wordwrap"], "markdown"),
    ],
)
def test_layouts(lines: list[str], layout: str) -> None:
    assert talk(*lines).session.style.layout == layout


def test_the_context_meter() -> None:
    conversation = talk("one", "/clear", "two", "/load other")
    assert conversation.reader.notes == ["", "51 of 77 tokens", "", "51 of 77 tokens", ""]


def test_show_license_and_modelfile(capsys: pytest.CaptureFixture[str]) -> None:
    talk("/set parameter num_predict 9", '/set parameter stop "a b" c', "/show license", "/show modelfile")
    out = capsys.readouterr().out
    assert "The license is not known here.\n" in out
    assert out.endswith(
        'FROM m\nTEMPLATE """{{ messages }}"""\nSYSTEM """be brief"""\nPARAMETER temperature 0.7\n'
        'PARAMETER stop "a b"\nPARAMETER stop "c"\n\n'
    )
