"""Bodies on their way in: they end at a stop and at a long pause, and what cannot be read of them is told truly."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_engine import FakeHost, run_server, serve
from starlette.applications import Starlette

from mlxserve.api import connection
from mlxserve.api.app import create_app
from mlxserve.api.metrics import Metrics
from mlxserve.config import ServerConfig

PATHS = ["/v1/chat/completions", "/v1/messages", "/api/chat"]


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[FakeHost, str]]:
    host = FakeHost()
    with serve(create_app(host, ServerConfig(), Metrics())) as address:
        yield host, address


def half_a_request(address: str, path: str) -> socket.socket:
    host, _, port = address.removeprefix("http://").partition(":")
    connected = socket.create_connection((host, int(port)), timeout=10)
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: 200\r\n\r\n"
    connected.sendall(f'{head}{{"model":'.encode())
    return connected


def error_of(reply: bytes, path: str) -> str:
    """The message of a reply with an error in the shape of its dialect."""
    content = httpx.Response(200, content=reply.partition(b"\r\n\r\n")[2]).json()
    if path == "/api/chat":
        return content["error"]
    if path == "/v1/messages":
        assert content["type"] == "error"
    return content["error"]["message"]


def read_to_end(connected: socket.socket) -> bytes:
    reply = b""
    while data := connected.recv(65536):
        reply += data
    return reply


def app() -> Starlette:
    return create_app(FakeHost(), ServerConfig(), Metrics())


@pytest.mark.parametrize("path", PATHS)
def test_a_pause_ends_it(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BODY_PAUSE_SECONDS", 0.05)
    with run_server(app()) as (address, _), half_a_request(address, path) as connected:
        reply = read_to_end(connected)
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert "Nothing of the body came" in error_of(reply, path)


@pytest.mark.parametrize("path", PATHS)
def test_a_stop_ends_it(path: str) -> None:
    application = app()
    begun = threading.Event()
    read = application.state.bodies.read

    async def noted(*arguments: Any) -> bytes:
        begun.set()
        return await read(*arguments)

    application.state.bodies.read = noted

    async def with_stop(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/stop":
            application.state.bodies.stop()
        await application(scope, receive, send)

    with run_server(with_stop) as (address, server), half_a_request(address, path) as connected:
        assert begun.wait(10)
        httpx.get(f"{address}/stop", trust_env=False)
        server.should_exit = True
        reply = read_to_end(connected)
    assert reply.startswith(b"HTTP/1.1 503 ")
    assert error_of(reply, path) == "the server is stopping"


def test_later_requests_get_no_patience() -> None:
    application = app()
    application.state.bodies.stop()
    with run_server(application) as (address, _):
        assert httpx.post(f"{address}/v1/completions", json={"model": "fake", "prompt": "Hi"}).status_code == 200
        with half_a_request(address, "/v1/completions") as connected:
            assert connected.recv(65536).startswith(b"HTTP/1.1 503 ")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"model": "\\ud800"}', "half of a surrogate pair"),
        (b'{"model": "\\udc00x"}', "half of a surrogate pair"),
        (b'{"\\ud800": 1}', "half of a surrogate pair"),
        (b'{"seed": ' + b"9" * 5000 + b', "model": "\\ud800"}', "a number of thousands of digits"),
        (b'{"model": "\\ud8', "not valid JSON"),
        (b'{"model": "\\ud800}', "not valid JSON"),
        (b'{"a":' * 300 + b"1" + b"}" * 300, "more than 200 levels"),
    ],
)
def test_what_json_allows_and_we_do_not(host: FakeHost, http: httpx.Client, body: bytes, message: str) -> None:
    reply = http.post("/v1/chat/completions", content=body)
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]
    assert ("not valid JSON" in reply.json()["error"]["message"]) == (message == "not valid JSON")


def test_a_field_without_a_name(host: FakeHost, http: httpx.Client) -> None:
    reply = http.post("/v1/completions", json={"model": "fake", "prompt": "Hi", "": 1})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["message"], error["param"], error["code"]) == ("Unknown parameter: ''.", "", "unknown_parameter")


@pytest.mark.parametrize(("headers", "status"), [({}, 401), ({"host": "evil.example"}, 403)])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/fake"])
def test_models_are_refused_in_the_shape_of_the_client(path: str, headers: dict[str, str], status: int) -> None:
    with serve(create_app(FakeHost(), ServerConfig(api_key="secret"), Metrics())) as address:
        theirs = httpx.get(address + path, headers={"anthropic-version": "2023-06-01", **headers}, trust_env=False)
        ours = httpx.get(address + path, headers=headers, trust_env=False)
    assert theirs.status_code == ours.status_code == status
    assert (theirs.json()["type"], theirs.headers["request-id"]) == ("error", theirs.json()["request_id"])
    assert set(ours.json()) == {"error"}
