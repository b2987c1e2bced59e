"""What tests of GGUF files share: the types of tensors, and opening, reading and refusing a file."""

import math
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest
from gguf import GGMLQuantizationType

from mlxserve.core.pieces import finish
from mlxserve.errors import ModelLoadError
from mlxserve.store import gguf, gguf_tokenizer
from mlxserve.store.gguf_file import GgufFile

Q4_0, Q4_1, Q8_0 = GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0
F16, BF16, F32 = GGMLQuantizationType.F16, GGMLQuantizationType.BF16, GGMLQuantizationType.F32


def open_(path: Path) -> GgufFile:
    return GgufFile.open(path, model="tiny")


def build_model(file: GgufFile, config: dict[str, Any], *, quantized: bool) -> nn.Module:
    return finish(gguf.build_pieces(file, config, quantized=quantized, size=math.inf))


def read_all(path: Path, *, quantized: bool = False):
    file = open_(path)
    config = gguf.read_config(file)
    gguf_tokenizer.build_tokenizer(file)
    return build_model(file, config, quantized=quantized)


def refusal(path: Path) -> str:
    """The message with which loading fails; it names the file."""
    with pytest.raises(ModelLoadError) as caught:
        read_all(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert caught.value.model == "tiny"
    return message.removeprefix(str(path))
