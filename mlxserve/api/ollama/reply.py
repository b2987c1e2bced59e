"""From the pieces of an answer to the wire: lines of a stream, or one object.

Both kinds of answers have a class with the same methods: `line()` gives a piece of a stream; `end()` the object that
says how it ended, with all of the answer in it where it is the only one.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from mlxserve.api.ollama.times import nanoseconds, timestamp
from mlxserve.core.generation import Finished
from mlxserve.core.step import SampledToken

TokenBytes = Callable[[int], bytes]

# JSON has no minus infinity.
_LOWEST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class ToolCall:
    index: int
    call_id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """Something new of an answer, or all of it."""

    text: str = ""
    thinking: str = ""
    calls: tuple[ToolCall, ...] = ()
    tokens: tuple[SampledToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Logprobs:
    """How log-probabilities are written, where they are asked for."""

    token_bytes: TokenBytes
    is_wanted: bool

    def of(self, tokens: Iterable[SampledToken]) -> dict[str, Any]:
        entries = [self._entry(token) for token in tokens] if self.is_wanted else []
        return {"logprobs": entries} if entries else {}

    def _entry(self, token: SampledToken) -> dict[str, Any]:
        logprobs = token.logprobs
        if logprobs is None:
            return self._token(token.token_id, _LOWEST_LOGPROB)
        entry = self._token(token.token_id, logprobs.logprob)
        if logprobs.top:
            entry["top_logprobs"] = [self._token(token_id, logprob) for token_id, logprob in logprobs.top]
        return entry

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self.token_bytes(token_id)
        return {
            "token": data.decode(errors="replace"),
            "logprob": max(logprob, _LOWEST_LOGPROB),
            "bytes": list(data),
        }


@dataclass(frozen=True, slots=True)
class GenerateReply:
    """/api/generate."""

    model: str
    """As the client called it."""
    logprobs: Logprobs
    gives_context: bool = True

    def line(self, part: Part) -> dict[str, Any]:
        return {**self._head(part), "done": False, **self.logprobs.of(part.tokens)}

    def end(self, part: Part, finished: Finished, token_ids: list[int]) -> dict[str, Any]:
        """`token_ids`: of prompt and answer."""
        context = {"context": token_ids} if self.gives_context else {}
        return {
            **self._head(part),
            **done(finished.reason.value),
            **context,
            **durations(finished),
            **self.logprobs.of(part.tokens),
        }

    def _head(self, part: Part) -> dict[str, Any]:
        thinking = {"thinking": part.thinking} if part.thinking else {}
        return {**head(self.model), "response": part.text, **thinking}


@dataclass(frozen=True, slots=True)
class ChatReply:
    """/api/chat."""

    model: str
    """As the client called it."""
    logprobs: Logprobs

    def line(self, part: Part) -> dict[str, Any]:
        return {**self._head(part), "done": False, **self.logprobs.of(part.tokens)}

    def end(self, part: Part, finished: Finished, token_ids: list[int]) -> dict[str, Any]:
        return {
            **self._head(part),
            **done(finished.reason.value),
            **durations(finished),
            **self.logprobs.of(part.tokens),
        }

    def _head(self, part: Part) -> dict[str, Any]:
        return {**head(self.model), "message": chat_message(part)}


Reply = GenerateReply | ChatReply


def chat_message(part: Part) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": part.text}
    if part.thinking:
        message["thinking"] = part.thinking
    if part.calls:
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "function": {"index": call.index, "name": call.name, "arguments": call.arguments},
            }
            for call in part.calls
        ]
    return message


def head(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": timestamp(time.time_ns())}


def done(reason: str) -> dict[str, Any]:
    """`reason`: stop, length, load or unload."""
    return {"done": True, "done_reason": reason}


def durations(finished: Finished) -> dict[str, int]:
    """Nanoseconds, and counts of tokens. Tokens found in the prefix cache count as evaluated, as with Ollama."""
    usage, timings = finished.usage, finished.timings
    return {
        "total_duration": nanoseconds(timings.total),
        "load_duration": nanoseconds(timings.load),
        "prompt_eval_count": usage.num_prompt_tokens,
        "prompt_eval_duration": nanoseconds(timings.prefill),
        "eval_count": usage.num_generated_tokens,
        "eval_duration": nanoseconds(timings.decode),
    }
