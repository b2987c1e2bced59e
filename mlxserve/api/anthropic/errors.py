"""Every failure as Anthropic's error object: {"type": "error", "error": {"type", "message"}, "request_id"}.

| status | type                  | of                                                             |
|--------|-----------------------|----------------------------------------------------------------|
| 400    | invalid_request_error | wrong fields, prompts that do not fit; 405, 408, 415 as well   |
| 401    | authentication_error  | a wrong or missing API key                                     |
| 403    | permission_error      | a host or an origin that is not allowed                        |
| 404    | not_found_error       | models, paths                                                  |
| 413    | request_too_large     | bodies                                                         |
| 500    | api_error             | models that cannot be loaded, the engine; 503 as well          |
| 504    | timeout_error         | requests whose deadline passed                                 |
| 529    | overloaded_error      | a full queue (with Retry-After), no memory for a model         |
"""

from typing import Any

from starlette.responses import JSONResponse

from mlxserve.api.failures import Failure, describe
from mlxserve.errors import CapacityError, ContextLengthExceeded, ModelLoadError, RequestTimeout

OVERLOADED = 529

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


def error_object(error: Exception, request_id: str) -> dict[str, Any]:
    """The wire object of an error."""
    status, failure = _status(error), describe(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": _message(error, failure)},
        "request_id": request_id,
    }


def error_response(error: Exception, request_id: str) -> JSONResponse:
    headers = describe(error).headers | {"request-id": request_id}
    if isinstance(error, (ModelLoadError, RequestTimeout)):
        # Anthropic's own clients repeat every 5xx twice unless told not to; these would only fail again, and slowly.
        headers["x-should-retry"] = "false"
    return JSONResponse(error_object(error, request_id), status_code=_status(error), headers=headers)


def _status(error: Exception) -> int:
    return OVERLOADED if isinstance(error, CapacityError) else describe(error).status


def _message(error: Exception, failure: Failure) -> str:
    """The object has no place for a field's name, so the message has it."""
    message = failure.message
    if isinstance(error, ContextLengthExceeded):
        # Claude Code knows a full context by these words, and shortens the conversation.
        message = f"prompt is too long: {error.num_tokens} tokens > {error.limit - 1} maximum; {message}"
    if failure.param is not None and failure.param not in message:
        message = f"{failure.param}: {message}"
    return message
