"""Tiny random checkpoints of many architectures: greedy answers equal mlx-lm's own, on either runner."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny_models
from mlx_lm.generate import generate_step
from mlx_lm.models import base, llama
from mlx_lm.utils import load_model
from tiny_models import BLOCK_CACHE, CONTEXT_LENGTH, FALLBACK

from mlxserve.core.sampling_params import SamplingParams
from mlxserve.engine.build import BuiltEngine, build_engine
from mlxserve.runner import cpu_ops, device
from mlxserve.store import loader

LENGTHS = (1, 2, 16, 33, 100)
"""Prompt lengths: no chunk at all, one block, several chunks; past all windows and scaling limits below."""
NUM_TOKENS = 42

Load = Callable[..., tuple[nn.Module, BuiltEngine]]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Save a checkpoint and load it twice: by mlx-lm, and by us with an engine on it."""

    def load_both(name: str, *, bits: int | None = None, **settings: object) -> tuple[nn.Module, BuiltEngine]:
        folder = tiny_models.save(tmp_path / f"{len(list(tmp_path.iterdir()))}", name, bits=bits)
        model, _ = load_model(folder)
        loaded = loader.load(folder, name=name, dtype_policy="float32")
        return model, build_engine(loaded, tiny_models.engine_config(**settings), device.detect(), CONTEXT_LENGTH)

    return load_both


@pytest.mark.parametrize("name", [*BLOCK_CACHE, *FALLBACK])
def test_greedy_answers_equal_mlx_lm(name: str, load: Load) -> None:
    model, built = load(name)
    assert built.uses_block_cache == (name in BLOCK_CACHE)
    check_answers(model, built)


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gemma3"])
def test_quantised_checkpoints(name: str, load: Load) -> None:
    """4-bit weights become float32 ones here, and mlx-lm computes with the 4-bit ones."""
    model, built = load(name, bits=4)
    assert any(isinstance(module, nn.QuantizedLinear) for module in model.modules())
    check_answers(model, built)


def check_answers(model: nn.Module, built: BuiltEngine) -> None:
    prompts = {f"{length}": tiny_models.prompt(length, seed=length) for length in LENGTHS}
    expected = {name: tiny_models.reference(model, ids, NUM_TOKENS) for name, ids in prompts.items()}
    # A near tie cuts a reference short. Were that the rule, this would compare nothing.
    assert sum(map(len, expected.values())) > 0.7 * NUM_TOKENS * len(prompts)
    assert max(map(len, expected.values())) >= 40
    assert len({tuple(ids) for ids in expected.values()}) == len(prompts)

    alone = {}
    for name, ids in prompts.items():
        alone |= tiny_models.run_ids(built.engine, [tiny_models.make_request(name, ids, NUM_TOKENS)])
    # Without a salt the second run would take all prompts from the prefix cache.
    requests = [tiny_models.make_request(name, ids, NUM_TOKENS) for name, ids in prompts.items()]
    for request in requests:
        request.cache_salt = "together"
    together = tiny_models.run_ids(built.engine, requests)
    assert together == alone
    for name, ids in expected.items():
        assert alone[name][: len(ids)] == ids


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_seeded_samples_do_not_depend_on_company(name: str, load: Load) -> None:
    """Alone, in a batch, and on the block cache also after having been preempted: the same tokens."""
    _, built = load(name)
    prompts = {f"{seed}": tiny_models.prompt(20 + 3 * seed, seed=seed) for seed in range(8)}
    params = [
        SamplingParams(temperature=1.0, seed=7),
        SamplingParams(temperature=0.8, top_p=0.9, seed=7),
        SamplingParams(temperature=1.3, top_k=20, seed=2**64 - 1),
        SamplingParams(temperature=0.7, min_p=0.05, seed=0),
    ]

    def requests() -> list[tiny_models.Request]:
        return [
            tiny_models.make_request(request_id, ids, 40, params[index % len(params)])
            for index, (request_id, ids) in enumerate(prompts.items())
        ]

    alone = {}
    for request in requests():
        alone |= tiny_models.run_ids(built.engine, [request])
    assert tiny_models.run_ids(built.engine, requests()) == alone
    assert tiny_models.run_ids(built.engine, requests()[::-1]) == alone
    if name not in BLOCK_CACHE:
        return
    # 20 blocks of 16 tokens hold four or so of the eight sequences of some 70.
    small = build_small_pool(load, name, num_blocks=20)
    assert tiny_models.run_ids(small.engine, requests()) == alone
    assert small.engine.stats().num_preemptions > 0


def build_small_pool(load: Load, name: str, num_blocks: int) -> BuiltEngine:
    bytes_per_token = 3 * 2 * (16 + 16) * 4  # layers, key/value heads, key and value dimensions, float32
    return load(name, kv_cache_bytes=num_blocks * 16 * bytes_per_token)[1]


def test_mlx_lm_works_on_beside_the_engine(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same model gives mlx-lm's user the same tokens before and after an engine was built on its module."""
    monkeypatch.setattr(llama, "swiglu", cpu_ops._stock_swiglu)
    monkeypatch.setattr(llama, "scaled_dot_product_attention", base.scaled_dot_product_attention)
    prompt_ids = tiny_models.prompt(70)

    def answers(model: nn.Module) -> list[list[int]]:
        plain = [token for token, _ in generate_step(mx.array(prompt_ids), model, max_tokens=40)]
        quantised_cache = generate_step(mx.array(prompt_ids), model, max_tokens=8, kv_bits=8, kv_group_size=32)
        return [plain, [token for token, _ in quantised_cache]]

    half = tiny_models.build("llama", seed=1)
    half.set_dtype(mx.bfloat16)
    half_logits = half(mx.array([prompt_ids]))
    other = tiny_models.build("llama", seed=2)
    before = answers(other)

    _, built = load("llama")
    assert llama.scaled_dot_product_attention is not base.scaled_dot_product_attention
    tiny_models.run(built.engine, [tiny_models.make_request("ours", prompt_ids, 10)])
    assert answers(other) == before
    assert half(mx.array([prompt_ids])).dtype == mx.bfloat16
    assert mx.array_equal(half(mx.array([prompt_ids])), half_logits).item()
