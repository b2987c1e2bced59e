"""From a parsed body to the engine's GenerationRequest."""

import json
from collections.abc import Mapping
from typing import Any

from mlxserve.api.openai.schema import (
    DEFAULT_COMPLETION_TOKENS,
    ChatCompletionRequest,
    CompletionFields,
    CompletionRequest,
    Message,
    ToolCall,
)
from mlxserve.core.generation import ChatPrompt, GenerationRequest, Prompt, TextPrompt, TokenPrompt
from mlxserve.core.request import Speculation
from mlxserve.core.sampling_params import SamplingParams

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


def chat_request(body: ChatCompletionRequest, request_id: str, defaults: DefaultSampling) -> GenerationRequest:
    prompt = ChatPrompt(
        messages=tuple(_template_message(message) for message in body.messages),
        template_kwargs=dict(body.chat_template_kwargs or {}),
    )
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return _request(
        body, request_id, prompt, _sampling(body, defaults, max_tokens, body.num_logprobs, body.prompt_logprobs)
    )


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
            TextPrompt(prompt) if isinstance(prompt, str) else TokenPrompt(tuple(prompt)),
            sampling,
        )
        for index, prompt in enumerate(body.prompts)
    ]


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
    )


def _sampling(
    body: CompletionFields,
    defaults: DefaultSampling,
    max_tokens: int | None,
    num_logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    given = {name: getattr(body, name) for name in SAME_NAMES}
    chosen: dict[str, Any] = {**defaults, **{name: value for name, value in given.items() if value is not None}}
    if chosen.get("top_k") == -1:
        chosen["top_k"] = 0
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


def _template_message(message: Message) -> dict[str, Any]:
    """A message as chat templates expect it; fields the client left out do not appear."""
    wire = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.text,
        "name": message.name,
        "tool_calls": [_template_tool_call(call) for call in message.tool_calls or ()] or None,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content,
    }
    return {name: value for name, value in wire.items() if value is not None}


def _template_tool_call(call: ToolCall) -> dict[str, Any]:
    # OpenAI's arguments are JSON in a string, the templates' are an object.
    arguments: Any = call.function.arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict):
        arguments = parsed
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
