"""How a model is told to think, or how hard: the arguments its chat template takes for that."""

import functools
import re
from collections.abc import Callable
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from mlxserve.core.generation import Reasoning
from mlxserve.errors import InvalidParameter
from mlxserve.text import harmony
from mlxserve.text.reasoning import SPACE, Stage, find_reasoning_format, stage_after

SWITCHES = ("enable_thinking", "thinking", "reasoning", "enable_reasoning")
"""On or off. Qwen3, GLM, Gemma 4, SmolLM3; DeepSeek-V3.1, Granite, Kimi; Command A."""
EFFORTS = ("reasoning_effort", "thinking_effort")
"""low, medium, high. gpt-oss; Kimi K3."""
BUDGET = "thinking_budget"
"""Tokens; 0 is off and -1 no limit. Seed-OSS."""
BUDGETS = {"low": 512, "medium": 2048, "high": 8192}

THOUGHTS_NAMES = ("reasoning_content", "reasoning", "thinking")
"""Of an assistant's earlier thoughts, as a field of its message."""

_NEAREST_EFFORTS = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}


class _GenerationTag(Extension):
    """transformers' `{% generation %}`, which marks what of a chat an assistant wrote."""

    tags = {"generation"}  # noqa: RUF012 -- the name and type that jinja2 looks for

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=64)
def template_arguments(chat_template: str) -> frozenset[str]:
    """The variables that a chat template reads and does not set itself; none of one that cannot be parsed."""
    environment = Environment(extensions=["jinja2.ext.loopcontrols", _GenerationTag])
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(chat_template)))
    except TemplateSyntaxError:
        return frozenset()


def is_switchable(chat_template: str) -> bool:
    """Whether the template takes an argument for thinking on or off."""
    return bool(template_arguments(chat_template) & {*SWITCHES, BUDGET})


def can_think(chat_template: str | None, has_token: Callable[[str], bool]) -> bool:
    """Whether a model thinks before it answers, always or where it is told to."""
    if chat_template is None:
        return False
    if harmony.is_harmony(has_token) or is_switchable(chat_template):
        return True
    form = find_reasoning_format(chat_template, has_token)
    return form is not None and form.is_written_by(chat_template)


def is_off(reasoning: Reasoning) -> bool:
    return reasoning.enabled is False or reasoning.effort == "none"


def without_thoughts(prompt: str, chat_template: str, has_token: Callable[[str], bool]) -> str:
    """The prompt of a chat in which the model is not to think: as it is where the template saw to that, else with empty
    thoughts behind it, so that a model that knows no switch takes itself to have thought already."""
    if harmony.is_harmony(has_token):
        return prompt + harmony.NO_THOUGHTS
    form = find_reasoning_format(chat_template, has_token)
    if form is None or not form.is_written_by(chat_template):
        return prompt
    match stage_after(prompt, form):
        case Stage.OPEN:
            return f"{prompt.rstrip(SPACE)}\n\n{form.end}\n\n"
        case Stage.START if not is_switchable(chat_template):
            return f"{prompt}{form.start}\n\n{form.end}\n\n"
        case _:
            return prompt


def thinking_arguments(chat_template: str, reasoning: Reasoning, *, can_think: bool) -> dict[str, Any]:
    """Arguments for the chat template that make the model think as `reasoning` says.

    An effort asks for thinking; a model that only knows on and off thinks at any effort. "none" is off.

    Raises:
        InvalidParameter: the model does not think (`can_think`), or there is no such effort. `param` is
            `reasoning.param`.
    """
    enabled, effort = reasoning.enabled, reasoning.effort
    if effort == "none":
        enabled, effort = False, None
    if enabled is False:
        effort = None
    elif effort is not None:
        enabled = True
    if enabled is None:
        return {}
    if enabled and not can_think:
        raise InvalidParameter(
            f"this model does not support thinking; leave '{reasoning.param}' out", param=reasoning.param
        )
    known = template_arguments(chat_template)
    arguments: dict[str, Any] = {name: enabled for name in SWITCHES if name in known}
    if effort is not None:
        chosen = _effort(chat_template, effort, reasoning.param)
        arguments |= {name: chosen for name in EFFORTS if name in known}
        if BUDGET in known:
            arguments[BUDGET] = BUDGETS[_NEAREST_EFFORTS.get(effort, "medium")]
    elif not enabled and BUDGET in known:
        arguments[BUDGET] = 0
    elif not enabled and not arguments:
        # A model that always thinks is to think as little as it can.
        arguments = {name: "low" for name in EFFORTS if name in known}
    return arguments


def _effort(chat_template: str, effort: str, param: str) -> str:
    """The client's effort, or the nearest of the three that all templates know."""
    if f'"{effort}"' in chat_template or f"'{effort}'" in chat_template:
        return effort
    if effort not in _NEAREST_EFFORTS:
        allowed = ", ".join(["none", *_NEAREST_EFFORTS])
        raise InvalidParameter(f"'{param}' is {effort!r}; it may be one of {allowed}", param=param)
    return _NEAREST_EFFORTS[effort]


def with_reasoning_named(messages: tuple[dict[str, Any], ...], chat_template: str) -> list[dict[str, Any]]:
    """The messages with an assistant's earlier thoughts under the name that the template reads.

    Clients send them under any of `THOUGHTS_NAMES`.
    """
    name = next((name for name in THOUGHTS_NAMES if _reads(chat_template, name)), THOUGHTS_NAMES[0])
    return [_with_thoughts_named(message, name) for message in messages]


def _with_thoughts_named(message: dict[str, Any], name: str) -> dict[str, Any]:
    thoughts = next((message[each] for each in THOUGHTS_NAMES if isinstance(message.get(each), str)), None)
    if message.get("role") != "assistant" or thoughts is None:
        return message
    message = {key: value for key, value in message.items() if key not in THOUGHTS_NAMES}
    if name == "thinking" and message.get("tool_calls") and message.get("content"):
        # gpt-oss's template takes only one of them beside a call.
        thoughts = f"{thoughts}\n\n{message.pop('content')}"
    return message | {name: thoughts}


def _reads(chat_template: str, field: str) -> bool:
    """Whether a template takes a field of that name from something, as `.field` or in quotes."""
    return re.search(rf"""[.'"]{field}(?!\w)""", chat_template) is not None
