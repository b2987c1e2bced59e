"""What a dialect asks for and what it gets back: the one internal request and the one event stream.

A dialect turns its wire format into a GenerationRequest and the events of its Generation back into wire format.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from mlxserve.core.constraint import Grammar
from mlxserve.core.request import FinishReason, Speculation
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.core.step import SampledToken


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether an answer calls tools."""

    mode: Literal["none", "auto", "required"] = "auto"
    name: str | None = None
    """With "required": the one tool it must call."""
    parallel: bool = True
    """Whether it may call more than one."""
    param: str = "tool_choice"
    """The client's field, for errors."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How much a model should think before it answers."""

    enabled: bool | None = None
    """None: as its chat template does by itself."""
    effort: str | None = None
    """low, medium, high, or what else its chat template knows."""
    param: str = "reasoning_effort"
    """The client's field, for errors."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages for the model's chat template, in the shape templates expect: {"role": ..., "content": str, ...}."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    """{"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema}}"""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    tool_choice: ToolChoice = ToolChoice()
    reasoning: Reasoning = Reasoning()
    context: tuple[int, ...] = ()
    """Token ids of an earlier prompt and its answer, which stand before the messages."""
    param: str = "messages"
    """The client's field of the messages, for errors."""
    tool_params: tuple[str, ...] = ()
    """The client's fields of the tools' parameters, for errors; empty: tools[0].function.parameters and so on."""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text that is tokenised as it stands."""

    text: str
    param: str = "prompt"
    """The client's field, for errors."""


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, given by the client."""

    token_ids: tuple[int, ...]
    param: str = "prompt"
    """The client's field, for errors."""


@dataclass(frozen=True, slots=True)
class InfillPrompt:
    """The text before and after a gap that the answer fills."""

    prefix: str
    suffix: str
    param: str = "prompt"
    """The client's field of the prefix, for errors."""


Prompt = ChatPrompt | TextPrompt | TokenPrompt | InfillPrompt


@dataclass(slots=True)
class Arrival:
    """When a request came in over the network and got to its model: time.monotonic() seconds."""

    received: float
    """Its headers were there."""
    parsed: float | None = None
    """Its body was read and understood."""
    loaded: float | None = None
    """Its model was there, loaded for it if need be."""
    traceparent: str | None = None
    """The client's own trace, as its W3C Trace Context header says it."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    """Texts that end the answer; the answer does not contain them."""
    timeout: float | None = None
    """Seconds from arrival to the final event."""
    priority: int = 0
    cache_salt: str | None = None
    context_length: int | None = None
    """Tokens that prompt and answer may have together; None, or more than the model's: the model's."""
    context_length_param: str | None = None
    """The client's field of it, for errors."""
    grammar: Grammar | None = None
    """What the answer must be."""
    speculation: Speculation | None = None
    """None: the server's setting."""
    wants_embedding: bool = False
    """An Embedding in place of an answer. The prompt is text or tokens; of the other fields only timeout, priority and
    cache_salt count."""
    truncate: bool = False
    """With wants_embedding: a prompt that is too long is cut at its end, and not refused."""
    wants_progress: bool = False
    """Whether PrefillProgress comes while the prompt is computed."""
    arrival: Arrival | None = None
    """With it, whoever sends the answer calls Generation.delivered() at the end. None: it begins in this process."""


@dataclass(frozen=True, slots=True)
class Usage:
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_draft_tokens: int = 0
    """Guesses at generated tokens that were computed."""
    num_accepted_tokens: int = 0
    """Of these, the ones that were right."""
    num_reasoning_tokens: int = 0
    """Generated tokens of the reasoning, its markers included."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds spent in each stage of one request, by the server's clock. The first four add up to TTFT."""

    front_end: float
    """Received to put into the engine's inbox: reading the body, loading the model, chat template, tokenizer."""
    queue: float
    """Inbox to first scheduled."""
    prefill: float
    """First scheduled to first token computed (the decode row of the last prompt token included)."""
    delivery: float
    """First token computed to handed to the dialect."""
    decode: float
    """First token computed to last token computed."""
    total: float
    """Received to finished."""
    load: float = 0.0
    """Of front_end: waiting for the model to be loaded."""

    @property
    def time_to_first_token(self) -> float:
        return self.front_end + self.queue + self.prefill + self.delivery


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text. `tokens` are the tokens whose bytes it completes; either may be empty, not both."""

    text: str
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """New text of what the model thinks before it answers; `tokens` as in TextDelta."""

    text: str
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call. Calls come one after the other."""

    index: int
    """Which call of the answer, from 0."""
    call_id: str
    """The same in all pieces of a call."""
    name: str | None
    """The tool's, in the first piece of a call and only there."""
    arguments: str
    """More of the arguments: all pieces together are a JSON object."""
    tokens: tuple[SampledToken, ...]
    """As in TextDelta."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of every generation that did not raise."""

    reason: FinishReason
    stop_string: str | None
    usage: Usage
    timings: Timings
    num_tool_calls: int = 0


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Comes before anything of the answer where sampling.prompt_logprobs asks for it, and only there."""

    tokens: tuple[SampledToken, ...]
    """All of the prompt's. The first has no log-probabilities: nothing stands before it."""


@dataclass(frozen=True, slots=True)
class Embedding:
    """The one event before Finished where the request wants an embedding."""

    vector: tuple[float, ...]
    """(hidden size,), of length 1."""


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """How far the prompt is, before anything of the answer; only where request.wants_progress.

    One with all of the prompt computed comes last. A reader that is slow gets the latest only.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    """Of the prompt's, the cached ones included."""
    seconds: float
    """Since the first of them was scheduled."""


GenerationEvent = PrefillProgress | PromptLogprobs | Embedding | TextDelta | ReasoningDelta | ToolCallDelta | Finished
