"""The commands of a conversation: lines that begin with a slash."""

import asyncio
import dataclasses
import json
import shlex
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from mlxserve.cli.attachment import read_attachment
from mlxserve.cli.chat_backend import ChatBackend
from mlxserve.cli.console import clean, notice
from mlxserve.cli.load_display import LoadDisplay
from mlxserve.cli.modelfile import modelfile
from mlxserve.cli.parameters import EFFORTS, PER_REQUEST
from mlxserve.cli.repl_help import HELP, SET_HELP, SHOW_HELP
from mlxserve.cli.session import Session
from mlxserve.errors import MlxserveError


class History(Protocol):
    def keep_history(self, wanted: bool) -> None:
        """Whether lines from now on are written to the history file."""


class Save(Protocol):
    def __call__(self, name: str, base: str, *, system: str | None, parameters: dict[str, Any]) -> object:
        """Keep a model under a name of its own. It may block.

        Raises:
            MlxserveError: it cannot be kept.
        """


class Commands:
    """Does what a line says, to the session or on the screen. Errors are shown and end nothing."""

    def __init__(
        self,
        session: Session,
        history: History,
        *,
        open_model: Callable[[str], Awaitable[ChatBackend]],
        save: Save,
        display: LoadDisplay,
    ) -> None:
        self._session = session
        self._history = history
        self._open_model = open_model
        self._save = save
        self._display = display

    async def run(self, entry: str) -> None:
        name, _, rest = entry.partition(" ")
        rest = rest.strip()
        try:
            match name:
                case "/?" | "/help":
                    print(HELP)
                case "/clear":
                    self._session.clear()
                    print("Cleared the conversation.")
                case "/set":
                    self._set(rest)
                case "/show":
                    self._show(rest)
                case "/list":
                    for model in await self._session.backend.models():
                        print(f"  {clean(model)}")
                case "/load" | "/save" | "/file" if not rest:
                    print(f"Usage: {name} {'PATH' if name == '/file' else 'MODEL' if name == '/load' else 'NAME'}")
                case "/load":
                    await self._load(rest)
                case "/save":
                    await self._keep(rest)
                case "/file":
                    self._session.attachments.append(read_attachment(rest))
                    print(f"{rest} goes before the next message.")
                case _:
                    self._unknown(name)
        except MlxserveError as error:
            notice(f"Error: {error}")

    async def _load(self, model: str) -> None:
        session = self._session
        backend = await self._open_model(model)
        # First the old one is given back: two models may not fit into memory.
        await session.backend.close()
        try:
            await self._use(model, backend)
        except MlxserveError as error:
            notice(f"Error: {error}")
            await self._use(session.model, await self._open_model(session.model))
            print(f"Going on with {session.model}.")
            return
        session.clear()
        print(f"Loaded {model}. The conversation begins anew.")

    async def _use(self, model: str, backend: ChatBackend) -> None:
        session = self._session
        session.backend = backend
        with self._display.loading(model):
            session.load_seconds = await backend.load()
        session.model, session.facts = model, await backend.facts()

    async def _keep(self, name: str) -> None:
        session = self._session
        await asyncio.to_thread(
            self._save, name, session.model, system=session.system, parameters=session.parameters.of_model()
        )
        print(f"Saved model, system message and parameters as {name}; the conversation is not part of it.")
        dropped = [each for each in session.parameters.sampling() if each in PER_REQUEST]
        if dropped:
            print(f"Not part of it either, since they go with each request: {', '.join(dropped)}.")

    def _set(self, rest: str) -> None:
        session = self._session
        what, _, value = rest.partition(" ")
        value = value.strip()
        match what:
            case "parameter":
                self._set_parameter(value)
            case "system" if value:
                session.system = unquote(value)
                print("Set the system message.")
            case "format" if value:
                session.parameters = session.parameters.with_format(value)
                print("Answers are JSON." if value == "json" else f"Answers are JSON by the schema in {value}.")
            case "think":
                session.parameters = session.parameters.with_think(value or "true")
                print(f"Thinking is on{f', effort {value}' if value in EFFORTS else ''}.")
            case "" | "system" | "format":
                print(SET_HELP)
            case _:
                self._switch(rest, what)

    def _switch(self, rest: str, what: str) -> None:
        """The settings that are one word."""
        session = self._session
        match rest:
            case "noformat":
                session.parameters = dataclasses.replace(session.parameters, schema=None)
                print("Answers have any form.")
            case "nothink":
                session.parameters = session.parameters.with_think("false")
                print("Thinking is off.")
            case "verbose" | "quiet":
                session.verbose = rest == "verbose"
                print(f"Statistics are {'on' if session.verbose else 'off'}.")
            case "history" | "nohistory":
                self._history.keep_history(rest == "history")
                print(f"History is {'on' if rest == 'history' else 'off'}.")
            case "markdown":
                session.style = dataclasses.replace(session.style, layout="markdown")
                print("Answers are rendered as Markdown, which breaks lines at words.")
            case "nomarkdown":
                session.style = dataclasses.replace(session.style, layout="wrapped")
                print("Answers are shown as they are, with lines broken at words.")
            case "wordwrap":
                if session.style.layout == "plain":
                    session.style = dataclasses.replace(session.style, layout="wrapped")
                print("Lines are broken at words.")
            case "nowordwrap":
                session.style = dataclasses.replace(session.style, layout="plain")
                print("Answers are shown as they are; the terminal breaks lines.")
            case _:
                self._unknown(f"/set {what}")

    def _set_parameter(self, text: str) -> None:
        try:
            name, *values = shlex.split(text)
        except ValueError:
            print("Usage: /set parameter <name> <value>")
            return
        self._session.parameters = self._session.parameters.with_value(name, values)
        print(f"Set parameter {name} to {', '.join(values)}.")

    def _show(self, what: str) -> None:
        session, facts = self._session, self._session.facts
        match what:
            case "info":
                for label, value in facts.rows.items():
                    print(f"  {label:<16} {clean(value)}")
            case "parameters":
                given = session.parameters.given()
                for name, value in (facts.default_sampling | given).items():
                    print(f"  {name:<16} {json.dumps(value)}{'' if name in given else '  (default of the model)'}")
            case "system":
                print(session.system or clean(facts.system or "") or "No system message is set.")
            case "template":
                print(clean(facts.template or "") or "The chat template is not known here.")
            case "license":
                print(clean(facts.license or "") or "The license is not known here.")
            case "modelfile":
                parameters = facts.default_sampling | session.parameters.of_model()
                system = session.system or facts.system
                print(clean(modelfile(session.model, facts.template, system, parameters)))
            case "":
                print(SHOW_HELP)
            case _:
                self._unknown(f"/show {what}")

    def _unknown(self, command: str) -> None:
        print(f"Unknown command '{command}'. Type /? for help")


def unquote(entry: str) -> str:
    """The text between triple quotes, or all of it."""
    if entry.startswith('"""') and entry.endswith('"""') and len(entry) >= 6:
        return entry[3:-3].strip("\n")
    return entry
