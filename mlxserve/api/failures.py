"""What went wrong with a request: the one place that decides its HTTP status and code. Dialects give it their shape.

The kinds are OpenAI's.

| status | kind                  | code                                                                       |
|--------|-----------------------|----------------------------------------------------------------------------|
| 400    | invalid_request_error | invalid_json, invalid_type, invalid_value, unknown_parameter,              |
|        |                       | missing_required_parameter, unsupported_parameter, context_length_exceeded,|
|        |                       | unusable_repository                                                        |
| 401    | authentication_error  | invalid_api_key                                                            |
| 403    | invalid_request_error | forbidden, access_denied                                                   |
| 404    | not_found_error       | model_not_found, repository_not_found, request_not_found, unknown_url      |
| 405    | invalid_request_error | method_not_allowed                                                         |
| 408    | invalid_request_error | body_timeout                                                               |
| 409    | invalid_request_error | model_in_use                                                               |
| 413    | invalid_request_error | request_too_large                                                          |
| 415    | invalid_request_error | unsupported_media_type                                                     |
| 429    | rate_limit_error      | queue_full, with Retry-After                                               |
| 500    | server_error          | model_load_failed, engine_error, config_error, internal_error              |
| 503    | server_error          | engine_dead, download_failed, no_capacity, cancelled                       |
| 504    | server_error          | timeout                                                                    |
"""

import logging
import math
from dataclasses import dataclass, field

from starlette.exceptions import HTTPException

from mlxserve.errors import (
    AccessDenied,
    CapacityError,
    ConfigError,
    DownloadError,
    EngineDead,
    EngineError,
    ModelError,
    ModelInUse,
    ModelLoadError,
    ModelNotFound,
    QueueFull,
    RepositoryNotFound,
    RequestCancelled,
    RequestError,
    RequestNotFound,
    RequestTimeout,
    UnusableRepository,
)

logger = logging.getLogger(__name__)

_INTERNAL = (500, "server_error", "internal_error")

_KINDS: dict[type, tuple[int, str, str]] = {
    RequestError: (400, "invalid_request_error", "invalid_value"),
    RequestNotFound: (404, "not_found_error", "request_not_found"),
    ModelNotFound: (404, "not_found_error", "model_not_found"),
    ModelLoadError: (500, "server_error", "model_load_failed"),
    ModelInUse: (409, "invalid_request_error", "model_in_use"),
    DownloadError: (503, "server_error", "download_failed"),
    RepositoryNotFound: (404, "not_found_error", "repository_not_found"),
    AccessDenied: (403, "invalid_request_error", "access_denied"),
    UnusableRepository: (400, "invalid_request_error", "unusable_repository"),
    ConfigError: (500, "server_error", "config_error"),
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
    408: ("invalid_request_error", "body_timeout"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "unsupported_media_type"),
}


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as any dialect tells it."""

    status: int
    message: str
    kind: str
    param: str | None = None
    """The field at fault in the wire format's own name."""
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)


def describe(error: Exception) -> Failure:
    """What an unexpected error says stays in the server's log."""
    message = str(error)
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):
        fallback = "invalid_request_error" if error.status_code < 500 else "server_error"
        kind, code = _HTTP_KINDS.get(error.status_code, (fallback, None))
        return Failure(error.status_code, error.detail, kind, code=code, headers=dict(error.headers or {}))
    known = _kind(error)
    if known is None:
        message = "The server failed while answering this request; its log says more."
    status, kind, code = known or _INTERNAL
    if isinstance(error, QueueFull):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if isinstance(error, RequestError):
        return Failure(status, message, kind, error.param, error.code or code, headers)
    return Failure(status, message, kind, "model" if isinstance(error, ModelError) else None, code, headers)


def log_failure(error: Exception, request: str) -> None:
    """Write down what is no fault of the client's: a wrong setting, and with its traceback what nobody expected.

    To be called once for each error that a client is told of; `request`: which one it was.
    """
    if isinstance(error, ConfigError):
        logger.error("%s: %s", request, error)
    elif not isinstance(error, HTTPException) and _kind(error) is None:
        logger.error("%s failed", request, exc_info=error)


def _kind(error: Exception) -> tuple[int, str, str] | None:
    return next((_KINDS[parent] for parent in type(error).__mro__ if parent in _KINDS), None)
