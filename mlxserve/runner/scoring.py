"""Log-probabilities of a prompt's tokens, computed a few at a time: the logits of a whole chunk can take a gigabyte."""

from collections.abc import Callable

import mlx.core as mx

from mlxserve.core.step import PrefillChunk, TokenLogprobs
from mlxserve.runner.logprobs import logprob_arrays

MAX_SCORED_TOKENS = 64
"""Positions whose logits are there at the same time."""


def score(
    chunk: PrefillChunk, first: int, hidden: mx.array, head: Callable[[mx.array], mx.array]
) -> list[TokenLogprobs]:
    """Of the scored tokens after positions first, first + 1, ... of a chunk, as far as `hidden` goes.

    `hidden`: (tokens, ...), evaluated. `head` makes logits, (tokens, vocabulary), of a slice of it.
    """
    scored_ids = chunk.scored_ids[first : first + hidden.shape[0]]
    scores: list[TokenLogprobs] = []
    for begin in range(0, len(scored_ids), MAX_SCORED_TOKENS):
        token_ids = scored_ids[begin : begin + MAX_SCORED_TOKENS]
        logits = head(hidden[begin : begin + len(token_ids)])
        logprobs = logprob_arrays(logits, mx.array(token_ids), dict.fromkeys(range(len(token_ids)), chunk.num_top))
        mx.eval(logprobs.arrays())
        scores += logprobs.collect().values()
    return scores
