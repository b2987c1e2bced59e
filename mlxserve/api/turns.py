"""Turns of a chat, for dialects in which one turn may be several items."""

from collections.abc import Sequence
from typing import Any

TemplateMessage = dict[str, Any]


def merged_turn(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """What one role says in a row as one turn: many templates want turns to alternate.

    Texts become paragraphs. Results of tools stay apart, each with its id.
    """
    if len(messages) == 1 or messages[0]["role"] == "tool":
        return list(messages)
    merged: TemplateMessage = {"role": messages[0]["role"]}
    merged["content"] = "\n".join(message["content"] for message in messages if message["content"])
    if thoughts := [message["reasoning_content"] for message in messages if message.get("reasoning_content")]:
        merged["reasoning_content"] = "\n".join(thoughts)
    if calls := [call for message in messages for call in message.get("tool_calls", ())]:
        merged["tool_calls"] = calls
    return [merged]
