"""What /v1/responses takes: items and tools as chat templates see them, bad input, and the bounded store."""

import json
from typing import Any

import httpx
import pytest
from fake_engine import FakeHost

from mlxserve.api.openai.responses.convert import chat_prompt, generation_request, request_toolbox
from mlxserve.api.openai.responses.items import MessageItem
from mlxserve.api.openai.responses.schema import InputTokensRequest, ResponseRequest
from mlxserve.api.openai.responses.store import ResponseStore, StoredResponse
from mlxserve.core.constraint import JSON_OBJECT, Grammar
from mlxserve.core.generation import ChatPrompt, GenerationRequest, Reasoning, ToolChoice
from mlxserve.core.sampling_params import SamplingParams

LOOK = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {"at": {}}}}
USER = {"role": "user", "content": "Hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
TEXT = {"type": "input_text", "text": "a"}
IMAGE = {"type": "input_image", "image_url": "http://127.0.0.1:1/x.png"}
SPACE = {"type": "namespace", "name": "eyes", "description": "", "tools": [LOOK]}


def thoughts(*texts: str, **fields: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text} for text in texts], **fields}


def request(**fields: Any) -> GenerationRequest:
    body = ResponseRequest.model_validate({"model": "fake", "input": "Hi", **fields})
    return generation_request(body, chat_prompt(body, (), request_toolbox(body)), "id", {"min_p": 0.1})


def prompt(**fields: Any) -> ChatPrompt:
    body = InputTokensRequest.model_validate({"model": "fake", "input": "Hi", **fields})
    counted = chat_prompt(body, (), request_toolbox(body))
    assert request(**fields).prompt == counted
    return counted


def messages(*items: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return list(prompt(input=list(items), **fields).messages)


class TestItems:
    def test_a_string_is_a_users_message(self) -> None:
        assert list(prompt().messages) == [USER] == messages(USER) == messages(USER | {"type": "message"})

    def test_instructions_and_developers_are_the_system(self) -> None:
        developer = {"role": "developer", "content": [TEXT, TEXT | {"text": "b"}]}
        assert messages(developer, USER, instructions="Be brief.") == [
            {"role": "system", "content": "Be brief.\na\nb"},
            USER,
        ]

    def test_an_answer_is_one_message(self) -> None:
        said = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "phase": "commentary"}
        said["content"] = [{"type": "output_text", "text": "Look:", "annotations": [], "logprobs": []}]
        second = CALL | {"call_id": "c2", "arguments": "no JSON", "namespace": "eyes", "id": "fc_2"}
        results = [
            {"type": "function_call_output", "call_id": "c2", "output": [TEXT]},
            {"type": "function_call_output", "call_id": "c1", "output": "b"},
        ]
        assert messages(USER, thoughts("Hmm", "yes", id="rs_1"), said, CALL, second, *results, USER, USER) == [
            USER,
            {
                "role": "assistant",
                "content": "Look:",
                "reasoning_content": "Hmm\nyes",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {}}},
                    {"id": "c2", "type": "function", "function": {"name": "eyes__look", "arguments": "no JSON"}},
                ],
            },
            {"role": "tool", "content": "a", "tool_call_id": "c2", "name": "eyes__look"},
            {"role": "tool", "content": "b", "tool_call_id": "c1", "name": "look"},
            {"role": "user", "content": "Hi\nHi"},
        ]

    def test_thoughts_in_full_go_before_their_summary(self) -> None:
        content = [{"type": "reasoning_text", "text": "In full."}]
        said = messages(USER, thoughts("Short.", content=content, encrypted_content="x"), CALL)[1]
        assert said["reasoning_content"] == "In full."

    def test_a_begun_answer_stays_last(self) -> None:
        begun = {"role": "assistant", "content": "The answer is ("}
        assert messages(USER, begun) == [USER, begun]


class TestTools:
    def test_definitions(self) -> None:
        bare = {"type": "function", "name": "now", "parameters": None, "strict": None}
        given = [LOOK | {"description": "Looks", "strict": True, "defer_loading": True}, bare]
        functions = [tool["function"] for tool in prompt(tools=given).tools]
        assert functions == [
            {"name": "look", "description": "Looks", "parameters": LOOK["parameters"]},
            {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}},
        ]

    @pytest.mark.parametrize(
        ("wire", "choice"),
        [
            (None, ToolChoice()),
            ("auto", ToolChoice()),
            ("none", ToolChoice("none")),
            ("required", ToolChoice("required")),
            ({"type": "function", "name": "look"}, ToolChoice("required", "look")),
            ({"type": "function", "name": "look", "namespace": "eyes"}, ToolChoice("required", "eyes__look")),
        ],
    )
    def test_choices(self, wire: Any, choice: ToolChoice) -> None:
        assert prompt(tools=[LOOK, SPACE], tool_choice=wire).tool_choice == choice

    def test_allowed_tools(self) -> None:
        allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}]}
        asked = prompt(tools=[LOOK, SPACE], tool_choice=allowed, parallel_tool_calls=False)
        assert [tool["function"]["name"] for tool in asked.tools] == ["look"]
        assert asked.tool_choice == ToolChoice("required", parallel=False)


@pytest.mark.parametrize(
    ("effort", "reasoning"),
    [
        (None, Reasoning(param="reasoning.effort")),
        ("none", Reasoning(False, None, "reasoning.effort")),
        ("high", Reasoning(True, "high", "reasoning.effort")),
    ],
)
def test_reasoning(effort: Any, reasoning: Reasoning) -> None:
    assert prompt(reasoning={"effort": effort, "summary": "auto"}).reasoning == reasoning


def test_formats() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = {"type": "json_schema", "name": "x", "strict": True, "schema": schema}
    assert request(text={"format": asked}).grammar == Grammar("json_schema", schema, "text.format")
    asked = {"type": "json_object"}
    assert request(text={"format": asked}).grammar == Grammar("json_schema", JSON_OBJECT, "text.format")
    assert request(text={"format": {"type": "text"}, "verbosity": "medium"}).grammar is None


def test_sampling() -> None:
    given = {"temperature": 0.0, "top_p": 0.5, "top_k": -1, "presence_penalty": 1.0, "seed": 7}
    asked = request(**given, max_output_tokens=9, cache_salt="s")
    expected = given | {"top_k": 0, "min_p": 0.1, "max_tokens": 9}
    assert (asked.sampling, asked.cache_salt) == (SamplingParams(**expected), "s")


BAD_PROMPTS = [
    # fields, param, code
    ({"model": ""}, "model", "invalid_value"),
    ({"input": None}, "input", "invalid_type"),
    ({"input": []}, "input", "invalid_value"),
    ({"input": ["Hi"]}, "input[0]", "invalid_type"),
    ({"input": [{"content": "Hi"}]}, "input[0]", "invalid_type"),
    ({"input": [USER, {"role": "wizard", "content": "Hi"}]}, "input[1].role", "invalid_value"),
    ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
    ({"input": [USER | {"mood": "good"}]}, "input[0].mood", "unknown_parameter"),
    ({"input": [{"role": "user", "content": [TEXT, IMAGE]}]}, "input[0].content[1]", "unsupported_parameter"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", None),
    ({"input": [USER, {"type": "item_reference", "id": "x"}]}, "input[1]", "unsupported_parameter"),
    ({"input": [USER, CALL | {"arguments": {}}]}, "input[1].arguments", "invalid_type"),
    ({"input": [USER, {"type": "function_call"}]}, "input[1].call_id", "missing_required_parameter"),
    ({"input": [{"type": "function_call_output", "call_id": "c1", "output": "a"}]}, "input[0].call_id", None),
    ({"input": [USER, CALL, CALL | {"type": "function_call_output"}]}, "input[2].output", None),
    ({"input": [USER, {"type": "reasoning"}]}, "input[1].summary", "missing_required_parameter"),
    ({"instructions": 5}, "instructions", "invalid_type"),
    ({"previous_response_id": "resp_nobody"}, "previous_response_id", "previous_response_not_found"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "missing_required_parameter"),
    ({"tools": [LOOK, LOOK]}, "tools[1].name", None),
    ({"tools": [SPACE, LOOK | {"name": "eyes__look"}]}, "tools[1].name", None),
    ({"tools": [SPACE, SPACE]}, "tools[1].tools[0].name", None),
    ({"tools": [LOOK | {"name": "two words"}]}, "tools[0].name", "invalid_value"),
    ({"tools": [LOOK | {"parameters": {"type": "string"}}]}, "tools[0].parameters", "invalid_value"),
    ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools[0]", "unsupported_parameter"),
    ({"tools": [{"type": "mcp", "server_url": "http://127.0.0.1:1"}]}, "tools[0]", "unsupported_parameter"),
    ({"tools": [SPACE | {"tools": [{"type": "mcp"}]}]}, "tools[0].tools[0]", "unsupported_parameter"),
    ({"tool_choice": "required"}, "tool_choice", None),
    ({"tool_choice": "some"}, "tool_choice", "invalid_value"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice", "invalid_type"),
    ({"tools": [LOOK], "tool_choice": {"type": "function", "name": "leap"}}, "tool_choice.name", None),
    (
        {
            "tools": [LOOK],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "leap"}]},
        },
        "tool_choice.tools[0].name",
        None,
    ),
    ({"reasoning": {"effort": "some"}}, "reasoning.effort", "invalid_value"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", None),
    ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema", None),
    ({"text": {"verbosity": "high"}}, "text.verbosity", "unsupported_parameter"),
    ({"truncation": "auto"}, "truncation", "unsupported_parameter"),
    ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
    ({"mood": "good"}, "mood", "unknown_parameter"),
]
BAD_RESPONSES = [
    ({"stream": 1}, "stream", "invalid_type"),
    ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    ({"temperature": 3}, "temperature", "invalid_value"),
    ({"metadata": {"a": 1}}, "metadata.a", "invalid_type"),
    ({"include": ["message.output_text.logprobs"]}, "include", "unsupported_parameter"),
    ({"background": True}, "background", "unsupported_parameter"),
    ({"top_logprobs": 2}, "top_logprobs", "unsupported_parameter"),
    ({"prompt": {"id": "x"}}, "prompt", "unsupported_parameter"),
]


@pytest.mark.parametrize(
    ("path", "fields", "param", "code"),
    [
        *(("/v1/responses", *row) for row in BAD_PROMPTS + BAD_RESPONSES),
        *(("/v1/responses/input_tokens", *row) for row in BAD_PROMPTS),
    ],
)
def test_bad_fields(
    host: FakeHost, http: httpx.Client, path: str, fields: dict[str, Any], param: str, code: str | None
) -> None:
    response = http.post(path, json={"model": "fake", "input": "Hi", **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert param in error["message"] or code == "previous_response_not_found"
    assert code in (None, error["code"])
    assert host.requests == []


def test_streams_are_not_made_again(host: FakeHost, http: httpx.Client) -> None:
    made = http.post("/v1/responses", json={"model": "fake", "input": "Hi"}).json()
    assert http.get(f"/v1/responses/{made['id']}?stream=true").status_code == 400
    assert http.get("/v1/responses").status_code == 405


class TestStore:
    def stored(self, response_id: str, text: str = "x") -> StoredResponse:
        return StoredResponse({"id": response_id, "text": text}, [], (MessageItem(role="user", content=text),))

    def test_the_number_is_bounded_and_use_counts(self) -> None:
        store = ResponseStore(max_responses=2)
        for response_id in ("a", "b"):
            store.add(self.stored(response_id))
        assert store.get("a") is not None
        store.add(self.stored("c"))
        assert [store.get(response_id) is not None for response_id in "abc"] == [True, False, True]

    def test_the_size_is_bounded(self) -> None:
        size = len(json.dumps({"id": "a", "text": "x" * 1000})) + len(
            MessageItem(role="user", content="x" * 1000).model_dump_json()
        )
        store = ResponseStore(max_bytes=2 * size)
        for response_id in "abc":
            store.add(self.stored(response_id, "x" * 1000))
        assert [store.get(response_id) is not None for response_id in "abc"] == [False, True, True]
        assert store.remove("b")
        assert not store.remove("b")
        store.add(self.stored("d", "x" * 1000))
        assert store.get("c") is not None
        store.add(self.stored("e", "x" * 5000))
        assert store.get("e") is None
        assert len(store) == 2
