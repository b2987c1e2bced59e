"""What a family's parser reads calls from and writes them to."""

import re
from collections.abc import Mapping, Sequence

from mlxserve.text.output import CallArguments, CallStart, Content, Piece
from mlxserve.text.tool_calls.definitions import Tool
from mlxserve.text.tool_calls.source import BrokenOff, Source, Wait
from mlxserve.text.tool_calls.values import in_string, is_json_broken_off, is_text, to_json

_LINE_END = re.compile(r"\n[ \t]*\Z|\A[ \t]*\Z")


class CallReader(Source):
    """A Source with an output.

    Until start() is called nothing of a call is given out: a text that turns out to be none is content. A call of a
    tool that nobody offered is read like any other, to know where it ends, and is content too.
    """

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        super().__init__()
        self.tools = tools
        self.pieces: list[Piece] = []
        self.is_line_start = True
        """Whether content ends where a line begins, whitespace aside."""
        self._is_text = False
        self._after_call = False
        self._whitespace = ""

    def begin(self) -> None:
        """A call may begin here."""
        self.mark = self.position

    def start(self, name: str) -> None:
        """The call is one, of this tool; all that comes now are its arguments."""
        if name in self.tools:
            self._is_text = False
            self.mark = None
            self._whitespace = ""
            self._after_call = True
            self.is_line_start = True
            self.pieces.append(CallStart(name))
        else:
            self._is_text = True

    def arguments(self, text: str) -> None:
        if not self._is_text:
            self.pieces.append(CallArguments(text))
        else:
            self._give_back()

    def read_value(self, tool: Tool | None, name: str, ends: Sequence[str]) -> Wait[None]:
        """Read an argument that is written as bare text up to and with one of `ends`, and pass it on as JSON.

        A string is passed on while it comes, anything else when it is whole.

        Raises:
            BrokenOff: no end comes; all that came is passed on.
        """
        if is_text(tool, name):
            self.arguments('"')
            yield from self.until(*ends, pass_on=lambda text: self.arguments(in_string(text)))
            self.arguments('"')
            return
        text = ""
        try:
            while True:
                part, end = yield from self.until(*ends)
                text += part
                if not is_json_broken_off(tool, name, text):
                    break
                text += end
        except BrokenOff:
            self.arguments((text + self.rest(*ends)).strip())
            raise
        self.arguments(to_json(tool, name, text))

    def end(self) -> None:
        """The call ended here; another may follow."""
        if self._is_text:
            self._give_back()
        self.mark = self.position

    def close(self, *, is_read: bool) -> None:
        """No call follows. `is_read`: what was read since the last one's end is of the format."""
        if self.mark is not None and (self._is_text or not is_read):
            self._give_back()
        self.mark = None
        self._is_text = False

    def content(self, text: str) -> None:
        """Whitespace around calls is the format's, not the answer's."""
        if not text:
            return
        self.is_line_start = bool(_LINE_END.search(text)) and ("\n" in text or self.is_line_start)
        if self._after_call:
            text = text.lstrip()
            if not text:
                return
            self._after_call = False
        text = self._whitespace + text
        stripped = text.rstrip()
        self._whitespace = text[len(stripped) :]
        if stripped:
            self.pieces.append(Content(stripped))

    def flush(self) -> None:
        """Nothing follows: whitespace at the end of content is content."""
        if self._whitespace:
            self.pieces.append(Content(self._whitespace))

    def _give_back(self) -> None:
        if self.mark is not None:
            self.content(self.text[self.mark : self.position])
            self.mark = self.position
