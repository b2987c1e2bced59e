"""A clock that tests put forward, so that a delay is exact and costs nothing."""

import time

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
