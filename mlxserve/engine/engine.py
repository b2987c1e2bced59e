"""One loaded model's step loop. Everything here runs on the engine thread."""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from mlxserve.core.constraint import MaskSource, TokenMasks
from mlxserve.core.request import FinishReason, Request
from mlxserve.core.stats import ChunkRecord, EngineStats, StepRecord
from mlxserve.core.step import RequestOutput, ScheduledStep, StepResult
from mlxserve.scheduler.scheduler import Scheduler
from mlxserve.text.token_constraint import compute_masks

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_STEP_RECORDS = 2048
"""Some minutes of decoding."""


class Runner(Protocol):
    """What the engine needs of a model: compute a step. The block cache behind it belongs to the runner."""

    def run(self, step: ScheduledStep, masks: MaskSource | None = None) -> StepResult:
        """`masks` is called while the logits of constrained rows are computed, and needed if there are any."""
        ...

    @property
    def can_embed(self) -> bool:
        """Whether a step's chunks may have pooling."""
        ...

    def reset(self) -> None:
        """Forget every sequence and every block's contents; weights stay."""
        ...


class AheadRunner(Runner, Protocol):
    """A runner that can be given a step before it is asked for the result of the one before."""

    def start(self, step: ScheduledStep, after: Any, masks: MaskSource) -> Any:
        """Give a step to the device; `after` is what start() returned for the step before it, None if there is none."""
        ...

    def finish(self, started: Any) -> StepResult:
        """Wait for a started step."""
        ...


class StepFailed(Exception):
    """The runner raised: the cause says what."""


class Engine:
    """Schedule, run, update: the three lines a request's tokens come from.

    After StepFailed, or any error that a method does not name, the cache is in an unknown state: rebuild() must follow.
    """

    def __init__(
        self, runner: Runner, make_scheduler: Callable[[], Scheduler], ahead_runner: AheadRunner | None = None
    ) -> None:
        """`ahead_runner`: the runner again, if steps are to be given to it one ahead of their results."""
        self._runner = runner
        self._ahead_runner = ahead_runner
        self._in_flight: tuple[ScheduledStep, Any] | None = None
        self._make_scheduler = make_scheduler
        self._scheduler = make_scheduler()
        self._num_failures_in_a_row = 0
        self.records: deque[StepRecord] = deque(maxlen=MAX_STEP_RECORDS)
        """The latest computed steps, oldest first. Another thread may copy it: list() of a deque is atomic."""

    @property
    def num_failures_in_a_row(self) -> int:
        """Rebuilds since the last step that was computed."""
        return self._num_failures_in_a_row

    @property
    def last_record(self) -> StepRecord | None:
        """Of the latest computed step."""
        return self.records[-1] if self.records else None

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def is_waiting(self) -> bool:
        """Whether step() has nothing to compute until the disk has news."""
        return self._scheduler.is_waiting

    @property
    def num_blocks(self) -> int:
        """KV blocks that exist now."""
        return self._scheduler.num_blocks

    @property
    def num_unsaved_blocks(self) -> int:
        """KV blocks that are to be written to disk; step() does so when nothing else is to be computed."""
        return self._scheduler.num_unsaved_blocks

    def add(self, request: Request) -> None:
        """Put a request into the waiting queue.

        Raises:
            QueueFull, ContextLengthExceeded: it is not taken in; nothing changed.
        """
        self._scheduler.add(request)

    def abort(self, request_id: str, reason: FinishReason) -> list[RequestOutput]:
        """End a request, whatever state it is in, and return its last output; unknown ids are ended already."""
        self._scheduler.abort(request_id, reason)
        return self._scheduler.take_finished()

    def step(self) -> list[RequestOutput]:
        """Compute one step and return what it did to each request that got a token or ended.

        Raises:
            StepFailed: computing it failed; only the requests that stood in it are lost.
        """
        if self._ahead_runner is not None:
            return self._step_ahead(self._ahead_runner)
        step = self._scheduler.schedule(time.monotonic())
        if step is None:
            return self._scheduler.take_finished()
        return self._update(step, _computed(self._runner.run, step, self._masks))

    def _step_ahead(self, runner: AheadRunner) -> list[RequestOutput]:
        """The same with the next step on the device before this one's result is looked at.

        While streams run and nothing else, scheduling, stop conditions and delivery of one step happen beside the
        computation of the next. Anything that needs the result first (a prompt, a lack of blocks) waits for it.
        """
        if self._in_flight is None:
            step = self._scheduler.schedule(time.monotonic())
            if step is None:
                return self._scheduler.take_finished()
            started = _computed(runner.start, step, None, self._masks)
        else:
            step, started = self._in_flight
            self._in_flight = None
        ahead = self._scheduler.schedule_ahead(step, time.monotonic())
        if ahead is not None:
            self._in_flight = ahead, _computed(runner.start, ahead, started, self._masks)
        return self._update(step, _computed(runner.finish, started))

    def _update(self, step: ScheduledStep, result: StepResult) -> list[RequestOutput]:
        self._num_failures_in_a_row = 0
        now = time.monotonic()
        forecast = self._scheduler.forecast(step)
        outputs = self._scheduler.update(step, result, now)
        stats = self._scheduler.stats()
        self.records.append(
            StepRecord(
                step_id=step.step_id,
                end=now,
                rows=tuple([row.request_id for row in step.decode]),
                chunks=tuple([ChunkRecord(each.request_id, each.start, len(each.token_ids)) for each in step.prefill]),
                released=step.released,
                num_draft_tokens=sum([row.num_drafts for row in step.decode]),
                budget=forecast.budget,
                predicted=forecast.seconds,
                measured=result.prefill_time + (result.decode_time or 0.0),
                num_running=stats.num_running,
                num_waiting=stats.num_waiting,
                num_blocks_used=stats.num_blocks_used,
                num_blocks_cached=stats.num_blocks_cached,
            )
        )
        return outputs

    def _masks(self, step: ScheduledStep, pending: Mapping[str, int]) -> TokenMasks:
        num_rows = sum(1 + len(row.draft_token_ids) for row in step.decode)
        return compute_masks(self._scheduler.constrained_rows(step, pending), num_rows)

    def rebuild(self, *, keep_requests: bool) -> list[RequestOutput]:
        """Start over with an empty cache, on the same weights.

        `keep_requests`, which only StepFailed allows: return the last outputs of the requests that stood in the failed
        step and go on with the others. Else every request is forgotten.
        """
        self._num_failures_in_a_row += 1
        self._in_flight = None
        self._runner.reset()
        scheduler = self._make_scheduler()
        outputs = scheduler.take_over(self._scheduler) if keep_requests else []
        self._scheduler = scheduler
        return outputs

    def check_integrity(self) -> None:
        self._scheduler.check_integrity()

    def stats(self) -> EngineStats:
        return self._scheduler.stats()


def _computed(function: Callable[..., T], *arguments: Any) -> T:
    try:
        return function(*arguments)
    except Exception as error:
        raise StepFailed from error
