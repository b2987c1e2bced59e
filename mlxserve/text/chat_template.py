"""From a prompt as a dialect gives it to token ids: chat template, then tokenizer."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace

from mlxserve.core.generation import ChatPrompt, InfillPrompt, Prompt, TextPrompt, TokenPrompt
from mlxserve.errors import ContextLengthExceeded, InvalidParameter
from mlxserve.text import thinking
from mlxserve.text.infill import encode_infill
from mlxserve.text.plain_text import encode_text
from mlxserve.text.tokenizer import Tokenizer
from mlxserve.text.tool_calls import complete_tool_messages

MAX_ERROR_LENGTH = 500
SHORT_IDS = "alphanumeric strings with length 9"
"""What Mistral's templates say when the id of a tool call is another."""


def render(tokenizer: Tokenizer, prompt: ChatPrompt) -> str:
    """The text that the model's chat template makes of the messages, in transformers' sandbox.

    It ends where the assistant's answer begins. If the last message is already an assistant's, with text and without
    tool calls, it is the beginning of the answer: it stays open and the model goes on with it (what transformers calls
    `continue_final_message`, and what Anthropic's API, Ollama and llama.cpp do).

    Tool results get the names of their tools (text/tool_calls/history.py). With the tool choice "none" the template is
    shown no tools. The prompt's `reasoning` becomes the arguments that the template has for it (text/thinking.py);
    `template_kwargs` of the same names win.

    Raises:
        InvalidParameter: there is no template, it refuses these messages (`param` is the prompt's), a tool result is
            for an unknown call, a template argument has a name that is not the client's to set, or the model cannot
            think as asked (`param` is the reasoning's).
    """
    if not tokenizer.has_chat_template:
        raise InvalidParameter(
            "this model has no chat template; send it text through the completions endpoint", param=prompt.param
        )
    _check_template_kwargs(tokenizer, prompt)
    prompt = replace(
        prompt,
        messages=complete_tool_messages(prompt.messages, has_short_ids=SHORT_IDS in (tokenizer.tool_template or "")),
        tools=() if prompt.tool_choice.mode == "none" else prompt.tools,
    )
    template = (tokenizer.tool_template if prompt.tools else tokenizer.chat_template) or ""
    arguments = thinking.thinking_arguments(
        template, prompt.reasoning, can_think=thinking.can_think(template, tokenizer.has_token)
    )
    continues = bool(begun_answer(prompt))
    try:
        text: str = tokenizer.hf_tokenizer.apply_chat_template(
            thinking.with_reasoning_named(prompt.messages, template),
            tools=list(prompt.tools) or None,
            tokenize=False,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            **{**arguments, **prompt.template_kwargs},
        )
    except Exception as error:  # a template is a program run on the client's data: any error can come out of it
        reason = str(error) or type(error).__name__
        if len(reason) > MAX_ERROR_LENGTH:
            reason = reason[:MAX_ERROR_LENGTH] + "..."
        raise InvalidParameter(
            f"the model's chat template does not accept these messages: {reason}", param=prompt.param
        ) from error
    if thinking.is_off(prompt.reasoning) and not continues and not arguments.keys() & prompt.template_kwargs.keys():
        return thinking.without_thoughts(text, template, tokenizer.has_token)
    return text


def begun_answer(prompt: ChatPrompt) -> str:
    """The text of the last message, if that is an answer which the model is to go on with."""
    if not prompt.messages:
        return ""
    last = prompt.messages[-1]
    if last.get("role") != "assistant" or last.get("tool_calls"):
        return ""
    return last.get("content") or ""


def encode_prompt(
    tokenizer: Tokenizer,
    prompt: Prompt,
    context_length: int | None = None,
    on_rendered: Callable[[str], None] | None = None,
) -> list[int]:
    """Token ids of a prompt: at least one. `on_rendered` is called with a chat's text when its template is done.

    A rendered chat gets no special tokens beside those its template wrote; plain text gets what the tokenizer adds (a
    beginning-of-sequence token, mostly). With `context_length`, a text that cannot fit is refused before it is
    tokenised; one that is found too long only afterwards is left to the caller.

    Raises:
        InvalidParameter: the template refuses the messages, a token id is not in the vocabulary, the text is not valid
            Unicode, the prompt is empty, or the model cannot fill in a middle.
        ContextLengthExceeded: the text has more bytes than `context_length` tokens can stand for.
    """
    match prompt:
        case ChatPrompt():
            # Every template puts a token around a message at least; rendering a hundred thousand takes seconds.
            _check_bound(len(prompt.messages), context_length, param=prompt.param)
            text = render(tokenizer, prompt)
            if on_rendered is not None:
                on_rendered(text)
            ids = _encode(tokenizer, text, context_length, add_special_tokens=False, param=prompt.param)
            if prompt.context:
                ids = _after_context(tokenizer, prompt.context, ids)
        case TextPrompt():
            ids = _encode(tokenizer, prompt.text, context_length, add_special_tokens=True, param=prompt.param)
        case TokenPrompt():
            ids = _checked_ids(tokenizer, prompt.token_ids, param=prompt.param)
        case InfillPrompt():
            num_least = sum(map(tokenizer.min_num_tokens, (prompt.prefix, prompt.suffix)))
            _check_bound(num_least, context_length, param=prompt.param)
            ids = encode_infill(tokenizer, prompt)
    if not ids:
        raise InvalidParameter("the prompt is empty; give it some text", param=prompt.param)
    return ids


def _encode(
    tokenizer: Tokenizer, text: str, context_length: int | None, *, add_special_tokens: bool, param: str
) -> list[int]:
    _check_bound(tokenizer.min_num_tokens(text), context_length, param=param)
    return encode_text(tokenizer, text, add_special_tokens=add_special_tokens, param=param)


def _check_bound(min_num_tokens: int, context_length: int | None, *, param: str) -> None:
    if context_length is not None and min_num_tokens >= context_length:
        raise ContextLengthExceeded(
            f"the prompt has at least {min_num_tokens} tokens and leaves no room for an answer within the context "
            f"length of {context_length} tokens; shorten it",
            num_tokens=min_num_tokens,
            limit=context_length,
            param=param,
        )


def _after_context(tokenizer: Tokenizer, context: Sequence[int], ids: list[int]) -> list[int]:
    """A rendered chat behind what was before it, without the token that begins a sequence.

    Some models name the token that begins every turn so; it stands there more than once, and is no beginning.
    """
    beginning = tokenizer.hf_tokenizer.bos_token_id
    if ids[:1] == [beginning] and ids.count(beginning) == 1:
        ids = ids[1:]
    return [*_checked_ids(tokenizer, context, param="context"), *ids]


def _checked_ids(tokenizer: Tokenizer, token_ids: Sequence[int], *, param: str) -> list[int]:
    for position, token_id in enumerate(token_ids):
        if not 0 <= token_id < tokenizer.vocab_size:
            raise InvalidParameter(
                f"token {position} of the {param} is {token_id}; this model's token ids go from 0 to "
                f"{tokenizer.vocab_size - 1}",
                param=param,
            )
    return list(token_ids)


def _check_template_kwargs(tokenizer: Tokenizer, prompt: ChatPrompt) -> None:
    """Refuse arguments that would reach the renderer in place of the template: another template, `tokenize`, ..."""
    parameters = inspect.signature(tokenizer.hf_tokenizer.apply_chat_template).parameters
    reserved = ({*parameters, "messages", "conversations"} - {"documents"}) & prompt.template_kwargs.keys()
    if reserved:
        raise InvalidParameter(
            f"{', '.join(sorted(reserved))} cannot be set as a template argument", param="chat_template_kwargs"
        )


def with_system(prompt: ChatPrompt, system: str | None) -> ChatPrompt:
    """The prompt with a system message in front, if there is one to put there and none in it.

    Raises:
        InvalidParameter: a tool result is for an unknown call.
    """
    if system is None or any(message.get("role") in ("system", "developer") for message in prompt.messages):
        return prompt
    # First, since errors count the client's own messages.
    prompt = replace(prompt, messages=complete_tool_messages(prompt.messages))
    return replace(prompt, messages=({"role": "system", "content": system}, *prompt.messages))
