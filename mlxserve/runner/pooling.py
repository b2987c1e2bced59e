"""Hidden states of a sequence made into one vector, a piece of the sequence at a time."""

from typing import cast

import mlx.core as mx

from mlxserve.core.request import Pooling


def pool(pooling: Pooling | None, before: mx.array | None, hidden: mx.array) -> mx.array:
    """`before`: what the pieces before this one gave, (hidden size,); `hidden`: (tokens, hidden size), at least one.

    Returns (hidden size,), unevaluated: the sum so far, or the last token's.
    """
    if pooling is not Pooling.MEAN:
        return hidden[-1]
    total = mx.sum(hidden, axis=0)
    return total if before is None else before + total


def values(state: mx.array) -> tuple[float, ...]:
    """The numbers of a (hidden size,) array."""
    return tuple(cast(list[float], state.tolist()))
