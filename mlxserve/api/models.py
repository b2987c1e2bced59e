"""The models, at paths that two dialects share: Anthropic's clients say which version of its API they speak."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.anthropic.routes import AnthropicRoutes
from mlxserve.api.openai.routes import OpenAIRoutes

Endpoint = Callable[[Request], Awaitable[Response]]


def model_routes(openai: OpenAIRoutes, anthropic: AnthropicRoutes) -> list[Route]:
    """To be put before the dialects' own."""
    return [
        Route("/v1/models", _by_version(openai.list_models, anthropic.list_models)),
        Route("/v1/models/{name:path}", _by_version(openai.get_model, anthropic.get_model)),
    ]


def _by_version(openai: Endpoint, anthropic: Endpoint) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        return await (anthropic if "anthropic-version" in request.headers else openai)(request)

    return endpoint
