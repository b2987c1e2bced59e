"""Families whose calls are JSON: {"name": ..., "arguments": {...}}, or a name before {...}."""

import json
import re
from dataclasses import dataclass
from typing import Any

from mlxserve.text.tool_calls.definitions import NAME_CHARACTER, Tool
from mlxserve.text.tool_calls.family import Family
from mlxserve.text.tool_calls.json_text import copy_value, read_scalar, read_string
from mlxserve.text.tool_calls.lark import LarkWriter, quoted
from mlxserve.text.tool_calls.reader import CallReader
from mlxserve.text.tool_calls.source import Malformed, Wait

_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("id", "type", "index", "tool_call_id")
"""What some models write beside the two, and nobody needs."""
_INDEX = re.compile(r":\d+\Z")


@dataclass(frozen=True, slots=True)
class ObjectCalls(Family):
    """Each call is an object that has the name and the arguments, in either order.

    Between `prefix` and `suffix` of each call; in a list, if the opening ends with "[".
    """

    prefix: str = ""
    suffix: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"
    ends: tuple[str, ...] = ()
    """What may come after the calls."""
    separators: tuple[str, ...] = ()
    """What may come between two calls, if not their prefix."""

    def read(self, reader: CallReader, marker: str) -> Wait[None]:
        if marker != "{":
            yield from reader.skip_whitespace()
            opening = yield from reader.expect("{", "[")
            if opening == "[":
                yield from read_list(reader)
                reader.end()
                yield from reader.skip_whitespace()
                yield from reader.skip_end(*self._all_ends)
                return
        while True:
            yield from _read_object(reader)
            reader.end()
            if not (yield from self._goes_on(reader)):
                break
        yield from reader.skip_end(*self._all_ends)

    @property
    def _all_ends(self) -> tuple[str, ...]:
        return (*self.ends, *([self.suffix.strip()] if self.suffix else []))

    def _goes_on(self, reader: CallReader) -> Wait[bool]:
        """Whether another object follows in the same section; its brace is read then."""
        yield from reader.skip_whitespace()
        if not self.separators:
            return False
        yield from reader.accept(*self.separators)
        yield from reader.skip_whitespace()
        return bool((yield from reader.accept("{")))

    def call(self, lark: LarkWriter, tool: Tool) -> str:
        call = object_call(lark, tool, self.name_key, self.arguments_key)
        return f"{lark.literal(self.prefix)} {call} {lark.literal(self.suffix)}"


@dataclass(frozen=True, slots=True)
class NamedCalls(Family):
    """Each call is a name, and after it the arguments as one object."""

    prefixes: tuple[str, ...] = ()
    """What comes before the name; the first is the one that grammars take. Without any, a start does."""
    between: tuple[str, ...] = ()
    """What comes between name and arguments, likewise."""
    suffix: str = ""
    ends: tuple[str, ...] = ()
    """What may come after the arguments, before the suffix."""
    is_indexed: bool = False
    """Names are written functions.name:0."""

    def read(self, reader: CallReader, marker: str) -> Wait[None]:
        while True:
            if self.prefixes and marker not in self.prefixes:
                yield from reader.skip_whitespace()
                yield from reader.expect(*self.prefixes)
            yield from reader.skip_whitespace()
            name = yield from self._read_name(reader)
            yield from reader.skip_whitespace()
            yield from reader.expect(*(text.strip() for text in self.between))
            yield from reader.skip_whitespace()
            yield from copy_arguments(reader, name, [])
            reader.end()
            yield from reader.skip_whitespace()
            for end in (*self.ends, self.suffix.strip()):
                if end and (yield from reader.skip_end(end)):
                    yield from reader.skip_whitespace()
            reader.end()
            if self.closing:
                if (yield from reader.skip_end(self.closing)) or reader.is_ended:
                    return
                marker = ""
            else:
                return

    def _read_name(self, reader: CallReader) -> Wait[str]:
        name = yield from reader.read(NAME_CHARACTER)
        if self.is_indexed:
            name = _INDEX.sub("", name).removeprefix("functions.")
        return name

    def call(self, lark: LarkWriter, tool: Tool) -> str:
        prefix = self.prefixes[0] if self.prefixes else self.starts[0]
        name = lark.literal(tool.name)
        if self.is_indexed:
            name = f"{lark.literal(prefix + 'functions.' + tool.name + ':')} /[0-9]{{1,2}}/"
        else:
            name = lark.literal(prefix + tool.name)
        return f"{name} {lark.literal(self.between[0])} {lark.json(closed(tool))} {lark.literal(self.suffix)}"


def closed(tool: Tool) -> dict[str, Any]:
    """The tool's parameters, without others unless it says that there may be."""
    schema = dict(tool.parameters)
    schema.setdefault("type", "object")
    if not {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"} & schema.keys():
        schema["additionalProperties"] = False
        schema["properties"] = dict(tool.properties)
    return schema


def object_call(lark: LarkWriter, tool: Tool, name_key: str, arguments_key: str) -> str:
    """A Lark expression for calls of a tool as objects."""
    before = f"{{{quoted(name_key)}: {quoted(tool.name)}, {quoted(arguments_key)}: "
    return f"{lark.literal(before)} {lark.json(closed(tool))} {lark.literal('}')}"


def read_list(reader: CallReader) -> Wait[None]:
    """Calls as objects in a list, whose bracket is read."""
    while True:
        yield from reader.skip_whitespace()
        yield from reader.expect("{")
        yield from _read_object(reader)
        reader.end()
        yield from reader.skip_whitespace()
        if (yield from reader.expect(",", "]")) == "]":
            return


def _read_object(reader: CallReader) -> Wait[None]:
    """A call's object, whose brace is read."""
    name: str | None = None
    early: list[str] = []
    has_arguments = False
    while True:
        yield from reader.skip_whitespace()
        key = yield from read_string(reader)
        yield from reader.skip_whitespace()
        yield from reader.expect(":")
        yield from reader.skip_whitespace()
        if key in _NAMES and name is None:
            name = yield from read_string(reader)
            if has_arguments:
                reader.start(name)
                reader.arguments("".join(early))
        elif key in _ARGUMENTS and not has_arguments:
            has_arguments = True
            if name is None:
                yield from copy_arguments(reader, None, early)
            else:
                yield from copy_arguments(reader, name, early)
        elif key in _OTHERS:
            if (yield from reader.peek()) == '"':
                yield from read_string(reader)
            else:
                yield from read_scalar(reader)
        else:
            raise Malformed
        yield from reader.skip_whitespace()
        if (yield from reader.expect(",", "}")) == "}":
            break
    if name is None:
        raise Malformed
    if not has_arguments:
        reader.start(name)
        reader.arguments("{}")


def copy_arguments(reader: CallReader, name: str | None, early: list[str]) -> Wait[None]:
    """Start the call of that name and pass its arguments on; or put them into `early` while the name is not known.

    Some templates write them as a string of JSON, and models that were trained on these do.
    """
    first = yield from reader.peek()
    if first == "{":
        if name is not None:
            reader.start(name)
        yield from copy_value(reader, reader.arguments if name is not None else early.append)
        return
    text = (yield from read_string(reader)) if first == '"' else (yield from read_scalar(reader))
    if not text.strip() or text == "null":
        text = "{}"
    try:
        is_object = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise Malformed
    if name is None:
        early.append(text)
    else:
        reader.start(name)
        reader.arguments(text)
