"""The messages of a chat on the wire, and as chat templates expect them."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from mlxserve.api.wire import WireModel, unsupported
from mlxserve.errors import InvalidParameter

MAX_PARTS = 10_000
MAX_MESSAGES = 100_000


def text_or_list(value: Any) -> str | None:
    if isinstance(value, str):
        return ":text"
    return ":list" if isinstance(value, list) else None


def _refuse_other_parts(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else "text"
    if isinstance(kind, str) and kind != "text":
        raise PydanticCustomError(
            "unsupported_parameter", "parts of type {kind} are not supported yet; send text", {"kind": repr(kind[:40])}
        )
    return part


class TextPart(WireModel):
    type: Literal["text"]
    text: str


Content = Annotated[
    Annotated[str, Tag(":text")]
    | Annotated[
        list[Annotated[TextPart, BeforeValidator(_refuse_other_parts)]],
        Field(min_length=1, max_length=MAX_PARTS, fail_fast=True),
        Tag(":list"),
    ],
    Discriminator(text_or_list, "content_type", "Input should be a string or a list of parts"),
]


class FunctionCall(WireModel):
    name: str
    arguments: str


class ToolCall(WireModel):
    """A call the model made earlier in the conversation."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(WireModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: list[ToolCall] | None = None
    content: Content | None = Field(None, validate_default=True)
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same, by the name that other servers give it."""
    # What clients send back of an answer they were given.
    refusal: Annotated[Any, unsupported()] = None
    annotations: Annotated[Any, unsupported([])] = None
    audio: Annotated[Any, unsupported()] = None
    function_call: Annotated[Any, unsupported()] = None

    @field_validator("content")
    @classmethod
    def _content_is_given(cls, content: Any, info: ValidationInfo) -> Any:
        if content is None and not info.data.get("tool_calls"):
            raise PydanticCustomError("missing", "Field required")
        return content

    @property
    def text(self) -> str:
        """The content as one string; parts become paragraphs."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


def check_messages(messages: Sequence[Message]) -> None:
    """Whether calls and their results belong together.

    Raises:
        InvalidParameter: calls in a message that is not the assistant's, or a result of a call that nobody made.
    """
    call_ids: set[str] = set()
    for position, message in enumerate(messages):
        where = f"messages[{position}]"
        if message.tool_calls and message.role != "assistant":
            raise _invalid(f"{where}.tool_calls", "only an assistant's message can have calls")
        call_ids.update(call.id for call in message.tool_calls or ())
        if message.role != "tool":
            if message.tool_call_id is not None:
                raise _invalid(f"{where}.tool_call_id", "only a message with the role tool answers a call")
        elif message.tool_call_id is None:
            param = f"{where}.tool_call_id"
            raise InvalidParameter(
                f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
            )
        elif message.tool_call_id not in call_ids:
            raise _invalid(f"{where}.tool_call_id", "no message before it has a call with this id")


def template_messages(messages: Sequence[Message]) -> tuple[dict[str, Any], ...]:
    """Messages as chat templates expect them; fields the client left out do not appear."""
    called: dict[str, str] = {}
    """Names of the functions by the ids of their calls."""
    rendered = []
    for message in messages:
        called |= {call.id: call.function.name for call in message.tool_calls or ()}
        name = message.name
        if name is None and message.tool_call_id is not None:
            name = called.get(message.tool_call_id)  # Some templates tell results apart by name.
        wire = {
            "role": "system" if message.role == "developer" else message.role,
            "content": message.text,
            "name": name,
            "tool_calls": [_template_tool_call(call) for call in message.tool_calls or ()] or None,
            "tool_call_id": message.tool_call_id,
            "reasoning_content": message.reasoning if message.reasoning_content is None else message.reasoning_content,
        }
        rendered.append({key: value for key, value in wire.items() if value is not None})
    return tuple(rendered)


def _template_tool_call(call: ToolCall) -> dict[str, Any]:
    # OpenAI's arguments are JSON in a string, the templates' are an object. Some clients write none as "".
    arguments: Any = call.function.arguments
    try:
        parsed = json.loads(arguments.strip() or "{}")
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict):
        arguments = parsed
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _invalid(param: str, problem: str) -> InvalidParameter:
    return InvalidParameter(f"Invalid '{param}': {problem}.", param=param)
