"""Thoughts, content and calls in one answer, and answers that must call after their thoughts."""

import json
import random

import pytest
from helpers_chat_models import FINAL, KIMI_TOKENS, SAID, model, token_ids
from helpers_engine import on_loop
from test_answer_text import answer, finished, parts, tokens_of

from mlxserve.core.constraint import Grammar
from mlxserve.core.generation import ChatPrompt, Reasoning, TextDelta, ToolCallDelta, ToolChoice
from mlxserve.errors import InvalidParameter

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["ä", "b"]}}, "required": ["a"], "additionalProperties": False}
TOOLS = tuple({"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g"))
HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": "ä"}}\n</tool_call>'


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@on_loop
async def test_thoughts_content_and_calls(seed: int | None) -> None:
    text = f"<think>\nShould I <tool_call>?\n</think>\n\nI look.\n{HERMES}\n{HERMES}"
    script = token_ids("qwen-tools", text, rng=None if seed is None else random.Random(seed))
    events = await answer("qwen-tools", script, ChatPrompt(SAID, tools=TOOLS))
    arguments = '{"a": "ä"}'
    assert parts(events) == [
        ("thoughts", "Should I <tool_call>?"),
        ("content", "I look."),
        *(("call 0 name", "f"), ("call 0", arguments)),
        *(("call 1 name", "f"), ("call 1", arguments)),
    ]
    assert finished(events).num_tool_calls == 2
    if seed is None:
        assert tokens_of("qwen-tools", events, TextDelta).strip() == "I look."
        assert tokens_of("qwen-tools", events, ToolCallDelta).count("<tool_call>") == 2


@pytest.mark.parametrize("mode", ["auto", "none"])
@on_loop
async def test_calls_are_looked_for_where_they_may_be(mode: str) -> None:
    script = token_ids("qwen-tools", f"<think>a</think>{HERMES}")
    prompt = ChatPrompt(SAID, tools=TOOLS, tool_choice=ToolChoice(mode))
    events = await answer("qwen-tools", script, prompt)
    assert parts(events)[0] == ("thoughts", "a")
    assert parts(events)[1] == (("content", HERMES) if mode == "none" else ("call 0 name", "f"))


@on_loop
async def test_a_call_whose_token_comes_before_the_end_of_the_thoughts() -> None:
    begin, end, call, arguments, call_end = KIMI_TOKENS
    script = token_ids("kimi", f'Hm.{begin}{call}functions.f:0{arguments}{{"a": "b"}}{call_end}{end}')
    events = await answer("kimi", script, ChatPrompt(SAID, tools=TOOLS))
    assert parts(events) == [("thoughts", "Hm."), ("call 0 name", "f"), ("call 0", '{"a": "b"}')]


@on_loop
async def test_control_tokens_of_calls_that_nobody_wants_do_not_show() -> None:
    begin, _, call, arguments, _ = KIMI_TOKENS
    script = token_ids("kimi", f"Hm.</think>{begin}{call}functions.f:0{arguments}{{}}")
    assert parts(await answer("kimi", script)) == [("thoughts", "Hm."), ("content", "functions.f:0{}")]


# --- answers that must call ---

HARMONY_CALL = '<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{{"a": "ä"}}'
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|>"


@pytest.mark.parametrize(
    ("name", "opening", "wanted"),
    [
        ("qwen-tools", "<think>\nHm.</think>", HERMES.replace('"f"', '"g"')),
        ("qwen-tools", "<think>\nHm.</think>", "I will not."),
        ("qwen-tools", "", "I will not."),
        ("harmony", f"{ANALYSIS}<|start|>assistant", HARMONY_CALL.format("g")),
        ("harmony", f"{ANALYSIS}<|start|>assistant", HARMONY_CALL.format("f")),
        ("harmony", f"{ANALYSIS}{FINAL}", "I will not."),
        ("harmony", f"<|channel|>analysis<|message|>Hm.{FINAL}", "I will not."),
    ],
)
@pytest.mark.parametrize("choice", [ToolChoice("required"), ToolChoice("required", name="g", parallel=False)])
@on_loop
async def test_an_answer_that_must_call_thinks_first(name: str, opening: str, wanted: str, choice: ToolChoice) -> None:
    script = token_ids(name, opening + wanted)
    prompt = ChatPrompt(SAID, tools=TOOLS, tool_choice=choice)
    events = await answer(name, script, prompt, max_tokens=150)
    found = parts(events)
    if "Hm." in opening:
        kind, thoughts = found.pop(0)
        assert kind == "thoughts"
        assert thoughts.startswith("Hm.")
    if finished(events).reason == "stop":
        (_, called), (_, arguments) = found[:2]
        assert called in ("f", "g") if choice.name is None else called == "g"
        assert json.loads(arguments)["a"] in ("ä", "b")
    if choice.name is not None and "g" in wanted:
        assert finished(events).reason == "stop"
    assert not any(isinstance(event, TextDelta) and event.text for event in events)


@on_loop
async def test_a_call_of_gpt_oss_without_thoughts() -> None:
    prompt = ChatPrompt(SAID, tools=TOOLS, tool_choice=ToolChoice("required"), reasoning=Reasoning(enabled=False))
    events = await answer("harmony", token_ids("harmony", HARMONY_CALL.format("f")), prompt)
    assert parts(events) == [("call 0 name", "f"), ("call 0", '{"a": "ä"}')]


@on_loop
async def test_a_call_and_another_answer_cannot_both_be() -> None:
    prompt = ChatPrompt(SAID, tools=TOOLS, tool_choice=ToolChoice("required"))
    with pytest.raises(InvalidParameter, match="asks for a call"):
        await answer("harmony", [], prompt, grammar=Grammar("choice", ["yes"], "guided_choice"))
    assert model("harmony").has_token("<|call|>")
