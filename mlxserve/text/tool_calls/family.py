"""One way in which models write tool calls."""

from dataclasses import dataclass

from mlxserve.text.tool_calls.definitions import Tool
from mlxserve.text.tool_calls.lark import LarkWriter
from mlxserve.text.tool_calls.reader import CallReader
from mlxserve.text.tool_calls.source import Wait


@dataclass(frozen=True, slots=True)
class Family:
    """Calls are written as opening, call, separator, call, ..., closing; what stands in a call is for subclasses."""

    name: str
    opening: str = ""
    separator: str = ""
    closing: str = ""
    starts: tuple[str, ...] = ()
    """Where calls may begin in an answer."""
    line_starts: tuple[str, ...] = ()
    """Likewise, but only at the beginning of a line."""
    markers: tuple[str, ...] = ()
    """What else may be tokens of its own in the vocabulary."""

    @property
    def all_markers(self) -> tuple[str, ...]:
        """Texts that may be tokens of their own; none has another within it."""
        return (*self.starts, *self.markers)

    def read(self, reader: CallReader, marker: str) -> Wait[None]:
        """Read the calls that begin with `marker`, one of the starts, which is read already.

        Raises:
            Malformed: what comes is no call.
        """
        raise NotImplementedError

    def call(self, lark: LarkWriter, tool: Tool) -> str:
        """A Lark expression for calls of a tool.

        Raises:
            UnsupportedSchema: this format cannot hold its arguments to its parameters.
        """
        raise NotImplementedError
