"""Calls of gpt-oss: messages to functions (text/harmony.py, which also reads them)."""

from dataclasses import dataclass

from mlxserve.text.harmony import CHANNEL, CONSTRAIN, END, FUNCTIONS, MARKERS, MESSAGE, PROMPT_END
from mlxserve.text.tool_calls.definitions import Tool
from mlxserve.text.tool_calls.family import Family
from mlxserve.text.tool_calls.lark import LarkWriter


@dataclass(frozen=True, slots=True)
class HarmonyCalls(Family):
    def call(self, lark: LarkWriter, tool: Tool) -> str:
        # Thoughts before it are a message of their own, and then this one needs its beginning.
        begin = lark.literal(PROMPT_END)
        header = lark.literal(f"{CHANNEL}commentary to={FUNCTIONS}{tool.name} {CONSTRAIN}json{MESSAGE}")
        return f"({begin})? {header} {lark.json(tool.parameters)}"


HARMONY = HarmonyCalls("harmony", separator=END, markers=MARKERS)
