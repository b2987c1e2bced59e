"""The client's end of a request: its body as it comes in, and whether it is still there."""

import asyncio
from collections.abc import Collection, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

T = TypeVar("T")


JSON = ("application/json",)


async def read_json_body(request: Request, max_bytes: int, media_types: Collection[str] = JSON) -> bytes:
    """The body of a JSON request, not parsed yet.

    `media_types`: what it may be said to be, in lower case.

    Raises:
        HTTPException: 413 beyond `max_bytes`, without reading the rest; 415 for what is said to be another type.
        ClientDisconnect: the client went away.
    """
    media_type, _, parameters = request.headers.get("content-type", "application/json").partition(";")
    charset = parameters.strip().lower().removeprefix("charset=").strip('"')
    if media_type.strip().lower() not in media_types or charset not in ("", "utf-8", "utf8"):
        raise HTTPException(415, "Send JSON in UTF-8, with the header 'Content-Type: application/json'.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HTTPException(415, "Compressed bodies are not supported; send it without Content-Encoding.")
    too_large = HTTPException(
        413,
        f"The body is larger than the {max_bytes} bytes this server takes (setting max_body_bytes).",
        headers={"connection": "close"},
    )
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise too_large
    body = bytearray()
    async with aclosing(request.stream()) as stream:
        async for chunk in stream:
            body += chunk
            if len(body) > max_bytes:
                raise too_large
    return bytes(body)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, whose request's body has been read, and cancel it when the client goes away.

    Raises:
        ClientDisconnect: it went away; `work` has ended by then.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
