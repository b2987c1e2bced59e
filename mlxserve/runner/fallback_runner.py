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

from mlxserve.core.constraint import MaskSource, TokenMasks
from mlxserve.core.step import PrefillChunk, SampledToken, ScheduledStep, StepResult, TokenLogprobs
from mlxserve.errors import EngineError
from mlxserve.runner.pooling import pool, values
from mlxserve.runner.sampler import Sampler
from mlxserve.runner.scoring import MAX_SCORED_TOKENS, score
from mlxserve.runner.trunk import find_trunk, has_trunk


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

    def run(self, step: ScheduledStep, masks: MaskSource | None = None) -> StepResult:
        started = time.perf_counter()
        for request_id in step.released:
            self._caches.pop(request_id, None)
        prefilled_chunks = [self._prefill(chunk) for chunk in step.prefill]
        prefilled = time.perf_counter()
        tokens: list[tuple[SampledToken, ...]] = []
        token_masks: TokenMasks | None = None
        for index, row in enumerate(step.decode):
            logits = self._model(mx.array([[row.token_id]]), cache=self._cache_of(row.request_id, row.start))[:, -1]
            if row.is_constrained and token_masks is None:
                if masks is None:
                    raise EngineError("a step with constrained rows needs their masks")
                mx.async_eval(logits)  # type: ignore[no-untyped-call]
                token_masks = masks(step, {})
            row_mask = token_masks.row(index) if row.is_constrained and token_masks is not None else None
            sampled = self._sampler.sample(logits, [row], masks=row_mask)
            mx.eval(sampled.arrays())
            tokens.append(sampled.collect())
        return StepResult(
            step_id=step.step_id,
            tokens=tuple(tokens),
            prefill_time=prefilled - started,
            decode_time=time.perf_counter() - prefilled,
            scores=tuple(scores for scores, _ in prefilled_chunks if scores),
            failures={} if token_masks is None else token_masks.failures,
            pooled=tuple(pooled for _, pooled in prefilled_chunks if pooled is not None),
        )

    @property
    def can_embed(self) -> bool:
        """Whether chunks may have pooling."""
        return has_trunk(self._model)

    def reset(self) -> None:
        self._caches.clear()

    def _prefill(self, chunk: PrefillChunk) -> tuple[tuple[TokenLogprobs, ...], tuple[float, ...] | None]:
        """What the chunk's scored_ids ask for, and what its pooling does."""
        cache = self._cache_of(chunk.request_id, chunk.start)
        scores: list[TokenLogprobs] = []
        pooled: mx.array | None = None
        hidden: list[mx.array] = []
        trunk = None if chunk.pooling is None else find_trunk(self._model)
        if trunk is not None:
            trunk.observe = hidden.append
        # The head of these models cannot be run apart: logits come for all tokens of a pass, or for none.
        size = min(self._max_pass_tokens, MAX_SCORED_TOKENS) if chunk.scored_ids else self._max_pass_tokens
        for first in range(0, len(chunk.token_ids), size):
            logits = self._model(mx.array([chunk.token_ids[first : first + size]]), cache=cache)[0]
            scores += score(chunk, first, logits, lambda logits: logits)
            if hidden:
                pooled = pool(chunk.pooling, pooled, hidden.pop()[0].astype(mx.float32))
                mx.eval(pooled)
            mx.eval([layer.state for layer in cache])
        if trunk is not None:
            trunk.observe = None
        return tuple(scores), None if pooled is None else values(pooled)

    def _cache_of(self, request_id: str, start: int) -> list[Any]:
        """The sequence's caches; new ones at its first token, also when a preempted one starts over."""
        if start == 0:
            self._caches[request_id] = self._make_cache(self._model)
        elif request_id not in self._caches:
            raise EngineError(f"request {request_id} goes on at position {start} and has no cache")
        return self._caches[request_id]
