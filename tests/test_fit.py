"""Will it fit: KV bytes of real models' configs, machines that are large and small."""

from pathlib import Path
from typing import Any

import pytest

from mlxserve.errors import ModelTooLarge
from mlxserve.store.fit import HEADROOM, fit, require_fit
from mlxserve.store.kv_estimate import estimate_kv
from mlxserve.store.machine import BANDWIDTHS, Machine, bandwidth, this_machine
from mlxserve.store.model_facts import ModelFacts

GB = 10**9
QWEN3_4B = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 2560,
}


def machine(memory: int = 48 * GB, *, is_metal: bool = True, speed: float | None = 273e9) -> Machine:
    return Machine("Apple M4 Pro", memory, int(memory * 0.75), speed, is_metal)


def facts(config: dict[str, Any], weight_bytes: int = 2 * GB, **changes: Any) -> ModelFacts:
    values: dict[str, Any] = {
        "path": Path("m"),
        "size": weight_bytes,
        "modified": 0.0,
        "digest": "0" * 64,
        "format": "safetensors",
        "architecture": config.get("model_type", "llama"),
        "num_parameters": 4 * GB,
        "weight_bytes": weight_bytes,
        "quantization": "4-bit",
        "context_length": 40960,
        "embedding_length": None,
        "chat_template": None,
        "license": None,
        "config": config,
        "tokens_file": None,
    }
    return ModelFacts(**{**values, **changes})


def test_plain_layers() -> None:
    kv = estimate_kv(QWEN3_4B, "qwen3")
    assert kv is not None
    assert kv.can_quantise
    assert kv.bytes_per_token(16) == 2 * 36 * 8 * 128 * 2
    # docs/architecture.md: of 16-bit heads of 128, 0.516 with 8 bits, 0.266 with 4.
    assert [round(kv.bytes_per_token(bits) / kv.bytes_per_token(16), 3) for bits in (8, 4)] == [0.516, 0.266]
    assert kv.bytes_of(1000, 16) == 1000 * kv.bytes_per_token(16)


@pytest.mark.parametrize(
    ("config", "per_token", "at_10000"),
    [
        # Gemma 3 1B: 26 layers, every sixth attends to everything, the others to 512 tokens.
        (
            {"model_type": "gemma3_text", "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1}
            | {"head_dim": 256, "hidden_size": 1152, "sliding_window": 512, "sliding_window_pattern": 6},
            26 * 1024,
            4 * 1024 * 10000 + 22 * 1024 * 512,
        ),
        # gpt-oss: every other layer, 128 tokens.
        (
            {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8}
            | {"head_dim": 64, "layer_types": ["sliding_attention", "full_attention"] * 12, "sliding_window": 128},
            24 * 2048,
            12 * 2048 * 10000 + 12 * 2048 * 128,
        ),
        # DeepSeek V3: one latent vector of 512 and a rotary key of 64.
        (
            {"model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512}
            | {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
            61 * 576 * 2,
            61 * 576 * 2 * 10000,
        ),
        # DeepSeek V2 Lite keeps what is made of them.
        (
            {"model_type": "deepseek_v2", "num_hidden_layers": 27, "num_attention_heads": 16, "kv_lora_rank": 512}
            | {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
            27 * 16 * 320 * 2,
            27 * 16 * 320 * 2 * 10000,
        ),
        # Qwen3-Next: every fourth layer has a cache that grows.
        (
            {"model_type": "qwen3_next", "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2}
            | {"head_dim": 256, "full_attention_interval": 4},
            12 * 2 * 2 * 256 * 2,
            12 * 2 * 2 * 256 * 2 * 10000,
        ),
    ],
    ids=["gemma3", "gpt-oss", "deepseek-v3", "deepseek-v2", "qwen3-next"],
)
def test_other_layers(config: dict[str, Any], per_token: int, at_10000: int) -> None:
    for nested in (config, {"model_type": "x", "text_config": config}):
        kv = estimate_kv(nested, "x")
        assert kv is not None
        assert (kv.bytes_per_token(16), kv.bytes_of(10000, 16)) == (per_token, at_10000)
        assert not kv.can_quantise


def test_metadata_of_a_gguf_file() -> None:
    metadata = {"general.architecture": "llama", "llama.block_count": 30, "llama.attention.head_count": 9}
    metadata |= {"llama.attention.head_count_kv": 3, "llama.embedding_length": 576}
    kv = estimate_kv(metadata, "llama")
    assert kv is not None
    assert kv.bytes_per_token(16) == 30 * 2 * 3 * 64 * 2


@pytest.mark.parametrize("config", [{}, {"num_hidden_layers": "2"}, {"num_hidden_layers": 2, "num_attention_heads": 0}])
def test_a_config_that_does_not_tell(config: dict[str, Any]) -> None:
    assert estimate_kv(config, "x") is None
    found = fit(facts(config), machine(), 4096)
    assert (found.fits, found.caches) == (True, ())
    assert "weights 2.0 GB of 36.0 GB" in found.line()


def test_the_line_is_about_what_a_model_gets() -> None:
    found = fit(facts(QWEN3_4B), machine(), 40960, kv_bytes=10_000_000_000)
    counts = [cache.num_streams[4096] for cache in found.caches]
    assert counts == [10_000_000_000 // (4096 * cache.bytes_per_token) for cache in found.caches]
    for bits, count in ((None, counts[0]), (8, counts[1]), (4, counts[2])):
        assert f"streams that fit: {count} of 4096" in found.line(bits)


def test_streams_and_contexts() -> None:
    found = fit(facts(QWEN3_4B), machine(), 40960)
    room = 36 * GB * (1 - HEADROOM) - 2 * GB
    assert [cache.bits for cache in found.caches] == [16, 8, 4]
    for cache in found.caches:
        assert cache.max_context == 40960
        assert cache.num_streams == {length: room // (length * cache.bytes_per_token) for length in (4096, 8192)}
    assert found.max_tokens_per_second == pytest.approx(273 / 2)
    small = fit(facts(QWEN3_4B), machine(4 * GB), 40960)
    one = small.caches[0]
    left = int(3 * GB * (1 - HEADROOM)) - 2 * GB
    assert one.max_context == left // one.bytes_per_token
    assert 0 < one.max_context < 40960
    assert fit(facts(QWEN3_4B), machine(), 1000).caches[0].num_streams.keys() == {1000}


def test_a_cpu_computes_with_float32() -> None:
    found = fit(facts(QWEN3_4B), machine(is_metal=False, speed=None), 40960)
    assert (found.weight_bytes, found.caches[0].bits) == (16 * GB, 32)
    assert found.caches[0].bytes_per_token == 2 * 36 * 8 * 128 * 4
    assert found.max_tokens_per_second is None


def test_a_token_reads_active_experts_and_one_embedding() -> None:
    config = {**QWEN3_4B, "num_experts": 128, "num_experts_per_tok": 8}
    found = fit(
        facts(config, 16 * GB, num_parameters=32 * GB, expert_parameters=28 * GB, lookup_bytes=GB), machine(), 1
    )
    assert found.bytes_read == 15 * GB - round(14 * GB * 120 / 128)


def test_what_cannot_fit_is_refused_with_the_numbers() -> None:
    found = fit(facts(QWEN3_4B, 40 * GB), machine(), 40960)
    assert [cache.max_context for cache in found.caches] == [0, 0, 0]
    with pytest.raises(ModelTooLarge) as caught:
        require_fit(found, "big")
    assert (caught.value.needed, caught.value.limit, caught.value.model) == (40 * GB, 36 * GB, "big")
    assert (
        "its weights take 40.0 GB and 147 KB for each token of context, and models may take 36.0 of its 48.0 GB"
        in str(caught.value)
    )
    require_fit(fit(facts(QWEN3_4B, 35 * GB), machine(), 40960), "just")


def test_chips() -> None:
    assert bandwidth("Apple M1", 8) == 68e9
    assert (bandwidth("Apple M3 Max", 14), bandwidth("Apple M3 Max", 16)) == (300e9, 400e9)
    assert (bandwidth("Apple M4 Max", 14), bandwidth("Apple M4 Max", 16)) == (410e9, 546e9)
    assert bandwidth("Apple M99 Pro", 14) is None
    assert bandwidth("Intel(R) Core(TM) i9", 8) is None
    assert all(bandwidth(f"Apple {name}", 99) for name in BANDWIDTHS)


def test_this_machine() -> None:
    found = this_machine()
    assert 0 < found.budget < found.memory
