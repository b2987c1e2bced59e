"""What tests of Ollama's dialect share: its endpoints by plain HTTP, and its SDK's models, taken strictly."""

import json
import re
from typing import Any

import httpx
from pydantic import BaseModel

TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z")
HELLO = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
UNKNOWN_TO_THE_SDK = {
    "Logprob": {"bytes"},
    "TokenLogprob": {"bytes"},
    "ToolCall": {"id"},
    "Function": {"index"},
    "ListResponse.Model": {"name"},
    "ShowResponse": {"system"},
    "ProcessResponse.Model": {"size_reserved"},
}
"""Fields that Ollama itself sends and its SDK has no place for; the last one is only ours."""


def strictly(schema: type[BaseModel], content: dict[str, Any]) -> BaseModel:
    """The content as that model of the SDK: every type as it stands, and no field beside those known.

    Raises:
        ValidationError: it is not.
    """
    found = schema.model_validate_json(json.dumps(content), strict=True)
    _check_fields(schema.__qualname__, found, content)
    return found


def _check_fields(name: str, found: Any, content: Any) -> None:
    if isinstance(found, BaseModel):
        names = {field.alias or key: key for key, field in type(found).model_fields.items()}
        qualified = type(found).__qualname__
        known = UNKNOWN_TO_THE_SDK.get(qualified, set()) | UNKNOWN_TO_THE_SDK.get(type(found).__name__, set())
        assert content.keys() - names.keys() <= known, (qualified, content.keys() - names.keys())
        for key in content.keys() & names.keys():
            _check_fields(key, getattr(found, names[key]), content[key])
    elif isinstance(found, (list, tuple)):
        for one, other in zip(found, content, strict=True):
            _check_fields(name, one, other)


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    """The objects of a stream."""
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def check_times(content: dict[str, Any]) -> None:
    assert TIMESTAMP.fullmatch(content["created_at"])
