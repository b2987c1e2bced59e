"""Bad input and failures in Anthropic's shape: each has its status and type, and its message names the field."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import ErrorResponse
from fake_engine import FakeHost, Gate, serve, wait_until
from starlette.exceptions import HTTPException

from mlxserve import errors
from mlxserve.api import exchange
from mlxserve.api.anthropic.errors import error_object, error_response
from mlxserve.api.app import create_app
from mlxserve.api.metrics import Metrics
from mlxserve.config import ServerConfig

HELLO = [{"role": "user", "content": "Hi"}]
TOOL = {"name": "look", "input_schema": {"type": "object", "properties": {}}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
TEXT = {"type": "text", "text": "a"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/x.png"}}


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"messages": [*HELLO, {"role": "assistant", "content": list(blocks)}]}


def result(**fields: Any) -> dict[str, Any]:
    """A chat with a call, and its result."""
    answer = {"type": "tool_result", "tool_use_id": "toolu_1", **fields}
    return {"messages": [*assistant(CALL)["messages"], {"role": "user", "content": [answer]}]}


def error_of(response: httpx.Response, status: int, kind: str = "invalid_request_error") -> str:
    """The message of an error of that status and type, checked for its shape."""
    assert response.status_code == status, response.text
    content = response.json()
    if kind != "request_too_large":  # which the SDK's types do not have
        ErrorResponse.model_validate_json(response.content, strict=True)
    assert set(content) == {"type", "error", "request_id"}
    assert (content["type"], content["error"]["type"]) == ("error", kind)
    assert set(content["error"]) == {"type", "message"}
    assert content["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    return content["error"]["message"]


BAD_PROMPTS = [
    # fields, the field that is named
    ({"model": None}, "model"),
    ({"model": ""}, "model"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": ["Hi"]}, "messages.0"),
    ({"messages": [{"content": "Hi"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [*HELLO, {"role": "wizard", "content": "Hi"}]}, "messages.1.role"),
    ({"messages": [{"role": "tool", "content": "Hi"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "Hi", "mood": "good"}]}, "messages.0.mood"),
    (user(), "messages.0.content"),
    (user("Hi"), "messages.0.content.0"),
    (user(TEXT, {"text": "b"}), "messages.0.content.1"),
    (user(TEXT, {"type": "text"}), "messages.0.content.1.text"),
    (user(TEXT, {"type": "text", "text": 5}), "messages.0.content.1.text"),
    (user(TEXT, TEXT | {"citations": [{}]}), "messages.0.content.1.citations"),
    (user(TEXT, TEXT | {"cache_control": {"type": "eternal"}}), "messages.0.content.1.cache_control.type"),
    (user(TEXT, IMAGE), "messages.0.content.1"),
    (user(TEXT, {"type": "document", "source": {}}), "messages.0.content.1"),
    (user(TEXT, {"type": "server_tool_use"}), "messages.0.content.1"),
    (user(TEXT, CALL), "messages.0.content.1"),
    (user(TEXT, {"type": "thinking", "thinking": "a"}), "messages.0.content.1"),
    (assistant(TEXT, IMAGE), "messages.1.content.1"),
    (assistant(CALL | {"input": "{}"}), "messages.1.content.0.input"),
    (assistant(CALL | {"id": ""}), "messages.1.content.0.id"),
    (assistant({"type": "tool_use", "id": "a", "input": {}}), "messages.1.content.0.name"),
    (assistant({"type": "thinking"}), "messages.1.content.0.thinking"),
    (assistant({"type": "redacted_thinking"}), "messages.1.content.0.data"),
    (assistant({"type": "tool_result", "tool_use_id": "toolu_1"}), "messages.1.content.0"),
    ({"messages": [{"role": "system", "content": [CALL]}]}, "messages.0.content.0"),
    (result(tool_use_id="toolu_2"), "messages.2.content.0.tool_use_id"),
    (user({"type": "tool_result", "tool_use_id": "toolu_1"}), "messages.0.content.0.tool_use_id"),
    (result(content=5), "messages.2.content.0.content"),
    (result(content=[TEXT, IMAGE]), "messages.2.content.0.content.1"),
    (result(is_error="yes"), "messages.2.content.0.is_error"),
    ({"system": 5}, "system"),
    ({"system": [TEXT, IMAGE]}, "system.1"),
    ({"tools": [{"name": "a"}]}, "tools.0.input_schema"),
    ({"tools": [TOOL, TOOL]}, "tools.1.name"),
    ({"tools": [TOOL | {"name": "two words"}]}, "tools.0.name"),
    ({"tools": [TOOL | {"name": "a" * 129}]}, "tools.0.name"),
    ({"tools": [TOOL | {"input_schema": []}]}, "tools.0.input_schema"),
    ({"tools": [TOOL | {"input_schema": {"type": "string"}}]}, "tools.0.input_schema"),
    ({"tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}]}, "tools.1"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0"),
    ({"tools": [TOOL | {"defer_loading": True}]}, "tools.0.defer_loading"),
    ({"tools": [TOOL | {"name": f"t{index}"} for index in range(1001)]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "leap"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "any", "name": "look"}}, "tool_choice.name"),
    ({"thinking": True}, "thinking"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "disabled", "budget_tokens": 2000}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive", "display": "loud"}}, "thinking.display"),
    ({"output_config": {"effort": "some"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"output_config": {"format": {"type": "xml", "schema": {}}}}, "output_config.format.type"),
    ({"mcp_servers": [{"type": "url", "url": "http://127.0.0.1:1"}]}, "mcp_servers"),
    ({"speed": "fast"}, "speed"),
    ({"mood": "good"}, "mood"),
]

BAD_MESSAGES = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"stream": 1}, "stream"),
    ({"stop_sequences": "a"}, "stop_sequences"),
    ({"stop_sequences": ["a", ""]}, "stop_sequences.1"),
    ({"stop_sequences": ["a"] * 1000}, "stop_sequences"),
    ({"stop_sequences": ["a" * 501]}, "stop_sequences.0"),
    ({"temperature": 1.01}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"metadata": "me"}, "metadata"),
    ({"service_tier": "fast"}, "service_tier"),
    ({"container": "abc"}, "container"),
    ({"fallbacks": [{}]}, "fallbacks"),
    ({"n": 2}, "n"),
    ({"top_logprobs": 2}, "top_logprobs"),
]


@pytest.mark.parametrize(("fields", "param"), [*BAD_PROMPTS, *BAD_MESSAGES])
def test_bad_fields_of_messages(host: FakeHost, http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    body = {"model": "fake", "max_tokens": 10, "messages": HELLO, **fields}
    assert f"'{param}'" in error_of(http.post("/v1/messages", json=body), 400)
    assert host.requests == []


@pytest.mark.parametrize(("fields", "param"), [*BAD_PROMPTS, ({"max_tokens": 5}, "max_tokens")])
def test_bad_fields_of_count_tokens(host: FakeHost, http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    body = {"model": "fake", "messages": HELLO, **fields}
    assert f"'{param}'" in error_of(http.post("/v1/messages/count_tokens", json=body), 400)


@pytest.mark.parametrize("field", ["model", "messages", "max_tokens"])
def test_missing_fields(host: FakeHost, http: httpx.Client, field: str) -> None:
    body = {"model": "fake", "max_tokens": 10, "messages": HELLO}
    del body[field]
    assert f"'{field}'" in error_of(http.post("/v1/messages", json=body), 400)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"temperature": NaN}', b'{"a": "\\ud800"}', b"[" * 10_000])
def test_bodies_that_are_no_json(host: FakeHost, http: httpx.Client, body: bytes) -> None:
    error_of(http.post("/v1/messages", content=body), 400)


class TestTypedExceptions:
    """What an application sees of a failure."""

    @pytest.fixture
    def client(self, address: str) -> Iterator[anthropic.Anthropic]:
        with anthropic.Anthropic(base_url=address, api_key="none", max_retries=0) as client:
            yield client

    def create(self, client: anthropic.Anthropic, **fields: Any) -> anthropic.APIStatusError:
        with pytest.raises(anthropic.APIStatusError) as caught:
            client.messages.create(**{"model": "fake", "max_tokens": 10, "messages": HELLO} | fields)
        error_of(caught.value.response, caught.value.status_code, caught.value.type)
        return caught.value

    def test_of_the_clients_making(self, host: FakeHost, client: anthropic.Anthropic) -> None:
        error = self.create(client, model="nobody")
        assert isinstance(error, anthropic.NotFoundError)
        assert "'nobody'" in error.api_message
        assert isinstance(self.create(client, max_tokens=-1), anthropic.BadRequestError)

    def test_a_prompt_that_does_not_fit(self, host: FakeHost, client: anthropic.Anthropic) -> None:
        """Claude Code looks for these words, with these numbers, to shorten a conversation."""
        error = self.create(client, system="x" * 5000)
        assert isinstance(error, anthropic.BadRequestError)
        assert "prompt is too long: 5002 tokens > 4095 maximum" in error.api_message

    @pytest.mark.parametrize(
        ("failure", "status", "kind"),
        [
            (errors.QueueFull("m", retry_after=2.1), 529, "overloaded_error"),
            (errors.CapacityError("m"), 529, "overloaded_error"),
            (errors.EngineError("m"), 500, "api_error"),
            (errors.EngineDead("m"), 503, "api_error"),
            (errors.RequestTimeout("m"), 504, "timeout_error"),
            (ZeroDivisionError("secret"), 500, "api_error"),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
    )
    def test_of_the_servers(
        self, host: FakeHost, client: anthropic.Anthropic, failure: Exception, status: int, kind: str
    ) -> None:
        host.script.refusal = failure
        error = self.create(client)
        assert isinstance(error, anthropic.InternalServerError)
        assert (error.status_code, error.type) == (status, kind)
        assert "secret" not in error.api_message
        assert error.response.headers.get("retry-after") == ("3" if isinstance(failure, errors.QueueFull) else None)
        wait_until(lambda: not host.leases)

    def test_a_stream_is_refused_with_a_status_while_it_can_be(
        self, host: FakeHost, client: anthropic.Anthropic
    ) -> None:
        host.script.refusal = errors.QueueFull("m", retry_after=1)
        assert self.create(client, stream=True).status_code == 529

    def test_later_it_is_an_event(self, host: FakeHost, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(exchange, "HEADERS_AFTER", 0.02)
        host.script.load = gate = Gate()
        host.script.refusal = errors.QueueFull("too many", retry_after=1)
        body = {"model": "fake", "max_tokens": 10, "messages": HELLO, "stream": True}
        with http.stream("POST", "/v1/messages", json=body) as response:
            gate.open()
            ping, failure = response.read().decode().strip().split("\n\n")
        assert ping.startswith("event: ping\n")
        name, data = failure.split("\n")
        assert name == "event: error"
        error = json.loads(data.removeprefix("data: "))
        assert error["error"] == {"type": "overloaded_error", "message": "too many"}
        assert error["request_id"] == response.headers["request-id"]


class TestOutsideOfEndpoints:
    """Errors of the layers around them have the shape of the path, too."""

    def test_paths_and_methods(self, host: FakeHost, http: httpx.Client) -> None:
        error_of(http.get("/v1/messages"), 405)
        error_of(http.post("/v1/messages/batches", json={}), 404, "not_found_error")
        assert "type" not in http.get("/v1/messages_of_mine").json()

    def test_media_type(self, host: FakeHost, http: httpx.Client) -> None:
        error_of(http.post("/v1/messages", content=b"{}", headers={"content-type": "text/plain"}), 415)

    def test_keys_hosts_and_sizes(self) -> None:
        config = ServerConfig(api_key="right", max_body_bytes=1024)
        body = {"model": "fake", "max_tokens": 10, "messages": HELLO}
        with serve(create_app(FakeHost(), config, Metrics())) as address, httpx.Client(base_url=address) as http:
            error_of(http.post("/v1/messages", json=body), 401, "authentication_error")
            with pytest.raises(anthropic.AuthenticationError):
                anthropic.Anthropic(base_url=address, api_key="wrong").messages.create(**body)
            key = {"x-api-key": "right"}
            response = http.post("/v1/messages", json=body, headers=key | {"host": "evil.example"})
            error_of(response, 403, "permission_error")
            large = body | {"system": "x" * 1024}
            error_of(http.post("/v1/messages", json=large, headers=key), 413, "request_too_large")
            reply = anthropic.Anthropic(base_url=address, auth_token="right").messages.create(**body)
            assert reply.content


def test_messages_name_the_field() -> None:
    error = errors.InvalidParameter("the template says no", param="messages")
    assert error_object(error, "id")["error"]["message"] == "messages: the template says no"
    error = errors.InvalidParameter("'messages' are wrong", param="messages")
    assert error_object(error, "id")["error"]["message"] == "'messages' are wrong"


@pytest.mark.parametrize("error", [errors.ModelLoadError("m", model="x"), errors.RequestTimeout("m")])
def test_clients_are_told_not_to_repeat(error: Exception) -> None:
    assert error_response(error, "id").headers["x-should-retry"] == "false"


def test_other_statuses() -> None:
    assert error_object(HTTPException(418, "m"), "id")["error"]["type"] == "invalid_request_error"
    assert error_object(HTTPException(501, "m"), "id")["error"]["type"] == "api_error"
