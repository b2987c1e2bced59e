"""The OpenAI dialect over real HTTP, and with OpenAI's own client: shapes, streams, parameters, disconnects."""

import asyncio
import json
import logging
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from fake_engine import ByteTokenizer, FakeHost, Gate, Script, wait_until
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from mlxserve.api.openai.reply import CompletionReply
from mlxserve.core.generation import TextDelta, TextPrompt, TokenPrompt
from mlxserve.core.request import Speculation
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.core.step import SampledToken, TokenLogprobs
from mlxserve.errors import EngineError, QueueFull, RequestTimeout

HELLO = [{"role": "user", "content": "Hi"}]


def chat(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/chat/completions", json={"model": "fake", "messages": HELLO, **fields})


def complete(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/completions", json={"model": "fake", "prompt": "Hi", **fields})


def events(response: httpx.Response) -> list[Any]:
    """The data of each event, as JSON except for [DONE]."""
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    data = [line.removeprefix("data: ") for line in lines]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


class TestModels:
    def test_list_and_get(self, host: FakeHost, client: openai.OpenAI) -> None:
        assert [model.id for model in client.models.list()] == ["fake", "org/fake-4bit"]
        assert client.models.retrieve("fake").owned_by == "mlxserve"

    @pytest.mark.parametrize("path", ["/v1/models/org/fake-4bit", "/models/org%2Ffake-4bit"])
    def test_names_may_contain_slashes(self, host: FakeHost, http: httpx.Client, path: str) -> None:
        model = http.get(path).json()
        Model.model_validate(model, strict=True)
        assert model["id"] == "org/fake-4bit"
        assert (model["context_length"], model["loaded"], model["created"]) == (4096, True, 1_700_000_000)

    @pytest.mark.parametrize("name", ["FAKE", "fake:latest", "Fake:Latest", "Org/Fake-4bit"])
    def test_any_spelling_of_an_alias_will_do(self, host: FakeHost, client: openai.OpenAI, name: str) -> None:
        assert client.models.retrieve(name).id == name.lower().removesuffix(":latest")

    def test_unknown(self, host: FakeHost, client: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve("nobody")
        assert (caught.value.code, caught.value.param, caught.value.type) == (
            "model_not_found",
            "model",
            "not_found_error",
        )


class TestChat:
    def test_whole(self, host: FakeHost, client: openai.OpenAI) -> None:
        host.script.num_cached_tokens = 1
        raw = client.chat.completions.with_raw_response.create(model="fake", messages=HELLO)
        reply = raw.parse()
        assert reply.choices[0].message.content == "Hello, world!"
        assert (reply.choices[0].finish_reason, reply.choices[0].message.role) == ("stop", "assistant")
        assert reply.choices[0].logprobs is None
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (2, 13, 15)
        assert reply.usage.prompt_tokens_details.cached_tokens == 1
        assert reply.object == "chat.completion"
        assert reply.id.startswith("chatcmpl-")
        assert raw.headers["x-request-id"] == reply.id == host.requests[0].request_id
        assert host.cancelled == []

    def test_stream_order(self, host: FakeHost, http: httpx.Client) -> None:
        host.script.text = "añ"
        response = chat(http, stream=True)
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, done = events(response)
        assert done == "[DONE]"
        for chunk in chunks:
            ChatCompletionChunk.model_validate(chunk, strict=True)
            assert "usage" not in chunk
        assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
            {"role": "assistant", "content": ""},
            {"content": "a"},
            {"content": "ñ"},
            {},
        ]
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
        assert {chunk["id"] for chunk in chunks} == {response.headers["x-request-id"]}
        assert host.cancelled == []

    def test_stream_usage(self, host: FakeHost, http: httpx.Client) -> None:
        host.script = Script(text="abc", num_cached_tokens=2)
        *chunks, usage, done = events(chat(http, stream=True, stream_options={"include_usage": True}))
        assert done == "[DONE]"
        assert [chunk["usage"] for chunk in chunks] == [None] * 5
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert usage["choices"] == []
        assert usage["usage"] == {
            "prompt_tokens": 2,
            "completion_tokens": 3,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 2},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }

    def test_stream_with_the_client(self, host: FakeHost, client: openai.OpenAI) -> None:
        host.script.text = "naïve 😀 日本"
        stream = client.chat.completions.create(
            model="fake", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "naïve 😀 日本"
        assert chunks[-1].usage.completion_tokens == len("naïve 😀 日本".encode())

    def test_async_client(self, host: FakeHost, address: str) -> None:
        async def both() -> tuple[str, str]:
            async with openai.AsyncOpenAI(base_url=address + "/v1", api_key="none", max_retries=0) as client:
                whole = await client.chat.completions.create(model="fake", messages=HELLO)
                stream = await client.chat.completions.create(model="fake", messages=HELLO, stream=True)
                parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
                return whole.choices[0].message.content, "".join(parts)

        assert asyncio.run(both()) == ("Hello, world!", "Hello, world!")

    def test_path_without_version(self, host: FakeHost, address: str) -> None:
        with openai.OpenAI(base_url=address, api_key="none") as client:
            assert client.chat.completions.create(model="fake", messages=HELLO).choices[0].message.content

    def test_length_and_stop(self, host: FakeHost, http: httpx.Client) -> None:
        cut = chat(http, max_completion_tokens=4).json()["choices"][0]
        assert (cut["message"]["content"], cut["finish_reason"]) == ("Hell", "length")
        stopped = chat(http, stop=["zzz", ", w"]).json()["choices"][0]
        assert (stopped["message"]["content"], stopped["finish_reason"]) == ("Hello", "stop")
        assert host.requests[-1].stop == ("zzz", ", w")
        chat(http, stop="one")
        assert host.requests[-1].stop == ("one",)

    def test_logprobs(self, host: FakeHost, http: httpx.Client) -> None:
        host.script.text = "aé"
        reply = chat(http, logprobs=True, top_logprobs=2).json()
        ChatCompletion.model_validate(reply, strict=True)
        first, second, third = reply["choices"][0]["logprobs"]["content"]
        assert first == {
            "token": "a",
            "logprob": -0.5,
            "bytes": [97],
            "top_logprobs": [
                {"token": "a", "logprob": -0.5, "bytes": [97]},
                {"token": "b", "logprob": -1.5, "bytes": [98]},
            ],
        }
        assert (second["token"], second["bytes"]) == ("bytes:\\xc3", [0xC3])
        assert third["bytes"] == [0xA9]

        chunks = events(chat(http, stream=True, logprobs=True))[:-1]
        streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        assert [entry and len(entry["content"]) for entry in streamed] == [None, 1, 2, None]
        assert streamed[1]["content"][0]["top_logprobs"] == []

    def test_timings(self, host: FakeHost, http: httpx.Client) -> None:
        host.script = Script(text="x" * 11, num_cached_tokens=1)
        expected = {
            "cache_n": 1,
            "prompt_n": 1,
            "prompt_ms": 50.0,
            "prompt_per_second": 20.0,
            "predicted_n": 11,
            "predicted_ms": 500.0,
            "predicted_per_second": 20.0,
            "draft_n": 0,
            "draft_n_accepted": 0,
            "ttft_ms": 56.0,
            "front_end_ms": 1.0,
            "load_ms": 0.0,
            "queue_ms": 2.0,
            "total_ms": 600.0,
        }
        assert chat(http, timings=True).json()["timings"] == pytest.approx(expected)
        *chunks, last, _ = events(chat(http, stream=True, timings=True))
        assert last["timings"] == pytest.approx(expected)
        assert not any("timings" in chunk for chunk in chunks)
        *chunks, last, _ = events(chat(http, stream=True, timings=True, stream_options={"include_usage": True}))
        assert last["timings"] == pytest.approx(expected)
        assert not any("timings" in chunk for chunk in chunks)
        assert "timings" not in chat(http).json()


class TestParameters:
    def test_all_reach_the_engine(self, host: FakeHost, http: httpx.Client) -> None:
        response = chat(
            http,
            temperature=0.5,
            top_p=0.25,
            top_k=7,
            min_p=0.125,
            seed=2**64 - 1,
            max_tokens=9,
            max_completion_tokens=9,
            ignore_eos=True,
            logprobs=True,
            top_logprobs=3,
            priority=-2,
            cache_salt="mine",
            timeout=2.5,
            speculation="ngram",
            chat_template_kwargs={"enable_thinking": False},
        )
        assert response.status_code == 200
        request = host.requests[0]
        assert request.sampling == SamplingParams(
            temperature=0.5,
            top_p=0.25,
            top_k=7,
            min_p=0.125,
            seed=2**64 - 1,
            max_tokens=9,
            ignore_eos=True,
            num_logprobs=3,
        )
        assert (request.priority, request.cache_salt, request.timeout) == (-2, "mine", 2.5)
        assert request.speculation is Speculation.NGRAM
        assert request.prompt.template_kwargs == {"enable_thinking": False}

    def test_null_is_the_default(self, host: FakeHost, http: httpx.Client) -> None:
        chat(http)
        fields = [
            *("stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k"),
            *("min_p", "stop", "seed", "logprobs", "top_logprobs", "n", "ignore_eos", "chat_template_kwargs", "user"),
            *("metadata", "store", "priority", "cache_salt", "timeout", "timings", "response_format", "tools"),
            "speculation",
            *("tool_choice", "functions", "logit_bias", "presence_penalty", "frequency_penalty", "reasoning_effort"),
        ]
        assert chat(http, **dict.fromkeys(fields)).status_code == 200
        plain, nulls = host.requests
        assert (nulls.sampling, nulls.stop, nulls.prompt) == (plain.sampling, plain.stop, plain.prompt)
        assert plain.sampling == SamplingParams()
        assert plain.speculation is nulls.speculation is None

    def test_values_that_ask_for_nothing_are_accepted(self, host: FakeHost, http: httpx.Client) -> None:
        response = chat(
            http,
            n=1,
            presence_penalty=0,
            frequency_penalty=0.0,
            repetition_penalty=1,
            logit_bias={},
            tools=[],
            tool_choice="none",
            functions=[],
            parallel_tool_calls=True,
            response_format={"type": "text"},
            echo=False,
            min_tokens=0,
            modalities=["text"],
            store=True,
            user="me",
            metadata={"a": "b"},
            stop=[],
        )
        assert response.status_code == 200, response.text
        assert complete(http, best_of=1, suffix="", echo=False).status_code == 200

    def test_model_defaults_apply_where_the_client_gave_nothing(self, host: FakeHost, http: httpx.Client) -> None:
        host.default_sampling = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
        chat(http, top_k=-1, temperature=0)
        assert host.requests[0].sampling == SamplingParams(temperature=0.0, top_p=0.95, top_k=0)
        chat(http, temperature=None)
        assert host.requests[1].sampling == SamplingParams(temperature=0.6, top_p=0.95, top_k=20)

    def test_messages_as_templates_expect_them(self, host: FakeHost, http: httpx.Client) -> None:
        call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
        odd = {"id": "c2", "type": "function", "function": {"name": "add", "arguments": "a=1"}}
        response = chat(
            http,
            messages=[
                {"role": "developer", "content": "Be brief"},
                {
                    "role": "user",
                    "name": "Ann",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                },
                {"role": "assistant", "content": None, "tool_calls": [call, odd], "refusal": None, "annotations": []},
                {"role": "tool", "tool_call_id": "c1", "content": "3"},
                {"role": "assistant", "content": "3", "reasoning_content": "easy"},
            ],
        )
        assert response.status_code == 200, response.text
        parsed = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
        assert host.requests[0].prompt.messages == (
            {"role": "system", "content": "Be brief"},
            {"role": "user", "content": "a\nb", "name": "Ann"},
            {"role": "assistant", "content": "", "tool_calls": [parsed, odd]},
            {"role": "tool", "content": "3", "name": "add", "tool_call_id": "c1"},
            {"role": "assistant", "content": "3", "reasoning_content": "easy"},
        )

    def test_large_bodies_are_parsed_too(self, host: FakeHost, http: httpx.Client) -> None:
        response = complete(http, prompt="x" * 2_000_000)
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert host.requests[0].prompt == TextPrompt("x" * 2_000_000)


class TestCompletions:
    def test_whole(self, host: FakeHost, client: openai.OpenAI) -> None:
        reply = client.completions.create(model="fake", prompt="Hi")
        assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("Hello, world!", "stop")
        assert (reply.object, reply.usage.total_tokens) == ("text_completion", 15)
        assert reply.id.startswith("cmpl-")
        assert host.requests[0].prompt == TextPrompt("Hi")
        assert host.requests[0].sampling.max_tokens == 16

    def test_stream(self, host: FakeHost, http: httpx.Client) -> None:
        host.script.text = "ab"
        *chunks, usage, done = events(complete(http, stream=True, stream_options={"include_usage": True}))
        assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b", ""]
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
        assert (usage["choices"], usage["usage"]["completion_tokens"], done) == ([], 2, "[DONE]")

    def test_stream_with_the_client(self, host: FakeHost, client: openai.OpenAI) -> None:
        stream = client.completions.create(model="fake", prompt="Hi", stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == "Hello, world!"

    def test_token_ids(self, host: FakeHost, http: httpx.Client) -> None:
        assert complete(http, prompt=[72, 105]).json()["usage"]["prompt_tokens"] == 2
        assert host.requests[0].prompt == TokenPrompt((72, 105))

    @pytest.mark.parametrize("prompts", [["a", "bb", "ccc"], [[1], [2, 2], [3, 3, 3]]])
    def test_several_prompts_run_together(self, host: FakeHost, http: httpx.Client, prompts: list[Any]) -> None:
        host.script.tokenise = gate = Gate()
        with ThreadPoolExecutor(1) as pool:
            response = pool.submit(complete, http, prompt=prompts, logprobs=1)
            wait_until(lambda: gate.num_waiting == 3)
            gate.open()
        reply = response.result().json()
        Completion.model_validate(reply, strict=True)
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
        assert {choice["text"] for choice in reply["choices"]} == {"Hello, world!"}
        assert reply["usage"] == {
            "prompt_tokens": 6,
            "completion_tokens": 39,
            "total_tokens": 45,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }
        assert len({request.request_id for request in host.requests}) == 3

    def test_several_prompts_in_one_stream(self, host: FakeHost, http: httpx.Client) -> None:
        *chunks, done = events(complete(http, prompt=["a", "b", "c"], stream=True))
        assert done == "[DONE]"
        texts = {0: "", 1: "", 2: ""}
        finished = []
        for chunk in chunks:
            (choice,) = chunk["choices"]
            assert choice["index"] not in finished
            texts[choice["index"]] += choice["text"]
            if choice["finish_reason"]:
                finished.append(choice["index"])
        assert set(texts.values()) == {"Hello, world!"}
        assert sorted(finished) == [0, 1, 2]

    def test_one_refused_prompt_refuses_them_all(self, host: FakeHost, http: httpx.Client) -> None:
        host.script.endless = True
        response = complete(http, prompt=["a", "b" * 5000])
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert host.cancelled in ([], [host.requests[0].request_id])

    def test_logprobs(self, host: FakeHost, http: httpx.Client) -> None:
        host.script.text = "aéb"
        whole = complete(http, logprobs=2).json()["choices"][0]["logprobs"]
        assert whole == {
            "tokens": ["a", "bytes:\\xc3", "bytes:\\xa9", "b"],
            "token_logprobs": [-0.5] * 4,
            "top_logprobs": [
                {"a": -0.5, "b": -1.5},
                {"bytes:\\xc3": -0.5, "bytes:\\xc4": -1.5},
                {"bytes:\\xa9": -0.5, "bytes:\\xaa": -1.5},
                {"b": -0.5, "c": -1.5},
            ],
            "text_offset": [0, 1, 1, 2],
        }
        chunks = events(complete(http, logprobs=2, stream=True))[:-2]
        offsets = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks]
        assert offsets == [[0], [1, 1], [2]]
        assert complete(http, logprobs=0).json()["choices"][0]["logprobs"]["top_logprobs"] is None

    def test_logprobs_of_a_delta_of_several_tokens(self) -> None:
        """What a reader gets that was slow for a moment: `é` is two tokens, and one is as good as impossible."""
        impossible = TokenLogprobs(-math.inf, ((99, -math.inf),))
        tokens = (SampledToken(97), SampledToken(0xC3), SampledToken(0xA9), SampledToken(98, impossible))
        reply = CompletionReply(ByteTokenizer().token_bytes, num_logprobs=1, num_choices=1)
        choice = reply.delta(0, TextDelta("aéb", tokens))
        assert choice is not None
        assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2]
        assert choice["logprobs"]["token_logprobs"][-1] == -9999.0
        assert choice["logprobs"]["top_logprobs"][-1] == {"b": -9999.0, "c": -9999.0}


class TestFailures:
    def test_refused_before_the_stream_is_a_status(self, host: FakeHost, client: openai.OpenAI) -> None:
        host.script.refusal = QueueFull("full", retry_after=2.2)
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(model="fake", messages=HELLO, stream=True)
        assert caught.value.response.headers["retry-after"] == "3"

    def test_context_length(self, host: FakeHost, client: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match=r"5000 .* 4096") as caught:
            client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "x" * 5000}], stream=True
            )
        assert caught.value.code == "context_length_exceeded"

    @pytest.mark.parametrize("fields", [{}, {"prompt": ["a", "b"]}])
    def test_failure_in_the_stream_is_an_event_without_done(
        self, host: FakeHost, http: httpx.Client, fields: dict[str, Any]
    ) -> None:
        host.script = Script(text="ab", failure=EngineError("the step failed"))
        *chunks, last = events(complete(http, stream=True, **fields))
        assert last == {
            "error": {"message": "the step failed", "type": "server_error", "param": None, "code": "engine_error"}
        }
        assert chunks[0]["choices"][0]["text"] == "a"

    def test_the_client_raises_on_it(self, host: FakeHost, client: openai.OpenAI) -> None:
        host.script.failure = RequestTimeout("too slow")
        stream = client.chat.completions.create(model="fake", messages=HELLO, stream=True)
        with pytest.raises(openai.APIError, match="too slow"):
            list(stream)

    def test_failure_of_a_whole_reply_is_a_status(self, host: FakeHost, http: httpx.Client) -> None:
        host.script.failure = EngineError("the step failed")
        assert (chat(http).status_code, chat(http).json()["error"]["code"]) == (500, "engine_error")

    def test_unexpected_failure_in_the_stream(
        self, host: FakeHost, http: httpx.Client, caplog: pytest.LogCaptureFixture
    ) -> None:
        host.script.failure = KeyError("secret detail")
        last = events(chat(http, stream=True))[-1]
        assert last["error"]["code"] == "internal_error"
        assert "secret" not in last["error"]["message"]
        assert "secret detail" in caplog.text

    def test_generation_that_stops_short(self, host: FakeHost, http: httpx.Client) -> None:
        host.script.finishes = False
        assert (chat(http).status_code, chat(http).json()["error"]["code"]) == (500, "engine_error")
        assert events(chat(http, stream=True))[-1]["error"]["code"] == "engine_error"


def test_answers_are_never_logged(host: FakeHost, http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    """Debug lines of the SSE library hold whole chunks."""
    with caplog.at_level(logging.DEBUG):
        assert '"content":"H"' in chat(http, stream=True).text
    assert '"content":"H"' not in caplog.text
