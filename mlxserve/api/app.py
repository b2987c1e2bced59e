"""The Starlette app: all routes, and what stands around them."""

from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlxserve.api.anthropic.routes import AnthropicRoutes
from mlxserve.api.connection import Bodies
from mlxserve.api.debug import DebugRoutes
from mlxserve.api.error_responses import error_response
from mlxserve.api.failures import log_failure
from mlxserve.api.metrics import Metrics
from mlxserve.api.models import model_routes
from mlxserve.api.ollama.routes import OllamaRoutes
from mlxserve.api.openai.responses.routes import ResponseRoutes
from mlxserve.api.openai.routes import OpenAIRoutes
from mlxserve.api.openai.text_routes import TextRoutes
from mlxserve.api.page.routes import PageRoutes, read_files
from mlxserve.api.request_scope import RequestScope
from mlxserve.api.security import Security, is_loopback
from mlxserve.config import ServerConfig
from mlxserve.errors import MlxserveError

if TYPE_CHECKING:
    from mlxserve.engine.model_host import ModelHost


def create_app(host: "ModelHost", config: ServerConfig, metrics: Metrics) -> Starlette:
    """The app that serves `host`, which the caller starts and closes on the same event loop.

    `metrics` should be the host's observer; it belongs to one app. `app.state.bodies.stop()` is for whoever stops the
    server.
    """
    metrics.watch(host.stats, host.loaded)

    async def health(request: Request) -> Response:
        status = host.health()
        content = {"status": "ok" if status.ok else "error", "detail": status.detail}
        return JSONResponse(content, status_code=200 if status.ok else 503)

    async def scrape(request: Request) -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    async def root(request: Request) -> Response:
        """The page for browsers, and for Ollama's clients what they know it by."""
        answer = page.get_file if "text/html" in request.headers.get("accept", "") else ollama.running
        response = await answer(request)
        response.headers.add_vary_header("Accept")
        return response

    openai = OpenAIRoutes(host, max_body_bytes=config.max_body_bytes)
    ollama = OllamaRoutes(
        host,
        max_body_bytes=config.max_body_bytes,
        allow_pull=is_loopback(config.host) if config.allow_pull is None else config.allow_pull,
        model_dirs=[Path(folder) for folder in config.model_dirs],
    )
    responses = ResponseRoutes(host, max_body_bytes=config.max_body_bytes)
    anthropic = AnthropicRoutes(host, max_body_bytes=config.max_body_bytes)
    texts = TextRoutes(host, max_body_bytes=config.max_body_bytes)
    debug = DebugRoutes(host)
    page = PageRoutes(read_files())
    app = Starlette(
        routes=[
            Route("/health", health),
            Route("/metrics", scrape),
            *debug.routes(),
            *model_routes(openai, anthropic),
            *openai.routes(),
            *ollama.routes(),
            Route("/", root),
            *responses.routes(),
            *anthropic.routes(),
            *texts.routes(),
            *page.routes(),
        ],
        middleware=[
            Middleware(RequestScope, on_status=metrics.http_response),
            Middleware(Security, config=config, paths_without_key={"/health", *page.paths}),
        ],
        exception_handlers={
            HTTPException: _answer_error,
            MlxserveError: _answer_error,
            ClientDisconnect: _answer_nobody,
        },
    )
    app.state.bodies = Bodies()
    # A redirect would send the client to whatever its Host header says.
    app.router.redirect_slashes = False
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        detail = f"{request.method} {request.url.path} is not part of this API."
        error = HTTPException(error.status_code, detail, headers=error.headers)
    log_failure(error, f"{request.method} {request.url.path} ({request.state.request_id})")
    return error_response(error, request.scope)


async def _answer_nobody(request: Request, error: Exception) -> Response:
    """The client is gone; the status is nginx's for that, for whoever looks on from outside."""
    return Response(status_code=499)
