"""Chooses what every step computes. A request wants its uncomputed tokens; there are no phases beyond that."""

from collections.abc import Mapping, Sequence

from mlxserve.config import EngineConfig
from mlxserve.core.constraint import ConstrainedRow
from mlxserve.core.request import FinishReason, Request, RequestStatus
from mlxserve.core.stats import EngineStats
from mlxserve.core.step import (
    DecodeRow,
    PrefillChunk,
    RequestOutput,
    SampledToken,
    ScheduledStep,
    StepResult,
)
from mlxserve.errors import EngineError, InvalidParameter, QueueFull
from mlxserve.kv.manager import KVManager, PrefixHit
from mlxserve.scheduler.budget import PrefillBudget, StepForecast
from mlxserve.scheduler.checks import check_length, check_queues
from mlxserve.scheduler.chunks import ChunkGrants
from mlxserve.scheduler.drafting import NO_DRAFTS, Drafting
from mlxserve.scheduler.plan import Flight, Plan, decode_row, prefill_chunk, request_output
from mlxserve.scheduler.totals import Totals
from mlxserve.scheduler.waiting_queue import WaitingQueue

MAX_BYPASSED = 8
"""How often newer requests may start before one that waits for blocks, and how many such are passed over in a step."""


class Scheduler:
    """Which requests run, and what the next step computes for each.

    schedule() gives out a step, update() takes its result and publishes the blocks it filled. Every request that add()
    accepted gets one RequestOutput with a finish reason, from update() or take_finished(). Not thread-safe.

    A step whose run() raised has no result: what the cache holds is then unknown, and scheduler and KVManager are to be
    made anew; take_over() saves what did not stand in that step.
    """

    def __init__(
        self, config: EngineConfig, kv: KVManager, budget: PrefillBudget, drafting: Drafting | None = None
    ) -> None:
        """`drafting`: None for a runner that takes no drafts."""
        self._config = config
        self._kv = kv
        self._budget = budget
        self._drafting = drafting or Drafting(budget, takes_drafts=False)
        self._grants = ChunkGrants(budget, kv.block_size, config.max_num_seqs)
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue()
        self._running: list[Request] = []
        self._flights: dict[int, Flight] = {}
        self._finished: list[RequestOutput] = []
        self._released: list[str] = []
        self._totals = Totals()
        self._found_nothing = False

    @property
    def max_total_tokens(self) -> int | None:
        """The largest Request.max_total_tokens add() accepts; None for no limit. The last token needs no block."""
        return None if self._kv.max_tokens is None else self._kv.max_tokens + 1

    @property
    def has_work(self) -> bool:
        """Whether schedule() or take_finished() has something to give."""
        has_requests = self._requests or self._released or self._finished or self._flights
        return bool(has_requests or self._kv.can_save or self._kv.has_disk_news)

    @property
    def is_waiting(self) -> bool:
        """Whether schedule() has nothing to give until the disk has news: all requests wait for what it reads."""
        return self._found_nothing and not (self._finished or self._kv.can_save or self._kv.has_disk_news)

    @property
    def num_blocks(self) -> int:
        """KV blocks that exist now, in all groups."""
        return sum(self._kv.num_blocks)

    @property
    def num_unsaved_blocks(self) -> int:
        """Blocks that are to be written to disk when there is time."""
        return self._kv.num_unsaved_blocks

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            QueueFull: max_queue requests wait beside those that run or can be started by the next step.
            ContextLengthExceeded: it does not fit into the cache even alone, or leaves no room for an answer.
            InvalidParameter: it has no tokens, or its id is in use.
        """
        if request.request_id in self._requests:
            raise InvalidParameter(f"request id {request.request_id!r} is in use", param="request_id")
        check_length(request, self.max_total_tokens)
        # A burst may come in before any step could start some of it.
        if len(self._requests) >= self._config.max_num_seqs + self._config.max_queue:
            raise QueueFull(
                f"{len(self._requests)} requests are running or waiting, the most this server takes; try again later",
                retry_after=self._totals.retry_after,
            )
        self._requests[request.request_id] = request
        self._waiting.add(request)
        self._found_nothing = False

    def abort(self, request_id: str, reason: FinishReason) -> None:
        """End a request in whatever state it is; one that has ended already, or is unknown, stays as it is.

        Its last output comes from take_finished() (or the next update()). If it stands in a step whose result is not
        in yet, that part of the result is dropped.
        """
        request = self._requests.get(request_id)
        if request is not None:
            self._finish_early(request, reason)
            self._found_nothing = False

    def take_finished(self) -> list[RequestOutput]:
        """Outputs, without a token, of requests that ended outside of update(): aborted, timed out."""
        finished, self._finished = self._finished, []
        return finished

    def schedule(self, now: float) -> ScheduledStep | None:
        """The next step, or None if there is nothing to compute. Requests past their deadline end here.

        A step without rows and chunks only carries `released`, saves or loads.
        """
        self._end_expired(now)
        self._kv.poll_disk()
        plan = Plan(now)
        plan.saves.extend(self._kv.plan_saves(is_busy=bool(self._requests)))

        # Every stream advances in every step. What that costs bounds the prefill beside it.
        for request in tuple(self._running):
            if request.is_stream and self._make_room(request):
                plan.streams.append(request)
        plan.drafts = self._drafting.plan(plan.streams)

        # Prompts, oldest first; none takes all, so that a short one need not wait for a long one.
        for request in self._running:
            if not request.is_stream:
                self._grants.grant(plan, request, num_requests=len(self._requests))
        self._admit_waiting(plan)

        # What nobody else wanted goes to the oldest.
        for request in tuple(plan.chunk_ends):
            self._grants.grant(plan, request, num_requests=None)

        # Whoever needs a block has it by now.
        plan.loads.extend(self._kv.plan_loads(num_running=len(self._running)))
        self._make_room_for_drafts(plan)
        self._found_nothing = plan.is_empty and not self._released
        if self._found_nothing:
            return None
        return self._give_out(plan)

    def schedule_ahead(self, step: ScheduledStep, now: float) -> ScheduledStep | None:
        """The step after `step`, whose result is not in yet, so that the device need not wait for the scheduler.

        Only where nothing but streams wants to run: each row of `step` goes on by one token, whose id the device knows.
        A row that `step` turns out to end is computed for nothing, and update() drops it. None: wait for the result.
        So it is for rows with drafts, which may go on by more tokens, and where drafts are worth waiting for the token
        they begin with.
        """
        flight = self._flights[step.step_id]
        rows = [request for request in flight.rows if request.status is RequestStatus.RUNNING]
        can_start_more = bool(self._waiting) and len(self._running) < self._config.max_num_seqs
        has_drafts = any(row.num_drafts for row in step.decode)
        if flight.chunks or has_drafts or len(rows) < len(self._running) or can_start_more:
            return None
        if any(request.deadline is not None and request.deadline <= now for request in self._requests.values()):
            return None
        if self._drafting.plan(rows):
            return None
        rows = [request for request in rows if request.num_tokens + 1 < request.max_total_tokens]
        for request in rows:
            if not self._kv.can_extend(request, request.num_tokens + 1):
                return None
            self._kv.extend(request, request.num_tokens + 1)
        if not rows:
            return None
        decode = [decode_row(request, None, request.num_tokens, self._kv.block_tables(request)) for request in rows]
        self._kv.poll_disk()
        plan = Plan(now, saves=self._kv.plan_saves(is_busy=True))
        return self._launch(Flight(chunks=[], rows=rows), plan, (), decode)

    def forecast(self, step: ScheduledStep) -> StepForecast:
        """What is expected of a step given out, to be asked before update() learns from its result."""
        return self._budget.forecast(step)

    def constrained_rows(self, step: ScheduledStep, pending: Mapping[str, int]) -> list[ConstrainedRow]:
        """The rows of a step given out whose requests have a constraint, in order; all drafts of it are made.

        `pending`: tokens by request id of the step before, whose result update() has not been given yet.
        """
        rows = []
        first = 0
        for request, row in zip(self._flights[step.step_id].rows, step.decode, strict=True):
            if request.constraint is not None:
                token_ids = request.token_ids[request.num_prompt_tokens + request.constraint.num_tokens :]
                if request.request_id in pending:
                    token_ids.append(pending[request.request_id])
                rows.append(ConstrainedRow(first, request.constraint, token_ids, row.draft_token_ids))
            first += 1 + len(row.draft_token_ids)
        return rows

    def update(self, step: ScheduledStep, result: StepResult, now: float) -> list[RequestOutput]:
        """Take a step's result: outputs of every request that got a token or ended.

        Raises:
            EngineError: the result is not one of this step.
        """
        flight = self._flights.get(step.step_id)
        num_scored = sum(bool(chunk.scored_ids) for chunk in step.prefill)
        num_pooled = sum(chunk.pooling is not None for chunk in step.prefill)
        sizes = (len(result.tokens), len(result.scores), len(result.pooled))
        if flight is None or result.step_id != step.step_id or sizes != (len(flight.rows), num_scored, num_pooled):
            raise EngineError(f"result {result.step_id} does not belong to step {step.step_id}")
        del self._flights[step.step_id]
        if not (result.scores or result.pooled):
            # What scoring or pooling a prompt costs is no measure for other steps.
            self._budget.observe(step, result)
        self._kv.finish_copies(step.copies)
        self._kv.finish_loads(step.loads)
        scores, pooled = iter(result.scores), iter(result.pooled)
        outputs = self.take_finished()
        for (request, end), chunk in zip(flight.chunks, step.prefill, strict=True):
            chunk_scores = next(scores) if chunk.scored_ids else ()
            state = next(pooled) if chunk.pooling is not None else None
            if request.status is RequestStatus.RUNNING:
                request.add_prompt_logprobs(chunk.start, chunk_scores)
                self._drafting.finish_chunk(request, request.num_computed_tokens, end)
                request.num_computed_tokens = end
                self._kv.publish(request)
                if state is not None:
                    request.add_pooled(state)
                    if request.num_uncomputed_tokens == 0:
                        self._finish(request, FinishReason.STOP)
                        outputs.append(request_output(request))
        for index, (request, row, tokens) in enumerate(zip(flight.rows, step.decode, result.tokens, strict=True)):
            if request.status is RequestStatus.RUNNING:
                if index in result.failures:
                    self._finish(request, FinishReason.ERROR)
                    error = f"the answer cannot go on within its grammar: {result.failures[index]}"
                    outputs.append(request_output(request, error=error))
                else:
                    outputs.append(self._append_tokens(request, row, tokens, now))
        return outputs

    def take_over(self, failed: "Scheduler") -> list[RequestOutput]:
        """Go on, on an empty cache, with the requests and counts of a scheduler whose step raised in the runner.

        The requests of that step end with ERROR; their outputs, and those that were not taken yet, are returned. All
        others are computed anew from their token ids. Those that ran count as preempted, and so come first.
        """
        in_step: set[Request] = set()
        for flight in failed._flights.values():
            in_step.update(flight.rows, (request for request, _ in flight.chunks))
        outputs = failed.take_finished()
        for request in failed._requests.values():
            if request in in_step:
                request.status = RequestStatus.FINISHED
                request.finish_reason = FinishReason.ERROR
                self._drafting.forget(request)
                outputs.append(request_output(request))
                continue
            if request.status is RequestStatus.RUNNING:
                request.status = RequestStatus.WAITING
                request.restart()
                request.num_preemptions += 1
            self._requests[request.request_id] = request
            self._waiting.add(request)
        self._drafting = failed._drafting
        self._totals = failed._totals
        self._totals.num_evicted_before += failed._kv.num_evicted_blocks
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_blocks_used=self._kv.num_used_blocks,
            num_blocks_cached=self._kv.num_cached_blocks,
            max_blocks=self._kv.max_blocks,
            num_steps=self._totals.num_steps,
            num_preemptions=self._totals.num_preemptions,
            num_prefix_queried_tokens=self._totals.num_prefix_queried_tokens,
            num_prefix_hit_tokens=self._totals.num_prefix_hit_tokens,
            num_draft_tokens=self._drafting.num_draft_tokens,
            num_accepted_tokens=self._drafting.num_accepted_tokens,
            disk=self._kv.disk_stats,
            num_evicted_blocks=self._totals.num_evicted_before + self._kv.num_evicted_blocks,
            num_blocks_shared=self._kv.num_shared_blocks,
        )

    def check_integrity(self) -> None:
        """Raises CacheIntegrityError unless queues, request states and block counts all agree."""
        self._kv.check_integrity(self._running)
        check_queues(self._requests, self._running, list(self._waiting), self._config.max_num_seqs)

    # --- schedule() ---

    def _end_expired(self, now: float) -> None:
        expired = [r for r in self._requests.values() if r.deadline is not None and r.deadline <= now]
        for request in expired:
            self._finish_early(request, FinishReason.TIMEOUT)

    def _make_room(self, request: Request) -> bool:
        """Cover the request's last token, if need be by preempting the newest; False if that was the request itself.

        The oldest running request is never preempted and fits alone, so it ends; and a preempted one comes back before
        anything newer starts. So each becomes the oldest in its turn, and none is preempted for ever.
        """
        while request.status is RequestStatus.RUNNING:
            if self._kv.can_extend(request, request.num_tokens):
                self._kv.extend(request, request.num_tokens)
                return True
            self._preempt(self._running[-1])
        return False

    def _make_room_for_drafts(self, plan: Plan) -> None:
        """Cover drafts with blocks that nobody wants; what does not fit is left out."""
        for request, drafts in plan.drafts.items():
            spare = self._kv.num_spare_tokens(request)
            if spare is not None:
                plan.drafts[request] = drafts = drafts.cut(spare - request.num_tokens)
            self._kv.extend(request, request.num_tokens + len(drafts))

    def _admit_waiting(self, plan: Plan) -> None:
        passed_over: list[Request] = []
        for request in self._waiting:
            if len(self._running) >= self._config.max_num_seqs or len(passed_over) >= MAX_BYPASSED:
                return
            hit = self._kv.find_cached_prefix(request)
            if hit.is_growing:
                continue
            if self._can_start(plan, request, hit):
                self._start(plan, request, hit)
                for older in passed_over:
                    older.num_bypassed += 1
            elif request.num_preemptions > 0 or request.num_bypassed >= MAX_BYPASSED:
                return
            else:
                passed_over.append(request)

    def _can_start(self, plan: Plan, request: Request, hit: PrefixHit) -> bool:
        needs_chunk = request.num_tokens - hit.num_tokens > (request.pooling is None)
        if needs_chunk and not self._grants.has_room(plan, hit.num_tokens):
            return False
        # A block in reserve for each running request: who starts with the last one is preempted in the next step.
        return self._kv.can_admit(request, hit, reserve=len(self._running))

    def _start(self, plan: Plan, request: Request, hit: PrefixHit) -> None:
        plan.copies.extend(self._kv.admit(request, hit))
        self._waiting.remove(request)
        self._running.append(request)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = hit.num_tokens
        self._drafting.admit(request)
        if request.num_preemptions == 0:
            request.first_scheduled_time = plan.now
            request.num_cached_tokens = hit.num_tokens
            self._totals.num_prefix_queried_tokens += request.num_tokens
            self._totals.num_prefix_hit_tokens += hit.num_tokens
        self._grants.grant(plan, request, num_requests=len(self._requests))

    def _give_out(self, plan: Plan) -> ScheduledStep:
        flight = Flight(chunks=plan.chunks(), rows=plan.rows())
        prefill = [prefill_chunk(request, end, self._kv.block_tables(request)) for request, end in flight.chunks]
        decode = [
            decode_row(
                request,
                request.token_ids[-1],
                request.num_tokens - 1,
                self._kv.block_tables(request),
                plan.drafts.get(request, NO_DRAFTS),
            )
            for request in flight.rows
        ]
        return self._launch(flight, plan, prefill, decode)

    def _launch(
        self,
        flight: Flight,
        plan: Plan,
        prefill: Sequence[PrefillChunk],
        decode: Sequence[DecodeRow],
    ) -> ScheduledStep:
        step = ScheduledStep(
            step_id=self._totals.num_steps,
            copies=tuple(plan.copies),
            prefill=tuple(prefill),
            decode=tuple(decode),
            num_blocks=self._kv.num_blocks,
            released=tuple(self._released),
            saves=tuple(plan.saves),
            loads=tuple(plan.loads),
        )
        self._flights[step.step_id] = flight
        self._released = []
        self._totals.num_steps += 1
        return step

    # --- the ends of a request ---

    def _append_tokens(
        self, request: Request, row: DecodeRow, tokens: Sequence[SampledToken], now: float
    ) -> RequestOutput:
        """Go on by the drafts that were right and the token after them, or as far as the answer goes."""
        num_appended = 0
        reason = None
        while reason is None and num_appended < len(tokens):
            request.num_computed_tokens = request.num_tokens
            request.token_ids.append(tokens[num_appended].token_id)
            reason = request.stop_reason_after(request.token_ids[-1])
            num_appended += 1
        self._kv.publish(request)
        if row.num_drafts:
            self._kv.trim(request)
        self._drafting.finish_row(row, request, num_accepted=min(num_appended, len(tokens) - 1))
        if reason is not None:
            self._finish(request, reason)
            self._totals.note_finish(now)
        return request_output(request, tokens[:num_appended])

    def _preempt(self, request: Request) -> None:
        """Back to the front of the queue. Its blocks stay hashed, so that it usually finds them when it resumes."""
        self._running.remove(request)
        self._kv.free(request)
        request.status = RequestStatus.WAITING
        request.restart()
        request.num_preemptions += 1
        self._totals.num_preemptions += 1
        self._waiting.add(request)
        self._released.append(request.request_id)

    def _finish_early(self, request: Request, reason: FinishReason) -> None:
        self._finish(request, reason)
        self._finished.append(request_output(request))

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._released.append(request.request_id)
        else:
            self._waiting.remove(request)
        self._kv.free(request)
        self._drafting.forget(request)
        del self._requests[request.request_id]
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
