"""One accepted request: what the engine did to it in, its events out. Runs on the event loop."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable

from mlxserve.core.generation import (
    Embedding,
    Finished,
    GenerationEvent,
    PrefillProgress,
    PromptLogprobs,
    Timings,
    Usage,
)
from mlxserve.core.request import FinishReason, Request
from mlxserve.core.step import SampledToken, TokenLogprobs
from mlxserve.engine.answer_text import AnswerText
from mlxserve.engine.engine_thread import Computed
from mlxserve.engine.journal import RequestTrace
from mlxserve.engine.timeline import Timeline
from mlxserve.errors import (
    EngineError,
    MlxserveError,
    RequestCancelled,
    RequestTimeout,
)


class Generation:
    """The events of one accepted request: PrefillProgress and PromptLogprobs if asked for, deltas of its text, and
    Finished; or an error raised in their place.

    Raises from iteration:
        RequestTimeout: its deadline passed.
        RequestCancelled: the server is stopping, or cancel() was called while somebody iterates.
        EngineError, EngineDead: computing it failed.
    """

    def __init__(
        self,
        request: Request,
        *,
        text: AnswerText,
        timeline: Timeline,
        trace: RequestTrace,
        abort: Callable[[FinishReason], None],
        on_token_interval: Callable[[float], None],
        on_end: Callable[["Generation", str, Usage, Timings], None],
        on_delivered: Callable[[], None],
        is_delivered_later: bool,
        wants_progress: bool = False,
    ) -> None:
        """`is_delivered_later`: whoever reads it calls delivered(); else its end is its delivery."""
        self.request_id = request.request_id
        self.num_prompt_tokens = request.num_prompt_tokens
        self._request = request
        self._text = text
        self._timeline = timeline
        self.trace = trace
        self._abort = abort
        self._on_token_interval = on_token_interval
        self._on_end = on_end
        self._on_delivered = on_delivered
        self._is_delivered_later = is_delivered_later
        self._wants_progress = wants_progress
        self._arrivals: asyncio.Queue[Computed | PrefillProgress | MlxserveError] = asyncio.Queue()
        self._ready: deque[GenerationEvent | MlxserveError] = deque()
        self._num_cached_tokens = 0
        self._num_generated_tokens = 0
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0
        self._ended = False

    @property
    def token_ids(self) -> list[int]:
        """Those of the prompt, and of the answer as far as it was read, the one that ended it included."""
        return self._request.token_ids[: self.num_prompt_tokens + self._num_generated_tokens]

    def receive(self, item: Computed | MlxserveError) -> None:
        """Take what the engine did to this request. The engine thread's deliveries call this on the event loop."""
        if self._ended:
            return
        timeline = self._timeline
        if isinstance(item, MlxserveError):
            timeline.computed = time.monotonic()
        else:
            if timeline.first_token is None and item.output.tokens:
                self.note_computed(self.num_prompt_tokens, item.time)
            for _ in item.output.tokens:
                if timeline.first_token is None:
                    timeline.first_token = item.time
                elif timeline.last_token is not None:
                    self._on_token_interval(item.time - timeline.last_token)
                timeline.last_token = item.time
                self.trace.note_token(item.time, item.step_id)
            if item.output.finish_reason is not None:
                timeline.computed = item.time
        self._arrivals.put_nowait(item)

    def note_computed(self, num_prompt_tokens: int, time: float) -> None:
        """So many tokens of the prompt were there when a step ended; `time` is time.monotonic() then."""
        # What is computed after the first token is computed again.
        if self._wants_progress and not self._ended and self._timeline.first_token is None:
            request, begin = self._request, self._request.first_scheduled_time
            seconds = 0.0 if begin is None else time - begin
            self._arrivals.put_nowait(
                PrefillProgress(self.num_prompt_tokens, request.num_cached_tokens, num_prompt_tokens, seconds)
            )

    def delivered(self) -> None:
        """Its answer was written out, or nobody wants it any more."""
        self._timeline.delivered = time.monotonic()
        self._on_delivered()

    def cancel(self, why: str = "the client went away") -> None:
        """Stop computing it and free its blocks in the next step. Without effect once it ended."""
        if not self._ended:
            self._abort(FinishReason.CANCELLED)
            self._ready.clear()
            self._end(FinishReason.CANCELLED.value, RequestCancelled(f"the request was cancelled: {why}"))
            # Somebody may be waiting for an arrival; what wakes it up is never looked at.
            self._arrivals.put_nowait(RequestCancelled(why))

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> GenerationEvent:
        while not self._ready:
            if self._ended:
                raise StopAsyncIteration
            arrivals = [await self._arrivals.get()]
            # A reader that was slow gets everything since in one delta.
            while not self._arrivals.empty():
                arrivals.append(self._arrivals.get_nowait())
            if not self._ended:
                self._process(self._take_progress(arrivals))
        event = self._ready.popleft()
        if isinstance(event, MlxserveError):
            raise event
        return event

    def _take_progress(
        self, arrivals: list[Computed | PrefillProgress | MlxserveError]
    ) -> list[Computed | MlxserveError]:
        """Give out the latest progress, all of which came before any token; return the other arrivals."""
        others: list[Computed | MlxserveError] = []
        latest: PrefillProgress | None = None
        for item in arrivals:
            if isinstance(item, PrefillProgress):
                latest = item
            else:
                others.append(item)
        if latest is not None:
            self._ready.append(latest)
        return others

    def _process(self, arrivals: list[Computed | MlxserveError]) -> None:
        """Turn arrivals into deltas, and Finished or an error when they end the request."""
        text = self._text
        for item in arrivals:
            if isinstance(item, MlxserveError):
                self._emit()
                self._end(type(item).__name__, item)
                return
            output = item.output
            self._num_cached_tokens = output.num_cached_tokens
            self._num_draft_tokens = output.num_draft_tokens
            self._num_accepted_tokens = output.num_accepted_tokens
            # The token that ended the answer (end of sequence, stop token) is counted but is no part of it.
            num_shown = len(output.tokens) - (output.finish_reason is FinishReason.STOP)
            for number, token in enumerate(output.tokens, 1):
                self._num_generated_tokens += 1
                if self._num_generated_tokens == 1 and self._request.sampling.prompt_logprobs is not None:
                    self._ready.append(self._prompt_logprobs(output.prompt_logprobs))
                if number <= num_shown:
                    text.add(token, is_free=self._num_generated_tokens <= self._request.sampling.min_tokens)
                if text.stop_string is not None:
                    break
            if output.embedding is not None:
                self._ready.append(Embedding(normalised(output.embedding)))
            reason = output.finish_reason
            if reason is not None and text.stop_string is None:
                text.finish(is_cut=reason is FinishReason.LENGTH)
            if text.stop_string is not None:
                if reason is None:
                    self._abort(FinishReason.STOP)
                reason = FinishReason.STOP
            if reason is not None:
                self._emit()
                self._finish(reason, output.error)
                return
        self._emit()

    def _prompt_logprobs(self, logprobs: tuple[TokenLogprobs, ...]) -> PromptLogprobs:
        pairs = zip(self._request.prompt_token_ids, (None, *logprobs), strict=True)
        return PromptLogprobs(tuple(SampledToken(token_id, logprob) for token_id, logprob in pairs))

    def _emit(self) -> None:
        deltas = self._text.take()
        if deltas and self._timeline.first_delivery is None:
            self._timeline.first_delivery = time.monotonic()
        self._ready.extend(deltas)

    def _finish(self, reason: FinishReason, error: str | None) -> None:
        match reason:
            case FinishReason.STOP | FinishReason.LENGTH:
                self._end(reason.value, reason)
            case FinishReason.TIMEOUT:
                self._end(reason.value, RequestTimeout("the request did not finish before its deadline"))
            case FinishReason.CANCELLED:
                self._end(reason.value, RequestCancelled("the request was cancelled"))
            case FinishReason.ERROR:
                self._end(reason.value, EngineError(error or "the engine failed while computing this request"))

    def _end(self, outcome: str, last: FinishReason | MlxserveError) -> None:
        self._ended = True
        self._timeline.scheduled = self._request.first_scheduled_time
        self._timeline.finished = time.monotonic()
        usage = Usage(
            self.num_prompt_tokens,
            self._num_cached_tokens,
            self._num_generated_tokens,
            self._num_draft_tokens,
            self._num_accepted_tokens,
            self._text.num_reasoning_tokens,
        )
        timings = self._timeline.timings()
        if isinstance(last, FinishReason):
            text = self._text
            self._ready.append(Finished(last, text.stop_string, usage, timings, text.num_tool_calls))
        else:
            self._ready.append(last)
        self.trace.outcome, self.trace.usage = outcome, usage
        self._on_end(self, outcome, usage, timings)
        if not self._is_delivered_later:
            self.delivered()


def normalised(vector: tuple[float, ...]) -> tuple[float, ...]:
    """The vector of length 1 in the same direction; zeros stay zeros."""
    length = math.sqrt(math.fsum(value * value for value in vector))
    return tuple(value / length for value in vector) if length > 0.0 else vector
