"""A step while the scheduler makes it, and what it remembers of one that was given out."""

from dataclasses import dataclass, field

from mlxserve.core.request import Request
from mlxserve.core.step import BlockCopy, BlockLoad, BlockSave
from mlxserve.scheduler.budget import StepLoad
from mlxserve.scheduler.drafting import Drafts


@dataclass(slots=True)
class Plan:
    """A step in the making. Requests stand in the order in which they were given their work."""

    now: float
    streams: list[Request] = field(default_factory=list)
    """Requests whose only uncomputed token is the last one they generated."""
    drafts: dict[Request, Drafts] = field(default_factory=dict)
    """Of streams."""
    chunk_ends: dict[Request, int] = field(default_factory=dict)
    """Position after the last one of each prefill chunk; equal to num_computed_tokens where none is needed."""
    copies: list[BlockCopy] = field(default_factory=list)
    saves: list[BlockSave] = field(default_factory=list)
    loads: list[BlockLoad] = field(default_factory=list)

    def load(self, without: Request | None = None) -> StepLoad:
        """Decode rows of prompts that end in this step do not count: nobody waits for their next token yet."""
        load = StepLoad().with_rows([request.num_tokens - 1 for request in self.streams])
        for request, drafts in self.drafts.items():
            load = load.with_drafts(request.num_tokens - 1, len(drafts), by_model=drafts.order is not None)
        for request, end in self.chunk_ends.items():
            if request is not without and end > request.num_computed_tokens:
                load = load.with_chunk(request.num_computed_tokens, end - request.num_computed_tokens)
        return load

    @property
    def is_empty(self) -> bool:
        return not (self.streams or self.chunks() or self.rows() or self.saves or self.loads)

    def chunks(self) -> list[tuple[Request, int]]:
        return [(request, end) for request, end in self.chunk_ends.items() if end > request.num_computed_tokens]

    def rows(self) -> list[Request]:
        ending = [request for request, end in self.chunk_ends.items() if end == request.num_tokens - 1]
        return self.streams + ending


@dataclass(frozen=True, slots=True)
class Flight:
    """The requests of a step that was given out. By object and not by id: an id may be aborted and used again."""

    chunks: list[tuple[Request, int]]
    rows: list[Request]
