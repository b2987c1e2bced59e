"""Estimates of memory against what a load really takes."""

from pathlib import Path

import pytest
import tiny_models
import tiny_tokenizers
from gguf import GGMLQuantizationType
from tiny_gguf import TinyGguf

from mlxserve.engine.build import build_engine
from mlxserve.runner import device
from mlxserve.store import loader
from mlxserve.store.estimate import estimate
from mlxserve.store.loader import DtypePolicy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_models.save(tmp_path_factory.mktemp("models") / "tiny", "llama")
    tiny_tokenizers.byte_level().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype_policy", ["keep", "float32"])
def test_weights_of_a_folder(folder: Path, dtype_policy: DtypePolicy) -> None:
    loaded = loader.load(folder, name="tiny", dtype_policy=dtype_policy)
    assert estimate(folder, dtype_policy=dtype_policy).weight_bytes == loaded.weight_bytes


@pytest.mark.parametrize("dtype_policy", ["keep", "float32"])
@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0, GGMLQuantizationType.F16])
def test_weights_of_a_gguf_file(tmp_path: Path, kind: GGMLQuantizationType, dtype_policy: DtypePolicy) -> None:
    path = tmp_path / "tiny.gguf"
    TinyGguf("llama", kind).write(path)
    loaded = loader.load(path, name="tiny", dtype_policy=dtype_policy)
    found = estimate(path, dtype_policy=dtype_policy)
    assert found.weight_bytes == pytest.approx(loaded.weight_bytes, rel=0.02)
    assert found.context_length == loaded.context_length


@pytest.mark.parametrize("kv_bits", [None, 8, 4])
def test_bytes_of_a_token_are_those_of_the_pool(folder: Path, kv_bits: int | None) -> None:
    loaded = loader.load(folder, name="tiny", dtype_policy="float32")
    config = tiny_models.engine_config(kv_bits=kv_bits)
    built = build_engine(loaded, config, device.detect(), 4096)
    found = estimate(folder, dtype_policy="float32", kv_bits=kv_bits)
    assert found.kv_bytes_per_token * config.block_size == built.bytes_per_block
    assert found.context_length == loaded.context_length


def test_damaged_files_count_by_their_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    assert estimate(tmp_path, dtype_policy="keep").weight_bytes == 1000
    file = tmp_path / "bad.gguf"
    file.write_bytes(b"GGUF")
    assert estimate(file, dtype_policy="float32").weight_bytes == 4
    assert estimate(tmp_path / "none.gguf", dtype_policy="keep").weight_bytes == 0
