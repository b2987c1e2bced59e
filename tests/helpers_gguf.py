"""What tests of GGUF files share: the types of tensors, and opening, reading and refusing a file."""

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from mlxserve.errors import ModelLoadError
from mlxserve.store import gguf, gguf_tokenizer
from mlxserve.store.gguf_file import GgufFile

Q4_0, Q4_1, Q8_0 = GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0
F16, BF16, F32 = GGMLQuantizationType.F16, GGMLQuantizationType.BF16, GGMLQuantizationType.F32


def open_(path: Path) -> GgufFile:
    return GgufFile.open(path, model="tiny")


def read_all(path: Path, *, quantized: bool = False):
    file = open_(path)
    config = gguf.read_config(file)
    gguf_tokenizer.build_tokenizer(file)
    return gguf.build_model(file, config, quantized=quantized)


def refusal(path: Path) -> str:
    """The message with which loading fails; it names the file."""
    with pytest.raises(ModelLoadError) as caught:
        read_all(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert caught.value.model == "tiny"
    return message.removeprefix(str(path))
