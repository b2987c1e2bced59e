"""From a parsed body to the engine's GenerationRequest."""

from collections.abc import Iterable, Mapping
from typing import Any

from mlxserve.api.openai.messages import template_messages
from mlxserve.api.openai.schema import (
    DEFAULT_COMPLETION_TOKENS,
    ChatCompletionRequest,
    CompletionFields,
    CompletionRequest,
    ReasoningEffort,
)
from mlxserve.api.openai.text_schema import ApplyTemplateRequest
from mlxserve.api.openai.tools import tools_and_choice
from mlxserve.core.generation import (
    ChatPrompt,
    GenerationRequest,
    InfillPrompt,
    Prompt,
    Reasoning,
    TextPrompt,
    TokenPrompt,
)
from mlxserve.core.request import Speculation
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.text.thinking import SWITCHES

DefaultSampling = Mapping[str, float | int]
"""A model's own temperature, top_p and the like, as far as it has any."""
SAME_NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "repeat_last_n",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
)
"""Fields that SamplingParams has under the same name."""


def chosen_sampling(body: Any, names: Iterable[str], defaults: DefaultSampling) -> dict[str, Any]:
    """Fields of SamplingParams, of these names, that the body gives, or the model where the body does not."""
    given = {name: getattr(body, name) for name in names}
    chosen: dict[str, Any] = {**defaults, **{name: value for name, value in given.items() if value is not None}}
    if chosen.get("top_k") == -1:
        chosen["top_k"] = 0
    return chosen


def chat_request(body: ChatCompletionRequest, request_id: str, defaults: DefaultSampling) -> GenerationRequest:
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return _request(
        body,
        request_id,
        chat_prompt(body),
        _sampling(body, defaults, max_tokens, body.num_logprobs, body.prompt_logprobs),
    )


def chat_prompt(body: ChatCompletionRequest | ApplyTemplateRequest) -> ChatPrompt:
    tools, choice = tools_and_choice(body)
    return ChatPrompt(
        messages=template_messages(body.messages),
        tools=tools,
        template_kwargs=dict(body.chat_template_kwargs or {}),
        tool_choice=choice,
        reasoning=_reasoning(body.reasoning_effort, body.chat_template_kwargs or {}),
    )


def _reasoning(effort: ReasoningEffort | None, template_kwargs: Mapping[str, Any]) -> Reasoning:
    """What the effort says; without one, a switch among the arguments for the chat template, under any of its names."""
    if effort is not None:
        return Reasoning(enabled=False) if effort == "none" else Reasoning(enabled=True, effort=effort)
    switch = next((template_kwargs[name] for name in SWITCHES if isinstance(template_kwargs.get(name), bool)), None)
    return Reasoning(enabled=switch, param="chat_template_kwargs")


def completion_requests(body: CompletionRequest, request_id: str, defaults: DefaultSampling) -> list[GenerationRequest]:
    """One request for each prompt; with several, their ids carry the index."""
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    num_logprobs = body.logprobs
    if num_logprobs is None and body.num_samples > body.num_choices:
        num_logprobs = 0  # what the best is told by
    sampling = _sampling(body, defaults, max_tokens, num_logprobs, body.num_prompt_logprobs)
    several = len(body.prompts) > 1
    return [
        _request(
            body,
            f"{request_id}-{index}" if several else request_id,
            _text_prompt(prompt, body.suffix),
            sampling,
        )
        for index, prompt in enumerate(body.prompts)
    ]


def _text_prompt(prompt: str | list[int], suffix: str | None) -> Prompt:
    if not isinstance(prompt, str):
        return TokenPrompt(tuple(prompt))
    return InfillPrompt(prompt, suffix) if suffix else TextPrompt(prompt)


def _request(body: CompletionFields, request_id: str, prompt: Prompt, sampling: SamplingParams) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt=prompt,
        sampling=sampling,
        stop=body.stop_strings,
        timeout=body.timeout,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        grammar=body.requested_grammar,
        speculation=None if body.speculation is None else Speculation(body.speculation),
        wants_progress=bool(body.return_progress),
    )


def _sampling(
    body: CompletionFields,
    defaults: DefaultSampling,
    max_tokens: int | None,
    num_logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    chosen = chosen_sampling(body, SAME_NAMES, defaults)
    return SamplingParams(
        **chosen,
        seed=body.seed,
        max_tokens=max_tokens,
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        num_logprobs=num_logprobs,
        logit_bias=tuple((int(key), value) for key, value in (body.logit_bias or {}).items()),
        prompt_logprobs=prompt_logprobs,
    )
