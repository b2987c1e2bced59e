"""Thinking on, off and how hard: what the template is told, and what is refused."""

import re
from typing import Any

import pytest
from helpers_chat_models import HARMONY, PLAIN, QWEN, R1, SAID, model

from mlxserve.api.openai.convert import chat_prompt
from mlxserve.api.openai.schema import ChatCompletionRequest
from mlxserve.core.generation import ChatPrompt, Reasoning
from mlxserve.errors import InvalidParameter
from mlxserve.text.chat_template import render
from mlxserve.text.thinking import (
    can_think,
    is_switchable,
    template_arguments,
    thinking_arguments,
    with_reasoning_named,
    without_thoughts,
)

DEEPSEEK = (
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ '<think>' if thinking else '</think>' }}"
)
KIMI = (
    DEEPSEEK + "{% if thinking_effort not in ['low', 'medium', 'high', 'max'] %}{{ raise_exception('no') }}{% endif %}"
)
SEED = "{% if not thinking_budget is defined %}{% set thinking_budget = -1 %}{% endif %}<seed:think>"
GENERATION = "{% for m in messages %}{% generation %}{{ m.thinking }}{% endgeneration %}{% break %}{% endfor %}"


def no_token(token: str) -> bool:
    return False


@pytest.mark.parametrize(
    ("template", "names"),
    [
        (QWEN, {"messages", "add_generation_prompt", "enable_thinking"}),
        (DEEPSEEK, {"thinking"}),
        (SEED, {"thinking_budget"}),
        (GENERATION, {"messages"}),
        ("{% if thinking %", set()),
    ],
)
def test_a_templates_arguments(template: str, names: set[str]) -> None:
    assert template_arguments(template) == names


def test_a_macros_argument_is_found() -> None:
    source = (
        "{% macro m() %}{% if reasoning_effort is not defined %}{% set reasoning_effort = 'low' %}{% endif %}"
        "{{ reasoning_effort }}{% endmacro %}{{ m() }}"
    )
    assert "reasoning_effort" in template_arguments(source)


@pytest.mark.parametrize(
    ("template", "reasoning", "arguments"),
    [
        (QWEN, Reasoning(), {}),
        (QWEN, Reasoning(enabled=True), {"enable_thinking": True}),
        (QWEN, Reasoning(enabled=False), {"enable_thinking": False}),
        (QWEN, Reasoning(effort="high"), {"enable_thinking": True}),
        (QWEN, Reasoning(effort="none"), {"enable_thinking": False}),
        (QWEN, Reasoning(enabled=False, effort="high"), {"enable_thinking": False}),
        (QWEN, Reasoning(enabled=True, effort="none"), {"enable_thinking": False}),
        (DEEPSEEK, Reasoning(enabled=True), {"thinking": True}),
        (KIMI, Reasoning(effort="max"), {"thinking": True, "thinking_effort": "max"}),
        (KIMI, Reasoning(effort="minimal"), {"thinking": True, "thinking_effort": "low"}),
        (KIMI, Reasoning(enabled=False), {"thinking": False}),
        (HARMONY, Reasoning(effort="low"), {"reasoning_effort": "low"}),
        (HARMONY, Reasoning(effort="xhigh"), {"reasoning_effort": "high"}),
        (HARMONY, Reasoning(enabled=True), {}),
        (HARMONY, Reasoning(enabled=False), {"reasoning_effort": "low"}),
        (SEED, Reasoning(enabled=True), {}),
        (SEED, Reasoning(enabled=False), {"thinking_budget": 0}),
        (SEED, Reasoning(effort="low"), {"thinking_budget": 512}),
        (R1, Reasoning(enabled=True), {}),
        (R1, Reasoning(effort="high"), {}),
        (R1, Reasoning(enabled=False), {}),
    ],
)
def test_arguments_for_a_template(template: str, reasoning: Reasoning, arguments: dict[str, Any]) -> None:
    assert thinking_arguments(template, reasoning, can_think=True) == arguments


@pytest.mark.parametrize("reasoning", [Reasoning(enabled=True, param="think"), Reasoning(effort="low", param="think")])
def test_a_model_that_does_not_think_says_so(reasoning: Reasoning) -> None:
    with pytest.raises(InvalidParameter, match=r"does not support thinking.*'think'") as caught:
        render(model("plain"), ChatPrompt(SAID, reasoning=reasoning))
    assert caught.value.param == "think"


@pytest.mark.parametrize("reasoning", [Reasoning(), Reasoning(enabled=False), Reasoning(effort="none")])
def test_a_model_that_does_not_think_need_not_be_told(reasoning: Reasoning) -> None:
    assert render(model("plain"), ChatPrompt(SAID, reasoning=reasoning)) == "hi<|im_end|>"


def test_an_effort_that_nobody_knows() -> None:
    with pytest.raises(InvalidParameter, match="'banana'; it may be one of none, minimal, low") as caught:
        render(model("harmony"), ChatPrompt(SAID, reasoning=Reasoning(effort="banana")))
    assert caught.value.param == "reasoning_effort"


def test_who_can_think() -> None:
    assert can_think(QWEN, no_token)
    assert can_think(R1, no_token)
    assert can_think(PLAIN, {"<|start|>", "<|channel|>", "<|message|>", "<|end|>"}.__contains__)
    # Siblings of thinking models have their tokens.
    assert not can_think(PLAIN, {"<think>", "</think>"}.__contains__)
    assert not can_think(None, {"<think>", "</think>"}.__contains__)
    assert is_switchable(QWEN)
    assert not is_switchable(R1)


# --- rendered ---


def ending(name: str, **fields: Any) -> str:
    """What stands behind the chat's messages."""
    return re.split(r"hi(?:<\|im_end\|>|<\|end\|>)?\n?", render(model(name), ChatPrompt(SAID, **fields)), maxsplit=1)[1]


def test_the_switch_reaches_the_template() -> None:
    assert ending("qwen") == "<|im_start|>assistant\n"
    assert ending("qwen", reasoning=Reasoning(enabled=False)).endswith("<think>\n\n</think>\n\n")
    assert ending("qwen", reasoning=Reasoning(enabled=True)) == "<|im_start|>assistant\n"
    assert ending("harmony", reasoning=Reasoning(effort="high")) == "Reasoning: high<|start|>assistant"


def test_the_clients_own_arguments_win() -> None:
    fields = {"template_kwargs": {"enable_thinking": True}, "reasoning": Reasoning(enabled=False)}
    assert ending("qwen", **fields) == "<|im_start|>assistant\n"
    fields = {"template_kwargs": {"reasoning_effort": "high"}, "reasoning": Reasoning(enabled=False)}
    assert ending("harmony", **fields) == "Reasoning: high<|start|>assistant"


@pytest.mark.parametrize(
    ("template_kwargs", "template", "arguments"),
    [
        ({"enable_thinking": True}, DEEPSEEK, {"thinking": True}),
        ({"thinking": False}, QWEN, {"enable_thinking": False}),
        ({"enable_thinking": "yes"}, QWEN, {}),
        ({"documents": True}, QWEN, {}),
    ],
)
def test_a_switch_of_openais_dialect_is_one_for_every_template(
    template_kwargs: dict[str, Any], template: str, arguments: dict[str, bool]
) -> None:
    body = ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "hi"}], chat_template_kwargs=template_kwargs
    )
    prompt = chat_prompt(body)
    assert prompt.template_kwargs == template_kwargs
    assert thinking_arguments(template, prompt.reasoning, can_think=True) == arguments
    if True in arguments.values():
        with pytest.raises(InvalidParameter, match="does not support thinking; leave 'chat_template_kwargs' out"):
            thinking_arguments(PLAIN, prompt.reasoning, can_think=False)
    effort = body.model_copy(update={"reasoning_effort": "none"})
    assert chat_prompt(effort).reasoning == Reasoning(enabled=False)


def test_a_model_that_always_thinks_is_given_empty_thoughts() -> None:
    off = Reasoning(enabled=False)
    assert ending("r1", reasoning=off) == "<think>\n\n</think>\n\n"
    assert ending("magistral", reasoning=off).endswith("[THINK]\n\n[/THINK]\n\n")
    assert ending("harmony", reasoning=off) == (
        "Reasoning: low<|start|>assistant<|channel|>analysis<|message|><|end|><|start|>assistant"
    )
    # DeepSeek-V3.1 closes thoughts that it did not open, Granite's template says nothing.
    assert without_thoughts("x</think>", DEEPSEEK, no_token) == "x</think>"
    granite = "{{ thinking }}Here is my thought process:"
    assert without_thoughts("x", granite, no_token) == "x"


def test_an_answer_that_was_begun_goes_on_without_empty_thoughts() -> None:
    messages = (*SAID, {"role": "assistant", "content": "It is"})
    text = render(model("qwen"), ChatPrompt(messages, reasoning=Reasoning(enabled=False)))
    assert text.endswith("It is")


# --- earlier thoughts ---


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize(
    ("template", "field"),
    [
        ("{{ message.reasoning_content }}", "reasoning_content"),
        ("{{ message.get('reasoning_content') or message.get('reasoning') }}", "reasoning_content"),
        ("{{ message.reasoning }}", "reasoning"),
        ("{{ message.thinking }}", "thinking"),
        ("{{ message['thinking'] }}", "thinking"),
        ("{{ message.content }}", "reasoning_content"),
    ],
)
def test_earlier_thoughts_are_named_as_the_template_reads_them(name: str, template: str, field: str) -> None:
    messages = (*SAID, {"role": "assistant", "content": "It is.", name: "Hm."})
    assert with_reasoning_named(messages, template) == [
        *SAID,
        {"role": "assistant", "content": "It is.", field: "Hm."},
    ]


def test_other_messages_stay_as_they_are() -> None:
    messages = ({"role": "user", "content": "x", "thinking": "y"}, {"role": "assistant", "content": "z"})
    assert with_reasoning_named(messages, "{{ message.thinking }}") == list(messages)


def test_gpt_oss_takes_thoughts_or_a_text_beside_a_call() -> None:
    call = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [{"id": "1"}]}
    (message,) = with_reasoning_named((call,), "{{ message.thinking }}")
    assert message == {"role": "assistant", "thinking": "Hm.\n\nI look.", "tool_calls": [{"id": "1"}]}
