"""What crosses from scheduler to runner, and back: one frozen object each way.

A step has two kinds of work. The runner does saves, loads, copies, prefill chunks, decode rows, in
this order.

| kind         | tokens            | logits | needs                                             |
|--------------|-------------------|--------|---------------------------------------------------|
| PrefillChunk | n >= 1 of a prompt| no     | block tables that cover start + n positions       |
| DecodeRow    | 1 and its drafts  | yes    | block tables that cover start + 1 + drafts        |

The last known token of a sequence is always a decode row, also the last token of a prompt: it is the only
position whose logits anybody wants, but where log-probabilities of the prompt are asked for. (A request for an
embedding has no such row: its chunks cover all its tokens.) A chunk that ends at the
second-to-last token may stand in the same step as that sequence's decode row.

A row may carry drafts: guesses at the tokens after it, computed in the same pass at the positions after its own. A
token is chosen at each of these positions as if all drafts before it were right, and counts as long as they were. Token
i of an answer depends on the tokens before it and on its own random number alone, so what counts is what steps of one
token each would have chosen.

Both objects are plain and picklable: a step can be logged, replayed, or sent to other ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mlxserve.core.request import FinishReason, Pooling
from mlxserve.core.sampling_params import SamplingParams

BlockTable = tuple[int, ...]
"""Block ids in order of position: position p of the sequence lives in entry p // block_size, at p % block_size."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Compute keys and values of `token_ids` at positions start .. start + len(token_ids) - 1."""

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    block_tables: tuple[BlockTable, ...]
    """One for each layer group of the cache (see kv.manager)."""
    scored_ids: tuple[int, ...] = ()
    """The tokens after the first len(scored_ids) of these positions, where their log-probabilities are asked for."""
    num_top: int = 0
    """With each scored token, so many of the most likely ones in its place."""
    pooling: Pooling | None = None
    """What is wanted of the hidden states of its tokens: the last one, or their sum (mean)."""


@dataclass(frozen=True, slots=True)
class DraftOrder:
    """Drafts that the draft model is to make for a row."""

    num_tokens: int
    missing: tuple[int, ...] = ()
    """The tokens right before the row's own whose keys and values the draft model has not computed yet."""


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """Compute position `start`, whose token is `token_id`, and choose the token after it; then go on by the drafts."""

    request_id: str
    token_id: int | None
    """None: the token that this request's row of the step before chooses, which is not known yet."""
    start: int
    block_tables: tuple[BlockTable, ...]
    sampling: SamplingParams
    seed: int
    output_index: int
    """How many tokens were generated before this one: with `seed` it fixes the random number of this draw."""
    history: tuple[int, ...] = ()
    """The tokens before position `start`, oldest first, as far back as the penalties of `sampling` look. Together with
    the token at `start` they hold the `output_index` generated ones, last, if there is a penalty on these."""
    banned_token_ids: tuple[int, ...] = ()
    """Tokens that must not be chosen here: those that would end an answer before its min_tokens."""
    is_constrained: bool = False
    """Its token must be one that the request's constraint allows: the runner asks for the mask (core/constraint.py)."""
    draft_token_ids: tuple[int, ...] = ()
    """Guesses at the tokens of positions start + 1 and up."""
    draft_order: DraftOrder | None = None
    """The draft model is to make them; then draft_token_ids is empty."""

    @property
    def num_drafts(self) -> int:
        return len(self.draft_token_ids) if self.draft_order is None else self.draft_order.num_tokens


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy at least the first `num_tokens` positions of block `source` to block `target`, in every layer of a group.

    All copies of a step read their sources as they were before it."""

    group: int
    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class BlockSave:
    """Hand the contents that a full block had before this step to the disk."""

    name: bytes
    """The block's hash (see kv.block_hash)."""
    parent: bytes
    """Name of the block before it."""
    blocks: BlockTable
    """Its block in each layer group."""


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """Write a block that was read from disk, and lies ready, into `blocks`: one of each layer group."""

    name: bytes
    blocks: BlockTable


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    step_id: int
    copies: tuple[BlockCopy, ...]
    prefill: tuple[PrefillChunk, ...]
    decode: tuple[DecodeRow, ...]
    num_blocks: tuple[int, ...]
    """Blocks each group's pool has now; the runner grows its storage to it before it runs."""
    released: tuple[str, ...] = ()
    """Requests that ended or were preempted since the last step; the runner drops what it keeps by request id."""
    saves: tuple[BlockSave, ...] = ()
    loads: tuple[BlockLoad, ...] = ()

    @property
    def num_prefill_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.prefill)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities under the model's own distribution (before temperature and cuts)."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability) of the most likely tokens, best first."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    step_id: int
    tokens: tuple[tuple[SampledToken, ...], ...]
    """Of each decode row, in order: the drafts that were right, and the token after them."""
    prefill_time: float
    """Seconds spent on copies and prefill chunks; saves and loads are not in it."""
    decode_time: float | None
    """Seconds spent on decode rows, sampling included. None: they went through the model together with the last of the
    chunks, and prefill_time is the time of all."""
    scores: tuple[tuple[TokenLogprobs, ...], ...] = ()
    """For each chunk that has scored_ids, in order: one for each of these."""
    failures: Mapping[int, str] = field(default_factory=dict)
    """Decode rows, by index, whose constraint left no token, with the reason; their tokens mean nothing."""
    pooled: tuple[tuple[float, ...], ...] = ()
    """For each chunk with pooling, in order: that vector, (hidden size,)."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step did to one request: scheduler.update() gives these to the engine for delivery."""

    request_id: str
    tokens: tuple[SampledToken, ...]
    """The tokens generated in this step: none, one, or several where drafts were right."""
    num_computed_tokens: int
    num_cached_tokens: int
    num_draft_tokens: int = 0
    """Drafts computed for it so far."""
    num_accepted_tokens: int = 0
    """Of these, the ones that became tokens of the answer."""
    finish_reason: FinishReason | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """With the first token, where they are asked for: of all tokens of the prompt but its first one."""
    error: str | None = None
    """With FinishReason.ERROR: what went wrong, where it was this request alone."""
    embedding: tuple[float, ...] | None = None
    """With the end of a request that has pooling: its vector, (hidden size,), not normalised."""
