"""Gemma's own notation: call:get_weather{city:<escape>Paris<escape>,days:2}."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlxserve.text.json_schema import ANNOTATIONS, UnsupportedSchema
from mlxserve.text.tool_calls.definitions import NAME_CHARACTER, Tool
from mlxserve.text.tool_calls.family import Family
from mlxserve.text.tool_calls.json_calls import closed
from mlxserve.text.tool_calls.json_text import copy_string, read_scalar
from mlxserve.text.tool_calls.lark import LarkWriter
from mlxserve.text.tool_calls.reader import CallReader
from mlxserve.text.tool_calls.source import BrokenOff, Malformed, Wait
from mlxserve.text.tool_calls.values import ALL_TYPES, in_string, resolve, types_of

MAX_DEPTH = 100


@dataclass(frozen=True, slots=True)
class GemmaCalls(Family):
    """Objects have bare keys, strings stand between two `quote`s and have no escapes; all else is JSON."""

    quote: str = ""
    ends: tuple[str, ...] = ()

    def read(self, reader: CallReader, marker: str) -> Wait[None]:
        while True:
            yield from reader.skip_whitespace()
            yield from reader.expect("call:")
            name = yield from reader.read(NAME_CHARACTER)
            yield from reader.skip_whitespace()
            yield from reader.expect("{")
            reader.start(name)
            yield from self._copy_object(reader, 0)
            reader.end()
            yield from reader.skip_whitespace()
            if (yield from reader.skip_end(*self.ends)) or (yield from reader.peek()) != "c":
                return

    def _copy_object(self, reader: CallReader, depth: int) -> Wait[None]:
        """The rest of an object, as JSON."""
        reader.arguments("{")
        comma = ""
        while True:
            yield from reader.skip_whitespace()
            if not comma and (yield from reader.accept("}")):
                break
            reader.arguments(comma)
            comma = ", "
            if (yield from reader.accept(self.quote)):
                yield from self._copy_text(reader)
            elif (yield from reader.peek()) == '"':
                yield from copy_string(reader, reader.arguments)
            else:
                key = yield from reader.ahead(re.compile(r"[^:{}\[\],<]"))
                end = reader.position + len(key)
                if end == len(reader.text):
                    raise BrokenOff
                if not key.strip() or reader.text[end] != ":":
                    raise Malformed
                reader.position = end
                reader.arguments(json.dumps(key.strip(), ensure_ascii=False))
            yield from reader.skip_whitespace()
            yield from reader.expect(":")
            reader.arguments(": ")
            yield from self._copy_value(reader, depth + 1)
            yield from reader.skip_whitespace()
            if (yield from reader.expect(",", "}")) == "}":
                break
        reader.arguments("}")

    def _copy_list(self, reader: CallReader, depth: int) -> Wait[None]:
        reader.arguments("[")
        comma = ""
        while True:
            yield from reader.skip_whitespace()
            if not comma and (yield from reader.accept("]")):
                break
            reader.arguments(comma)
            comma = ", "
            yield from self._copy_value(reader, depth + 1)
            yield from reader.skip_whitespace()
            if (yield from reader.expect(",", "]")) == "]":
                break
        reader.arguments("]")

    def _copy_value(self, reader: CallReader, depth: int) -> Wait[None]:
        if depth > MAX_DEPTH:
            raise Malformed
        yield from reader.skip_whitespace()
        if (yield from reader.accept(self.quote)):
            yield from self._copy_text(reader)
        elif (yield from reader.accept("{")):
            yield from self._copy_object(reader, depth)
        elif (yield from reader.accept("[")):
            yield from self._copy_list(reader, depth)
        elif (yield from reader.peek()) == '"':
            yield from copy_string(reader, reader.arguments)
        else:
            reader.arguments((yield from read_scalar(reader)))

    def _copy_text(self, reader: CallReader) -> Wait[None]:
        reader.arguments('"')
        yield from reader.until(self.quote, pass_on=lambda text: reader.arguments(in_string(text)))
        reader.arguments('"')

    def call(self, lark: LarkWriter, tool: Tool) -> str:
        values = _ValueGrammar(lark, self.quote, tool)
        start = lark.literal(f"{self.starts[0]}call:{tool.name}")
        return f"{start} {values.object(closed(tool))} {lark.literal(self.ends[0])}"


_ENFORCED = frozenset(("type", "enum", "const", "properties", "required", "items", "anyOf", "oneOf", "$ref"))
_SHARED = frozenset(("$defs", "definitions", "additionalProperties"))
_Rule = Callable[[], str]


class _ValueGrammar:
    """Grammars of values of a tool's schemas, in Gemma's notation."""

    def __init__(self, lark: LarkWriter, quote: str, tool: Tool) -> None:
        self._lark = lark
        self._quote = lark.literal(quote)
        self._text = f"{self._quote} {lark.until(quote)}"
        self._root = tool.parameters
        self._depth = 0

    def value(self, schema: Any) -> str:
        if not isinstance(schema, dict) or not schema.keys() - ANNOTATIONS:
            return self._scalar_or_text()
        if "$ref" in schema:
            return self._nested(lambda: self.value(resolve(schema["$ref"], self._root)))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self._lark.choice([self.value(part) for part in schema[keyword]])
        if "enum" in schema or "const" in schema:
            return self._lark.choice([self._constant(value) for value in schema.get("enum", [schema.get("const")])])
        types = types_of(schema, self._root)
        if types == ALL_TYPES:
            return self._scalar_or_text()
        choices = []
        if "string" in types:
            self._check(schema, types)
            choices.append(self._text)
        if "object" in types:
            self._check(schema, types)
            choices.append(self._nested(lambda: self.object(schema)))
        if "array" in types:
            self._check(schema, types)
            item = self._nested(lambda: self.value(schema.get("items", True)))
            separator = self._lark.literal(",")
            choices.append(f'("[" ({item} ({separator} {item})*)? "]")')
        scalars = sorted(types - {"string", "object", "array"})
        if scalars:
            rest = {key: value for key, value in schema.items() if key not in ("properties", "required", "items")}
            choices.append(self._lark.json({**rest, "type": scalars}))
        return self._lark.choice(choices)

    def object(self, schema: Any) -> str:
        properties = schema.get("properties", {})
        required = set(schema.get("required", ()))
        if not required <= properties.keys():
            raise UnsupportedSchema("this model's calls need every required parameter to be one of 'properties'")
        items = [
            (f"({self._lark.literal(name + ':')} {self.value(part)})", name in required)
            for name, part in properties.items()
        ]
        return f'"{{" {self._lark.listed(items, ",")} "}}"'

    def _nested(self, rule: _Rule) -> str:
        self._depth += 1
        if self._depth > 20:
            raise UnsupportedSchema("this model's calls take no recursive schemas, nor any of more than 20 levels")
        made = rule()
        self._depth -= 1
        return made

    def _scalar_or_text(self) -> str:
        return self._lark.choice([self._text, self._lark.json({"type": ["number", "boolean", "null"]})])

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._quote} {self._lark.literal(value)} {self._quote}"
        if isinstance(value, (dict, list)):
            raise UnsupportedSchema("this model's calls take no objects or lists as constants")
        return self._lark.literal(json.dumps(value))

    def _check(self, schema: dict[str, Any], types: frozenset[str]) -> None:
        unknown = schema.keys() - _ENFORCED - _SHARED - ANNOTATIONS
        if unknown:
            raise UnsupportedSchema(
                f"this model's calls cannot be held to {min(unknown)!r} of {', '.join(sorted(types))}"
            )
