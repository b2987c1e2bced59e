"""Content blocks, of which messages, system prompts and tool results are made."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from mlxserve.api.wire import WireModel, unsupported

MAX_BLOCKS = 10_000


class CacheControl(WireModel):
    """Where the client would have a cached prefix end. Every prefix is cached here, so it has no effect."""

    type: Literal["ephemeral"]
    ttl: str | None = None
    scope: str | None = None


class TextBlock(WireModel):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[Any, unsupported([])] = None


def _refuse_other_types(*supported: str) -> BeforeValidator:
    """Blocks of other types are refused by name; what is no block at all is left to the types."""

    def check(block: Any) -> Any:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if isinstance(kind, str) and kind not in supported:
            raise PydanticCustomError(
                "unsupported_parameter",
                "blocks of type {kind} are not supported here; send {supported}",
                {"kind": repr(kind[:40]), "supported": " or ".join(supported)},
            )
        return block

    return BeforeValidator(check)


TextBlocks = Annotated[
    list[Annotated[TextBlock, _refuse_other_types("text")]], Field(max_length=MAX_BLOCKS, fail_fast=True)
]


def _text_or_list(value: Any) -> str | None:
    if isinstance(value, str):
        return ":text"
    return ":list" if isinstance(value, list) else None


TEXT_OR_BLOCKS = Discriminator(_text_or_list, "content_type", "Input should be a string or a list of content blocks")
Text = Annotated[Annotated[str, Tag(":text")] | Annotated[TextBlocks, Tag(":list")], TEXT_OR_BLOCKS]
"""A string, or text blocks."""


class ThinkingBlock(WireModel):
    """What the model thought earlier in the conversation."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(WireModel):
    """Thinking that only Anthropic's servers could read."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(WireModel):
    """A call the model made earlier in the conversation."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1, max_length=1000)]
    name: Annotated[str, Field(min_length=1, max_length=1000)]
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: Annotated[Any, unsupported({"type": "direct"})] = None
    toolset_name: Annotated[Any, unsupported()] = None


class ToolResultBlock(WireModel):
    """What came of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Text | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: Annotated[Any, unsupported()] = None


_BLOCK_TYPES = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


def _block_type(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return f":{kind}" if kind in _BLOCK_TYPES else None


Block = Annotated[
    Annotated[TextBlock, Tag(":text")]
    | Annotated[ThinkingBlock, Tag(":thinking")]
    | Annotated[RedactedThinkingBlock, Tag(":redacted_thinking")]
    | Annotated[ToolUseBlock, Tag(":tool_use")]
    | Annotated[ToolResultBlock, Tag(":tool_result")],
    Discriminator(_block_type, "block_type", "Input should be a content block: an object with a type"),
]
Blocks = Annotated[
    list[Annotated[Block, _refuse_other_types(*_BLOCK_TYPES)]],
    Field(min_length=1, max_length=MAX_BLOCKS, fail_fast=True),
]
Content = Annotated[Annotated[str, Tag(":text")] | Annotated[Blocks, Tag(":list")], TEXT_OR_BLOCKS]


def joined(text: str | list[TextBlock] | None) -> str:
    """A text as one string; blocks become paragraphs."""
    if isinstance(text, list):
        return "\n".join(block.text for block in text)
    return text or ""
