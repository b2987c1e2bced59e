"""A model's layers without its head, so that logits are computed only for the rows that want them.

mlx-lm's models call their layers as `self.model(...)` and put the head on all it returns. Over a pass with a long
chunk the head would cost as much as several layers, for logits nobody reads.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn


class Trunk(nn.Module):  # type: ignore[misc]
    """Stands in for a model's `model`: returns the hidden states of the first `num_rows` rows only, of all if None.

    `observe` is shown the hidden states of all rows. With `source`, its hidden states are returned and nothing is
    computed: that runs the head alone.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.num_rows: int | None = None
        # Functions and not arrays: a module takes an array that is set on it for one of its weights.
        self.observe: Callable[[Any], None] | None = None
        self.source: Callable[[], Any] | None = None

    def __call__(self, *arguments: Any, **kwargs: Any) -> Any:
        if self.source is not None:
            return self.source()
        hidden = self.inner(*arguments, **kwargs)
        if self.observe is not None:
            self.observe(hidden)
        return hidden if self.num_rows is None or not isinstance(hidden, mx.array) else hidden[: self.num_rows]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def has_trunk(model: nn.Module) -> bool:
    """Whether the model is made of `model` and a head."""
    return isinstance(model.get("model"), nn.Module)


def find_trunk(model: nn.Module) -> Trunk | None:
    """The model's trunk, put in its place on first use; None if the model is not made of `model` and a head."""
    inner = model.get("model")
    if isinstance(inner, Trunk):
        return inner
    if not isinstance(inner, nn.Module):
        return None
    model.model = trunk = Trunk(inner)
    return trunk
