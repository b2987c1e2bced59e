"""Requests and steps in the Trace Event Format, which chrome://tracing and ui.perfetto.dev read.

Each model is a process. Its first thread holds the steps, every further one a request: a slice for each stage, and an
instant for each chunk, token and preemption. Running and waiting requests and KV blocks are counters.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlxserve.core.stats import StepRecord

if TYPE_CHECKING:
    from mlxserve.engine.journal import RequestTrace

TraceEvents = list[dict[str, Any]]

STEPS_THREAD = 0


def trace_events(
    traces: "Sequence[RequestTrace]", steps: Mapping[str, Sequence[StepRecord]], origin: float
) -> TraceEvents:
    """`origin`: the Unix time, in seconds, at which time.monotonic() was 0."""
    models = list(dict.fromkeys([*steps, *(trace.model for trace in traces)]))
    events: TraceEvents = []
    for process, model in enumerate(models, start=1):
        events.append(_name("process_name", process, STEPS_THREAD, model))
        events.append(_name("thread_name", process, STEPS_THREAD, "steps"))
        for step in steps.get(model, ()):
            events += _step_events(step, process, origin)
        own = sorted((trace for trace in traces if trace.model == model), key=lambda trace: trace.timeline.received)
        for thread, trace in enumerate(own, start=STEPS_THREAD + 1):
            events.append(_name("thread_name", process, thread, trace.request_id))
            events += _request_events(trace, process, thread, origin)
    return events


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _slice(name: str, process: int, thread: int, begin: float, seconds: float, **arguments: object) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": begin * 1e6,
        "dur": max(seconds, 0.0) * 1e6,
        "args": arguments,
    }


def _step_events(step: StepRecord, process: int, origin: float) -> Iterator[dict[str, Any]]:
    yield _slice(
        step.kind,
        process,
        STEPS_THREAD,
        origin + step.begin,
        step.measured,
        step_id=step.step_id,
        rows=len(step.rows),
        prefill_tokens=step.num_prefill_tokens,
        budget=step.budget,
        predicted_ms=step.predicted * 1e3,
    )
    counters = {
        "requests": {"running": step.num_running, "waiting": step.num_waiting},
        "KV blocks": {"used": step.num_blocks_used, "cached": step.num_blocks_cached},
    }
    for name, values in counters.items():
        yield {"ph": "C", "name": name, "pid": process, "ts": (origin + step.end) * 1e6, "args": values}


def _request_events(trace: "RequestTrace", process: int, thread: int, origin: float) -> Iterator[dict[str, Any]]:
    inner = trace.events()
    stages = trace.timeline.stages()
    begin = origin + trace.timeline.received
    arguments = {"id": trace.request_id, "outcome": trace.outcome}
    for name, seconds in (
        ("front end", stages.front_end),
        ("queue", stages.queue),
        ("prefill", stages.prefill),
        ("decode", stages.decode),
        ("delivery", stages.delivery),
    ):
        if seconds > 0.0:
            yield _slice(name, process, thread, begin, seconds, **arguments)
        begin += seconds
    for event in inner:
        if event.kind in ("chunk", "cache_hit", "preempted", "resumed", "first_token", "token"):
            yield {
                "ph": "i",
                "s": "t",
                "name": event.kind,
                "pid": process,
                "tid": thread,
                "ts": (origin + event.time) * 1e6,
                "args": event.details,
            }
