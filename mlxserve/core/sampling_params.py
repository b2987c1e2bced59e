"""How the next token is chosen, per request."""

import math
from dataclasses import dataclass

from mlxserve.errors import InvalidParameter

MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request, validated on construction.

    The order in which they apply: temperature scales the logits, then top-k, top-p and min-p each cut the
    set of candidates (each on the distribution left by the one before), then one token is drawn.
    Temperature 0 is greedy: the largest logit wins and nothing else matters.

    Raises:
        InvalidParameter: a value is out of range; `param` is the field's name.
    """

    temperature: float = 1.0
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probabilities reach this sum."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the most likely one."""
    seed: int | None = None
    """Same seed, same prompt, same tokens, whatever else is in the batch. None: a random seed."""
    max_tokens: int | None = None
    """Tokens to generate at most. None: until the context is full."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the answer, beside the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token (stop_token_ids still stop)."""
    num_logprobs: int | None = None
    """None: no log-probabilities. k: of the chosen token and of the k most likely ones."""

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidParameter("top_p must be greater than 0", param="top_p")
        if self.top_k < 0:
            raise InvalidParameter(f"top_k must be 0 (off) or positive, not {self.top_k}", param="top_k")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise InvalidParameter("seed must fit into 64 unsigned bits", param="seed")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidParameter(f"max_tokens must be at least 1, not {self.max_tokens}", param="max_tokens")
        if self.num_logprobs is not None and not 0 <= self.num_logprobs <= MAX_LOGPROBS:
            raise InvalidParameter(f"at most {MAX_LOGPROBS} logprobs a token", param="top_logprobs")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def _check_range(param: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidParameter(f"{param} must be between {low:g} and {high:g}, not {value}", param=param)
