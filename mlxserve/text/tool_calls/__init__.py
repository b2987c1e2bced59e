"""Tool calls: how each family of models writes them, read while they come, and enforced where a request wants one."""

from mlxserve.text.tool_calls.admission import answer_grammar, check_tools
from mlxserve.text.tool_calls.definitions import MAX_TOOLS, checked_tools
from mlxserve.text.tool_calls.history import complete_tool_messages
from mlxserve.text.tool_calls.tool_format import ToolFormat, find_tool_format

__all__ = [
    "MAX_TOOLS",
    "ToolFormat",
    "answer_grammar",
    "check_tools",
    "checked_tools",
    "complete_tool_messages",
    "find_tool_format",
]
