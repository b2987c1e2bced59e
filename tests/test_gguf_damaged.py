"""A damaged GGUF file is one clear error, and a sound header is read whole."""

import os
import random
import struct

import gguf as gguf_package
import pytest
from helpers_gguf import F32, Q4_1, build_model, open_, read_all, refusal
from tiny_gguf import TinyGguf

from mlxserve.errors import ModelLoadError
from mlxserve.store import gguf
from mlxserve.store.gguf_file import GgufFile

# --- damaged files ---


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the file is empty"),
        (b"GGUF", "not a GGUF file"),
        (b"\x80\x02" + bytes(100), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1 is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "more than 24 bytes can hold"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**64 - 1), "more than 24 bytes can hold"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**40) + bytes(99), "the file is damaged"),
        (b"GGUF" + struct.pack("<IQQQ3sIIQ", 3, 0, 1, 3, b"key", 9, 8, 2**61) + bytes(99), "cut short"),
        (b"GGUF" + struct.pack("<IQQQ3sIIQ", 3, 0, 1, 3, b"key", 9, 4, 2**61) + bytes(99), "cut short"),
        (b"GGUF" + struct.pack("<IQQQ3sIIQ", 3, 0, 1, 3, b"key", 9, 9, 1) + bytes(99), "array of arrays"),
        (b"GGUF" + struct.pack("<IQQQ3sI", 3, 0, 1, 3, b"key", 77) + bytes(99), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQQ3sIQ2s", 3, 0, 1, 3, b"key", 8, 2, b"\xff\xfe") + bytes(99), "not UTF-8"),
    ],
)
def test_garbage(tmp_path, content, words):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert words in refusal(path)


@pytest.mark.parametrize(
    ("dimensions", "offset", "words"),
    [
        ((2**32, 2**32, 2**32, 2**32), 0, "the file is cut short: tensor t ends at byte"),
        ((8,), 2**64 - 32, "the file is cut short: tensor t ends at byte"),
        ((0,), 0, "a dimension of 0"),
        ((2,) * 5, 0, "5 dimensions"),
        ((), 0, "0 dimensions"),
    ],
)
def test_impossible_tensors(tmp_path, dimensions, offset, words):
    path = tmp_path / "m.gguf"
    header = struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", len(dimensions)) + struct.pack(
        f"<{len(dimensions)}Q", *dimensions
    )
    path.write_bytes(b"GGUF" + header + struct.pack("<IQ", 0, offset) + bytes(200))
    assert words in refusal(path)


def test_a_file_cut_anywhere_is_refused(tmp_path):
    whole = TinyGguf("llama", Q4_1).write(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    for size in [*rng.sample(range(1, len(whole)), 150), len(whole) - 1]:
        path.write_bytes(whole[:size])
        assert "cut short" in refusal(path) or size < 24 or "more than" in refusal(path), size


def test_a_head_tells_all_or_that_it_is_too_short(tmp_path):
    path = TinyGguf("llama", Q4_1).write(tmp_path / "whole.gguf")
    data, whole = path.read_bytes(), open_(path)
    start = min(tensor.offset for tensor in whole.tensors.values())
    head = tmp_path / "head.gguf"
    lengths = [*range(0, start, 37), start]
    told = []
    for length in lengths:
        head.write_bytes(data[:length])
        try:
            found = GgufFile.parse(head, model="m", size=len(data))
            assert (found.metadata, found.tensors) == (whole.metadata, whole.tensors)
            told.append(length)
        except EOFError:
            pass
    assert told
    assert told == lengths[-len(told) :]
    assert min(told) > start - 2 * 37


def test_a_file_cut_after_it_was_opened(tmp_path):
    path = TinyGguf("llama", F32).write(tmp_path / "m.gguf")
    file = open_(path)
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(ModelLoadError, match="is cut short"):
        build_model(file, gguf.read_config(file), quantized=False)


def test_flipped_bytes_load_or_are_refused_and_nothing_else(tmp_path):
    whole = TinyGguf("llama", Q4_1).write(tmp_path / "whole.gguf").read_bytes()
    header_size = min(tensor.offset for tensor in open_(tmp_path / "whole.gguf").tensors.values())
    path = tmp_path / "flipped.gguf"
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    refusals = []
    for _ in range(300):
        content = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(header_size)] = rng.choice((0, 1, 0x7F, 0xFF, rng.randrange(256)))
        path.write_bytes(content)
        try:
            read_all(path, quantized=True)
        except ModelLoadError as error:
            refusals.append(str(error))
    assert len(refusals) > 30
    assert all(message.startswith(str(path)) for message in refusals)


def test_unreadable(tmp_path):
    with pytest.raises(ModelLoadError, match="cannot be read: No such file"):
        open_(tmp_path / "none.gguf")


def test_metadata_of_every_type(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf_package.GGUFWriter(path, "llama")
    for kind, value in (
        ("uint8", 200),
        ("int8", -3),
        ("uint16", 60000),
        ("int16", -300),
        ("uint64", 2**63),
        ("int64", -(2**40)),
    ):
        getattr(writer, f"add_{kind}")(kind, value)
    writer.add_float64("float64", 0.1)
    writer.add_bool("bool", True)
    writer.add_string("string", "naïve ▁")
    writer.add_array("strings", ["", "ü", "x" * 70000])
    writer.add_array("floats", [0.5, -2.0])
    writer.add_array("bools", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = open_(path).metadata
    assert (metadata["uint8"], metadata["int8"], metadata["uint16"], metadata["int16"]) == (200, -3, 60000, -300)
    assert (metadata["uint64"], metadata["int64"], metadata["float64"]) == (2**63, -(2**40), 0.1)
    assert metadata["bool"] is True
    assert (metadata["string"], metadata["strings"]) == ("naïve ▁", ["", "ü", "x" * 70000])
    assert (metadata["floats"], metadata["bools"]) == ([0.5, -2.0], [True, False])
