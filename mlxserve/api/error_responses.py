"""Errors of any path, in the shape of the dialect that the path belongs to."""

from starlette.datastructures import Headers
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
    if _is_within(path, "/v1/messages") or (
        # Two dialects share these: api/models.py.
        _is_within(path, "/v1/models") and "anthropic-version" in Headers(scope=scope)
    ):
        return anthropic.error_response(error, scope["state"]["request_id"])
    return openai.error_response(error)


def _is_within(path: str, base: str) -> bool:
    return path == base or path.startswith(f"{base}/")
