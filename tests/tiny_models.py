"""Checkpoints of a few random layers, saved as the folders mlx-lm loads, and a driver for engines on them."""

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import tiny_tokenizers
from mlx.utils import tree_flatten, tree_map
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache

from mlxserve.config import EngineConfig
from mlxserve.core.pieces import Pieces
from mlxserve.core.request import FinishReason, Request
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.core.step import DecodeRow, SampledToken
from mlxserve.engine.engine import Engine
from mlxserve.runner import cpu_ops
from mlxserve.runner.attention.prefill import TiledAttention, fused_attention
from mlxserve.runner.kv_format import QuantisedFormat, kv_format
from mlxserve.runner.paged_model import Kernels
from mlxserve.store.loader import LoadedModel

VOCABULARY = 420
CONTEXT_LENGTH = 4096
GREEDY = SamplingParams(temperature=0.0)
NEAR_TIE = 1e-4
"""Difference of two logprobs below which rounding, which no two implementations share, may decide."""

CPU_KERNELS = Kernels(cpu_ops.shifted_exp, TiledAttention(cpu_ops.shifted_exp))
STOCK_KERNELS = Kernels(lambda scores, maximum: mx.exp(scores - maximum), fused_attention)


def decided(answer: bool) -> Callable[..., Pieces[bool]]:
    """In place of a measurement of warm-up."""

    def measure(*_: Any) -> Pieces[bool]:
        yield
        return answer

    return measure


def quantised_kernels(bits: int | None) -> Kernels:
    return replace(CPU_KERNELS, kv_format=kv_format(bits))


_COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "rope_theta": 10000.0,
    "max_position_embeddings": CONTEXT_LENGTH,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LLAMA4_SCALING = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "llama_4_scaling_beta": 0.5,
    "original_max_position_embeddings": 64,
}

BLOCK_CACHE: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-scaled": {"model_type": "llama", "rope_scaling": _LLAMA3_SCALING, "attention_bias": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "qwen3-moe": {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": [0]} | _EXPERTS,
    "phi3": {"model_type": "phi3"},
    "ministral3": {"model_type": "ministral3", "rope_parameters": _LLAMA4_SCALING},
}
"""Architectures that the block cache serves, by name of the checkpoint: what their configs have beside _COMMON."""

FALLBACK: dict[str, dict[str, Any]] = {
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 32, "sliding_window_pattern": 2},
    "gpt-oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "lfm2": {
        "model_type": "lfm2",
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1],
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 64,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "dynamic-rope": {"model_type": "internlm2", "rope_scaling": {"type": "dynamic", "factor": 2.0}, "bias": False},
}
"""Architectures that run on mlx-lm's own caches, likewise."""


def build(name: str, *, seed: int = 0, vocab_size: int = VOCABULARY) -> nn.Module:
    """A model with weights large enough that attention and position decide its answers."""
    config = _COMMON | (BLOCK_CACHE | FALLBACK)[name] | {"vocab_size": vocab_size}
    architecture = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = architecture.Model(architecture.ModelArgs.from_dict(config))
    key = mx.random.key(seed)

    def random_weight(array: mx.array) -> mx.array:
        nonlocal key
        key, this = mx.random.split(key)
        noise = mx.random.normal(array.shape, key=this)
        return noise * 3.0 / array.shape[-1] ** 0.5 if array.ndim > 1 else 1.0 + 0.1 * noise

    model.update(tree_map(random_weight, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def save(folder: Path, name: str, *, bits: int | None = None, seed: int = 0) -> Path:
    """Write a checkpoint of mlx-lm's own layout, quantised in groups of 32 if `bits` is given."""
    model = build(name, seed=seed)
    config = _COMMON | (BLOCK_CACHE | FALLBACK)[name]
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
        config = config | {"quantization": {"group_size": 32, "bits": bits}}
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    tiny_tokenizers.byte_level().save_pretrained(folder)
    return folder


def prompt(length: int, *, seed: int = 0) -> list[int]:
    """Token ids that do not repeat a pattern within any test's length."""
    return [(seed * 31 + i * i * 7 + i * 13 + (i * 101) // 3) % (VOCABULARY - 2) + 2 for i in range(length)]


def make_request(
    request_id: str, prompt_ids: Sequence[int], max_tokens: int, sampling: SamplingParams = GREEDY
) -> Request:
    """A request that ends by length only."""
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt_ids),
        sampling=sampling,
        eos_token_ids=frozenset(),
        seed=sampling.seed or 0,
        max_total_tokens=len(prompt_ids) + max_tokens,
        arrival_time=0.0,
    )


def run(engine: Engine, requests: Sequence[Request]) -> dict[str, list[SampledToken]]:
    """Add all requests at once and step until they ended: tokens by request id. The books must agree after each."""
    tokens: dict[str, list[SampledToken]] = {request.request_id: [] for request in requests}
    reasons: dict[str, FinishReason] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.tokens
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
        engine.check_integrity()
    assert reasons.keys() == tokens.keys()
    return tokens


def run_ids(engine: Engine, requests: Sequence[Request]) -> dict[str, list[int]]:
    return {name: [token.token_id for token in tokens] for name, tokens in run(engine, requests).items()}


def reference(model: nn.Module, prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
    """mlx-lm's greedy answer, up to the first token that was a near tie."""
    token_ids: list[int] = []
    for token_id, logprobs in generate_step(mx.array(prompt_ids), model, max_tokens=max_tokens):
        second, best = mx.sort(logprobs)[-2:].tolist()
        if best - second < NEAR_TIE:
            break
        token_ids.append(int(token_id))
    return token_ids


class RoundedCache(KVCache):
    """mlx-lm's own cache of one layer, of keys and values that lost what a quantised pool loses of them."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self._format = QuantisedFormat(bits)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return super().update_and_fetch(self._rounded(keys), self._rounded(values))

    def _rounded(self, vectors: mx.array) -> mx.array:
        rows = self._format.encode(vectors)
        return self._format.turn_back(self._format.decode(rows, mx.float32)).astype(vectors.dtype)


def rounded_caches(model: nn.Module, bits: int) -> list[RoundedCache]:
    return [RoundedCache(bits) for _ in model.layers]


def engine_config(**settings: Any) -> EngineConfig:
    """Small blocks, chunks and cache, so that short prompts take several of each."""
    return EngineConfig(**({"block_size": 16, "max_prefill_tokens": 32, "kv_cache_bytes": 32_000_000} | settings))


def decode_row(request_id: str, token_id: int, start: int, table: tuple[int, ...]) -> DecodeRow:
    return DecodeRow(request_id, token_id, start, (table,), GREEDY, 0, 0)


def loaded(model: nn.Module) -> LoadedModel:
    """What the loader makes of a model, for tests that have no files."""
    return LoadedModel(
        name="tiny",
        model=model,
        config={},
        tokenizer=None,  # type: ignore[arg-type]
        eos_token_ids=frozenset(),
        context_length=CONTEXT_LENGTH,
        num_parameters=0,
        weight_bytes=0,
        quantization="float32",
        architecture="llama",
    )
