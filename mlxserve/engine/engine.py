"""One loaded model's step loop. Everything here runs on the engine thread."""

import logging
import time
from collections.abc import Callable
from typing import Protocol

from mlxserve.core.request import FinishReason, Request
from mlxserve.core.stats import EngineStats
from mlxserve.core.step import RequestOutput, ScheduledStep, StepResult
from mlxserve.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """What the engine needs of a model: compute a step. The block cache behind it belongs to the runner."""

    def run(self, step: ScheduledStep) -> StepResult: ...

    def reset(self) -> None:
        """Forget every sequence and every block's contents; weights stay."""
        ...


class Engine:
    """Schedule, run, update: the three lines a request's tokens come from.

    A step that raises leaves scheduler and cache in an unknown state; the caller must then `rebuild()`.
    """

    def __init__(self, runner: Runner, make_scheduler: Callable[[], Scheduler]) -> None:
        self._runner = runner
        self._make_scheduler = make_scheduler
        self._scheduler = make_scheduler()

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def add(self, request: Request) -> None:
        """Put a request into the waiting queue.

        Raises:
            QueueFull, ContextLengthExceeded: it is not taken in; nothing changed.
        """
        self._scheduler.add(request)

    def abort(self, request_id: str, reason: FinishReason) -> None:
        """End a request in the next step, whatever state it is in; unknown ids are ended already."""
        self._scheduler.abort(request_id, reason)

    def step(self) -> list[RequestOutput]:
        """Compute one step and return what it did to each request that got a token or ended."""
        step = self._scheduler.schedule(time.monotonic())
        if step is None:
            return self._scheduler.take_finished()
        result = self._runner.run(step)
        return self._scheduler.update(step, result, time.monotonic())

    def rebuild(self) -> None:
        """Start over with an empty cache and no requests, on the same weights."""
        self._runner.reset()
        self._scheduler = self._make_scheduler()

    def check_integrity(self) -> None:
        self._scheduler.check_integrity()

    def stats(self) -> EngineStats:
        return self._scheduler.stats()
