"""The conversation of `mlxserve run` in a terminal."""

import asyncio
import dataclasses
import json
import shlex
from typing import Protocol

from mlxserve.cli.answer import Answer, on_interrupt, show_answer
from mlxserve.cli.chat_backend import ChatBackend, Message
from mlxserve.cli.console import notice
from mlxserve.cli.parameters import ChatParameters
from mlxserve.cli.prompt_reader import LineAbandoned
from mlxserve.cli.statistics import statistics_lines
from mlxserve.errors import MlxserveError

HELP = '''\
Available commands:
  /set            Set parameters, the system message and session values
  /show           Show information about the model
  /clear          Forget the conversation
  /bye            Leave
  /?, /help       This help

Use """ to begin and to end a message of several lines.
Ctrl-C stops an answer. Ctrl-D leaves.'''

SET_HELP = """\
Available commands:
  /set parameter <name> <value>   temperature, top_p, top_k, min_p, typical_p, seed, stop, max_tokens, min_tokens,
                                  repetition_penalty, repeat_last_n, presence_penalty, frequency_penalty
  /set system <text>              Set the system message
  /set format json | <file>       Answer in JSON, or by the file's JSON schema
  /set noformat                   Answer in any form
  /set verbose | quiet            Print statistics after each answer, or not
  /set history | nohistory        Write lines to the history file, or not"""

SHOW_HELP = """\
Available commands:
  /show info          What is known of the model
  /show parameters    Sampling parameters
  /show system        The system message
  /show template      The chat template"""


class LineReader(Protocol):
    async def read(self, prompt: str) -> str:
        """One line.

        Raises:
            EOFError: no more lines.
            KeyboardInterrupt: Ctrl-C in an empty line.
            LineAbandoned: Ctrl-C in a line with text.
        """

    def keep_history(self, wanted: bool) -> None: ...


class Repl:
    """Reads messages and commands until the user leaves."""

    def __init__(
        self,
        backend: ChatBackend,
        reader: LineReader,
        *,
        parameters: ChatParameters,
        system: str | None = None,
        verbose: bool = False,
        load_seconds: float = 0.0,
    ) -> None:
        self._backend = backend
        self._reader = reader
        self._parameters = parameters
        self._system = system
        self._verbose = verbose
        self._load_seconds = load_seconds
        """Time the model took to load, until an answer's statistics have told it."""
        self._messages: list[Message] = []

    async def run(self) -> None:
        while True:
            try:
                entry = await self._read_entry()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print("Use Ctrl-D or /bye to leave.")
                continue
            except LineAbandoned:
                continue
            if entry in ("/bye", "/exit"):
                return
            if entry.startswith("/"):
                self._command(entry)
            elif entry:
                await self._answer(_unquote(entry))

    async def _read_entry(self) -> str:
        """One message or command; lines are joined until the triple quotes it starts with are closed."""
        entry = (await self._reader.read(">>> ")).strip()
        start = entry.removeprefix("/set system").lstrip()
        while start.startswith('"""') and entry.count('"""') % 2:
            try:
                entry += "\n" + await self._reader.read("... ")
            except KeyboardInterrupt:
                raise LineAbandoned from None
        return entry

    async def _answer(self, text: str) -> None:
        system: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        question: Message = {"role": "user", "content": text}
        answer = Answer()
        showing = asyncio.create_task(
            show_answer(self._backend, [*system, *self._messages, question], self._parameters, answer)
        )
        with on_interrupt(showing.cancel):
            await asyncio.wait([showing])
        error = None if showing.cancelled() else showing.exception()
        if answer.text and not answer.finished:
            print()
        if isinstance(error, MlxserveError):
            notice(f"Error: {error}")
        elif error is not None:
            raise error
        # A question without any answer is forgotten: templates want the roles to take turns.
        if answer.text or answer.finished:
            self._messages += [question, {"role": "assistant", "content": answer.text}]
        if answer.finished and self._verbose:
            notice("\n" + "\n".join(statistics_lines(answer.finished, self._load_seconds)))
            self._load_seconds = 0.0
        print()

    def _command(self, entry: str) -> None:
        name, _, rest = entry.partition(" ")
        if name in ("/?", "/help"):
            print(HELP)
        elif name == "/clear":
            self._messages.clear()
            print("Cleared the conversation.")
        elif name == "/set":
            self._set(rest.strip())
        elif name == "/show":
            self._show(rest.strip())
        else:
            self._unknown(name)

    def _set(self, rest: str) -> None:
        what, _, value = rest.partition(" ")
        value = value.strip()
        if what == "parameter":
            self._set_parameter(value)
        elif what == "system" and value:
            self._system = _unquote(value)
            print("Set the system message.")
        elif what == "format" and value:
            self._set_format(value)
        elif rest == "noformat":
            self._parameters = dataclasses.replace(self._parameters, schema=None)
            print("Answers have any form.")
        elif rest in ("verbose", "quiet"):
            self._verbose = rest == "verbose"
            print(f"Statistics are {'on' if self._verbose else 'off'}.")
        elif rest in ("history", "nohistory"):
            self._reader.keep_history(rest == "history")
            print(f"History is {'on' if rest == 'history' else 'off'}.")
        elif rest in ("", "system", "format"):
            print(SET_HELP)
        else:
            self._unknown(f"/set {what}")

    def _set_parameter(self, text: str) -> None:
        try:
            name, *values = shlex.split(text)
        except ValueError:
            print("Usage: /set parameter <name> <value>")
            return
        try:
            self._parameters = self._parameters.with_value(name, values)
        except MlxserveError as error:
            notice(f"Error: {error}")
        else:
            print(f"Set parameter {name} to {', '.join(values)}.")

    def _set_format(self, text: str) -> None:
        try:
            self._parameters = self._parameters.with_format(text)
        except MlxserveError as error:
            notice(f"Error: {error}")
        else:
            print("Answers are JSON." if text == "json" else f"Answers are JSON by the schema in {text}.")

    def _show(self, what: str) -> None:
        facts = self._backend.facts()
        if what == "info":
            for label, value in facts.rows.items():
                print(f"  {label:<16} {value}")
        elif what == "parameters":
            given = self._parameters.given()
            for name, value in (facts.default_sampling | given).items():
                print(f"  {name:<16} {json.dumps(value)}{'' if name in given else '  (default of the model)'}")
        elif what == "system":
            print(self._system or "No system message is set.")
        elif what == "template":
            print(facts.template or "The chat template is not known here.")
        elif what == "":
            print(SHOW_HELP)
        else:
            self._unknown(f"/show {what}")

    def _unknown(self, command: str) -> None:
        print(f"Unknown command '{command}'. Type /? for help")


def _unquote(entry: str) -> str:
    """The text between triple quotes, or all of it."""
    if entry.startswith('"""') and entry.endswith('"""') and len(entry) >= 6:
        return entry[3:-3].strip("\n")
    return entry
