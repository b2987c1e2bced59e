"""Splits an answer into content and tool calls while it comes."""

import re
from collections.abc import Mapping

from mlxserve.text.output import CallArguments, CallStart, Content, Piece
from mlxserve.text.tool_calls.definitions import Tool
from mlxserve.text.tool_calls.family import Family
from mlxserve.text.tool_calls.reader import CallReader
from mlxserve.text.tool_calls.source import BrokenOff, Malformed, Wait, begun_length


class ToolCallParser:
    """An OutputParser of one family's calls.

    A call begins when its tool's name is known and, where arguments are JSON, their `{` has come. What is malformed
    before that is content, as it stands. What is malformed later ends the call as it is, and is content from there on.
    The end of the text ends it too; its arguments are then a part of a JSON object, as after OpenAI's `length`.
    """

    def __init__(self, family: Family, tools: Mapping[str, Tool]) -> None:
        self._family = family
        self._markers = (*family.starts, *family.line_starts)
        self._marker = re.compile("|".join(map(re.escape, self._markers)))
        self._reader = CallReader(tools)
        self._steps = self._read()
        next(self._steps)

    def push(self, text: str) -> list[Piece]:
        if text:
            self._reader.text += text
            next(self._steps)
        return self._taken()

    def finish(self) -> list[Piece]:
        self._reader.is_ended = True
        for _ in self._steps:
            pass
        self._reader.flush()
        return self._taken()

    def _read(self) -> Wait[None]:
        reader = self._reader
        while True:
            marker = yield from self._content()
            if not marker:
                return
            try:
                yield from self._family.read(reader, marker)
            except BrokenOff:
                if reader.mark is None:
                    reader.rest()  # Half a tag within a call.
                reader.close(is_read=False)
            except Malformed:
                reader.close(is_read=False)
            else:
                reader.close(is_read=True)

    def _content(self) -> Wait[str]:
        """Pass content on up to where a call may begin, and read the marker; "" if there is none up to the end."""
        reader = self._reader
        while True:
            start = reader.position
            for match in self._marker.finditer(reader.text, start):
                reader.content(reader.text[start : match.start()])
                start = reader.position = match.start()
                if match[0] in self._family.starts or reader.is_line_start:
                    reader.begin()
                    reader.position = match.end()
                    return match[0]
            rest = reader.text[start:]
            # A marker of a line's start that was passed over is whole, and so is not held back.
            num_held = 0 if reader.is_ended else begun_length(rest, self._markers)
            reader.content(rest[: len(rest) - num_held])
            reader.position = len(reader.text) - num_held
            if reader.is_ended:
                return ""
            yield from reader.more()

    def _taken(self) -> list[Piece]:
        """New pieces, neighbours of a kind joined."""
        taken: list[Piece] = []
        for piece in self._reader.pieces:
            last = taken[-1] if taken else None
            if isinstance(piece, Content) and isinstance(last, Content):
                taken[-1] = Content(last.text + piece.text)
            elif isinstance(piece, CallArguments) and isinstance(last, CallArguments):
                taken[-1] = CallArguments(last.text + piece.text)
            elif isinstance(piece, CallStart) or piece.text:
                taken.append(piece)
        self._reader.pieces.clear()
        return taken
