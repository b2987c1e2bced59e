"""What happened to the requests of this process: those under way and the latest that ended. Event loop only."""

import json
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from mlxserve.core.generation import (
    ChatPrompt,
    GenerationRequest,
    InfillPrompt,
    Prompt,
    TextPrompt,
    TokenPrompt,
    Usage,
)
from mlxserve.core.request import Request, RequestStatus
from mlxserve.core.stats import StepRecord
from mlxserve.engine.timeline import Timeline

MAX_RECENT = 200
MAX_EVENTS = 4096
"""Of one request, and as many tokens; what comes after them is counted only."""
MAX_PROMPT_CHARACTERS = 20_000


@dataclass(frozen=True, slots=True)
class TraceEvent:
    time: float
    """time.monotonic()"""
    kind: str
    details: dict[str, int | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Counts:
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0


@dataclass(slots=True, eq=False)
class RequestTrace:
    """One request: its stamps, and what the steps did to it."""

    request_id: str
    model: str
    timeline: Timeline
    priority: int
    prompt: str | None
    """Its beginning, where the server was told to show prompts."""
    traceparent: str | None = None
    """As in core.generation.Arrival."""
    request: Request | None = None
    """What the engine works on, from the inbox to the end. Its counts are read here while the engine writes them."""
    outcome: str | None = None
    """A FinishReason's value or an error class's name, when it is known."""
    usage: Usage | None = None
    """With the outcome."""
    num_events_left_out: int = 0
    _last_counts: Counts = field(default_factory=Counts)
    _events: list[TraceEvent] = field(default_factory=list)
    _num_preemptions: int = 0
    _is_preempted: bool = False
    _token_times: "array[float]" = field(default_factory=lambda: array("d"))
    _token_steps: "array[int]" = field(default_factory=lambda: array("q"))

    @property
    def state(self) -> str:
        """The stage it is in; one that was preempted is queued again."""
        self._take_scheduled()
        state = self.timeline.state
        request = self.request
        if state in ("prefill", "decode") and request is not None and request.status is RequestStatus.WAITING:
            return "queued"
        return state

    @property
    def counts(self) -> Counts:
        request = self.request
        if request is None:
            return self._last_counts
        return Counts(
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_computed_tokens=request.num_computed_tokens,
            num_generated_tokens=request.num_output_tokens if self.usage is None else self.usage.num_generated_tokens,
            num_preemptions=request.num_preemptions,
        )

    def let_go(self) -> None:
        """Keep the counts of a request that is over, and not its tokens."""
        self._take_scheduled()
        self._last_counts = self.counts
        self.request = None

    def note_chunk(self, step: StepRecord, start: int, num_tokens: int) -> None:
        self._note_resumed(step)
        self._add(TraceEvent(step.end, "chunk", {"step_id": step.step_id, "start": start, "num_tokens": num_tokens}))

    def note_row(self, step: StepRecord) -> None:
        self._note_resumed(step)

    def note_released(self, step: StepRecord) -> None:
        """The engine let go of its blocks: unless it has ended, it was preempted when the step was scheduled."""
        if self.request is not None and self.request.num_preemptions > self._num_preemptions:
            self._num_preemptions += 1
            self._is_preempted = True
            self._add(TraceEvent(step.begin, "preempted"))

    def note_token(self, time: float, step_id: int | None) -> None:
        if len(self._token_times) < MAX_EVENTS:
            self._token_times.append(time)
            self._token_steps.append(-1 if step_id is None else step_id)
        else:
            self.num_events_left_out += 1

    def events(self) -> list[TraceEvent]:
        """All that happened, in order of time."""
        self._take_scheduled()
        timeline = self.timeline
        stamps = [
            ("received", timeline.received),
            ("parsed", timeline.parsed),
            ("loaded", timeline.loaded),
            ("templated", timeline.templated),
            ("tokenised", timeline.tokenised),
            ("queued", timeline.tokenised),
            ("scheduled", timeline.scheduled),
        ]
        events = [TraceEvent(time, kind) for kind, time in stamps if time is not None]
        num_cached_tokens = self.counts.num_cached_tokens
        if timeline.scheduled is not None and num_cached_tokens > 0:
            events.append(TraceEvent(timeline.scheduled, "cache_hit", {"num_tokens": num_cached_tokens}))
        events += self._events
        tokens = zip(self._token_times, self._token_steps, strict=True)
        for index, (time, step_id) in enumerate(tokens):
            details: dict[str, int | str] = {"index": index} if step_id < 0 else {"index": index, "step_id": step_id}
            events.append(TraceEvent(time, "token" if index else "first_token", details))
        ends = [("first_delivery", timeline.first_delivery)]
        if timeline.computed is not None or timeline.finished is not None:
            ends.append(("last_token", timeline.last_token))
        ends += [("computed", timeline.computed), ("finished", timeline.finished), ("delivered", timeline.delivered)]
        for kind, stamp in ends:
            if stamp is not None:
                details = {"outcome": self.outcome} if kind == "finished" and self.outcome is not None else {}
                events.append(TraceEvent(stamp, kind, details))
        # Stable: of the same time, in the order in which they stand here.
        return sorted(events, key=lambda event: event.time)

    def _take_scheduled(self) -> None:
        """The engine stamps the request itself, also while its first step is still being computed."""
        if self.timeline.scheduled is None and self.request is not None:
            self.timeline.scheduled = self.request.first_scheduled_time

    def _note_resumed(self, step: StepRecord) -> None:
        if self._is_preempted:
            self._is_preempted = False
            self._add(TraceEvent(step.begin, "resumed", {"step_id": step.step_id}))

    def _add(self, event: TraceEvent) -> None:
        if len(self._events) < MAX_EVENTS:
            self._events.append(event)
        else:
            self.num_events_left_out += 1


class Journal:
    """Traces of the requests under way, and of the latest MAX_RECENT that ended."""

    def __init__(self, *, keep_prompts: bool = False) -> None:
        self._keep_prompts = keep_prompts
        self._live: dict[RequestTrace, None] = {}
        self._recent: deque[RequestTrace] = deque(maxlen=MAX_RECENT)
        self.on_closed: Callable[[RequestTrace], None] | None = None
        """Told about each request that is over. Whoever wants to know sets it, once."""

    def open(self, request_id: str, model: str, request: GenerationRequest, timeline: Timeline) -> RequestTrace:
        prompt = _shown(request.prompt) if self._keep_prompts else None
        traceparent = None if request.arrival is None else request.arrival.traceparent
        trace = RequestTrace(request_id, model, timeline, request.priority, prompt, traceparent)
        self._live[trace] = None
        return trace

    def drop(self, trace: RequestTrace) -> None:
        """Forget a request that others take the place of."""
        self._live.pop(trace, None)

    def close(self, trace: RequestTrace) -> None:
        """A request is over: its answer was written out, or there is nobody to write it for. Once is enough."""
        if trace in self._live:
            del self._live[trace]
            trace.let_go()
            self._recent.append(trace)
            if self.on_closed is not None:
                self.on_closed(trace)

    def __iter__(self) -> Iterator[RequestTrace]:
        """Those under way, oldest first, then the ended ones, newest first."""
        yield from sorted(self._live, key=lambda trace: trace.timeline.received)
        yield from reversed(self._recent)

    def find(self, request_id: str) -> RequestTrace | None:
        """The newest request of that id; one under way goes before those that ended."""
        return next((trace for trace in self if trace.request_id == request_id), None)


def _shown(prompt: Prompt) -> str:
    match prompt:
        case ChatPrompt(messages=messages):
            text = json.dumps(messages, ensure_ascii=False, default=str)
        case TextPrompt(text=text):
            pass
        case InfillPrompt(prefix=prefix, suffix=suffix):
            text = json.dumps({"prefix": prefix, "suffix": suffix}, ensure_ascii=False)
        case TokenPrompt(token_ids=token_ids):
            text = " ".join(map(str, token_ids[:MAX_PROMPT_CHARACTERS]))
    return text[:MAX_PROMPT_CHARACTERS]
