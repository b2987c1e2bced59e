"""One sequence as the scheduler sees it: token ids and counts, never text."""

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlxserve.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mlxserve.core.constraint import TokenConstraint
    from mlxserve.core.step import TokenLogprobs


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"
    """An end-of-sequence or stop token was generated, or a stop string appeared in the text."""
    LENGTH = "length"
    """max_tokens or the context length was reached."""
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    ERROR = "error"


class Speculation(enum.StrEnum):
    """Who may guess at a request's next tokens. Guesses change how fast an answer comes, never what it says."""

    AUTO = "auto"
    """Whoever is expected to make it faster, if anybody."""
    NGRAM = "ngram"
    """The text so far: where its last tokens stood before, the answer may go on as it did there. Not weighed."""
    DRAFT = "draft"
    """The draft model. Not weighed."""
    OFF = "off"


class Pooling(enum.StrEnum):
    """How the hidden states of a sequence, after the model's last norm, become one vector."""

    LAST = "last"
    """The last token's."""
    MEAN = "mean"
    """The mean over all tokens."""


@dataclass(slots=True, eq=False)
class Request:
    """A sequence on its way through the scheduler. Only the engine thread touches it after admission.

    The scheduler's whole idea of progress is two numbers: `num_tokens` (prompt plus generated so far) and
    `num_computed_tokens` (whose keys and values are in the cache). Prefill and decode are both "compute
    the difference"; decode is the case of 1.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    eos_token_ids: frozenset[int]
    seed: int
    """sampling.seed, or the random one drawn at admission."""
    max_total_tokens: int
    """Prompt plus answer may be this long: from max_tokens and the context length."""
    arrival_time: float
    """time.monotonic() when the engine accepted it."""
    deadline: float | None = None
    """time.monotonic() after which it ends with TIMEOUT."""
    priority: int = 0
    """Lower runs first among the waiting."""
    cache_salt: str | None = None
    """Requests share cached prefix blocks only with requests of the same salt."""
    constraint: "TokenConstraint | None" = None
    """What its answer must be; it is this request's own."""
    speculation: Speculation = Speculation.AUTO
    pooling: Pooling | None = None
    """With it, a vector is wanted and no token: all of the prompt is prefill."""

    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(init=False)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache at first admission."""
    first_scheduled_time: float | None = None
    """time.monotonic() of the first step that computed some of it."""
    num_preemptions: int = 0
    num_bypassed: int = 0
    """Newer requests that were started while this one waited for cache blocks."""
    num_draft_tokens: int = 0
    """Guesses at its tokens that were computed."""
    num_accepted_tokens: int = 0
    """Of these, the ones that were right."""
    finish_reason: FinishReason | None = None
    prompt_logprobs: "list[TokenLogprobs]" = field(default_factory=list)
    """Of the prompt's tokens after its first one, as far as they are computed; only where sampling asks for them."""
    pooled: tuple[float, ...] | None = None
    """With Pooling.MEAN the sum so far, from num_computed_tokens 0 on; with LAST what the last chunk gave."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_prefill_tokens(self) -> int:
        """Uncomputed tokens that go into prefill chunks: all but the last one, which is a decode row."""
        return self.num_uncomputed_tokens - (self.pooling is None)

    @property
    def is_stream(self) -> bool:
        """Whether its next step is a decode row."""
        return self.pooling is None and self.num_uncomputed_tokens == 1

    @property
    def wants_whole_prompt(self) -> bool:
        """Whether every token has to be computed for it, whatever is cached."""
        return self.wants_prompt_logprobs or self.pooling is Pooling.MEAN

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether some of the prompt's log-probabilities, for which all of it has to be computed, are still missing."""
        return self.sampling.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    def scored_ids(self, start: int, end: int) -> tuple[int, ...]:
        """PrefillChunk.scored_ids of the chunk from position `start` to before `end`."""
        if not self.wants_prompt_logprobs:
            return ()
        return tuple(self.prompt_token_ids[start + 1 : end + 1])

    def add_prompt_logprobs(self, start: int, scores: "tuple[TokenLogprobs, ...]") -> None:
        """Take those of a chunk at `start`; some are known already where a preempted prompt is computed again."""
        self.prompt_logprobs.extend(scores[len(self.prompt_logprobs) - start :])

    def chunk_pooling(self, end: int) -> Pooling | None:
        """PrefillChunk.pooling of the chunk that ends before position `end`."""
        return None if self.pooling is Pooling.LAST and end < self.num_tokens else self.pooling

    def add_pooled(self, state: tuple[float, ...]) -> None:
        """Take what a chunk gave."""
        if self.pooling is Pooling.MEAN and self.pooled is not None:
            state = tuple(before + more for before, more in zip(self.pooled, state, strict=True))
        self.pooled = state

    def embedding(self) -> tuple[float, ...] | None:
        """The vector, not normalised; None before all is computed."""
        if self.pooled is None or self.num_uncomputed_tokens > 0:
            return None
        if self.pooling is Pooling.LAST:
            return self.pooled
        return tuple(each / self.num_tokens for each in self.pooled)

    def restart(self) -> None:
        """All of it has to be computed anew."""
        self.num_computed_tokens = 0
        self.pooled = None

    def penalty_history(self, start: int) -> tuple[int, ...]:
        """DecodeRow.history of the row at position `start`. The token at `start` need not be known."""
        first = start
        if self.sampling.penalises_repetition:
            window = self.sampling.repeat_last_n
            first = 0 if window < 0 else max(0, start + 1 - window)
        if self.sampling.penalises_answer:
            first = min(first, self.num_prompt_tokens)
        return tuple(self.token_ids[first:start])

    def banned_token_ids(self, output_index: int) -> tuple[int, ...]:
        """DecodeRow.banned_token_ids of the row that chooses generated token number `output_index`, from 0."""
        if output_index >= self.sampling.min_tokens:
            return ()
        ending = self.sampling.stop_token_ids
        if not self.sampling.ignore_eos:
            ending = ending | self.eos_token_ids
        return tuple(sorted(ending))

    def stop_reason_after(self, token_id: int) -> FinishReason | None:
        """The reason to end after `token_id` was appended, or None to go on."""
        if token_id in self.sampling.stop_token_ids:
            return FinishReason.STOP
        if token_id in self.eos_token_ids and not self.sampling.ignore_eos:
            return FinishReason.STOP
        if self.num_tokens >= self.max_total_tokens:
            return FinishReason.LENGTH
        return None
