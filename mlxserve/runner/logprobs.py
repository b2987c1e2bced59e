"""Log-probabilities of given tokens, and of the most likely ones in their place."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from mlxserve.core.step import TokenLogprobs
from mlxserve.runner.ranking import most_likely


@dataclass(frozen=True, slots=True)
class LogprobArrays:
    """Unevaluated log-probabilities of the rows that asked for them, in order, best tokens first."""

    row_indices: tuple[int, ...]
    num_top: tuple[int, ...]
    chosen: mx.array
    """(rows, 1) float32"""
    top_ids: mx.array
    """(rows, max(num_top)) integers"""
    top: mx.array
    """(rows, max(num_top)) float32"""

    def arrays(self) -> list[mx.array]:
        """What collect() reads."""
        return [self.chosen, self.top_ids, self.top]

    def collect(self) -> dict[int, TokenLogprobs]:
        """By row index. Waits for the arrays if they are not evaluated yet."""
        logprobs = {}
        columns = (cast(list[Any], array.tolist()) for array in self.arrays())
        for index, num_top, (logprob,), top_ids, top in zip(self.row_indices, self.num_top, *columns, strict=True):
            logprobs[index] = TokenLogprobs(logprob, tuple(zip(top_ids[:num_top], top[:num_top], strict=True)))
        return logprobs


def logprob_arrays(logits: mx.array, token_ids: mx.array, num_top: Mapping[int, int]) -> LogprobArrays:
    """Log-probabilities of token_ids, (B,), under logits, (B, V), and of the most likely tokens.

    `num_top`: row -> how many of these, for the rows that are asked for, one at least.
    """
    indices = list(num_top)
    if len(indices) < logits.shape[0]:
        logits, token_ids = logits[mx.array(indices)], token_ids[mx.array(indices)]
    logits = logits.astype(mx.float32)
    normaliser = mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logits, token_ids[:, None], axis=-1) - normaliser
    max_top = min(max(num_top.values()), logits.shape[-1])
    if max_top > 0:
        top_ids, top_logits = most_likely(logits, max_top)
        top = top_logits - normaliser
    else:
        top_ids, top = mx.zeros((len(indices), 0), dtype=mx.int32), mx.zeros((len(indices), 0))
    return LogprobArrays(tuple(indices), tuple(num_top.values()), chosen, top_ids, top)
