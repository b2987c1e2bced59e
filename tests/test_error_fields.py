"""Errors that arise behind a dialect name the field as the client wrote it."""

from typing import Any

import pytest
from helpers_chat_models import SAID, model
from helpers_engine import on_loop
from helpers_served import make_generation_request, serving
from tool_call_cases import tool

from mlxserve.api.anthropic.convert import chat_prompt as anthropic_prompt
from mlxserve.api.anthropic.schema import CountTokensRequest
from mlxserve.api.ollama.embed import EmbeddingsRequest as OllamaEmbeddingsRequest
from mlxserve.api.ollama.embed import EmbedRequest
from mlxserve.api.ollama.embed import embedding_requests as ollama_embedding_requests
from mlxserve.api.openai.convert import chat_prompt, completion_requests
from mlxserve.api.openai.embeddings import EmbeddingsRequest, embedding_requests
from mlxserve.api.openai.responses.convert import chat_prompt as responses_prompt
from mlxserve.api.openai.responses.convert import request_toolbox
from mlxserve.api.openai.responses.schema import InputTokensRequest
from mlxserve.api.openai.schema import ChatCompletionRequest, CompletionRequest
from mlxserve.core.generation import ChatPrompt, GenerationRequest, TokenPrompt, ToolChoice
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.errors import ContextLengthExceeded, InvalidParameter
from mlxserve.text.chat_template import with_system

USER = [{"role": "user", "content": "Hi"}]
GREEDY = SamplingParams(temperature=0.0)
NO_REGEX = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}, "required": ["a"]}


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, **fields}


def test_tools_of_messages() -> None:
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in "ab"]
    body = CountTokensRequest.model_validate({"model": "m", "messages": USER, "tools": tools})
    assert anthropic_prompt(body).tool_params == ("tools.0.input_schema", "tools.1.input_schema")


def test_tools_of_responses_are_counted_as_the_client_sent_them() -> None:
    tools = [{"type": "web_search"}, function("a"), {"type": "namespace", "name": "n", "tools": [function("b")]}]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [function("b", namespace="n")]}
    body = {"model": "m", "input": "Hi", "tools": tools}
    for fields, params in (
        ({}, ("tools[1].parameters", "tools[2].tools[0].parameters")),
        ({"tool_choice": allowed}, ("tools[2].tools[0].parameters",)),
    ):
        parsed = InputTokensRequest.model_validate({**body, **fields})
        prompt = responses_prompt(parsed, (), request_toolbox(parsed))
        assert (prompt.param, prompt.tool_params) == ("input", params)


def test_allowed_tools_of_chats_keep_their_places() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in "abc"]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tools[2]]}}
    body = {"model": "m", "messages": USER, "tools": tools, "tool_choice": allowed}
    prompt = chat_prompt(ChatCompletionRequest.model_validate(body))
    assert (len(prompt.tools), prompt.tool_params) == (1, ("tools[2].function.parameters",))


@pytest.mark.parametrize(
    ("given", "params"),
    [
        ("a", [""]),
        (["a"], ["[0]"]),
        (["a", "b"], ["[0]", "[1]"]),
        ([1, 2], [""]),
        ([[1], [2]], ["[0]", "[1]"]),
    ],
)
def test_batches(given: Any, params: list[str]) -> None:
    completion = CompletionRequest.model_validate({"model": "m", "prompt": given})
    embedding = EmbeddingsRequest.model_validate({"model": "m", "input": given})
    for name, requests in (
        ("prompt", completion_requests(completion, "id", {})),
        ("input", embedding_requests(embedding, "id")),
    ):
        assert [request.prompt.param for request in requests] == [name + param for param in params]


def test_batches_of_ollama() -> None:
    for given, params in (("a", ["input"]), (["a", "b"], ["input[0]", "input[1]"]), ("", []), ([], [])):
        texts = EmbedRequest.model_validate({"model": "m", "input": given}).texts
        requests = ollama_embedding_requests(texts, "id", truncate=True, options=None)
        assert [request.prompt.param for request in requests] == params
    with pytest.raises(ValueError, match=r"input"):
        EmbedRequest.model_validate({"model": "m", "input": ["a", ""]})
    assert OllamaEmbeddingsRequest.model_validate({"model": "m", "prompt": ""}).prompt == ""


# --- behind the dialects ---


@on_loop
async def test_prompts_go_by_their_fields() -> None:
    async with serving(model_tokenizer=model("plain")) as served:
        too_long = ChatPrompt(({"role": "user", "content": "x " * 5000},), param="input")
        for prompt in (too_long, TokenPrompt((10**6,), "a[1]")):
            with pytest.raises((ContextLengthExceeded, InvalidParameter)) as caught:
                await served.model.generate(GenerationRequest("r", prompt, GREEDY))
            assert caught.value.param == prompt.param


def test_the_clients_messages_are_counted_without_the_models_system() -> None:
    orphan = {"role": "tool", "content": "3", "tool_call_id": "nobody's"}
    with pytest.raises(InvalidParameter) as caught:
        with_system(ChatPrompt((*USER, orphan)), "Be brief.")
    assert caught.value.param == "messages[1].tool_call_id"


@pytest.mark.parametrize("words", [3, 500])
@on_loop
async def test_a_context_length_that_is_too_short_is_at_fault_itself(words: int) -> None:
    """Whether that is seen before the text is tokenised or afterwards; unless the model's is no longer."""
    request = make_generation_request(prompt="the cat " * words)
    for length, param in ((4, "options.num_ctx"), (10**6, "prompt")):
        asked = GenerationRequest(
            "r", request.prompt, GREEDY, context_length=length, context_length_param="options.num_ctx"
        )
        async with serving() as served:
            if param == "prompt" and words == 3:
                (await served.model.generate(asked)).cancel()
            else:
                with pytest.raises(ContextLengthExceeded) as caught:
                    await served.model.generate(asked)
                assert caught.value.param == param
            await served.idle()


@pytest.mark.parametrize("name", ["qwen-tools", "kimi", "harmony"])
@on_loop
async def test_a_schema_that_cannot_be_enforced_is_its_tools_fault(name: str) -> None:
    tools = (tool("fine"), tool("look", NO_REGEX))
    prompt = ChatPrompt(SAID, tools=tools, tool_choice=ToolChoice("required"), tool_params=("tools.0.x", "tools.1.x"))
    async with serving(model_tokenizer=model(name)) as served:
        with pytest.raises(InvalidParameter) as caught:
            await served.model.generate(GenerationRequest("r", prompt, GREEDY))
        assert caught.value.param == "tools.1.x"
        assert str(caught.value).startswith("Invalid 'tools.1.x': regex parse error")
        assert "start:" not in str(caught.value)
        # It is shown to the model only.
        for choice in (ToolChoice(), ToolChoice("required", name="fine")):
            shown = ChatPrompt(SAID, tools=tools, tool_choice=choice)
            (await served.model.generate(GenerationRequest("r", shown, GREEDY))).cancel()
        await served.idle()
