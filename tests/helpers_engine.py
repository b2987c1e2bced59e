"""Engines without a model, what they answer, the thread that they run on, and gates that hold it."""

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tiny_tokenizers
from helpers_scheduler import BLOCK_SIZE, next_state

from mlxserve.config import EngineConfig
from mlxserve.core.constraint import MaskSource
from mlxserve.core.request import FinishReason, Pooling
from mlxserve.core.stats import RequestRecord, StepRecord
from mlxserve.core.step import BlockTable, SampledToken, ScheduledStep, StepResult
from mlxserve.engine.engine import Engine
from mlxserve.engine.engine_thread import Computed, EngineHandle, EngineThread
from mlxserve.errors import MlxserveError
from mlxserve.kv.block_pool import BlockPool
from mlxserve.kv.layer_group import FullAttentionGroup
from mlxserve.kv.manager import KVManager
from mlxserve.scheduler.budget import PrefillBudget
from mlxserve.scheduler.scheduler import Scheduler
from mlxserve.text.tokenizer import Tokenizer

TIMEOUT = 20.0
"""Seconds any one wait may take before it counts as a hang."""
CONTEXT_LENGTH = 200
LETTERS = "abcdefghijklmnop"


def on_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test to its end on an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 2 * TIMEOUT))

    return run


@functools.cache
def tokenizer() -> Tokenizer:
    """Byte-level, and every letter a token."""
    hf_tokenizer = tiny_tokenizers.byte_level()
    return Tokenizer(hf_tokenizer, frozenset({hf_tokenizer.eos_token_id}))


@functools.cache
def letter_ids() -> tuple[int, ...]:
    return tuple(tokenizer().hf_tokenizer.convert_tokens_to_ids(list(LETTERS)))


def next_token(state: int) -> int:
    return letter_ids()[(state >> 17) % len(LETTERS)]


def hidden_state(state: int) -> tuple[float, float, float]:
    """What FakeRunner has in place of a model's hidden states."""
    return float(state % 101), float(state % 97) - 50.0, 1.0


def pool(vectors: list[tuple[float, ...]], pooling: Pooling) -> tuple[float, ...]:
    return vectors[-1] if pooling is Pooling.LAST else tuple(map(sum, zip(*vectors, strict=True)))


def expected_embedding(prompt: str, pooling: Pooling = Pooling.LAST) -> tuple[float, ...]:
    state, vectors = 0, []
    for token_id in tokenizer().encode(prompt, add_special_tokens=True):
        state = next_state(state, token_id)
        vectors.append(hidden_state(state))
    vector = pool(vectors, pooling)
    length = sum(value * value for value in vector) ** 0.5
    return tuple(value / length for value in vector)


def expected_ids(prompt_ids: list[int], num_tokens: int) -> list[int]:
    """The first tokens of the answer to a prompt."""
    state = 0
    for token_id in prompt_ids:
        state = next_state(state, token_id)
    answer = []
    for _ in range(num_tokens):
        answer.append(next_token(state))
        state = next_state(state, answer[-1])
    return answer


def expected_text(prompt: str, num_tokens: int) -> str:
    ids = expected_ids(tokenizer().encode(prompt, add_special_tokens=True), num_tokens)
    return "".join(LETTERS[letter_ids().index(token_id)] for token_id in ids)


class Gate:
    """Holds a thread at every call until the test lets it go on."""

    def __init__(self) -> None:
        self._arrived = threading.Semaphore(0)
        self._permits = threading.Semaphore(0)
        self._is_open = False

    def __call__(self, *_: object) -> None:
        self._arrived.release()
        if not self._is_open and not self._permits.acquire(timeout=TIMEOUT):
            raise TimeoutError("nobody opened the gate")

    def wait(self) -> None:
        """Wait for the next call; each is waited for once."""
        if not self._arrived.acquire(timeout=TIMEOUT):
            raise TimeoutError("nobody came to the gate")

    async def arrival(self) -> None:
        """wait() on the event loop."""
        await asyncio.to_thread(self.wait)

    def let_go(self) -> None:
        """Let one call through, the one that waits or the next."""
        self._permits.release()

    def open(self) -> None:
        self._is_open = True
        self._permits.release()


def passes(*_: object) -> None:
    """What a runner does before a step where a test wants nothing else."""


class FakeRunner:
    """The next token is a function of all tokens before it, as far as the step's blocks hold them.

    Reading a position that nothing wrote since reset() fails the step: no answer is right that was not computed whole.
    """

    def __init__(self, *, answer_length: int | None = None) -> None:
        """`answer_length`: tokens before the end-of-sequence token; None for an endless answer."""
        self.answer_length = answer_length
        self.before_step: Callable[[ScheduledStep], None] = passes
        """Called on the engine thread with each step; may wait, may raise."""
        self.before_reset: Callable[[], None] = passes
        self.steps: list[ScheduledStep] = []
        self._states: dict[tuple[int, int], int] = {}

    def run(self, step: ScheduledStep, masks: object = None) -> StepResult:
        self.steps.append(step)
        self.before_step(step)
        for copy in step.copies:
            for offset in range(copy.num_tokens):
                self._states[copy.target, offset] = self._states[copy.source, offset]
        pooled = []
        for chunk in step.prefill:
            states = [
                self._compute((token_id,), position, chunk.block_tables)
                for position, token_id in enumerate(chunk.token_ids, chunk.start)
            ]
            if chunk.pooling is not None:
                vectors = [hidden_state(state) for state in states]
                pooled.append(
                    vectors[-1] if chunk.pooling is Pooling.LAST else tuple(map(sum, zip(*vectors, strict=True)))
                )
        tokens = []
        for row in step.decode:
            state = self._compute((row.token_id,), row.start, row.block_tables)
            ends = row.output_index == self.answer_length
            tokens.append((SampledToken(min(tokenizer().eos_token_ids) if ends else next_token(state)),))
        prefill_time = 0.001 * step.num_prefill_tokens
        return StepResult(step.step_id, tuple(tokens), prefill_time, decode_time=0.001, pooled=tuple(pooled))

    can_embed = True

    def reset(self) -> None:
        self.before_reset()
        self._states.clear()

    def _compute(self, token_ids: tuple[int, ...], start: int, tables: tuple[BlockTable, ...]) -> int:
        (table,) = tables
        state = self._states[table[(start - 1) // BLOCK_SIZE], (start - 1) % BLOCK_SIZE] if start else 0
        for position, token_id in enumerate(token_ids, start):
            state = next_state(state, token_id)
            self._states[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = state
        return state


class ScriptedRunner(FakeRunner):
    """Answers with the tokens it is given, then end-of-sequence; or, where a row is constrained, with the first of them
    that its mask allows, and else with the lowest token that is allowed."""

    def __init__(self, token_ids: Sequence[int], eos_token_id: int) -> None:
        super().__init__()
        self._token_ids = [*token_ids, eos_token_id]
        self.num_refused = 0
        """Tokens that were not allowed."""

    def run(self, step: ScheduledStep, masks: MaskSource | None = None) -> StepResult:
        result = super().run(step)
        found = masks(step, {}) if masks is not None and any(row.is_constrained for row in step.decode) else None
        if found is not None:
            assert not found.failures, found.failures
        tokens = []
        for number, row in enumerate(step.decode):
            token_id = self._token_ids[min(row.output_index, len(self._token_ids) - 1)]
            if found is not None and row.is_constrained:
                allowed = np.unpackbits(np.frombuffer(found.row(number).bits, np.uint8), bitorder="little")
                if not allowed[token_id]:
                    self.num_refused += 1
                    token_id = int(allowed.argmax())
            tokens.append((SampledToken(token_id),))
        return replace(result, tokens=tuple(tokens))


def make_engine(runner: FakeRunner, config: EngineConfig, *, max_blocks: int = 128) -> Engine:
    def make_scheduler() -> Scheduler:
        group = FullAttentionGroup(BlockPool(max_blocks), BLOCK_SIZE)
        budget = PrefillBudget(
            max_prefill_tokens=config.max_prefill_tokens or 64, target_itl=config.target_itl_ms / 1000
        )
        return Scheduler(config, KVManager([group], block_size=BLOCK_SIZE, model_id="m"), budget)

    return Engine(runner, make_scheduler)


@dataclass
class Recorder:
    """An Observer that keeps everything."""

    records: list[RequestRecord] = field(default_factory=list)
    intervals: list[float] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    loads: list[tuple[str, str]] = field(default_factory=list)
    unloads: list[tuple[str, str]] = field(default_factory=list)

    def request_finished(self, record: RequestRecord) -> None:
        self.records.append(record)

    def inter_token_latency(self, model: str, seconds: float) -> None:
        self.intervals.append(seconds)

    def step_finished(self, model: str, step: StepRecord) -> None:
        self.steps.append(step)

    def model_loaded(self, model: str, outcome: str, seconds: float) -> None:
        self.loads.append((model, outcome))

    def model_unloaded(self, model: str, reason: str) -> None:
        self.unloads.append((model, reason))

    def outcomes(self) -> dict[str, str]:
        outcomes = {record.request_id: record.outcome for record in self.records}
        assert len(outcomes) == len(self.records), "two records of one request"
        return outcomes


class Client:
    """A sink that keeps what it is given and waits for the last of it."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.ended: asyncio.Future[FinishReason | MlxserveError] = asyncio.get_running_loop().create_future()

    def __call__(self, item: Computed | MlxserveError) -> None:
        assert not self.ended.done(), f"{item} after the last event"
        if isinstance(item, MlxserveError):
            self.ended.set_result(item)
            return
        self.token_ids += [token.token_id for token in item.output.tokens]
        if item.output.finish_reason is not None:
            self.ended.set_result(item.output.finish_reason)

    async def end(self) -> FinishReason | MlxserveError:
        return await asyncio.wait_for(asyncio.shield(self.ended), TIMEOUT)


@asynccontextmanager
async def engine_thread() -> AsyncIterator[EngineThread]:
    thread = EngineThread(asyncio.get_running_loop(), release_device=lambda: None)
    thread.start()
    try:
        yield thread
    finally:
        await asyncio.wait_for(asyncio.to_thread(thread.stop), TIMEOUT)


async def add_engine(thread: EngineThread, runner: FakeRunner, *, name: str = "m", **settings: Any) -> EngineHandle:
    engine = make_engine(runner, EngineConfig(block_size=BLOCK_SIZE, **settings))
    return await asyncio.wrap_future(thread.add_engine(name, engine))


async def settled(thread: EngineThread) -> None:
    """Wait until the thread has handled all messages sent so far, and the loop all that was delivered by then."""
    await asyncio.wait_for(asyncio.wrap_future(thread.call(lambda: None)), TIMEOUT)
    await asyncio.sleep(0)


@contextlib.contextmanager
def held(gate: Gate) -> Iterator[Gate]:
    """Whatever happens, nobody waits at the gate afterwards."""
    try:
        yield gate
    finally:
        gate.open()
