"""Connections of Ollama's dialect: clients that go away, stop reading or wait, on bare sockets."""

import json
import signal
from typing import Any

import httpx
import ollama
import pytest
from fake_engine import FakeHost, Gate, Script, run_server, wait_until
from helpers_ollama import HELLO, lines
from test_api_disconnect import Caller

from mlxserve.api.app import create_app
from mlxserve.api.metrics import Metrics
from mlxserve.config import ServerConfig

CHAT = {"model": "fake", "messages": HELLO}


class TestDisconnect:
    @pytest.mark.parametrize("stream", [False, True])
    def test_while_loading(self, host: FakeHost, address: str, stream: bool) -> None:
        host.script.load = gate = Gate()
        with Caller(address, "/api/chat", stream=stream):
            wait_until(lambda: gate.num_waiting)
        wait_until(lambda: host.abandoned == ["fake"])
        assert host.requests == []

    def test_of_one_that_only_loads(self, host: FakeHost, address: str) -> None:
        host.script.load = gate = Gate()
        with Caller(address, "/api/chat", messages=[]):
            wait_until(lambda: gate.num_waiting)
        wait_until(lambda: host.abandoned == ["fake"])

    @pytest.mark.parametrize("stream", [False, True])
    def test_before_the_first_token(self, host: FakeHost, address: str, stream: bool) -> None:
        host.script.first_token = gate = Gate()
        with Caller(address, "/api/chat", stream=stream):
            wait_until(lambda: gate.num_waiting)
        wait_until(lambda: host.cancelled == [host.requests[0].request_id])
        wait_until(lambda: host.leases == [])

    def test_in_the_stream(self, host: FakeHost, address: str) -> None:
        host.script.endless = True
        with Caller(address, "/api/chat") as caller:
            received = b""
            while b'"content":"H"' not in received:
                received += caller.socket.recv(4096)
        wait_until(lambda: host.cancelled == [host.requests[0].request_id])
        wait_until(lambda: host.leases == [])

    def test_closing_the_clients_stream(self, host: FakeHost, address: str) -> None:
        host.script.endless = True
        with ollama.Client(address) as client:
            stream = client.generate("fake", "Hi", stream=True)
            next(stream)
            stream.close()
        wait_until(lambda: host.cancelled == [host.requests[0].request_id])

    def test_a_reader_that_stops_reading_holds_up_nobody(self, host: FakeHost, address: str) -> None:
        host.script = Script(text="x" * 5000, endless=True)
        with Caller(address, "/api/chat") as caller:
            assert caller.socket.recv(100).startswith(b"HTTP/1.1 200")
            host.script = Script()
            for _ in range(20):
                assert lines(httpx.post(address + "/api/chat", json=CHAT))[-1]["done"]
            assert host.cancelled == []
        wait_until(lambda: host.cancelled == [host.requests[0].request_id])


def test_lines_go_out_as_they_come(host: FakeHost, address: str) -> None:
    """The first ones are read while the last one cannot be there yet."""
    host.script.endless = True
    with httpx.stream("POST", address + "/api/chat", json=CHAT) as reply:
        assert reply.headers["x-accel-buffering"] == "no"
        texts = reply.iter_lines()
        assert json.loads(next(texts))["message"]["content"] == "H"
    wait_until(lambda: host.cancelled == [host.requests[0].request_id])


def test_headers_do_not_wait_for_the_model(host: FakeHost, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxserve.api.exchange.HEADERS_AFTER", 0.01)
    host.script.load = gate = Gate()
    with httpx.stream("POST", address + "/api/chat", json=CHAT) as reply:
        assert reply.status_code == 200
        gate.open()
        reply.read()
    assert lines(reply)[-1]["done_reason"] == "stop"


@pytest.mark.parametrize("text", ['a"b\\c\nd\re\u2028f\u0085g\x00', "é€😀", "\ufffd"])
def test_every_line_is_one_object(host: FakeHost, address: str, text: str) -> None:
    host.script.text = text
    content = httpx.post(address + "/api/generate", json={"model": "fake", "prompt": "Hi"}).content
    objects: list[dict[str, Any]] = [json.loads(line) for line in content.removesuffix(b"\n").split(b"\n")]
    assert "".join(each["response"] for each in objects) == text
    with ollama.Client(address) as client:
        assert "".join(part.response for part in client.generate("fake", "Hi", stream=True)) == text


def test_streams_end_well_while_the_server_shuts_down() -> None:
    host = FakeHost()
    host.script.first_token = gate = Gate()
    with (
        run_server(create_app(host, ServerConfig(), Metrics())) as (address, server),
        httpx.stream("POST", address + "/api/chat", json=CHAT) as reply,
    ):
        wait_until(lambda: gate.num_waiting)
        server.handle_exit(signal.SIGTERM, None)
        gate.open()
        reply.read()
        assert lines(reply)[-1]["done"]
    assert host.cancelled == []
