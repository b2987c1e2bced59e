"""A runner without a model: it remembers what each position of each block was computed from, and checks every read."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from helpers_disk import FakeDisk

from mlxserve.config import EngineConfig
from mlxserve.core.request import FinishReason, Request, RequestStatus
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.core.step import BlockTable, DecodeRow, DraftOrder, RequestOutput, SampledToken, ScheduledStep, StepResult
from mlxserve.kv.block_pool import BlockPool
from mlxserve.kv.layer_group import FullAttentionGroup
from mlxserve.kv.manager import KVManager
from mlxserve.scheduler.budget import PrefillBudget
from mlxserve.scheduler.drafting import Drafting
from mlxserve.scheduler.scheduler import Scheduler

BLOCK_SIZE = 8
VOCABULARY = 12
EOS = 0
NO_EOS = {"eos_token_ids": frozenset()}


def make_request(request_id: str, prompt: Sequence[int], *, max_tokens: int = 8, **fields: object) -> Request:
    values: dict[str, object] = {
        "sampling": SamplingParams(temperature=0.0, max_tokens=max_tokens),
        "eos_token_ids": frozenset({EOS}),
        "seed": 0,
        "max_total_tokens": len(prompt) + max_tokens,
        "arrival_time": 0.0,
    }
    return Request(request_id=request_id, prompt_token_ids=list(prompt), **(values | fields))  # type: ignore[arg-type]


def make_kv(
    max_blocks: int,
    *,
    enable_prefix_caching: bool = True,
    block_size: int = BLOCK_SIZE,
    disk: FakeDisk | None = None,
) -> KVManager:
    group = FullAttentionGroup(BlockPool(max_blocks), block_size)
    return KVManager(
        [group], block_size=block_size, model_id="m", enable_prefix_caching=enable_prefix_caching, disk=disk
    )


def make_scheduler(
    max_blocks: int = 64, *, kv: KVManager | None = None, disk: FakeDisk | None = None, **settings: object
) -> Scheduler:
    config = EngineConfig(block_size=BLOCK_SIZE, **settings)  # type: ignore[arg-type]
    kv = kv or make_kv(max_blocks, enable_prefix_caching=config.enable_prefix_caching, disk=disk)
    budget = PrefillBudget(
        max_prefill_tokens=config.max_prefill_tokens or 2048,
        target_itl=config.target_itl_ms / 1000,
        min_prefill_tokens=4,
    )
    return Scheduler(config, kv, budget, Drafting(budget, has_draft_model=config.draft_model is not None))


def next_state(state: int, token: int) -> int:
    """What a position depends on: a digest of all tokens up to it."""
    return ((state ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) % 2**64


def root_state(salt: str | None) -> int:
    return 0 if salt is None else 1 + sum(salt.encode())


def next_token(state: int) -> int:
    """The model: a function of everything before, and of nothing else."""
    return (state >> 17) % VOCABULARY


def states_of(token_ids: Sequence[int], salt: str | None) -> list[int]:
    states, state = [], root_state(salt)
    for token in token_ids:
        state = next_state(state, token)
        states.append(state)
    return states


def expected_tokens(request: Request) -> list[int]:
    """Prompt and answer when the request runs alone, without a cache."""
    tokens = list(request.prompt_token_ids)
    states = states_of(tokens, request.cache_salt)
    while len(tokens) < request.max_total_tokens:
        token = next_token(states[-1])
        tokens.append(token)
        states.append(next_state(states[-1], token))
        if token in request.eos_token_ids or token in request.sampling.stop_token_ids:
            break
    return tokens


@dataclass(frozen=True)
class Started:
    step: ScheduledStep
    result: StepResult

    def token_after(self, request_id: str) -> int:
        """What this step's row of the request chose."""
        (index,) = (i for i, row in enumerate(self.step.decode) if row.request_id == request_id)
        (token,) = self.result.tokens[index]
        return token.token_id


class FakeRunner:
    """Runs steps on simulated blocks; raises AssertionError on any read of a position that holds something else.

    A started step reads and writes at once, which is the order of a device: it works on steps as they were given to it.
    """

    def __init__(self, block_size: int = BLOCK_SIZE, seed: int = 0, disk: FakeDisk | None = None) -> None:
        self.block_size = block_size
        self.disk = disk
        self.blocks: list[list[int | None]] = []
        self.salts: dict[str, str | None] = {}
        self._states: dict[str, list[int]] = {}
        self._tokens: dict[str, list[int]] = {}
        self._random = random.Random(seed)
        self.num_copied_tokens = 0
        self.num_prefilled_tokens = 0
        self.num_rows: Counter[str] = Counter()
        """Decode rows of each request."""
        self.num_drafts: Counter[str] = Counter()
        self.num_right_drafts: Counter[str] = Counter()
        self._drafted: dict[str, int] = {}
        """Positions of each request that a draft model has computed."""
        self.calls: list[tuple[str, int]] = []
        """("start" or "finish", step id) in order."""
        self._unfinished: list[Started] = []

    def add(self, request: Request) -> None:
        """Tell the runner the true sequence; a step carries only what it computes."""
        self._tokens[request.request_id] = request.token_ids
        self._states[request.request_id] = []
        self.salts[request.request_id] = request.cache_salt

    def run(self, step: ScheduledStep, masks: object = None) -> StepResult:
        return self.finish(self.start(step, None))

    def start(self, step: ScheduledStep, after: Started | None, masks: object = None) -> Started:
        assert self._unfinished == ([] if after is None else [after]), "a step other than the one before is under way"
        started = Started(step, self._result(step, after))
        self._unfinished.append(started)
        self.calls.append(("start", step.step_id))
        return started

    def finish(self, started: Started) -> StepResult:
        self._unfinished.remove(started)
        self.calls.append(("finish", started.step.step_id))
        return started.result

    def reset(self) -> None:
        self.blocks.clear()
        self._unfinished.clear()

    def _result(self, step: ScheduledStep, after: Started | None) -> StepResult:
        for _ in range(len(self.blocks), step.num_blocks[0] if step.num_blocks else 0):
            self.blocks.append([None] * self.block_size)
        for save in step.saves:
            (block,) = save.blocks
            assert None not in self.blocks[block], f"unwritten positions are saved: {save}"
            self.disk.give(save, tuple(self.blocks[block]))
        for load in step.loads:
            (block,) = load.blocks
            self.blocks[block] = list(self.disk.take(load.name))
        for copy in step.copies:
            source = self.blocks[copy.source]
            assert None not in source[: copy.num_tokens], f"copy of unwritten positions: {copy}"
            self.blocks[copy.target][: copy.num_tokens] = source[: copy.num_tokens]
        for request_id in step.released:
            self._drafted.pop(request_id, None)
        for chunk in step.prefill:
            assert chunk.token_ids, "an empty chunk"
            if self._drafted.get(chunk.request_id, chunk.start) == chunk.start:
                self._drafted[chunk.request_id] = chunk.start + len(chunk.token_ids)
            known = self._tokens[chunk.request_id]
            self._compute(chunk.request_id, chunk.token_ids, chunk.start, chunk.block_tables, known)
            self.num_prefilled_tokens += len(chunk.token_ids)
        tokens = []
        for row in step.decode:
            known, token_id = self._tokens[row.request_id], row.token_id
            if token_id is None:
                assert after is not None, f"{row.request_id}: no step before that chooses its token"
                token_id = after.token_after(row.request_id)
                known = [*known, token_id]
            assert row.start == len(known) - 1, f"{row.request_id}: a row at {row.start} of {len(known)} tokens"
            state = self._compute(row.request_id, (token_id,), row.start, row.block_tables, known)
            tokens.append(self._go_on(row, state))
            self.num_rows[row.request_id] += 1
        self.num_copied_tokens += sum(copy.num_tokens for copy in step.copies)
        noise = self._random.choice([1.0, 1.1, 0.9, 30.0 if self._random.random() < 0.02 else 1.0])
        return StepResult(
            step_id=step.step_id,
            tokens=tuple(tokens),
            prefill_time=noise * (0.004 * len(step.prefill) + 0.0005 * step.num_prefill_tokens) or 1e-5,
            decode_time=noise * (0.01 + 0.001 * len(step.decode) + 0.0005 * sum(row.num_drafts for row in step.decode)),
        )

    def _go_on(self, row: DecodeRow, state: int) -> tuple[SampledToken, ...]:
        """The tokens after a row along its drafts, all of which are written to its blocks, right or wrong."""
        chosen = [next_token(state)]
        drafts = row.draft_token_ids if row.draft_order is None else self._draft(row.draft_order, state)
        (table,) = row.block_tables
        assert row.start + len(drafts) < len(table) * self.block_size, f"{row.request_id}: no room for its drafts"
        for position, draft in enumerate(drafts, row.start + 1):
            state = next_state(state, draft)
            block, slot = table[position // self.block_size], position % self.block_size
            self.blocks[block][slot] = state
            chosen.append(next_token(state))
        num_right = next((i for i, draft in enumerate(drafts) if draft != chosen[i]), len(drafts))
        if row.draft_order is not None:
            self._check_draft_order(row, row.draft_order, num_right)
        self.num_drafts[row.request_id] += len(drafts)
        self.num_right_drafts[row.request_id] += num_right
        return tuple(SampledToken(token) for token in chosen[: num_right + 1])

    def _draft(self, order: DraftOrder, state: int) -> list[int]:
        """A draft model that is right most of the time."""
        drafts = []
        for _ in range(order.num_tokens):
            is_right = self._random.random() < 0.7
            drafts.append(next_token(state) if is_right else self._random.randrange(VOCABULARY))
            state = next_state(state, drafts[-1])
        return drafts

    def _check_draft_order(self, row: DecodeRow, order: DraftOrder, num_right: int) -> None:
        """What the draft model is told to be missing is what it has not computed, with the right tokens."""
        first = row.start - len(order.missing)
        assert self._drafted.get(row.request_id, first) == first, f"{row.request_id}: the draft model's part has a gap"
        assert self._tokens[row.request_id][first : row.start] == list(order.missing)
        # The last draft is nobody's input.
        self._drafted[row.request_id] = row.start + 1 + min(num_right, order.num_tokens - 1)

    def _compute(
        self,
        request_id: str,
        tokens: tuple[int, ...],
        start: int,
        tables: tuple[BlockTable, ...],
        known: Sequence[int],
    ) -> int:
        (table,) = tables
        end = start + len(tokens)
        assert tuple(known[start:end]) == tokens, f"{request_id}: not its tokens at {start}"
        assert end <= len(table) * self.block_size, f"{request_id}: table too short for {end}"
        assert all(0 < block < len(self.blocks) for block in table), f"{request_id}: {table}"
        states = self._states[request_id]
        state = states[-1] if states else root_state(self.salts[request_id])
        for token in known[len(states) : end]:
            state = next_state(state, token)
            states.append(state)
        read = [value for block in table for value in self.blocks[block]][:start]
        assert read == states[:start], f"{request_id}: the cache before {start} holds something else"
        for position in range(start, end):
            self.blocks[table[position // self.block_size]][position % self.block_size] = states[position]
        return states[end - 1]


class Driver:
    """Scheduler and fake runner, step by step, with integrity checks and every request's outcome."""

    def __init__(
        self, scheduler: Scheduler, seed: int = 0, *, runs_ahead: bool = False, disk: FakeDisk | None = None
    ) -> None:
        """`runs_ahead`: each step is started before the result of the one before is looked at, as Engine does it."""
        self.scheduler = scheduler
        self.runs_ahead = runs_ahead
        self.in_flight: tuple[ScheduledStep, Started] | None = None
        self.num_steps_ahead = 0
        self.runner = FakeRunner(seed=seed, disk=disk)
        self.now = 0.0
        self.steps: list[ScheduledStep] = []
        self.requests: dict[str, Request] = {}
        self.outcomes: dict[str, FinishReason] = {}
        self.received: dict[str, list[int]] = {}
        self.num_outputs: Counter[str] = Counter()
        """Rows of each request that came to something."""

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)
            self.requests[request.request_id] = request
            self.received[request.request_id] = []
            self.runner.add(request)

    def step(self, between: Callable[[], None] = lambda: None) -> ScheduledStep | None:
        """One engine step; `between` is called while it is in flight, and with it the one ahead of it."""
        if self.in_flight is None:
            step = self.scheduler.schedule(self.now)
            self.scheduler.check_integrity()
            self.collect()
            if step is None:
                return None
            self.steps.append(step)
            started = self.runner.start(step, None)
        else:
            step, started = self.in_flight
            self.in_flight = None
        if self.runs_ahead:
            self._start_ahead(step, started)
        between()
        result = self.runner.finish(started)
        self.now += result.prefill_time + result.decode_time
        self.collect(self.scheduler.update(step, result, self.now))
        self.scheduler.check_integrity()
        assert self.scheduler.has_work or self.in_flight is None, "a step in flight that nobody would wait for"
        return step

    def _start_ahead(self, step: ScheduledStep, started: Started) -> None:
        ahead = self.scheduler.schedule_ahead(step, self.now)
        self.scheduler.check_integrity()
        if ahead is not None:
            self.steps.append(ahead)
            self.num_steps_ahead += 1
            self.in_flight = ahead, self.runner.start(ahead, started)

    def run(self, max_steps: int = 10_000) -> None:
        """Until nothing is left."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"still working after {max_steps} steps: {self.scheduler.stats()}")

    def collect(self, outputs: Sequence[RequestOutput] | None = None) -> None:
        for output in self.scheduler.take_finished() if outputs is None else outputs:
            assert output.request_id not in self.outcomes, f"{output.request_id}: an output after its last one"
            self.received[output.request_id] += [token.token_id for token in output.tokens]
            self.num_outputs[output.request_id] += bool(output.tokens)
            if output.finish_reason is not None:
                self.outcomes[output.request_id] = output.finish_reason
                self.check_outcome(self.requests[output.request_id])

    def check_outcome(self, request: Request) -> None:
        """What came out is what the request gives alone, whole or as far as it got."""
        expected = expected_tokens(request)
        answer = request.prompt_token_ids + self.received[request.request_id]
        assert request.status is RequestStatus.FINISHED
        assert request.token_ids == answer
        if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert answer == expected
            ended_by_token = answer[-1] in request.eos_token_ids
            assert request.finish_reason is (FinishReason.STOP if ended_by_token else FinishReason.LENGTH)
        else:
            assert answer == expected[: len(answer)]
        assert request.num_accepted_tokens <= request.num_draft_tokens <= self.runner.num_drafts[request.request_id]
        assert request.num_cached_tokens < request.num_prompt_tokens or request.num_cached_tokens == 0

    def check_rows(self) -> None:
        """After the last step: no row was computed for nothing but those that stood in a step ahead of an early end."""
        for name, reason in self.outcomes.items():
            num_dropped = self.runner.num_rows[name] - self.num_outputs[name]
            allowed = {FinishReason.STOP: int(self.runs_ahead), FinishReason.CANCELLED: 1 + int(self.runs_ahead)}
            assert 0 <= num_dropped <= allowed.get(reason, 0), f"{name} ended with {reason}: {num_dropped} rows dropped"


def chunk_sizes(step: ScheduledStep | None) -> dict[str, int]:
    assert step is not None
    return {chunk.request_id: len(chunk.token_ids) for chunk in step.prefill}


def decoding(step: ScheduledStep | None) -> list[str]:
    assert step is not None
    return [row.request_id for row in step.decode]


def prompt(length: int, first: int = 100) -> list[int]:
    return list(range(first, first + length))
