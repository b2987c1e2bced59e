"""Errors of any path, in the shape of the dialect that the path belongs to."""

from starlette.responses import Response

from mlxserve.api.ollama import errors as ollama
from mlxserve.api.openai import errors as openai


def error_response(error: Exception, path: str) -> Response:
    """The response for an error on a path, which may be none of the API's."""
    if path.startswith("/api/"):
        return ollama.error_response(error)
    return openai.error_response(error)
