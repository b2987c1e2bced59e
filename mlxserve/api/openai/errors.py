"""Every failure as OpenAI's error object: {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}."""

from typing import Any

from starlette.responses import JSONResponse

from mlxserve.api.failures import Failure, describe
from mlxserve.errors import ModelLoadError, RequestTimeout


def error_object(error: Exception) -> tuple[int, dict[str, Any]]:
    """The HTTP status and the wire object of an error."""
    failure = describe(error)
    return failure.status, _content(failure)


def error_response(error: Exception) -> JSONResponse:
    failure = describe(error)
    headers = failure.headers
    if isinstance(error, (ModelLoadError, RequestTimeout)):
        # OpenAI's own clients repeat every 5xx twice unless told not to; these would only fail again, and slowly.
        headers["x-should-retry"] = "false"
    return JSONResponse(_content(failure), status_code=failure.status, headers=headers)


def _content(failure: Failure) -> dict[str, Any]:
    return {"error": {"message": failure.message, "type": failure.kind, "param": failure.param, "code": failure.code}}
