"""From a parsed body to the engine's GenerationRequest."""

from typing import TYPE_CHECKING, Any

from mlxserve.api.ollama.schema import ChatRequest, GenerateRequest, GenerationFields, Message, Tool, ToolCall
from mlxserve.core.generation import ChatPrompt, GenerationRequest, InfillPrompt, Prompt, TextPrompt

if TYPE_CHECKING:
    from mlxserve.engine.served_model import ServedModel


def known_name(name: str) -> str:
    """A model's name as the rest of the server knows it: what has no tag is `:latest` to Ollama's clients."""
    suffix = ":latest"
    return name[: -len(suffix)] if name.lower().endswith(suffix) else name


def generate_request(body: GenerateRequest, request_id: str, model: "ServedModel") -> GenerationRequest:
    return _request(body, request_id, _prompt(body, model), model)


def chat_request(body: ChatRequest, request_id: str, model: "ServedModel") -> GenerationRequest:
    prompt = ChatPrompt(
        messages=tuple(_template_message(message) for message in body.messages or ()),
        tools=tuple(_template_tool(tool) for tool in body.tools or ()),
        reasoning=body.reasoning,
    )
    return _request(body, request_id, prompt, model)


def _prompt(body: GenerateRequest, model: "ServedModel") -> Prompt:
    text = body.prompt or ""
    if body.suffix:
        return InfillPrompt(text, body.suffix)
    # A model without a template takes plain text, as long as nothing is asked for that only a template can do.
    wants_template = model.tokenizer.has_chat_template or body.system or body.context or body.think
    if body.raw or not wants_template:
        return TextPrompt(text)
    messages: tuple[dict[str, Any], ...] = ({"role": "user", "content": text},)
    if body.system:
        messages = ({"role": "system", "content": body.system}, *messages)
    return ChatPrompt(messages, reasoning=body.reasoning, context=tuple(body.context or ()), param="prompt")


def _request(body: GenerationFields, request_id: str, prompt: Prompt, model: "ServedModel") -> GenerationRequest:
    options = body.given_options
    options.log_unused(request_id)
    return GenerationRequest(
        request_id=request_id,
        prompt=prompt,
        sampling=options.sampling(model.default_sampling, body.num_logprobs),
        stop=options.stop_strings,
        context_length=options.context_length,
        context_length_param="options.num_ctx",
        grammar=body.grammar,
    )


def _template_message(message: Message) -> dict[str, Any]:
    """A message as chat templates expect it; fields the client left out do not appear."""
    wire = {
        "role": message.role,
        "content": message.content or "",
        "name": message.tool_name,
        "tool_calls": [_template_tool_call(call) for call in message.tool_calls or ()] or None,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.thinking or None,
    }
    return {name: value for name, value in wire.items() if value is not None}


def _template_tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    identity = {} if call.id is None else {"id": call.id}
    return {**identity, "type": "function", "function": function}


def _template_tool(tool: Tool) -> dict[str, Any]:
    function = tool.function.model_dump(include={"name", "description", "parameters"}, exclude_none=True)
    return {"type": "function", "function": function}
