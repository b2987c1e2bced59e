"""Lines from the terminal, with editing, completion, history and bracketed paste."""

import os
from collections.abc import Iterable
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import AnyFormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from mlxserve.cli.console import notice
from mlxserve.cli.parameters import EFFORTS, NUMBERS
from mlxserve.cli.repl_help import COMMANDS, SETTINGS, SUBJECTS

WORDS: dict[str, tuple[str, ...]] = {
    "": COMMANDS,
    "/set": SETTINGS,
    "/set parameter": (*NUMBERS, "stop"),
    "/set format": ("json",),
    "/set think": EFFORTS,
    "/show": SUBJECTS,
}
"""What can come after each beginning of a command."""


class LineAbandoned(Exception):
    """Ctrl-C in a line that had text in it."""


class PromptReader:
    """Reads lines. Ctrl-D raises EOFError; Ctrl-C KeyboardInterrupt in an empty line, LineAbandoned in another."""

    def __init__(self, history_file: Path) -> None:
        self._history = _SwitchableHistory(_open_history(history_file))
        self._session: PromptSession[str] = PromptSession(
            history=self._history, completer=CommandCompleter(), complete_while_typing=False
        )

    async def read(self, prompt: str, note: str = "") -> str:
        def right() -> AnyFormattedText:
            # It would stay behind in the terminal's scrollback.
            return [] if get_app().is_done else [("class:note", note)]

        try:
            return await self._session.prompt_async(prompt, rprompt=right)
        except KeyboardInterrupt:
            if self._session.default_buffer.text:
                raise LineAbandoned from None
            raise

    def keep_history(self, wanted: bool) -> None:
        """Whether lines from now on are written to the history file."""
        self._history.recording = wanted


class CommandCompleter(Completer):
    """The words of commands, and the paths of `/file`."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        line = document.text_before_cursor
        if not line.startswith("/"):
            return
        if line.startswith("/file "):
            path = line.removeprefix("/file ").lstrip()
            yield from self._paths.get_completions(Document(path), complete_event)
            return
        *before, word = line.split(" ")
        for candidate in WORDS.get(" ".join(before), ()):
            if candidate.startswith(word):
                yield Completion(candidate, start_position=-len(word))


class _SwitchableHistory(History):
    def __init__(self, store: History) -> None:
        super().__init__()
        self.recording = True
        self._store = store

    def load_history_strings(self) -> list[str]:
        return list(self._store.load_history_strings())

    def store_string(self, string: str) -> None:
        if self.recording:
            self._store.store_string(string)


def _open_history(path: Path) -> History:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Prompts are private: nobody else may read the file.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        path.chmod(0o600)
    except OSError as error:
        notice(f"History is not kept: {path}: {error.strerror}")
        return InMemoryHistory()
    return FileHistory(str(path))
