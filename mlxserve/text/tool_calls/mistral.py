"""Mistral's calls: [TOOL_CALLS]get_weather[ARGS]{...}, or in older templates [TOOL_CALLS][{"name": ...}, ...]."""

import re
from dataclasses import dataclass

from mlxserve.text.tool_calls.definitions import NAME_CHARACTER, Tool
from mlxserve.text.tool_calls.family import Family
from mlxserve.text.tool_calls.json_calls import closed, copy_arguments, object_call, read_list
from mlxserve.text.tool_calls.lark import LarkWriter
from mlxserve.text.tool_calls.reader import CallReader
from mlxserve.text.tool_calls.source import Wait

START, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ID = re.compile(r"\w")


@dataclass(frozen=True, slots=True)
class MistralCalls(Family):
    """Either form is read; grammars take the second `in_list`."""

    in_list: bool = False

    def read(self, reader: CallReader, marker: str) -> Wait[None]:
        yield from reader.skip_whitespace()
        if (yield from reader.accept("[")):
            yield from read_list(reader)
            reader.end()
            return
        while True:
            name = yield from reader.read(NAME_CHARACTER)
            if (yield from reader.accept(CALL_ID)):
                yield from reader.read(_ID)
            yield from reader.expect(ARGS)
            yield from reader.skip_whitespace()
            yield from copy_arguments(reader, name, [])
            reader.end()
            # Some leave the start of the next call out.
            yield from reader.skip_whitespace()
            if not NAME_CHARACTER.match((yield from reader.peek())):
                return

    def call(self, lark: LarkWriter, tool: Tool) -> str:
        if self.in_list:
            return object_call(lark, tool, "name", "arguments")
        return f"{lark.literal(START + tool.name + ARGS)} {lark.json(closed(tool))}"
