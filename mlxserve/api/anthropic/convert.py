"""From a parsed body to the engine's GenerationRequest."""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from mlxserve.api.anthropic.blocks import (
    Block,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    joined,
)
from mlxserve.api.anthropic.schema import Message, MessagesRequest, PromptFields, Tool
from mlxserve.api.turns import merged_turn
from mlxserve.core.constraint import Grammar
from mlxserve.core.generation import ChatPrompt, GenerationRequest, Reasoning, ToolChoice
from mlxserve.core.sampling_params import SamplingParams

DefaultSampling = Mapping[str, float | int]
"""A model's own temperature, top_p and the like, as far as it has any."""

EFFORTS = {"xhigh": "high", "max": "high"}
"""Anthropic's levels that no chat template knows."""

_BILLING_HEADER = re.compile(r"x-anthropic-billing-header:[^\n]*(?:\n|$)")

TemplateMessage = dict[str, Any]


def generation_request(body: MessagesRequest, request_id: str, defaults: DefaultSampling) -> GenerationRequest:
    given = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
    chosen: dict[str, Any] = {**defaults, **{name: value for name, value in given.items() if value is not None}}
    output = None if body.output_config is None else body.output_config.format
    return GenerationRequest(
        request_id=request_id,
        prompt=chat_prompt(body),
        sampling=SamplingParams(**chosen, max_tokens=body.max_tokens),
        stop=tuple(body.stop_sequences or ()),
        grammar=None if output is None else Grammar("json_schema", output.json_schema, "output_config.format"),
    )


def chat_prompt(body: PromptFields) -> ChatPrompt:
    call_names: dict[str, str] = {}
    parts: list[TemplateMessage] = []
    for message in body.messages:
        call_names |= {block.id: block.name for block in message.blocks if isinstance(block, ToolUseBlock)}
        parts += _template_messages(message, call_names)
    messages: list[TemplateMessage] = []
    if system := system_text(body.system):
        messages.append({"role": "system", "content": system})
    for _, turn in groupby(parts, key=lambda part: part["role"]):
        messages += merged_turn(list(turn))
    return ChatPrompt(
        messages=tuple(messages),
        tools=tuple(_template_tool(tool) for tool in body.tools or ()),
        tool_params=tuple(f"tools.{index}.input_schema" for index in range(len(body.tools or ()))),
        tool_choice=_tool_choice(body),
        reasoning=_reasoning(body),
    )


def system_text(system: str | list[TextBlock] | None) -> str:
    """The system prompt without the line that Claude Code puts before it.

    That line, `x-anthropic-billing-header: cc_version=...; cch=...;`, is for Anthropic's accounts and is another one in
    every request: with it no two prompts of a session would have a prefix in common. It goes only where it is the very
    first one, and nothing else does.
    """
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    if texts and (header := _BILLING_HEADER.match(texts[0])):
        rest = texts[0][header.end() :]
        texts[:1] = [rest] if rest else []
    return "\n".join(texts)


def _template_messages(message: Message, call_names: Mapping[str, str]) -> Iterable[TemplateMessage]:
    """A message as chat templates expect it: results of tools are messages of their own."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
    elif message.role == "assistant":
        yield _assistant_message(message.blocks)
    else:
        for block in message.blocks:
            if isinstance(block, TextBlock):
                yield {"role": message.role, "content": block.text}
            elif isinstance(block, ToolResultBlock):
                text = joined(block.content)
                yield {
                    "role": "tool",
                    "content": f"Error: {text}" if block.is_error else text,
                    "tool_call_id": block.tool_use_id,
                    "name": call_names[block.tool_use_id],
                }


def _assistant_message(blocks: Sequence[Block]) -> TemplateMessage:
    # Its texts are pieces of one answer: what stood between them was a call, and no line break.
    message: TemplateMessage = {
        "role": "assistant",
        "content": "".join(block.text for block in blocks if isinstance(block, TextBlock)),
    }
    if thinking := "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)):
        message["reasoning_content"] = thinking
    if calls := [_template_call(block) for block in blocks if isinstance(block, ToolUseBlock)]:
        message["tool_calls"] = calls
    return message


def _template_call(block: ToolUseBlock) -> dict[str, Any]:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}


def _template_tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _tool_choice(body: PromptFields) -> ToolChoice:
    choice = body.tool_choice
    if choice is None:
        return ToolChoice()
    parallel = not choice.disable_parallel_tool_use
    match choice.type:
        case "none":
            return ToolChoice("none")
        case "auto":
            return ToolChoice("auto", parallel=parallel)
        case _:
            return ToolChoice("required", choice.name, parallel)


def _reasoning(body: PromptFields) -> Reasoning:
    """`adaptive` leaves it to the model, and so does a request that says nothing."""
    enabled = None
    if body.thinking is not None and body.thinking.type != "adaptive":
        enabled = body.thinking.type == "enabled"
    asked = None if body.output_config is None else body.output_config.effort
    effort = None if asked is None else EFFORTS.get(asked, asked)
    return Reasoning(enabled, effort, "output_config.effort" if enabled is None and effort else "thinking")
