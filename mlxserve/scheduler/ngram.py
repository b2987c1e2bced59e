"""Guesses from the text itself: where its last few tokens stood before, it may go on as it did there.

Known as prompt lookup (Saxena 2023) or n-gram speculation. Answers that quote, edit or list what is in the prompt are
guessed well by it; others hardly, and how well is learned while they come.
"""

from collections.abc import Sequence

SIZES = (3, 2)
"""Tokens in a row that are looked up, longest first: a single token says too little of what follows."""
BOUNDS = (3, 5, 9)
"""Match lengths are told apart below 3, from 3, from 5, and from 9 tokens."""
PRIORS = (0.3, 0.4, 0.6, 0.8)
PRIOR_WEIGHT = 4.0
"""Trials that a prior counts for."""
DECAY = 0.95
"""What a trial weighs after each later one of its kind: some 20 count."""
FADING = 0.01
"""What each token without a trial takes away of what was learned: after some hundred it is worth another try."""


class HitRate:
    """How often guesses of one kind were right lately, from `prior` on."""

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._hits = prior * PRIOR_WEIGHT
        self._trials = PRIOR_WEIGHT

    @property
    def value(self) -> float:
        return self._hits / self._trials

    def observe(self, is_hit: bool) -> None:
        self._hits = DECAY * self._hits + is_hit
        self._trials = DECAY * self._trials + 1.0

    def fade(self) -> None:
        """Let one token pass without a trial: what was learned long ago counts for less against the prior."""
        self._hits += FADING * (self._prior * PRIOR_WEIGHT - self._hits)
        self._trials += FADING * (PRIOR_WEIGHT - self._trials)


class NgramIndex:
    """Where a growing sequence of tokens can be expected to go on as before. Each token costs O(1).

    It follows a match: a place in the sequence whose tokens before it are the latest ones. As long as the tokens there
    are the ones that come, the match grows; else the last few tokens are looked up anew.
    """

    def __init__(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """`token_ids` is read, not copied, and may grow; trials begin after the prompt."""
        self._token_ids = token_ids
        self._num_prompt_tokens = num_prompt_tokens
        self._num_indexed = 0
        self._places: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in SIZES)
        """For each size: n tokens -> the position after the last place where they stood."""
        self._next: int | None = None
        """The position whose token is expected next."""
        self._length = 0
        """Tokens before it that are known to be the latest ones."""
        self._rates = [HitRate(prior) for prior in PRIORS]

    def advance(self, max_tokens: int) -> bool:
        """Take in tokens that are new; False if more than `max_tokens` were, and some are left for the next call."""
        token_ids = self._token_ids
        end = min(len(token_ids), self._num_indexed + max_tokens)
        for position in range(self._num_indexed, end):
            self._add(position, token_ids[position])
        self._num_indexed = end
        return end == len(token_ids)

    def guess(self, max_tokens: int) -> list[int]:
        """The tokens that are expected next; empty without a match. advance() must have taken in all there are."""
        if self._next is None:
            return []
        token_ids, start = self._token_ids, self._next
        # Past the end of the sequence a match goes on with what is guessed itself: a text that repeats a short period.
        period = len(token_ids) - start
        return [token_ids[start + index % period] for index in range(max_tokens)]

    def chances(self, max_tokens: int) -> list[float]:
        """For each token of guess(), how likely it and all before it are right."""
        if self._next is None:
            return []
        chances, chance = [], 1.0
        for index in range(max_tokens):
            chance *= self._rates[_kind(self._length + index)].value
            chances.append(chance)
        return chances

    def _add(self, position: int, token_id: int) -> None:
        if self._next is not None:
            is_hit = self._token_ids[self._next] == token_id
            if position >= self._num_prompt_tokens:
                self._rates[_kind(self._length)].observe(is_hit)
            self._next = self._next + 1 if is_hit else None
            self._length += 1
        for size, places in zip(SIZES, self._places, strict=True):
            if position + 1 < size:
                continue
            ngram = tuple(self._token_ids[position + 1 - size : position + 1])
            if self._next is None and ngram in places:
                self._next, self._length = places[ngram], size
            places[ngram] = position + 1


def _kind(length: int) -> int:
    return sum(length >= bound for bound in BOUNDS)
