"""GGUF files are read to the bit, their tokenizer is the model's own, and a damaged file is one clear error."""

import itertools
import json
import os
import random
import struct
import unicodedata
from pathlib import Path

import gguf as gguf_package
import mlx.core as mx
import numpy as np
import pytest
import tiny_gguf
from gguf import GGMLQuantizationType, TokenType
from mlx.utils import tree_flatten
from mlx_lm.models import llama, qwen2, qwen3
from tiny_gguf import TinyGguf

from mlxserve.errors import ModelLoadError
from mlxserve.store import gguf, gguf_tokenizer
from mlxserve.store.gguf_file import GgufFile
from mlxserve.store.hub import find_local
from mlxserve.store.registry import Registry

MODELS = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3}
Q4_0, Q4_1, Q8_0 = GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0
F16, BF16, F32 = GGMLQuantizationType.F16, GGMLQuantizationType.BF16, GGMLQuantizationType.F32
PROMPT = mx.array([[5, 80, 9, 200, 33, 7, 64, 101]])


def open_(path: Path) -> GgufFile:
    return GgufFile.open(path, model="tiny")


def read_model(path: Path, *, quantized: bool):
    file = open_(path)
    return gguf.build_model(file, gguf.read_config(file), quantized=quantized)


def reference_model(config, weights):
    """mlx-lm's own model with these float32 weights."""
    module = MODELS[config["model_type"]]
    model = module.Model(module.ModelArgs.from_dict(config))
    model.load_weights([(name, mx.array(values)) for name, values in weights.items()])
    return model


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


@pytest.mark.parametrize("type_", [Q4_0, Q4_1, Q8_0, F16, BF16, F32], ids=lambda type_: type_.name)
@pytest.mark.parametrize("architecture", MODELS)
def test_float32_weights_are_bit_equal(tmp_path, architecture, type_):
    tiny = TinyGguf(architecture, type_, tied=architecture != "qwen3")
    model = read_model(tiny.write(tmp_path / "m.gguf"), quantized=False)
    arrays = dict(tree_flatten(model.parameters()))
    assert arrays.keys() == tiny.expected.keys()
    for name, values in tiny.expected.items():
        assert arrays[name].dtype == mx.float32
        assert np.array_equal(np.array(arrays[name]).view(np.uint32), values.view(np.uint32)), name
    reference = reference_model(tiny.config(), tiny.expected)
    assert mx.array_equal(model(PROMPT), reference(PROMPT))


@pytest.mark.parametrize("type_", [Q4_0, Q4_1, Q8_0], ids=lambda type_: type_.name)
@pytest.mark.parametrize("architecture", MODELS)
def test_quantised_weights_keep_codes_scales_and_biases(tmp_path, architecture, type_):
    tiny = TinyGguf(architecture, type_)
    model = read_model(tiny.write(tmp_path / "m.gguf"), quantized=True)
    arrays = dict(tree_flatten(model.parameters()))
    bits = 8 if type_ is Q8_0 else 4
    for name, values in tiny.expected.items():
        if values.ndim == 1:
            assert arrays[name].dtype == mx.float16
            assert np.array_equal(np.array(arrays[name]), values.astype(np.float16)), name
            continue
        stem = name.removesuffix("weight")
        codes, scales, biases = arrays[name], arrays[stem + "scales"], arrays[stem + "biases"]
        assert (codes.dtype, scales.dtype, biases.dtype) == (mx.uint32, mx.float16, mx.float16)
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        assert np.array_equal(np.array(mx.dequantize(codes, scales, biases, 32, bits)), values), name
    got = model(PROMPT)
    assert got.dtype == mx.float16
    want = reference_model(tiny.config(), tiny.expected)(PROMPT)
    assert mx.abs(got.astype(mx.float32) - want).max() < 0.05 * mx.abs(want).max()


@pytest.mark.parametrize(("type_", "dtype"), [(F16, mx.float16), (BF16, mx.bfloat16), (F32, mx.float32)])
def test_unquantised_files_keep_their_type(tmp_path, type_, dtype):
    model = read_model(TinyGguf("qwen3", type_).write(tmp_path / "m.gguf"), quantized=True)
    assert {array.dtype for _, array in tree_flatten(model.parameters())} == {dtype}


def test_rows_of_q_and_k_are_unpermuted_for_llama_only(tmp_path):
    tiny = TinyGguf("llama", F32, permute=False)
    model = read_model(tiny.write(tmp_path / "m.gguf"), quantized=False)
    reference = reference_model(tiny.config(), tiny.expected)
    assert mx.abs(model(PROMPT) - reference(PROMPT)).max() > 0.1
    arrays = dict(tree_flatten(model.parameters()))
    changed = {name for name, values in tiny.expected.items() if not np.array_equal(np.array(arrays[name]), values)}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "k_proj"}


def test_extreme_scales(tmp_path):
    blocks = np.zeros((64, 2, 34), np.uint8)
    blocks[:, :, :2] = np.frombuffer(np.float16(600).tobytes(), np.uint8)
    blocks[:, :, 2:] = np.arange(32)
    path = TinyGguf(
        "llama", Q8_0, permute=False, tensors={"blk.1.attn_output.weight": (blocks.reshape(64, 68), Q8_0)}
    ).write(tmp_path / "m.gguf")
    weight = read_model(path, quantized=False).model.layers[1].self_attn.o_proj.weight
    assert weight[0, :32].tolist() == [600.0 * code for code in range(32)]
    with pytest.raises(ModelLoadError, match="weight: a scale times 128 does not fit into float16"):
        read_model(path, quantized=True)


@pytest.mark.parametrize("quantized", [False, True])
def test_scales_that_are_no_numbers_are_refused(tmp_path, quantized):
    blocks = np.zeros((64, 2, 20), np.uint8)
    blocks[7, 1, 2:4] = np.frombuffer(np.float16("nan").tobytes(), np.uint8)
    tensors = {"blk.1.attn_output.weight": (blocks.reshape(64, 40), Q4_1)}
    path = TinyGguf("llama", Q4_1, tensors=tensors).write(tmp_path / "m.gguf")
    with pytest.raises(ModelLoadError, match=r"blk.1.attn_output.weight: a scale or minimum is not a finite number"):
        read_model(path, quantized=quantized)


# --- RoPE ---


def llama3_factors(factor: float, head_dim: int) -> np.ndarray:
    """LlamaModel.generate_extra_tensors of llama.cpp's converter."""
    factors = []
    for frequency in 1.0 / tiny_gguf.ROPE_THETA ** (np.arange(0, head_dim, 2) / head_dim):
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192 / 1:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope(tmp_path, factor):
    tiny = TinyGguf("llama", F32, rope_freqs=llama3_factors(factor, 16))
    model = read_model(tiny.write(tmp_path / "m.gguf"), quantized=False)
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = {**tiny.config(), "rope_scaling": {**scaling, "original_max_position_embeddings": 8192}}
    reference = reference_model(config, tiny.expected)
    assert mx.array_equal(model(PROMPT), reference(PROMPT))
    plain = reference_model(tiny.config(), tiny.expected)
    ones = mx.ones((1, 1, 9, 16))
    scaled, unscaled = (each.layers[0].self_attn.rope(ones) for each in (model, plain))
    assert not mx.array_equal(scaled, unscaled)


@pytest.mark.parametrize("factors", [np.linspace(1, 8, 8), np.zeros(8), np.full(8, np.nan), np.ones(7)])
def test_foreign_rope_factors_are_refused(tmp_path, factors):
    tiny = TinyGguf("llama", F32, rope_freqs=factors.astype(np.float32))
    assert "RoPE factors that are not those of Llama 3" in refusal(tiny.write(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
                "rope.scaling.finetuned": True,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
    ],
    ids=["none", "linear", "yarn"],
)
def test_rope_scaling(tmp_path, metadata, scaling):
    tiny = TinyGguf("qwen3", F32, metadata={f"qwen3.{key}": value for key, value in metadata.items()})
    model = read_model(tiny.write(tmp_path / "m.gguf"), quantized=False)
    config = {**tiny.config(), **({"rope_scaling": scaling} if scaling else {})}
    assert mx.array_equal(model(PROMPT), reference_model(config, tiny.expected)(PROMPT))


# --- what is refused ---


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"general.architecture": "gemma3"}, "architecture 'gemma3' is not supported"),
        ({"split.count": 3}, "one part of a split file"),
        ({"general.quantization_version": 1}, "quantisation version"),
        ({"llama.expert_count": 8}, "llama.expert_count = 8 is a feature that is not supported"),
        ({"llama.attention.causal": False}, "not a causal model"),
        ({"llama.rope.scaling.type": "longrope"}, "RoPE scaling 'longrope' is not supported"),
        ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.factor is missing"),
        ({"llama.rope.scale_linear": 4.0}, "outdated key rope.scale_linear"),
        ({"llama.rope.dimension_count": 8}, "differs from the head size 16"),
        ({"llama.attention.value_length": 8}, "differs from the head size 16"),
        ({"llama.attention.head_count_kv": 3}, "4 heads of 16 values over 3 KV heads is impossible"),
        ({"llama.attention.head_count": [4, 4]}, "llama.attention.head_count is list instead of int"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "llama.attention.layer_norm_rms_epsilon is missing"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon is nan"),
        ({"llama.block_count": 0}, "llama.block_count is 0"),
        ({"llama.block_count": 3}, "tensor blk.2.attn_norm.weight is missing"),
        ({"llama.block_count": 4_000_000_000}, "claims 4000000000 layers"),
        ({"llama.block_count": 1}, "tensor blk.1.attn_norm.weight is not part of a llama model"),
        ({"llama.feed_forward_length": 128}, "has shape (96, 64) instead of (128, 64)"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "names a token twice"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer 't5' is not supported"),
        ({"tokenizer.ggml.pre": "somethingnew"}, "names the pre-tokenizer 'somethingnew', which is not known here"),
        ({"tokenizer.ggml.pre": None}, "does not name a pre-tokenizer"),
        ({"tokenizer.ggml.merges": ["no such"]}, "merges do not fit its vocabulary"),
        ({"tokenizer.ggml.merges": ["three is many"]}, "merges do not fit its vocabulary"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "2 token types"),
        ({"tokenizer.ggml.bos_token_id": 9999}, "bos_token_id 9999 is outside its vocabulary"),
        ({"tokenizer.ggml.add_bos_token": "yes"}, "add_bos_token is str instead of bool"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_metadata_that_is_refused(tmp_path, change, words):
    assert words in refusal(TinyGguf("llama", F32, metadata=change).write(tmp_path / "m.gguf"))


def test_unsupported_type_is_named_with_what_to_use(tmp_path):
    raw = np.zeros((64, 144), np.uint8)
    tiny = TinyGguf("llama", F32, tensors={"blk.1.ffn_down.weight": (raw, GGMLQuantizationType.Q4_K)})
    message = refusal(tiny.write(tmp_path / "m.gguf"))
    assert "tensor blk.1.ffn_down.weight has type Q4_K, which is not supported" in message
    assert "Q4_0, Q4_1, Q8_0, F16, BF16, F32" in message


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"blk.0.ffn_up.weight": None}, "tensor blk.0.ffn_up.weight is missing"),
        ({"blk.0.attn_q.bias": (np.zeros(64, np.float32), F32)}, "tensor blk.0.attn_q.bias is not part of"),
        ({"output_norm.weight": (np.zeros((2, 64), np.float32), F32)}, "has shape (2, 64) instead of (64,)"),
    ],
)
def test_tensors_that_are_refused(tmp_path, tensors, words):
    assert words in refusal(TinyGguf("llama", F32, tensors=tensors).write(tmp_path / "m.gguf"))


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
        gguf.build_model(file, gguf.read_config(file), quantized=False)


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


# --- tokenizers ---


def tokenizer_of(tmp_path, **metadata):
    keys = {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if key != "chat_template"}
    if "chat_template" in metadata:
        keys["tokenizer.chat_template"] = metadata["chat_template"]
    path = TinyGguf("llama", F32, metadata=keys).write(tmp_path / "t.gguf")
    return gguf_tokenizer.build_tokenizer(open_(path))


def test_the_demo_models_tokenizer_and_template():
    path = find_local(Registry().resolve("smollm2-135m", allow_paths=False))
    assert path is not None, "the demo extra is not installed"
    file = open_(path)
    tokenizer = gguf_tokenizer.build_tokenizer(file)
    cases = json.loads((Path(__file__).parent / "data" / "smollm2-greedy.json").read_text())["cases"]
    assert len(cases) > 10
    for case in cases:
        text = tokenizer.apply_chat_template(case["messages"], add_generation_prompt=True, tokenize=False)
        assert text == case["prompt_text"]
        assert tokenizer.encode(text, add_special_tokens=False) == case["prompt_ids"], case["name"]
        assert tokenizer.encode(text) == case["prompt_ids"], "this model wants no bos in front"
        assert tokenizer.decode(case["greedy_ids"], skip_special_tokens=True) == case["text"]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert gguf_tokenizer.eos_token_ids(file) == {2}


def test_bytes_merges_and_special_tokens(tmp_path):
    tokenizer = tokenizer_of(tmp_path)
    text = "hello the\n\U0001f600<|turn|>x<note>y"
    ids = tokenizer.encode(text)
    pieces = tokenizer.convert_ids_to_tokens(ids)
    assert pieces[:4] == ["hell", "o", "Ġthe", "Ċ"]
    assert pieces[-4:] == ["<|turn|>", "x", "<note>", "y"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text.replace("<|turn|>", "")
    assert tokenizer.chat_template is None


def test_end_tokens(tmp_path):
    path = TinyGguf("llama", F32, metadata={"tokenizer.ggml.eom_token_id": 3}).write(tmp_path / "t.gguf")
    assert gguf_tokenizer.eos_token_ids(open_(path)) == {1, 2, 3}


@pytest.mark.parametrize(
    ("metadata", "around"),
    [
        ({}, ([], [])),
        ({"add_bos_token": True}, ([0], [])),
        ({"add_bos_token": True, "add_eos_token": True}, ([0], [1])),
        ({"add_eos_token": True}, ([], [1])),
        ({"pre": "llama-bpe"}, ([0], [])),
        ({"pre": "llama-bpe", "add_bos_token": False}, ([], [])),
        ({"add_bos_token": True, "bos_token_id": None}, ([], [])),
        ({"add_bos_token": True, "bos_token_id": 2**32 - 1}, ([], [])),
    ],
)
def test_tokens_put_around(tmp_path, metadata, around):
    tokenizer = tokenizer_of(tmp_path, **metadata)
    inner = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the") == [*around[0], *inner, *around[1]]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["It", "'s", " 12345", " x", "\n\n", " y", "..", "\n", "DON", "'", "T"]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", "5", " x", "\n\n", " y", "..", "\n", "DON", "'", "T"]),
        ("default", ["It", "'", "s", " ", "123", "45", " x", "\n\n", " y", "..", "\n", "DON", "'", "T"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", " x", "\n\n", " y", "..\n", "DON", "'T"]),
        ("llama-bpe", ["It", "'s", " ", "123", "45", " x", "\n\n", " y", "..\n", "DON", "'T"]),
        ("tekken", ["It", "'s", " ", "1", "2", "3", "4", "5", " x", "\n\n", " y", "..\n", "DON", "'T"]),
    ],
)
def test_pre_tokenizers(tmp_path, pre, pieces):
    tokenizer = tokenizer_of(tmp_path, pre=pre)
    text = "It's 12345 x\n\n y..\nDON'T"
    found = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in found] == pieces


def test_qwen2_composes_letters_first(tmp_path):
    decomposed = unicodedata.normalize("NFD", "é")
    assert len(decomposed) == 2
    assert tokenizer_of(tmp_path, pre="qwen2").decode(tokenizer_of(tmp_path, pre="qwen2").encode(decomposed)) == "é"
    assert tokenizer_of(tmp_path).decode(tokenizer_of(tmp_path).encode(decomposed)) == decomposed


def test_llama_bpe_takes_a_whole_token_before_merging(tmp_path):
    tokens = [*tiny_gguf.TOKENS, "xyz"]
    types = [*map(int, tiny_gguf.TOKEN_TYPES), int(TokenType.NORMAL)]
    whole = tokenizer_of(tmp_path, tokens=tokens, token_type=types, pre="llama-bpe", add_bos_token=False)
    assert whole.encode("xyz") == [len(tokens) - 1]
    assert len(tokenizer_of(tmp_path, tokens=tokens, token_type=types, pre="gpt-2").encode("xyz")) == 3


SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
SPM_PIECES = ["▁", "a", "b", "c", "d", "e", "▁a", "▁ab", "ab", "abc", "cd", "de", "cde", "▁▁", "▁▁a", "bc"]


def spm_tokenizer(tmp_path, **metadata):
    tokens = SPM_TOKENS + SPM_PIECES
    types = [2, 3, 3, *[6] * 256, *[1] * len(SPM_PIECES)]
    scores = [0.0] * len(SPM_TOKENS) + [-float(rank) for rank in range(len(SPM_PIECES))]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "eot_token_id": None}
    kinds = {"model": "llama", "pre": "default", "merges": None, "tokens": tokens, "token_type": types}
    return tokenizer_of(tmp_path, **{**kinds, "scores": scores, **ids, **metadata})


def spm_reference(text: str) -> list[str]:
    """SentencePiece's BPE: of all neighbours that make a token, merge the best-scored, the leftmost of equals."""
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        made = [
            (SPM_PIECES.index(a + b), at) for at, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in SPM_PIECES
        ]
        if not made:
            return [
                p
                for piece in pieces
                for p in ([piece] if piece in SPM_PIECES else [f"<0x{b:02X}>" for b in piece.encode()])
            ]
        _, at = min(made)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


def test_sentencepiece_merges_by_score_with_byte_fallback(tmp_path):
    tokenizer = spm_tokenizer(tmp_path)
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(500):
        text = "".join(rng.choice("aaabbbcccdde  é\n") for _ in range(rng.randint(1, 20)))
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.convert_ids_to_tokens(ids) == spm_reference(text), repr(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("ab")[0] == 1, "the llama kind puts bos in front unless told not to"


def test_sentencepiece_options(tmp_path):
    tokenizer = spm_tokenizer(tmp_path, add_space_prefix=False, add_bos_token=False)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("ab</s>")) == ["ab", "</s>"]
    with pytest.raises(ModelLoadError, match="and 1 scores"):
        spm_tokenizer(tmp_path, scores=[0.0])
