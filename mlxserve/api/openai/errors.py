"""Every failure as OpenAI's error object: {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}."""

from typing import Any

from starlette.responses import JSONResponse

from mlxserve.api.failures import describe
from mlxserve.errors import ModelLoadError, RequestTimeout


def error_object(error: Exception) -> tuple[int, dict[str, Any]]:
    """The HTTP status and the wire object of an error."""
    failure = describe(error)
    content = {"message": failure.message, "type": failure.kind, "param": failure.param, "code": failure.code}
    return failure.status, {"error": content}


def error_response(error: Exception) -> JSONResponse:
    status, content = error_object(error)
    headers = describe(error).headers
    if isinstance(error, (ModelLoadError, RequestTimeout)):
        # OpenAI's own clients repeat every 5xx twice unless told not to; these would only fail again, and slowly.
        headers["x-should-retry"] = "false"
    return JSONResponse(content, status_code=status, headers=headers)
