"""One streamed completion over HTTP, timed where its bytes arrive.

Raw asyncio streams and no HTTP library: beside a server that has all cores busy, every millisecond of the client counts
against it. While a stream runs, its events are only stamped and kept; they are parsed when it is over.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

HOST = "127.0.0.1"
REQUEST_TIMEOUT = 900.0
"""Seconds until a stream that has not ended counts as hung."""


class LoadError(Exception):
    """A server refused a request, broke a stream off or did not answer in time."""


@dataclass(frozen=True, slots=True)
class Target:
    """A running server, and what it needs to be told with every request."""

    port: int
    model: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Stream:
    """One streamed completion: when it was sent, and when each of its events arrived, by the event loop's clock.

    Events that arrive in one read have the same time.
    """

    sent: float
    events: list[tuple[float, bytes]] = field(default_factory=list)
    """Arrival in seconds, and the event's data."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A stream, parsed. Chunks are the events that carry text; a chunk may be several tokens, or part of one."""

    sent: float
    chunk_times: tuple[float, ...]
    text: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int
    """Tokens generated, by the server's own count; 0 for a stream that was cut off."""

    @property
    def ttft(self) -> float:
        """Seconds from sending, connecting included, to the first text."""
        return self.chunk_times[0] - self.sent

    @property
    def tpot(self) -> float:
        """Mean seconds per token after the first one."""
        return (self.chunk_times[-1] - self.chunk_times[0]) / max(self.num_tokens - 1, 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring chunks, as a reader sees them: a chunk of three tokens is one gap, not three."""
        return [after - before for before, after in pairwise(self.chunk_times)]


async def complete(target: Target, prompt: str, max_tokens: int) -> Answer:
    """Stream one completion of a text, greedily, to its end.

    Raises:
        LoadError: see the class.
    """
    stream = start()
    await run_completion(stream, target, prompt, max_tokens)
    return parse(stream)


async def chat(target: Target, messages: list[dict[str, str]], max_tokens: int) -> Answer:
    """Stream the next answer of a chat, greedily, to its end.

    Raises:
        LoadError: see the class.
    """
    stream = start()
    await _run(stream, target, "/v1/chat/completions", {"messages": messages, "max_tokens": max_tokens})
    return parse(stream)


async def run_completion(stream: Stream, target: Target, prompt: str, max_tokens: int) -> None:
    """complete() into a stream that can be looked at meanwhile. Cancelling closes the connection."""
    await _run(stream, target, "/v1/completions", {"prompt": prompt, "max_tokens": max_tokens})


def start() -> Stream:
    return Stream(sent=asyncio.get_running_loop().time())


async def get(port: int, path: str) -> tuple[int, bytes]:
    """Status and body of a GET request.

    Raises:
        OSError: nobody listens there, or the connection broke.
    """
    async with _exchange(port, "GET", path, None) as (status, data):
        return status, b"".join([part async for part in data])


def parse(stream: Stream) -> Answer:
    """What a stream said. Of one that was cut off, what it had said by then.

    Raises:
        LoadError: it carries an error, or no text at all.
    """
    times: list[float] = []
    texts: list[str] = []
    usage: dict[str, Any] = {}
    for time, data in stream.events:
        event = json.loads(data)
        if "error" in event:
            raise LoadError(f"error inside a stream: {event['error']}")
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            if text := _text(choice):
                times.append(time)
                texts.append(text)
    if not times:
        raise LoadError("a stream without any text")
    return Answer(
        sent=stream.sent,
        chunk_times=tuple(times),
        text="".join(texts),
        num_prompt_tokens=usage.get("prompt_tokens", 0),
        num_cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        num_tokens=usage.get("completion_tokens", 0),
    )


async def _run(stream: Stream, target: Target, path: str, content: dict[str, Any]) -> None:
    body = {
        "model": target.model,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **content,
        **target.fields,
    }
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT), _exchange(target.port, "POST", path, body) as (status, data):
            if status != 200:
                text = b"".join([part async for part in data]).decode(errors="replace")
                raise LoadError(f"{path} answered {status}: {text[:1000]}")
            await _record(stream, data)
    except (OSError, EOFError, TimeoutError, ValueError) as error:
        raise LoadError(f"{path}: stream broken after {len(stream.events)} events: {error!r}") from error


def _text(choice: dict[str, Any]) -> str:
    """The text of a chunk; for a reader thoughts are tokens like any other, and servers name them differently."""
    delta = choice.get("delta") or {}
    names = ("content", "reasoning_content", "reasoning")
    return choice.get("text") or next((delta[name] for name in names if delta.get(name)), "")


async def _record(stream: Stream, data: AsyncIterator[bytes]) -> None:
    now = asyncio.get_running_loop().time
    rest = b""
    async for part in data:
        arrived = now()
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue  # a comment that keeps the connection alive, or the empty line after an event
            content = line.removeprefix(b"data:").strip()
            if content == b"[DONE]":
                return
            stream.events.append((arrived, content))
    raise EOFError("the connection ended before the stream did")


@contextlib.asynccontextmanager
async def _exchange(
    port: int, method: str, path: str, content: dict[str, Any] | None
) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
    """One request on a connection of its own -> status, and the parts of the body as they arrive."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        body = b"" if content is None else json.dumps(content).encode()
        head = [f"{method} {path} HTTP/1.1", f"Host: {HOST}:{port}", "Connection: close"]
        if body:
            head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        writer.write("\r\n".join([*head, "", ""]).encode() + body)
        await writer.drain()
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
        is_chunked = any(line.startswith("transfer-encoding:") and "chunked" in line for line in lines)
        yield int(lines[0].split()[1]), _chunks(reader) if is_chunked else _until_end(reader)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """HTTP/1.1's chunked transfer coding (RFC 9112, section 7.1); extensions and trailers are of no interest."""
    while size := int((await reader.readline()).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _until_end(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while part := await reader.read(65536):
        yield part
