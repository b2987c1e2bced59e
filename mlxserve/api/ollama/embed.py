"""/api/embed, and /api/embeddings, which came before it and takes one text."""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Discriminator, Field, Tag

from mlxserve.api.dimensions import shortened
from mlxserve.api.exchange import Embedded
from mlxserve.api.ollama.options import Options, text_or_list
from mlxserve.api.ollama.schema import KeepAlive, ModelName
from mlxserve.api.ollama.times import nanoseconds
from mlxserve.api.wire import WireModel
from mlxserve.core.generation import GenerationRequest, TextPrompt
from mlxserve.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_INPUTS = 2048


Text = Annotated[str, Field(min_length=1)]
Input = Annotated[
    Annotated[str, Tag(":text")] | Annotated[list[Text], Field(max_length=MAX_INPUTS, fail_fast=True), Tag(":list")],
    Discriminator(text_or_list, "input_type", "Input should be a string or a list of strings"),
]


class EmbedFields(WireModel):
    """What both have in common."""

    model: ModelName
    options: Options | None = None
    keep_alive: KeepAlive = None


class EmbedRequest(EmbedFields):
    input: Input | None = None
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None

    @property
    def texts(self) -> dict[str, str]:
        """By their fields; none where the model is only to be loaded."""
        if isinstance(self.input, list):
            return {f"input[{index}]": text for index, text in enumerate(self.input)}
        return {"input": self.input} if self.input else {}


class EmbeddingsRequest(EmbedFields):
    prompt: str | None = None


def embedding_requests(
    texts: "Mapping[str, str]", request_id: str, *, truncate: bool, options: Options | None
) -> list[GenerationRequest]:
    """One for each text, which goes by its field; with several, their ids carry the index."""
    if options is not None:
        options.log_unused(request_id)
    several = len(texts) > 1
    return [
        GenerationRequest(
            request_id=f"{request_id}-{index}" if several else request_id,
            prompt=TextPrompt(text, param),
            sampling=SamplingParams(),
            context_length=None if options is None else options.context_length,
            context_length_param="options.num_ctx",
            wants_embedding=True,
            truncate=truncate,
        )
        for index, (param, text) in enumerate(texts.items())
    ]


def embed_object(body: EmbedRequest, embedded: Embedded, seconds: float) -> dict[str, Any]:
    """The reply; `seconds`: what it took.

    Raises:
        InvalidParameter: fewer numbers than `dimensions`.
    """
    arrival = embedded.arrival
    load = 0.0 if arrival.parsed is None or arrival.loaded is None else arrival.loaded - arrival.parsed
    return {
        "model": body.model,
        "embeddings": [shortened(vector, body.dimensions) for vector in embedded.vectors],
        "total_duration": nanoseconds(seconds),
        "load_duration": nanoseconds(load),
        "prompt_eval_count": sum(usage.num_prompt_tokens for usage in embedded.usages),
    }
