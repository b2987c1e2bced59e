"""Ollama's /api/generate and /api/chat on a fake engine, as its SDK and plain HTTP see them."""

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest
from fake_engine import FakeHost, LoadedInfo, wait_until
from helpers_ollama import HELLO, WEATHER, check_times, lines, strictly
from ollama import ChatResponse, GenerateResponse

from mlxserve.core.constraint import JSON_OBJECT, Grammar
from mlxserve.core.generation import ChatPrompt, Reasoning, TextPrompt

DURATIONS = {
    "total_duration": 600_000_000,
    "load_duration": 0,
    "prompt_eval_duration": 50_000_000,
    "eval_duration": 500_000_000,
}


@pytest.fixture
def sdk(address: str) -> Iterator[ollama.Client]:
    with ollama.Client(address) as client:
        yield client


def prompt_of(host: FakeHost) -> Any:
    return host.requests[-1].prompt


class TestGenerate:
    def test_stream(self, host: FakeHost, http: httpx.Client) -> None:
        *parts, last = lines(http.post("/api/generate", json={"model": "Fake:latest".lower(), "prompt": "Hi"}))
        assert "".join(part["response"] for part in parts) == "Hello, world!"
        for part in parts:
            strictly(GenerateResponse, part)
            check_times(part)
            assert (part["model"], part["done"]) == ("fake:latest", False)
        strictly(GenerateResponse, last)
        assert (last["response"], last["done"], last["done_reason"]) == ("", True, "stop")
        assert (last["prompt_eval_count"], last["eval_count"]) == (2, 13)
        assert {name: last[name] for name in DURATIONS} == DURATIONS
        assert bytes(last["context"]) == b"HiHello, world!"
        messages = ({"role": "user", "content": "Hi"},)
        assert prompt_of(host) == ChatPrompt(messages, reasoning=Reasoning(param="think"), param="prompt")

    def test_one_object(self, host: FakeHost, http: httpx.Client) -> None:
        reply = http.post("/api/generate", json={"model": "fake", "prompt": "Hi", "stream": False})
        assert reply.headers["content-type"] == "application/json; charset=utf-8"
        content = reply.json()
        strictly(GenerateResponse, content)
        check_times(content)
        assert (content["response"], content["done"], content["done_reason"]) == ("Hello, world!", True, "stop")
        assert {name: content[name] for name in DURATIONS} == DURATIONS
        assert bytes(content["context"]) == b"HiHello, world!"

    def test_sdk(self, host: FakeHost, sdk: ollama.Client) -> None:
        whole = sdk.generate("fake", "Hi", system="Be brief.", options={"num_predict": 5}, keep_alive="5m")
        assert (whole.response, whole.done_reason, whole.eval_count) == ("Hello", "length", 5)
        assert prompt_of(host).messages == (
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
        )
        assert host.keep_alives == [300.0]
        streamed = list(sdk.generate("fake", "Hi", stream=True))
        assert "".join(part.response for part in streamed) == "Hello, world!"
        assert [part.done for part in streamed] == [False] * (len(streamed) - 1) + [True]

    def test_context_goes_back(self, host: FakeHost, sdk: ollama.Client) -> None:
        first = sdk.generate("fake", "Hi")
        sdk.generate("fake", "More", context=first.context)
        assert prompt_of(host).context == tuple(b"HiHello, world!")

    def test_raw(self, host: FakeHost, sdk: ollama.Client) -> None:
        whole = sdk.generate("fake", "[INST] Hi", raw=True)
        assert prompt_of(host) == TextPrompt("[INST] Hi")
        assert whole.context is None

    @pytest.mark.parametrize("stream", [False, True])
    def test_thinking(self, host: FakeHost, http: httpx.Client, stream: bool) -> None:
        host.script.reasoning = "Hm."
        body = {"model": "fake", "prompt": "Hi", "think": "high", "stream": stream}
        reply = http.post("/api/generate", json=body)
        parts = lines(reply) if stream else [reply.json()]
        assert "".join(part.get("thinking", "") for part in parts) == "Hm."
        assert "".join(part["response"] for part in parts) == "Hello, world!"
        assert prompt_of(host).reasoning == Reasoning(enabled=True, effort="high", param="think")

    @pytest.mark.parametrize("stream", [False, True])
    def test_logprobs(self, host: FakeHost, http: httpx.Client, stream: bool) -> None:
        host.script.text = "aé"
        body = {"model": "fake", "prompt": "Hi", "logprobs": True, "top_logprobs": 2, "stream": stream}
        reply = http.post("/api/generate", json=body)
        parts = lines(reply) if stream else [reply.json()]
        for part in parts:
            strictly(GenerateResponse, part)
        entries = [entry for part in parts for entry in part.get("logprobs", [])]
        assert entries[0] == {
            "token": "a",
            "logprob": -0.5,
            "bytes": [97],
            "top_logprobs": [
                {"token": "a", "logprob": -0.5, "bytes": [97]},
                {"token": "b", "logprob": -1.5, "bytes": [98]},
            ],
        }
        assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "aé"


class TestChat:
    def test_stream(self, host: FakeHost, http: httpx.Client) -> None:
        *parts, last = lines(http.post("/api/chat", json={"model": "fake", "messages": HELLO}))
        for part in (*parts, last):
            strictly(ChatResponse, part)
            check_times(part)
            assert part["message"]["role"] == "assistant"
        assert "".join(part["message"]["content"] for part in parts) == "Hello, world!"
        assert last["message"]["content"] == ""
        assert (last["done"], last["done_reason"], last["prompt_eval_count"]) == (True, "stop", 2)
        assert {name: last[name] for name in DURATIONS} == DURATIONS
        assert "context" not in last

    def test_one_object(self, host: FakeHost, http: httpx.Client) -> None:
        content = http.post("/api/chat", json={"model": "fake", "messages": HELLO, "stream": False}).json()
        strictly(ChatResponse, content)
        assert content["message"] == {"role": "assistant", "content": "Hello, world!"}
        assert {name: content[name] for name in DURATIONS} == DURATIONS

    def test_sdk(self, host: FakeHost, sdk: ollama.Client) -> None:
        reply = sdk.chat("fake", HELLO, options={"stop": "wor", "seed": 7})
        assert (reply.message.content, reply.done_reason) == ("Hello, ", "stop")
        assert (host.requests[-1].stop, host.requests[-1].sampling.seed) == (("wor",), 7)
        sdk.chat("fake", HELLO, keep_alive="10000000h")
        parts = list(sdk.chat("fake", HELLO, stream=True, keep_alive=-1))
        assert "".join(part.message.content for part in parts) == "Hello, world!"
        assert host.keep_alives == [None, -1, -1]

    def test_async_sdk(self, host: FakeHost, address: str) -> None:
        async def talk() -> tuple[str, str]:
            async with ollama.AsyncClient(address) as client:
                whole = await client.chat("fake", HELLO)
                parts = [part async for part in await client.chat("fake", HELLO, stream=True)]
            return whole.message.content, "".join(part.message.content for part in parts)

        assert asyncio.run(talk()) == ("Hello, world!", "Hello, world!")

    @pytest.mark.parametrize("stream", [False, True])
    def test_thinking(self, host: FakeHost, sdk: ollama.Client, stream: bool) -> None:
        host.script.reasoning = "Hm."
        reply = sdk.chat("fake", HELLO, think=False, stream=stream)
        parts = list(reply) if stream else [reply]
        assert "".join(part.message.thinking or "" for part in parts) == "Hm."
        assert "".join(part.message.content for part in parts) == "Hello, world!"
        assert prompt_of(host).reasoning == Reasoning(enabled=False, param="think")

    @pytest.mark.parametrize("stream", [False, True])
    def test_tool_calls_come_whole(self, host: FakeHost, http: httpx.Client, stream: bool) -> None:
        host.script.text = "Let me see. "
        host.script.tool_calls = (("weather", '{"city": "Zürich"}'), ("time", "{}"))
        body = {"model": "fake", "messages": HELLO, "tools": [WEATHER], "stream": stream}
        reply = http.post("/api/chat", json=body)
        parts = lines(reply) if stream else [reply.json()]
        for part in parts:
            strictly(ChatResponse, part)
        assert "".join(part["message"]["content"] for part in parts) == "Let me see. "
        calls = [part["message"]["tool_calls"] for part in parts if "tool_calls" in part["message"]]
        assert len(calls) == (2 if stream else 1)
        assert [call for each in calls for call in each] == [
            {"id": "call_0", "function": {"index": 0, "name": "weather", "arguments": {"city": "Zürich"}}},
            {"id": "call_1", "function": {"index": 1, "name": "time", "arguments": {}}},
        ]
        assert prompt_of(host).tools == (WEATHER,)
        assert parts[-1]["done_reason"] == "stop"

    def test_a_call_that_is_cut_off_is_text(self, host: FakeHost, sdk: ollama.Client) -> None:
        host.script.text = ""
        host.script.tool_calls = (("weather", '{"city": "Rome"}'),)
        reply = sdk.chat("fake", HELLO, tools=[WEATHER], options={"num_predict": 9})
        assert reply.message.tool_calls is None
        assert (reply.message.content, reply.done_reason) == ('{"name": "weather", "arguments": {"city": ', "length")

    def test_results_of_tools_go_to_the_template(self, host: FakeHost, sdk: ollama.Client) -> None:
        def weather(city: str) -> str:
            """The weather.

            Args:
              city: Its name
            """
            return f"It rains in {city}."

        host.script.tool_calls = (("weather", '{"city": "Rome"}'),)
        first = sdk.chat("fake", HELLO, tools=[weather])
        result = {"role": "tool", "tool_name": "weather", "content": weather("Rome")}
        sdk.chat("fake", [*HELLO, first.message, result], tools=[weather])
        call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
        assert prompt_of(host).messages == (
            *HELLO,
            {"role": "assistant", "content": "Hello, world!", "tool_calls": [call]},
            {"role": "tool", "content": "It rains in Rome.", "name": "weather"},
        )
        assert prompt_of(host).tools[0]["function"]["parameters"]["required"] == ["city"]

    @pytest.mark.parametrize(
        ("format", "schema"), [("json", JSON_OBJECT), ({"type": "array"}, {"type": "array"}), ("", None), (None, None)]
    )
    def test_format(self, host: FakeHost, sdk: ollama.Client, format: Any, schema: Any) -> None:
        sdk.chat("fake", HELLO, format=format)
        expected = None if schema is None else Grammar("json_schema", schema, "format")
        assert host.requests[-1].grammar == expected

    def test_a_conversation_that_comes_back(self, host: FakeHost, http: httpx.Client) -> None:
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi", "images": []},
            {"role": "assistant", "content": "Yes?", "thinking": "A greeting."},
            {"role": "user", "content": None},
        ]
        assert http.post("/api/chat", json={"model": "fake", "messages": messages, "tools": []}).is_success
        assert prompt_of(host).messages == (
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Yes?", "reasoning_content": "A greeting."},
            {"role": "user", "content": ""},
        )


class TestLoading:
    @pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
    @pytest.mark.parametrize("stream", [None, False, True])
    def test_load_and_unload(self, host: FakeHost, http: httpx.Client, path: str, stream: bool | None) -> None:
        schema = GenerateResponse if path == "/api/generate" else ChatResponse
        loaded = http.post(path, json={"model": "fake", "keep_alive": -1, "stream": stream}).json()
        strictly(schema, loaded)
        assert (loaded["done"], loaded["done_reason"]) == (True, "load")
        assert host.loaded() == [LoadedInfo("fake")]
        assert host.keep_alives == [-1]
        unloaded = http.post(path, json={"model": "fake", "keep_alive": "0s", "stream": stream}).json()
        strictly(schema, unloaded)
        assert (unloaded["done"], unloaded["done_reason"]) == (True, "unload")
        assert host.loaded() == []
        assert host.requests == []

    def test_through_the_sdk(self, host: FakeHost, sdk: ollama.Client) -> None:
        assert sdk.generate("fake:latest", "").done_reason == "load"
        assert sdk.chat("fake", []).done_reason == "load"
        assert next(iter(sdk.chat("fake", [], stream=True))).done_reason == "load"
        assert sdk.generate("fake", keep_alive=0).done_reason == "unload"

    def test_what_is_here_and_not_loaded_is_unloaded_already(self, host: FakeHost, sdk: ollama.Client) -> None:
        assert sdk.generate("fake", keep_alive=0).done_reason == "unload"
        with pytest.raises(ollama.ResponseError, match="model 'none' not found") as error:
            sdk.generate("none", keep_alive=0)
        assert error.value.status_code == 404

    @pytest.mark.parametrize(
        ("text", "seconds"),
        [(90, 90), (0.5, 0.5), ("5m", 300), ("1h30m", 5400), ("1.5h", 5400), ("250ms", 0.25), ("-1m", -60), ("30", 30)],
    )
    def test_keep_alive(self, host: FakeHost, http: httpx.Client, text: Any, seconds: float) -> None:
        body = {"model": "fake", "prompt": "Hi", "keep_alive": text}
        assert http.post("/api/generate", json=body).is_success
        assert host.keep_alives == [pytest.approx(seconds)]
        wait_until(lambda: host.leases == [])


class TestOptions:
    def options(self, http: httpx.Client, **options: Any) -> None:
        body = {"model": "fake", "messages": HELLO, "options": options, "stream": False}
        assert http.post("/api/chat", json=body).is_success

    def test_each(self, host: FakeHost, http: httpx.Client) -> None:
        given = {"temperature": 1, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.9, "repeat_last_n": 3}
        given |= {"presence_penalty": 0.1, "frequency_penalty": -0.2, "seed": 9}
        self.options(http, **given, repeat_penalty=1.2, num_predict=4, num_ctx=100, stop=["x", "y"])
        request = host.requests[-1]
        for name, value in given.items():
            assert getattr(request.sampling, name) == value
        assert (request.sampling.repetition_penalty, request.sampling.max_tokens) == (1.2, 4)
        assert (request.context_length, request.stop) == (100, ("x", "y"))

    def test_ollamas_defaults_stand_behind_the_models(self, host: FakeHost, http: httpx.Client) -> None:
        host.default_sampling = {"temperature": 0.3, "repetition_penalty": 1.1}
        self.options(http, top_k=7)
        sampling = host.requests[-1].sampling
        assert (sampling.temperature, sampling.repetition_penalty) == (0.3, 1.1)
        assert (sampling.top_k, sampling.top_p, sampling.repeat_last_n) == (7, 0.9, 64)
        assert (sampling.seed, sampling.max_tokens) == (None, None)

    def test_numbers_that_ask_for_nothing(self, host: FakeHost, http: httpx.Client) -> None:
        for num_predict in (-1, -2, 0):
            self.options(http, seed=-1, num_predict=num_predict, num_ctx=0, top_k=-1, temperature=None)
            request = host.requests[-1]
            assert (request.sampling.seed, request.sampling.max_tokens, request.context_length) == (None, None, None)
            assert (request.sampling.top_k, request.sampling.temperature) == (0, 0.8)

    def test_whole_numbers_may_have_a_point(self, host: FakeHost, http: httpx.Client) -> None:
        self.options(http, top_k=20.0, num_predict=3.0, top_p=0)
        assert (host.requests[-1].sampling.top_k, host.requests[-1].sampling.max_tokens) == (1, 3)

    def test_what_has_no_effect_is_logged(
        self, host: FakeHost, http: httpx.Client, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, logger="mlxserve.api.ollama")
        self.options(http, num_gpu=1, mirostat=2, num_thread=None)
        self.options(http, never_heard_of="x")
        messages = [record.getMessage() for record in caplog.records]
        assert any(text.endswith("no effect here: mirostat, num_gpu") for text in messages)
        assert any(text.endswith("unknown options are ignored: 'never_heard_of'") for text in messages)


def test_what_curl_sends_with_d(host: FakeHost, http: httpx.Client) -> None:
    headers = {"content-type": "application/x-www-form-urlencoded"}
    body = json.dumps({"model": "fake", "prompt": "Hi", "stream": False})
    assert http.post("/api/generate", content=body, headers=headers).json()["response"] == "Hello, world!"
    assert http.post("/v1/completions", content=body, headers=headers).status_code == 415


def test_version(http: httpx.Client) -> None:
    version = http.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 13, 4)
    assert http.head("/api/version").status_code == 200
