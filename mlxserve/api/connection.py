"""The client's end of a request: its body as it comes in, and whether it is still there."""

import asyncio
from collections.abc import Collection, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from mlxserve.errors import EngineDead

T = TypeVar("T")


JSON = ("application/json",)
BODY_PAUSE_SECONDS = 60.0


class Bodies:
    """The bodies that are on their way in. One that stops halfway holds up neither its connection nor a stop."""

    def __init__(self) -> None:
        self._deadlines: set[asyncio.Timeout] = set()
        self._is_stopping = False

    def stop(self) -> None:
        """Refuse those that are not here yet, now and later."""
        self._is_stopping = True
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(asyncio.get_running_loop().time())

    async def read(self, request: Request, max_bytes: int) -> bytes:
        """One of them. Raises as read_json_body()."""
        body = bytearray()
        clock = asyncio.get_running_loop().time
        deadline = asyncio.timeout(self._patience)
        try:
            async with deadline, aclosing(request.stream()) as stream:
                self._deadlines.add(deadline)
                async for chunk in stream:
                    body += chunk
                    if len(body) > max_bytes:
                        raise _too_large(max_bytes)
                    deadline.reschedule(clock() + self._patience)
        except TimeoutError:
            if self._is_stopping:
                raise EngineDead("the server is stopping") from None
            raise HTTPException(
                408,
                f"Nothing of the body came for {BODY_PAUSE_SECONDS:g} seconds; send the request again.",
                headers={"connection": "close"},
            ) from None
        finally:
            self._deadlines.discard(deadline)
        return bytes(body)

    @property
    def _patience(self) -> float:
        return 0.0 if self._is_stopping else BODY_PAUSE_SECONDS


async def read_json_body(request: Request, max_bytes: int, media_types: Collection[str] = JSON) -> bytes:
    """The body of a JSON request, not parsed yet.

    `media_types`: what it may be said to be, in lower case.

    Raises:
        HTTPException: 413 beyond `max_bytes`, without reading the rest; 415 for what is said to be another type; 408
            if nothing of it came for BODY_PAUSE_SECONDS.
        EngineDead: the server stops before it is there.
        ClientDisconnect: the client went away.
    """
    media_type, _, parameters = request.headers.get("content-type", "application/json").partition(";")
    charset = parameters.strip().lower().removeprefix("charset=").strip('"')
    if media_type.strip().lower() not in media_types or charset not in ("", "utf-8", "utf8"):
        raise HTTPException(415, "Send JSON in UTF-8, with the header 'Content-Type: application/json'.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HTTPException(415, "Compressed bodies are not supported; send it without Content-Encoding.")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    bodies: Bodies = request.app.state.bodies
    return await bodies.read(request, max_bytes)


def _too_large(max_bytes: int) -> HTTPException:
    return HTTPException(
        413,
        f"The body is larger than the {max_bytes} bytes this server takes (setting max_body_bytes).",
        headers={"connection": "close"},
    )


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
