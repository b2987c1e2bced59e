"""Whether a JSON schema for a tool's arguments is one: what is plainly wrong, whatever the dialect.

Keywords that nobody enforces are let through, since a schema is first of all something for the model to read.
"""

from typing import Annotated, Any

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

MAX_LEVELS = 100

_TYPES = {"string", "number", "integer", "boolean", "object", "array", "null"}
_SCHEMAS = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def schema_fault(schema: dict[str, Any]) -> str | None:
    """What is wrong with a schema of arguments, in words; None if nothing is."""
    if schema.get("type", "object") != "object":
        return f"arguments are an object, so 'type' must be \"object\", not {_shown(schema['type'])}"
    return _fault(schema, "", MAX_LEVELS)


def _fault(schema: Any, path: str, num_levels: int) -> str | None:
    at = f" at '{path}'" if path else ""
    if isinstance(schema, bool):
        return None
    if not isinstance(schema, dict):
        return f"a schema is an object or a boolean, not {_shown(schema)}{at}"
    if num_levels == 0:
        return f"more than {MAX_LEVELS} schemas within one another"
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if not isinstance(kind, str) or kind not in _TYPES:
            return f"no JSON type is called {_shown(kind)}{at}"
    required = schema.get("required", [])
    # A boolean for each property is draft 3's way, which some clients still write.
    if not isinstance(required, bool) and not (
        isinstance(required, list) and all(isinstance(name, str) for name in required)
    ):
        return f"'required' is a list of names{at}"
    if not isinstance(schema.get("enum", []), list):
        return f"'enum' is a list{at}"
    below: list[tuple[str, Any]] = [(key, schema[key]) for key in _SCHEMAS if key in schema]
    for key in _MAPS:
        if not isinstance(schema.get(key, {}), dict):
            return f"'{key}' is an object{at}"
        below += [(f"{key}.{name}", each) for name, each in schema.get(key, {}).items()]
    for key in _LISTS:
        if not isinstance(schema.get(key, []), list):
            return f"'{key}' is a list{at}"
        below += [(f"{key}[{index}]", each) for index, each in enumerate(schema.get(key, []))]
    for key, each in below:
        if key == "items" and isinstance(each, list):
            continue  # prefixItems by its earlier name
        fault = _fault(each, f"{path}.{key}" if path else key, num_levels - 1)
        if fault is not None:
            return fault
    return None


def _shown(value: Any) -> str:
    return repr(value)[:40]


def _checked(schema: dict[str, Any]) -> dict[str, Any]:
    if (fault := schema_fault(schema)) is not None:
        raise PydanticCustomError("value_error", "{fault}", {"fault": fault})
    return schema


ArgumentsSchema = Annotated[dict[str, Any], AfterValidator(_checked)]
"""A field of a body that holds such a schema."""
