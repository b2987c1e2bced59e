"""The `options` of a request: how tokens are chosen, and what only matters to Ollama's own engine.

Three kinds again. Those with an effect; those that Ollama knows and that have none here, most of them about memory and
threads; and everything else, which Ollama ignores with a line in its log, and so do we. Wrong types are refused.
"""

import logging
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from mlxserve.api.wire import WireModel
from mlxserve.core.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 500
MAX_NAMES_LOGGED = 20

DEFAULTS: Mapping[str, float | int] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "repeat_last_n": 64}
"""Ollama's, where they differ from SamplingParams; for what neither the client nor the model says."""

_SAMPLING_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repeat_last_n": "repeat_last_n",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""Options by the name that SamplingParams has for them."""


def _whole(value: Any) -> Any:
    # Clients in languages with one kind of number send 40.0; Ollama takes it.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def text_or_list(value: Any) -> str | None:
    if isinstance(value, str):
        return ":text"
    return ":list" if isinstance(value, list) else None


MAY_HAVE_A_POINT = BeforeValidator(_whole)
Whole = Annotated[int, MAY_HAVE_A_POINT]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Stop = Annotated[
    Annotated[StopString, Tag(":text")]
    | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True), Tag(":list")],
    Discriminator(text_or_list, "stop_type", "Input should be a string or a list of strings"),
]


class Options(WireModel):
    model_config = ConfigDict(extra="allow")

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=-1), MAY_HAVE_A_POINT] | None = None
    """0 and -1 are both off."""
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1), MAY_HAVE_A_POINT] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), MAY_HAVE_A_POINT] | None = None
    """Negative: a random one."""
    num_predict: Annotated[int, Field(ge=-2), MAY_HAVE_A_POINT] | None = None
    """0, -1 and -2: until the context is full."""
    num_ctx: Annotated[int, Field(ge=0), MAY_HAVE_A_POINT] | None = None
    """0: the model's."""
    stop: Stop | None = None

    numa: bool | None = None
    num_batch: Whole | None = None
    num_gpu: Whole | None = None
    main_gpu: Whole | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    vocab_only: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    embedding_only: bool | None = None
    num_thread: Whole | None = None
    num_keep: Whole | None = None
    tfs_z: float | None = None
    mirostat: Whole | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    penalize_newline: bool | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def context_length(self) -> int | None:
        return self.num_ctx or None

    def sampling(self, defaults: Mapping[str, float | int], num_logprobs: int | None) -> SamplingParams:
        """`defaults`: the model's own.

        Raises:
            InvalidParameter: the options do not go together.
        """
        given = {ours: getattr(self, name) for name, ours in _SAMPLING_NAMES.items()}
        chosen: dict[str, Any] = {**DEFAULTS, **defaults, **{k: v for k, v in given.items() if v is not None}}
        if chosen["top_k"] == -1:
            chosen["top_k"] = 0
        if chosen["top_p"] == 0.0:  # the likeliest token alone, which Ollama's engine makes of it as well
            chosen["top_p"], chosen["top_k"] = 1.0, 1
        return SamplingParams(
            **chosen,
            seed=None if self.seed is None or self.seed < 0 else self.seed,
            max_tokens=self.num_predict if self.num_predict is not None and self.num_predict > 0 else None,
            num_logprobs=num_logprobs,
        )

    def as_parameters(self) -> dict[str, Any]:
        """Those with an effect that are given, by Ollama's names."""
        return self.model_dump(exclude_none=True, exclude=set(WITHOUT_EFFECT | (self.model_extra or {}).keys()))

    def log_unused(self, request_id: str) -> None:
        """Say in the log which of the options change nothing."""
        if self.model_extra:
            names = ", ".join(repr(name[:40]) for name in list(self.model_extra)[:MAX_NAMES_LOGGED])
            logger.warning("%s: unknown options are ignored: %s", request_id, names)
        if unused := sorted(name for name in self.model_fields_set & WITHOUT_EFFECT if getattr(self, name) is not None):
            logger.info("%s: these options have no effect here: %s", request_id, ", ".join(unused))


WITHOUT_EFFECT = frozenset(Options.model_fields) - _SAMPLING_NAMES.keys() - {"seed", "num_predict", "num_ctx", "stop"}
