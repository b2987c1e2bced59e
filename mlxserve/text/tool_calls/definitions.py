"""The tools a request offers: checked, and as parsers and grammars want them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxserve.errors import InvalidParameter
from mlxserve.text import json_schema

MAX_TOOLS = 1000
"""OpenAI takes 128; clients with several servers of tools behind them send more."""
MAX_NAME_LENGTH = 260
"""Dialects take 128, and some join a namespace's and a function's."""
NAME_CHARACTER = re.compile(r"[\w.:/-]")
"""What parsers take for a part of a name."""


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    parameters: Mapping[str, Any]
    """JSON schema of its arguments, an object."""
    param: str = "tools"
    """Where the client gave the parameters, for errors."""

    @property
    def properties(self) -> Mapping[str, Any]:
        """Parameters by name, with their schemas. Those that are only `required` may be anything."""
        named = self.parameters.get("properties", {})
        return {**named, **{name: True for name in self.required if name not in named}}

    @property
    def required(self) -> Sequence[str]:
        return list(self.parameters.get("required", ()))

    def property_schema(self, name: str) -> Any:
        """Of one parameter, with the definitions that it may refer to. An unknown one may be anything."""
        schema = self.properties.get(name, True)
        if not isinstance(schema, dict):
            return schema
        shared = {key: self.parameters[key] for key in ("$defs", "definitions") if key in self.parameters}
        return {**shared, **schema}


def checked_tools(tools: Sequence[Any], params: Sequence[str] = ()) -> dict[str, Tool]:
    """The tools by name, in order. `params`: where the client gave the parameters of each; empty: as OpenAI does.

    Raises:
        InvalidParameter: there are too many, two of a name, or one that is not
            {"type": "function", "function": {"name": ..., "parameters": schema of an object}}.
    """
    if len(tools) > MAX_TOOLS:
        raise InvalidParameter(f"there are {len(tools)} tools; {MAX_TOOLS} are allowed", param="tools")
    checked: dict[str, Tool] = {}
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
            raise InvalidParameter(f"{where} must be an object with the type 'function' and a 'function'", param=where)
        name = function.get("name")
        if not isinstance(name, str) or not _is_name(name):
            raise InvalidParameter(
                f"{where}.function.name must be 1 to {MAX_NAME_LENGTH} letters, digits, '_', '-', '.', ':' or '/'",
                param=f"{where}.function.name",
            )
        if name in checked:
            raise InvalidParameter(
                f"{where}.function.name: there are two tools of the name {name!r}", param=f"{where}.function.name"
            )
        param = params[index] if params else f"{where}.function.parameters"
        checked[name] = Tool(name, _checked_parameters(function.get("parameters"), param), param)
    return checked


def _is_name(name: str) -> bool:
    return 0 < len(name) <= MAX_NAME_LENGTH and all(map(NAME_CHARACTER.match, name))


def _checked_parameters(schema: Any, param: str) -> Mapping[str, Any]:
    if schema is None or schema == {}:
        return {"type": "object", "properties": {}}
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise InvalidParameter(f"{param} must be a JSON schema of the type 'object'", param=param)
    try:
        json_schema.check_values(schema)
    except json_schema.UnsupportedSchema as error:
        raise InvalidParameter(f"Invalid '{param}': {error}.", param=param) from error
    return schema
