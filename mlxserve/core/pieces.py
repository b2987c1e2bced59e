"""Long work of the engine thread, cut into pieces between which the streams of other models go on."""

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

Pieces = Generator[None, None, T]
"""Work that may be left alone at each `yield` for as long as its caller likes; it returns the result."""


def finish(pieces: Pieces[T]) -> T:
    """Do all of it at once."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: T = end.value
            return result
