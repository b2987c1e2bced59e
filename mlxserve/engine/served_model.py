"""A loaded model as the dialects see it: requests in, generations out. Runs on the event loop."""

import asyncio
import logging
import secrets
import time
from concurrent.futures import Executor
from dataclasses import replace

from mlxserve.config import EngineConfig
from mlxserve.core.generation import (
    GenerationRequest,
    Prompt,
    Timings,
    Usage,
)
from mlxserve.core.request import FinishReason, Request, Speculation
from mlxserve.core.sampling_params import SamplingParams, sample_seed
from mlxserve.core.stats import EngineStats, Observer, RequestRecord, StepRecord
from mlxserve.engine.engine_thread import EngineHandle, EngineThread
from mlxserve.engine.generation import Generation
from mlxserve.engine.journal import Journal
from mlxserve.engine.model_description import ModelDescription
from mlxserve.engine.prompt_reader import Prepared, PromptReader
from mlxserve.engine.text_service import TextService
from mlxserve.engine.timeline import Timeline
from mlxserve.errors import (
    ContextLengthExceeded,
    EngineDead,
    InvalidParameter,
    QueueFull,
)
from mlxserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class ServedModel:
    """A loaded model as the dialects see it."""

    def __init__(
        self,
        description: ModelDescription,
        tokenizer: Tokenizer,
        *,
        thread: EngineThread,
        handle: EngineHandle,
        config: EngineConfig,
        executor: Executor,
        observer: Observer | None,
        journal: Journal | None = None,
    ) -> None:
        self.description = description
        self.tokenizer = tokenizer
        self.text = TextService(tokenizer, executor, description.system)
        self._reader = PromptReader(description, tokenizer)
        self._thread = thread
        self._handle = handle
        self._config = config
        self._executor = executor
        self._observer = observer
        self._journal = Journal() if journal is None else journal
        self._in_flight: dict[str, Generation] = {}
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._mean_duration = 1.0
        handle.step_sinks.append(self._note_step)

    @property
    def name(self) -> str:
        return self.description.name

    @property
    def context_length(self) -> int:
        return self.description.context_length

    @property
    def default_sampling(self) -> dict[str, float | int]:
        return self.description.default_sampling

    @property
    def death(self) -> str | None:
        """Why this model computes nothing any more; None while it is well."""
        return self._handle.death or self._thread.death

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def capacity(self) -> int:
        """Requests it takes at a time, running and waiting."""
        return self._config.max_queue + self._config.max_num_seqs

    @property
    def num_unsaved_blocks(self) -> int:
        """KV blocks that are still to go to disk; of a dead model none."""
        return 0 if self.death is not None else self._handle.engine.num_unsaved_blocks

    def stats(self) -> EngineStats:
        return self._handle.engine.stats()

    def steps(self) -> list[StepRecord]:
        """The latest steps, oldest first."""
        return list(self._handle.engine.records)

    async def generate(self, request: GenerationRequest) -> Generation:
        """Template, tokenise, compile the grammar of, and queue a request.

        Raises:
            InvalidParameter: the prompt cannot be rendered or tokenised, a token id is unknown, the grammar cannot be
                enforced, the model cannot speculate as asked, or a request of this id is in flight.
            ContextLengthExceeded: the prompt leaves no room for an answer.
            QueueFull: too many requests are waiting already.
            EngineDead: the engine computes nothing any more, or the server is stopping.
        """
        (generation,) = await self.generate_samples(request, 1)
        return generation

    async def generate_samples(self, request: GenerationRequest, num_samples: int) -> list[Generation]:
        """generate() for several answers to one prompt, tokenised once and, with prefix caching, computed once.

        They are requests of their own, which succeed and fail by themselves; their ids are the request's with -0, -1,
        ... behind it, and each has a seed that follows from the request's and its index. Only the first one gives
        PromptLogprobs. None is queued if this raises, which it does as generate().
        """
        timeline = Timeline.of(request.arrival)
        trace = self._journal.open(request.request_id, self.name, request, timeline)
        try:
            generations = await self._admit(request, num_samples, timeline)
        except BaseException as error:
            cancelled = isinstance(error, asyncio.CancelledError)
            outcome = FinishReason.CANCELLED.value if cancelled else type(error).__name__
            self._record(request.request_id, outcome, Usage(0, 0, 0), timeline.timings())
            trace.outcome = outcome
            timeline.finished = timeline.delivered = time.monotonic()
            self._journal.close(trace)
            raise
        self._journal.drop(trace)
        return generations

    async def count_tokens(self, prompt: Prompt) -> int:
        """How many tokens a prompt has, whether it fits or not.

        Raises:
            InvalidParameter: as generate().
        """
        return await self.text.count_tokens(prompt)

    async def _admit(self, request: GenerationRequest, num_samples: int, timeline: Timeline) -> list[Generation]:
        self._check_alive()
        self._check_queue(num_samples)
        self._check_token_ids(request.sampling)
        # Counted from here on: a burst must not tokenise a thousand prompts to refuse them afterwards.
        self._handle.num_arriving += num_samples
        try:
            prepared = await self._prepare(request, num_samples, timeline)
        except ContextLengthExceeded as error:
            if request.context_length is not None and request.context_length < self.context_length:
                error.param = request.context_length_param or error.param
            raise
        finally:
            self._handle.num_arriving -= num_samples
        self._check_alive()
        ids = [request.request_id]
        if num_samples > 1:
            ids = [f"{request.request_id}-{index}" for index in range(num_samples)]
        for request_id in ids:
            if request_id in self._handle.request_ids:
                raise InvalidParameter(f"a request with the id {request_id!r} is in flight", param="request_id")
        timeline.tokenised = time.monotonic()
        seed = request.sampling.seed if request.sampling.seed is not None else secrets.randbits(64)
        return [
            self._submit(request, request_id, prepared, index, seed, timeline) for index, request_id in enumerate(ids)
        ]

    async def _prepare(self, request: GenerationRequest, num_samples: int, timeline: Timeline) -> Prepared:
        """What PromptReader.read() gives, for a prompt that fits. Raises as it, and ContextLengthExceeded."""
        prepared = await asyncio.get_running_loop().run_in_executor(
            self._executor, self._reader.read, request, num_samples, timeline
        )
        num_prompt_tokens, limit = len(prepared.prompt_ids), self.description.limit_of(request)
        if num_prompt_tokens + (not request.wants_embedding) > limit:
            room = "does not fit into" if request.wants_embedding else "leaves no room for an answer within"
            raise ContextLengthExceeded(
                f"the prompt has {num_prompt_tokens} tokens and {room} the context length of {limit} tokens; "
                "shorten it",
                num_tokens=num_prompt_tokens,
                limit=limit,
                param=request.prompt.param,
            )
        return prepared

    def _submit(
        self,
        request: GenerationRequest,
        request_id: str,
        prepared: Prepared,
        index: int,
        seed: int,
        timeline: Timeline,
    ) -> Generation:
        """Queue sample `index` of a request under an id of its own."""
        sampling = request.sampling
        if index > 0 and sampling.prompt_logprobs is not None:
            sampling = replace(sampling, prompt_logprobs=None)
        limit = self.description.limit_of(request)
        max_tokens = sampling.max_tokens or limit
        timeout = request.timeout if request.timeout is not None else self._config.request_timeout
        max_total_tokens = min(limit, len(prepared.prompt_ids) + max_tokens)
        if request.wants_embedding:
            # Room for a token that never comes.
            max_total_tokens = len(prepared.prompt_ids) + 1
        timeline = replace(timeline)
        began = timeline.received if timeline.loaded is None else timeline.loaded
        engine_request = Request(
            request_id=request_id,
            prompt_token_ids=prepared.prompt_ids,
            sampling=sampling,
            eos_token_ids=self._reader.end_ids(request.prompt),
            seed=sample_seed(seed, index),
            max_total_tokens=max_total_tokens,
            arrival_time=began,
            deadline=None if timeout is None else began + timeout,
            priority=request.priority,
            cache_salt=request.cache_salt,
            constraint=prepared.constraints[index],
            speculation=self._speculation(request),
            pooling=self.description.pooling if request.wants_embedding else None,
        )
        trace = self._journal.open(request_id, self.name, request, timeline)
        trace.request = engine_request
        generation = Generation(
            engine_request,
            text=self._reader.answer_text(request, prepared.parsers[index]),
            timeline=timeline,
            trace=trace,
            abort=lambda reason: self._thread.abort(self._handle, request_id, reason),
            on_token_interval=self._observe_interval,
            on_end=self._ended,
            on_delivered=lambda: self._journal.close(trace),
            is_delivered_later=request.arrival is not None,
            wants_progress=request.wants_progress,
        )
        self._in_flight[request_id] = generation
        self._handle.request_ids.add(request_id)
        self._idle.clear()
        self._thread.submit(self._handle, engine_request, generation.receive)
        return generation

    async def drain(self, timeout: float) -> None:
        """Refuse new requests and wait for running ones to end; cancel what is left after `timeout` seconds."""
        self._is_draining = True
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            logger.warning(
                "%s: cancelling %d requests that did not finish in %g s", self.name, self.num_in_flight, timeout
            )
        for generation in list(self._in_flight.values()):
            generation.cancel("the server is stopping")

    def _check_alive(self) -> None:
        if self._is_draining:
            raise EngineDead("the server is stopping")
        if self.death is not None:
            raise EngineDead(self.death)

    def _check_token_ids(self, sampling: SamplingParams) -> None:
        """An unknown token would be ignored in silence; the client took it from another model's tokenizer."""
        named = {
            "logit_bias": [token_id for token_id, _ in sampling.logit_bias],
            "stop_token_ids": sampling.stop_token_ids,
        }
        for param, token_ids in named.items():
            for token_id in token_ids:
                if token_id not in self.tokenizer:
                    raise InvalidParameter(f"{param}: {self.name} has no token with the id {token_id}", param=param)

    def _check_queue(self, num_new: int) -> None:
        num_requests = len(self._in_flight) + self._handle.num_arriving
        if num_new > self.capacity:
            raise InvalidParameter(
                f"this server takes {self.capacity} requests at a time, and each of {num_new} answers is one", param="n"
            )
        if num_requests + num_new > self.capacity:
            raise QueueFull(
                f"{num_requests} requests are running or waiting, the most this server takes; try again later",
                retry_after=max(1.0, self._mean_duration / self._config.max_num_seqs),
            )

    def _speculation(self, request: GenerationRequest) -> Speculation:
        """Raises InvalidParameter: the request asks for a kind that this model does not have."""
        kinds, asked = self.description.speculation, request.speculation
        if asked is None:
            default = Speculation(self._config.speculation)
            # A setting is for all models, also those that cannot do it.
            return default if default in kinds else Speculation.AUTO
        if asked in kinds:
            return asked
        if asked is Speculation.DRAFT:
            reason = f"{self.name} has no draft model; start the server with --draft-model, or ask for 'ngram'"
        else:
            reason = f"{self.name} runs on mlx-lm's own caches and cannot speculate; leave it out"
        raise InvalidParameter(f"speculation {asked.value!r}: {reason}", param="speculation")

    def _note_step(self, step: StepRecord) -> None:
        for request_id in step.released:
            if (generation := self._in_flight.get(request_id)) is not None:
                generation.trace.note_released(step)
        for chunk in step.chunks:
            if (generation := self._in_flight.get(chunk.request_id)) is not None:
                generation.trace.note_chunk(step, chunk.start, chunk.num_tokens)
                generation.note_computed(chunk.start + chunk.num_tokens, step.end)
        for request_id in step.rows:
            if (generation := self._in_flight.get(request_id)) is not None:
                generation.trace.note_row(step)

    def _observe_interval(self, seconds: float) -> None:
        if self._observer is not None:
            self._observer.inter_token_latency(self.name, seconds)

    def _ended(self, generation: Generation, outcome: str, usage: Usage, timings: Timings) -> None:
        del self._in_flight[generation.request_id]
        self._handle.request_ids.discard(generation.request_id)
        if not self._in_flight:
            self._idle.set()
        self._mean_duration += 0.1 * (timings.total - self._mean_duration)
        self._record(generation.request_id, outcome, usage, timings)

    def _record(self, request_id: str, outcome: str, usage: Usage, timings: Timings) -> None:
        rate = usage.num_generated_tokens - 1
        logger.info(
            "request id=%s model=%s prompt_tokens=%d cached_tokens=%d generated_tokens=%d ttft=%.3fs tokens_per_s=%.1f "
            "drafts_accepted=%d/%d reasoning_tokens=%d finish=%s",
            request_id,
            self.name,
            usage.num_prompt_tokens,
            usage.num_cached_tokens,
            usage.num_generated_tokens,
            timings.time_to_first_token,
            rate / timings.decode if rate > 0 and timings.decode > 0 else 0.0,
            usage.num_accepted_tokens,
            usage.num_draft_tokens,
            usage.num_reasoning_tokens,
            outcome,
        )
        if self._observer is not None:
            self._observer.request_finished(RequestRecord(request_id, self.name, outcome, usage, timings))
