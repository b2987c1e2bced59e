"""Earlier calls and their results, as chat templates want them."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from mlxserve.errors import InvalidParameter

SHORT_ID_LENGTH = 9


def complete_tool_messages(
    messages: Sequence[Mapping[str, Any]], *, has_short_ids: bool = False
) -> tuple[dict[str, Any], ...]:
    """The messages, where each result that names its call by id has the tool's name too, which many templates need.

    `has_short_ids`: the template takes ids of nine letters and digits only (Mistral's); all others are replaced, calls
    and results alike.

    Raises:
        InvalidParameter: a result is for a call that no message before it has.
    """
    names: dict[str, str] = {}
    completed: list[dict[str, Any]] = []
    for index, given in enumerate(messages):
        message = dict(given)
        if message.get("role") == "assistant" and message.get("tool_calls"):
            message["tool_calls"] = [dict(call) for call in message["tool_calls"]]
            for call in message["tool_calls"]:
                call_id = call.get("id")
                if call_id is not None:
                    names[call_id] = call.get("function", {}).get("name", "")
                    if has_short_ids:
                        call["id"] = _short(call_id)
        call_id = message.get("tool_call_id")
        if message.get("role") == "tool" and call_id is not None:
            if call_id not in names:
                param = f"messages[{index}].tool_call_id"
                raise InvalidParameter(
                    f"{param}: no message before it has a tool call with the id {call_id!r}; send the assistant's "
                    "message with its tool_calls too",
                    param=param,
                )
            message.setdefault("name", names[call_id])
            if has_short_ids:
                message["tool_call_id"] = _short(call_id)
        completed.append(message)
    return tuple(completed)


def _short(call_id: str) -> str:
    if len(call_id) == SHORT_ID_LENGTH and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[:SHORT_ID_LENGTH]
