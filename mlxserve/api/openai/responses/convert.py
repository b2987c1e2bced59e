"""From a parsed body to the engine's GenerationRequest, and from items to what is listed of them."""

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from mlxserve.api.openai.convert import DefaultSampling, chosen_sampling
from mlxserve.api.openai.responses.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
    joined,
)
from mlxserve.api.openai.responses.schema import PromptFields, ResponseRequest
from mlxserve.api.openai.responses.tools import Toolbox, model_name, toolbox
from mlxserve.api.turns import merged_turn
from mlxserve.core.constraint import JSON_OBJECT, Grammar
from mlxserve.core.generation import ChatPrompt, GenerationRequest, Reasoning
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.errors import InvalidParameter

SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)

TemplateMessage = dict[str, Any]


def generation_request(
    body: ResponseRequest, prompt: ChatPrompt, request_id: str, defaults: DefaultSampling
) -> GenerationRequest:
    chosen = chosen_sampling(body, SAMPLING_FIELDS, defaults)
    return GenerationRequest(
        request_id=request_id,
        prompt=prompt,
        sampling=SamplingParams(**chosen, seed=body.seed, max_tokens=body.max_output_tokens),
        cache_salt=body.cache_salt,
        grammar=_grammar(body),
    )


def request_items(body: PromptFields) -> list[Item]:
    """What a request brings of its own."""
    if isinstance(body.input, str):
        return [MessageItem(role="user", content=body.input)]
    return body.input


def request_toolbox(body: PromptFields) -> Toolbox:
    """Raises InvalidParameter: see toolbox()."""
    return toolbox(body.tools or (), body.tool_choice, parallel=body.parallel_tool_calls is not False)


def chat_prompt(body: PromptFields, earlier: Sequence[Item], tools: Toolbox) -> ChatPrompt:
    """The prompt that goes on from earlier items.

    Raises:
        InvalidParameter: a result of a call that nobody made.
    """
    items = [*earlier, *request_items(body)]
    _check_results(items, num_earlier=len(earlier))
    messages: list[TemplateMessage] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    messages += _template_messages(items)
    turns = [
        turn for _, group in groupby(messages, key=lambda message: message["role"]) for turn in merged_turn(list(group))
    ]
    return ChatPrompt(
        messages=tuple(turns),
        tools=tools.template_tools(),
        tool_params=tools.params(),
        tool_choice=tools.choice,
        reasoning=_reasoning(body),
        param="input",
    )


def listed_items(items: Iterable[Item], response_id: str) -> list[dict[str, Any]]:
    """Items as OpenAI lists them: each with an id and a status, texts as parts."""
    listed = []
    for index, item in enumerate(items):
        wire = item.model_dump(exclude_none=True)
        wire.setdefault("type", "message")
        wire.setdefault("id", f"item_{response_id.removeprefix('resp_')}_{index}")
        wire.setdefault("status", "completed")
        if isinstance(item, MessageItem) and isinstance(item.content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            wire["content"] = [{"type": kind, "text": item.content}]
        for part in wire.get("content", ()):
            if part["type"] == "output_text":
                part.setdefault("annotations", [])
        listed.append(wire)
    return listed


def _check_results(items: Sequence[Item], num_earlier: int) -> None:
    call_ids = set()
    for index, item in enumerate(items):
        if isinstance(item, FunctionCallItem):
            call_ids.add(item.call_id)
        elif isinstance(item, FunctionCallOutputItem) and item.call_id not in call_ids:
            param = f"input[{index - num_earlier}].call_id"
            raise InvalidParameter(
                f"Invalid '{param}': no item before it is a call with the id {item.call_id[:100]!r}.", param=param
            )


def _template_messages(items: Sequence[Item]) -> Iterable[TemplateMessage]:
    """Items as chat templates expect them."""
    names: dict[str, str] = {}
    for item in items:
        match item:
            case MessageItem():
                role = "system" if item.role == "developer" else item.role
                yield {"role": role, "content": joined(item.content)}
            case ReasoningItem():
                yield {"role": "assistant", "content": "", "reasoning_content": item.text}
            case FunctionCallItem():
                names[item.call_id] = name = model_name(item.name, item.namespace)
                function = {"name": name, "arguments": _arguments(item.arguments)}
                call = {"id": item.call_id, "type": "function", "function": function}
                yield {"role": "assistant", "content": "", "tool_calls": [call]}
            case FunctionCallOutputItem():
                content = joined(item.output)
                yield {"role": "tool", "content": content, "tool_call_id": item.call_id, "name": names[item.call_id]}


def _arguments(text: str) -> Any:
    """OpenAI's arguments are JSON in a string, the templates' are an object."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return parsed if isinstance(parsed, dict) else text


def _reasoning(body: PromptFields) -> Reasoning:
    effort = None if body.reasoning is None else body.reasoning.effort
    if effort is None:
        return Reasoning(param="reasoning.effort")
    if effort == "none":
        return Reasoning(enabled=False, param="reasoning.effort")
    return Reasoning(enabled=True, effort=effort, param="reasoning.effort")


def _grammar(body: PromptFields) -> Grammar | None:
    form = None if body.text is None else body.text.format
    if form is None or form.type == "text":
        return None
    return Grammar("json_schema", JSON_OBJECT if form.json_schema is None else form.json_schema, "text.format")
