"""What clients send, as pydantic models: strict about types, and no field is ignored in silence.

docs/responses.md says of every field whether it has an effect, is accepted without one, or is refused.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from mlxserve.api.openai.responses.items import Input
from mlxserve.api.openai.responses.tools import Choice, Tools
from mlxserve.api.wire import WireModel, unsupported
from mlxserve.errors import InvalidParameter


class ReasoningConfig(WireModel):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Annotated[Any, unsupported("auto")] = None
    mode: Annotated[Any, unsupported("standard")] = None


class TextFormat(WireModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(WireModel):
    format: TextFormat | None = None
    verbosity: Annotated[Any, unsupported("medium")] = None


class StreamOptions(WireModel):
    include_obfuscation: bool | None = None


def _is_known(values: list[str]) -> list[str]:
    for value in values:
        if value == "message.output_text.logprobs":
            raise PydanticCustomError("unsupported_parameter", "log-probabilities are not supported here yet")
    return values


class PromptFields(WireModel):
    """What a prompt is made of: all that /v1/responses/input_tokens takes, and the beginning of /v1/responses."""

    model: Annotated[str, Field(min_length=1, max_length=1000)]
    input: Input
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Tools | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None

    truncation: Annotated[Any, unsupported("disabled")] = None
    conversation: Annotated[Any, unsupported()] = None

    @model_validator(mode="after")
    def _format_has_its_schema(self) -> Self:
        form = None if self.text is None else self.text.format
        if form is not None and (form.type == "json_schema") != (form.json_schema is not None):
            raise InvalidParameter(
                "'text.format.schema' goes with the type 'json_schema', and with no other.", param="text.format.schema"
            )
        return self


class InputTokensRequest(PromptFields):
    """/v1/responses/input_tokens."""


class ResponseRequest(PromptFields):
    """/v1/responses."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    metadata: dict[str, str] | None = None

    include: Annotated[list[str], AfterValidator(_is_known)] | None = None
    client_metadata: dict[str, Any] | None = None
    max_tool_calls: int | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None

    access_programs: Annotated[Any, unsupported()] = None
    background: Annotated[Any, unsupported(False)] = None
    background_options: Annotated[Any, unsupported()] = None
    context_management: Annotated[Any, unsupported([])] = None
    image: Annotated[Any, unsupported()] = None
    moderation: Annotated[Any, unsupported()] = None
    prompt: Annotated[Any, unsupported()] = None
    prompt_cache_options: Annotated[Any, unsupported({})] = None
    top_logprobs: Annotated[Any, unsupported(0)] = None
