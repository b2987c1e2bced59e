"""From a generation's events to the wire: chunks of a stream, or one object.

Each kind of completion has a class with the same methods: `opening()`, `empty()`, `prompt()`, `delta()` and `finish()`
give the chunks of one choice, `choice()` gives the whole of it.
"""

import codecs
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxserve import __version__
from mlxserve.core.generation import (
    Finished,
    PrefillProgress,
    PromptLogprobs,
    ReasoningDelta,
    TextDelta,
    Timings,
    ToolCallDelta,
    Usage,
)
from mlxserve.core.request import FinishReason
from mlxserve.core.step import SampledToken, TokenLogprobs

TokenBytes = Callable[[int], bytes]
AnswerDelta = TextDelta | ReasoningDelta | ToolCallDelta

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

    def __init__(self, token_bytes: TokenBytes, *, with_logprobs: bool, with_prompt_logprobs: bool = False) -> None:
        self._token_bytes = token_bytes
        self._with_logprobs = with_logprobs
        self.wants_prompt_logprobs = with_prompt_logprobs
        """Whether every choice needs its prompt's PromptLogprobs before anything else."""

    def opening(self, index: int) -> dict[str, Any] | None:
        return self._chunk(index, {"role": "assistant", "content": ""})

    def empty(self, index: int) -> dict[str, Any]:
        return self._chunk(index, {})

    def prompt(self, index: int, prompt: PromptLogprobs) -> dict[str, Any] | None:
        return None

    def delta(self, index: int, delta: AnswerDelta) -> dict[str, Any] | None:
        """None where there is nothing to tell, as for a token whose bytes are not a whole character yet."""
        match delta:
            case TextDelta(text=text, tokens=tokens):
                if not text and not (self._with_logprobs and tokens):
                    return None
                return self._chunk(index, {"content": text}, logprobs=self._logprobs([delta]))
            case ReasoningDelta(text=text):
                return self._chunk(index, _reasoning(text)) if text else None
            case ToolCallDelta():
                if delta.name is None and not delta.arguments:
                    return None
                return self._chunk(index, {"tool_calls": [_tool_call_piece(delta)]})

    def finish(self, index: int, finished: Finished) -> dict[str, Any]:
        return self._chunk(index, {}, finish_reason=_finish_reason(finished))

    def choice(
        self, index: int, deltas: Sequence[AnswerDelta], finished: Finished, prompt: PromptLogprobs | None
    ) -> dict[str, Any]:
        texts = [delta for delta in deltas if isinstance(delta, TextDelta)]
        content = "".join(delta.text for delta in texts)
        thought = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
        calls = _tool_calls([delta for delta in deltas if isinstance(delta, ToolCallDelta)])
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        if thought:
            message |= _reasoning(thought)
        choice = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(texts),
            "finish_reason": _finish_reason(finished),
        }
        if prompt is not None:
            choice["prompt_logprobs"] = prompt_logprobs_list(prompt, self._token_bytes)
        return choice

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
        logprob, top = (_LOWEST_LOGPROB, []) if token.logprobs is None else _logprob_and_top(token.logprobs)
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

    def __init__(
        self,
        token_bytes: TokenBytes,
        *,
        num_logprobs: int | None,
        num_choices: int,
        echoes: Sequence[str] = (),
        with_prompt_logprobs: bool = False,
    ) -> None:
        """`echoes`: each choice's prompt, if texts are to begin with it; empty if not."""
        self._token_bytes = token_bytes
        self._num_logprobs = num_logprobs
        self._echoes = echoes
        self._text_lengths = [0] * num_choices
        self._with_prompt_logprobs = with_prompt_logprobs
        self._scores_echoes = bool(echoes) and num_logprobs is not None
        self.wants_prompt_logprobs = with_prompt_logprobs or self._scores_echoes
        """Whether every choice needs its prompt's PromptLogprobs before anything else."""

    def opening(self, index: int) -> dict[str, Any] | None:
        if not self._echoes or self._scores_echoes:
            return None
        return self._choice(index, self._echoes[index], None, None)

    def empty(self, index: int) -> dict[str, Any]:
        return self._choice(index, "", None, None)

    def prompt(self, index: int, prompt: PromptLogprobs) -> dict[str, Any] | None:
        if not self._scores_echoes:
            return None
        text = self._echoes[index]
        return self._choice(index, text, self._logprobs(index, [self._echo(index, prompt)]), None)

    def delta(self, index: int, delta: AnswerDelta) -> dict[str, Any] | None:
        """None where there is nothing to tell, as for a token whose bytes are not a whole character yet.

        What goes on from a text is text: nothing is parsed out of it.
        """
        if not isinstance(delta, TextDelta) or (not delta.text and (self._num_logprobs is None or not delta.tokens)):
            return None
        return self._choice(index, delta.text, self._logprobs(index, [delta]), None)

    def finish(self, index: int, finished: Finished) -> dict[str, Any]:
        return self._choice(index, "", None, finished.reason.value)

    def choice(
        self, index: int, deltas: Sequence[AnswerDelta], finished: Finished, prompt: PromptLogprobs | None
    ) -> dict[str, Any]:
        parts = [delta for delta in deltas if isinstance(delta, TextDelta)]
        text = "".join(delta.text for delta in parts)
        if self._echoes:
            text = self._echoes[index] + text
        if prompt is not None and self._scores_echoes:
            parts.insert(0, self._echo(index, prompt))
        choice = self._choice(index, text, self._logprobs(index, parts), finished.reason.value)
        if prompt is not None and self._with_prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs_list(prompt, self._token_bytes)
        return choice

    def _choice(self, index: int, text: str, logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _echo(self, index: int, prompt: PromptLogprobs) -> TextDelta:
        return TextDelta(self._echoes[index], prompt.tokens)

    def _logprobs(self, index: int, deltas: Iterable[TextDelta]) -> dict[str, Any] | None:
        """Offsets count characters of this choice's text."""
        if self._num_logprobs is None:
            return None
        tokens: list[str] = []
        token_logprobs: list[float | None] = []
        top_logprobs: list[dict[str, float] | None] = []
        text_offset: list[int] = []
        for delta in deltas:
            start = self._text_lengths[index]
            num_before, decoder = 0, codecs.getincrementaldecoder("utf-8")(errors="ignore")
            for position, token in enumerate(delta.tokens):
                data = self._token_bytes(token.token_id)
                tokens.append(token_text(data))
                text_offset.append(start + min(num_before, len(delta.text)))
                if position == 0 and token.logprobs is None and not delta.text[: len(data)].encode().startswith(data):
                    # What the tokenizer put before a prompt is no part of its text.
                    data = b""
                if token.logprobs is None:
                    token_logprobs.append(None)
                    top_logprobs.append(None)
                else:
                    logprob, top = _logprob_and_top(token.logprobs)
                    token_logprobs.append(logprob)
                    # The chosen token is among them even where it is not one of the likeliest.
                    top_logprobs.append(
                        {token_text(self._token_bytes(key)): value for key, value in top} | {tokens[-1]: logprob}
                    )
                num_before += len(decoder.decode(data))
            self._text_lengths[index] += len(delta.text)
        return {
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs if self._num_logprobs else None,
            "text_offset": text_offset,
        }


Reply = ChatReply | CompletionReply


def _finish_reason(finished: Finished) -> str:
    """OpenAI says "stop" where one tool was named; the other local servers say "tool_calls" of every call."""
    if finished.num_tool_calls and finished.reason is FinishReason.STOP:
        return "tool_calls"
    return finished.reason.value


def _reasoning(text: str) -> dict[str, str]:
    """By both names that clients look for; OpenAI has none."""
    return {"reasoning_content": text, "reasoning": text}


def _tool_call_piece(delta: ToolCallDelta) -> dict[str, Any]:
    if delta.name is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"index": delta.index, "id": delta.call_id, "type": "function", "function": function}


def _tool_calls(deltas: Sequence[ToolCallDelta]) -> list[dict[str, Any]]:
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        if delta.name is not None:
            function = {"name": delta.name, "arguments": ""}
            calls[delta.index] = {"id": delta.call_id, "type": "function", "function": function}
        calls[delta.index]["function"]["arguments"] += delta.arguments
    return list(calls.values())


def usage_object(usages: Iterable[Usage]) -> dict[str, Any]:
    """The sum over all prompts."""
    parts = list(usages)
    prompt = sum(usage.num_prompt_tokens for usage in parts)
    generated = sum(usage.num_generated_tokens for usage in parts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(usage.num_cached_tokens for usage in parts)},
        "completion_tokens_details": {"reasoning_tokens": sum(usage.num_reasoning_tokens for usage in parts)},
    }


def progress_object(progress: PrefillProgress) -> dict[str, Any]:
    """llama-server's `prompt_progress`; `processed` counts the tokens found in the cache, too."""
    return {
        "total": progress.num_prompt_tokens,
        "cache": progress.num_cached_tokens,
        "processed": progress.num_computed_tokens,
        "time_ms": progress.seconds * 1000,
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
        "load_ms": timings.load * 1000,
        "queue_ms": timings.queue * 1000,
        "total_ms": timings.total * 1000,
    }


def token_text(data: bytes) -> str:
    r"""A token as text; one that is no whole UTF-8 as OpenAI writes it: `bytes:\xe2\x82`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def prompt_logprobs_list(prompt: PromptLogprobs, token_bytes: TokenBytes) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token of the prompt null (the first one) or an object by token id."""
    entries: list[dict[str, Any] | None] = []
    for token in prompt.tokens:
        if token.logprobs is None:
            entries.append(None)
            continue
        logprob, top = _logprob_and_top(token.logprobs)
        entries.append(
            {
                str(token_id): {"logprob": value, "decoded_token": token_text(token_bytes(token_id))}
                for token_id, value in {token.token_id: logprob, **dict(top)}.items()
            }
        )
    return entries


def _logprob_and_top(logprobs: TokenLogprobs) -> tuple[float, list[tuple[int, float]]]:
    top = [(token_id, max(logprob, _LOWEST_LOGPROB)) for token_id, logprob in logprobs.top]
    return max(logprobs.logprob, _LOWEST_LOGPROB), top


def _rate(count: int, seconds: float) -> float:
    return count / seconds if count > 0 and seconds > 0 else 0.0
