"""Errors of any path, in the shape of the dialect that the path belongs to."""

from starlette.responses import Response
from starlette.types import Scope

from mlxserve.api.anthropic import errors as anthropic
from mlxserve.api.ollama import errors as ollama
from mlxserve.api.openai import errors as openai


def error_response(error: Exception, scope: Scope) -> Response:
    """The response for an error of a request, whose path may be none of the API's."""
    path: str = scope["path"]
    if path.startswith("/api/"):
        return ollama.error_response(error)
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return anthropic.error_response(error, scope["state"]["request_id"])
    return openai.error_response(error)
