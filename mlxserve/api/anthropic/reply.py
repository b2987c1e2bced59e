"""From a generation's events to content blocks: as they come, or whole.

A block is a run of events of one kind: text, thinking, or one tool call.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from pydantic_core import from_json

from mlxserve.core.generation import Finished, ReasoningDelta, TextDelta, ToolCallDelta, Usage
from mlxserve.core.request import FinishReason

Delta = TextDelta | ReasoningDelta | ToolCallDelta
WireObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """What the reply to one request says beside its content."""

    message_id: str
    model: str
    max_tokens: int
    shows_thinking: bool = True
    """False: thinking blocks come without their text."""

    def message(self, content: list[WireObject], usage: Usage, finished: Finished | None) -> WireObject:
        """A Message; without `finished` one that has just begun."""
        return {
            "id": self.message_id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **self.ending(finished),
            "usage": usage_object(usage),
        }

    def ending(self, finished: Finished | None) -> WireObject:
        """Why an answer ended; without `finished` nothing yet."""
        if finished is None:
            return {"stop_reason": None, "stop_sequence": None}
        return {"stop_reason": self._stop_reason(finished), "stop_sequence": finished.stop_string}

    def _stop_reason(self, finished: Finished) -> str:
        if finished.reason is FinishReason.LENGTH:
            is_cut = finished.usage.num_generated_tokens >= self.max_tokens
            return "max_tokens" if is_cut else "model_context_window_exceeded"
        if finished.stop_string is not None:
            return "stop_sequence"
        return "tool_use" if finished.num_tool_calls else "end_turn"

    def blocks(self, deltas: Iterable[Delta]) -> list[WireObject]:
        """The content of a whole answer."""
        return [self._block(list(run)) for _, run in groupby(filter(_says_something, deltas), key=_block_key)]

    def _block(self, run: Sequence[Delta]) -> WireObject:
        match run[0]:
            case ToolCallDelta() as first:
                arguments = "".join(delta.arguments for delta in run if isinstance(delta, ToolCallDelta))
                return _opening(first) | {"input": _parsed(arguments)}
            case TextDelta():
                return {"type": "text", "text": _text(run)}
            case ReasoningDelta():
                thinking = _text(run)
                shown = thinking if self.shows_thinking else ""
                return {"type": "thinking", "thinking": shown, "signature": _signature([thinking])}


class BlockStream:
    """The events of a stream's content blocks. One object for one answer."""

    def __init__(self, *, shows_thinking: bool) -> None:
        self._shows_thinking = shows_thinking
        self._index = -1
        self._key: object = None
        """Of the open block; None: there is none."""
        self._thinking: list[str] = []
        """Of the open block, so far."""

    def push(self, delta: Delta) -> Iterator[WireObject]:
        if not _says_something(delta):
            return
        if _block_key(delta) != self._key:
            yield from self.close()
            self._key = _block_key(delta)
            self._index += 1
            yield {"type": "content_block_start", "index": self._index, "content_block": _opening(delta)}
        match delta:
            case TextDelta():
                yield self._delta({"type": "text_delta", "text": delta.text})
            case ReasoningDelta():
                self._thinking.append(delta.text)
                if self._shows_thinking:
                    yield self._delta({"type": "thinking_delta", "thinking": delta.text})
            case ToolCallDelta():
                if delta.arguments:
                    yield self._delta({"type": "input_json_delta", "partial_json": delta.arguments})

    def close(self) -> Iterator[WireObject]:
        """Close the open block, if there is one."""
        if self._key is None:
            return
        if self._thinking:
            yield self._delta({"type": "signature_delta", "signature": _signature(self._thinking)})
            self._thinking.clear()
        self._key = None
        yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, delta: WireObject) -> WireObject:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def usage_object(usage: Usage) -> WireObject:
    """Prompt tokens that were found in the cache are no `input_tokens`, as at Anthropic's.

    Nothing is ever said to be written to the cache: all prompts are, and it costs nothing.
    """
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_generated_tokens,
        "output_tokens_details": {"thinking_tokens": usage.num_reasoning_tokens},
    }


def tool_use_id(call_id: str) -> str:
    """A call's id as Anthropic's clients expect it."""
    return "toolu_" + re.sub(r"[^a-zA-Z0-9_-]", "_", re.sub(r"^(call|toolu)[_-]", "", call_id))


def _says_something(delta: Delta) -> bool:
    return isinstance(delta, ToolCallDelta) or bool(delta.text)


def _block_key(delta: Delta) -> object:
    return (ToolCallDelta, delta.index) if isinstance(delta, ToolCallDelta) else type(delta)


def _opening(delta: Delta) -> WireObject:
    """A block before any of its content."""
    match delta:
        case TextDelta():
            return {"type": "text", "text": ""}
        case ReasoningDelta():
            return {"type": "thinking", "thinking": "", "signature": ""}
        case ToolCallDelta():
            return {"type": "tool_use", "id": tool_use_id(delta.call_id), "name": delta.name or "", "input": {}}


def _text(run: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in run if not isinstance(delta, ToolCallDelta))


def _signature(thinking: Iterable[str]) -> str:
    """Anthropic's servers sign thinking; clients send back only what has a signature. This one is never checked."""
    return hashlib.sha256("".join(thinking).encode()).hexdigest()


def _parsed(arguments: str) -> WireObject:
    """The arguments of a call; of one that was cut off, as far as they go, as clients read them from a stream."""
    try:
        parsed = from_json(arguments, allow_partial=True)
        # Numbers may be infinite to Python, which JSON has no way to say.
        json.dumps(parsed, allow_nan=False)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
