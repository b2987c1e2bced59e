"""Chooses the next token of every decode row, each under its own parameters, in a few vectorised operations.

Rows fall into four kinds, and each kind does only the work it needs over a vocabulary of V tokens:

| kind      | parameters             | work over V                                                           |
|-----------|------------------------|-----------------------------------------------------------------------|
| greedy    | temperature 0          | argmax                                                                |
| whole     | no top_k, no top_p     | exp, cumulative sum (min_p is a threshold below the largest logit)    |
| top-k     | top_k                  | partition (sort, where top_k is above NUM_CANDIDATES)                 |
| open      | top_p without top_k    | partition, exp and sum; again with more for rows that fall short      |

A penalty, a bias or a ban first changes the logits of the few tokens it is about (adjustment.py); typical_p puts all
other tokens at minus infinity, for which it sorts the vocabulary. Rows that want neither never pay for it.

Tokens are ranked by logit, larger first, and among equal logits by token id, smaller first. Every cut keeps a prefix of
this ranking, so what is kept does not depend on how a partition orders equals, and top_k 1 is the greedy token.

Masks come first: a token that a row's constraint does not allow is as if the model gave it no probability. Reported
log-probabilities stay those of the model's own distribution.

A token is drawn by inverse CDF from one uniform number, a function of (seed, output_index) alone. No row's arithmetic
involves another row, so a seeded request gets the same tokens alone or in any batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import mlx.core as mx

from mlxserve.core.constraint import TokenMasks
from mlxserve.core.step import DecodeRow, SampledToken
from mlxserve.runner.adjustment import adjust, needs_adjusting
from mlxserve.runner.logprobs import LogprobArrays, logprob_arrays
from mlxserve.runner.ranking import cumsum, most_likely
from mlxserve.runner.token_mask import apply_masks

NUM_CANDIDATES = 1024
CANDIDATE_GROWTH = 8
MIN_TEMPERATURE = 1e-20
"""Lower ones behave alike, and would underflow to 0 in float32."""
TOP_P_ROUNDING = 1e-6
"""Part of top_p by which a float32 sum may fall short of it and still count as having reached it."""

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_UINT64 = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """Unevaluated tokens of one step."""

    token_ids: mx.array
    """(B,) int32, in the order of the rows."""
    logprobs: LogprobArrays | None

    def arrays(self) -> list[mx.array]:
        """What collect() reads: evaluate these together with the rest of the step."""
        return [self.token_ids, *([] if self.logprobs is None else self.logprobs.arrays())]

    def collect(self) -> tuple[SampledToken, ...]:
        """One SampledToken for each row, in order. Waits for the arrays if they are not evaluated yet."""
        logprobs = {} if self.logprobs is None else self.logprobs.collect()
        return tuple(
            SampledToken(token_id, logprobs.get(index)) for index, token_id in enumerate(_to_list(self.token_ids))
        )


class _Kind(NamedTuple):
    """What has to be done for a row."""

    cut: str
    is_adjusted: bool
    is_typical: bool


class Sampler:
    """`num_candidates`: how many of the most likely tokens a ranked row looks at first; the whole row, where needed."""

    def __init__(self, num_candidates: int = NUM_CANDIDATES) -> None:
        self.num_candidates = num_candidates

    def sample(
        self,
        logits: mx.array,
        rows: Sequence[DecodeRow],
        token_ids: mx.array | None = None,
        masks: TokenMasks | None = None,
    ) -> SampleOutput:
        """Choose one token for each row of `logits`, (B, V) of any float type, B >= 1; row i belongs to rows[i].

        `token_ids`, (B,): the tokens at the rows' positions, where rows do not know them (DecodeRow.token_id is None).
        `masks` are there if some row is constrained.

        Nothing is evaluated, with one exception: a batch with an open row (top_p without top_k) evaluates whether its
        candidates reach top_p, and with it the logits.
        """
        vocab_size = logits.shape[-1]
        allowed = logits if masks is None else apply_masks(logits, rows, masks)
        by_kind: dict[_Kind, list[int]] = {}
        for index, row in enumerate(rows):
            by_kind.setdefault(self._kind(row, vocab_size), []).append(index)
        order: list[int] = []
        chosen: list[mx.array] = []
        for kind, indices in by_kind.items():
            kind_logits = _take_rows(allowed, indices)
            kind_rows = [rows[index] for index in indices]
            if kind.is_adjusted:
                last_ids = None if token_ids is None else _take_rows(token_ids, indices)
                kind_logits = adjust(kind_logits.astype(mx.float32), kind_rows, last_ids)
            if kind.is_typical:
                kind_logits = _keep_typical(kind_logits.astype(mx.float32), kind_rows)
            order += indices
            chosen.append(self._choose(kind.cut, kind_logits, kind_rows).astype(mx.int32))
        chosen_ids = _in_row_order(chosen, order)
        asked = [(index, row.sampling.num_logprobs) for index, row in enumerate(rows)]
        num_top = {index: count for index, count in asked if count is not None}
        return SampleOutput(chosen_ids, logprob_arrays(logits, chosen_ids, num_top) if num_top else None)

    def _kind(self, row: DecodeRow, vocab_size: int) -> "_Kind":
        is_adjusted = needs_adjusting(row)
        if row.sampling.is_greedy:
            return _Kind("greedy", is_adjusted, is_typical=False)
        return _Kind(self._cut(row, vocab_size), is_adjusted, is_typical=row.sampling.typical_p < 1.0)

    def _cut(self, row: DecodeRow, vocab_size: int) -> str:
        if top_k := _top_k(row, vocab_size):
            return "top-k" if top_k <= self.num_candidates else "sorted"
        return "open" if row.sampling.top_p < 1.0 else "whole"

    def _choose(self, cut: str, logits: mx.array, rows: Sequence[DecodeRow]) -> mx.array:
        vocab_size = logits.shape[-1]
        num_candidates = min(self.num_candidates, vocab_size)
        match cut:
            case "greedy":
                return mx.argmax(logits, axis=-1)
            case "whole":
                return _draw_whole(logits.astype(mx.float32), rows)
            case "top-k":
                return _draw_ranked(logits.astype(mx.float32), rows, num_candidates)[0]
            case "sorted":
                return _draw_ranked(logits.astype(mx.float32), rows, vocab_size)[0]
            case _:
                return _draw_open(logits.astype(mx.float32), rows, num_candidates)


def uniform(seed: int, output_index: int) -> float:
    """The random number in [0, 1) of draw `output_index` under `seed`: a multiple of 2**-24, so exact in float32.

    SplitMix64 (Steele, Lea and Flood 2014), whose state is a plain counter, so any draw can be had without those
    before it; it costs a microsecond a row where setting up numpy's Philox costs about ten. The counter starts at the
    mixed seed, which puts neighbouring seeds far apart on its cycle.
    """
    return (_mix64(_mix64(seed) + (output_index + 1) * _GOLDEN_GAMMA) >> 40) * 2.0**-24


def _mix64(value: int) -> int:
    value &= _UINT64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _UINT64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _UINT64
    return value ^ (value >> 31)


def _draw_whole(logits: mx.array, rows: Sequence[DecodeRow]) -> mx.array:
    """Draw from all V tokens, or those that min_p leaves, in order of token id. Returns (S,) ids.

    Each bound between two tokens is off by 2**-24 for the grid of the uniform numbers and by the rounding of the
    cumulative sum, at most (256 + V / 256) * 2**-24 of the whole: 3e-5 for 49,152 tokens, some 1e-6 in practice.
    """
    best = mx.argmax(logits, axis=-1, keepdims=True)
    weights = _weights(logits, mx.take_along_axis(logits, best, axis=-1), rows)
    weights = mx.where(weights >= _column([row.sampling.min_p for row in rows]), weights, 0.0)
    cumulative = cumsum(weights)
    hit = (cumulative > _uniforms(rows) * cumulative[:, -1:]) & (weights > 0.0)
    # Rounding of a parallel scan may leave no token above the target when the uniform number is next to 1.
    index = mx.where(hit.any(axis=-1, keepdims=True), mx.argmax(hit, axis=-1, keepdims=True), best)
    return index.squeeze(-1)


def _draw_open(logits: mx.array, rows: Sequence[DecodeRow], num_candidates: int) -> mx.array:
    """Draw for rows with top_p and no top_k, and again from more candidates where they do not reach top_p."""
    token_ids, is_complete = _draw_ranked(logits, rows, num_candidates)
    if num_candidates == logits.shape[-1]:
        return token_ids
    complete = _to_list(is_complete)
    if all(complete):
        return token_ids
    short = [index for index, flag in enumerate(complete) if not flag]
    enough = [index for index, flag in enumerate(complete) if flag]
    more = min(num_candidates * CANDIDATE_GROWTH, logits.shape[-1])
    redrawn = _draw_open(_take_rows(logits, short), [rows[index] for index in short], more)
    return _in_row_order([token_ids[mx.array(enough, dtype=mx.int32)], redrawn], enough + short)


def _draw_ranked(logits: mx.array, rows: Sequence[DecodeRow], num_candidates: int) -> tuple[mx.array, mx.array]:
    """Draw from the prefix of the ranking that top_k, top_p and min_p keep, looking at `num_candidates` tokens.

    Returns (S,) ids, and (S,) bools: whether the kept prefix ends within the candidates. Where it does not, the id is
    void. Either every row has a top_k, of num_candidates at most, or none has.
    """
    token_ids, candidates = most_likely(logits, num_candidates)
    best = candidates[:, :1]
    weights = _weights(candidates, best, rows)
    cumulative = cumsum(weights)
    before = mx.pad(cumulative[:, :-1], [(0, 0), (1, 0)])

    vocab_size = logits.shape[-1]
    top_ks = [_top_k(row, vocab_size) for row in rows]
    top_k = _column([k or num_candidates for k in top_ks], mx.int32)
    if num_candidates < vocab_size and 0 in top_ks:
        mass = _weights(logits, best, rows).sum(axis=-1, keepdims=True)
    else:
        mass = mx.take_along_axis(cumulative, top_k - 1, axis=-1)
    top_p = _column([row.sampling.top_p * (1 - TOP_P_ROUNDING) if row.sampling.top_p < 1 else mx.inf for row in rows])
    min_p = _column([row.sampling.min_p for row in rows])

    rank = mx.arange(num_candidates)
    kept = (rank < top_k) & (before < top_p * mass) & (weights >= min_p)
    kept_mass = mx.where(kept, cumulative, 0.0).max(axis=-1, keepdims=True)
    hit = kept & (weights > 0.0) & (cumulative > _uniforms(rows) * kept_mass)
    drawn = mx.take_along_axis(token_ids, mx.argmax(hit, axis=-1, keepdims=True), axis=-1)
    is_complete = (cumulative[:, -1:] >= top_p * mass) | (weights[:, -1:] < min_p)
    return drawn.squeeze(-1), is_complete.squeeze(-1)


def _keep_typical(logits: mx.array, rows: Sequence[DecodeRow]) -> mx.array:
    """(S, V) float32 logits with all tokens at minus infinity but those that typical_p keeps.

    Of tokens equally far from the entropy the one with the smaller id goes first.
    """
    scaled = logits / _temperatures(rows)
    logprobs = scaled - mx.logsumexp(scaled, axis=-1, keepdims=True)
    probabilities = mx.exp(logprobs)
    entropy = -mx.where(probabilities > 0, probabilities * logprobs, 0.0).sum(axis=-1, keepdims=True)
    ranked, _ = most_likely(-mx.abs(logprobs + entropy), logits.shape[-1])
    cumulative = cumsum(mx.take_along_axis(probabilities, ranked, axis=-1))
    before = mx.pad(cumulative[:, :-1], [(0, 0), (1, 0)])
    typical_p = _column([row.sampling.typical_p * (1 - TOP_P_ROUNDING) for row in rows])
    # The first one always: the smallest typical_p are 0 in float32.
    kept = (before < typical_p * cumulative[:, -1:]) | (mx.arange(logits.shape[-1]) == 0)
    values = mx.where(kept, mx.take_along_axis(logits, ranked, axis=-1), -mx.inf)
    return mx.put_along_axis(logits, ranked, values, axis=-1)


def _top_k(row: DecodeRow, vocab_size: int) -> int:
    """The row's top_k, or 0 where it cuts nothing."""
    return row.sampling.top_k if row.sampling.top_k < vocab_size else 0


def _weights(logits: mx.array, best: mx.array, rows: Sequence[DecodeRow]) -> mx.array:
    """Probabilities at each row's temperature, up to a factor: the most likely token has 1."""
    return mx.exp((logits - best) / _temperatures(rows))


def _temperatures(rows: Sequence[DecodeRow]) -> mx.array:
    return _column([max(row.sampling.temperature, MIN_TEMPERATURE) for row in rows])


def _take_rows(logits: mx.array, indices: list[int]) -> mx.array:
    return logits if len(indices) == logits.shape[0] else logits[mx.array(indices)]


def _in_row_order(parts: list[mx.array], order: list[int]) -> mx.array:
    """Concatenate (S_i,) parts whose elements belong to rows `order`, and put them in the order of the rows."""
    joined = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    if order == list(range(len(order))):
        return joined
    position = {row: at for at, row in enumerate(order)}
    return joined[mx.array([position[row] for row in range(len(order))])]


def _column(values: list[float] | list[int], dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(values, dtype=dtype)[:, None]


def _uniforms(rows: Sequence[DecodeRow]) -> mx.array:
    return _column([uniform(row.seed, row.output_index) for row in rows])


def _to_list(array: mx.array) -> list[Any]:
    return cast(list[Any], array.tolist())
