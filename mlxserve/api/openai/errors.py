"""Every failure as OpenAI's error object, with its HTTP status: the one place that decides either.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

| status | type                  | code                                                                       |
|--------|-----------------------|----------------------------------------------------------------------------|
| 400    | invalid_request_error | invalid_json, invalid_type, invalid_value, unknown_parameter,              |
|        |                       | missing_required_parameter, unsupported_parameter, context_length_exceeded |
| 401    | authentication_error  | invalid_api_key                                                            |
| 403    | invalid_request_error | forbidden                                                                  |
| 404    | not_found_error       | model_not_found, request_not_found, unknown_url                            |
| 405    | invalid_request_error | method_not_allowed                                                         |
| 413    | invalid_request_error | request_too_large                                                          |
| 415    | invalid_request_error | unsupported_media_type                                                     |
| 429    | rate_limit_error      | queue_full, with Retry-After                                               |
| 500    | server_error          | model_load_failed, engine_error, internal_error                            |
| 503    | server_error          | engine_dead, download_failed, no_capacity, cancelled                       |
| 504    | server_error          | timeout                                                                    |
"""

import math
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from mlxserve.errors import (
    CapacityError,
    DownloadError,
    EngineDead,
    EngineError,
    InvalidParameter,
    ModelError,
    ModelLoadError,
    ModelNotFound,
    QueueFull,
    RequestCancelled,
    RequestError,
    RequestNotFound,
    RequestTimeout,
)

_INTERNAL = (500, "server_error", "internal_error")

_KINDS: dict[type, tuple[int, str, str]] = {
    RequestError: (400, "invalid_request_error", "invalid_value"),
    RequestNotFound: (404, "not_found_error", "request_not_found"),
    ModelNotFound: (404, "not_found_error", "model_not_found"),
    ModelLoadError: (500, "server_error", "model_load_failed"),
    DownloadError: (503, "server_error", "download_failed"),
    CapacityError: (503, "server_error", "no_capacity"),
    QueueFull: (429, "rate_limit_error", "queue_full"),
    RequestTimeout: (504, "server_error", "timeout"),
    RequestCancelled: (503, "server_error", "cancelled"),
    EngineError: (500, "server_error", "engine_error"),
    EngineDead: (503, "server_error", "engine_dead"),
}

_HTTP_KINDS: dict[int, tuple[str, str]] = {
    401: ("authentication_error", "invalid_api_key"),
    403: ("invalid_request_error", "forbidden"),
    404: ("not_found_error", "unknown_url"),
    405: ("invalid_request_error", "method_not_allowed"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "unsupported_media_type"),
}

_PYDANTIC_CODES = {
    "extra_forbidden": "unknown_parameter",
    "missing": "missing_required_parameter",
    "unsupported_parameter": "unsupported_parameter",
}


def error_object(error: Exception) -> tuple[int, dict[str, Any]]:
    """The HTTP status and the wire object of an error. What an unexpected error says stays in the server's log."""
    param: str | None = None
    message = str(error)
    if isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
        fallback = "invalid_request_error" if status < 500 else "server_error"
        kind, code = _HTTP_KINDS.get(status, (fallback, None))
    else:
        known = next((_KINDS[parent] for parent in type(error).__mro__ if parent in _KINDS), None)
        if known is None:
            message = "The server failed while answering this request; its log says more."
        status, kind, code = known or _INTERNAL
    if isinstance(error, RequestError):
        param, code = error.param, error.code or code
    elif isinstance(error, ModelError):
        param = "model"
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: Exception) -> JSONResponse:
    status, content = error_object(error)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if isinstance(error, QueueFull):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if isinstance(error, (ModelLoadError, RequestTimeout)):
        # OpenAI's own clients repeat every 5xx twice unless told not to; these would only fail again, and slowly.
        headers["x-should-retry"] = "false"
    return JSONResponse(content, status_code=status, headers=headers)


def invalid_parameter(error: ValidationError) -> InvalidParameter:
    """The first thing pydantic found wrong, with the path of its field as OpenAI writes it: `messages[0].content`."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    kind, location = first["type"], _path(first["loc"])
    if not location:
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


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith(":"):  # tags of unions in schema.py, which are no fields
            path += f".{step}" if path else step
    return path
