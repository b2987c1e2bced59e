"""From a generation's events to output items, and to the events of a stream that tell of them.

An item is a run of deltas of one kind: thoughts, text, or one call. What the model thinks is the summary of its
reasoning item: it is all there is, and the place where clients look.
"""

from collections.abc import Iterator
from typing import Any

from mlxserve.api.openai.responses.tools import Toolbox
from mlxserve.core.generation import ReasoningDelta, TextDelta, ToolCallDelta

Delta = TextDelta | ReasoningDelta | ToolCallDelta
WireObject = dict[str, Any]


class Output:
    """The output of one response while it grows. `items` are complete once close() was called."""

    def __init__(self, response_id: str, tools: Toolbox) -> None:
        self.items: list[WireObject] = []
        self._suffix = response_id.removeprefix("resp_")
        self._tools = tools
        self._key: object = None
        """Of the open item; None: there is none."""
        self._texts: list[str] = []
        """Of the open item, so far."""

    def push(self, delta: Delta) -> Iterator[WireObject]:
        """Take a delta; gives the events that tell of it, without their sequence numbers. Has to be read to its end."""
        match delta:
            case ToolCallDelta():
                key: object = (ToolCallDelta, delta.index)
                text = delta.arguments
            case TextDelta() | ReasoningDelta():
                key, text = type(delta), delta.text
                if not text:
                    return
        if key != self._key:
            yield from self.close("completed")
            self._key = key
            yield from self._open(delta)
        if text:
            self._texts.append(text)
            yield self._part_event(_DELTA_EVENTS[self.items[-1]["type"]]) | self._delta_fields(text)

    def close(self, status: str) -> Iterator[WireObject]:
        """Close the open item, if there is one. Has to be read to its end."""
        if self._key is None:
            return
        item, text = self.items[-1], "".join(self._texts)
        self._key = None
        self._texts.clear()
        match item["type"]:
            case "message":
                item["content"] = [_text_part(text)]
                yield self._part_event("response.output_text.done") | {"text": text, "logprobs": []}
                yield self._part_event("response.content_part.done") | {"part": _text_part(text)}
            case "reasoning":
                item["summary"] = [_summary_part(text)]
                yield self._part_event("response.reasoning_summary_text.done") | {"text": text}
                yield self._part_event("response.reasoning_summary_part.done") | {"part": _summary_part(text)}
            case _:
                item["arguments"] = text
                done = {"name": item["name"], "arguments": text}
                yield self._part_event("response.function_call_arguments.done") | done
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _open(self, delta: Delta) -> Iterator[WireObject]:
        index = len(self.items)
        suffix = f"{self._suffix}{index:02x}"
        match delta:
            case TextDelta():
                item: WireObject = {"id": f"msg_{suffix}", "type": "message", "role": "assistant", "content": []}
            case ReasoningDelta():
                item = {"id": f"rs_{suffix}", "type": "reasoning", "summary": []}
            case ToolCallDelta():
                item = {"id": f"fc_{suffix}", "type": "function_call", "call_id": delta.call_id}
                item |= self._tools.wire_names(delta.name or "") | {"arguments": ""}
        item["status"] = "in_progress"
        self.items.append(item)
        yield {"type": "response.output_item.added", "output_index": index, "item": item}
        if isinstance(delta, TextDelta):
            yield self._part_event("response.content_part.added") | {"part": _text_part("")}
        elif isinstance(delta, ReasoningDelta):
            yield self._part_event("response.reasoning_summary_part.added") | {"part": _summary_part("")}

    def _part_event(self, kind: str) -> WireObject:
        """An event about the last item's only part."""
        item = self.items[-1]
        place: WireObject = {"type": kind, "item_id": item["id"], "output_index": len(self.items) - 1}
        if item["type"] == "message":
            place["content_index"] = 0
        elif item["type"] == "reasoning":
            place["summary_index"] = 0
        return place

    def _delta_fields(self, text: str) -> WireObject:
        return {"delta": text, "logprobs": []} if self.items[-1]["type"] == "message" else {"delta": text}


_DELTA_EVENTS = {
    "message": "response.output_text.delta",
    "reasoning": "response.reasoning_summary_text.delta",
    "function_call": "response.function_call_arguments.delta",
}


def _text_part(text: str) -> WireObject:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _summary_part(text: str) -> WireObject:
    return {"type": "summary_text", "text": text}
