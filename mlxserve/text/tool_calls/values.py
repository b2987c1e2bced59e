"""Arguments that models write as bare text, made JSON by the tool's schema."""

import json
from collections.abc import Mapping
from typing import Any

from mlxserve.text.tool_calls.definitions import Tool

_PYTHON = {"true": True, "false": False, "none": None, "null": None}
_TYPES: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
_TYPES |= {dict: "object", type(None): "null"}
ALL_TYPES = frozenset(_TYPES.values())
_MAX_REFERENCES = 10


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Which types of JSON a schema allows, as far as its type, enum, const, anyOf, oneOf and $ref say."""
    return _types_of(schema, root, _MAX_REFERENCES)


def _types_of(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth == 0:
        return ALL_TYPES
    types = ALL_TYPES
    if "type" in schema:
        given = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        types &= frozenset(given) | ({"integer"} if "number" in given else set())
    if "enum" in schema:
        types &= {_TYPES[type(value)] for value in schema["enum"]}
    if "const" in schema:
        types &= {_TYPES[type(schema["const"])]}
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            types &= frozenset().union(*(_types_of(part, root, depth - 1) for part in schema[keyword]))
    if "$ref" in schema:
        types &= _types_of(resolve(schema["$ref"], root), root, depth - 1)
    return types


def resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """The schema that a reference like #/$defs/City leads to; True, which anything satisfies, if there is none."""
    node: Any = root
    for part in reference.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(node, Mapping) or part not in node:
            return True
        node = node[part]
    return node


def is_text(tool: Tool | None, name: str) -> bool:
    """Whether an argument is a string whatever it looks like."""
    return tool is not None and types_of(tool.properties.get(name, True), tool.parameters) == {"string"}


def is_json_broken_off(tool: Tool | None, name: str, text: str) -> bool:
    """Whether an argument, which is no string, cannot end here: a string in it is open."""
    if tool is None or "string" in types_of(tool.properties.get(name, True), tool.parameters):
        return False
    try:
        json.loads(text.strip(), strict=False)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except RecursionError:
        return False
    return False


def to_json(tool: Tool | None, name: str, text: str) -> str:
    """An argument as JSON: of the first type its schema has that the text can be, JSON before strings."""
    types = ALL_TYPES if tool is None else types_of(tool.properties.get(name, True), tool.parameters)
    stripped = text.strip()
    try:
        value = json.loads(stripped, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        if stripped.lower() not in _PYTHON:
            return json.dumps(text, ensure_ascii=False)
        value = _PYTHON[stripped.lower()]
    if isinstance(value, float) and "number" not in types and "integer" in types and value.is_integer():
        value = int(value)
    kind = _TYPES[type(value)]
    if kind not in types and "string" in types:
        value = text
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:  # 1e999
        return json.dumps(text, ensure_ascii=False)


def in_string(text: str) -> str:
    """A text as it stands between the quotes of a JSON string; of parts, the parts of the whole."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
