"""Streams while nothing is said yet: headers that do not wait, errors after them, how far the prompt is."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from fake_engine import FakeHost, Gate, Script, wait_until
from helpers_engine import Gate as ThreadGate
from helpers_engine import held, on_loop
from helpers_served import Served
from helpers_served import serving as engine
from test_api_disconnect import STREAM, Caller
from test_api_openai import HELLO, chat, complete, events

from mlxserve.api import exchange
from mlxserve.core.generation import Finished, GenerationRequest, PrefillProgress, TextDelta, TextPrompt
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.errors import EngineError, InvalidParameter

LONG_PROMPT = "the dog ate the log and " * 4
HOLDS: dict[str, Callable[[Gate], Script]] = {
    "load": lambda gate: Script(load=gate),
    "tokenise": lambda gate: Script(tokenise=gate),
}


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "HEADERS_AFTER", 0.02)


@pytest.fixture(params=HOLDS)
def gate(request: pytest.FixtureRequest, host: FakeHost) -> Iterator[Gate]:
    """Holds the next request before it is in the queue."""
    gate = Gate()
    host.script = HOLDS[request.param](gate)
    yield gate
    gate.open()


def test_headers_wait_no_longer_than_a_second() -> None:
    assert exchange.HEADERS_AFTER <= 1.0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_headers_go_out_before_load_and_tokenising(host: FakeHost, address: str, early: None, gate: Gate, path: str):
    body = STREAM if "chat" in path else {"model": "fake", "prompt": "Hi", "stream": True}
    with httpx.stream("POST", address + path, json=body) as reply:
        lines = reply.iter_lines()
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert next(lines) == ": keep-alive"
        gate.open()
        rest = list(lines)
    assert rest[-2:] == ["data: [DONE]", ""]
    wait_until(lambda: host.leases == [])


def test_the_client_sees_a_plain_stream(host: FakeHost, client: openai.OpenAI, early: None, gate: Gate) -> None:
    stream = client.chat.completions.create(model="fake", messages=HELLO, stream=True)
    gate.open()
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Hello, world!"


@pytest.mark.parametrize(
    ("error", "code", "param"),
    [
        (InvalidParameter("no such tool", param="tools"), "invalid_value", "tools"),
        (EngineError("out of memory"), "engine_error", None),
        (ZeroDivisionError("secret"), "internal_error", None),
    ],
)
def test_an_error_after_the_headers_is_an_event_and_the_end(
    host: FakeHost,
    http: httpx.Client,
    early: None,
    gate: Gate,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    code: str,
    param: str | None,
) -> None:
    host.script.refusal = error
    caplog.set_level(logging.ERROR, logger="mlxserve")
    with http.stream("POST", "/v1/chat/completions", json=STREAM) as reply:
        lines = reply.iter_lines()
        assert next(lines) == ": keep-alive"
        gate.open()
        rest = [line for line in lines if line]
    (event,) = rest
    assert f'"code":"{code}"' in event
    assert ("null" if param is None else f'"{param}"') in event
    assert "secret" not in event
    assert ("ZeroDivisionError: secret" in caplog.text) is isinstance(error, ZeroDivisionError)
    wait_until(lambda: host.leases == [])


def test_openais_client_raises_what_an_event_tells(host: FakeHost, client: openai.OpenAI, early: None, gate: Gate):
    host.script.refusal = InvalidParameter("no such tool", param="tools")
    stream = client.chat.completions.create(model="fake", messages=HELLO, stream=True)
    gate.open()
    with pytest.raises(openai.APIError, match="no such tool"):
        list(stream)


def test_a_client_that_goes_away_after_the_headers(host: FakeHost, address: str, early: None, gate: Gate) -> None:
    with Caller(address, stream=True) as caller:
        received = b""
        while b": keep-alive" not in received:
            received += caller.socket.recv(4096)
    wait_until(lambda: len(host.abandoned) == 1)
    wait_until(lambda: host.leases == [])


class TestProgress:
    @pytest.mark.parametrize(("kind", "empty"), [(chat, {"delta": {}}), (complete, {"text": ""})])
    def test_stream(self, host: FakeHost, http: httpx.Client, kind: Any, empty: dict[str, Any]) -> None:
        host.script = Script(text="a", num_cached_tokens=1)
        chunks = events(kind(http, stream=True, return_progress=True))[:-1]
        told = [chunk for chunk in chunks if "prompt_progress" in chunk]
        assert [chunk["prompt_progress"] for chunk in told] == [
            {"total": 2, "cache": 1, "processed": 1, "time_ms": 50.0},
            {"total": 2, "cache": 1, "processed": 2, "time_ms": 50.0},
        ]
        nothing = {"index": 0, "logprobs": None, "finish_reason": None} | empty
        assert [chunk["choices"] for chunk in told] == [[nothing], [nothing]]
        assert chunks.index(told[-1]) < len(chunks) - 2

    def test_only_where_it_is_asked_for(self, host: FakeHost, http: httpx.Client) -> None:
        assert not any("prompt_progress" in chunk for chunk in events(chat(http, stream=True))[:-1])
        assert chat(http, return_progress=False).status_code == 200

    def test_every_choice_tells_its_own(self, host: FakeHost, http: httpx.Client) -> None:
        chunks = events(chat(http, stream=True, return_progress=True, n=2))[:-1]
        told = [chunk["choices"][0]["index"] for chunk in chunks if "prompt_progress" in chunk]
        assert sorted(told) == [0, 0, 1, 1]

    def test_it_does_not_wait_for_the_prompts_logprobs(self, host: FakeHost, http: httpx.Client) -> None:
        fields = {"stream": True, "return_progress": True, "echo": True, "logprobs": 0, "n": 2}
        chunks = events(complete(http, **fields))[:-1]
        told = [chunk["choices"][0]["index"] for chunk in chunks[:4] if "prompt_progress" in chunk]
        assert sorted(told) == [0, 0, 1, 1]


async def progress_of(served: Served, request: GenerationRequest, gate: ThreadGate) -> list[PrefillProgress]:
    """Of a request whose steps go through one by one, each read before the next."""
    generation = await served.model.generate(request)
    told: list[PrefillProgress] = []
    while True:
        await gate.arrival()
        gate.let_go()
        event = await anext(generation)
        assert isinstance(event, PrefillProgress)
        told.append(event)
        if event.num_computed_tokens == event.num_prompt_tokens:
            assert isinstance(await anext(generation), TextDelta)
            break
    gate.open()
    assert [type(event) async for event in generation if isinstance(event, (PrefillProgress, Finished))] == [Finished]
    return told


def asking(prompt: str, *, wants_progress: bool = True) -> GenerationRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=8)
    return GenerationRequest("r", TextPrompt(prompt), sampling, wants_progress=wants_progress)


@on_loop
async def test_progress_comes_with_every_step_of_the_prompt() -> None:
    async with engine(max_prefill_tokens=8) as served:
        with held(ThreadGate()) as gate:
            served.runner.before_step = gate
            told = await progress_of(served, asking(LONG_PROMPT), gate)
    num_prompt_tokens = told[0].num_prompt_tokens
    expected = [*range(8, num_prompt_tokens, 8), num_prompt_tokens]
    assert [each.num_computed_tokens for each in told] == expected
    assert {(each.num_prompt_tokens, each.num_cached_tokens) for each in told} == {(num_prompt_tokens, 0)}
    seconds = [each.seconds for each in told]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0


@on_loop
async def test_progress_begins_behind_what_is_cached() -> None:
    async with engine(max_prefill_tokens=8) as served:
        assert [event async for event in await served.start("one", LONG_PROMPT)]
        await served.idle()
        with held(ThreadGate()) as gate:
            served.runner.before_step = gate
            told = await progress_of(served, asking(LONG_PROMPT + "the cat sat on the mat, " * 4), gate)
    num_cached_tokens = told[0].num_cached_tokens
    assert num_cached_tokens > 8
    assert num_cached_tokens < told[0].num_computed_tokens <= num_cached_tokens + 8 < told[0].num_prompt_tokens
    assert told[-1].num_computed_tokens == told[-1].num_prompt_tokens


@on_loop
async def test_a_slow_reader_gets_the_latest_progress_only() -> None:
    async with engine(max_prefill_tokens=8) as served:
        generation = await served.model.generate(asking(LONG_PROMPT))
        await served.idle()
        first, *rest = [event async for event in generation]
    assert isinstance(first, PrefillProgress)
    assert first.num_computed_tokens == first.num_prompt_tokens
    assert [type(event) for event in rest] == [TextDelta, Finished]


@on_loop
async def test_nobody_gets_progress_who_did_not_ask() -> None:
    async with engine(max_prefill_tokens=8) as served:
        generation = await served.model.generate(asking(LONG_PROMPT, wants_progress=False))
        assert not any([isinstance(event, PrefillProgress) async for event in generation])
