"""One streamed completion over HTTP, timed where its bytes arrive.

Raw asyncio streams and no HTTP library: beside a server that has all cores busy, every millisecond of the client counts
against it. While a stream runs, its events are only stamped and kept; they are parsed when it is over.
"""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from mlxserve.errors import TargetError

HOST = "127.0.0.1"
REQUEST_TIMEOUT = 900.0
"""Seconds until a stream that has not ended counts as hung."""
MAX_ERROR_CHARACTERS = 1000


@dataclass(frozen=True, slots=True)
class Target:
    """A running server, and what it needs to be told with every request."""

    port: int
    model: str
    fields: dict[str, Any] = field(default_factory=dict)
    host: str = HOST
    base: str = ""
    """What stands before `/v1` in its paths."""
    api_key: str | None = field(default=None, repr=False)
    is_tls: bool = False
    has_completions: bool = True
    """Whether it answers /v1/completions; where not, a text goes as the only message of a chat."""

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.is_tls else ''}://{host}:{self.port}{self.base}"


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
    """Tokens generated, by the server's own count; 0 for a stream that was cut off, or a server that does not tell."""
    num_reasoning_tokens: int = 0
    """Of these, the thoughts; 0 also where the server does not tell."""
    finish_reason: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds from sending, connecting included, to the first text."""
        return self.chunk_times[0] - self.sent

    @property
    def tpot(self) -> float:
        """Mean seconds per token after the first one."""
        return (self.chunk_times[-1] - self.chunk_times[0]) / max(self.num_tokens - 1, 1)

    @property
    def e2e(self) -> float:
        """Seconds from sending to the last text."""
        return self.chunk_times[-1] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring chunks, as a reader sees them: a chunk of three tokens is one gap, not three."""
        return [after - before for before, after in pairwise(self.chunk_times)]


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that is no stream."""

    status: int
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes

    def json(self) -> Any:
        """The body; None where it is no JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")[:MAX_ERROR_CHARACTERS]


async def complete(target: Target, prompt: str, max_tokens: int) -> Answer:
    """Stream one completion of a text, greedily, to its end.

    Raises:
        TargetError: see the class.
    """
    stream = start()
    await run_completion(stream, target, prompt, max_tokens)
    return parse(stream)


async def chat(target: Target, messages: list[dict[str, str]], max_tokens: int) -> Answer:
    """Stream the next answer of a chat, greedily, to its end.

    Raises:
        TargetError: see the class.
    """
    stream = start()
    await _run(stream, target, "/v1/chat/completions", {"messages": messages, "max_tokens": max_tokens})
    return parse(stream)


async def run_completion(stream: Stream, target: Target, prompt: str, max_tokens: int) -> None:
    """complete() into a stream that can be looked at meanwhile. Cancelling closes the connection."""
    if target.has_completions:
        await _run(stream, target, "/v1/completions", {"prompt": prompt, "max_tokens": max_tokens})
    else:
        messages = [{"role": "user", "content": prompt}]
        await _run(stream, target, "/v1/chat/completions", {"messages": messages, "max_tokens": max_tokens})


def start() -> Stream:
    return Stream(sent=asyncio.get_running_loop().time())


async def request(target: Target, method: str, path: str, content: dict[str, Any] | None = None) -> Reply:
    """One request whose answer is read whole.

    Raises:
        OSError: nobody listens there, or the connection broke.
        EOFError: it ended early.
        ValueError: what came is no HTTP.
    """
    async with _exchange(target, method, path, content) as (status, headers, data):
        return Reply(status, headers, b"".join([part async for part in data]))


def parse(stream: Stream) -> Answer:
    """What a stream said. Of one that was cut off, what it had said by then.

    Raises:
        TargetError: it carries an error, no text at all, or something that is no event of a completion.
    """
    times: list[float] = []
    texts: list[str] = []
    usage: dict[str, Any] = {}
    finish_reason: str | None = None
    for time, data in stream.events:
        try:
            event = json.loads(data)
            if "error" in event:
                raise TargetError(f"error inside a stream: {event['error']}")
            usage = event.get("usage") or usage
            choices = event.get("choices") or ()
            text = "".join(map(_text, choices))
            finish_reason = next((one["finish_reason"] for one in choices if one.get("finish_reason")), finish_reason)
        except (ValueError, TypeError, AttributeError) as error:
            shown = data.decode(errors="replace")[:MAX_ERROR_CHARACTERS]
            raise TargetError(f"a stream has an event that is none of a completion: {shown}") from error
        if text:
            times.append(time)
            texts.append(text)
    if not times:
        raise TargetError("a stream without any text")
    return Answer(
        sent=stream.sent,
        chunk_times=tuple(times),
        text="".join(texts),
        num_prompt_tokens=usage.get("prompt_tokens") or 0,
        num_cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        num_tokens=usage.get("completion_tokens") or 0,
        num_reasoning_tokens=(usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0,
        finish_reason=finish_reason,
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
        async with asyncio.timeout(REQUEST_TIMEOUT), _exchange(target, "POST", path, body) as (status, headers, data):
            if status != 200:
                text = b"".join([part async for part in data]).decode(errors="replace")
                raise TargetError(f"{path} answered {status}: {text[:MAX_ERROR_CHARACTERS]}", status=status)
            if headers.get("content-type", "").startswith("application/json"):
                raise TargetError(f"{path} answered with one JSON object instead of a stream")
            await _record(stream, data)
    except (OSError, EOFError, TimeoutError, ValueError) as error:
        raise TargetError(f"{path}: stream broken after {len(stream.events)} events: {error!r}") from error


def _text(choice: dict[str, Any]) -> str:
    """The text of a chunk: to a reader thoughts are text like any other. Servers name them one way, or both."""
    delta = choice.get("delta") or {}
    thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
    return choice.get("text") or thought + (delta.get("content") or "")


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
    target: Target, method: str, path: str, content: dict[str, Any] | None
) -> AsyncIterator[tuple[int, dict[str, str], AsyncIterator[bytes]]]:
    """One request on a connection of its own -> status, headers, and the parts of the body as they arrive."""
    tls = ssl.create_default_context() if target.is_tls else None
    reader, writer = await asyncio.open_connection(target.host, target.port, ssl=tls)
    try:
        body = b"" if content is None else json.dumps(content).encode()
        host = f"[{target.host}]" if ":" in target.host else target.host
        head = [f"{method} {target.base}{path} HTTP/1.1", f"Host: {host}:{target.port}", "Connection: close"]
        if target.api_key:
            head.append(f"Authorization: Bearer {target.api_key}")
        if body:
            head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        writer.write("\r\n".join([*head, "", ""]).encode() + body)
        await writer.drain()
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        version, status, *_ = [*first.split(), "", ""]
        if not version.startswith("HTTP/1.") or not status.isdecimal():
            raise ValueError(f"no HTTP: {first[:100]!r}")
        pairs = (line.split(":", 1) for line in lines if ":" in line)
        headers = {name.strip().lower(): value.strip() for name, value in pairs}
        yield int(status), headers, _body(reader, headers)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return _chunks(reader)
    return _until_end(reader)


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """HTTP/1.1's chunked transfer coding (RFC 9112, section 7.1); extensions and trailers are of no interest."""
    while size := int((await reader.readline()).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _until_end(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while part := await reader.read(65536):
        yield part
