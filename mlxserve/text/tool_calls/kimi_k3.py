"""Kimi K3's calls: <|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="string"<|sep|>...

Each argument says its own type. One block of JSON may stand in place of all arguments.
"""

import json
import re
from dataclasses import dataclass

from mlxserve.text import json_schema
from mlxserve.text.json_schema import UnsupportedSchema
from mlxserve.text.tool_calls.definitions import Tool
from mlxserve.text.tool_calls.family import Family
from mlxserve.text.tool_calls.json_text import copy_value
from mlxserve.text.tool_calls.lark import LarkWriter
from mlxserve.text.tool_calls.raw_text import raw_value
from mlxserve.text.tool_calls.reader import CallReader
from mlxserve.text.tool_calls.source import Malformed, Wait
from mlxserve.text.tool_calls.values import types_of

OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
CALL, ARGUMENT, JSON = f"{OPEN}call", f"{OPEN}argument", f"{OPEN}json"
ARGUMENT_END = f"{CLOSE}argument{SEP}"
CALL_END, TOOLS_END = f"{CLOSE}call{SEP}", f"{CLOSE}tools{SEP}"
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class KimiK3Calls(Family):
    @property
    def all_markers(self) -> tuple[str, ...]:
        return (OPEN, CLOSE, SEP)

    def read(self, reader: CallReader, marker: str) -> Wait[None]:
        yield from reader.skip_whitespace()
        yield from reader.expect(CALL)
        while True:
            yield from self._read_call(reader)
            reader.end()
            yield from reader.skip_whitespace()
            if not (yield from reader.accept(CALL)):
                yield from reader.skip_end(TOOLS_END)
                return

    def _read_call(self, reader: CallReader) -> Wait[None]:
        name = (yield from _read_attributes(reader)).get("tool", "")
        if not name:
            raise Malformed
        reader.start(name)
        yield from reader.skip_whitespace()
        tag = yield from reader.expect(JSON, ARGUMENT, CALL_END)
        if tag == JSON:
            yield from _read_attributes(reader)
            yield from reader.skip_whitespace()
            if (yield from reader.peek()) != "{":
                raise reader.fault()
            yield from copy_value(reader, reader.arguments)
            yield from reader.skip_whitespace()
            yield from reader.expect(f"{CLOSE}json{SEP}")
            yield from reader.skip_whitespace()
            yield from reader.expect(CALL_END)
            return
        reader.arguments("{")
        comma = ""
        while tag == ARGUMENT:
            attributes = yield from _read_attributes(reader)
            key = attributes.get("key", "")
            reader.arguments(f"{comma}{json.dumps(key, ensure_ascii=False)}: ")
            comma = ", "
            yield from reader.read_value(_typed(key, attributes.get("type", "string")), key, [ARGUMENT_END])
            yield from reader.skip_whitespace()
            tag = yield from reader.expect(ARGUMENT, CALL_END)
        reader.arguments("}")

    def call(self, lark: LarkWriter, tool: Tool) -> str:
        if {"allOf", "anyOf", "oneOf", "$ref", "patternProperties"} & tool.parameters.keys():
            raise UnsupportedSchema("this model's calls need parameters that are listed as 'properties'")
        arguments: list[tuple[str, bool]] = []
        for name in tool.properties:
            types = types_of(tool.property_schema(name), tool.parameters)
            written = "string" if "string" in types else "number" if "integer" in types else min(types)
            before = lark.literal(f'{ARGUMENT} key="{name}" type="{written}"{SEP}')
            value = raw_value(lark, tool, name, "", ARGUMENT_END)
            arguments.append((f"({before} {value})", name in tool.required))
        head = f"{lark.literal(f'{CALL} tool={chr(34)}{tool.name}{chr(34)} index={chr(34)}')} /[0-9]{{1,2}}/"
        return f"{head} {lark.literal(chr(34) + SEP)} {lark.listed(arguments, '')} {lark.literal(CALL_END)}"


def _typed(key: str, kind: str) -> Tool:
    """A tool whose one argument is of the type that the call says."""
    return Tool("", {"properties": {key: {"type": kind} if kind in json_schema.TYPES else True}})


def _read_attributes(reader: CallReader) -> Wait[dict[str, str]]:
    text, _ = yield from reader.until(SEP)
    return {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in _ATTRIBUTE.findall(text)}
