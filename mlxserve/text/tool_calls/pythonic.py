"""Calls written as Python would: [get_weather(city="Paris", days=2)]."""

import json
import re
from dataclasses import dataclass
from typing import Any

from mlxserve.text.json_schema import UnsupportedSchema
from mlxserve.text.tool_calls.definitions import NAME_CHARACTER, Tool
from mlxserve.text.tool_calls.family import Family
from mlxserve.text.tool_calls.lark import LarkWriter
from mlxserve.text.tool_calls.reader import CallReader
from mlxserve.text.tool_calls.source import BrokenOff, Malformed, Wait
from mlxserve.text.tool_calls.values import types_of

_NAME = re.compile(r"[\w.-]")
_WORD = re.compile(r"[-+.\w]")
_CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPE = re.compile(r"(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|[^xuU0-7])", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": ""}
MAX_DEPTH = 100
"""Lists and objects within one another; what is deeper is no call."""


@dataclass(frozen=True, slots=True)
class PythonicCalls(Family):
    """Keyword arguments only, of literals as Python or JSON writes them; each is given out when it is whole."""

    ends: tuple[str, ...] = ()

    def read(self, reader: CallReader, marker: str) -> Wait[None]:
        if marker != "[":
            yield from reader.skip_whitespace()
            yield from reader.expect("[")
        while True:
            yield from reader.skip_whitespace()
            yield from self._read_call(reader)
            reader.end()
            yield from reader.skip_whitespace()
            if (yield from reader.expect(",", "]")) == "]":
                break
        reader.end()
        if self.ends:
            yield from reader.skip_whitespace()
            yield from reader.skip_end(*self.ends)

    def _read_call(self, reader: CallReader) -> Wait[None]:
        name = yield from reader.read(NAME_CHARACTER)
        yield from reader.expect("(")
        # A name with a bracket behind it is also how prose begins a list; an argument's name is not.
        first = yield from self._read_key(reader)
        reader.start(name)
        try:
            yield from self._read_arguments(reader, first)
        except BrokenOff:
            raise
        except Malformed:
            reader.arguments("}")
            raise

    def _read_arguments(self, reader: CallReader, key: str) -> Wait[None]:
        reader.arguments("{")
        comma = ""
        while key:
            value = yield from read_literal(reader)
            reader.arguments(f"{comma}{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}")
            comma = ", "
            yield from reader.skip_whitespace()
            if (yield from reader.expect(",", ")")) == ")":
                break
            key = yield from self._read_key(reader)
        reader.arguments("}")

    def _read_key(self, reader: CallReader) -> Wait[str]:
        """The name of the argument that comes, and its sign; "" where the bracket closes."""
        yield from reader.skip_whitespace()
        if (yield from reader.accept(")")):
            return ""
        key = yield from reader.read(_NAME)
        yield from reader.skip_whitespace()
        yield from reader.expect("=")
        return key

    def call(self, lark: LarkWriter, tool: Tool) -> str:
        if {"allOf", "anyOf", "oneOf", "$ref", "patternProperties"} & tool.parameters.keys():
            raise UnsupportedSchema("this model's calls need parameters that are listed as 'properties'")
        arguments: list[tuple[str, bool]] = []
        for name in tool.properties:
            if not all(map(_NAME.fullmatch, name)):
                raise UnsupportedSchema(f"the parameter {name!r} has no name of Python's")
            schema = tool.property_schema(name)
            is_bare = isinstance(schema, dict) and schema.keys() <= {"type", "description", "title"}
            is_boolean = is_bare and types_of(schema, tool.parameters) == {"boolean"}
            value = '("True" | "False")' if is_boolean else lark.json(schema)
            arguments.append((f"({lark.literal(name + '=')} {value})", name in tool.required))
        return f"{lark.literal(tool.name + '(')} {lark.listed(arguments, ', ')} {lark.literal(')')}"


def read_literal(reader: CallReader, depth: int = 0) -> Wait[Any]:
    """A literal of Python or JSON. Raises Malformed."""
    yield from reader.skip_whitespace()
    opening = yield from reader.accept("{", "[", "(", '"', "'")
    if opening in ('"', "'") and opening:
        return (yield from _read_string(reader, opening))
    if not opening:
        return (yield from _read_scalar(reader))
    if depth == MAX_DEPTH:
        raise Malformed
    closing = {"{": "}", "[": "]", "(": ")"}[opening]
    items: list[Any] = []
    pairs: dict[str, Any] = {}
    while True:
        yield from reader.skip_whitespace()
        if (yield from reader.accept(closing)):
            break
        item = yield from read_literal(reader, depth + 1)
        yield from reader.skip_whitespace()
        if opening == "{":
            if not isinstance(item, str):
                raise Malformed
            yield from reader.expect(":")
            pairs[item] = yield from read_literal(reader, depth + 1)
            yield from reader.skip_whitespace()
        else:
            items.append(item)
        if (yield from reader.expect(",", closing)) == closing:
            break
    return pairs if opening == "{" else items


def _read_scalar(reader: CallReader) -> Wait[Any]:
    text = yield from reader.read(_WORD)
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    try:
        value = json.loads(text)
    except ValueError as error:
        raise Malformed from error
    if value in (float("inf"), float("-inf")):
        raise Malformed
    return value


def _read_string(reader: CallReader, quote: str) -> Wait[str]:
    parts: list[str] = []
    while True:
        text, stop = yield from reader.until(quote, "\\")
        parts.append(text)
        if stop == quote:
            # JSON writes a character beyond the first plane as two escapes.
            return "".join(parts).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        while True:
            found = _ESCAPE.match(reader.text, reader.position)
            # Of octal digits another may come.
            if found is not None and (found.end() < len(reader.text) or not found[0].isdigit()):
                break
            if reader.is_ended or len(reader.text) - reader.position > 9:
                raise reader.fault()
            yield from reader.more()
        reader.position = found.end()
        parts.append(_unescaped(found[0]))


def _unescaped(escape: str) -> str:
    if escape[0] in "xuU":
        code = int(escape[1:], 16)
    elif escape.isdigit():
        code = int(escape, 8)
    else:
        return _ESCAPED.get(escape, escape)
    if code > 0x10FFFF:
        raise Malformed
    return chr(code)
