"""Numbers the engine gives out about itself and about each request."""

from dataclasses import dataclass
from typing import Protocol

from mlxserve.core.generation import Timings, Usage


@dataclass(frozen=True, slots=True)
class DiskStats:
    """One model's blocks on disk at one moment. Counters only ever grow."""

    is_on: bool
    """False: it failed, and nothing is read or written any more."""
    num_blocks: int
    num_bytes: int
    num_loaded_tokens: int
    """Tokens whose keys and values were brought back from disk since start."""
    num_writes: int
    """Blocks written."""
    num_errors: int
    """Files that were not what they should be, and reads and writes that failed."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One engine at one moment. Counters only ever grow."""

    num_running: int
    num_waiting: int
    num_blocks_used: int
    """KV blocks that some running request holds."""
    num_blocks_cached: int
    """KV blocks nobody holds that still answer prefix hits."""
    max_blocks: int
    """What the pool may grow to; 0 where the model keeps its cache elsewhere."""
    num_steps: int
    num_preemptions: int
    num_prefix_queried_tokens: int
    """Prompt tokens looked up in the prefix cache since start."""
    num_prefix_hit_tokens: int
    """Of these, the ones that were found."""
    num_draft_tokens: int
    """Drafts computed since start."""
    num_accepted_tokens: int
    """Of these, the ones that became tokens of an answer."""
    disk: DiskStats | None = None
    """None: the model keeps no blocks on disk."""
    num_evicted_blocks: int = 0
    """Cached KV blocks that gave way to new ones since start."""
    num_blocks_shared: int = 0
    """Of the used KV blocks, those that several running requests hold."""


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    request_id: str
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step that was computed: what stood in it, how long it should have taken and how long it took."""

    step_id: int
    end: float
    """time.monotonic() when its result was there."""
    rows: tuple[str, ...]
    """Request ids of its decode rows."""
    chunks: tuple[ChunkRecord, ...]
    released: tuple[str, ...]
    """Requests that ended or were preempted since the step before."""
    num_draft_tokens: int
    budget: int | None
    """Prefill tokens it could take beside its streams; None: no prompt had any to compute."""
    predicted: float
    """Seconds, by what the cost model knew before; 0 while it knows nothing."""
    measured: float
    """Seconds the runner took."""
    num_running: int
    num_waiting: int
    num_blocks_used: int
    num_blocks_cached: int

    @property
    def begin(self) -> float:
        return self.end - self.measured

    @property
    def num_prefill_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def kind(self) -> str:
        """decode, prefill, mixed, or empty: a step that only released something."""
        if self.chunks:
            return "mixed" if self.rows else "prefill"
        return "decode" if self.rows else "empty"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One ended request, for the log line and the metrics. Holds no text."""

    request_id: str
    model: str
    outcome: str
    """A FinishReason's value, or for a request refused before it ran the error class's name."""
    usage: Usage
    timings: Timings


class Observer(Protocol):
    """Told about requests as they go; called on the event loop."""

    def request_finished(self, record: RequestRecord) -> None: ...

    def inter_token_latency(self, model: str, seconds: float) -> None: ...

    def step_finished(self, model: str, step: StepRecord) -> None: ...

    def model_loaded(self, model: str, outcome: str, seconds: float) -> None:
        """`outcome`: ok, or the name of the error's class."""
        ...

    def model_unloaded(self, model: str, reason: str) -> None:
        """`reason`: expired, evicted, stopped or died."""
        ...
