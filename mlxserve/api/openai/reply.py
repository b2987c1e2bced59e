"""From a generation's events to the wire: chunks of a stream, or one object.

Each kind of completion has a class with the same methods: `opening()`, `delta()` and `finish()` give the chunks of one
choice, `choice()` gives the whole of it.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxserve import __version__
from mlxserve.core.generation import Finished, TextDelta, Timings, Usage
from mlxserve.core.step import SampledToken

TokenBytes = Callable[[int], bytes]

# JSON has no minus infinity; OpenAI writes this for a probability of nearly nothing.
_LOWEST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class Envelope:
    """The fields that all chunks of a reply share."""

    request_id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def wrap(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"mlxserve-{__version__}",
            "choices": choices,
        }


class ChatReply:
    """/v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, token_bytes: TokenBytes, *, with_logprobs: bool) -> None:
        self._token_bytes = token_bytes
        self._with_logprobs = with_logprobs

    def opening(self, index: int) -> dict[str, Any] | None:
        return self._chunk(index, {"role": "assistant", "content": ""})

    def delta(self, index: int, delta: TextDelta) -> dict[str, Any] | None:
        """None where there is nothing to tell, as for a token whose bytes are not a whole character yet."""
        if not delta.text and not (self._with_logprobs and delta.tokens):
            return None
        return self._chunk(index, {"content": delta.text}, logprobs=self._logprobs([delta]))

    def finish(self, index: int, finished: Finished) -> dict[str, Any]:
        return self._chunk(index, {}, finish_reason=finished.reason.value)

    def choice(self, index: int, deltas: Sequence[TextDelta], finished: Finished) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(delta.text for delta in deltas), "refusal": None},
            "logprobs": self._logprobs(deltas),
            "finish_reason": finished.reason.value,
        }

    def _chunk(
        self, index: int, delta: dict[str, Any], *, logprobs: Any = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, deltas: Iterable[TextDelta]) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        tokens = [self._entry(token) for delta in deltas for token in delta.tokens]
        return {"content": tokens, "refusal": None}

    def _entry(self, token: SampledToken) -> dict[str, Any]:
        logprob, top = _logprob_and_top(token)
        return {
            **self._token(token.token_id, logprob),
            "top_logprobs": [self._token(token_id, value) for token_id, value in top],
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._token_bytes(token_id)
        return {"token": token_text(data), "logprob": logprob, "bytes": list(data)}


class CompletionReply:
    """/v1/completions."""

    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, token_bytes: TokenBytes, *, num_logprobs: int | None, num_choices: int) -> None:
        self._token_bytes = token_bytes
        self._num_logprobs = num_logprobs
        self._text_lengths = [0] * num_choices

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def delta(self, index: int, delta: TextDelta) -> dict[str, Any] | None:
        """None where there is nothing to tell, as for a token whose bytes are not a whole character yet."""
        if not delta.text and (self._num_logprobs is None or not delta.tokens):
            return None
        return self._choice(index, delta.text, self._logprobs(index, [delta]), None)

    def finish(self, index: int, finished: Finished) -> dict[str, Any]:
        return self._choice(index, "", None, finished.reason.value)

    def choice(self, index: int, deltas: Sequence[TextDelta], finished: Finished) -> dict[str, Any]:
        text = "".join(delta.text for delta in deltas)
        return self._choice(index, text, self._logprobs(index, deltas), finished.reason.value)

    def _choice(self, index: int, text: str, logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, index: int, deltas: Iterable[TextDelta]) -> dict[str, Any] | None:
        """Offsets count characters of this choice's text."""
        if self._num_logprobs is None:
            return None
        tokens: list[str] = []
        token_logprobs: list[float] = []
        top_logprobs: list[dict[str, float]] = []
        text_offset: list[int] = []
        for delta in deltas:
            start = self._text_lengths[index]
            before = b""
            for token in delta.tokens:
                data = self._token_bytes(token.token_id)
                logprob, top = _logprob_and_top(token)
                tokens.append(token_text(data))
                token_logprobs.append(logprob)
                text_offset.append(start + min(len(before.decode(errors="ignore")), len(delta.text)))
                # The chosen token is among them even where it is not one of the likeliest.
                top_logprobs.append(
                    {token_text(self._token_bytes(key)): value for key, value in top} | {tokens[-1]: logprob}
                )
                before += data
            self._text_lengths[index] += len(delta.text)
        return {
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs if self._num_logprobs else None,
            "text_offset": text_offset,
        }


Reply = ChatReply | CompletionReply


def usage_object(usages: Iterable[Usage]) -> dict[str, Any]:
    """The sum over all choices."""
    parts = list(usages)
    prompt = sum(usage.num_prompt_tokens for usage in parts)
    generated = sum(usage.num_generated_tokens for usage in parts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(usage.num_cached_tokens for usage in parts)},
    }


def timings_object(usage: Usage, timings: Timings) -> dict[str, Any]:
    """llama-server's `timings`, times in milliseconds, and what TTFT is made of.

    `prompt_n` counts the prompt tokens computed, `cache_n` those found in the cache. `predicted_ms` runs from the
    first token to the last one, so its rate is over one token less than `predicted_n`.
    """
    computed = usage.num_prompt_tokens - usage.num_cached_tokens
    return {
        "cache_n": usage.num_cached_tokens,
        "prompt_n": computed,
        "prompt_ms": timings.prefill * 1000,
        "prompt_per_second": _rate(computed, timings.prefill),
        "predicted_n": usage.num_generated_tokens,
        "predicted_ms": timings.decode * 1000,
        "predicted_per_second": _rate(usage.num_generated_tokens - 1, timings.decode),
        "draft_n": usage.num_draft_tokens,
        "draft_n_accepted": usage.num_accepted_tokens,
        "ttft_ms": timings.time_to_first_token * 1000,
        "front_end_ms": timings.front_end * 1000,
        "queue_ms": timings.queue * 1000,
        "total_ms": timings.total * 1000,
    }


def token_text(data: bytes) -> str:
    r"""A token as text; one that is no whole UTF-8 as OpenAI writes it: `bytes:\xe2\x82`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _logprob_and_top(token: SampledToken) -> tuple[float, list[tuple[int, float]]]:
    if token.logprobs is None:
        return _LOWEST_LOGPROB, []
    top = [(token_id, max(logprob, _LOWEST_LOGPROB)) for token_id, logprob in token.logprobs.top]
    return max(token.logprobs.logprob, _LOWEST_LOGPROB), top


def _rate(count: int, seconds: float) -> float:
    return count / seconds if count > 0 and seconds > 0 else 0.0
