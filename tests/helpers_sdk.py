"""What OpenAI's own typed models say of a wire object."""

from collections.abc import Iterator
from typing import Any

from openai.types import Completion, CreateEmbeddingResponse, ErrorObject, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

EXTENSIONS: dict[type[BaseModel], set[str]] = {
    ChatCompletion: {
        "timings",
        "choices.prompt_logprobs",
        "choices.message.reasoning",
        "choices.message.reasoning_content",
    },
    ChatCompletionChunk: {
        "timings",
        "prompt_progress",
        "choices.delta.reasoning",
        "choices.delta.reasoning_content",
    },
    Completion: {"timings", "prompt_progress", "choices.prompt_logprobs"},
    CreateEmbeddingResponse: {"usage.prompt_tokens_details"},
    Model: {"context_length", "loaded", "description"},
    ErrorObject: set(),
}
"""Fields of ours that OpenAI does not have; docs/api.md has them all."""


def check(model: type[BaseModel], content: dict[str, Any]) -> None:
    """The object has the model's required fields, all of the right type, and no other fields but our extensions.

    Raises:
        pydantic.ValidationError, AssertionError: it has not.
    """
    unknown = set(unknown_fields(model.model_validate(content, strict=True)))
    assert unknown <= EXTENSIONS[model], unknown - EXTENSIONS[model]


def unknown_fields(value: Any, path: str = "") -> Iterator[str]:
    """Paths of the fields that the models have no name for, without list indices."""
    if isinstance(value, BaseModel):
        yield from (path + name for name in value.model_extra or ())
        for name in type(value).model_fields:
            yield from unknown_fields(getattr(value, name), f"{path}{name}.")
    elif isinstance(value, list):
        for each in value:
            yield from unknown_fields(each, path)
