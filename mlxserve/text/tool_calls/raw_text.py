"""Grammars of arguments that stand in a call as bare text."""

import json

from mlxserve.text import json_schema
from mlxserve.text.json_schema import UnsupportedSchema
from mlxserve.text.tool_calls.definitions import Tool
from mlxserve.text.tool_calls.lark import LarkWriter
from mlxserve.text.tool_calls.values import ALL_TYPES, types_of


def raw_value(lark: LarkWriter, tool: Tool, name: str, margin: str, value_end: str) -> str:
    """A parameter's value with what ends it. Of one that may be a string, choices, a pattern or a length are enforced.

    Raises:
        UnsupportedSchema: it cannot be enforced.
    """
    schema = tool.property_schema(name)
    types = types_of(schema, tool.parameters)
    end = lark.literal(margin + value_end)
    if "string" not in types:
        return f"{lark.json(schema)} {end}"
    json_schema.check(schema)
    if types == ALL_TYPES or not isinstance(schema, dict):
        return lark.until(value_end)
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if choices is not None:
        texts = [choice if isinstance(choice, str) else json.dumps(choice) for choice in choices]
        if any(value_end in text for text in texts):
            raise UnsupportedSchema(f"a choice of {name!r} contains {value_end!r}, which ends it")
        return f"({' | '.join(map(lark.literal, texts))}) {end}"
    margin = margin.replace("\n", "\\n")
    if "pattern" in schema:
        return lark.until(value_end, _unanchored(schema["pattern"]) + margin)
    if "minLength" in schema or "maxLength" in schema:
        low, high = schema.get("minLength", 0), schema.get("maxLength", "")
        return lark.until(value_end, f"(?s:.{{{low},{high}}}){margin}")
    return lark.until(value_end)


def _unanchored(pattern: str) -> str:
    """A pattern of JSON schema, which is searched for, as one that is matched. A slash would end it in Lark."""
    before = "" if pattern.startswith("^") else "(?s:.*)"
    is_anchored = pattern.endswith("$") and not pattern.endswith("\\$")
    body = pattern.removeprefix("^")
    body = body[:-1] if is_anchored else body
    body = body.replace("\\/", "/").replace("/", "\\/").replace("\n", "\\n")
    return f"{before}({body}){'' if is_anchored else '(?s:.*)'}"
