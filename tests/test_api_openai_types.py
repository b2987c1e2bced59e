"""Every reply, chunk and error of the OpenAI dialect against OpenAI's own typed models, strictly."""

from typing import Any

import httpx
import pytest
from fake_engine import FakeHost, Script
from helpers_sdk import EXTENSIONS, check
from openai.types import Completion, CreateEmbeddingResponse, ErrorObject, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import ValidationError
from test_api_openai import chat, complete, events

from mlxserve.api.exchange import Embedded
from mlxserve.api.openai.embeddings import EmbeddingsRequest, embeddings_object
from mlxserve.core.generation import Arrival, Usage
from mlxserve.errors import EngineError, InvalidParameter, QueueFull

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
SCRIPTS = [
    Script(),
    Script(text=""),
    Script(reasoning="Well", text="é"),
    Script(text="", tool_calls=(("add", '{"a": 1}'), ("add", "{}"))),
    Script(reasoning="Hm", text="Let me", tool_calls=(("add", "{}"),)),
]
CHATS: list[dict[str, Any]] = [
    {},
    {"tools": TOOLS},
    {"logprobs": True, "top_logprobs": 2, "n": 2},
    {"timings": True, "max_tokens": 3},
]
# Of an echo's first token, log-probabilities are null, which the models do not know and the API always did.
COMPLETIONS: list[dict[str, Any]] = [
    {},
    {"echo": True},
    {"logprobs": 2, "n": 2},
    {"timings": True, "max_tokens": 3},
    {"suffix": "."},
]


@pytest.mark.parametrize("fields", CHATS, ids=str)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: f"{script.reasoning}-{script.text}-{script.tool_calls}")
class TestChat:
    def test_whole(self, host: FakeHost, http: httpx.Client, script: Script, fields: dict[str, Any]) -> None:
        host.script = script
        check(ChatCompletion, chat(http, **fields, prompt_logprobs=1).json())

    def test_stream(self, host: FakeHost, http: httpx.Client, script: Script, fields: dict[str, Any]) -> None:
        host.script = script
        options = {"stream": True, "stream_options": {"include_usage": True}, "return_progress": True}
        *chunks, done = events(chat(http, **fields, **options))
        assert done == "[DONE]"
        for chunk in chunks:
            check(ChatCompletionChunk, chunk)


@pytest.mark.parametrize("fields", COMPLETIONS, ids=str)
class TestCompletions:
    def test_whole(self, host: FakeHost, http: httpx.Client, fields: dict[str, Any]) -> None:
        check(Completion, complete(http, **fields, prompt_logprobs=1).json())

    def test_stream(self, host: FakeHost, http: httpx.Client, fields: dict[str, Any]) -> None:
        options = {"stream": True, "stream_options": {"include_usage": True}, "return_progress": True}
        for chunk in events(complete(http, **fields, **options))[:-1]:
            for choice in chunk["choices"]:
                # The models know this kind's chunks by their last ones only.
                choice["finish_reason"] = choice["finish_reason"] or "stop"
            check(Completion, chunk)


def test_embeddings() -> None:
    body = EmbeddingsRequest.model_validate({"model": "fake", "input": ["a", "b"], "dimensions": 2})
    embedded = Embedded("fake", [(0.6, 0.8, 0.0), (1.0, 0.0, 0.0)], [Usage(1, 0, 0), Usage(1, 1, 0)], Arrival(0.0))
    check(CreateEmbeddingResponse, embeddings_object(body, embedded))


def test_models(host: FakeHost, http: httpx.Client) -> None:
    listed = http.get("/v1/models").json()
    assert (listed["object"], set(listed)) == ("list", {"object", "data"})
    for model in [*listed["data"], http.get("/v1/models/fake").json()]:
        check(Model, model)


@pytest.mark.parametrize("error", [InvalidParameter("m", param="tools"), QueueFull("m", retry_after=1.0)])
@pytest.mark.parametrize("kind", [chat, complete])
@pytest.mark.parametrize("stream", [False, True])
def test_refusals(host: FakeHost, http: httpx.Client, kind: Any, stream: bool, error: Exception) -> None:
    host.script.refusal = error
    (key, content), *rest = kind(http, stream=stream).json().items()
    assert (key, rest) == ("error", [])
    check(ErrorObject, content)


@pytest.mark.parametrize("kind", [chat, complete])
def test_failures_in_a_stream(host: FakeHost, http: httpx.Client, kind: Any) -> None:
    host.script = Script(text="ab", failure=EngineError("out of memory"))
    *_, last = events(kind(http, stream=True))
    check(ErrorObject, last["error"])


@pytest.mark.parametrize("path", ["/v1/nothing", "/v1/models/nobody"])
def test_wrong_paths(host: FakeHost, http: httpx.Client, path: str) -> None:
    check(ErrorObject, http.get(path).json()["error"])


def test_what_is_wrong_is_found() -> None:
    message = {"role": "assistant", "content": "", "mood": "good"}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    reply = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    with pytest.raises(AssertionError, match=r"choices\.message\.mood"):
        check(ChatCompletion, reply)
    for wrong in ({"created": "1"}, {"choices": [choice | {"finish_reason": None}]}, {"id": None}):
        with pytest.raises(ValidationError):
            check(ChatCompletion, reply | wrong)
    assert "choices.message.reasoning" in EXTENSIONS[ChatCompletion]
