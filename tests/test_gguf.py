"""GGUF files are read to the bit, and what cannot be read is refused with its reason."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import tiny_gguf
from gguf import GGMLQuantizationType
from helpers_gguf import BF16, F16, F32, Q4_0, Q4_1, Q8_0, build_model, open_, refusal
from mlx.utils import tree_flatten
from mlx_lm.models import llama, qwen2, qwen3
from tiny_gguf import TinyGguf

from mlxserve.errors import ModelLoadError
from mlxserve.store import gguf

MODELS = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3}
PROMPT = mx.array([[5, 80, 9, 200, 33, 7, 64, 101]])


def read_model(path: Path, *, quantized: bool):
    file = open_(path)
    return build_model(file, gguf.read_config(file), quantized=quantized)


def reference_model(config, weights):
    """mlx-lm's own model with these float32 weights."""
    module = MODELS[config["model_type"]]
    model = module.Model(module.ModelArgs.from_dict(config))
    model.load_weights([(name, mx.array(values)) for name, values in weights.items()])
    return model


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
