"""/debug: what each request is waiting for, what the steps computed, and both as a trace for Chrome or Perfetto.

Times are seconds. What is called `time`, `received` or `now` is Unix time; the engine's clock has no date, so all of
these are reckoned back from the moment of the answer.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlxserve.api.trace_events import trace_events
from mlxserve.core.stats import EngineStats, StepRecord
from mlxserve.errors import InvalidParameter, RequestNotFound

if TYPE_CHECKING:
    from mlxserve.engine.journal import RequestTrace
    from mlxserve.engine.model_host import ModelHost

DEFAULT_LIMIT = 200
MAX_LIMIT = 100_000


class DebugRoutes:
    def __init__(self, host: "ModelHost") -> None:
        self._host = host

    def routes(self) -> list[Route]:
        return [
            Route("/debug/requests", self.list_requests),
            Route("/debug/requests/{request_id:path}", self.get_request),
            Route("/debug/steps", self.list_steps),
            Route("/debug/trace", self.trace),
        ]

    async def list_requests(self, request: Request) -> Response:
        limit = _numbers(request, limit=DEFAULT_LIMIT)["limit"]
        origin = _clock_origin()
        traces = list(self._host.journal)[:limit]
        return JSONResponse({"now": time.time(), "requests": [request_object(trace, origin) for trace in traces]})

    async def get_request(self, request: Request) -> Response:
        _numbers(request)
        request_id = request.path_params["request_id"]
        found = self._host.journal.find(request_id)
        if found is None:
            raise RequestNotFound(
                f"There is no request {request_id!r} here any more, or there never was; "
                "GET /debug/requests lists those that are remembered.",
                param="request_id",
            )
        origin = _clock_origin()
        events = [{"time": origin + event.time, "kind": event.kind, **event.details} for event in found.events()]
        content = request_object(found, origin) | {
            "now": time.time(),
            "events": events,
            "num_events_left_out": found.num_events_left_out,
        }
        return JSONResponse(content)

    async def list_steps(self, request: Request) -> Response:
        numbers = _numbers(request, after=-1, limit=DEFAULT_LIMIT)
        origin = _clock_origin()
        stats = self._host.stats()
        models = []
        for name, steps in self._host.steps().items():
            new = [step for step in steps if step.step_id > numbers["after"]]
            shown = new[len(new) - min(numbers["limit"], len(new)) :]
            models.append(
                {"model": name, **_engine_object(stats[name]), "steps": [step_object(step, origin) for step in shown]}
            )
        return JSONResponse({"now": time.time(), "models": models})

    async def trace(self, request: Request) -> Response:
        limit = _numbers(request, limit=DEFAULT_LIMIT)["limit"]
        content = {
            "traceEvents": trace_events(list(self._host.journal)[:limit], self._host.steps(), _clock_origin()),
            "displayTimeUnit": "ms",
        }
        return JSONResponse(content, headers={"content-disposition": 'attachment; filename="mlxserve-trace.json"'})


def request_object(trace: "RequestTrace", origin: float) -> dict[str, Any]:
    """A request as it stands. `origin`: the Unix time at which time.monotonic() was 0."""
    # First the state: it looks at what the engine stamped meanwhile.
    state = trace.state
    stages = trace.timeline.stages()
    counts = trace.counts
    content: dict[str, Any] = {
        "id": trace.request_id,
        "model": trace.model,
        "state": state,
        "received": origin + trace.timeline.received,
        "stages": {
            "front_end": stages.front_end,
            "queue": stages.queue,
            "prefill": stages.prefill,
            "decode": stages.decode,
            "delivery": stages.delivery,
        },
        "total": stages.total,
        "ttft": trace.timeline.time_to_first_token,
        "num_prompt_tokens": counts.num_prompt_tokens,
        "num_cached_tokens": counts.num_cached_tokens,
        "num_computed_tokens": counts.num_computed_tokens,
        "num_generated_tokens": counts.num_generated_tokens,
        "num_preemptions": counts.num_preemptions,
        "priority": trace.priority,
        "outcome": trace.outcome,
    }
    if trace.prompt is not None:
        content["prompt"] = trace.prompt
    return content


def step_object(step: StepRecord, origin: float) -> dict[str, Any]:
    return {
        "step_id": step.step_id,
        "time": origin + step.end,
        "num_rows": len(step.rows),
        "num_chunks": len(step.chunks),
        "num_prefill_tokens": step.num_prefill_tokens,
        "num_draft_tokens": step.num_draft_tokens,
        "budget": step.budget,
        "predicted": step.predicted,
        "measured": step.measured,
        "num_running": step.num_running,
        "num_waiting": step.num_waiting,
        "num_blocks_used": step.num_blocks_used,
        "num_blocks_cached": step.num_blocks_cached,
        "requests": list(dict.fromkeys([*(chunk.request_id for chunk in step.chunks), *step.rows])),
    }


def _engine_object(stats: EngineStats) -> dict[str, Any]:
    return {
        "num_running": stats.num_running,
        "num_waiting": stats.num_waiting,
        "num_steps": stats.num_steps,
        "num_preemptions": stats.num_preemptions,
        "blocks": {
            "used": stats.num_blocks_used,
            "shared": stats.num_blocks_shared,
            "cached": stats.num_blocks_cached,
            "max": stats.max_blocks,
        },
    }


def _clock_origin() -> float:
    return time.time() - time.monotonic()


def _numbers(request: Request, **defaults: int) -> dict[str, int]:
    """The query's parameters: whole numbers, from 0 on, each at most once.

    Raises:
        InvalidParameter: one is unknown or no such number.
    """
    numbers = dict(defaults)
    for name, text in request.query_params.multi_items():
        if name not in defaults:
            known = f"it takes {_listed(list(defaults))}" if defaults else "it takes none"
            raise InvalidParameter(f"Unknown parameter: '{name}'; {known}.", param=name, code="unknown_parameter")
        if len(request.query_params.getlist(name)) > 1:
            raise InvalidParameter(f"'{name}' is given more than once.", param=name)
        is_number = text.isascii() and text.isdigit() and len(text) < 16
        if not is_number or (name == "limit" and not 1 <= int(text) <= MAX_LIMIT):
            allowed = f"from 1 to {MAX_LIMIT}" if name == "limit" else "from 0 on"
            raise InvalidParameter(f"Invalid '{name}': it must be a whole number {allowed}, not {text!r}.", param=name)
        numbers[name] = int(text)
    return numbers


def _listed(names: Sequence[str]) -> str:
    return " and ".join(f"'{name}'" for name in names)
