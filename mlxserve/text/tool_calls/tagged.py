"""Families that write each argument between tags, as bare text."""

import json
from dataclasses import dataclass

from mlxserve.text.json_schema import UnsupportedSchema
from mlxserve.text.tool_calls.definitions import Tool
from mlxserve.text.tool_calls.family import Family
from mlxserve.text.tool_calls.lark import LarkWriter
from mlxserve.text.tool_calls.raw_text import raw_value
from mlxserve.text.tool_calls.reader import CallReader
from mlxserve.text.tool_calls.source import BrokenOff, Malformed, Wait

CDATA = "<![CDATA["


@dataclass(frozen=True, slots=True)
class TaggedCalls(Family):
    """<call NAME> <argument NAME> value </argument> ... </call>, with the family's own tags.

    A string argument is given out while it comes, any other when it is whole. Whitespace between tags means nothing.
    """

    call_start: str = ""
    """Before the tool's name."""
    name_end: str = ""
    """After it; without one, a line's end or the next tag is."""
    call_end: str = ""
    argument_start: str = ""
    """Before an argument's name."""
    argument_end: str = ""
    value_start: str = ""
    """Before the value, after `argument_end` and whitespace."""
    value_end: str = ""
    margin: str = ""
    """Is no part of a value where it begins with it or ends with it."""
    between: str = "\n"
    """What grammars put between tags."""
    has_cdata: bool = False
    """Whether a value may be wrapped in <![CDATA[...]]>."""
    prefix: str = ""
    """What grammars put before each call."""
    suffix: str = ""
    ends: tuple[str, ...] = ()
    """What may come after calls."""

    def read(self, reader: CallReader, marker: str) -> Wait[None]:
        while True:
            if marker != self.call_start:
                yield from reader.skip_whitespace()
                yield from reader.expect(self.call_start)
            yield from self._read_call(reader)
            reader.end()
            yield from reader.skip_whitespace()
            if self.ends and (yield from reader.skip_end(*self.ends)):
                return
            marker = yield from reader.accept(self.call_start)
            if not marker:
                return

    def _read_call(self, reader: CallReader) -> Wait[None]:
        yield from reader.skip_whitespace()
        tags = (self.argument_start, self.call_end)
        name, stop = yield from reader.until(*([self.name_end] if self.name_end else ["\n", *tags]))
        name = name.strip()
        if not name or any(char.isspace() or char in '<>"' for char in name):
            raise Malformed
        reader.start(name)
        reader.arguments("{")
        is_first = True
        try:
            while True:
                if stop not in tags:
                    yield from reader.skip_whitespace()
                    stop = yield from reader.expect(*tags)
                if stop == self.call_end:
                    break
                yield from self._read_argument(reader, reader.tools.get(name), "" if is_first else ", ")
                is_first, stop = False, ""
        except BrokenOff:
            raise
        except Malformed:
            reader.arguments("}")
            raise
        reader.arguments("}")

    def _read_argument(self, reader: CallReader, tool: Tool | None, comma: str) -> Wait[None]:
        key, _ = yield from reader.until(self.argument_end)
        key = key.strip()
        if self.value_start:
            yield from reader.skip_whitespace()
            yield from reader.expect(self.value_start)
        ends = (self.margin + self.value_end, self.value_end) if self.margin else (self.value_end,)
        if self.margin:
            yield from reader.accept(self.margin)
        if self.has_cdata and (yield from reader.accept(CDATA)):
            ends = ("]]>" + self.value_end,)
        reader.arguments(f"{comma}{json.dumps(key, ensure_ascii=False)}: ")
        yield from reader.read_value(tool, key, ends)

    def call(self, lark: LarkWriter, tool: Tool) -> str:
        if {"allOf", "anyOf", "oneOf", "$ref", "patternProperties"} & tool.parameters.keys():
            raise UnsupportedSchema("this model's calls need parameters that are listed as 'properties'")
        value_start = self.between + self.value_start if self.value_start else ""
        arguments: list[tuple[str, bool]] = []
        for name in tool.properties:
            before = self.between + self.argument_start + name + self.argument_end + value_start + self.margin
            value = raw_value(lark, tool, name, self.margin, self.value_end)
            arguments.append((f"({lark.literal(before)} {value})", name in tool.required))
        head = lark.literal(self.prefix + self.call_start + tool.name + self.name_end)
        return f"{head} {lark.listed(arguments, '')} {lark.literal(self.between + self.call_end + self.suffix)}"
