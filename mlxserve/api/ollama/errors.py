"""Every failure as Ollama's error object: {"error": "..."}."""

from typing import Any

from starlette.responses import JSONResponse

from mlxserve.api.failures import describe
from mlxserve.errors import ModelNotFound, QueueFull, RequestError


def error_object(error: Exception) -> dict[str, Any]:
    """The wire object of an error. Its one string names the field at fault, since nothing else can."""
    failure = describe(error)
    message = failure.message
    if isinstance(error, ModelNotFound):
        # Clients look for these words.
        message = f"model '{error.model}' not found: {message}"
    elif isinstance(error, RequestError) and failure.param is not None and failure.param not in message:
        message = f"{failure.param}: {message}"
    return {"error": message}


def error_response(error: Exception) -> JSONResponse:
    failure = describe(error)
    # Ollama says 503 where OpenAI says 429.
    status = 503 if isinstance(error, QueueFull) else failure.status
    return JSONResponse(error_object(error), status_code=status, headers=failure.headers)
