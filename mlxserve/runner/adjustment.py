"""Changes the logits of single tokens before anything is chosen: bias, penalties, bans.

All of it is one gather and one scatter over the tokens that a row's parameters name. What a row's tokens are is known
from the row, but for the last one, which in a step that runs ahead is still being computed: its part is done on the
device, always, so that there is one way for both.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxserve.core.step import DecodeRow
from mlxserve.errors import EngineError


def needs_adjusting(row: DecodeRow) -> bool:
    sampling = row.sampling
    return bool(
        sampling.logit_bias or row.banned_token_ids or sampling.penalises_repetition or sampling.penalises_answer
    )


def adjust(logits: mx.array, rows: Sequence[DecodeRow], token_ids: mx.array | None = None) -> mx.array:
    """(S, V) float32 logits after steps 1 to 4 of SamplingParams, which gives the formulas.

    `token_ids`, (S,): the tokens at the rows' positions; needed where rows do not know them.
    """
    last = _last_ids(rows, token_ids)
    tables = [_Table.of(row, logits.shape[-1]) for row in rows]
    width = max(len(table.ids) for table in tables)
    ids = mx.array([_padded(table.ids, width, -1) for table in tables])
    ids = mx.where(ids < 0, last, ids)
    is_last = ids == last
    counts = _merged([_padded(table.counts, width, 0) for table in tables], is_last)
    bias = _merged([_padded(table.bias, width, 0) for table in tables], is_last)
    is_recent = _merged([_padded(table.is_recent, width, 0) for table in tables], is_last) > 0

    counts = counts + is_last * _column([int(row.output_index > 0) for row in rows])
    is_recent = is_recent | is_last
    repetition = _column([row.sampling.repetition_penalty if row.sampling.repeat_last_n else 1.0 for row in rows])
    frequency = _column([row.sampling.frequency_penalty for row in rows])
    presence = _column([row.sampling.presence_penalty for row in rows])

    values = mx.take_along_axis(logits, ids, axis=-1) + bias
    values = mx.where(is_recent, mx.where(values > 0, values / repetition, values * repetition), values)
    values = values - counts * frequency - (counts > 0) * presence
    return mx.put_along_axis(logits, ids, values, axis=-1)


@dataclass(frozen=True, slots=True)
class _Table:
    """The tokens that a row's parameters name, each once, and what is known of each but for the row's last token."""

    ids: list[int]
    """Ends with -1: the last token, whichever it is."""
    counts: list[int]
    """Occurrences in the answer."""
    is_recent: list[int]
    """1: within the window of the repetition penalty."""
    bias: list[float]
    """Minus infinity for a ban."""

    @classmethod
    def of(cls, row: DecodeRow, vocab_size: int) -> "_Table":
        sampling, history = row.sampling, row.history
        counts: Counter[int] = Counter()
        if sampling.penalises_answer and row.output_index > 1:
            counts.update(history[-(row.output_index - 1) :])
        recent: set[int] = set()
        if sampling.penalises_repetition and sampling.repeat_last_n != 1:
            recent.update(history[-(sampling.repeat_last_n - 1) :] if sampling.repeat_last_n > 0 else history)
        bias = dict(sampling.logit_bias) | dict.fromkeys(row.banned_token_ids, -mx.inf)
        # Some tokenizers have more tokens than the model.
        ids = [token_id for token_id in {**counts, **dict.fromkeys(recent), **bias} if token_id < vocab_size]
        return cls(
            [*ids, -1],
            [*(counts[token_id] for token_id in ids), 0],
            [*(int(token_id in recent) for token_id in ids), 0],
            [*(bias.get(token_id, 0.0) for token_id in ids), 0.0],
        )


def _last_ids(rows: Sequence[DecodeRow], token_ids: mx.array | None) -> mx.array:
    """(S, 1)"""
    if token_ids is not None:
        return token_ids[:, None]
    known = [row.token_id for row in rows if row.token_id is not None]
    if len(known) < len(rows):
        raise EngineError("the token before the one to be chosen is neither known nor being computed")
    return mx.array(known)[:, None]


def _padded(values: list[int] | list[float], width: int, fill: int) -> list[int | float]:
    return [*values, *[fill] * (width - len(values))]


def _merged(values: list[list[int | float]], is_last: mx.array) -> mx.array:
    """(S, width) float32, where all columns that mean the row's last token have the sum of what these say.

    Such a token can be named twice, by its id and as the last one; writing it twice is harmless if both write the same.
    """
    array = mx.array(values, dtype=mx.float32)
    return mx.where(is_last, mx.where(is_last, array, 0.0).sum(axis=-1, keepdims=True), array)


def _column(values: list[float] | list[int]) -> mx.array:
    return mx.array(values, dtype=mx.float32)[:, None]
