"""The outermost layer around every request: its id, and an answer where everything else failed."""

import logging
import secrets

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxserve.api.openai.errors import error_response

logger = logging.getLogger(__name__)


class RequestScope:
    """ASGI middleware: `request.state.request_id`, the x-request-id header, and 500 for what nobody caught."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Endpoints may put a better id in its place.
        state = scope.setdefault("state", {})
        state["request_id"] = f"req-{secrets.token_hex(12)}"
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["x-request-id"] = state["request_id"]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            logger.exception("%s %s failed (%s)", scope["method"], scope["path"], state["request_id"])
            if started:
                raise
            await error_response(error)(scope, receive, send_with_id)
