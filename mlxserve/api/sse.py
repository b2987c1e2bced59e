"""Server-sent events: how a stream goes over the wire and how it ends."""

import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import AppStatus
from starlette.types import Receive, Scope, Send

KEEP_ALIVE_SECONDS = 15.0

DONE = b"data: [DONE]\n\n"
WAITING = b": keep-alive\n\n"

COMMENT = ServerSentEvent(comment="keep-alive", sep="\n")

# sse-starlette would cut every stream at the first Ctrl-C; the server gives running requests time to finish instead.
AppStatus.enable_automatic_graceful_drain = False

# Its debug lines hold whole chunks, and answers are nobody's business.
logging.getLogger("sse_starlette").setLevel(logging.INFO)


def event(content: dict[str, Any], name: str | None = None) -> bytes:
    head = "" if name is None else f"event: {name}\n"
    data = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"{head}data: {data}\n\n".encode()


class EventStream(EventSourceResponse):
    """A stream of ready-made events, with `keep_alive` every KEEP_ALIVE_SECONDS to keep the connection alive.

    `on_close` is called when the response is over, however it ended, and also when its first event was never asked for.
    """

    def __init__(
        self, events: AsyncIterator[bytes], *, on_close: Callable[[], None], keep_alive: ServerSentEvent = COMMENT
    ) -> None:
        super().__init__(
            events,
            ping=KEEP_ALIVE_SECONDS,
            ping_message_factory=lambda: keep_alive,
        )
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()
