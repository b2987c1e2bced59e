"""One sequence as the scheduler sees it: token ids and counts, never text."""

import enum
from dataclasses import dataclass, field

from mlxserve.core.sampling_params import SamplingParams


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
    speculation: Speculation = Speculation.AUTO

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

    def stop_reason_after(self, token_id: int) -> FinishReason | None:
        """The reason to end after `token_id` was appended, or None to go on."""
        if token_id in self.sampling.stop_token_ids:
            return FinishReason.STOP
        if token_id in self.eos_token_ids and not self.sampling.ignore_eos:
            return FinishReason.STOP
        if self.num_tokens >= self.max_total_tokens:
            return FinishReason.LENGTH
        return None
