"""A streaming server with known delays, and an event loop whose clock only moves when everybody waits."""

import asyncio
import contextlib
import json
import random
import selectors
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

WIRE_SECONDS = 0.001
"""Of real time, that the system may take to carry bytes over the loopback interface."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """With nothing on the wire and nobody ready, time jumps to the next timer: delays are exact and cost nothing."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        self._now += seconds


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(WIRE_SECONDS if timeout != 0 else 0)
        if not events and timeout:
            self._loop.jump(timeout)
        return events


@dataclass
class Plan:
    """What a stream does: pairs of seconds to wait and what to write then, asked for one by one."""

    steps: Iterable[tuple[float, bytes]]
    status: int = 200
    is_chunked: bool = True

    @classmethod
    def of_tokens(cls, delays: list[float], *, prompt_tokens: int = 7, is_chunked: bool = True) -> "Plan":
        """One token a chunk, `delays` apart; the first one is the TTFT."""
        steps = [(0.0, b": keep-alive\n\n"), *((delay, chunk(f"word{index} ")) for index, delay in enumerate(delays))]
        return cls([*steps, (0.0, end(prompt_tokens, len(delays)))], is_chunked=is_chunked)


@dataclass
class StandinServer:
    """Answers every POST with the plan that `choose` makes of its body, and every GET with that of its path."""

    choose: Callable[[dict[str, Any]], Plan]
    pages: dict[str, "Plan"] = field(default_factory=dict)
    port: int = 0
    paths: list[str] = field(default_factory=list)
    """Of all requests that had a body, in order of their arrival."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    stamps: list[list[float]] = field(default_factory=list)
    """For each request, in order of their arrival, when its steps were written."""
    num_cut_off: int = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with await asyncio.start_server(self._answer, "127.0.0.1", 0) as server:
            self.port = server.sockets[0].getsockname()[1]
            yield

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split(" ", 2)
        stamps: list[float] = []
        if method == "POST":
            lines = head.lower().splitlines()
            length = int(next(line for line in lines if line.startswith("content-length")).split(":")[1])
            self.bodies.append(json.loads(await reader.readexactly(length)))
            self.paths.append(path)
            self.stamps.append(stamps)
            plan = self.choose(self.bodies[-1])
        else:
            plan = self.pages.get(path, Plan([], status=404))
        coding = "Transfer-Encoding: chunked\r\n" if plan.is_chunked else ""
        writer.write(f"HTTP/1.1 {plan.status} Whatever\r\nContent-Type: text/event-stream\r\n{coding}\r\n".encode())
        try:
            for delay, data in plan.steps:
                await asyncio.sleep(delay)
                if reader.at_eof():
                    self.num_cut_off += 1
                    return
                stamps.append(asyncio.get_running_loop().time())
                writer.write(b"%x\r\n%b\r\n" % (len(data), data) if plan.is_chunked else data)
            writer.write(b"0\r\n\r\n" if plan.is_chunked else b"")
        finally:
            writer.close()


def page(content: Any, status: int = 200) -> Plan:
    """An answer that is no stream."""
    return Plan([(0.0, json.dumps(content).encode())], status=status)


def models(*cards: dict[str, Any]) -> dict[str, Plan]:
    """The pages of a server that has these models."""
    return {"/v1/models": page({"object": "list", "data": list(cards)}), "/health": page({"status": "ok"})}


def chunk(text: str) -> bytes:
    """An event that fits both kinds of completion."""
    return _event({"choices": [{"index": 0, "text": text, "delta": {"content": text}, "finish_reason": None}]})


def thought(text: str, *names: str, content: str | None = None) -> bytes:
    """A chunk of a chat that is reasoning, in the fields of these names, and perhaps the beginning of the answer."""
    delta = {"content": content, **dict.fromkeys(names, text)}
    return _event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})


def end(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0, reasoning_tokens: int | None = None
) -> bytes:
    """`reasoning_tokens`: None for a server that does not tell them."""
    usage: dict[str, Any] = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    usage |= {"prompt_tokens_details": {"cached_tokens": cached_tokens}}
    if reasoning_tokens is not None:
        usage |= {"completion_tokens_details": {"reasoning_tokens": reasoning_tokens}}
    last = {"choices": [{"index": 0, "text": "", "delta": {}, "finish_reason": "length"}]}
    return _event(last) + _event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"


def error(message: str) -> bytes:
    return _event({"error": {"message": message}})


def random_delays(source: random.Random, count: int) -> list[float]:
    """A TTFT of a second or so, then gaps of mostly 50 ms with some of up to half a second."""
    gaps = [source.uniform(0.04, 0.06) if source.random() < 0.9 else source.uniform(0.1, 0.5) for _ in range(count - 1)]
    return [source.uniform(0.5, 1.5), *gaps]


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"
