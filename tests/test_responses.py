"""/v1/responses with OpenAI's own client: shapes, streams, tools, reasoning, and what the server remembers."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from fake_engine import FakeHost, Gate, Script, serve, wait_until
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_item_list import ResponseItemList
from pydantic import TypeAdapter

from mlxserve.api import exchange
from mlxserve.api.app import create_app
from mlxserve.api.metrics import Metrics
from mlxserve.config import ServerConfig
from mlxserve.errors import ContextLengthExceeded, EngineError, QueueFull

LOOK = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {"at": {}}}, "strict": False}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[FakeHost, str]]:
    """A server of its own: it remembers responses."""
    host = FakeHost()
    with serve(create_app(host, ServerConfig(), Metrics())) as address:
        yield host, address


def send(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/responses", json={"model": "fake", "input": "Hi", **fields})


def respond(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    """The response as one object, which the SDK's type accepts strictly."""
    response = send(http, **fields)
    assert response.status_code == 200, response.text
    Response.model_validate_json(response.content, strict=True)
    return response.json()


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, each of which the SDK's type accepts strictly, and in their order."""
    assert response.status_code == 200, response.text
    parsed = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        EVENT.validate_json(data.removeprefix("data: "), strict=True)
        parsed.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {parsed[-1]['type']}"
    assert [each["sequence_number"] for each in parsed] == list(range(len(parsed)))
    return parsed


def stream(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    return events(send(http, stream=True, **fields))


def plain(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Output items without what is another in every response."""
    return [{key: value for key, value in item.items() if key != "id"} for item in output]


class TestWhole:
    def test_text(self, host: FakeHost, client: openai.OpenAI) -> None:
        host.script.num_cached_tokens = 1
        raw = client.responses.with_raw_response.create(model="fake", input="Hi", instructions="Be brief.")
        reply = raw.parse()
        assert reply.output_text == "Hello, world!"
        assert (reply.status, reply.model, reply.instructions) == ("completed", "fake", "Be brief.")
        assert reply.id.startswith("resp_")
        assert raw.headers["x-request-id"] == reply.id == host.requests[0].request_id
        usage = reply.usage
        assert (usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens) == (11, 1, 13)
        assert usage.total_tokens == 24
        wait_until(lambda: not host.leases)

    def test_a_limit(self, host: FakeHost, http: httpx.Client) -> None:
        reply = respond(http, max_output_tokens=4)
        assert (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert reply["output"][0]["status"] == "incomplete"
        assert reply["output"][0]["content"][0]["text"] == "Hell"

    def test_what_was_asked_comes_back(self, host: FakeHost, http: httpx.Client) -> None:
        schema = {"type": "object", "properties": {}}
        asked = {
            "temperature": 0.5,
            "top_p": 0.9,
            "max_output_tokens": 50,
            "metadata": {"a": "b"},
            "user": "me",
            "tools": [LOOK, {"type": "web_search", "search_context_size": "low"}],
            "tool_choice": {"type": "function", "name": "look"},
            "parallel_tool_calls": False,
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}},
            "store": False,
        }
        reply = respond(http, **asked)
        assert {name: reply[name] for name in asked} == asked

    def test_path_without_version(self, host: FakeHost, http: httpx.Client) -> None:
        assert http.post("/responses", json={"model": "fake", "input": "Hi"}).json()["object"] == "response"

    def test_async_client(self, host: FakeHost, address: str) -> None:
        async def both() -> tuple[str, str]:
            async with openai.AsyncOpenAI(base_url=address + "/v1", api_key="none", max_retries=0) as client:
                whole = await client.responses.create(model="fake", input="Hi")
                async with client.responses.stream(model="fake", input="Hi") as stream:
                    final = await stream.get_final_response()
                return whole.output_text, final.output_text

        assert asyncio.run(both()) == ("Hello, world!", "Hello, world!")


class TestStreams:
    def test_order(self, host: FakeHost, http: httpx.Client) -> None:
        host.script = Script(reasoning="Hm", text="añ", tool_calls=(("look", "{}"),))
        kinds = [each["type"].removeprefix("response.") for each in stream(http, tools=[LOOK])]
        assert kinds == [
            "created",
            "in_progress",
            "output_item.added",
            "reasoning_summary_part.added",
            "reasoning_summary_text.delta",
            "reasoning_summary_text.delta",
            "reasoning_summary_text.done",
            "reasoning_summary_part.done",
            "output_item.done",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
            "completed",
        ]

    @pytest.mark.parametrize(
        "script",
        [
            Script(text=""),
            Script(reasoning="Hmm.", text=""),
            Script(text="", tool_calls=(("look", '{"at": [1, {"y": null}]}'), ("look", ""))),
            Script(reasoning="Hmm.", text="naïve 😀 日本", tool_calls=(("look", "{}"),)),
        ],
    )
    @pytest.mark.parametrize("limit", [None, 5])
    def test_pieces_add_up_to_the_whole(
        self, host: FakeHost, http: httpx.Client, script: Script, limit: int | None
    ) -> None:
        host.script = script
        whole = respond(http, max_output_tokens=limit)
        parts = stream(http, max_output_tokens=limit)
        final = parts[-1]["response"]
        assert parts[-1]["type"] == f"response.{whole['status']}"
        assert plain(final["output"]) == plain(whole["output"])
        assert final["usage"] == whole["usage"]
        assert [each["item"] for each in parts if each["type"] == "response.output_item.done"] == final["output"]
        texts = [""] * len(final["output"])
        for each in parts:
            if each["type"].endswith(".delta"):
                assert each["item_id"] == final["output"][each["output_index"]]["id"]
                texts[each["output_index"]] += each["delta"]
        assert texts == [
            item["arguments"]
            if item["type"] == "function_call"
            else (item.get("content") or item["summary"])[0]["text"]
            for item in final["output"]
        ]

    def test_with_the_client(self, host: FakeHost, client: openai.OpenAI) -> None:
        host.script = Script(reasoning="Hmm.", text="Look:", tool_calls=(("look", '{"at": 1}'), ("look", "{}")))
        with client.responses.stream(model="fake", input="Hi", tools=[LOOK]) as stream:
            text = "".join(each.delta for each in stream if each.type == "response.output_text.delta")
            final = stream.get_final_response()
        assert text == final.output_text == "Look:"
        reasoning, _, *calls = final.output
        assert reasoning.summary[0].text == "Hmm."
        assert [(call.name, call.arguments) for call in calls] == [("look", '{"at": 1}'), ("look", "{}")]
        assert final.usage.output_tokens_details.reasoning_tokens == 4

    @pytest.mark.parametrize(
        ("error", "code"),
        [(EngineError("m"), "server_error"), (QueueFull("m", retry_after=1), "rate_limit_exceeded")],
        ids=["engine", "queue"],
    )
    @pytest.mark.parametrize("when", ["early", "late"])
    def test_a_failure_is_the_last_event(
        self,
        host: FakeHost,
        http: httpx.Client,
        monkeypatch: pytest.MonkeyPatch,
        when: str,
        error: Exception,
        code: str,
    ) -> None:
        monkeypatch.setattr(exchange, "HEADERS_AFTER", 0.02)
        gate = Gate()
        host.script = Script(load=gate, refusal=error) if when == "early" else Script(first_token=gate, failure=error)
        with http.stream("POST", "/v1/responses", json={"model": "fake", "input": "Hi", "stream": True}) as response:
            gate.open()
            response.read()
        first, *_, last = events(response)
        assert (first["type"], last["type"]) == ("response.created", "response.failed")
        assert last["response"]["status"] == "failed"
        assert last["response"]["error"] == {"code": code, "message": "m"}
        assert last["response"]["id"] == first["response"]["id"] == response.headers["x-request-id"]

    def test_a_full_context_late(self, host: FakeHost, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
        """Codex looks for this code."""
        monkeypatch.setattr(exchange, "HEADERS_AFTER", 0.02)
        host.script = Script(load=(gate := Gate()), refusal=ContextLengthExceeded("m", num_tokens=9, limit=5))
        with http.stream("POST", "/v1/responses", json={"model": "fake", "input": "Hi", "stream": True}) as response:
            gate.open()
            assert '"code":"context_length_exceeded"' in response.read().decode()

    def test_a_stream_that_just_ends_is_a_failure(self, host: FakeHost, http: httpx.Client) -> None:
        host.script.finishes = False
        assert stream(http)[-1]["type"] == "response.failed"
        assert send(http).status_code == 500


class TestTools:
    def test_a_conversation(self, host: FakeHost, client: openai.OpenAI) -> None:
        host.script = Script(text="", tool_calls=(("look", '{"at": 1}'),))
        first = client.responses.create(model="fake", input="Hi", tools=[LOOK], store=False)
        (call,) = first.output
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "a house"}
        items = [{"role": "user", "content": "Hi"}, call.to_dict(), result]
        client.responses.create(model="fake", input=items, tools=[LOOK], store=False)
        *_, asked, answered = host.requests[1].prompt.messages
        function = {"name": "look", "arguments": {"at": 1}}
        assert asked["tool_calls"] == [{"id": call.call_id, "type": "function", "function": function}]
        assert answered == {"role": "tool", "content": "a house", "tool_call_id": call.call_id, "name": "look"}

    def test_namespaces(self, host: FakeHost, http: httpx.Client) -> None:
        """Codex puts the tools of an MCP server into one, and wants it back."""
        spaces = [
            {"type": "namespace", "name": "mcp__web__", "description": "A server", "tools": [LOOK]},
            {"type": "namespace", "name": "eyes", "description": "Others", "tools": [LOOK]},
        ]
        host.script = Script(text="", tool_calls=(("mcp__web__look", "{}"), ("eyes__look", "{}"), ("look", "{}")))
        calls = respond(http, tools=[*spaces, LOOK])["output"]
        assert [tool["function"]["name"] for tool in host.requests[0].prompt.tools] == [
            "mcp__web__look",
            "eyes__look",
            "look",
        ]
        assert [(call["name"], call.get("namespace")) for call in calls] == [
            ("look", "mcp__web__"),
            ("look", "eyes"),
            ("look", None),
        ]
        respond(http, tools=spaces, input=[{"role": "user", "content": "Hi"}, *calls])
        said = host.requests[1].prompt.messages[-1]
        assert said["tool_calls"][0]["function"]["name"] == "mcp__web__look"

    def test_tools_of_openais_servers_are_not_told_of(self, host: FakeHost, http: httpx.Client) -> None:
        others = [{"type": "web_search", "filters": {}}, {"type": "custom", "name": "patch"}, {"type": "tool_search"}]
        assert send(http, tools=[*others, LOOK]).status_code == 200
        assert [tool["function"]["name"] for tool in host.requests[0].prompt.tools] == ["look"]


class TestMemory:
    def test_going_on(self, host: FakeHost, client: openai.OpenAI) -> None:
        host.script = Script(reasoning="Hmm.", text="Yes?", tool_calls=(("look", "{}"),))
        first = client.responses.create(model="fake", input="Hi", instructions="Be brief.", tools=[LOOK])
        result = {"type": "function_call_output", "call_id": "call_0", "output": "a house"}
        host.script = Script(text="A house.")
        second = client.responses.create(model="fake", input=[result], previous_response_id=first.id, tools=[LOOK])
        assert second.previous_response_id == first.id
        client.responses.create(model="fake", input="Thanks", previous_response_id=second.id, tools=[LOOK])
        call = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": {}}}
        assert list(host.requests[2].prompt.messages) == [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Yes?", "reasoning_content": "Hmm.", "tool_calls": [call]},
            {"role": "tool", "content": "a house", "tool_call_id": "call_0", "name": "look"},
            {"role": "assistant", "content": "A house."},
            {"role": "user", "content": "Thanks"},
        ]

    def test_looking_at_it_and_forgetting_it(self, host: FakeHost, client: openai.OpenAI) -> None:
        with client.responses.stream(model="fake", input="Hi") as stream:
            made = stream.get_final_response()
        assert client.responses.retrieve(made.id).output_text == "Hello, world!"
        client.responses.delete(made.id)
        for attempt in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                attempt(made.id)
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="fake", input="Hi", previous_response_id=made.id)
        assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")

    def test_what_goes_on_outlives_what_it_goes_on_from(self, host: FakeHost, client: openai.OpenAI) -> None:
        first = client.responses.create(model="fake", input="Hi")
        second = client.responses.create(model="fake", input="Ho", previous_response_id=first.id)
        client.responses.delete(first.id)
        client.responses.create(model="fake", input="Hu", previous_response_id=second.id)
        said = [message["content"] for message in host.requests[-1].prompt.messages]
        assert said == ["Hi", "Hello, world!", "Ho", "Hello, world!", "Hu"]

    @pytest.mark.parametrize("how", ["store", "failure"])
    def test_what_is_not_remembered(self, host: FakeHost, http: httpx.Client, how: str) -> None:
        if how == "store":
            response_id = respond(http, store=False)["id"]
        else:
            host.script.failure = EngineError("m")
            response_id = stream(http)[-1]["response"]["id"]
        assert http.get(f"/v1/responses/{response_id}").status_code == 404

    def test_input_items(self, host: FakeHost, http: httpx.Client) -> None:
        call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
        items = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Yes?", "type": "message"},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hmm."}]},
            call,
            {"type": "function_call_output", "call_id": "c", "output": "a house"},
            {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        ]
        made = respond(http, input=items)
        response = http.get(f"/v1/responses/{made['id']}/input_items?order=asc")
        ResponseItemList.model_validate_json(response.content, strict=True)
        page = response.json()
        assert [item["type"] for item in page["data"]] == [item.get("type", "message") for item in items]
        assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
        newest_first = http.get(f"/v1/responses/{made['id']}/input_items").json()
        assert newest_first["data"] == page["data"][::-1]


def test_input_tokens(host: FakeHost, client: openai.OpenAI) -> None:
    first = client.responses.create(model="fake", input="Hi")
    fields: dict[str, Any] = {"model": "fake", "input": "naïve", "previous_response_id": first.id}
    counted = client.responses.input_tokens.count(**fields)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == client.responses.create(**fields).usage.input_tokens == 21
    wait_until(lambda: not host.leases)
