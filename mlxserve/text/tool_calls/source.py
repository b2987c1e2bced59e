"""Text that comes in pieces, for parsers written as if all of it were there.

A parser is a generator: whatever it reads with `yield from` suspends it until enough text has come, or the end. So what
it finds depends on the text alone, never on where it was cut.
"""

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Wait = Generator[None, None, T]
"""A step of a parser: suspended while text is missing, with a T in the end."""

_WHITESPACE = re.compile(r"[ \t\r\n]*")


class Malformed(Exception):
    """What comes next is not what the format has there."""


class BrokenOff(Malformed):
    """The text ended in the middle."""


class Source:
    """The text that came so far, from `position` on unread."""

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self.is_ended = False
        self.mark: int | None = None
        """From here on text is kept, to be given back."""

    def more(self) -> Wait[None]:
        """Wait for more text. Positions move: what is read and not marked is dropped."""
        keep = self.position if self.mark is None else self.mark
        self.text = self.text[keep:]
        self.position -= keep
        if self.mark is not None:
            self.mark = 0
        yield

    def peek(self) -> Wait[str]:
        """The next character; "" at the end."""
        while self.position == len(self.text):
            if self.is_ended:
                return ""
            yield from self.more()
        return self.text[self.position]

    def skip_whitespace(self) -> Wait[str]:
        """Read whitespace as far as it goes, and return it."""
        skipped = ""
        while True:
            found = _WHITESPACE.match(self.text, self.position)
            assert found is not None
            skipped += found[0]
            self.position = found.end()
            if self.position < len(self.text) or self.is_ended:
                return skipped
            yield from self.more()

    def accept(self, *literals: str) -> Wait[str]:
        """Read that one of these which comes next, and return it; "" if none does. None may begin with another."""
        while True:
            for literal in literals:
                if self.text.startswith(literal, self.position):
                    self.position += len(literal)
                    return literal
            rest = self.text[self.position :]
            if self.is_ended or not any(literal.startswith(rest) for literal in literals):
                return ""
            yield from self.more()

    def expect(self, *literals: str) -> Wait[str]:
        """accept(), of which one has to come.

        Raises:
            Malformed: something else comes.
            BrokenOff: the text ends, maybe within one.
        """
        found = yield from self.accept(*literals)
        if not found:
            rest = self.text[self.position :]
            is_broken_off = self.is_ended and any(literal.startswith(rest) for literal in literals)
            raise BrokenOff if is_broken_off else self.fault()
        return found

    def skip_end(self, *literals: str) -> Wait[bool]:
        """accept(), or the beginning of one if the text ends within it. Whether anything was read."""
        if (yield from self.accept(*literals)):
            return True
        rest = self.text[self.position :]
        if self.is_ended and rest and any(literal.startswith(rest) for literal in literals):
            self.position = len(self.text)
            return True
        return False

    def rest(self, *literals: str) -> str:
        """Read all that came; return it less the beginning of one of these literals."""
        rest = self.text[self.position :]
        self.position = len(self.text)
        return rest[: len(rest) - begun_length(rest, literals)]

    def fault(self) -> Malformed:
        """What to raise when nothing that may come comes."""
        return BrokenOff() if self.is_ended and self.position == len(self.text) else Malformed()

    def ahead(self, characters: re.Pattern[str]) -> Wait[str]:
        """The characters that come next as long as each matches; they are not read."""
        length = 0
        while True:
            end = self.position + length
            while end < len(self.text) and characters.match(self.text, end):
                end += 1
            length = end - self.position
            if end < len(self.text) or self.is_ended:
                return self.text[self.position : end]
            yield from self.more()

    def read(self, characters: re.Pattern[str]) -> Wait[str]:
        """Read the characters that come next as long as each matches: one at least.

        Raises:
            Malformed: the first does not match.
        """
        text = yield from self.ahead(characters)
        if not text:
            raise self.fault()
        self.position += len(text)
        return text

    def until(self, *literals: str, pass_on: Callable[[str], None] | None = None) -> Wait[tuple[str, str]]:
        """Read up to and with the first of these literals; return the text before it, and it.

        None may have another within it, but at its end. With `pass_on`, text is handed to it as soon as it is known to
        come before, and what is returned is empty; without, nothing is read if the text ends first.

        Raises:
            BrokenOff: none comes.
        """
        found = re.compile("|".join(map(re.escape, literals)))
        seen = 0  # characters after position in which none begins
        while True:
            match = found.search(self.text, self.position + seen)
            if match is not None:
                before = self.text[self.position : match.start()]
                self.position = match.end()
                if pass_on is None:
                    return before, match[0]
                pass_on(before)
                return "", match[0]
            rest = self.text[self.position :]
            seen = len(rest) - begun_length(rest, literals)
            if pass_on is not None:
                pass_on(rest[:seen])
                self.position += seen
                seen = 0
            if self.is_ended:
                raise BrokenOff
            yield from self.more()


def begun_length(text: str, literals: Sequence[str]) -> int:
    """How many of the last characters of a text may be the beginning of one of the literals, none of which is in it."""
    for length in range(min(len(text), max(map(len, literals), default=1) - 1), 0, -1):
        if any(literal.startswith(text[-length:]) for literal in literals):
            return length
    return 0
