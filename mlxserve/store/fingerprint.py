"""A name for a model's weights that changes when any of them does."""

import hashlib

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten


def weights_fingerprint(model: nn.Module) -> str:
    """Hexadecimal; the same in every process that has the same parameters, in whatever files they came.

    Made of each array's sums along its rows and columns as 32-bit words, which the device computes as fast as it reads
    the weights: files of other training differ, and nobody who could forge such sums need do so to change the weights.
    """
    digest = hashlib.sha256()
    parameters: list[tuple[str, mx.array]] = tree_flatten(model.parameters())
    for name, array in sorted(parameters, key=lambda item: item[0]):
        digest.update(f"{name} {array.dtype} {array.shape};".encode())
        for sums in _sums(array):
            digest.update(np.asarray(sums).tobytes())
    return digest.hexdigest()


def _sums(array: mx.array) -> list[mx.array]:
    rows = mx.contiguous(array.reshape(-1, array.shape[-1]) if array.ndim else array.reshape(1, 1))
    words = rows.view(mx.uint8)
    if words.shape[-1] % 4 == 0:
        words = rows.view(mx.uint32)
    words = words.astype(mx.uint32)
    sums = [mx.sum(words, axis=1), mx.sum(words, axis=0)]
    mx.eval(sums)
    return sums
