"""/v1/embeddings: what it is sent, and what it answers."""

import base64
from array import array
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from mlxserve.api.dimensions import shortened
from mlxserve.api.exchange import Embedded
from mlxserve.api.openai.schema import Duration, ModelName, TokenIds, kind_of_prompt
from mlxserve.api.wire import WireModel
from mlxserve.core.generation import GenerationRequest, TextPrompt, TokenPrompt
from mlxserve.core.sampling_params import SamplingParams

MAX_INPUTS = 2048
"""OpenAI's own bound."""

Text = Annotated[str, Field(min_length=1)]


class EmbeddingsRequest(WireModel):
    model: ModelName
    input: Annotated[
        Annotated[Text, Tag(":text")]
        | Annotated[list[Text], Field(max_length=MAX_INPUTS, fail_fast=True), Tag(":texts")]
        | Annotated[TokenIds, Tag(":token_ids")]
        | Annotated[list[TokenIds], Field(max_length=MAX_INPUTS, fail_fast=True), Tag(":token_id_lists")],
        Discriminator(
            kind_of_prompt, "input_type", "Input should be a string, token ids, or a list of one kind of these"
        ),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    keep_alive: Duration | None = None
    user: str | None = None

    @property
    def inputs(self) -> tuple[str | list[int], ...]:
        if isinstance(self.input, str):
            return (self.input,)
        if isinstance(self.input[0], int):
            return (self.input,)
        return tuple(self.input)


def embedding_requests(body: EmbeddingsRequest, request_id: str) -> list[GenerationRequest]:
    """One for each input; with several, their ids carry the index."""
    several = len(body.inputs) > 1
    is_list = body.inputs[0] is not body.input
    return [
        GenerationRequest(
            request_id=f"{request_id}-{index}" if several else request_id,
            prompt=_prompt(each, f"input[{index}]" if is_list else "input"),
            sampling=SamplingParams(),
            timeout=body.timeout,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            wants_embedding=True,
        )
        for index, each in enumerate(body.inputs)
    ]


def _prompt(value: str | list[int], param: str) -> TextPrompt | TokenPrompt:
    return TextPrompt(value, param) if isinstance(value, str) else TokenPrompt(tuple(value), param)


def embeddings_object(body: EmbeddingsRequest, embedded: Embedded) -> dict[str, Any]:
    """The reply.

    Raises:
        InvalidParameter: fewer numbers than `dimensions`.
    """
    num_tokens = sum(usage.num_prompt_tokens for usage in embedded.usages)
    num_cached = sum(usage.num_cached_tokens for usage in embedded.usages)
    vectors = [shortened(vector, body.dimensions) for vector in embedded.vectors]
    encode = _base64 if body.encoding_format == "base64" else list
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": encode(vector)} for index, vector in enumerate(vectors)
        ],
        "model": embedded.model,
        "usage": {
            "prompt_tokens": num_tokens,
            "total_tokens": num_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        },
    }


def _base64(vector: list[float]) -> str:
    """float32 numbers, little-endian, as OpenAI's own clients decode them."""
    return base64.b64encode(array("f", vector).tobytes()).decode()
