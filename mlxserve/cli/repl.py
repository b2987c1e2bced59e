"""The conversation of `mlxserve run` in a terminal."""

import asyncio
from typing import Protocol

from mlxserve.cli.answer import Answer, on_interrupt, show_answer
from mlxserve.cli.commands import Commands, unquote
from mlxserve.cli.console import notice
from mlxserve.cli.prompt_reader import LineAbandoned
from mlxserve.cli.refusals import in_commands
from mlxserve.cli.session import Session
from mlxserve.cli.statistics import statistics_lines
from mlxserve.errors import MlxserveError


class LineReader(Protocol):
    async def read(self, prompt: str, note: str = "") -> str:
        """One line; `note` stands at the right of the line while it is written.

        Raises:
            EOFError: no more lines.
            KeyboardInterrupt: Ctrl-C in an empty line.
            LineAbandoned: Ctrl-C in a line with text.
        """

    def keep_history(self, wanted: bool) -> None: ...


class Repl:
    """Reads messages and commands until the user leaves."""

    def __init__(self, session: Session, reader: LineReader, commands: Commands) -> None:
        self._session = session
        self._reader = reader
        self._commands = commands

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
                await self._commands.run(entry)
            elif entry:
                await self._answer(unquote(entry))

    async def _read_entry(self) -> str:
        """One message or command; lines are joined until the triple quotes it starts with are closed."""
        entry = (await self._reader.read(">>> ", self._session.meter())).strip()
        start = entry.removeprefix("/set system").lstrip()
        while start.startswith('"""') and entry.count('"""') % 2:
            try:
                entry += "\n" + await self._reader.read("... ")
            except KeyboardInterrupt:
                raise LineAbandoned from None
        return entry

    async def _answer(self, text: str) -> None:
        session = self._session
        question = session.question(text)
        answer = Answer()
        showing = asyncio.create_task(
            show_answer(session.backend, session.prompt(question), session.parameters, session.style, answer)
        )
        with on_interrupt(showing.cancel):
            await asyncio.wait([showing])
        error = None if showing.cancelled() else showing.exception()
        if isinstance(error, MlxserveError):
            notice(f"Error: {in_commands(error)}")
        elif error is not None:
            raise error
        # A question without any answer is forgotten: templates want the roles to take turns.
        if answer.text or answer.finished:
            session.remember(question, answer.text, answer.finished.usage if answer.finished else None)
        if answer.finished and session.verbose:
            notice("\n" + "\n".join(statistics_lines(answer.finished, session.load_seconds)))
            session.load_seconds = 0.0
        print()
