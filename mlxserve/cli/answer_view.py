"""What an answer looks like: its thoughts and its text, plain, broken at words, or as Markdown."""

import os
import shutil
import sys
from dataclasses import dataclass
from typing import Literal, Protocol

import typer

from mlxserve.cli import console
from mlxserve.cli.word_wrap import WordWrapper
from mlxserve.core.generation import ReasoningDelta, TextDelta

Layout = Literal["plain", "wrapped", "markdown"]
"""As the model writes it; broken at words; rendered, which also breaks at words."""


@dataclass(frozen=True, slots=True)
class Style:
    layout: Layout = "plain"
    shows_thoughts: bool = True

    @classmethod
    def for_stdout(cls, *, markdown: bool | None, wordwrap: bool, hides_thoughts: bool) -> "Style":
        """What suits stdout: Markdown on a terminal unless the user says otherwise, in a pipe or file the answer alone
        and as it is.

        Raises:
            typer.BadParameter: Markdown without breaking at words is wanted.
        """
        if markdown and not wordwrap:
            raise typer.BadParameter(
                "--markdown breaks lines at words, and --nowordwrap forbids it; leave one of them out"
            )
        is_terminal = sys.stdout.isatty()
        if markdown is None:
            markdown = is_terminal and not console.is_dumb_terminal() and wordwrap
        layout: Layout = "markdown" if markdown else "wrapped" if is_terminal and wordwrap else "plain"
        return cls(layout, shows_thoughts=is_terminal and not hides_thoughts)


class Body(Protocol):
    """Writes the text of one answer to stdout."""

    @property
    def at_line_start(self) -> bool:
        """Whether something was written and its last line is complete."""

    def push(self, text: str) -> None: ...

    def finish(self) -> None:
        """Write what was held back."""


class TextBody:
    def __init__(self, wrapper: WordWrapper | None) -> None:
        self._wrapper = wrapper
        self._last = ""

    @property
    def at_line_start(self) -> bool:
        return self._last == "\n"

    def push(self, text: str) -> None:
        self._write(text if self._wrapper is None else self._wrapper.push(text))

    def finish(self) -> None:
        if self._wrapper is not None:
            self._write(self._wrapper.finish())

    def _write(self, text: str) -> None:
        console.write_answer(text)
        self._last = text[-1:] or self._last


class ThoughtBody:
    """What the model thinks, dimmed and between two lines of our own, as in Ollama."""

    def __init__(self, wrapper: WordWrapper | None) -> None:
        self._wrapper = wrapper
        self._is_open = False

    def push(self, text: str) -> None:
        if not self._is_open:
            # Templates let many models begin with an empty line.
            text = text.lstrip("\n")
            if not text:
                return
            self._is_open = True
            console.write_dimmed("Thinking...\n")
        text = console.clean(text)
        console.write_dimmed(text if self._wrapper is None else self._wrapper.push(text))

    def finish(self) -> None:
        if self._is_open:
            self._is_open = False
            rest = "" if self._wrapper is None else self._wrapper.finish()
            console.write_dimmed(f"{rest}\n...done thinking.\n\n")


class AnswerView:
    """One answer on stdout."""

    def __init__(self, style: Style) -> None:
        self._shows_thoughts = style.shows_thoughts
        self._thoughts = ThoughtBody(_wrapper(style.layout))
        self._body = _body(style.layout)

    def shows(self, event: TextDelta | ReasoningDelta) -> bool:
        return bool(event.text) and (self._shows_thoughts or isinstance(event, TextDelta))

    def show(self, event: TextDelta | ReasoningDelta) -> None:
        if not self.shows(event):
            return
        if isinstance(event, ReasoningDelta):
            self._thoughts.push(event.text)
        else:
            self._thoughts.finish()
            self._body.push(event.text)

    def finish(self) -> None:
        """Write what was held back."""
        self._thoughts.finish()
        self._body.finish()

    def end_line(self) -> None:
        if not self._body.at_line_start:
            console.write_answer("\n")


def _wrapper(layout: Layout) -> WordWrapper | None:
    return None if layout == "plain" else WordWrapper(_columns)


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except (OSError, ValueError):
        return shutil.get_terminal_size().columns


def _body(layout: Layout) -> Body:
    if layout == "markdown":
        # Not at the top: rich takes long to import, and a pipe needs none of it.
        from mlxserve.cli.markdown_view import MarkdownBody

        return MarkdownBody()
    return TextBody(_wrapper(layout))
