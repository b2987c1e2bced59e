"""A grammar at one place in an answer, and the masks of many at once."""

import functools
import itertools
from collections.abc import Sequence
from typing import cast

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from mlxserve.core.constraint import ConstrainedRow, TokenMasks
from mlxserve.text.opening import Opening

MAX_FAILURE_LENGTH = 300
MIN_PARALLEL_ROWS = 8
"""A mask takes some 10 us; the way to other threads and back 0.1 ms, and a few ms where all cores are busy."""


class Unwritable(Exception):
    """A text has bytes that are in no token of the vocabulary."""


class GrammarConstraint:
    """`first_masked`: bits, as in TokenMasks, of tokens that must not begin an answer. `opening`: what the model writes
    before the grammar begins; it counts as tokens of the answer."""

    def __init__(
        self, matcher: LLMatcher, *, vocab_size: int, first_masked: bytes = b"", opening: Opening | None = None
    ) -> None:
        self.matcher = matcher
        self.vocab_size = vocab_size
        self.first_masked = first_masked
        self.opening = opening
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def copy(self) -> "GrammarConstraint":
        """Another one at the same place, for another answer."""
        copy = GrammarConstraint(
            self.matcher.deep_copy(),
            vocab_size=self.vocab_size,
            first_masked=self.first_masked,
            opening=None if self.opening is None else self.opening.copy(),
        )
        copy._num_tokens = self._num_tokens
        return copy

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take tokens of the answer. One that is not allowed makes it fail for good."""
        self._num_tokens += len(token_ids)
        rest = token_ids
        if self.opening is not None:
            while rest and self.opening.take(rest[0]):
                rest = rest[1:]
            if self.opening.is_over:
                self.opening = None
        if rest:
            self.matcher.consume_tokens(list(rest))

    def num_accepted(self, token_ids: Sequence[int]) -> int:
        if self.opening is None:
            return self._num_matched(token_ids)
        opening = self.opening.copy()
        for count, token_id in enumerate(token_ids):
            if not opening.is_over and not opening.is_optional and not opening.allows(token_id):
                return count
            if not opening.take(token_id):
                return count + self._num_matched(token_ids[count:])
        return len(token_ids)

    def _num_matched(self, token_ids: Sequence[int]) -> int:
        # The library takes an id that it does not know, as of a padded vocabulary, for the end of everything.
        known = itertools.takewhile(lambda token_id: token_id < self.vocab_size, token_ids)
        return self.matcher.validate_tokens(list(known))

    def failure_at_start(self) -> str | None:
        """Why no answer can be begun; None if one can."""
        return compute_masks([ConstrainedRow(0, self, ())], 1).failures.get(0)

    def failure(self) -> str | None:
        """Why the answer cannot go on; None if it can, or can end. Known once a mask was computed."""
        if self.matcher.is_error():
            return _one_line(self.matcher.get_error())
        if self.matcher.is_stopped() and not self.matcher.is_accepting():
            return "the grammar allows nothing more, and is not at an end"
        return None


def _one_line(error: str) -> str:
    """The library's message without the drawing of where the fault is; of a long one the beginning and the end."""
    if Unwritable.__name__ in error or error.startswith("NoExtension"):
        return "no text that this model can write satisfies it"
    line = " ".join(error.replace("<non-verbose/>", "").split())
    if len(line) <= MAX_FAILURE_LENGTH:
        return line
    return f"{line[: MAX_FAILURE_LENGTH // 3]} ... {line[-MAX_FAILURE_LENGTH * 2 // 3 :]}"


def compute_masks(rows: Sequence[ConstrainedRow], num_rows: int) -> TokenMasks:
    """Masks of a step with `num_rows` rows, of which `rows`, at least one, have a constraint of this module.

    The interpreter is free while they are computed.
    """
    constraints = [cast(GrammarConstraint, row.constraint) for row in rows]
    # The library writes words of 32 bits.
    num_bytes = (constraints[0].vocab_size + 31) // 32 * 4
    bits = np.full((num_rows, num_bytes), 0xFF, np.uint8)
    places: list[_Place] = []
    for row, constraint in zip(rows, constraints, strict=True):
        constraint.advance(row.token_ids)
        # What follows a draft that is not allowed is never reached.
        drafts = list(row.draft_token_ids[: constraint.num_accepted(row.draft_token_ids)])
        if constraint.opening is None:
            places.append((constraint.matcher, row.index, drafts))
        else:
            places += _places_after(constraint, constraint.opening, bits[row.index :], row.index, drafts)
    _write_grammar_masks(places, bits)
    failures = {}
    for row, constraint in zip(rows, constraints, strict=True):
        opening = constraint.opening
        if constraint.num_tokens == 0 and constraint.first_masked and (opening is None or opening.is_optional):
            masked = np.frombuffer(constraint.first_masked, np.uint8)
            bits[row.index, : len(masked)] &= ~masked
        if opening is not None and opening.is_optional:
            bits[row.index, opening.start_id // 8] |= 1 << opening.start_id % 8
        failure = constraint.failure()
        if failure is None and not bits[row.index].any():
            failure = "no token of this model's vocabulary fits"
        if failure is not None:
            failures[row.index] = failure
    return TokenMasks(num_rows, bits.tobytes(), failures)


_Place = tuple[LLMatcher, int, list[int]]
"""A grammar, the row whose token it decides, and the drafts whose rows follow that one."""


def _places_after(
    constraint: GrammarConstraint, opening: Opening, bits: NDArray[np.uint8], index: int, drafts: list[int]
) -> list[_Place]:
    """Write the masks of the rows that still stand in the opening, the first of which is `bits[0]`; return where the
    grammar decides."""
    opening = opening.copy()
    places: list[_Place] = []
    matcher = constraint.matcher
    for position in range(len(drafts) + 1):
        rest = drafts[position:]
        if opening.is_over:
            return [*places, (matcher, index + position, rest)]
        if not opening.is_optional:
            opening.mask(bits[position])
        elif rest and rest[0] == opening.start_id:
            places.append((matcher, index, []))
            matcher = matcher.deep_copy()
        else:
            return [(matcher, index, rest)]
        if rest:
            opening.take(rest[0])
    return places


def _write_grammar_masks(places: Sequence[_Place], bits: NDArray[np.uint8]) -> None:
    num_rows, num_bytes = bits.shape
    plain = [(matcher, index) for matcher, index, drafts in places if not drafts]
    drafted = [place for place in places if place[2]]
    if len(plain) < MIN_PARALLEL_ROWS:
        for matcher, index in plain:
            matcher.unsafe_compute_mask_ptr(bits[index].ctypes.data, num_bytes)
    else:
        _executor().unsafe_compute_mask_ptr(plain, bits.ctypes.data, num_bytes, num_rows)
    if drafted:
        _executor().unsafe_compute_mask_ptr_with_draft_token(drafted, bits.ctypes.data, num_bytes, num_rows)


@functools.cache
def _executor() -> LLExecutor:
    return LLExecutor()
