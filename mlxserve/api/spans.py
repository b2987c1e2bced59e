"""Requests as OpenTelemetry spans: one for the request, and below it one for each stage its time went into.

Attributes are those of OpenTelemetry's conventions for generative AI, and beside them vLLM's for latencies. A request
whose client sent a W3C `traceparent` header becomes a part of the client's trace. Needs the extra `otel`.
"""

import time
from typing import TYPE_CHECKING

from mlxserve import __version__
from mlxserve.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from mlxserve.engine.journal import RequestTrace

AttributeValue = str | int | float


class RequestSpans:
    """Makes the spans of each request that is over, and hands them to an exporter from a thread of its own."""

    def __init__(self, exporter: "SpanExporter") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": "mlxserve", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("mlxserve", __version__)

    def request_ended(self, trace: "RequestTrace") -> None:
        from opentelemetry import trace as otel
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        origin = time.time() - time.monotonic()
        carrier = {} if trace.traceparent is None else {"traceparent": trace.traceparent}
        begin = origin + trace.timeline.received
        root = self._tracer.start_span(
            f"chat {trace.model}",
            # Without a client's trace it is a new one, whatever this process does itself.
            TraceContextTextMapPropagator().extract(carrier),
            kind=otel.SpanKind.SERVER,
            start_time=_nanoseconds(begin),
            attributes=_attributes(trace),
        )
        for event in trace.events():
            if event.kind in ("chunk", "cache_hit", "preempted", "resumed", "first_token"):
                root.add_event(event.kind, event.details, _nanoseconds(origin + event.time))
        if trace.outcome not in ("stop", "length", "cancelled"):
            root.set_status(otel.Status(otel.StatusCode.ERROR, trace.outcome))
        context = otel.set_span_in_context(root)
        for name, seconds in _stages(trace):
            if seconds > 0.0:
                stage = self._tracer.start_span(name, context, start_time=_nanoseconds(begin))
                stage.end(_nanoseconds(begin + seconds))
            begin += seconds
        root.end(_nanoseconds(begin))

    def close(self) -> None:
        """Export what is left."""
        self._provider.shutdown()


def otlp_spans(endpoint: str) -> RequestSpans:
    """Spans that go to an OTLP collector over HTTP, such as http://127.0.0.1:4318/v1/traces.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(
            "otlp_traces_endpoint needs OpenTelemetry, which is not installed: pip install 'mlxserve[otel]'"
        ) from error
    return RequestSpans(OTLPSpanExporter(endpoint=endpoint))


def _attributes(trace: "RequestTrace") -> dict[str, AttributeValue]:
    counts, timeline = trace.counts, trace.timeline
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "mlxserve",
        "gen_ai.request.model": trace.model,
        "gen_ai.response.id": trace.request_id,
        "gen_ai.usage.input_tokens": counts.num_prompt_tokens,
        "gen_ai.usage.output_tokens": counts.num_generated_tokens,
        "mlxserve.usage.cached_tokens": counts.num_cached_tokens,
        "mlxserve.num_preemptions": counts.num_preemptions,
        "gen_ai.latency.e2e": timeline.stages().total,
    }
    if trace.outcome is not None:
        attributes["mlxserve.outcome"] = trace.outcome
    if timeline.time_to_first_token is not None:
        attributes["gen_ai.latency.time_to_first_token"] = timeline.time_to_first_token
    return attributes


def _stages(trace: "RequestTrace") -> list[tuple[str, float]]:
    stages = trace.timeline.stages()
    return [
        ("front end", stages.front_end),
        ("queue", stages.queue),
        ("prefill", stages.prefill),
        ("decode", stages.decode),
        ("delivery", stages.delivery),
    ]


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
