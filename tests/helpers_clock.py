"""Clocks that tests put forward, so that a delay is exact and costs nothing."""

import asyncio
import functools
import selectors
import time
from collections.abc import Awaitable, Callable
from typing import Any

DELAY = 1000.0
"""Seconds a stage is slowed by, on the test's clock; what really passes is far less."""


class Clock:
    """Stands in for the module `time`: the real clock, and what the test puts on top."""

    def __init__(self) -> None:
        self._extra = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._extra

    def pass_delay(self) -> None:
        self._extra += DELAY


class SimulatedLoop(asyncio.SelectorEventLoop):
    """With nobody ready, time jumps to the next timer. Not for threads or sockets: nobody waits for them."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        self._now += seconds


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("deadlock: everybody waits for somebody else")
        self._loop.jump(max(timeout, 0.0))
        return super().select(0)


def simulated(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test to its end in simulated time."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run
