"""What a model can do, told from its chat template and its vocabulary."""

from collections.abc import Callable

from mlxserve.text.infill import find_infill_format
from mlxserve.text.thinking import can_think
from mlxserve.text.tool_calls.families import knows_tools


def capabilities(chat_template: str | None, has_token: Callable[[str], bool]) -> tuple[str, ...]:
    """Of "completion", "tools", "thinking" and "insert" those that the model has, in this order."""
    found = ["completion"]
    if knows_tools(chat_template, has_token):
        found.append("tools")
    if can_think(chat_template, has_token):
        found.append("thinking")
    if find_infill_format(has_token) is not None:
        found.append("insert")
    return tuple(found)
