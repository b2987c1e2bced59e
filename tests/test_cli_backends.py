"""Where answers come from: the engine inside the command, and a running server, each replaced by a fake."""

import asyncio
import json
import socket
import sys
import types
from typing import Any

import httpx
import pytest
from fake_cli import FINISHED, FakeBackend
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlxserve.cli import chat_backend
from mlxserve.cli.chat_backend import AnswerEvent, LocalBackend, open_backend
from mlxserve.cli.http_backend import HttpBackend, find_server
from mlxserve.cli.parameters import ChatParameters
from mlxserve.cli.statistics import statistics_lines
from mlxserve.config import EngineConfig
from mlxserve.core.generation import ChatPrompt, Finished, GenerationRequest, Reasoning, ReasoningDelta, TextDelta
from mlxserve.core.step import SampledToken
from mlxserve.errors import CapacityError, ConfigError, EngineError, InvalidParameter, ModelNotFound, RequestError

MESSAGES = [{"role": "user", "content": "hello"}]


def _plain(event: AnswerEvent) -> str | Finished:
    """Text as it stands, thoughts in brackets."""
    match event:
        case TextDelta(text):
            return text
        case ReasoningDelta(text):
            return f"({text})"
        case _:
            return event


# --- the engine inside the command


class _Generation:
    """A thought, three pieces, then the end."""

    def __init__(self) -> None:
        self.cancelled = False
        texts = [TextDelta("Hel", ()), TextDelta("", (SampledToken(5),)), TextDelta("lo", ())]
        self._events = iter([ReasoningDelta("Hm", ()), *texts, FINISHED])

    def __aiter__(self) -> "_Generation":
        return self

    async def __anext__(self) -> AnswerEvent:
        for event in self._events:
            return event
        raise StopAsyncIteration

    def cancel(self, *reason: str) -> None:
        self.cancelled = True


class _Served:
    def __init__(self) -> None:
        self.default_sampling = {"temperature": 0.6, "top_k": 20}
        self.requests: list[GenerationRequest] = []
        self.generations: list[_Generation] = []

    async def generate(self, request: GenerationRequest) -> _Generation:
        self.requests.append(request)
        self.generations.append(_Generation())
        return self.generations[-1]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> _Served:
    """A model that LocalBackend finds in place of the engine's."""
    model = _Served()

    class Host:
        def __init__(self, config: EngineConfig, registry: object, **options: Any) -> None: ...
        async def start(self) -> None: ...
        async def close(self, timeout: float) -> None: ...
        async def get(self, name: str) -> _Served:
            return model

    monkeypatch.setitem(sys.modules, "mlxserve.engine.model_host", types.SimpleNamespace(ModelHost=Host))
    monkeypatch.setattr(chat_backend.blas, "preload", lambda threads: None)
    return model


def test_local_answer_merges_the_models_defaults(served: _Served) -> None:
    async def main() -> list[AnswerEvent]:
        backend = LocalBackend("smollm2-135m", EngineConfig())
        assert await backend.load() > 0
        assert await backend.load() == 0.0
        parameters = ChatParameters(temperature=0.0, max_tokens=7, stop=("END",), think="high")
        events = [event async for event in backend.answer(MESSAGES, parameters)]
        await backend.close()
        return events

    assert [_plain(event) for event in asyncio.run(main())] == ["(Hm)", "Hel", "", "lo", FINISHED]
    request = served.requests[0]
    assert request.prompt == ChatPrompt(messages=tuple(MESSAGES), reasoning=Reasoning(True, "high", "think"))
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.max_tokens) == (0.0, 20, 7)
    assert request.stop == ("END",)


def test_local_answer_that_is_left_is_cancelled(served: _Served) -> None:
    async def main() -> None:
        backend = LocalBackend("smollm2-135m", EngineConfig())
        await backend.load()
        events = backend.answer(MESSAGES, ChatParameters())
        assert await anext(events) == ReasoningDelta("Hm", ())
        assert not served.generations[0].cancelled
        await events.aclose()

    asyncio.run(main())
    assert served.generations[0].cancelled


def test_a_wrong_name_is_told_before_the_engine_is_imported(served: _Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_backend.blas, "preload", lambda threads: pytest.fail("too late"))
    with pytest.raises(ModelNotFound, match="smollm2-135m"):
        asyncio.run(LocalBackend("smollm2-135", EngineConfig()).load())


# --- a running server


class FakeServer:
    """An app that answers chat requests with the chunks it is given, and keeps their bodies."""

    def __init__(self, *chunks: Any, owner: str = "mlxserve", key: str | None = None, loaded: bool = True) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.reply = Response("".join(f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n" for chunk in chunks))
        self.shown: Response = JSONResponse({"error": "not part of this API"}, 404)
        self._owner = owner
        self._key = key
        self._loaded = loaded
        self.transport = httpx.ASGITransport(
            Starlette(
                routes=[
                    Route("/v1/models", lambda request: JSONResponse({"data": [{"id": "m"}, {"id": "some/repo"}]})),
                    Route("/v1/models/{name:path}", self._model),
                    Route("/api/show", self._show, methods=["POST"]),
                    Route("/v1/chat/completions", self._chat, methods=["POST"]),
                ]
            )
        )

    async def backend(
        self, model: str = "m", key: str | None = None, keep_alive: float | None = None
    ) -> HttpBackend | None:
        return await find_server(model, "127.0.0.1", 1, key, keep_alive=keep_alive, transport=self.transport)

    async def _model(self, request: Request) -> Response:
        if self._key and request.headers.get("authorization") != f"Bearer {self._key}":
            return JSONResponse({"error": {"message": "no"}}, 401, headers={"server": f"{self._owner}/0.1.0"})
        if request.path_params["name"] not in ("m", "some/repo"):
            return JSONResponse({"error": {"message": "no"}}, 404)
        return JSONResponse({"owned_by": self._owner, "loaded": self._loaded, "context_length": 77})

    async def _show(self, request: Request) -> Response:
        assert await request.json() == {"model": "m"}
        return self.shown

    async def _chat(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        return self.reply


def _delta(content: str | None = None, finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": content}, "finish_reason": finish_reason}], **more}


STREAM = (
    {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
    {"choices": [{"delta": {"reasoning_content": "Hm"}, "finish_reason": None}]},
    _delta("a\u2028"),
    _delta("é"),
    {"choices": [{"delta": {}, "finish_reason": "length"}]},
    {
        "choices": [],
        "usage": {
            "prompt_tokens": 40,
            "completion_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 16},
        },
        "timings": {
            "prompt_ms": 240.0,
            "predicted_ms": 500.0,
            "ttft_ms": 243.5,
            "queue_ms": 2.0,
            "front_end_ms": 1.0,
            "total_ms": 750.0,
        },
    },
)


async def _answer(backend: HttpBackend | None, parameters: ChatParameters | None = None) -> list[str | Finished]:
    assert backend is not None
    return [_plain(event) async for event in backend.answer(MESSAGES, parameters or ChatParameters())]


def test_http_answer() -> None:
    server = FakeServer(*STREAM)

    async def main() -> list[str | Finished]:
        return await _answer(await server.backend("some/repo"), ChatParameters(min_p=0.1, stop=("END",)))

    *texts, finished = asyncio.run(main())
    assert texts == ["(Hm)", "a\u2028", "é"]
    assert isinstance(finished, Finished)
    assert finished.reason.value == "length"
    assert finished.usage == FINISHED.usage
    assert finished.timings.delivery == pytest.approx(0.0005)
    assert statistics_lines(finished) == statistics_lines(FINISHED)
    assert server.bodies == [
        {
            "model": "some/repo",
            "messages": MESSAGES,
            "stream": True,
            "stream_options": {"include_usage": True},
            "timings": True,
            "min_p": 0.1,
            "stop": ["END"],
        }
    ]


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (400, {"error": {"message": "top_k?", "param": "top_k"}}, InvalidParameter),
        (400, {"error": {"message": "too long", "code": "context_length_exceeded"}}, RequestError),
        (404, {"error": {"message": "unknown"}}, ModelNotFound),
        (429, {"error": {"message": "full"}}, CapacityError),
        (500, {"error": {"message": "broken"}}, EngineError),
        (502, "no json of ours", EngineError),
    ],
)
def test_http_refusals_become_errors(status: int, body: Any, error: type[Exception]) -> None:
    server = FakeServer()
    server.reply = JSONResponse(body, status)
    expected = body["error"]["message"] if isinstance(body, dict) else "502"

    async def main() -> None:
        await _answer(await server.backend())

    with pytest.raises(error, match=expected.replace("?", r"\?")):
        asyncio.run(main())


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (FakeServer(_delta("a"), {"error": {"message": "engine down"}}).reply, "engine down"),
        (FakeServer(_delta("a")).reply, "without saying why"),
        (Response("data: {cut off\n\n"), "no valid stream"),
    ],
)
def test_http_stream_that_breaks(reply: Response, message: str) -> None:
    server = FakeServer()
    server.reply = reply

    async def main() -> None:
        await _answer(await server.backend())

    with pytest.raises(EngineError, match=message):
        asyncio.run(main())


@pytest.mark.parametrize("loaded", [True, False])
def test_http_load_asks_for_one_token_where_it_must(loaded: bool) -> None:
    server = FakeServer(*STREAM, loaded=loaded)

    async def main() -> None:
        backend = await server.backend()
        assert backend is not None
        assert (await backend.load() == 0.0) is loaded
        assert await backend.load() == 0.0

    asyncio.run(main())
    assert [body["max_tokens"] for body in server.bodies] == ([] if loaded else [1])


def test_http_think_and_keep_alive() -> None:
    server = FakeServer(*STREAM)

    async def main() -> None:
        backend = await server.backend(keep_alive=300.0)
        assert backend is not None
        for think in (True, False, "low"):
            await _answer(backend, ChatParameters(think=think))
        # Only the empty prompt's load keeps: another one's answer does so itself.
        await backend.load()
        await backend.load(-1.0)

    asyncio.run(main())
    asked = [(body.get("chat_template_kwargs"), body.get("reasoning_effort")) for body in server.bodies[:3]]
    assert asked == [({"enable_thinking": True}, None), ({"enable_thinking": False}, None), (None, "low")]
    assert [body["keep_alive"] for body in server.bodies] == [300.0, 300.0, 300.0, -1.0]
    assert server.bodies[3]["max_tokens"] == 1


SHOWN = {
    "details": {"family": "qwen3", "parameter_size": "4.0B", "quantization_level": "4-bit"},
    "capabilities": ["completion", "thinking"],
    "parameters": 'temperature 0.6\nrepeat_penalty 1.1\nstop "<|end|>"\nstop "a b"\nodd x y',
    "template": "{{ messages }}",
    "system": "be kind",
    "license": "Apache 2.0",
}


def test_http_facts_come_from_both_dialects() -> None:
    server = FakeServer()
    server.shown = JSONResponse(SHOWN)

    async def main() -> tuple[chat_backend.ModelFacts, list[str]]:
        backend = await server.backend()
        assert backend is not None
        return await backend.facts(), await backend.models()

    facts, models = asyncio.run(main())
    assert models == ["m", "some/repo"]
    assert facts.rows == {
        "model": "m",
        "server": "http://127.0.0.1:1",
        "architecture": "qwen3",
        "parameters": "4.0B",
        "context length": "77",
        "quantization": "4-bit",
        "capabilities": "completion, thinking",
    }
    assert facts.default_sampling == {
        "temperature": 0.6,
        "repetition_penalty": 1.1,
        "stop": ["<|end|>", "a b"],
        "odd": "x y",
    }
    assert (facts.template, facts.system, facts.license) == ("{{ messages }}", "be kind", "Apache 2.0")


@pytest.mark.parametrize("reply", [None, Response("no json"), JSONResponse(["odd"])])
def test_http_facts_of_a_server_that_shows_nothing(reply: Response | None) -> None:
    server = FakeServer()
    server.shown = reply or server.shown

    async def main() -> chat_backend.ModelFacts:
        backend = await server.backend()
        assert backend is not None
        return await backend.facts()

    facts = asyncio.run(main())
    assert facts.rows == {"model": "m", "server": "http://127.0.0.1:1", "context length": "77"}
    assert facts.context_length == 77
    assert facts.license is None


def test_a_server_is_used_only_if_it_is_ours_and_has_the_model() -> None:
    assert asyncio.run(FakeServer(owner="vllm").backend()) is None
    assert asyncio.run(FakeServer(owner="vllm", key="k").backend()) is None
    assert asyncio.run(FakeServer().backend("another")) is None
    assert asyncio.run(FakeServer(key="k").backend(key="k")) is not None
    assert asyncio.run(FakeServer().backend("M:latest")) is not None
    with pytest.raises(ConfigError, match="MLXSERVE_API_KEY"):
        asyncio.run(FakeServer(key="k").backend(key="wrong"))


def test_open_backend_without_a_server_is_local() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    backend = asyncio.run(open_backend("m", engine_config=EngineConfig(), host="127.0.0.1", port=port))
    assert isinstance(backend, LocalBackend)


def test_the_fake_has_the_methods_of_a_backend() -> None:
    backend: chat_backend.ChatBackend = FakeBackend()
    for name in ("load", "facts", "models", "answer", "close"):
        assert callable(getattr(backend, name))
        assert callable(getattr(HttpBackend, name))
        assert callable(getattr(LocalBackend, name))
