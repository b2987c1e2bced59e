"""What an answer's text is made of: thoughts, content and tool calls."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """More of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; the arguments that follow are its own."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of the call begun last: all pieces together are a JSON object."""

    text: str


Piece = Content | Thought | CallStart | CallArguments


class OutputParser(Protocol):
    """Takes an answer's text as it comes, in pieces cut anywhere; what it returns in all depends on the text alone."""

    def push(self, text: str) -> list[Piece]:
        """Take more text; return what is now certain."""
        ...

    def finish(self) -> list[Piece]:
        """Return what was held back: no text follows."""
        ...
