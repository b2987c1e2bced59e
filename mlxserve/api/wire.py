"""What the bodies of requests have in common in all dialects: strict about types, and no field ignored in silence."""

import asyncio
import json
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, ValidationInfo
from pydantic_core import PydanticCustomError, from_json
from starlette.requests import Request

from mlxserve.api.connection import JSON, read_json_body
from mlxserve.errors import InvalidParameter

MAX_FIELDS = 1000
INLINE_BODY_BYTES = 1_000_000
"""Parsing more than this would be felt by the streams that share the event loop."""

_PYDANTIC_CODES = {
    "extra_forbidden": "unknown_parameter",
    "missing": "missing_required_parameter",
    "unsupported_parameter": "unsupported_parameter",
}


def unsupported(*neutral: Any) -> AfterValidator:
    """Marks a field that is known and not supported yet: null and the `neutral` values pass, others are refused."""

    def check(value: Any, info: ValidationInfo) -> Any:
        # True == 1 and False == 0 in Python, but not on the wire.
        same = (value == one and isinstance(value, bool) is isinstance(one, bool) for one in neutral)
        if value is None or any(same):
            return value
        raise PydanticCustomError("unsupported_parameter", "this server does not support it yet; leave it out")

    return AfterValidator(check)


class WireModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)


Schema = TypeVar("Schema", bound=WireModel)
Location = tuple[int | str, ...]
"""Where a field is: names, and indices of lists. What begins with a colon is the tag of a union, and no field."""


def bracketed(location: Location) -> str:
    """A field as OpenAI writes it: `messages[0].content`."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith(":"):
            path += f".{step}" if path else step
    return path


def dotted(location: Location) -> str:
    """A field as Anthropic writes it: `messages.0.content`."""
    return ".".join(str(step) for step in location if isinstance(step, int) or not step.startswith(":"))


def parse(schema: type[Schema], body: bytes, path: Callable[[Location], str] = bracketed) -> Schema:
    """The request in a JSON body. `path` writes the place of a field for errors.

    Raises:
        InvalidParameter: not UTF-8, not JSON (NaN, lone surrogates, more than 200 levels), or a wrong field.
    """
    if not body.strip():
        raise InvalidParameter("The body is empty; send a JSON object.", code="invalid_json")
    try:
        # NaN is let through here so that the field that has it can be named.
        content = from_json(body)
    except ValueError as error:
        raise InvalidParameter(_unreadable(body, str(error)), code="invalid_json") from error
    if isinstance(content, dict) and len(content) > MAX_FIELDS:
        raise InvalidParameter(
            f"The body has {len(content)} fields; no request has that many.", code="unknown_parameter"
        )
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        raise _invalid_parameter(error, path) from error


def _unreadable(body: bytes, reason: str) -> str:
    """What is wrong with a body that cannot be read, which may be JSON by the letter. `reason`: the reader's."""
    if reason.startswith("number out of range"):
        return "The body has a number of thousands of digits; no field takes one."
    if reason.startswith("recursion limit"):
        return "The body has more than 200 levels of lists and objects within one another; no field takes them."
    if "surrogate" in reason or "hex escape" in reason:
        try:
            json.loads(body, parse_int=float)
        except (ValueError, RecursionError):
            pass
        else:
            return (
                "The body has half of a surrogate pair, a \\ud800 to \\udfff without its other half, which is no "
                "character; send whole ones."
            )
    return f"The body is not valid JSON: {reason}."


def _invalid_parameter(error: ValidationError, path: Callable[[Location], str]) -> InvalidParameter:
    """The first thing pydantic found wrong, with the path of its field."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    kind, location = first["type"], path(first["loc"])
    if not first["loc"]:
        return InvalidParameter("The body must be a JSON object.", code="invalid_type")
    fallback = "invalid_type" if kind.endswith("_type") else "invalid_value"
    match kind:
        case "extra_forbidden":
            message = f"Unknown parameter: '{location}'."
        case "missing":
            message = f"Missing required parameter: '{location}'."
        case _:
            message = f"Invalid '{location}': {first['msg']}."
    return InvalidParameter(message, param=location, code=_PYDANTIC_CODES.get(kind, fallback))


async def read_body(
    request: Request,
    schema: type[Schema],
    max_bytes: int,
    *,
    path: Callable[[Location], str] = bracketed,
    media_types: Collection[str] = JSON,
) -> Schema:
    """The body of a request; `max_bytes` and `media_types` as of read_json_body(), `path` as of parse().

    Raises:
        HTTPException, ClientDisconnect: as read_json_body().
        InvalidParameter: as parse().
    """
    data = await read_json_body(request, max_bytes, media_types)
    if len(data) <= INLINE_BODY_BYTES:
        return parse(schema, data, path)
    return await asyncio.to_thread(parse, schema, data, path)
