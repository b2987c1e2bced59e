"""What clients send, as pydantic models: strict about types, and no field is ignored in silence.

docs/anthropic.md says of every field whether it has an effect, is accepted without one because it asks for nothing that
changes an answer, or is refused. A field that stands nowhere here is refused as unknown. Null means the default.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from mlxserve.api.anthropic.blocks import Block, CacheControl, Content, Text, ToolResultBlock, ToolUseBlock
from mlxserve.api.tool_schema import ArgumentsSchema
from mlxserve.api.wire import WireModel, unsupported
from mlxserve.errors import InvalidParameter

MAX_MESSAGES = 100_000
MAX_STOP_SEQUENCES = 16
MAX_STOP_LENGTH = 500
MAX_TOOLS = 1000

_TYPES_BY_ROLE = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}


class Message(WireModel):
    role: Literal["user", "assistant", "system"]
    content: Content

    @property
    def blocks(self) -> list[Block]:
        """Of a message that is a string: none."""
        return [] if isinstance(self.content, str) else self.content


class ThinkingConfig(WireModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(WireModel):
    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(WireModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None
    task_budget: Annotated[Any, unsupported()] = None


def _refuse_other_tools(tool: Any) -> Any:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if isinstance(kind, str) and kind != "custom":
        raise PydanticCustomError(
            "unsupported_parameter",
            "tools of type {kind} are Anthropic's own and not here; describe a tool with name and input_schema",
            {"kind": repr(kind[:40])},
        )
    return tool


class Tool(WireModel):
    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]+$", max_length=128)]
    input_schema: ArgumentsSchema
    description: str | None = None
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    strict: bool | None = None
    defer_loading: Annotated[Any, unsupported(False)] = None
    allowed_callers: Annotated[Any, unsupported(["direct"])] = None
    input_examples: Annotated[Any, unsupported([])] = None


class ToolChoice(WireModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class PromptFields(WireModel):
    """What a prompt is made of: all that /v1/messages/count_tokens takes, and the beginning of /v1/messages."""

    model: Annotated[str, Field(min_length=1, max_length=1000)]
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Text | None = None
    tools: (
        Annotated[
            list[Annotated[Tool, BeforeValidator(_refuse_other_tools)]], Field(max_length=MAX_TOOLS, fail_fast=True)
        ]
        | None
    ) = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None

    cache_control: CacheControl | None = None
    context_management: dict[str, Any] | None = None
    user_profile_id: str | None = None

    mcp_servers: Annotated[Any, unsupported([])] = None
    speed: Annotated[Any, unsupported("standard")] = None

    @model_validator(mode="after")
    def _messages_agree(self) -> Self:
        """Blocks belong to their roles, and results to calls."""
        call_ids = set()
        for number, message in enumerate(self.messages):
            for index, block in enumerate(message.blocks):
                param = f"messages.{number}.content.{index}"
                if block.type not in _TYPES_BY_ROLE[message.role]:
                    raise InvalidParameter(
                        f"Invalid '{param}': a message of the role {message.role!r} has no blocks of type "
                        f"{block.type!r}.",
                        param=param,
                    )
                if isinstance(block, ToolUseBlock):
                    call_ids.add(block.id)
                elif isinstance(block, ToolResultBlock) and block.tool_use_id not in call_ids:
                    param += ".tool_use_id"
                    raise InvalidParameter(
                        f"Invalid '{param}': no message before it has a tool_use block with the id "
                        f"{block.tool_use_id[:100]!r}.",
                        param=param,
                    )
        return self

    @model_validator(mode="after")
    def _tools_agree(self) -> Self:
        names = set()
        for index, tool in enumerate(self.tools or ()):
            if tool.name in names:
                param = f"tools.{index}.name"
                raise InvalidParameter(f"Invalid '{param}': there are two tools named {tool.name!r}.", param=param)
            names.add(tool.name)
        choice = self.tool_choice
        if choice is None:
            return self
        if (choice.type == "tool") != (choice.name is not None):
            raise InvalidParameter(
                "'tool_choice.name' goes with the type 'tool', and with no other.", param="tool_choice.name"
            )
        if choice.type in ("any", "tool") and not names:
            raise InvalidParameter(
                f"'tool_choice' of type {choice.type!r} needs 'tools', of which there are none.", param="tool_choice"
            )
        if choice.name is not None and choice.name not in names:
            raise InvalidParameter(
                f"Invalid 'tool_choice.name': there is no tool {choice.name[:100]!r} among 'tools'.",
                param="tool_choice.name",
            )
        return self

    @model_validator(mode="after")
    def _thinking_agrees(self) -> Self:
        thinking = self.thinking
        if thinking is not None and (thinking.type == "enabled") != (thinking.budget_tokens is not None):
            raise InvalidParameter(
                "'thinking.budget_tokens' goes with the type 'enabled', and with no other.",
                param="thinking.budget_tokens",
            )
        return self


class CountTokensRequest(PromptFields):
    """/v1/messages/count_tokens."""


class MessagesRequest(PromptFields):
    """/v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    stop_sequences: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]],
            Field(max_length=MAX_STOP_SEQUENCES, fail_fast=True),
        ]
        | None
    ) = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None

    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    diagnostics: dict[str, Any] | None = None

    container: Annotated[Any, unsupported()] = None
    inference_geo: Annotated[Any, unsupported()] = None
    compaction: Annotated[Any, unsupported()] = None
    fallbacks: Annotated[Any, unsupported([])] = None
    fallback_credit_token: Annotated[Any, unsupported()] = None
    billing_policy: Annotated[Any, unsupported()] = None
    thread: Annotated[Any, unsupported()] = None
