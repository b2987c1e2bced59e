"""Bad input to Ollama's dialect: {"error": "..."} with a status, and the name of the field."""

import asyncio
from typing import Any

import httpx
import pytest
from fake_engine import FakeHost, Gate
from helpers_ollama import HELLO, lines

from mlxserve.api.app import create_app
from mlxserve.api.metrics import Metrics
from mlxserve.config import ServerConfig
from mlxserve.errors import (
    ContextLengthExceeded,
    EngineError,
    InvalidParameter,
    ModelLoadError,
    QueueFull,
    RequestTimeout,
)

TOOL = {"type": "function", "function": {"name": "f"}}


def tool(**function: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **function}}]


def check(reply: httpx.Response, status: int, *words: str) -> None:
    assert reply.status_code == status, reply.text
    content = reply.json()
    assert content.keys() == {"error"}
    for word in words:
        assert word in content["error"]


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"temperature": "hot"}, "options.temperature"),
        ({"temperature": -1}, "options.temperature"),
        ({"top_k": 1.5}, "options.top_k"),
        ({"top_k": "40"}, "options.top_k"),
        ({"top_p": True}, "options.top_p"),
        ({"min_p": 2}, "options.min_p"),
        ({"repeat_penalty": 0}, "options.repeat_penalty"),
        ({"repeat_last_n": -2}, "options.repeat_last_n"),
        ({"presence_penalty": 3}, "options.presence_penalty"),
        ({"frequency_penalty": []}, "options.frequency_penalty"),
        ({"seed": "x"}, "options.seed"),
        ({"seed": 2**70}, "options.seed"),
        ({"num_predict": -3}, "options.num_predict"),
        ({"num_ctx": -1}, "options.num_ctx"),
        ({"stop": 7}, "options.stop"),
        ({"stop": [""]}, "options.stop[0]"),
        ({"stop": ["x"] * 1000}, "options.stop"),
        ({"stop": "x" * 501}, "options.stop"),
        ({"num_gpu": "all"}, "options.num_gpu"),
        ({"use_mmap": 1}, "options.use_mmap"),
        ({"mirostat_tau": "x"}, "options.mirostat_tau"),
    ],
)
def test_options(host: FakeHost, http: httpx.Client, fields: dict[str, Any], word: str) -> None:
    check(http.post("/api/chat", json={"model": "fake", "messages": HELLO, "options": fields}), 400, word)
    assert host.requests == []


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"messages": [{"role": "user", "content": "Hi", "images": ["aGk="]}]}, "messages[0].images"),
        ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
        ({"messages": "Hi"}, "messages"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{**TOOL, "type": "magic"}]}, "tools[0].type"),
        ({"tools": tool(name="")}, "tools[0].function.name"),
        ({"tools": tool(parameters=[])}, "tools[0].function.parameters"),
        ({"tools": tool(parameters={"type": "array"})}, "tools[0].function.parameters"),
        ({"tools": tool(parameters={"properties": ["x"]})}, "tools[0].function.parameters"),
        ({"tools": tool(parameters={"properties": {"x": 1}})}, "tools[0].function.parameters"),
        ({"tools": tool(parameters={"required": "x"})}, "tools[0].function.parameters"),
        ({"format": "yaml"}, "format"),
        ({"format": True}, "format"),
        ({"think": "hard"}, "think"),
        ({"think": 1}, "think"),
        ({"keep_alive": "5 minutes"}, "keep_alive"),
        ({"keep_alive": "m"}, "keep_alive"),
        ({"keep_alive": True}, "keep_alive"),
        ({"keep_alive": "9" * 400}, "keep_alive"),
        ({"options": []}, "options"),
        ({"stream": "no"}, "stream"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"model": ""}, "model"),
        ({"model": None}, "model"),
        ({"temperature": 1}, "temperature"),
    ],
)
def test_chat(host: FakeHost, http: httpx.Client, fields: dict[str, Any], word: str) -> None:
    body = {"model": "fake", "messages": HELLO, **fields}
    check(http.post("/api/chat", json=body), 400, word)
    assert host.requests == []


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"prompt": ["Hi"]}, "prompt"),
        ({"images": ["aGk="]}, "images"),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"suffix": ["}"]}, "suffix"),
        ({"suffix": "}", "system": "Be brief."}, "system"),
        ({"suffix": "}", "raw": True}, "suffix"),
        ({"context": "abc"}, "context"),
        ({"context": [1, -1]}, "context[1]"),
        ({"context": [2**31]}, "context[0]"),
        ({"raw": True, "system": "Be brief."}, "system"),
        ({"raw": True, "context": [1]}, "context"),
        ({"width": 512}, "width"),
    ],
)
def test_generate(host: FakeHost, http: httpx.Client, fields: dict[str, Any], word: str) -> None:
    check(http.post("/api/generate", json={"model": "fake", "prompt": "Hi", **fields}), 400, word)
    assert host.requests == []


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat", "/api/show", "/api/pull", "/api/copy", "/api/create"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"{}", b'{"model": "\xff"}'])
def test_bodies_that_are_none(host: FakeHost, http: httpx.Client, path: str, body: bytes) -> None:
    check(http.post(path, content=body), 400)


@pytest.mark.parametrize(
    ("method", "path", "field"),
    [
        ("POST", "/api/show", "model"),
        ("POST", "/api/pull", "name"),
        ("DELETE", "/api/delete", "model"),
        ("POST", "/api/copy", "destination"),
        ("POST", "/api/create", "model"),
    ],
)
@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "./x", "~/x", "a/../b", "a\\b", "x\n", "x\0", "x" * 201, 7])
def test_names_that_are_paths(
    host: FakeHost, http: httpx.Client, method: str, path: str, field: str, name: Any
) -> None:
    body = {"source": "fake"} if path == "/api/copy" else {"from": "fake"} if path == "/api/create" else {}
    check(http.request(method, path, json={**body, field: name}), 400, field)
    assert len(host.library.models()) == 2


@pytest.mark.parametrize("field", ["files", "adapters", "messages", "quantize", "modelfile", "path"])
def test_create_refuses(host: FakeHost, http: httpx.Client, field: str) -> None:
    check(http.post("/api/create", json={"model": "x", "from": "fake", field: {"a": "b"}}), 400, field)
    assert host.library.created == []


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
@pytest.mark.parametrize("stream", [False, True])
def test_unknown_model(host: FakeHost, http: httpx.Client, path: str, stream: bool) -> None:
    body = {"model": "none", "stream": stream} | ({"prompt": "Hi"} if "gen" in path else {"messages": HELLO})
    check(http.post(path, json=body), 404, "model 'none' not found")


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (QueueFull("40 requests are waiting", retry_after=2.0), 503, "waiting"),
        (
            ContextLengthExceeded("9 of 8", num_tokens=9, limit=8, param="messages"),
            400,
            "messages: 9 of 8",
        ),
        (InvalidParameter('"fake" does not support thinking', param="think"), 400, '"fake" does not support thinking'),
        (RequestTimeout("too late"), 504, "too late"),
        (EngineError("it broke"), 500, "it broke"),
        (ValueError("secret"), 500, "log"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals(host: FakeHost, http: httpx.Client, error: Exception, status: int, words: str, stream: bool) -> None:
    host.script.refusal = error
    reply = http.post("/api/chat", json={"model": "fake", "messages": HELLO, "stream": stream})
    check(reply, status, words)
    assert "secret" not in reply.text
    assert reply.headers.get("retry-after") == ("2" if isinstance(error, QueueFull) else None)


class TestMidStream:
    @pytest.mark.parametrize("error", [EngineError("it broke"), ValueError("secret")])
    def test_a_failure_is_the_last_line(self, host: FakeHost, http: httpx.Client, error: Exception) -> None:
        host.script.failure = error
        *parts, last = lines(http.post("/api/generate", json={"model": "fake", "prompt": "Hi"}))
        assert "".join(part["response"] for part in parts) == "Hello, world!"
        assert last.keys() == {"error"}
        assert "secret" not in last["error"]

    @pytest.mark.parametrize("stream", [False, True])
    def test_an_end_without_a_reason(self, host: FakeHost, http: httpx.Client, stream: bool) -> None:
        host.script.finishes = False
        reply = http.post("/api/chat", json={"model": "fake", "messages": HELLO, "stream": stream})
        assert reply.status_code == (200 if stream else 500)
        assert "without saying why" in (lines(reply)[-1] if stream else reply.json())["error"]

    def test_a_load_that_fails_after_the_headers(
        self, host: FakeHost, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("mlxserve.api.exchange.HEADERS_AFTER", 0.01)
        host.script.tokenise = gate = Gate()
        host.script.refusal = ModelLoadError("no memory for it", model="fake")
        with http.stream("POST", "/api/chat", json={"model": "fake", "messages": HELLO}) as reply:
            assert reply.status_code == 200
            gate.open()
            reply.read()
        assert lines(reply) == [{"error": "no memory for it"}]


def test_what_does_not_fit(host: FakeHost, http: httpx.Client) -> None:
    check(http.post("/api/generate", json={"model": "fake", "prompt": "x" * 4096}), 400, "4096")


def test_other_paths_and_methods(http: httpx.Client) -> None:
    check(http.get("/api/nothing"), 404, "/api/nothing")
    check(http.get("/api/chat"), 405, "GET /api/chat")
    check(http.post("/api/tags"), 405, "POST /api/tags")
    assert http.get("/v1/nothing").json()["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("headers", "config", "status"),
    [
        ({"host": "evil.example"}, ServerConfig(), 403),
        ({"origin": "https://evil.example"}, ServerConfig(), 403),
        ({}, ServerConfig(api_key="secret"), 401),
    ],
)
@pytest.mark.parametrize("path", ["/api/tags", "/api/chat"])
def test_security(headers: dict[str, str], config: ServerConfig, status: int, path: str) -> None:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(FakeHost(), config, Metrics()))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:11711") as client:
            return await client.get(path, headers=headers)

    check(asyncio.run(ask()), status)


def test_bodies_that_are_too_large() -> None:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(FakeHost(), ServerConfig(max_body_bytes=1024), Metrics()))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:11711") as client:
            return await client.post("/api/generate", json={"model": "fake", "prompt": "x" * 2000})

    check(asyncio.run(ask()), 413, "max_body_bytes")
