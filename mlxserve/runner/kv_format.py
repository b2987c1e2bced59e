"""How keys and values lie in a pool: as they are, or as codes of 8 or 4 bits with a scale and a bias for each vector.

A pool is one array whatever its format, (num_blocks, Hkv, block_size, width): one row for each position and head. So
blocks are allocated, copied and written in place alike, and a row depends on nothing but the vector it was made from.
"""

import functools
import math
from typing import Protocol

import mlx.core as mx
import numpy as np

HEADER_BYTES = 4
"""Of a quantised row: its scale and its bias, each a bfloat16."""
_ROUND_OUT = 2.0**-8
"""One and a bit times the most that rounding to bfloat16 changes a number, as a share of it."""
_LEAST_SCALE = 1e-30
"""Of a vector whose elements are all the same. Its codes are 0, whatever the scale."""


class KVFormat(Protocol):
    """What stands between a layer and its pools. D is the dimension of a head."""

    @property
    def suffix(self) -> str:
        """What to put after the name of the model's own type when this is told apart from other formats."""
        ...

    def row(self, dim: int, dtype: mx.Dtype) -> tuple[int, mx.Dtype]:
        """Width and type of the row of a vector of `dim` elements that the model computes in `dtype`."""
        ...

    def encode(self, vectors: mx.array) -> mx.array:
        """(..., D) keys or values -> (..., width) rows."""
        ...

    def decode(self, rows: mx.array, dtype: mx.Dtype) -> mx.array:
        """(..., width) rows -> (..., D) vectors, turned as turn() turns queries."""
        ...

    def open(self, pool: mx.array, blocks: mx.array, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """A pool with vectors (num_blocks, Hkv, block_size, D) for rows, and where in it `blocks` (n,) are."""
        ...

    def turn(self, queries: mx.array) -> mx.array:
        """(..., D) queries such that they attend to decoded keys as the given ones would to the keys encoded."""
        ...

    def turn_back(self, outputs: mx.array) -> mx.array:
        """(..., D) sums of decoded values -> sums of the values encoded."""
        ...


class PlainFormat:
    """The vectors themselves, in the model's own type."""

    suffix = ""

    def row(self, dim: int, dtype: mx.Dtype) -> tuple[int, mx.Dtype]:
        return dim, dtype

    def encode(self, vectors: mx.array) -> mx.array:
        return vectors

    def decode(self, rows: mx.array, dtype: mx.Dtype) -> mx.array:
        return rows

    def open(self, pool: mx.array, blocks: mx.array, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        return pool, blocks

    def turn(self, queries: mx.array) -> mx.array:
        return queries

    def turn_back(self, outputs: mx.array) -> mx.array:
        return outputs


PLAIN = PlainFormat()


class QuantisedFormat:
    """Rows of bytes: D codes of `bits` bits, then scale and bias. An element is code * scale + bias.

    With 4 bits, byte i holds element i in its low half and element i + D/2 in its high one.

    A few elements of a key are far larger than the rest, always the same ones, and one scale for all would leave the
    others next to nothing. So vectors are turned first by an orthogonal matrix, which spreads every element over all
    (QuaRot, Ashkboos et al. 2024). Dot products do not change when queries are turned too, and a sum of turned values
    is turned back once, so stored vectors never are.
    """

    def __init__(self, bits: int) -> None:
        self.suffix = f" in {bits} bits"
        self._bits = bits

    def row(self, dim: int, dtype: mx.Dtype) -> tuple[int, mx.Dtype]:
        """Raises ValueError if vectors of this dimension do not fill whole bytes."""
        if dim * self._bits % 8:
            raise ValueError(f"its heads of dimension {dim} do not fill whole bytes in {self._bits} bits; 8 bits do")
        return dim * self._bits // 8 + HEADER_BYTES, mx.uint8

    def encode(self, vectors: mx.array) -> mx.array:
        vectors = vectors.astype(mx.float32) @ _rotation(vectors.shape[-1])
        low = vectors.min(axis=-1, keepdims=True)
        # Both are rounded outwards, so that every element lies between code 0 and the last one: nothing is cut off.
        bias = (low - low.abs() * _ROUND_OUT).astype(mx.bfloat16)
        span = vectors.max(axis=-1, keepdims=True) - bias.astype(mx.float32)
        scale = mx.maximum(span * ((1 + _ROUND_OUT) / (2**self._bits - 1)), _LEAST_SCALE).astype(mx.bfloat16)
        codes = mx.round((vectors - bias.astype(mx.float32)) / scale.astype(mx.float32)).astype(mx.uint8)
        if self._bits == 4:
            lower, upper = mx.split(codes, 2, axis=-1)
            codes = lower | (upper << 4)
        return mx.concatenate([codes, scale.view(mx.uint8), bias.view(mx.uint8)], axis=-1)

    def decode(self, rows: mx.array, dtype: mx.Dtype) -> mx.array:
        codes = rows[..., :-HEADER_BYTES]
        if self._bits == 4:
            codes = mx.concatenate([codes & 15, codes >> 4], axis=-1)
        scale, bias = _header(rows)
        return (codes.astype(mx.float32) * scale[..., None] + bias[..., None]).astype(dtype)

    def open(self, pool: mx.array, blocks: mx.array, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        return self.decode(pool[blocks], dtype), mx.arange(blocks.shape[0])

    def turn(self, queries: mx.array) -> mx.array:
        return queries @ _rotation(queries.shape[-1]).astype(queries.dtype)

    def turn_back(self, outputs: mx.array) -> mx.array:
        return outputs @ _rotation(outputs.shape[-1]).T.astype(outputs.dtype)

    def products(self, queries: mx.array, rows: mx.array) -> mx.array:
        """Dot products of (..., G, D) turned queries and (..., n, width) rows: (..., G, n), float32.

        The same as with decoded rows, for far less: sum(q * (code * scale + bias)) = sum(q * code) * scale + sum(q) *
        bias. And what a product reads are whole rows, since cutting the header off would be another copy of them.
        """
        header = [(0, 0)] * (queries.ndim - 1) + [(0, HEADER_BYTES)]
        codes = self._codes(rows)
        parts = zip(mx.split(queries, len(codes), axis=-1), codes, strict=True)
        products = sum((mx.pad(part, header) @ each.swapaxes(-1, -2) for part, each in parts), start=mx.array(0.0))
        scale, bias = (number[..., None, :] for number in _header(rows))
        return products * scale + queries.sum(axis=-1, keepdims=True) * bias

    def sums(self, weights: mx.array, rows: mx.array) -> mx.array:
        """Sums of (..., n, width) rows by (..., G, n) weights: (..., G, D) turned vectors, float32."""
        scale, bias = (number[..., None, :] for number in _header(rows))
        scaled = weights * scale
        parts = [(scaled @ each)[..., :-HEADER_BYTES] for each in self._codes(rows)]
        sums = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)
        return sums + (weights * bias).sum(axis=-1, keepdims=True)

    def _codes(self, rows: mx.array) -> list[mx.array]:
        """The codes of a half of D each, or of all of it; float32, with the header's bytes as HEADER_BYTES more."""
        parts = [rows] if self._bits == 8 else [rows & 15, rows >> 4]
        return [part.astype(mx.float32) for part in parts]


def _header(rows: mx.array) -> tuple[mx.array, mx.array]:
    """Scale and bias of (..., width) rows, (...) each, float32."""
    numbers = rows[..., -HEADER_BYTES:].view(mx.bfloat16).astype(mx.float32)
    return numbers[..., 0], numbers[..., 1]


def kv_format(bits: int | None) -> KVFormat:
    """The format of the setting of that name."""
    return PLAIN if bits is None else QuantisedFormat(bits)


@functools.cache
def _rotation(dim: int) -> mx.array:
    """The orthogonal matrix of the discrete cosine transform (type II): there is one of every dimension."""
    positions = np.arange(dim)
    matrix = np.cos(math.pi / dim * (positions[:, None] + 0.5) * positions) * math.sqrt(2 / dim)
    matrix[:, 0] /= math.sqrt(2)
    return mx.array(matrix.astype(np.float32))
