"""The OpenAI dialect through the packages people use it with: openai, langchain-openai and llm."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import llm
import llm.plugins
import openai
import pytest
from fake_engine import FakeHost, Script
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from test_api_openai import HELLO

from mlxserve.core.generation import Reasoning, ToolChoice
from mlxserve.errors import EngineError

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
]
ARGUMENTS = '{"a": 1, "b": 2}'
CALLING = {"text": "", "tool_calls": (("add", ARGUMENTS),)}
RESULT = {"role": "tool", "tool_call_id": "call_0", "content": "3"}


class City(BaseModel):
    name: str
    size: int


@asynccontextmanager
async def asynchronous(address: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=address + "/v1", api_key="none", max_retries=0) as client:
        yield client


class TestOpenAI:
    def test_a_whole_turn_with_tools(self, host: FakeHost, client: openai.OpenAI) -> None:
        host.script = Script(**CALLING)
        first = client.chat.completions.create(model="fake", messages=HELLO, tools=TOOLS, tool_choice="required")
        choice = first.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls
        assert (call.id, call.type, call.function.name) == ("call_0", "function", "add")
        assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
        assert host.requests[0].prompt.tool_choice == ToolChoice("required")
        assert host.requests[0].prompt.tools[0]["function"]["parameters"] == TOOLS[0]["function"]["parameters"]

        host.script = Script(text="It is 3.")
        messages = [*HELLO, choice.message, RESULT]
        second = client.chat.completions.create(model="fake", messages=messages, tools=TOOLS)
        assert second.choices[0].message.content == "It is 3."
        assert [message["role"] for message in host.requests[1].prompt.messages] == ["user", "assistant", "tool"]

    def test_tools_in_a_stream(self, host: FakeHost, client: openai.OpenAI) -> None:
        host.script = Script(text="Well.", reasoning="Hm", tool_calls=(("add", ARGUMENTS), ("add", "{}")))
        with client.chat.completions.stream(model="fake", messages=HELLO, tools=TOOLS) as stream:
            names = [event.name for event in stream if event.type == "tool_calls.function.arguments.done"]
            final = stream.get_final_completion().choices[0]
        assert names == ["add", "add"]
        assert final.finish_reason == "tool_calls"
        assert [call.function.arguments for call in final.message.tool_calls] == [ARGUMENTS, "{}"]
        assert final.message.content == "Well."

    def test_tools_of_an_async_client(self, host: FakeHost, address: str) -> None:
        host.script = Script(**CALLING)

        async def ask() -> tuple[str, str]:
            async with asynchronous(address) as client:
                whole = await client.chat.completions.create(model="fake", messages=HELLO, tools=TOOLS)
                stream = await client.chat.completions.create(model="fake", messages=HELLO, tools=TOOLS, stream=True)
                arguments = ""
                async for chunk in stream:
                    for call in chunk.choices[0].delta.tool_calls or ():
                        arguments += call.function.arguments
                return whole.choices[0].message.tool_calls[0].function.arguments, arguments

        assert asyncio.run(ask()) == (ARGUMENTS, ARGUMENTS)

    def test_reasoning(self, host: FakeHost, client: openai.OpenAI) -> None:
        host.script = Script(reasoning="Hm.", text="Yes")
        reply = client.chat.completions.create(model="fake", messages=HELLO, reasoning_effort="low")
        message = reply.choices[0].message
        assert (message.content, message.reasoning_content, message.reasoning) == ("Yes", "Hm.", "Hm.")
        assert reply.usage.completion_tokens_details.reasoning_tokens == 3
        assert host.requests[0].prompt.reasoning == Reasoning(True, "low")
        stream = client.chat.completions.create(model="fake", messages=HELLO, stream=True)
        deltas = [chunk.choices[0].delta for chunk in stream]
        assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "Hm."
        assert "".join(delta.content or "" for delta in deltas) == "Yes"

    def test_json_schema_out_of_a_class(self, host: FakeHost, client: openai.OpenAI) -> None:
        host.script = Script(text='{"name": "Bonn", "size": 3}')
        reply = client.chat.completions.parse(model="fake", messages=HELLO, response_format=City)
        assert reply.choices[0].message.parsed == City(name="Bonn", size=3)
        assert host.requests[0].grammar.source["properties"].keys() == {"name", "size"}

    def test_json_schema_with_the_async_client_streaming(self, host: FakeHost, address: str) -> None:
        host.script = Script(text='{"name": "Bonn", "size": 3}')

        async def ask() -> Any:
            async with (
                asynchronous(address) as client,
                client.chat.completions.stream(model="fake", messages=HELLO, response_format=City) as stream,
            ):
                return (await stream.get_final_completion()).choices[0].message.parsed

        assert asyncio.run(ask()) == City(name="Bonn", size=3)

    def test_tools_out_of_a_class(self, host: FakeHost, client: openai.OpenAI) -> None:
        host.script = Script(text="", tool_calls=(("City", '{"name": "Bonn", "size": 3}'),))
        tools = [openai.pydantic_function_tool(City)]
        reply = client.chat.completions.parse(model="fake", messages=HELLO, tools=tools)
        assert reply.choices[0].message.tool_calls[0].function.parsed_arguments == City(name="Bonn", size=3)

    def test_infill(self, host: FakeHost, client: openai.OpenAI) -> None:
        reply = client.completions.create(model="fake", prompt="a", suffix="c", max_tokens=5)
        assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("Hello", "length")

    def test_errors_name_the_field(self, host: FakeHost, client: openai.OpenAI) -> None:
        image = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}
        messages: Any = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}]
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="fake", messages=messages)
        assert (caught.value.param, caught.value.code) == ("messages[0].content[1]", "unsupported_parameter")

    def test_failures_in_a_stream_are_raised(self, host: FakeHost, client: openai.OpenAI) -> None:
        host.script = Script(text="ab", failure=EngineError("out of memory"))
        with pytest.raises(openai.APIError, match="out of memory"):
            list(client.chat.completions.create(model="fake", messages=HELLO, stream=True))


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def langchain(address: str, **fields: Any) -> ChatOpenAI:
    return ChatOpenAI(model="fake", base_url=address + "/v1", api_key="none", max_retries=0, **fields)


class TestLangChain:
    @pytest.fixture
    def model(self, host: FakeHost, address: str) -> Iterator[ChatOpenAI]:
        with httpx.Client() as client:
            yield langchain(address, http_client=client)

    def test_invoke(self, host: FakeHost, model: ChatOpenAI) -> None:
        answer = model.invoke("Hi")
        assert answer.content == "Hello, world!"
        assert answer.usage_metadata["total_tokens"] == 15
        assert answer.response_metadata["finish_reason"] == "stop"

    def test_stream(self, host: FakeHost, model: ChatOpenAI) -> None:
        chunks = list(model.stream("Hi", stream_usage=True))
        assert "".join(chunk.content for chunk in chunks) == "Hello, world!"
        whole = chunks[0]
        for chunk in chunks[1:]:
            whole += chunk
        assert whole.usage_metadata["output_tokens"] == 13

    def test_async(self, host: FakeHost, address: str) -> None:
        async def ask() -> tuple[str, str]:
            async with httpx.AsyncClient() as client:
                model = langchain(address, http_async_client=client)
                whole = await model.ainvoke("Hi")
                return whole.content, "".join([chunk.content async for chunk in model.astream("Hi")])

        assert asyncio.run(ask()) == ("Hello, world!", "Hello, world!")

    def test_tools(self, host: FakeHost, model: ChatOpenAI) -> None:
        host.script = Script(**CALLING)
        answer = model.bind_tools([add], tool_choice="add").invoke("What is 1 + 2?")
        (call,) = answer.tool_calls
        assert (call["name"], call["args"], call["id"]) == ("add", {"a": 1, "b": 2}, "call_0")
        assert host.requests[0].prompt.tool_choice == ToolChoice("required", "add")
        chunks = list(model.bind_tools([add], parallel_tool_calls=False).stream("What is 1 + 2?"))
        whole = chunks[0]
        for chunk in chunks[1:]:
            whole += chunk
        assert [call["args"] for call in whole.tool_calls] == [{"a": 1, "b": 2}]
        assert host.requests[1].prompt.tool_choice == ToolChoice(parallel=False)
        host.script = Script(text="3")
        turn = [
            HumanMessage("What is 1 + 2?"),
            AIMessage("", tool_calls=answer.tool_calls),
            ToolMessage("3", tool_call_id="call_0"),
        ]
        assert model.bind_tools([add]).invoke(turn).content == "3"

    def test_structured_output(self, host: FakeHost, model: ChatOpenAI) -> None:
        host.script = Script(text='{"name": "Bonn", "size": 3}')
        assert model.with_structured_output(City).invoke("Where?") == City(name="Bonn", size=3)
        assert host.requests[0].grammar is not None


class TestLlm:
    @pytest.fixture
    def model(self, host: FakeHost, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> llm.Model:
        """As docs/recipes.md sets it up."""
        lines = (Path(__file__).parent.parent / "docs" / "recipes.md").read_text(encoding="utf-8")
        _, _, rest = lines.partition("## llm")
        settings = rest.split("```yaml\n")[1].split("```")[0]
        assert "http://127.0.0.1:11711" in settings
        settings = settings.replace("http://127.0.0.1:11711", address).replace("qwen3-4b", "fake")
        (tmp_path / "extra-openai-models.yaml").write_text(settings, encoding="utf-8")
        monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
        # Not those that happen to be installed: the demo model's, for one, wants another engine.
        monkeypatch.setattr(llm.plugins, "LLM_LOAD_PLUGINS", "")
        return llm.get_model("local")

    @pytest.mark.parametrize("stream", [False, True])
    def test_prompt(self, host: FakeHost, model: llm.Model, stream: bool) -> None:
        assert model.prompt("Hi", stream=stream).text() == "Hello, world!"

    def test_schema(self, host: FakeHost, model: llm.Model) -> None:
        host.script = Script(text='{"name": "Bonn", "size": 3}')
        assert json.loads(model.prompt("Where?", schema=City, stream=False).text()) == {"name": "Bonn", "size": 3}
        assert host.requests[0].grammar is not None

    @pytest.mark.parametrize("stream", [False, True])
    def test_tools(self, host: FakeHost, model: llm.Model, stream: bool) -> None:
        host.script = Script(**CALLING)

        def add(a: int, b: int) -> int:
            "Adds two numbers"
            return a + b

        response = model.prompt("What is 1 + 2?", tools=[add], stream=stream)
        assert [(call.name, call.arguments) for call in response.tool_calls()] == [("add", {"a": 1, "b": 2})]
