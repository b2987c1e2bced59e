"""What clients send, as pydantic models: strict about types, and no field is ignored in silence.

Three kinds of fields stand here. Those with an effect. Those accepted without one, because they ask for nothing
that changes an answer: `user`, `safety_identifier`, `metadata`, `store`, `service_tier`, `prompt_cache_key`,
`prompt_cache_retention`. And those that are known and not supported yet: they may be null or have a value that asks
for nothing (`echo: false`, `functions: []`), and are refused by name otherwise. A field that stands nowhere here is
refused as unknown. Null means the default everywhere.

Beside OpenAI's own: `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `stop_token_ids`, `prompt_logprobs`,
`ignore_eos`, `chat_template_kwargs`, `priority`, `cache_salt` as vLLM has them; `typical_p` and `repeat_last_n` as
llama-server has them, and its `return_progress`; `timeout` in seconds; `timings: true` for a `timings` object in the
last chunk or the reply; `keep_alive` as Ollama has it; `speculation` for who may guess at the next tokens.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from mlxserve.api.openai.messages import Messages, check_messages, text_or_list
from mlxserve.api.openai.structured import (
    Choices,
    GrammarText,
    JsonSchema,
    JsonSchemaOrText,
    ResponseFormat,
    StructuredOutputs,
    requested_grammar,
)
from mlxserve.api.openai.tools import Choice, Tools, offer_of
from mlxserve.api.wire import WireModel, unsupported
from mlxserve.config import parse_duration
from mlxserve.core.constraint import Grammar
from mlxserve.core.sampling_params import MAX_LOGIT_BIASES, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS
from mlxserve.errors import InvalidParameter

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 500
MAX_PROMPTS = 256
MAX_PROMPT_TOKENS = 2**20
"""Checking a longer list takes so long that other requests would feel it."""
MAX_SAMPLES = 16
"""Answers to one prompt, shown or not."""
DEFAULT_COMPLETION_TOKENS = 16
"""max_tokens of /v1/completions where the client gave none: OpenAI's own default."""


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Stop = Annotated[
    Annotated[StopString, Tag(":text")]
    | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True), Tag(":list")],
    Discriminator(text_or_list, "stop_type", "Input should be a string or a list of strings"),
]


ModelName = Annotated[str, Field(min_length=1, max_length=1000)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


def _keys_are_token_ids(value: dict[str, float]) -> dict[str, float]:
    for key in value:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise PydanticCustomError("value_error", "{key} is no token id", {"key": repr(key[:40])})
    return value


def _is_duration(value: Any) -> float:
    try:
        return parse_duration(value)
    except ValueError as error:
        raise PydanticCustomError("value_error", "{reason}", {"reason": str(error)}) from error


Duration = Annotated[Any, AfterValidator(_is_duration)]
"""Seconds, out of a number of them or a text such as "5m"."""

LogitBias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_LOGIT_BIASES),
    AfterValidator(_keys_are_token_ids),
]


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(WireModel):
    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, unsupported(False)] = None


class CompletionFields(WireModel):
    """What both kinds of completions have in common."""

    model: ModelName
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """0 and -1 are both off."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: LogitBias | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = None
    stop: Stop | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    timings: bool | None = None
    speculation: Literal["auto", "ngram", "draft", "off"] | None = None

    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    keep_alive: Duration | None = None
    return_progress: bool | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchemaOrText = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: JsonSchema = None
    grammar: GrammarText | None = None
    guided_decoding_backend: Annotated[Any, unsupported()] = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidParameter("'stream_options' is only for requests with stream: true.", param="stream_options")
        return self

    @model_validator(mode="after")
    def _streams_have_no_prompt_logprobs(self) -> Self:
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidParameter("'prompt_logprobs' is only for requests without a stream.", param="prompt_logprobs")
        return self

    @model_validator(mode="after")
    def _progress_needs_a_stream(self) -> Self:
        if self.return_progress and not self.stream:
            raise InvalidParameter("'return_progress' is only for requests with stream: true.", param="return_progress")
        return self

    @property
    def num_choices(self) -> int:
        """Of each prompt."""
        return self.n or 1

    @property
    def num_samples(self) -> int:
        """Answers to generate for each prompt: as many as are shown, or more."""
        return self.num_choices

    @property
    def requested_grammar(self) -> Grammar | None:
        """What the answer must be.

        Raises:
            InvalidParameter: more than one field says so, or a schema in a string is no JSON.
        """
        return requested_grammar(self)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatCompletionRequest(CompletionFields):
    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    tools: Tools | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None

    functions: Annotated[Any, unsupported([])] = None
    function_call: Annotated[Any, unsupported("none", "auto")] = None
    modalities: Annotated[Any, unsupported(["text"])] = None
    audio: Annotated[Any, unsupported()] = None
    prediction: Annotated[Any, unsupported()] = None
    echo: Annotated[Any, unsupported(False)] = None
    moderation: Annotated[Any, unsupported()] = None
    verbosity: Annotated[Any, unsupported()] = None
    web_search_options: Annotated[Any, unsupported()] = None
    prompt_cache_options: Annotated[Any, unsupported({})] = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise InvalidParameter(
                "'max_tokens' and 'max_completion_tokens' differ; send one of them.", param="max_completion_tokens"
            )
        if self.top_logprobs and not self.logprobs:
            raise InvalidParameter("'top_logprobs' needs logprobs: true.", param="top_logprobs")
        if self.timings and self.num_choices > 1:
            raise InvalidParameter("'timings' needs a single choice.", param="timings")
        check_messages(self.messages)
        offer_of(self)
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_TOKENS, fail_fast=True)]


def kind_of_prompt(value: Any) -> str | None:
    if isinstance(value, str):
        return ":text"
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, str):
        return ":texts"
    if isinstance(first, list):
        return ":token_id_lists"
    return ":token_ids" if isinstance(first, int) else None


class CompletionRequest(CompletionFields):
    prompt: Annotated[
        Annotated[str, Tag(":text")]
        | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True), Tag(":texts")]
        | Annotated[TokenIds, Tag(":token_ids")]
        | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True), Tag(":token_id_lists")],
        Discriminator(
            kind_of_prompt, "prompt_type", "Input should be a string, token ids, or a list of one kind of these"
        ),
    ]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None

    suffix: str | None = None

    @model_validator(mode="after")
    def _timings_of_one_choice(self) -> Self:
        if self.timings and len(self.prompts) * self.num_samples > 1:
            raise InvalidParameter("'timings' needs a single prompt and a single choice.", param="timings")
        return self

    @model_validator(mode="after")
    def _best_of_is_more_than_n(self) -> Self:
        if self.num_samples < self.num_choices:
            raise InvalidParameter(
                f"'best_of' is {self.best_of} and 'n' is {self.n}; it cannot be less.", param="best_of"
            )
        if self.num_samples > self.num_choices and self.stream:
            raise InvalidParameter(
                "'best_of' cannot be streamed: the best is known when all are there. Send stream: false.",
                param="best_of",
            )
        return self

    @model_validator(mode="after")
    def _suffix_goes_with_text(self) -> Self:
        if self.suffix and self.echo:
            raise InvalidParameter("'echo' does not go with 'suffix'; send one of them.", param="echo")
        if self.suffix and not all(isinstance(prompt, str) for prompt in self.prompts):
            raise InvalidParameter("'suffix' needs a prompt that is text and not token ids.", param="suffix")
        return self

    @property
    def num_samples(self) -> int:
        return self.best_of or self.num_choices

    @property
    def num_prompt_logprobs(self) -> int | None:
        """What is asked for of the prompt's tokens, by whichever of the two ways."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in asked if count is not None), default=None)

    @property
    def prompts(self) -> tuple[str | list[int], ...]:
        """One entry for each choice of the reply: text, or token ids."""
        if isinstance(self.prompt, str):
            return (self.prompt,)
        if isinstance(self.prompt[0], int):
            return (self.prompt,)
        return tuple(self.prompt)
