"""Tools and reasoning in the OpenAI dialect: what reaches the engine, and what comes back."""

from typing import Any

import httpx
import pytest
from fake_engine import FakeHost, Script
from test_api_errors import error_of
from test_api_openai import HELLO, chat, complete, events

from mlxserve.api.tool_schema import schema_fault
from mlxserve.core.generation import InfillPrompt, Reasoning, ToolChoice
from mlxserve.errors import InvalidParameter

ADD = {"name": "add", "description": "Adds", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": ADD}, {"type": "function", "function": {"name": "mcp.now", "strict": True}}]
NO_ARGUMENTS = {"type": "object", "properties": {}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


class TestRequests:
    def test_tools_reach_the_template_in_full(self, host: FakeHost, http: httpx.Client) -> None:
        assert chat(http, tools=TOOLS).status_code == 200
        prompt = host.requests[0].prompt
        now = {"name": "mcp.now", "description": "", "parameters": NO_ARGUMENTS}
        assert prompt.tools == ({"type": "function", "function": ADD}, {"type": "function", "function": now})
        assert prompt.tool_choice == ToolChoice()

    @pytest.mark.parametrize(
        ("choice", "expected"),
        [
            (None, ToolChoice()),
            ("auto", ToolChoice()),
            ("none", ToolChoice("none")),
            ("required", ToolChoice("required")),
            (named("add"), ToolChoice("required", "add")),
        ],
    )
    def test_choices(self, host: FakeHost, http: httpx.Client, choice: Any, expected: ToolChoice) -> None:
        assert chat(http, tools=TOOLS, tool_choice=choice).status_code == 200
        assert host.requests[0].prompt.tool_choice == expected

    @pytest.mark.parametrize("mode", ["auto", "required"])
    def test_allowed_tools_are_the_ones_the_model_is_told_of(
        self, host: FakeHost, http: httpx.Client, mode: Any
    ) -> None:
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named("mcp.now")]}}
        assert chat(http, tools=TOOLS, tool_choice=choice).status_code == 200
        prompt = host.requests[0].prompt
        assert [each["function"]["name"] for each in prompt.tools] == ["mcp.now"]
        assert prompt.tool_choice == ToolChoice(mode)

    @pytest.mark.parametrize(("given", "expected"), [(None, True), (True, True), (False, False)])
    def test_parallel_calls(self, host: FakeHost, http: httpx.Client, given: Any, expected: bool) -> None:
        assert chat(http, tools=TOOLS, parallel_tool_calls=given).status_code == 200
        assert host.requests[0].prompt.tool_choice.parallel is expected

    @pytest.mark.parametrize("effort", ["minimal", "low", "medium", "high", "xhigh", "max"])
    def test_reasoning_effort(self, host: FakeHost, http: httpx.Client, effort: str) -> None:
        assert chat(http, reasoning_effort=effort).status_code == 200
        assert host.requests[0].prompt.reasoning == Reasoning(True, effort, "reasoning_effort")

    def test_no_reasoning(self, host: FakeHost, http: httpx.Client) -> None:
        chat(http, reasoning_effort="none")
        chat(http)
        assert [request.prompt.reasoning for request in host.requests] == [Reasoning(False), Reasoning()]

    def test_reasoning_of_earlier_answers_by_either_name(self, host: FakeHost, http: httpx.Client) -> None:
        answers = [{"role": "assistant", "content": "3", name: "easy"} for name in ("reasoning", "reasoning_content")]
        assert chat(http, messages=[*answers, *HELLO]).status_code == 200
        assert [message.get("reasoning_content") for message in host.requests[0].prompt.messages] == [
            *("easy", "easy"),
            None,
        ]

    @pytest.mark.parametrize(
        ("value", "seconds"), [(None, None), (300, 300.0), (-1, -1.0), (0, 0.0), ("5m", 300.0), ("1.5", 1.5)]
    )
    def test_keep_alive_goes_with_the_lease(
        self, host: FakeHost, http: httpx.Client, value: Any, seconds: float | None
    ) -> None:
        assert chat(http, keep_alive=value).status_code == 200
        assert complete(http, keep_alive=value, stream=True).status_code == 200
        assert host.keep_alives == [seconds, seconds]

    @pytest.mark.parametrize(
        ("text", "expected"), [('{"a": 1}', {"a": 1}), ("", {}), (" ", {}), ("[1]", "[1]"), ("{", "{")]
    )
    def test_arguments_of_earlier_calls(
        self, host: FakeHost, http: httpx.Client, text: str, expected: dict[str, Any] | str
    ) -> None:
        call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": text}}
        assert chat(http, messages=[*HELLO, {"role": "assistant", "tool_calls": [call]}]).status_code == 200
        (rendered,) = host.requests[0].prompt.messages[1]["tool_calls"]
        assert rendered["function"]["arguments"] == expected

    def test_suffix(self, host: FakeHost, http: httpx.Client) -> None:
        assert complete(http, prompt=["a", "b"], suffix="c").status_code == 200
        prompts = sorted((request.prompt for request in host.requests), key=str)
        assert prompts == [InfillPrompt("a", "c", "prompt[0]"), InfillPrompt("b", "c", "prompt[1]")]


class TestReplies:
    def test_calls_only(self, host: FakeHost, http: httpx.Client) -> None:
        host.script = Script(text="", tool_calls=(("add", '{"a": 1}'), ("mcp.now", "{}")))
        choice = chat(http, tools=TOOLS).json()["choices"][0]
        assert choice["message"] == {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "tool_calls": [
                {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
                {"id": "call_1", "type": "function", "function": {"name": "mcp.now", "arguments": "{}"}},
            ],
        }
        assert choice["finish_reason"] == "tool_calls"

    def test_all_kinds_at_once(self, host: FakeHost, http: httpx.Client) -> None:
        host.script = Script(reasoning="Hm.", text="One moment", tool_calls=(("add", "{}"),))
        reply = chat(http, tools=TOOLS).json()
        message = reply["choices"][0]["message"]
        assert (message["content"], message["reasoning"], message["reasoning_content"]) == ("One moment", "Hm.", "Hm.")
        assert len(message["tool_calls"]) == 1
        assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}

    def test_stream(self, host: FakeHost, http: httpx.Client) -> None:
        host.script = Script(reasoning="H", text="é", tool_calls=(("add", "{}"), ("mcp.now", "{}")))
        *chunks, done = events(chat(http, tools=TOOLS, stream=True))
        assert done == "[DONE]"
        first = {"id": "call_0", "type": "function"}
        second = {"id": "call_1", "type": "function"}
        assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
            {"role": "assistant", "content": ""},
            {"reasoning_content": "H", "reasoning": "H"},
            {"content": "é"},
            {"tool_calls": [{"index": 0, **first, "function": {"name": "add", "arguments": ""}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]},
            {"tool_calls": [{"index": 1, **second, "function": {"name": "mcp.now", "arguments": ""}}]},
            {"tool_calls": [{"index": 1, "function": {"arguments": "{"}}]},
            {"tool_calls": [{"index": 1, "function": {"arguments": "}"}}]},
            {},
        ]
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-2:]] == [None, "tool_calls"]

    @pytest.mark.parametrize("stream", [False, True])
    def test_logprobs_are_those_of_the_content(self, host: FakeHost, http: httpx.Client, stream: bool) -> None:
        host.script = Script(reasoning="Hm", text="ab", tool_calls=(("add", "{}"),))
        response = chat(http, tools=TOOLS, logprobs=True, stream=stream)
        if stream:
            parts = [chunk["choices"][0]["logprobs"] for chunk in events(response)[:-1]]
            tokens = [entry["token"] for part in parts if part is not None for entry in part["content"]]
        else:
            tokens = [entry["token"] for entry in response.json()["choices"][0]["logprobs"]["content"]]
        assert tokens == ["a", "b"]

    def test_every_choice_has_its_own_calls(self, host: FakeHost, http: httpx.Client) -> None:
        host.script = Script(text="", tool_calls=(("add", "{}"),), sample_texts=("", "so", ""))
        choices = chat(http, tools=TOOLS, n=3).json()["choices"]
        assert [choice["message"]["content"] for choice in choices] == [None, "so", None]
        assert [len(choice["message"]["tool_calls"]) for choice in choices] == [1, 1, 1]
        streamed = events(chat(http, tools=TOOLS, n=3, stream=True))[:-1]
        arguments = ["", "", ""]
        for choice in (chunk["choices"][0] for chunk in streamed):
            for call in choice["delta"].get("tool_calls", ()):
                arguments[choice["index"]] += call["function"]["arguments"]
        assert arguments == ["{}", "{}", "{}"]

    def test_an_answer_that_was_cut_says_length(self, host: FakeHost, http: httpx.Client) -> None:
        host.script = Script(text="", tool_calls=(("add", '{"a": 1}'),))
        assert chat(http, tools=TOOLS, max_tokens=3).json()["choices"][0]["finish_reason"] == "length"

    def test_the_engines_own_refusal_names_the_field(self, host: FakeHost, http: httpx.Client) -> None:
        host.script.refusal = InvalidParameter("this model has no tools", param="tools")
        assert error_of(chat(http, tools=TOOLS), 400)["param"] == "tools"


def choosing(choice: Any) -> dict[str, Any]:
    return {"tools": TOOLS, "tool_choice": choice}


def messages(*others: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*HELLO, *others]}


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
ASKED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
DEEP: dict[str, Any] = {}
for _ in range(101):
    DEEP = {"items": DEEP}
PARAMETERS = "tools[0].function.parameters"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tools": {}}, "tools", "invalid_type"),
        ({"tools": ["add"]}, "tools[0]", "invalid_type"),
        ({"tools": TOOLS[:1] * 1001}, "tools", "invalid_value"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type", "invalid_value"),
        (tool(name=""), "tools[0].function.name", "invalid_value"),
        (tool(name="two words"), "tools[0].function.name", "invalid_value"),
        (tool(name="x" * 129), "tools[0].function.name", "invalid_value"),
        (tool(parameters="{}"), PARAMETERS, "invalid_type"),
        (tool(parameters={"type": "array"}), PARAMETERS, "invalid_value"),
        (tool(parameters={"properties": []}), PARAMETERS, "invalid_value"),
        (tool(parameters={"properties": {"a": "string"}}), PARAMETERS, "invalid_value"),
        (tool(parameters={"properties": {"a": {"type": "text"}}}), PARAMETERS, "invalid_value"),
        (tool(parameters={"required": "a"}), PARAMETERS, "invalid_value"),
        (tool(parameters={"properties": {"a": DEEP}}), PARAMETERS, "invalid_value"),
        (tool(mood="good"), "tools[0].function.mood", "unknown_parameter"),
        ({"tools": TOOLS + TOOLS[:1]}, "tools[2].function.name", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tool_choice": named("add")}, "tool_choice.function.name", "invalid_value"),
        (choosing("any"), "tool_choice", "invalid_value"),
        (choosing(5), "tool_choice", "invalid_type"),
        (choosing({"type": "function"}), "tool_choice.function", "missing_required_parameter"),
        (choosing(named("subtract")), "tool_choice.function.name", "invalid_value"),
        (choosing({"type": "allowed_tools"}), "tool_choice.allowed_tools", "missing_required_parameter"),
        (
            choosing({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("x")]}}),
            *("tool_choice.allowed_tools.tools", "invalid_value"),
        ),
        (
            choosing(named("add") | {"allowed_tools": {"mode": "auto", "tools": [named("add")]}}),
            *("tool_choice.allowed_tools", "invalid_value"),
        ),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "invalid_type"),
        (messages({"role": "tool", "content": "3"}), "messages[1].tool_call_id", "missing_required_parameter"),
        (messages({"role": "tool", "content": "3", "tool_call_id": "c1"}), "messages[1].tool_call_id", "invalid_value"),
        (
            messages({"role": "tool", "content": "3", "tool_call_id": "c1"}, ASKED),
            *("messages[1].tool_call_id", "invalid_value"),
        ),
        (
            messages(ASKED, {"role": "tool", "content": "3", "tool_call_id": "c2"}),
            *("messages[2].tool_call_id", "invalid_value"),
        ),
        (messages({"role": "user", "content": "a", "tool_call_id": "c1"}), "messages[1].tool_call_id", "invalid_value"),
        (messages({"role": "user", "content": "a", "tool_calls": [CALL]}), "messages[1].tool_calls", "invalid_value"),
        (messages(ASKED | {"tool_calls": [CALL | {"id": 5}]}), "messages[1].tool_calls[0].id", "invalid_type"),
    ],
)
def test_wrong_fields_are_named(
    host: FakeHost, http: httpx.Client, fields: dict[str, Any], param: str, code: str
) -> None:
    error = error_of(chat(http, **fields), 400)
    assert (error["param"], error["code"]) == (param, code)
    assert param in error["message"]
    assert host.requests == host.leases == host.keep_alives == []


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object", "properties": {"a": True, "b": {"type": ["string", "null"], "enum": ["x", None]}}},
        {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"anyOf": [{"type": "integer"}, False]}}},
        {"properties": {"a": {"type": "string", "required": True, "format": "own", "x-order": 3}}},
        {"properties": {"type": {"type": "string"}, "required": {"type": "array", "items": {}}}},
    ],
)
def test_schemas_that_are_schemas(schema: dict[str, Any]) -> None:
    assert schema_fault(schema) is None


def test_what_is_wrong_in_a_schema_is_said_with_its_place() -> None:
    schema = {"properties": {"a": {"anyOf": [{}, {"items": {"type": "txt"}}]}}}
    assert schema_fault(schema) == "no JSON type is called 'txt' at 'properties.a.anyOf[1].items'"
