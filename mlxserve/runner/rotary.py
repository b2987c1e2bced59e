"""Rotary embedding once a pass instead of twice a layer, for MLX's CPU backend.

A rotary embedding is linear: rope(x, position) = x @ R(position) with one matrix R a position, whatever the variant.
MLX's CPU kernel computes sines and cosines anew in every call; here R comes from the model's own rope, applied to the
identity, once for each pass, and every layer multiplies by it.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

_PROBE_POSITIONS = (0, 3, 700)


class Rotations:
    """The matrices of the pass that is being built, for each distinct rope of a model."""

    def __init__(self) -> None:
        self._positions: mx.array | None = None
        self._matrices: dict[tuple[int, int], mx.array] = {}

    def begin(self, positions: mx.array) -> None:
        """`positions` (tokens,): what the pass's LayerViews give as offset."""
        self._positions = positions

    def end(self) -> None:
        """Keep nothing: arrays of a traced pass must not outlive it."""
        self._positions = None
        self._matrices.clear()

    def matrix(self, rope: "SharedRope", offset: Any, head_dim: int) -> mx.array | None:
        """(tokens, head_dim, head_dim); None if `offset` is not this pass's: another cache's, or nothing is built."""
        positions = self._positions
        if positions is None or offset is not positions:
            return None
        key = rope.kind, head_dim
        if key not in self._matrices:
            self._matrices[key] = _matrices_of(rope.stock, positions, head_dim)
        return self._matrices[key]


class SharedRope(nn.Module):  # type: ignore[misc]
    """Takes the place of a layer's rope: multiplies in a pass over the block cache, is the stock one otherwise."""

    def __init__(self, stock: nn.Module, kind: int, rotations: Rotations) -> None:
        super().__init__()
        self.stock = stock
        self.kind = kind
        self._rotations = rotations

    def __call__(self, x: mx.array, offset: Any = 0, **kwargs: Any) -> mx.array:
        """x (tokens, heads, 1, head_dim)."""
        matrix = None if kwargs or x.dtype != mx.float32 else self._rotations.matrix(self, offset, x.shape[-1])
        if matrix is None:
            stock: mx.array = self.stock(x, offset=offset, **kwargs)
            return stock
        return (x.squeeze(2) @ matrix)[:, :, None]


def share(model: nn.Module, rotations: Rotations, head_dim: int) -> None:
    """Let all layers of a model whose `rope` does the same share its matrices."""
    samples: list[mx.array] = []
    for module in model.modules():
        stock = module.get("rope")
        if not isinstance(stock, nn.Module) or isinstance(stock, SharedRope):
            continue
        sample = _matrices_of(stock, mx.array(_PROBE_POSITIONS), getattr(stock, "dims", head_dim))
        same = (kind for kind, other in enumerate(samples) if mx.array_equal(sample, other))
        kind = next(same, len(samples))
        if kind == len(samples):
            samples.append(sample)
        module.rope = SharedRope(stock, kind, rotations)


def _matrices_of(rope: nn.Module, positions: mx.array, head_dim: int) -> mx.array:
    """R of each position: row i is what the rope makes of the i-th unit vector."""
    num_tokens = positions.shape[0]
    identity = mx.broadcast_to(mx.eye(head_dim)[None, :, None], (num_tokens, head_dim, 1, head_dim))
    rotated: mx.array = rope(identity, offset=positions)
    return rotated.reshape(num_tokens, head_dim, head_dim)
