"""Models whose layers keep more or less than plain keys and values, on mlx-lm's own caches behind the same steps.

Sequences take turns within a step instead of sharing a forward pass; each has its own caches, found by request id. Rows
must not carry drafts: what a recurrent layer has taken in of a wrong one cannot be taken back.
"""

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlxserve.core.step import PrefillChunk, SampledToken, ScheduledStep, StepResult
from mlxserve.errors import EngineError
from mlxserve.runner.sampler import Sampler


class FallbackRunner:
    """`max_pass_tokens`: prefill tokens of one forward pass; a longer chunk is done in several."""

    def __init__(
        self,
        model: nn.Module,
        *,
        max_pass_tokens: int,
        make_cache: Callable[[nn.Module], list[Any]] = make_prompt_cache,
    ) -> None:
        self._model = model
        self._max_pass_tokens = max_pass_tokens
        self._make_cache = make_cache
        self._sampler = Sampler()
        self._caches: dict[str, list[Any]] = {}

    def run(self, step: ScheduledStep) -> StepResult:
        started = time.perf_counter()
        for request_id in step.released:
            self._caches.pop(request_id, None)
        for chunk in step.prefill:
            self._prefill(chunk)
        prefilled = time.perf_counter()
        tokens: list[tuple[SampledToken, ...]] = []
        for row in step.decode:
            logits = self._model(mx.array([[row.token_id]]), cache=self._cache_of(row.request_id, row.start))[:, -1]
            sampled = self._sampler.sample(logits, [row])
            mx.eval(sampled.arrays())
            tokens.append(sampled.collect())
        return StepResult(step.step_id, tuple(tokens), prefilled - started, time.perf_counter() - prefilled)

    def reset(self) -> None:
        self._caches.clear()

    def _prefill(self, chunk: PrefillChunk) -> None:
        cache = self._cache_of(chunk.request_id, chunk.start)
        for first in range(0, len(chunk.token_ids), self._max_pass_tokens):
            self._model(mx.array([chunk.token_ids[first : first + self._max_pass_tokens]]), cache=cache)
            mx.eval([layer.state for layer in cache])

    def _cache_of(self, request_id: str, start: int) -> list[Any]:
        """The sequence's caches; new ones at its first token, also when a preempted one starts over."""
        if start == 0:
            self._caches[request_id] = self._make_cache(self._model)
        elif request_id not in self._caches:
            raise EngineError(f"request {request_id} goes on at position {start} and has no cache")
        return self._caches[request_id]
