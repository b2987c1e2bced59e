"""How the next token is chosen, per request."""

import hashlib
import math
from dataclasses import dataclass

from mlxserve.errors import InvalidParameter

MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
MAX_STOP_TOKEN_IDS = 256


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request, validated on construction.

    The order in which they apply to the model's logits:

    1. logit_bias is added.
    2. repetition_penalty, to every token that is among the last repeat_last_n of prompt and answer together: a positive
       logit is divided by it, another one multiplied (Keskar et al. 2019, as Hugging Face and llama.cpp have it).
    3. presence_penalty, and frequency_penalty times the number of occurrences, are subtracted from every token that the
       answer has so far; the prompt does not count (as OpenAI defines them).
    4. Tokens that would end the answer are ruled out while it is shorter than min_tokens.
    5. temperature divides the logits.
    6. typical_p, top_k, top_p and min_p, in this order, each cut the set of candidates, each on the distribution left
       by the one before.
    7. One token is drawn.

    Temperature 0 is greedy: after the first four the largest logit wins, and the rest does not matter.
    Log-probabilities are those of the model's logits as they were before all of this.

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
    typical_p: float = 1.0
    """Keep the smallest set of tokens, those first whose surprise -log p is closest to the entropy, whose probabilities
    reach this sum (Meister et al., "Locally Typical Sampling", 2023). 1 keeps all."""
    repetition_penalty: float = 1.0
    """1: none; more makes tokens that occurred less likely."""
    repeat_last_n: int = -1
    """How many of the last tokens, prompt included, repetition_penalty looks at: -1 all, 0 none."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), each id once."""
    min_tokens: int = 0
    """No end-of-sequence or stop token ends the answer within this many tokens; stop strings are searched for after."""
    prompt_logprobs: int | None = None
    """The same as num_logprobs for the tokens of the prompt."""

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("typical_p", self.typical_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 10.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for name in ("top_p", "typical_p", "repetition_penalty"):
            if getattr(self, name) == 0.0:
                raise InvalidParameter(f"{name} must be greater than 0", param=name)
        if self.top_k < 0:
            raise InvalidParameter(f"top_k must be 0 (off) or positive, not {self.top_k}", param="top_k")
        if self.repeat_last_n < -1:
            raise InvalidParameter(
                f"repeat_last_n must be -1 (all), 0 (none) or positive, not {self.repeat_last_n}", param="repeat_last_n"
            )
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise InvalidParameter("seed must fit into 64 unsigned bits", param="seed")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidParameter(f"max_tokens must be at least 1, not {self.max_tokens}", param="max_tokens")
        if self.min_tokens < 0:
            raise InvalidParameter(f"min_tokens must not be negative, it is {self.min_tokens}", param="min_tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                f"min_tokens is {self.min_tokens} and max_tokens only {self.max_tokens}", param="min_tokens"
            )
        if self.num_logprobs is not None and not 0 <= self.num_logprobs <= MAX_LOGPROBS:
            raise InvalidParameter(f"at most {MAX_LOGPROBS} logprobs a token", param="top_logprobs")
        if self.prompt_logprobs is not None and not 0 <= self.prompt_logprobs <= MAX_LOGPROBS:
            raise InvalidParameter(f"prompt_logprobs must be between 0 and {MAX_LOGPROBS}", param="prompt_logprobs")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidParameter(f"stop_token_ids has more than {MAX_STOP_TOKEN_IDS} tokens", param="stop_token_ids")
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise InvalidParameter(f"logit_bias has more than {MAX_LOGIT_BIASES} tokens", param="logit_bias")
        for token_id, bias in self.logit_bias:
            if not -100.0 <= bias <= 100.0:
                raise InvalidParameter(
                    f"logit_bias must be between -100 and 100; that of token {token_id} is {bias}",
                    param="logit_bias",
                )
        if len({token_id for token_id, _ in self.logit_bias}) < len(self.logit_bias):
            raise InvalidParameter("logit_bias gives a token two biases", param="logit_bias")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalises_repetition(self) -> bool:
        return self.repetition_penalty != 1.0 and self.repeat_last_n != 0

    @property
    def penalises_answer(self) -> bool:
        """Whether the next token depends on which tokens the answer has so far, beyond what the model makes of them."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def sample_seed(seed: int, index: int) -> int:
    """The seed of sample `index` of a request with `seed`: its own for the first one, a hash for the others."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _check_range(param: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidParameter(f"{param} must be between {low:g} and {high:g}, not {value}", param=param)
