"""Lines from the terminal, with editing, history and bracketed paste."""

import os
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from mlxserve.cli.console import notice


class LineAbandoned(Exception):
    """Ctrl-C in a line that had text in it."""


class PromptReader:
    """Reads lines. Ctrl-D raises EOFError; Ctrl-C KeyboardInterrupt in an empty line, LineAbandoned in another."""

    def __init__(self, history_file: Path) -> None:
        self._history = _SwitchableHistory(_open_history(history_file))
        self._session: PromptSession[str] = PromptSession(history=self._history)

    async def read(self, prompt: str) -> str:
        try:
            return await self._session.prompt_async(prompt)
        except KeyboardInterrupt:
            if self._session.default_buffer.text:
                raise LineAbandoned from None
            raise

    def keep_history(self, wanted: bool) -> None:
        """Whether lines from now on are written to the history file."""
        self._history.recording = wanted


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
