"""Connections: clients that go away, stop reading or wait in silence, and a server that shuts down."""

import json
import signal
import socket
import time
from typing import Any

import httpx
import openai
import pytest
from fake_engine import FakeHost, Gate, Script, run_server, wait_until

from mlxserve.api import sse
from mlxserve.api.app import create_app
from mlxserve.api.metrics import Metrics
from mlxserve.config import ServerConfig

HELLO = [{"role": "user", "content": "Hi"}]
STREAM = {"model": "fake", "messages": HELLO, "stream": True}


class Caller:
    """A client on a bare socket, which can go away at any moment or stop reading."""

    def __init__(self, address: str, path: str = "/v1/chat/completions", **fields: Any) -> None:
        host, _, port = address.removeprefix("http://").partition(":")
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.settimeout(10)
        self.socket.connect((host, int(port)))
        body = json.dumps({"model": "fake", "messages": HELLO, **fields})
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        self.socket.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())

    def __enter__(self) -> "Caller":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


class TestDisconnect:
    @pytest.mark.parametrize("stream", [False, True])
    def test_while_loading(self, host: FakeHost, address: str, stream: bool) -> None:
        host.script.load = gate = Gate()
        with Caller(address, stream=stream):
            wait_until(lambda: gate.num_waiting)
        wait_until(lambda: host.abandoned == ["fake"])
        assert host.requests == []

    @pytest.mark.parametrize("stream", [False, True])
    def test_while_tokenising(self, host: FakeHost, address: str, stream: bool) -> None:
        host.script.tokenise = gate = Gate()
        with Caller(address, stream=stream):
            wait_until(lambda: gate.num_waiting)
        wait_until(lambda: host.abandoned == [host.requests[0].request_id])

    @pytest.mark.parametrize("stream", [False, True])
    def test_before_the_first_token(self, host: FakeHost, address: str, stream: bool) -> None:
        host.script.first_token = gate = Gate()
        with Caller(address, stream=stream):
            wait_until(lambda: gate.num_waiting)
        wait_until(lambda: host.cancelled == [host.requests[0].request_id])

    def test_in_the_stream(self, host: FakeHost, address: str) -> None:
        host.script.endless = True
        with Caller(address, stream=True) as caller:
            received = b""
            while b'"content":"H"' not in received:
                received += caller.socket.recv(4096)
        wait_until(lambda: host.cancelled == [host.requests[0].request_id])

    def test_with_several_prompts(self, host: FakeHost, address: str) -> None:
        host.script.first_token = gate = Gate()
        host.script.endless = True
        body = {"model": "fake", "prompt": ["a", "b"], "stream": True}
        with httpx.Client() as client, client.stream("POST", address + "/v1/completions", json=body):
            wait_until(lambda: gate.num_waiting == 2)
        wait_until(lambda: sorted(host.cancelled) == sorted(request.request_id for request in host.requests))

    def test_closing_the_clients_stream(self, host: FakeHost, address: str) -> None:
        host.script.endless = True
        with openai.OpenAI(base_url=address, api_key="none") as client:
            stream = client.chat.completions.create(model="fake", messages=HELLO, stream=True)
            next(iter(stream))
            stream.close()
        wait_until(lambda: host.cancelled == [host.requests[0].request_id])

    def test_a_reader_that_stops_reading_holds_up_nobody(self, host: FakeHost, address: str) -> None:
        host.script = Script(text="x" * 5000, endless=True)
        with Caller(address, stream=True) as caller:
            assert caller.socket.recv(100).startswith(b"HTTP/1.1 200")
            host.script = Script()
            for _ in range(20):
                assert httpx.post(address + "/v1/chat/completions", json=STREAM).text.endswith("data: [DONE]\n\n")
            assert host.cancelled == []
        wait_until(lambda: host.cancelled == [host.requests[0].request_id])


def test_quiet_streams_are_kept_alive(host: FakeHost, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.02)
    host.script.first_token = gate = Gate()
    with httpx.stream("POST", address + "/v1/chat/completions", json=STREAM) as reply:
        lines = reply.iter_lines()
        while next(lines) != ": keep-alive":
            pass
        gate.open()
        rest = list(lines)
    assert rest[-2:] == ["data: [DONE]", ""]


def test_streams_end_well_while_the_server_shuts_down() -> None:
    host = FakeHost()
    host.script.first_token = gate = Gate()
    with (
        run_server(create_app(host, ServerConfig(), Metrics())) as (address, server),
        httpx.stream("POST", address + "/v1/chat/completions", json=STREAM) as reply,
    ):
        wait_until(lambda: gate.num_waiting)
        server.handle_exit(signal.SIGTERM, None)
        time.sleep(0.7)  # sse-starlette looks for a shutdown every half second
        gate.open()
        assert list(reply.iter_lines())[-2:] == ["data: [DONE]", ""]
    assert host.cancelled == []
