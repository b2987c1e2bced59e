"""Will it fit: a model's weights and caches against a machine's memory, before anything is loaded."""

from dataclasses import dataclass
from typing import Any

from mlxserve.errors import ModelTooLarge
from mlxserve.store.kv_estimate import KVEstimate, estimate_kv
from mlxserve.store.machine import Machine
from mlxserve.store.model_facts import ModelFacts
from mlxserve.store.size_text import size_text

HEADROOM = 0.1
"""Share of the budget left to the arrays of a step; the engine leaves the same."""
MIN_CONTEXT = 256
"""Tokens without room for which a model is of no use."""
STREAM_LENGTHS = (4096, 8192)

_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_NUM_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "num_active_experts")


@dataclass(frozen=True, slots=True)
class CacheFit:
    """What fits beside the weights with keys and values of `bits` bits."""

    bits: int
    bytes_per_token: int
    max_context: int
    """Tokens of one stream, the model's context length at most; 0 if the weights do not fit."""
    num_streams: dict[int, int]
    """Length of streams in tokens -> how many of them fit."""


@dataclass(frozen=True, slots=True)
class Fit:
    machine: Machine
    weight_bytes: int
    """In memory: as the files have them on a GPU, as float32 on a CPU."""
    bytes_read: int
    """Of weights, for a token."""
    caches: tuple[CacheFit, ...]
    """By bits; without an entry where the config does not tell."""

    @property
    def fits(self) -> bool:
        """Whether the weights and a short context do."""
        bytes_per_token = self.caches[0].bytes_per_token if self.caches else 0
        return self.weight_bytes + bytes_per_token * MIN_CONTEXT <= self.machine.budget

    @property
    def max_tokens_per_second(self) -> float | None:
        """Of one stream with next to no context: memory bandwidth over the bytes read a token."""
        bandwidth = self.machine.bandwidth
        return bandwidth / self.bytes_read if bandwidth is not None and self.bytes_read else None

    def line(self, bits: int | None = None) -> str:
        """For the log; `bits`: of the KV cache, None: as it is by itself."""
        parts = [f"weights {size_text(self.weight_bytes)} of {size_text(self.machine.budget)}"]
        for cache in [each for each in self.caches if bits in (None, each.bits)][:1]:
            streams = ", ".join(f"{count} of {length}" for length, count in cache.num_streams.items())
            parts.append(f"KV cache {cache.bytes_per_token / 1e3:.1f} KB a token, streams that fit: {streams} tokens")
        if (rate := self.max_tokens_per_second) is not None:
            parts.append(f"at most {rate:.0f} tokens/s a stream")
        return "; ".join(parts)


def fit(facts: ModelFacts, machine: Machine, context_length: int, kv_bytes: int | None = None) -> Fit:
    """How a model fits into a machine. `kv_bytes`: of its KV cache; None: what the budget leaves."""
    scale = 1.0 if machine.is_metal else facts.num_parameters * 4 / max(facts.weight_bytes, 1)
    weight_bytes = round(facts.weight_bytes * scale)
    room = int(machine.budget * (1 - HEADROOM)) - weight_bytes if kv_bytes is None else kv_bytes
    kv = estimate_kv(facts.config, facts.architecture)
    caches: list[CacheFit] = []
    if kv is not None and kv.layers:
        plain = 16 if machine.is_metal else 32
        caches = [_cache_fit(kv, bits, room, context_length) for bits in (plain, *((8, 4) if kv.can_quantise else ()))]
    return Fit(machine, weight_bytes, round(_bytes_read(facts) * scale), tuple(caches))


def require_fit(found: Fit, name: str) -> None:
    """Refuse what cannot be loaded.

    Raises:
        ModelTooLarge: the weights leave no room for a short context.
    """
    if found.fits:
        return
    needed, budget = found.weight_bytes, found.machine.budget
    kv = f" and {found.caches[0].bytes_per_token / 1e3:.0f} KB for each token of context" if found.caches else ""
    raise ModelTooLarge(
        f"{name} does not fit into this machine's memory: its weights take {needed / 1e9:.1f} GB{kv}, and models may "
        f"take {budget / 1e9:.1f} of its {found.machine.memory / 1e9:.1f} GB; choose a smaller one, or fewer bits",
        model=name,
        needed=needed,
        limit=budget,
    )


def _cache_fit(kv: KVEstimate, bits: int, room: int, context_length: int) -> CacheFit:
    low, high = 0, context_length
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if kv.bytes_of(middle, bits) <= room else (low, middle - 1)
    lengths = [length for length in STREAM_LENGTHS if length <= context_length] or [context_length]
    streams = {length: max(room, 0) // max(kv.bytes_of(length, bits), 1) for length in lengths}
    return CacheFit(bits, kv.bytes_per_token(bits), low if room > 0 else 0, streams)


def _bytes_read(facts: ModelFacts) -> int:
    """Of a mixture of experts a token reads the active ones; of a table of embeddings one row."""
    read = facts.weight_bytes - facts.lookup_bytes
    num_experts = _number(facts, _NUM_EXPERTS, "expert_count")
    num_active = _number(facts, _NUM_ACTIVE, "expert_used_count")
    if num_experts and num_active and facts.num_parameters:
        experts = facts.weight_bytes * facts.expert_parameters / facts.num_parameters
        read -= round(experts * (1 - min(num_active / num_experts, 1)))
    return read


def _number(facts: ModelFacts, keys: tuple[str, ...], gguf_key: str) -> int | None:
    text = facts.config.get("text_config")
    sources: list[dict[str, Any]] = [facts.config, text if isinstance(text, dict) else {}]
    for source in sources:
        for key in (*keys, f"{facts.architecture}.{gguf_key}"):
            value = source.get(key)
            if type(value) is int and value > 0:
                return value
    return None
