"""The Anthropic dialect with Anthropic's own client: shapes, streams, tools, thinking, token counts, models."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from fake_engine import FakeHost, Gate, Script, wait_until
from pydantic import TypeAdapter

from mlxserve.api import exchange, sse
from mlxserve.api.anthropic.reply import tool_use_id
from mlxserve.errors import EngineError

HELLO = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
BERLIN = '{"city": "Berlin"}'
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


@pytest.fixture
def client(address: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=address, api_key="none", max_retries=0) as client:
        yield client


def send(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/messages", json={"model": "fake", "max_tokens": 1000, "messages": HELLO, **fields})


def message(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    """The reply as one object, which the SDK's type accepts strictly."""
    response = send(http, **fields)
    assert response.status_code == 200, response.text
    Message.model_validate_json(response.content, strict=True)
    return response.json()


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, each of which the SDK's type accepts strictly."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    parsed = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        content = json.loads(data.removeprefix("data: "))
        assert name == f"event: {content['type']}"
        if content["type"] != "ping":
            EVENT.validate_json(data.removeprefix("data: "), strict=True)
        parsed.append(content)
    return parsed


def stream(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    return events(send(http, stream=True, **fields))


def accumulated(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content blocks that the events of a stream add up to."""
    blocks: list[dict[str, Any]] = []
    arguments = ""
    for part in parts:
        if part["type"] == "content_block_start":
            assert part["index"] == len(blocks)
            blocks.append(dict(part["content_block"]))
            arguments = ""
        elif part["type"] == "content_block_delta":
            assert part["index"] == len(blocks) - 1
            match part["delta"]:
                case {"type": "text_delta", "text": text}:
                    blocks[-1]["text"] += text
                case {"type": "thinking_delta", "thinking": text}:
                    blocks[-1]["thinking"] += text
                case {"type": "signature_delta", "signature": text}:
                    blocks[-1]["signature"] += text
                case {"type": "input_json_delta", "partial_json": text}:
                    arguments += text
        elif part["type"] == "content_block_stop" and arguments:
            blocks[-1]["input"] = json.loads(arguments)
    return blocks


class TestMessages:
    def test_whole(self, host: FakeHost, client: anthropic.Anthropic) -> None:
        host.script.num_cached_tokens = 1
        raw = client.messages.with_raw_response.create(model="fake", max_tokens=100, messages=HELLO)
        reply = raw.parse()
        assert [(block.type, block.text) for block in reply.content] == [("text", "Hello, world!")]
        assert (reply.role, reply.type, reply.model) == ("assistant", "message", "fake")
        assert (reply.stop_reason, reply.stop_sequence) == ("end_turn", None)
        assert reply.id.startswith("msg_")
        assert raw.headers["request-id"] == raw.headers["x-request-id"] == reply.id == host.requests[0].request_id
        assert reply._request_id == reply.id
        assert host.cancelled == []
        wait_until(lambda: not host.leases)

    def test_cached_tokens_are_no_input_tokens(self, host: FakeHost, http: httpx.Client) -> None:
        host.script.num_cached_tokens = 3
        usage = message(http, system="abc")["usage"]
        assert usage == {
            "input_tokens": 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": 13,
            "output_tokens_details": {"thinking_tokens": 0},
        }

    def test_stop_reasons(self, host: FakeHost, http: httpx.Client) -> None:
        cut = message(http, max_tokens=4)
        assert (cut["content"][0]["text"], cut["stop_reason"]) == ("Hell", "max_tokens")
        stopped = message(http, stop_sequences=["zzz", ", w"])
        assert stopped["content"] == [{"type": "text", "text": "Hello"}]
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", ", w")
        host.script.text = ""
        assert message(http)["content"] == []

    def test_a_full_context_is_no_limit_of_the_client(self, host: FakeHost, http: httpx.Client) -> None:
        host.script.full_after = 5
        assert message(http)["stop_reason"] == "model_context_window_exceeded"
        assert stream(http)[-2]["delta"]["stop_reason"] == "model_context_window_exceeded"

    def test_query_and_headers_of_betas_change_nothing(self, host: FakeHost, client: anthropic.Anthropic) -> None:
        reply = client.beta.messages.create(
            model="fake", max_tokens=100, messages=HELLO, betas=["some-beta-2025-01-01"]
        )
        assert reply.content[0].text == "Hello, world!"

    def test_async_client(self, host: FakeHost, address: str) -> None:
        async def both() -> tuple[str, str, int]:
            async with anthropic.AsyncAnthropic(base_url=address, api_key="none", max_retries=0) as client:
                whole = await client.messages.create(model="fake", max_tokens=100, messages=HELLO)
                async with client.messages.stream(model="fake", max_tokens=100, messages=HELLO) as stream:
                    texts = [text async for text in stream.text_stream]
                count = await client.messages.count_tokens(model="fake", messages=HELLO)
                return whole.content[0].text, "".join(texts), count.input_tokens

        assert asyncio.run(both()) == ("Hello, world!", "Hello, world!", 2)

    def test_sampling(self, host: FakeHost, http: httpx.Client) -> None:
        host.default_sampling = {"temperature": 0.3, "min_p": 0.1, "top_k": 7}
        message(http, temperature=0, top_p=0.5, max_tokens=9)
        sampling = host.requests[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 7, 0.1)
        assert sampling.max_tokens == 9


class TestStreams:
    def test_order(self, host: FakeHost, http: httpx.Client) -> None:
        host.script = Script(text="añ", num_cached_tokens=1)
        start, *middle, delta, stop = stream(http)
        assert start["message"]["content"] == []
        assert start["message"]["stop_reason"] is None
        usage = start["message"]["usage"]
        assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (2, 0, 0)
        assert middle == [
            {"type": "ping"},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "ñ"}},
            {"type": "content_block_stop", "index": 0},
        ]
        assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
        usage = delta["usage"]
        assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (1, 1, 3)
        assert stop == {"type": "message_stop"}

    def test_with_the_client(self, host: FakeHost, client: anthropic.Anthropic) -> None:
        host.script = Script(
            reasoning="Hmm.", text="Look: ", tool_calls=(("get_weather", BERLIN), ("now", "{}")), num_cached_tokens=1
        )
        with client.messages.stream(model="fake", max_tokens=200, messages=HELLO, tools=[WEATHER]) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_message()
        assert kinds[0] == "message_start"
        assert kinds[-1] == "message_stop"
        thinking, text, *calls = final.content
        assert (thinking.thinking, text.text) == ("Hmm.", "Look: ")
        assert [(call.name, call.input) for call in calls] == [("get_weather", {"city": "Berlin"}), ("now", {})]
        assert calls[0].id != calls[1].id
        assert final.stop_reason == "tool_use"
        assert (final.usage.input_tokens, final.usage.cache_read_input_tokens) == (1, 1)
        assert final.usage.output_tokens_details.thinking_tokens == 4

    @pytest.mark.parametrize(
        "script",
        [
            Script(text=""),
            Script(reasoning="Hmm.", text=""),
            Script(text="", tool_calls=(("a", '{"x": [1, {"y": null}]}'),)),
            Script(reasoning="Hmm.", text="naïve 😀 日本", tool_calls=(("a", "{}"), ("a", '{"b": "\\u00e9"}'))),
        ],
    )
    def test_pieces_add_up_to_the_whole(self, host: FakeHost, http: httpx.Client, script: Script) -> None:
        host.script = script
        whole, parts = message(http), stream(http)
        assert accumulated(parts) == whole["content"]
        assert parts[-2]["delta"]["stop_reason"] == whole["stop_reason"]
        assert parts[-2]["usage"] == whole["usage"]

    def test_pings_keep_it_alive_and_headers_are_early(
        self, host: FakeHost, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.02)
        monkeypatch.setattr(exchange, "HEADERS_AFTER", 0.02)
        host.script.load = gate = Gate()
        body = {"model": "fake", "max_tokens": 100, "messages": HELLO, "stream": True}
        with http.stream("POST", "/v1/messages", json=body) as response:
            assert response.headers["request-id"].startswith("msg_")
            lines = response.iter_lines()
            assert [next(lines) for _ in range(3)] == ["event: ping", 'data: {"type":"ping"}', ""]
            gate.open()
            rest = [line for line in lines if line.startswith("event: ") and line != "event: ping"]
        assert (rest[0], rest[-1]) == ("event: message_start", "event: message_stop")

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_a_failure_is_the_last_event(
        self, host: FakeHost, client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch, when: str
    ) -> None:
        monkeypatch.setattr(exchange, "HEADERS_AFTER", 0.02)
        if when == "before":
            host.script = Script(load=(gate := Gate()), refusal=EngineError("out of luck"))
        else:
            host.script = Script(first_token=(gate := Gate()), failure=EngineError("out of luck"))
        with client.messages.stream(model="fake", max_tokens=100, messages=HELLO) as stream:
            gate.open()
            with pytest.raises(anthropic.APIStatusError) as caught:
                list(stream)
        assert caught.value.body["type"] == "error"
        assert caught.value.body["error"] == {"type": "api_error", "message": "out of luck"}
        assert caught.value.body["request_id"] == stream.response.headers["request-id"]

    def test_a_stream_that_just_ends_is_a_failure(self, host: FakeHost, http: httpx.Client) -> None:
        host.script.finishes = False
        response = send(http, stream=True)
        assert response.text.count("event: error") == 1
        assert response.text.endswith(f'"request_id":"{response.headers["request-id"]}"}}\n\n')
        assert "message_stop" not in response.text
        assert send(http).status_code == 500

    def test_a_client_that_leaves_stops_it(self, host: FakeHost, client: anthropic.Anthropic) -> None:
        host.script.endless = True
        with client.messages.stream(model="fake", max_tokens=100_000, messages=HELLO) as stream:
            next(stream.text_stream)
        wait_until(lambda: host.cancelled and not host.leases)


class TestTools:
    def test_calls(self, host: FakeHost, client: anthropic.Anthropic) -> None:
        host.script = Script(text="", tool_calls=(("get_weather", BERLIN),))
        reply = client.messages.create(model="fake", max_tokens=100, messages=HELLO, tools=[WEATHER])
        (call,) = reply.content
        assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Berlin"})
        assert call.id.startswith("toolu_")
        assert reply.stop_reason == "tool_use"
        # What the client sends back of it is understood, and names the call.
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain"}
        turn = [{"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
        client.messages.create(model="fake", max_tokens=100, messages=[*HELLO, *turn], tools=[WEATHER])
        *_, asked, answered = host.requests[1].prompt.messages
        assert asked["tool_calls"][0]["id"] == answered["tool_call_id"] == call.id

    def test_a_call_that_was_cut_off(self, host: FakeHost, http: httpx.Client) -> None:
        host.script = Script(text="", tool_calls=(("get_weather", BERLIN),))
        reply = message(http, tools=[WEATHER], max_tokens=14)
        assert reply["stop_reason"] == "max_tokens"
        assert reply["content"][0]["input"] == {}
        host.script.tool_calls = (("get_weather", '{"city": "Berlin", "day": 1'),)
        assert message(http, tools=[WEATHER], max_tokens=22)["content"][0]["input"] == {"city": "Berlin"}
        for arguments in ("no JSON", "[1]", '{"day": NaN}', '{"day": 1e999}', '{"city": "\\ud800"}'):
            host.script.tool_calls = (("get_weather", arguments),)
            assert message(http, tools=[WEATHER])["content"][0]["input"] == {}

    @pytest.mark.parametrize("call_id", ["call_ab-1", "call-ab-1", "toolu_ab-1", "ab-1"])
    def test_ids_look_like_anthropics(self, call_id: str) -> None:
        assert tool_use_id(call_id) == "toolu_ab-1"
        assert tool_use_id("functions.get_weather:0") == "toolu_functions_get_weather_0"


class TestThinking:
    def test_whole(self, host: FakeHost, client: anthropic.Anthropic) -> None:
        host.script.reasoning = "Let me see."
        reply = client.messages.create(
            model="fake", max_tokens=2000, messages=HELLO, thinking={"type": "enabled", "budget_tokens": 1024}
        )
        thinking, text = reply.content
        assert (thinking.thinking, text.text) == ("Let me see.", "Hello, world!")
        assert thinking.signature
        assert host.requests[0].prompt.reasoning.enabled is True
        assert reply.usage.output_tokens_details.thinking_tokens == len("Let me see.")

    def test_stream(self, host: FakeHost, http: httpx.Client) -> None:
        host.script = Script(reasoning="ab", text="c")
        thoughts = [part for part in stream(http) if part.get("index") == 0]
        assert [part.get("delta", part)["type"] for part in thoughts] == [
            "content_block_start",
            "thinking_delta",
            "thinking_delta",
            "signature_delta",
            "content_block_stop",
        ]

    def test_omitted(self, host: FakeHost, http: httpx.Client) -> None:
        host.script = Script(reasoning="secret", text="c")
        asked = {"type": "adaptive", "display": "omitted"}
        whole, parts = message(http, thinking=asked), stream(http, thinking=asked)
        assert accumulated(parts) == whole["content"]
        assert (whole["content"][0]["type"], whole["content"][0]["thinking"]) == ("thinking", "")
        assert "secret" not in json.dumps([whole, parts])


class TestCountTokens:
    def test_counts_what_generating_would_take(self, host: FakeHost, client: anthropic.Anthropic) -> None:
        prompt: dict[str, Any] = {
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "messages": [*HELLO, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "naïve"}],
        }
        raw = client.messages.with_raw_response.count_tokens(model="fake", **prompt)
        MessageTokensCount.model_validate_json(raw.http_response.content, strict=True)
        reply = client.messages.create(model="fake", max_tokens=10, **prompt)
        assert raw.parse().input_tokens == reply.usage.input_tokens == 21
        assert raw.headers["request-id"]
        wait_until(lambda: not host.leases)

    def test_of_what_does_not_fit(self, host: FakeHost, client: anthropic.Anthropic) -> None:
        messages = [{"role": "user", "content": "x" * 10_000}]
        assert client.messages.count_tokens(model="fake", messages=messages).input_tokens == 10_000

    def test_nobody_waits_for_it(self, host: FakeHost, address: str) -> None:
        host.script.tokenise = Gate()
        body = {"model": "fake", "messages": HELLO}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{address}/v1/messages/count_tokens", json=body, timeout=0.3)
        wait_until(lambda: host.abandoned == ["count"] and not host.leases)


class TestModels:
    def test_list(self, host: FakeHost, client: anthropic.Anthropic) -> None:
        raw = client.models.with_raw_response.list()
        for each in raw.http_response.json()["data"]:
            ModelInfo.model_validate_json(json.dumps(each), strict=True)
        page = raw.parse()
        assert [model.id for model in page] == ["fake", "org/fake-4bit"]
        assert (page.first_id, page.last_id, page.has_more) == ("fake", "org/fake-4bit", False)
        assert page.data[0].created_at.year == 2023

    def test_get(self, host: FakeHost, client: anthropic.Anthropic) -> None:
        model = client.models.retrieve("org/fake-4bit")
        assert (model.id, model.type, model.max_input_tokens) == ("org/fake-4bit", "model", 4096)
        with pytest.raises(anthropic.NotFoundError) as caught:
            client.models.retrieve("nobody")
        assert caught.value.type == "not_found_error"

    def test_of_nobody(self, host: FakeHost, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(host, "names", ())
        page = http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
        assert page == {"data": [], "has_more": False, "first_id": None, "last_id": None}

    def test_other_clients_get_openais_shape(self, host: FakeHost, http: httpx.Client) -> None:
        assert http.get("/v1/models").json()["object"] == "list"
        assert http.get("/v1/models/fake").json()["object"] == "model"
