"""Answers fed to output parsers in every way that they can be cut."""

import random
from collections.abc import Callable, Iterable, Iterator

from mlxserve.text.output import CallStart, OutputParser, Piece


def joined(pieces: Iterable[Piece]) -> list[tuple[str, str]]:
    """Pieces as (kind, text), neighbours of a kind made one. A call's start is none's neighbour."""
    result: list[tuple[str, str]] = []
    for piece in pieces:
        kind = type(piece).__name__
        text = piece.name if isinstance(piece, CallStart) else piece.text
        assert text, f"an empty {kind}"
        if result and result[-1][0] == kind and not isinstance(piece, CallStart):
            text = result.pop()[1] + text
        result.append((kind, text))
    return result


def parsed(parser: OutputParser, pieces: Iterable[str]) -> list[tuple[str, str]]:
    found = [piece for text in pieces for piece in parser.push(text)]
    return joined([*found, *parser.finish()])


def cuts(text: str, *, seed: int, num_random: int = 20) -> Iterator[list[str]]:
    """The text whole, one character at a time, cut in two at every place, and at random places."""
    yield [text]
    yield list(text)
    for place in range(len(text) + 1):
        yield [text[:place], text[place:]]
    rng = random.Random(seed)
    for _ in range(num_random):
        places = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(8)))
        yield [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def parsed_in_every_way(make: Callable[[], OutputParser], text: str, *, seed: int = 1) -> list[tuple[str, str]]:
    """What a parser makes of a text, which is the same however it is cut."""
    whole, *others = cuts(text, seed=seed)
    expected = parsed(make(), whole)
    for pieces in others:
        assert parsed(make(), pieces) == expected, f"cut into {pieces}, seed {seed}"
    return expected
