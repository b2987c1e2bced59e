"""What a conversation is made of: the items of a request's `input`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from mlxserve.api.wire import WireModel, unsupported

MAX_ITEMS = 100_000
MAX_PARTS = 10_000

Status = Literal["in_progress", "completed", "incomplete"]


def _refuse_other_types(what: str, *supported: str) -> BeforeValidator:
    """Others are refused by name; what is no object at all is left to the types."""

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, Mapping) else None
        if isinstance(kind, str) and kind not in supported:
            raise PydanticCustomError(
                "unsupported_parameter",
                "{what} of type {kind} are not supported here; send {supported}",
                {"what": what, "kind": repr(kind[:40]), "supported": " or ".join(supported)},
            )
        return value

    return BeforeValidator(check)


class TextPart(WireModel):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


def _text_or_list(value: Any) -> str | None:
    if isinstance(value, str):
        return ":text"
    return ":list" if isinstance(value, list) else None


Text = Annotated[
    Annotated[str, Tag(":text")]
    | Annotated[
        list[Annotated[TextPart, _refuse_other_types("parts", "input_text", "output_text")]],
        Field(max_length=MAX_PARTS, fail_fast=True),
        Tag(":list"),
    ],
    Discriminator(_text_or_list, "content_type", "Input should be a string or a list of parts"),
]


def joined(text: str | list[TextPart]) -> str:
    """A text as one string; parts become paragraphs."""
    return text if isinstance(text, str) else "\n".join(part.text for part in text)


class MessageItem(WireModel):
    role: Literal["user", "assistant", "system", "developer"]
    content: Text
    type: Literal["message"] | None = None
    id: str | None = None
    status: Status | None = None
    phase: str | None = None


class ThoughtPart(WireModel):
    type: Literal["summary_text", "reasoning_text"]
    text: str


Thoughts = Annotated[list[ThoughtPart], Field(max_length=MAX_PARTS, fail_fast=True)]


class ReasoningItem(WireModel):
    """What the model thought earlier in the conversation."""

    type: Literal["reasoning"]
    summary: Thoughts
    content: Thoughts | None = None
    id: str | None = None
    status: Status | None = None
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content or self.summary)


class FunctionCallItem(WireModel):
    """A call the model made earlier in the conversation."""

    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1, max_length=1000)]
    name: Annotated[str, Field(min_length=1, max_length=1000)]
    arguments: str
    namespace: Annotated[str, Field(max_length=1000)] | None = None
    id: str | None = None
    status: Status | None = None
    caller: Annotated[Any, unsupported({"type": "direct"})] = None


class FunctionCallOutputItem(WireModel):
    """What came of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Text
    id: str | None = None
    status: Status | None = None
    caller: Annotated[Any, unsupported({"type": "direct"})] = None


_ITEM_TYPES = ("message", "reasoning", "function_call", "function_call_output")


def _item_type(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    if kind is None:
        # A message may leave it out.
        has_role = "role" in value if isinstance(value, Mapping) else isinstance(value, MessageItem)
        return ":message" if has_role else None
    return f":{kind}" if kind in _ITEM_TYPES else None


Item = Annotated[
    Annotated[MessageItem, Tag(":message")]
    | Annotated[ReasoningItem, Tag(":reasoning")]
    | Annotated[FunctionCallItem, Tag(":function_call")]
    | Annotated[FunctionCallOutputItem, Tag(":function_call_output")],
    Discriminator(_item_type, "item_type", "Input should be an item: an object with a type, or with a role"),
]
Items = Annotated[
    list[Annotated[Item, _refuse_other_types("items", *_ITEM_TYPES)]],
    Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True),
]
Input = Annotated[
    Annotated[str, Tag(":text")] | Annotated[Items, Tag(":list")],
    Discriminator(_text_or_list, "input_type", "Input should be a string or a list of items"),
]
