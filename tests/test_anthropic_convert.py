"""From an Anthropic body to the internal request: what chat templates are given, and what the engine is asked."""

import os
import random
from typing import Any

import pytest
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming
from pydantic import TypeAdapter

from mlxserve.api.anthropic.convert import chat_prompt, generation_request
from mlxserve.api.anthropic.schema import CountTokensRequest, MessagesRequest
from mlxserve.core.constraint import Grammar
from mlxserve.core.generation import ChatPrompt, GenerationRequest, Reasoning, ToolChoice

HELLO = [{"role": "user", "content": "Hi"}]
TOOL = {"name": "look", "description": "Looks", "input_schema": {"type": "object", "properties": {"at": {}}}}
HEADER = "x-anthropic-billing-header: cc_version=2.1.37.{nonce}; cc_entrypoint=cli; cch={nonce};"
SEED = int(os.environ.get("MLXSERVE_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
PARAMS: TypeAdapter[Any] = TypeAdapter(MessageCreateParamsNonStreaming)


def request(**fields: Any) -> GenerationRequest:
    body = {"model": "fake", "max_tokens": 10, "messages": HELLO, **fields}
    return generation_request(MessagesRequest.model_validate(body), "id", {})


def prompt(**fields: Any) -> ChatPrompt:
    body = {"model": "fake", "messages": HELLO, **fields}
    counted = chat_prompt(CountTokensRequest.model_validate(body))
    assert request(**fields).prompt == counted
    return counted


def messages(*wire: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return list(prompt(messages=list(wire), **fields).messages)


def text(value: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **fields}


def call(call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "look", "input": arguments}


def template_call(call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "look", "arguments": arguments}}


def result(call_id: str, content: Any = None, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields}


class TestMessages:
    def test_strings_and_blocks_are_the_same(self) -> None:
        cached = text("Hi", cache_control={"type": "ephemeral", "ttl": "1h"})
        assert messages({"role": "user", "content": [cached]}) == HELLO == messages(*HELLO)

    def test_blocks_become_paragraphs(self) -> None:
        assert messages({"role": "user", "content": [text("a"), text("b")]}) == [{"role": "user", "content": "a\nb"}]

    def test_a_conversation_with_tools(self) -> None:
        answer = [
            {"type": "thinking", "thinking": "Hmm. ", "signature": "x"},
            {"type": "redacted_thinking", "data": "opaque"},
            text("I look"),
            call("1", at=[1, {"x": None}]),
            call("2"),
            text(" twice."),
        ]
        results = [
            result("1", "a house"),
            result("2", [text("out"), text("of order")], is_error=True),
            text("And now?"),
        ]
        assert messages(
            *HELLO, {"role": "assistant", "content": answer}, {"role": "user", "content": results}, tools=[TOOL]
        ) == [
            *HELLO,
            {
                "role": "assistant",
                "content": "I look twice.",
                "reasoning_content": "Hmm. ",
                "tool_calls": [template_call("1", at=[1, {"x": None}]), template_call("2")],
            },
            {"role": "tool", "content": "a house", "tool_call_id": "1", "name": "look"},
            {"role": "tool", "content": "Error: out\nof order", "tool_call_id": "2", "name": "look"},
            {"role": "user", "content": "And now?"},
        ]

    def test_a_result_without_content(self) -> None:
        turn = {"role": "assistant", "content": [call("1")]}
        assert messages(*HELLO, turn, {"role": "user", "content": [result("1")]})[-1]["content"] == ""

    def test_what_a_role_says_in_a_row_is_one_turn(self) -> None:
        assert messages(
            *HELLO,
            *HELLO,
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}, call("1")]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "b"}, text("c"), call("2")]},
        ) == [
            {"role": "user", "content": "Hi\nHi"},
            {
                "role": "assistant",
                "content": "c",
                "reasoning_content": "a\nb",
                "tool_calls": [template_call("1"), template_call("2")],
            },
        ]

    def test_a_begun_answer_stays_last(self) -> None:
        begun = {"role": "assistant", "content": "The answer is ("}
        assert messages(*HELLO, begun) == [*HELLO, begun]

    def test_many_messages_take_no_longer_each(self) -> None:
        """Joining them one by one would copy the text so far every time: gigabytes."""
        (merged,) = messages(*[{"role": "user", "content": "x" * 50}] * 20_000)
        assert len(merged["content"]) == 20_000 * 51 - 1


class TestSystem:
    def test_string_and_blocks(self) -> None:
        expected = {"role": "system", "content": "Be brief.\nBe kind."}
        assert messages(*HELLO, system="Be brief.\nBe kind.") == [expected, *HELLO]
        assert messages(*HELLO, system=[text("Be brief."), text("Be kind.")]) == [expected, *HELLO]

    @pytest.mark.parametrize("system", ["", [], None])
    def test_none(self, system: Any) -> None:
        assert messages(*HELLO, system=system) == HELLO

    def test_in_the_middle(self) -> None:
        later = {"role": "system", "content": "Be loud."}
        assert messages(*HELLO, {"role": "system", "content": [text("Be loud.")]}) == [*HELLO, later]

    def test_the_header_of_claude_code_goes(self) -> None:
        """With it no two prompts of a session would begin the same."""
        for nonce in ("0a1", "ffe"):
            header = HEADER.format(nonce=nonce)
            for system in (
                [text(header), text("You are.", cache_control={"type": "ephemeral"})],
                [text(header + "\nYou are.")],
                [text(header + "\n"), text("You are.")],
                header + "\nYou are.",
            ):
                assert messages(*HELLO, system=system) == [{"role": "system", "content": "You are."}, *HELLO]
            assert messages(*HELLO, system=header) == messages(*HELLO, system=[text(header)]) == HELLO

    @pytest.mark.parametrize(
        "system",
        [
            "You are.\n" + HEADER,
            " " + HEADER,
            "On x-anthropic-billing-header: cc_version",
            "x-anthropic-other-header: a",
            [text("You are."), text(HEADER)],
        ],
    )
    def test_and_nothing_else_does(self, system: Any) -> None:
        whole = system if isinstance(system, str) else "\n".join(block["text"] for block in system)
        assert messages(*HELLO, system=system) == [{"role": "system", "content": whole}, *HELLO]
        said = {"role": "user", "content": HEADER}
        assert messages(said) == [said]


class TestTools:
    def test_definitions(self) -> None:
        given = [TOOL | {"type": "custom", "cache_control": {"type": "ephemeral"}, "strict": True}]
        function = {"name": "look", "description": "Looks", "parameters": TOOL["input_schema"]}
        assert prompt(tools=given).tools == ({"type": "function", "function": function},)
        bare = {"name": "look", "input_schema": {}}
        assert prompt(tools=[bare]).tools == ({"type": "function", "function": {"name": "look", "parameters": {}}},)

    @pytest.mark.parametrize(
        ("wire", "choice"),
        [
            (None, ToolChoice()),
            ({"type": "auto"}, ToolChoice("auto")),
            ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice("auto", parallel=False)),
            ({"type": "any"}, ToolChoice("required")),
            ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice("required", parallel=False)),
            ({"type": "tool", "name": "look"}, ToolChoice("required", "look")),
            ({"type": "none"}, ToolChoice("none")),
        ],
    )
    def test_choices(self, wire: Any, choice: ToolChoice) -> None:
        assert prompt(tools=[TOOL], tool_choice=wire).tool_choice == choice


@pytest.mark.parametrize(
    ("thinking", "effort", "reasoning"),
    [
        (None, None, Reasoning(param="thinking")),
        ({"type": "enabled", "budget_tokens": 1024}, None, Reasoning(True, param="thinking")),
        ({"type": "disabled"}, None, Reasoning(False, param="thinking")),
        ({"type": "adaptive", "display": "summarized"}, None, Reasoning(param="thinking")),
        (None, "low", Reasoning(None, "low", "output_config.effort")),
        ({"type": "adaptive"}, "max", Reasoning(None, "high", "output_config.effort")),
        ({"type": "enabled", "budget_tokens": 1}, "xhigh", Reasoning(True, "high", "thinking")),
    ],
)
def test_reasoning(thinking: Any, effort: Any, reasoning: Reasoning) -> None:
    assert prompt(thinking=thinking, output_config={"effort": effort}).reasoning == reasoning


def test_structured_output() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = request(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert asked.grammar == Grammar("json_schema", schema, "output_config.format")
    assert request().grammar is None


def test_stop_sequences() -> None:
    assert request(stop_sequences=["a", "b"]).stop == ("a", "b")
    assert request().stop == ()


def test_random_conversations_keep_every_word() -> None:
    """Whatever the SDK's types allow of text, thoughts and tools arrives, once and in order."""
    print(f"replay with MLXSERVE_TEST_SEED={SEED}")
    rng = random.Random(SEED)
    for _ in range(100):
        words: list[str] = []
        ids: list[str] = []
        wire = [_random_message(rng, words, ids) for _ in range(rng.randrange(1, 8))]
        PARAMS.validate_python({"model": "fake", "max_tokens": 10, "messages": wire})
        said = []
        for message in messages(*wire):
            said += message.get("reasoning_content", "").split() + message["content"].split()
            said += [call["function"]["arguments"]["word"] for call in message.get("tool_calls", ())]
        assert sorted(said) == sorted(words)
        by_user = [word for word in said if word.startswith("u")]
        assert by_user == [word for word in words if word.startswith("u")]


def _random_message(rng: random.Random, words: list[str], ids: list[str]) -> dict[str, Any]:
    def word(kind: str) -> str:
        words.append(f"{kind}{len(words)}")
        return f" {words[-1]} "

    if rng.random() < 0.5:
        if rng.random() < 0.3:
            return {"role": "user", "content": word("u")}
        blocks = [result(rng.choice(ids), [text(word("u"))]) for _ in range(rng.randrange(3)) if ids]
        return {"role": "user", "content": [*blocks, text(word("u"))]}
    content: list[dict[str, Any]] = []
    for _ in range(rng.randrange(1, 5)):
        match rng.randrange(3):
            case 0:
                content.append(text(word("a")))
            case 1:
                content.append({"type": "thinking", "thinking": word("t"), "signature": "s"})
            case _:
                ids.append(f"toolu_{len(ids)}")
                content.append(call(ids[-1], word=word("c").strip()))
    return {"role": "assistant", "content": content}
