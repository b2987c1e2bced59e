"""What clients send to have a text tokenised, tokens turned to text, or a chat template applied.

The names are llama-server's (`content`, `add_special`, `with_pieces`) and vLLM's (`prompt`, `add_special_tokens`,
`return_token_strs`).
"""

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from mlxserve.api.openai.messages import Messages, check_messages
from mlxserve.api.openai.schema import MAX_PROMPT_TOKENS, ModelName, ReasoningEffort, TokenId
from mlxserve.api.openai.tools import Choice, Tools, offer_of
from mlxserve.api.wire import WireModel
from mlxserve.errors import InvalidParameter

MAX_TEXT_LENGTH = 4_000_000
"""Characters; the ids of more would be a reply of tens of megabytes."""

Text = Annotated[str, Field(max_length=MAX_TEXT_LENGTH)]


class TokenizeRequest(WireModel):
    model: ModelName
    content: Text | None = None
    prompt: Text | None = None
    text: Text | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    with_pieces: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_text_is_given(self) -> Self:
        given = [name for name in ("content", "prompt", "text") if getattr(self, name) is not None]
        if not given:
            raise InvalidParameter(
                "Missing required parameter: 'content'.", param="content", code="missing_required_parameter"
            )
        if len(given) > 1:
            raise InvalidParameter(f"'{given[0]}' and '{given[1]}' are both texts; send one of them.", param=given[1])
        if None not in (self.add_special, self.add_special_tokens) and self.add_special != self.add_special_tokens:
            raise InvalidParameter(
                "'add_special' and 'add_special_tokens' differ; send one of them.", param="add_special_tokens"
            )
        return self

    @property
    def field(self) -> str:
        """The name of the one text there is."""
        return next(name for name in ("content", "prompt", "text") if getattr(self, name) is not None)

    @property
    def adds_special_tokens(self) -> bool:
        """Where the client does not say: with `prompt` as vLLM does, otherwise as llama-server does."""
        asked = [each for each in (self.add_special, self.add_special_tokens) if each is not None]
        return asked[0] if asked else self.field == "prompt"


class DetokenizeRequest(WireModel):
    model: ModelName
    tokens: Annotated[list[TokenId], Field(max_length=MAX_PROMPT_TOKENS, fail_fast=True)]


class ApplyTemplateRequest(WireModel):
    model: ModelName
    messages: Messages
    tools: Tools | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        check_messages(self.messages)
        offer_of(self)
        return self
