"""Markdown in the terminal while it streams."""

import asyncio
from dataclasses import dataclass
from typing import ClassVar

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Heading, Markdown
from rich.segment import Segment

from mlxserve.cli.console import clean, open_rich

REFRESH_RATE = 12
"""Times a second that the block which is still growing is drawn anew at most."""
CODE_THEME = "ansi_dark"
"""Colours of the terminal's own palette, and no background, which would be copied along as blanks."""

_parser = MarkdownIt("commonmark").enable("strikethrough").enable("table")


class MarkdownBody:
    """An answer as Markdown: blocks that are complete stand for good, the last one is drawn again as it grows.

    On a terminal push() wants a running event loop.
    """

    def __init__(self) -> None:
        self._console = open_rich(highlight=False, markup=False, emoji=False)
        self._live: Live | None = None
        self._redrawing: asyncio.TimerHandle | None = None
        self._drawn_at = 0.0
        self._rest = ""
        self._has_printed = False

    @property
    def at_line_start(self) -> bool:
        return self._has_printed and not self._rest

    def push(self, text: str) -> None:
        self._rest += clean(text)
        if "\n" in text:
            done, self._rest = split_growing(self._rest)
        else:
            done = ""
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            if self._live is None:
                self._live = Live(
                    console=self._console,
                    auto_refresh=False,
                    transient=True,
                    redirect_stdout=False,
                    redirect_stderr=False,
                )
                self._live.start()
            self._live.update(_Tail(self._rest, is_first=not (self._has_printed or done)))
            self._redraw_soon()
        self._print(done)

    def _redraw_soon(self) -> None:
        if self._redrawing is None:
            loop = asyncio.get_running_loop()
            self._redrawing = loop.call_at(self._drawn_at + 1 / REFRESH_RATE, self._redraw)

    def _redraw(self) -> None:
        self._redrawing = None
        self._drawn_at = asyncio.get_running_loop().time()
        if self._live is not None:
            self._live.refresh()

    def finish(self) -> None:
        if self._redrawing is not None:
            self._redrawing.cancel()
            self._redrawing = None
        if self._live is not None:
            self._live.stop()
            self._live = None
        rest, self._rest = self._rest, ""
        self._print(rest)

    def _print(self, source: str) -> None:
        if not source.strip():
            return
        if self._has_printed:
            self._console.print()
        self._has_printed = True
        self._console.print(_Lines(source))


def blocks(source: str) -> list[str]:
    """The paragraphs, lists, code blocks ... of a text; put together they are all of it."""
    starts = [token.map[0] for token in _parser.parse(source) if token.level == 0 and token.map]
    lines = source.split("\n")
    ends = [*starts[1:], len(lines)]
    firsts = [0, *starts[1:]]
    parts = ["\n".join(lines[first:end]) for first, end in zip(firsts, ends, strict=True)]
    return [part + "\n" for part in parts[:-1]] + parts[-1:]


def split_growing(source: str) -> tuple[str, str]:
    """The blocks that nothing which follows can change, and the rest, which begins with the last complete one."""
    whole = source[: source.rfind("\n") + 1]
    done = "".join(blocks(whole)[:-1])
    return done, source[len(done) :]


class _LeftHeading(Heading):
    """Headings at the left and without a box: half of an answer's lines can be headings."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield self.text


class AnswerMarkdown(Markdown):
    """Markdown as models write it: a line break in a paragraph is meant as one, and links show where they lead."""

    elements: ClassVar = {**Markdown.elements, "heading_open": _LeftHeading}

    def __init__(self, source: str) -> None:
        super().__init__(source, code_theme=CODE_THEME, hyperlinks=False)
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"


@dataclass(frozen=True, slots=True)
class _Lines:
    """Markdown without the blanks that rich fills lines up with: they would be copied along."""

    source: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.render(console, options):
            yield from line
            yield Segment.line()

    def render(self, console: Console, options: ConsoleOptions) -> list[list[Segment]]:
        lines: list[list[Segment]] = []
        for block in blocks(self.source):
            rendered = _stripped(console.render_lines(AnswerMarkdown(block), options, pad=False))
            if rendered:
                # Rich puts one or two lines between blocks, depending on their kinds.
                lines += [[], *rendered] if lines else rendered
        return lines


def _stripped(lines: list[list[Segment]]) -> list[list[Segment]]:
    """Without blanks at the ends of lines, and without empty lines at both ends."""
    for line in lines:
        while line and not line[-1].text.strip():
            line.pop()
        if line:
            line[-1] = Segment(line[-1].text.rstrip(), line[-1].style)
    filled = [number for number, line in enumerate(lines) if line]
    return lines[filled[0] : filled[-1] + 1] if filled else []


@dataclass(frozen=True, slots=True)
class _Tail:
    """The end of a block, as much of it as fits the screen."""

    source: str
    is_first: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = _Lines(self.source).render(console, options)
        if not self.is_first:
            lines.insert(0, [])
        for line in lines[-max(console.size.height - 2, 1) :]:
            yield from line
            yield Segment.line()
