"""Requests as OpenTelemetry spans, as an OTLP collector gets them."""

import gzip
import itertools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from helpers_http import Server, serving
from helpers_served import FakeBuild
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from mlxserve.api.spans import otlp_spans
from mlxserve.errors import ConfigError

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"


class Collector:
    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    def spans(self) -> list[Any]:
        requests = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        return [
            span
            for request in requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            is_zipped = self.headers.get("content-encoding") == "gzip"
            collector.bodies.append(gzip.decompress(body) if is_zipped else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield collector, f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
        finally:
            server.shutdown()
            thread.join()


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    with serving(FakeBuild(monkeypatch), tmp_path) as server:
        yield server


def test_a_request_is_a_span_with_a_child_for_each_stage(server: Server) -> None:
    with collecting() as (collector, endpoint):
        spans = otlp_spans(endpoint)
        server.host.journal.on_closed = spans.request_ended
        reply = server.complete(max_tokens=3).json()
        seconds = server.get(f"/debug/requests/{reply['id']}").json()["stages"]
        spans.close()
    (root,) = [span for span in collector.spans() if not span.parent_span_id]
    children = [span for span in collector.spans() if span.parent_span_id]
    assert root.name == "chat one"
    assert {span.trace_id for span in children} == {root.trace_id}
    assert {span.parent_span_id for span in children} == {root.span_id}
    found = attributes(root)
    assert found["gen_ai.response.id"] == reply["id"]
    assert found["gen_ai.usage.input_tokens"] == reply["usage"]["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == 3
    assert found["mlxserve.outcome"] == "length"
    assert "first_token" in [event.name for event in root.events]
    # In order, without gaps, from the first moment to the last.
    assert children[0].start_time_unix_nano == root.start_time_unix_nano
    for span, following in itertools.pairwise(children):
        assert abs(following.start_time_unix_nano - span.end_time_unix_nano) <= 1000
    assert abs(children[-1].end_time_unix_nano - root.end_time_unix_nano) <= 1000
    for span in children:
        lasted = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        assert lasted == pytest.approx(seconds[span.name.replace(" ", "_")], abs=1e-5)


def test_a_request_belongs_to_its_clients_trace(server: Server) -> None:
    with collecting() as (collector, endpoint):
        spans = otlp_spans(endpoint)
        server.host.journal.on_closed = spans.request_ended
        body = {"model": "one", "prompt": "the cat", "max_tokens": 1}
        for header in (PARENT, "nonsense"):
            server.client.post("/v1/completions", json=body, headers={"traceparent": header})
        spans.close()
    traces = {span.trace_id.hex(): span for span in collector.spans() if span.name == "chat one"}
    assert len(traces) == 2
    assert traces[TRACE_ID].parent_span_id.hex() == PARENT.split("-")[2]


def test_a_refused_request_is_an_error(server: Server) -> None:
    with collecting() as (collector, endpoint):
        spans = otlp_spans(endpoint)
        server.host.journal.on_closed = spans.request_ended
        assert server.complete("the cat " * 2000).status_code == 400
        spans.close()
    (root,) = [span for span in collector.spans() if span.name == "chat one"]
    assert root.status.message == "ContextLengthExceeded"


def test_without_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"mlxserve\[otel\]"):
        otlp_spans("http://127.0.0.1:4318/v1/traces")
