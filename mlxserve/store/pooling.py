"""How a model's files say that its hidden states become embeddings. None: they do not say; it was made for text."""

import json
from pathlib import Path
from typing import Any

from mlxserve.core.request import Pooling

POOLING_CONFIG = Path("1_Pooling", "config.json")
"""Where sentence-transformers keeps it."""


class UnsupportedPooling(ValueError):
    """It is neither of core.request.Pooling; the message names it."""


def of_folder(folder: Path) -> Pooling | None:
    """What sentence-transformers' configuration says.

    Raises:
        UnsupportedPooling: another kind, or a file that cannot be read.
    """
    try:
        content: Any = json.loads((folder / POOLING_CONFIG).read_text(encoding="utf-8"))
        modes = {key for key, value in content.items() if key.startswith("pooling_mode_") and value is True}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise UnsupportedPooling(f"{POOLING_CONFIG} cannot be read: {error}") from error
    known = {"pooling_mode_mean_tokens": Pooling.MEAN, "pooling_mode_lasttoken": Pooling.LAST}
    if len(modes) != 1 or not modes <= known.keys():
        found = ", ".join(sorted(modes)) or "none"
        raise UnsupportedPooling(f"pooling ({found}) is not supported, only mean and last token")
    return known[modes.pop()]


def of_gguf(number: int | None) -> Pooling | None:
    """What llama.cpp's `pooling_type` says: 0 none, 1 mean, 2 first token, 3 last token, 4 rank.

    Raises:
        UnsupportedPooling: another kind.
    """
    if number is None or number == 0:
        return None
    known = {1: Pooling.MEAN, 3: Pooling.LAST}
    if number not in known:
        raise UnsupportedPooling(f"pooling_type {number} is not supported, only 1 (mean) and 3 (last token)")
    return known[number]
