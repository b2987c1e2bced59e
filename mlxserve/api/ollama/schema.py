"""What clients send to generate and to chat, as pydantic models. Null means the default everywhere.

A field that is known and not supported may be null or have a value that asks for nothing, and is refused by name
otherwise; one that stands nowhere here is refused as unknown.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from mlxserve.api.ollama.options import Options
from mlxserve.api.ollama.times import seconds_of
from mlxserve.api.tool_schema import ArgumentsSchema
from mlxserve.api.wire import WireModel, unsupported
from mlxserve.core.constraint import JSON_OBJECT, Grammar
from mlxserve.core.generation import Reasoning
from mlxserve.core.sampling_params import MAX_LOGPROBS
from mlxserve.errors import InvalidParameter

MAX_MESSAGES = 100_000
MAX_CONTEXT_TOKENS = 2**20
MAX_TOOLS = 1000
EFFORTS = ("low", "medium", "high")


def _format(value: Any) -> Any:
    if value in (None, "", "json") or isinstance(value, dict):
        return value
    raise PydanticCustomError("format_type", 'Input should be "json" or a JSON schema (an object)')


def _think(value: Any) -> Any:
    if value is None or isinstance(value, bool) or value in EFFORTS:
        return value
    raise PydanticCustomError("think_type", 'Input should be a boolean, "low", "medium" or "high"')


ModelName = Annotated[str, Field(min_length=1, max_length=1000)]
KeepAlive = Annotated[float | None, BeforeValidator(seconds_of)]
Images = Annotated[Any, unsupported([])]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class FunctionCall(WireModel):
    name: str
    arguments: dict[str, Any]
    index: int | None = None
    description: str | None = None


class ToolCall(WireModel):
    """A call the model made earlier in the conversation."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] | None = None


class Message(WireModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Images = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class Function(WireModel):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: ArgumentsSchema | None = None
    strict: bool | None = None


class Tool(WireModel):
    function: Function
    type: Literal["function"] | None = None
    items: Any = None


class GenerationFields(WireModel):
    """What generate and chat have in common."""

    model: ModelName
    stream: bool | None = None
    """None: true."""
    format: Annotated[Any, AfterValidator(_format)] = None
    options: Options | None = None
    keep_alive: KeepAlive = None
    think: Annotated[Any, AfterValidator(_think)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    truncate: bool | None = None
    shift: bool | None = None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidParameter("'top_logprobs' needs logprobs: true.", param="top_logprobs")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def given_options(self) -> Options:
        return self.options or Options()

    @property
    def grammar(self) -> Grammar | None:
        """What the answer must be."""
        if not self.format:
            # An empty object is a schema that allows everything.
            return None
        return Grammar("json_schema", JSON_OBJECT if self.format == "json" else self.format, "format")

    @property
    def reasoning(self) -> Reasoning:
        if isinstance(self.think, str):
            return Reasoning(enabled=True, effort=self.think, param="think")
        return Reasoning(enabled=self.think, param="think")


class GenerateRequest(GenerationFields):
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    context: Annotated[list[TokenId], Field(max_length=MAX_CONTEXT_TOKENS, fail_fast=True)] | None = None

    suffix: str | None = None
    template: Annotated[Any, unsupported("")] = None
    images: Images = None
    width: Annotated[Any, unsupported(0)] = None
    height: Annotated[Any, unsupported(0)] = None
    steps: Annotated[Any, unsupported(0)] = None

    @model_validator(mode="after")
    def _raw_is_the_whole_prompt(self) -> Self:
        if self.raw:
            for name in ("system", "context", "suffix"):
                if getattr(self, name):
                    raise InvalidParameter(
                        f"raw: true sends the prompt as it stands; leave '{name}' out, or raw.", param=name
                    )
        return self

    @model_validator(mode="after")
    def _a_gap_is_filled_without_a_chat(self) -> Self:
        for name in ("system", "context", "think"):
            if self.suffix and getattr(self, name):
                raise InvalidParameter(f"'suffix' is not for chats; leave '{name}' out, or suffix.", param=name)
        return self

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be generated: the model is to be loaded, or unloaded."""
        return not self.prompt and not self.suffix


class ChatRequest(GenerationFields):
    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be generated: the model is to be loaded, or unloaded."""
        return not self.messages
