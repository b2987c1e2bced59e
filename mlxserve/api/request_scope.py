"""The outermost layer around every request: its id, and an answer where everything else failed."""

import logging
import secrets
import time
from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxserve.api.error_responses import error_response

logger = logging.getLogger(__name__)


class RequestScope:
    """ASGI middleware: `request.state.request_id`, the x-request-id header, and 500 for what nobody caught.

    `request.state.received` is time.monotonic() of its headers; `on_sent`, if an endpoint sets it there, is called when
    the response was written out, or will not be."""

    def __init__(self, app: ASGIApp, on_status: Callable[[int], None]) -> None:
        """`on_status` is told the status of each response."""
        self._app = app
        self._on_status = on_status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Endpoints may put a better id in its place.
        state = scope.setdefault("state", {})
        state["request_id"] = f"req-{secrets.token_hex(12)}"
        state["received"] = time.monotonic()
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._on_status(message["status"])
                MutableHeaders(scope=message)["x-request-id"] = state["request_id"]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            logger.exception("%s %s failed (%s)", scope["method"], scope["path"], state["request_id"])
            if started:
                raise
            await error_response(error, scope)(scope, receive, send_with_id)
        finally:
            if (on_sent := state.get("on_sent")) is not None:
                on_sent()
