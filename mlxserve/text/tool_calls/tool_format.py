"""How one model writes tool calls: the parser of its answers, and the grammar of those that must call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxserve.core.constraint import Grammar
from mlxserve.core.generation import ToolChoice
from mlxserve.errors import InvalidParameter
from mlxserve.text.json_schema import UnsupportedSchema
from mlxserve.text.output import OutputParser
from mlxserve.text.tokenizer import Tokenizer
from mlxserve.text.tool_calls.definitions import Tool, checked_tools
from mlxserve.text.tool_calls.families import find_family
from mlxserve.text.tool_calls.family import Family
from mlxserve.text.tool_calls.lark import LarkWriter
from mlxserve.text.tool_calls.parser import ToolCallParser


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A family, and which of its markers are control tokens of this vocabulary."""

    family: Family
    control_tokens: Mapping[str, int]
    """Their ids by text."""

    @property
    def markers(self) -> Sequence[str]:
        """Texts of the format that may be control tokens, in whole or in parts."""
        return self.family.all_markers

    @property
    def control_starts(self) -> Sequence[str]:
        """Control tokens at which calls begin, wherever they stand."""
        return [start for start in self.family.starts if start in self.control_tokens]

    @property
    def name(self) -> str:
        return self.family.name

    def parser(self, tools: Sequence[Any]) -> OutputParser:
        """What splits an answer into content and calls of these tools. Raises as checked_tools().

        Not for harmony, whose one parser takes thoughts and calls apart (text/harmony.py).
        """
        return ToolCallParser(self.family, checked_tools(tools))

    def grammar(self, tools: Sequence[Any], choice: ToolChoice, params: Sequence[str] = ()) -> Grammar:
        """Answers that are calls and nothing else: one or more, or exactly one where `choice` is not parallel.

        `params`: as of checked_tools().

        Raises:
            InvalidParameter: a tool's parameters cannot be enforced in this format, there is no tool of the chosen
                name, or as checked_tools().
        """
        return self._calls(_offered(tools, choice, params), choice.param, parallel=choice.parallel)

    def single_grammars(
        self, tools: Sequence[Any], choice: ToolChoice, params: Sequence[str] = ()
    ) -> list[tuple[Grammar, Tool]]:
        """Each tool that may be called, with the grammar of one call of it. Raises as grammar()."""
        return [(self._calls([tool], tool.param, parallel=False), tool) for tool in _offered(tools, choice, params)]

    def _calls(self, tools: Sequence[Tool], param: str, *, parallel: bool) -> Grammar:
        family = self.family
        lark = LarkWriter(self.markers, self.control_tokens)
        call = lark.choice([self._call(lark, tool) for tool in tools])
        more = "" if not parallel else f"({lark.literal(family.separator)} {call})*"
        start = f"{lark.literal(family.opening)} {call} {more} {lark.literal(family.closing)}"
        return Grammar("lark", lark.source(start), param)

    def _call(self, lark: LarkWriter, tool: Tool) -> str:
        try:
            return self.family.call(lark, tool)
        except UnsupportedSchema as error:
            raise InvalidParameter(f"Invalid '{tool.param}': {error}.", param=tool.param) from error


def _offered(tools: Sequence[Any], choice: ToolChoice, params: Sequence[str]) -> list[Tool]:
    offered = checked_tools(tools, params)
    if choice.name is None:
        return list(offered.values())
    if choice.name not in offered:
        raise InvalidParameter(
            f"{choice.param}: no tool has the name {choice.name!r}; the tools are {', '.join(offered)}",
            param=choice.param,
        )
    return [offered[choice.name]]


def find_tool_format(tokenizer: Tokenizer) -> ToolFormat | None:
    """How the model writes calls; None if it knows no tools."""
    family = find_family(tokenizer.tool_template, tokenizer.has_token)
    if family is None:
        return None
    ids = {marker: tokenizer.token_id(marker) for marker in family.all_markers}
    control_tokens = {
        marker: token_id for marker, token_id in ids.items() if token_id is not None and tokenizer.is_special(token_id)
    }
    return ToolFormat(family, control_tokens)
