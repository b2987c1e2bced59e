"""Bad input and failures: each has its status, names its field, and leaves the engine alone."""

import json
import logging
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_engine import FakeHost, serve
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from mlxserve import errors
from mlxserve.api.app import create_app
from mlxserve.api.metrics import Metrics
from mlxserve.api.openai.errors import error_object, error_response
from mlxserve.api.openai.schema import CompletionRequest
from mlxserve.config import ServerConfig

MAX_BODY_BYTES = 11_000_000
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": "fake", "prompt": "Hi"}


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[FakeHost, str]]:
    host = FakeHost()
    with serve(create_app(host, ServerConfig(max_body_bytes=MAX_BODY_BYTES), Metrics())) as address:
        yield host, address


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object of a response of that status, checked for its shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    (key, error), *rest = response.json().items()
    assert (key, rest) == ("error", [])
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi", **fields}]}


def part(**fields: Any) -> dict[str, Any]:
    return message(content=[{"type": "text", "text": "a"}, fields])


BAD_CHAT = [
    # fields, param, code
    ({"model": None}, "model", "invalid_type"),
    ({"model": ""}, "model", "invalid_value"),
    ({"model": 5}, "model", "invalid_type"),
    ({"messages": None}, "messages", "invalid_type"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": "Hi"}, "messages", "invalid_type"),
    ({"messages": ["Hi"]}, "messages[0]", "invalid_type"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role", "missing_required_parameter"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
    (message(role="wizard"), "messages[0].role", "invalid_value"),
    (message(role="function"), "messages[0].role", "invalid_value"),
    (message(content=5), "messages[0].content", "invalid_type"),
    (message(content=[]), "messages[0].content", "invalid_value"),
    (message(content=["Hi"]), "messages[0].content[0]", "invalid_type"),
    (message(content=None), "messages[0].content", "missing_required_parameter"),
    (message(mood="good"), "messages[0].mood", "unknown_parameter"),
    (part(type="image_url", image_url={"url": "http://x/y.png"}), "messages[0].content[1]", "unsupported_parameter"),
    (part(type="input_audio", input_audio={}), "messages[0].content[1]", "unsupported_parameter"),
    (part(type="text"), "messages[0].content[1].text", "missing_required_parameter"),
    (part(text="b"), "messages[0].content[1].type", "missing_required_parameter"),
    (message(tool_calls=[{"id": "a"}]), "messages[0].tool_calls[0].function", "missing_required_parameter"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"stream": 1}, "stream", "invalid_type"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "invalid_type"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": -1}, "max_tokens", "invalid_value"),
    ({"max_tokens": "5"}, "max_tokens", "invalid_type"),
    ({"max_tokens": True}, "max_tokens", "invalid_type"),
    ({"max_tokens": 1.5}, "max_tokens", "invalid_type"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "invalid_value"),
    ({"temperature": -3}, "temperature", "invalid_value"),
    ({"temperature": 2.01}, "temperature", "invalid_value"),
    ({"temperature": True}, "temperature", "invalid_type"),
    ({"temperature": "0.5"}, "temperature", "invalid_type"),
    ({"top_p": 0}, "top_p", "invalid_value"),
    ({"top_p": 1.1}, "top_p", "invalid_value"),
    ({"top_k": -2}, "top_k", "invalid_value"),
    ({"top_k": 1.0}, "top_k", "invalid_type"),
    ({"min_p": -0.1}, "min_p", "invalid_value"),
    ({"seed": -1}, "seed", "invalid_value"),
    ({"seed": 2**64}, "seed", "invalid_value"),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop": 5}, "stop", "invalid_type"),
    ({"stop": ["a", ""]}, "stop[1]", "invalid_value"),
    ({"stop": ["a", 1]}, "stop[1]", "invalid_type"),
    ({"stop": ["a"] * 17}, "stop", "invalid_value"),
    ({"stop": [f"stop {number}" for number in range(1000)]}, "stop", "invalid_value"),
    ({"stop": ["a"] * 1_000_000}, "stop", "invalid_value"),
    ({"stop": "a" * 501}, "stop", "invalid_value"),
    ({"logprobs": 1}, "logprobs", "invalid_type"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", "invalid_type"),
    ({"metadata": {"a": 1}}, "metadata.a", "invalid_type"),
    ({"user": 1}, "user", "invalid_type"),
    ({"priority": "high"}, "priority", "invalid_type"),
    ({"cache_salt": ""}, "cache_salt", "invalid_value"),
    ({"timeout": 0}, "timeout", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 17}, "n", "invalid_value"),
    ({"n": 1000}, "n", "invalid_value"),
    ({"n": True}, "n", "invalid_type"),
    ({"n": 2, "timings": True}, "timings", "invalid_value"),
    ({"best_of": 2}, "best_of", "unknown_parameter"),
    ({"presence_penalty": 2.1}, "presence_penalty", "invalid_value"),
    ({"frequency_penalty": -2.1}, "frequency_penalty", "invalid_value"),
    ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    ({"repetition_penalty": 10.5}, "repetition_penalty", "invalid_value"),
    ({"repeat_last_n": -2}, "repeat_last_n", "invalid_value"),
    ({"repeat_last_n": 1.5}, "repeat_last_n", "invalid_type"),
    ({"typical_p": 0}, "typical_p", "invalid_value"),
    ({"typical_p": 1.1}, "typical_p", "invalid_value"),
    ({"logit_bias": [5]}, "logit_bias", "invalid_type"),
    ({"logit_bias": {"five": 10}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"-5": 10}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"\u0665": 10}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"1" * 5000: 10}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "invalid_value"),
    ({"logit_bias": {"5": None}}, "logit_bias.5", "invalid_type"),
    ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {str(number): 1 for number in range(1025)}}, "logit_bias", "invalid_value"),
    ({"min_tokens": -1}, "min_tokens", "invalid_value"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "invalid_value"),
    ({"stop_token_ids": 5}, "stop_token_ids", "invalid_type"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "invalid_value"),
    ({"stop_token_ids": [1] * 257}, "stop_token_ids", "invalid_value"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "invalid_value"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "invalid_value"),
    ({"speculation": "fast"}, "speculation", "invalid_value"),
    ({"speculation": {"type": "ngram"}}, "speculation", "invalid_value"),
    ({"echo": True}, "echo", "unsupported_parameter"),
    ({"keep_alive": True}, "keep_alive", "invalid_value"),
    ({"keep_alive": "soon"}, "keep_alive", "invalid_value"),
    ({"keep_alive": [5]}, "keep_alive", "invalid_value"),
    ({"keep_alive": 10**400}, "keep_alive", "invalid_value"),
    ({"keep_alive": "9" * 400 + "s"}, "keep_alive", "invalid_value"),
    ({"return_progress": True}, "return_progress", "invalid_value"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
    ({"function_call": {"name": "f"}}, "function_call", "unsupported_parameter"),
    ({"reasoning_effort": "much"}, "reasoning_effort", "invalid_value"),
    ({"reasoning_effort": 1}, "reasoning_effort", "invalid_value"),
    ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
    ({"max_token": 5}, "max_token", "unknown_parameter"),
    ({"prompt": "Hi"}, "prompt", "unknown_parameter"),
]

BAD_TEXT = [
    ({"prompt": None}, "prompt", "invalid_type"),
    ({"prompt": []}, "prompt", "invalid_type"),
    ({"prompt": 5}, "prompt", "invalid_type"),
    ({"prompt": ["a", 5]}, "prompt[1]", "invalid_type"),
    ({"prompt": [1, "a"]}, "prompt[1]", "invalid_type"),
    ({"prompt": [1, -1]}, "prompt[1]", "invalid_value"),
    ({"prompt": [1, True]}, "prompt[1]", "invalid_type"),
    ({"prompt": [[1], []]}, "prompt[1]", "invalid_value"),
    ({"prompt": ["a"] * 257}, "prompt", "invalid_value"),
    ({"prompt": ["a", "b"], "timings": True}, "timings", "invalid_value"),
    ({"logprobs": True}, "logprobs", "invalid_type"),
    ({"logprobs": 21}, "logprobs", "invalid_value"),
    ({"best_of": 17}, "best_of", "invalid_value"),
    ({"best_of": 2, "n": 3}, "best_of", "invalid_value"),
    ({"best_of": 3, "n": 2, "stream": True}, "best_of", "invalid_value"),
    ({"best_of": 2, "timings": True}, "timings", "invalid_value"),
    ({"echo": 1}, "echo", "invalid_type"),
    ({"suffix": 5}, "suffix", "invalid_type"),
    ({"suffix": ".", "echo": True}, "echo", "invalid_value"),
    ({"suffix": ".", "prompt": [1, 2]}, "suffix", "invalid_value"),
    ({"messages": []}, "messages", "unknown_parameter"),
]


@pytest.mark.parametrize(
    ("path", "body", "fields", "param", "code"),
    [("/v1/chat/completions", CHAT, *case) for case in BAD_CHAT]
    + [("/v1/completions", TEXT, *case) for case in BAD_TEXT],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else "",
)
def test_wrong_fields_are_named(
    host: FakeHost, http: httpx.Client, path: str, body: dict[str, Any], fields: dict[str, Any], param: str, code: str
) -> None:
    error = error_of(http.post(path, json={**body, **fields}), 400)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert param in error["message"]
    assert host.requests == []


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_missing_fields_are_named(host: FakeHost, http: httpx.Client, missing: str) -> None:
    body = {name: value for name, value in CHAT.items() if name != missing}
    error = error_of(http.post("/v1/chat/completions", json=body), 400)
    assert (error["param"], error["code"]) == (missing, "missing_required_parameter")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"  \n",
        b"{",
        b'{"model": "fake",}',
        b"not json",
        b'{"model": "\xff\xfe"}',
        b'{"model": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        b"1" * 10_000,
        "{}".encode("utf-16"),
    ],
    ids=lambda body: repr(body[:24]),
)
def test_what_is_no_json(host: FakeHost, http: httpx.Client, body: bytes) -> None:
    error = error_of(http.post("/v1/chat/completions", content=body), 400)
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_json")
    assert host.requests == []


@pytest.mark.parametrize("body", [b"[]", b"5", b'"text"', b"null"])
def test_json_that_is_no_object(host: FakeHost, http: httpx.Client, body: bytes) -> None:
    error = error_of(http.post("/v1/chat/completions", content=body), 400)
    assert (error["param"], error["code"]) == (None, "invalid_type")


@pytest.mark.parametrize("number", ["1e999", "NaN", "Infinity", "-Infinity"])
def test_numbers_that_are_not_finite(host: FakeHost, http: httpx.Client, number: str) -> None:
    body = f'{{"model": "fake", "messages": [{{"role": "user", "content": "Hi"}}], "temperature": {number}}}'
    assert error_of(http.post("/v1/chat/completions", content=body.encode()), 400)["param"] == "temperature"
    assert host.requests == []


def test_thousands_of_fields(host: FakeHost, http: httpx.Client) -> None:
    body = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]} | {f"f{i}": 1 for i in range(5000)}
    assert "5002 fields" in error_of(http.post("/v1/chat/completions", json=body), 400)["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"model": "fake", "prompt": [5] * 1_100_000}, "prompt"),
        (
            "/v1/chat/completions",
            {"model": "fake", "messages": [{"role": "user", "content": "a"}] * 100_001},
            "messages",
        ),
        (
            "/v1/chat/completions",
            {"model": "fake", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 10_001}]},
            "messages[0].content",
        ),
    ],
)
def test_lists_of_absurd_length(host: FakeHost, http: httpx.Client, path: str, body: object, param: str) -> None:
    assert error_of(http.post(path, json=body), 400)["param"] == param
    assert host.requests == []


def test_repeated_keys_are_harmless(host: FakeHost, http: httpx.Client) -> None:
    body = b'{"model": "nobody", "model": "fake", "prompt": "Hi", "max_tokens": 1}'
    assert http.post("/v1/completions", content=body).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
    ids=lambda headers: " ".join(headers.values()),
)
def test_wrong_content_type(host: FakeHost, http: httpx.Client, headers: dict[str, str]) -> None:
    error = error_of(http.post("/v1/chat/completions", content=json.dumps(CHAT), headers=headers), 415)
    assert error["code"] == "unsupported_media_type"
    assert host.requests == []


@pytest.mark.parametrize("content_type", ["application/json", "Application/JSON; charset=UTF-8", None])
def test_right_content_type(host: FakeHost, http: httpx.Client, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    assert http.post("/v1/chat/completions", content=json.dumps(CHAT), headers=headers).status_code == 200


class TestBodySize:
    def test_announced(self, host: FakeHost, running: tuple[FakeHost, str]) -> None:
        """The refusal comes before any of the body was sent."""
        name, _, port = running[1].removeprefix("http://").partition(":")
        with socket.create_connection((name, int(port)), timeout=10) as connection:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {name}\r\nContent-Length: 999999999999\r\n\r\n"
            connection.sendall(head.encode())
            reply = b"".join(iter(lambda: connection.recv(65536), b""))
        assert reply.startswith(b"HTTP/1.1 413")
        assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_too_large"

    def test_not_announced(self, host: FakeHost, http: httpx.Client) -> None:
        num_sent = 0

        def endless() -> Iterator[bytes]:
            nonlocal num_sent
            while num_sent < 50 * MAX_BODY_BYTES:
                num_sent += 65536
                yield b" " * 65536

        error = error_of(http.post("/v1/chat/completions", content=endless()), 413)
        assert str(MAX_BODY_BYTES) in error["message"]
        assert num_sent < 10 * MAX_BODY_BYTES
        assert host.requests == []

    def test_ten_megabytes_of_prompt(self, host: FakeHost, http: httpx.Client) -> None:
        error = error_of(http.post("/v1/completions", json={"model": "fake", "prompt": "x" * 10_000_000}), 400)
        assert error["code"] == "context_length_exceeded"
        assert "10000000" in error["message"]
        assert "4096" in error["message"]


@pytest.mark.parametrize("name", ["nobody", "../fake", "../../etc/passwd", "fake/..", "/etc/passwd", "fake\u0000"])
def test_unknown_models(host: FakeHost, http: httpx.Client, name: str) -> None:
    error = error_of(http.post("/v1/chat/completions", json={**CHAT, "model": name}), 404)
    assert (error["type"], error["param"], error["code"]) == ("not_found_error", "model", "model_not_found")
    assert host.requests == []


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/v1/nothing", 404, "unknown_url"),
        ("POST", "/v1/chat/completions/", 404, "unknown_url"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/v1/models/fake", 405, "method_not_allowed"),
        ("OPTIONS", "/v1/models", 405, "method_not_allowed"),
    ],
)
def test_unknown_routes(host: FakeHost, http: httpx.Client, method: str, path: str, status: int, code: str) -> None:
    response = http.request(method, path)
    error = error_of(response, status)
    assert error["code"] == code
    assert f"{method} {path}" in error["message"]
    assert ("allow" in response.headers) is (status == 405)


@pytest.mark.parametrize(
    ("path", "status"), [("/health", 200), ("/v1/models", 200), ("/v1/completions", 405), ("/nothing", 404)]
)
def test_head(host: FakeHost, http: httpx.Client, path: str, status: int) -> None:
    response = http.head(path)
    assert (response.status_code, response.content) == (status, b"")
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code"),
    [
        (errors.InvalidParameter("m", param="top_k"), 400, "invalid_request_error", "top_k", "invalid_value"),
        (errors.InvalidParameter("m", param="a", code="c"), 400, "invalid_request_error", "a", "c"),
        (
            errors.ContextLengthExceeded("m", num_tokens=9, limit=8, param="messages"),
            *(400, "invalid_request_error", "messages", "context_length_exceeded"),
        ),
        (errors.ModelNotFound("m", model="x"), 404, "not_found_error", "model", "model_not_found"),
        (errors.ModelLoadError("m", model="x"), 500, "server_error", "model", "model_load_failed"),
        (errors.DownloadError("m", model="x"), 503, "server_error", "model", "download_failed"),
        (errors.QueueFull("m", retry_after=1.0), 429, "rate_limit_error", None, "queue_full"),
        (errors.CapacityError("m"), 503, "server_error", None, "no_capacity"),
        (errors.RequestTimeout("m"), 504, "server_error", None, "timeout"),
        (errors.RequestCancelled("m"), 503, "server_error", None, "cancelled"),
        (errors.EngineError("m"), 500, "server_error", None, "engine_error"),
        (errors.EngineDead("m"), 503, "server_error", None, "engine_dead"),
        (errors.UnusableRepository("m", model="x"), 400, "invalid_request_error", "model", "unusable_repository"),
        (errors.AccessDenied("m", model="x"), 403, "invalid_request_error", "model", "access_denied"),
        (errors.RepositoryNotFound("m", model="x"), 404, "not_found_error", "model", "repository_not_found"),
        (errors.ConfigError("m"), 500, "server_error", None, "config_error"),
        (HTTPException(418, "m"), 418, "invalid_request_error", None, None),
        (HTTPException(501, "m"), 501, "server_error", None, None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_status_and_object(error: Exception, status: int, kind: str, param: str | None, code: str | None) -> None:
    content = {"error": {"message": "m", "type": kind, "param": param, "code": code}}
    assert error_object(error) == (status, content)


def test_unexpected_errors_keep_their_text() -> None:
    status, content = error_object(KeyError("secret"))
    assert (status, content["error"]["code"]) == (500, "internal_error")
    assert "secret" not in content["error"]["message"]


@pytest.mark.parametrize(("seconds", "header"), [(0.0, "1"), (1.0, "1"), (2.1, "3")])
def test_retry_after(seconds: float, header: str) -> None:
    assert error_response(errors.QueueFull("m", retry_after=seconds)).headers["retry-after"] == header


@pytest.mark.parametrize("error", [errors.ModelLoadError("m", model="x"), errors.RequestTimeout("m")])
def test_clients_are_told_not_to_repeat(error: Exception) -> None:
    assert error_response(error).headers["x-should-retry"] == "false"


def test_model_that_cannot_be_loaded(host: FakeHost, http: httpx.Client) -> None:
    host.script.load_error = errors.ModelLoadError("model.gguf is cut short: delete it", model="fake")
    assert "model.gguf" in error_of(http.post("/v1/chat/completions", json=CHAT), 500)["message"]
    assert http.get("/health").status_code == 200


def test_a_wrong_setting_is_told_and_logged(
    host: FakeHost, http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    host.script.load_error = errors.ConfigError("models.toml, line 3: [x] source: is missing")
    for stream in (False, True):
        error = error_of(http.post("/v1/chat/completions", json={**CHAT, "stream": stream}), 500)
        assert (error["code"], error["message"]) == ("config_error", "models.toml, line 3: [x] source: is missing")
    reply = http.post("/api/chat", json={"model": "fake", "messages": CHAT["messages"]})
    assert (reply.status_code, reply.json()) == (500, {"error": "models.toml, line 3: [x] source: is missing"})
    assert caplog.text.count("models.toml, line 3: [x] source: is missing") == 3


def test_an_error_of_our_own_that_nobody_expects_here_is_logged_with_its_traceback(
    host: FakeHost, http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    host.script.load_error = errors.BenchError("secret detail")
    for path, body in (("/v1/chat/completions", CHAT), ("/api/chat", {"model": "fake", "messages": CHAT["messages"]})):
        caplog.clear()
        reply = http.post(path, json=body)
        assert (reply.status_code, "secret" in reply.text) == (500, False)
        assert "BenchError: secret detail" in caplog.text
        assert "Traceback" in caplog.text


def test_unexpected_error_in_an_endpoint(host: FakeHost, http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    host.script.load_error = ZeroDivisionError("secret detail")
    with caplog.at_level(logging.ERROR, logger="mlxserve"):
        response = http.post("/v1/chat/completions", json=CHAT)
    error = error_of(response, 500)
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "secret" not in response.text
    assert "ZeroDivisionError: secret detail" in caplog.text
    assert response.headers["x-request-id"] in caplog.text


@pytest.mark.parametrize("items", [[True], ["a", True], [[True]], [1, True]])
def test_a_long_list_of_wrong_items_is_one_error(items: list[Any]) -> None:
    """Or a body of some megabytes becomes gigabytes of error messages."""
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"model": "fake", "prompt": items[:1] + items[-1:] * 200})
    assert caught.value.error_count() == 1
