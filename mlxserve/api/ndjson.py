"""Newline-delimited JSON: how a stream of objects goes over the wire and how it ends."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

# Proxies that collect what passes through them would turn a stream into a wait.
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}

# JSON may have them as they are, and clients that split text at every end of a line that Unicode knows, as httpx does,
# would cut an object in two.
_LINE_ENDS = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}


def line(content: dict[str, Any]) -> bytes:
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(_LINE_ENDS).encode() + b"\n"


class LineStream(StreamingResponse):
    """A stream of ready-made lines, each sent as it comes. It ends when the client goes away.

    `on_close` is called when the response is over, however it ended, and also when its first line was never asked for.
    """

    def __init__(self, lines: AsyncIterator[bytes], *, on_close: Callable[[], None]) -> None:
        super().__init__(lines, media_type="application/x-ndjson", headers=HEADERS)
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()
