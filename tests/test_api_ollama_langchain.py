"""Ollama's dialect as LangChain's integration uses it."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_engine import FakeHost
from helpers_ollama import WEATHER
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_ollama import ChatOllama, OllamaLLM

Chat = Callable[..., ChatOllama]


@pytest.fixture
def chat(address: str) -> Iterator[Chat]:
    """Makes models, whose connections it closes."""
    made: list[ChatOllama] = []

    def make(**fields: Any) -> ChatOllama:
        made.append(ChatOllama(model="fake", base_url=address, **fields))
        return made[-1]

    yield make
    for model in made:
        model._client.close()


def test_chat(host: FakeHost, chat: Chat) -> None:
    model = chat(temperature=0, num_ctx=2048, keep_alive="1m", stop=["world"])
    reply = model.invoke([SystemMessage("Be brief."), HumanMessage("Hi")])
    assert reply.content == "Hello, "
    assert reply.usage_metadata["output_tokens"] == 7
    assert reply.response_metadata["done_reason"] == "stop"
    request = host.requests[-1]
    assert (request.sampling.temperature, request.context_length) == (0, 2048)
    assert [message["role"] for message in request.prompt.messages] == ["system", "user"]


def test_tools_and_their_results(host: FakeHost, chat: Chat) -> None:
    host.script.tool_calls = (("weather", '{"city": "Rome"}'),)
    model = chat().bind_tools([WEATHER])
    reply = model.invoke("Hi")
    assert isinstance(reply, AIMessage)
    assert [(call["name"], call["args"]) for call in reply.tool_calls] == [("weather", {"city": "Rome"})]
    result = ToolMessage("It rains.", tool_call_id=reply.tool_calls[0]["id"])
    model.invoke([HumanMessage("Hi"), reply, result])
    assert [message["role"] for message in host.requests[-1].prompt.messages] == ["user", "assistant", "tool"]


def test_structured_output(host: FakeHost, chat: Chat) -> None:
    host.script.text = '{"city": "Rome"}'
    schema = {"title": "Answer", **WEATHER["function"]["parameters"]}
    model = chat().with_structured_output(schema, method="json_schema")
    assert model.invoke("Where?") == {"city": "Rome"}
    assert host.requests[-1].grammar.source["properties"] == {"city": {"type": "string"}}


def test_async_stream_with_reasoning(host: FakeHost, chat: Chat) -> None:
    host.script.reasoning = "Hm."

    async def talk() -> list[Any]:
        model = chat(reasoning=True)
        parts = [part async for part in model.astream("Hi")]
        await model._async_client.close()
        return parts

    parts = asyncio.run(talk())
    assert "".join(part.content for part in parts) == "Hello, world!"
    assert "".join(part.additional_kwargs.get("reasoning_content", "") for part in parts) == "Hm."


def test_completion(host: FakeHost, address: str) -> None:
    model = OllamaLLM(model="fake", base_url=address)
    assert model.invoke("Hi") == "Hello, world!"
    model._client.close()
