"""A step while the scheduler makes it, and what it remembers of one that was given out."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mlxserve.core.request import Request
from mlxserve.core.step import (
    BlockCopy,
    BlockLoad,
    BlockSave,
    BlockTable,
    DecodeRow,
    PrefillChunk,
    RequestOutput,
    SampledToken,
)
from mlxserve.scheduler.budget import StepLoad
from mlxserve.scheduler.drafting import NO_DRAFTS, Drafts


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
        chunks = self.chunk_ends.items()
        ending = [request for request, end in chunks if end == request.num_tokens - 1 and request.pooling is None]
        return self.streams + ending


@dataclass(frozen=True, slots=True)
class Flight:
    """The requests of a step that was given out. By object and not by id: an id may be aborted and used again."""

    chunks: list[tuple[Request, int]]
    rows: list[Request]


def prefill_chunk(request: Request, end: int, tables: tuple[BlockTable, ...]) -> PrefillChunk:
    """The request's next chunk, up to before position `end`."""
    start = request.num_computed_tokens
    return PrefillChunk(
        request_id=request.request_id,
        token_ids=tuple(request.token_ids[start:end]),
        start=start,
        block_tables=tables,
        scored_ids=request.scored_ids(start, end),
        num_top=request.sampling.prompt_logprobs or 0,
        pooling=request.chunk_pooling(end),
    )


def decode_row(
    request: Request, token_id: int | None, start: int, tables: tuple[BlockTable, ...], drafts: Drafts = NO_DRAFTS
) -> DecodeRow:
    """The row of the request's token at position `start`."""
    output_index = start + 1 - request.num_prompt_tokens
    return DecodeRow(
        request_id=request.request_id,
        token_id=token_id,
        start=start,
        block_tables=tables,
        sampling=request.sampling,
        seed=request.seed,
        output_index=output_index,
        history=request.penalty_history(start),
        banned_token_ids=request.banned_token_ids(output_index),
        is_constrained=request.constraint is not None,
        draft_token_ids=drafts.token_ids,
        draft_order=drafts.order,
    )


def request_output(request: Request, tokens: Sequence[SampledToken] = (), error: str | None = None) -> RequestOutput:
    """What is to be told of a request that got these tokens, or ended."""
    return RequestOutput(
        request_id=request.request_id,
        tokens=tuple(tokens),
        num_computed_tokens=request.num_computed_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_draft_tokens=request.num_draft_tokens,
        num_accepted_tokens=request.num_accepted_tokens,
        finish_reason=request.finish_reason,
        prompt_logprobs=tuple(request.prompt_logprobs) if 0 < request.num_output_tokens == len(tokens) else (),
        error=error,
        embedding=request.embedding(),
    )
