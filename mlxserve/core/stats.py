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
