"""Shorter embeddings, for models that were trained so that the first numbers say the most (Matryoshka)."""

import math
from collections.abc import Sequence

from mlxserve.errors import InvalidParameter


def shortened(vector: Sequence[float], dimensions: int | None) -> list[float]:
    """The first `dimensions` numbers, scaled to length 1; the vector itself for None.

    Raises:
        InvalidParameter: it has not that many.
    """
    if dimensions is None or dimensions == len(vector):
        return list(vector)
    if dimensions > len(vector):
        raise InvalidParameter(
            f"'dimensions' is {dimensions}, and this model's embeddings have {len(vector)} numbers.",
            param="dimensions",
        )
    cut = vector[:dimensions]
    length = math.sqrt(math.fsum(value * value for value in cut))
    return [value / length for value in cut] if length > 0.0 else list(cut)
