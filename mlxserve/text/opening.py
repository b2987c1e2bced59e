"""What a model writes before the answer that a grammar is about: its thoughts, which no grammar constrains."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_TAIL_LENGTH = 256
"""Bytes within which the marker that ends it must stand."""


@dataclass(frozen=True, slots=True)
class OpeningRules:
    """How to tell where the answer begins. All tokens are of one vocabulary."""

    token_bytes: Sequence[bytes]
    """By token id."""
    start_ids: tuple[int, ...]
    """Tokens that begin the thoughts, at least one."""
    end: re.Pattern[bytes]
    """Matches where the thoughts end and the answer begins."""
    masked: bytes
    """Bits, as in TokenMasks, of tokens that must not stand among the thoughts: those that end the sequence, and any
    that may have text beyond `end`, which the grammar would not see."""

    def is_masked(self, token_id: int) -> bool:
        return token_id >= len(self.token_bytes) or bool(self.masked[token_id // 8] >> token_id % 8 & 1)


class Opening:
    """Where one answer stands in it. `num_started`: how many of `start_ids` are there; after all of them it is free."""

    def __init__(self, rules: OpeningRules, num_started: int, tail: bytes = b"") -> None:
        self.is_over = False
        self._rules = rules
        self._num_started = num_started
        self._tail = tail

    def copy(self) -> "Opening":
        copy = Opening(self._rules, self._num_started, self._tail)
        copy.is_over = self.is_over
        return copy

    @property
    def is_optional(self) -> bool:
        """Whether the answer may also begin right here."""
        return self._num_started == 0 and not self.is_over

    @property
    def start_id(self) -> int:
        return self._rules.start_ids[0]

    def take(self, token_id: int) -> bool:
        """Take the next token. False, and the opening is over, if it belongs to the answer."""
        rules = self._rules
        if self.is_optional and token_id != self.start_id:
            self.is_over = True
        if self.is_over:
            return False
        if self._num_started < len(rules.start_ids):
            self._num_started += 1
        else:
            text = rules.token_bytes[token_id] if token_id < len(rules.token_bytes) else b""
            self._tail = (self._tail + text)[-MAX_TAIL_LENGTH:]
            self.is_over = rules.end.search(self._tail) is not None
        return True

    def allows(self, token_id: int) -> bool:
        """Whether the token may come next, in an opening that is neither over nor optional."""
        rules = self._rules
        if self._num_started < len(rules.start_ids):
            return token_id == rules.start_ids[self._num_started]
        return not rules.is_masked(token_id)

    def mask(self, bits: NDArray[np.uint8]) -> None:
        """Write which tokens allows() would take into a row of TokenMasks."""
        rules = self._rules
        if self._num_started < len(rules.start_ids):
            expected = rules.start_ids[self._num_started]
            bits[:] = 0
            bits[expected // 8] = 1 << expected % 8
        else:
            bits[:] = 0xFF
            bits[: len(rules.masked)] &= ~np.frombuffer(rules.masked, np.uint8)
