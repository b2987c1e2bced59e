"""Folders and GGUF files become models with all weights in memory; what cannot be used is refused with the reason."""

import json
import shutil
import struct
import threading
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from gguf import GGMLQuantizationType
from mlx.utils import tree_flatten
from mlx_lm.models import llama, qwen3_moe
from tiny_gguf import TinyGguf

from mlxserve.errors import ModelLoadError
from mlxserve.store import gguf_tokenizer, loader
from mlxserve.store.gguf_file import GgufFile

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 265,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "eos_token_id": 1,
}
QWEN3_MOE = {
    **{key: value for key, value in LLAMA.items() if key != "attention_bias"},
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64,
    "rope_theta": 10000.0,
    "norm_topk_prob": True,
}
MODULES = {"llama": llama, "qwen3_moe": qwen3_moe}
PROMPT = mx.array([[5, 80, 9, 200, 33, 7, 64, 101]])


def new_model(config, dtype=mx.bfloat16, bits=None, mode="affine"):
    module = MODULES[config["model_type"]]
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(dtype)
    if bits:
        nn.quantize(model, group_size=32, bits=bits, mode=mode)
    return model


def save_folder(folder: Path, config, model) -> Path:
    """A folder as mlx-lm writes it, with the tiny GGUF's tokenizer."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    source = TinyGguf("llama", GGMLQuantizationType.F32).write(folder / "tokenizer.gguf")
    gguf_tokenizer.build_tokenizer(GgufFile.open(source, model="tiny")).save_pretrained(folder)
    source.unlink()
    return folder


@pytest.fixture
def folder(tmp_path):
    return save_folder(tmp_path / "model", LLAMA, new_model(LLAMA))


def load(path: Path, dtype_policy="float32") -> loader.LoadedModel:
    return loader.load(path, name="tiny", dtype_policy=dtype_policy)


def refusal(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(path)
    assert caught.value.model == "tiny"
    assert str(path) in str(caught.value)
    return str(caught.value)


def dtypes(model):
    return {array.dtype for _, array in tree_flatten(model.parameters())}


def test_keep_leaves_the_weights_as_they_are(folder):
    loaded = load(folder, "keep")
    assert dtypes(loaded.model) == {mx.bfloat16}
    assert mx.array_equal(loaded.model(PROMPT), new_model(LLAMA)(PROMPT))
    assert (loaded.name, loaded.architecture, loaded.quantization) == ("tiny", "llama", "bfloat16")
    assert (loaded.context_length, loaded.eos_token_ids) == (512, {1})
    assert loaded.weight_bytes == 2 * loaded.num_parameters
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("hello")) == "hello"


def test_float32_widens_the_weights(folder):
    loaded = load(folder)
    reference = new_model(LLAMA)
    reference.set_dtype(mx.float32)
    assert dtypes(loaded.model) == {mx.float32}
    assert mx.array_equal(loaded.model(PROMPT), reference(PROMPT))
    assert loaded.quantization == "bfloat16"
    assert loaded.weight_bytes == 4 * loaded.num_parameters


@pytest.mark.parametrize(
    ("config", "bits", "mode", "label"),
    [
        (LLAMA, 4, "affine", "4-bit"),
        (LLAMA, 8, "affine", "8-bit"),
        (LLAMA, 4, "mxfp4", "mxfp4"),
        (QWEN3_MOE, 4, "affine", "4-bit"),
    ],
    ids=["4-bit", "8-bit", "mxfp4", "experts"],
)
def test_float32_unpacks_quantised_layers(tmp_path, config, bits, mode, label):
    quantised = new_model(config, bits=bits, mode=mode)
    config = {**config, "quantization": {"group_size": 32, "bits": bits, "mode": mode}}
    folder = save_folder(tmp_path / "model", config, quantised)
    kept, plain = load(folder, "keep"), load(folder)
    assert (kept.quantization, plain.quantization) == (label, label)
    assert kept.num_parameters == plain.num_parameters
    assert kept.weight_bytes < plain.weight_bytes == 4 * plain.num_parameters
    assert mx.uint32 in dtypes(kept.model)
    assert dtypes(plain.model) == {mx.float32}
    assert not any("scales" in module for module in plain.model.modules())
    for path, layer in kept.model.named_modules():
        if "scales" not in layer:
            continue
        biases = layer.biases if layer.biases is None else layer.biases.astype(mx.float32)
        scales = layer.scales if biases is None else layer.scales.astype(mx.float32)
        weight = mx.dequantize(layer.weight, scales, biases, 32, bits, mode, dtype=mx.float32)
        unpacked = dict(plain.model.named_modules())[path]
        assert mx.array_equal(unpacked.weight, weight), path
        assert ("bias" in unpacked) == ("bias" in layer)
    want = kept.model(PROMPT).astype(mx.float32)
    assert mx.abs(plain.model(PROMPT) - want).max() < 0.05 * mx.abs(want).max()


def test_unpacking_holds_one_layer_twice_at_most(tmp_path):
    config = {**LLAMA, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12, "attention_bias": False}
    quantised = new_model(config, bits=8)
    config["quantization"] = {"group_size": 32, "bits": 8}
    folder = save_folder(tmp_path / "model", config, quantised)
    del quantised
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    loaded = load(folder)
    largest = max(array.nbytes for _, array in tree_flatten(loaded.model.parameters()))
    assert mx.get_peak_memory() - before < loaded.weight_bytes + 3 * largest
    assert mx.get_active_memory() - before < loaded.weight_bytes + largest


def test_gguf(tmp_path):
    tiny = TinyGguf("qwen3", GGMLQuantizationType.Q8_0, tied=False, metadata={"tokenizer.chat_template": "{{ 1 }}"})
    path = tiny.write(tmp_path / "m.gguf")
    plain, kept = load(path), load(path, "keep")
    assert (plain.architecture, plain.quantization, plain.context_length) == ("qwen3", "Q8_0", 512)
    assert plain.eos_token_ids == {1, 2}
    assert plain.tokenizer.chat_template == "{{ 1 }}"
    assert plain.num_parameters == kept.num_parameters == sum(values.size for values in tiny.expected.values())
    assert plain.weight_bytes == 4 * plain.num_parameters
    assert kept.weight_bytes < plain.weight_bytes / 2
    assert plain.config["head_dim"] == 32


def test_end_tokens_come_from_everywhere(folder):
    config = {**LLAMA, "eos_token_id": [3, 4], "text_config": {"eos_token_id": 5}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [6]}))
    assert load(folder).eos_token_ids == {1, 3, 4, 5, 6}


def test_context_length_that_nobody_names(folder, caplog):
    config = {key: value for key, value in LLAMA.items() if key != "max_position_embeddings"}
    (folder / "config.json").write_text(json.dumps(config))
    assert load(folder).context_length == loader.FALLBACK_CONTEXT_LENGTH
    assert "tiny does not say how long its context is" in caplog.text


def test_nothing_there(tmp_path):
    assert "no such file or folder" in refusal(tmp_path / "none")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "nosuchmodel"}, "Model type nosuchmodel not supported"),
        ({"model_type": "nosuchmodel", "auto_map": {"AutoModel": "x.Y"}}, "comes with its own code"),
        ({"model_type": "cache"}, "mlx-lm cannot load it"),
        ({"model_type": "../x"}, "no usable model_type ('../x')"),
        ({"model_type": None}, "no usable model_type (None)"),
        ({"model_file": "model.py"}, "needs its own code ('model.py'), which mlxserve never runs"),
        ({"hidden_size": "many"}, "hidden_size"),
        ({"num_hidden_layers": 3}, "mlx-lm cannot load it"),
        ({"num_hidden_layers": 1}, "mlx-lm cannot load it"),
    ],
)
def test_configs_that_are_refused(folder, change, words):
    (folder / "model.py").write_text("raise SystemExit('this must never run')")
    (folder / "config.json").write_text(json.dumps({**LLAMA, **change}))
    assert words in refusal(folder)


@pytest.mark.parametrize("content", ["", "{", "[1]", "\x00", '"x"'])
def test_damaged_config(folder, content):
    (folder / "config.json").write_text(content)
    assert "config.json" in refusal(folder)


def test_missing_files(folder, tmp_path):
    for name, words in (
        ("config.json", "no config.json"),
        ("model.safetensors", "it has no weights (model*.safetensors)"),
    ):
        copy = shutil.copytree(folder, tmp_path / name)
        (copy / name).unlink()
        assert words in refusal(copy)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert "it has no tokenizer (tokenizer.json)" in refusal(folder)


def test_pickles_are_never_read(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "its weights are pickles, which can run code" in refusal(folder)


def test_a_folder_of_gguf_files(folder):
    (folder / "model.safetensors").rename(folder / "model.gguf")
    assert "name one of those instead of the folder" in refusal(folder)


def test_damaged_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{")
    assert "its tokenizer cannot be loaded" in refusal(folder)


def test_tokenizer_that_needs_code_is_refused(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('this must never run')")
    assert "its tokenizer cannot be loaded" in refusal(folder)


def test_missing_part(folder):
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "weight files are missing: model-00002-of-00002.safetensors" in refusal(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"x": 1}))
    assert "has no weight_map" in refusal(folder)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 0.5, 0.999])
def test_weights_cut_short(folder, keep):
    path = folder / "model.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as stream:
        stream.truncate(int(keep * size) if isinstance(keep, float) else keep)
    message = refusal(folder)
    assert "cut short" in message
    assert str(path) in message


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 2**63]},
        {"dtype": "F32", "shape": [4]},
        {"dtype": "F32", "shape": "x", "data_offsets": [0, 16]},
        {"dtype": "WHAT", "shape": [4], "data_offsets": [0, 16]},
        [],
        7,
    ],
)
def test_weights_with_an_impossible_header(folder, entry):
    header = json.dumps({"model.norm.weight": entry}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    refusal(folder)


@pytest.mark.parametrize(
    "content", [b"", b"not safetensors, no", struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 2**60) + bytes(99)]
)
def test_garbage_for_weights(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    refusal(folder)


def test_a_model_can_be_used_from_another_thread(folder):
    results = []
    thread = threading.Thread(target=lambda: results.append(load(folder)))
    thread.start()
    thread.join()
    assert mx.array_equal(results[0].model(PROMPT), load(folder).model(PROMPT))
