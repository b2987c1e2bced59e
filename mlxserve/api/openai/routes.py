"""The OpenAI endpoints, each with and without the /v1 before it."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlxserve.api.connection import read_json_body, until_disconnect
from mlxserve.api.openai.answer import Answer
from mlxserve.api.openai.convert import chat_request, completion_requests
from mlxserve.api.openai.reply import ChatReply, CompletionReply, Envelope, Reply
from mlxserve.api.openai.schema import ChatCompletionRequest, CompletionFields, CompletionRequest, Schema, parse
from mlxserve.api.sse import EventStream
from mlxserve.core.generation import Arrival, GenerationRequest
from mlxserve.errors import ModelNotFound

if TYPE_CHECKING:
    from mlxserve.engine.generation import Generation
    from mlxserve.engine.model_host import ModelHost, ModelInfo
    from mlxserve.engine.served_model import ServedModel

Body = TypeVar("Body", bound=CompletionFields)
Prepare = Callable[[Body, str, "ServedModel"], tuple[Sequence[GenerationRequest], Reply]]
"""From a body, the id of its reply and its model: one request for each prompt, and the shape of the reply."""

# Parsing more than this would be felt by the streams that share the event loop.
INLINE_BODY_BYTES = 1_000_000


class OpenAIRoutes:
    def __init__(self, host: "ModelHost", *, max_body_bytes: int) -> None:
        self._host = host
        self._max_body_bytes = max_body_bytes

    def routes(self) -> list[Route]:
        return [
            route
            for prefix in ("/v1", "")
            for route in (
                Route(prefix + "/models", self.list_models),
                Route(prefix + "/models/{name:path}", self.get_model),
                Route(prefix + "/chat/completions", self.chat_completions, methods=["POST"]),
                Route(prefix + "/completions", self.completions, methods=["POST"]),
            )
        ]

    async def list_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model_object(info) for info in self._host.models()]})

    async def get_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        for info in self._host.models():
            if info.name == name:
                return JSONResponse(_model_object(info))
        raise ModelNotFound(f"There is no model {name!r} here; GET /v1/models lists those there are.", model=name)

    async def chat_completions(self, request: Request) -> Response:
        body = await self._parse(request, ChatCompletionRequest)
        return await self._answer(request, body, "chatcmpl", _prepare_chat)

    async def completions(self, request: Request) -> Response:
        body = await self._parse(request, CompletionRequest)
        return await self._answer(request, body, "cmpl", _prepare_completion)

    async def _parse(self, request: Request, schema: type[Schema]) -> Schema:
        data = await read_json_body(request, self._max_body_bytes)
        if len(data) <= INLINE_BODY_BYTES:
            return parse(schema, data)
        return await asyncio.to_thread(parse, schema, data)

    async def _answer(self, request: Request, body: Body, id_prefix: str, prepare: Prepare[Body]) -> Response:
        """Generate and reply. Whatever happens before the reply is over, no generation outlives it.

        Headers go out when all choices are admitted, so that everything refused until then has its own status.
        """
        arrival = Arrival(request.state.received, parsed=time.monotonic())
        request_id = request.state.request_id = f"{id_prefix}-{request.state.request_id.removeprefix('req-')}"
        started: list[Generation] = []

        def sent() -> None:
            for generation in started:
                generation.delivered()

        request.state.on_sent = sent

        def close() -> None:
            for generation in started:
                generation.cancel()

        async def admit() -> Answer:
            model = await self._host.get(body.model)
            arrival.loaded = time.monotonic()
            requests, reply = prepare(body, request_id, model)
            requests = [replace(each, arrival=arrival) for each in requests]
            return Answer(
                envelope=Envelope(request_id, model.name),
                reply=reply,
                generations=await _start(model, requests, body.num_samples, started),
                num_samples=body.num_samples,
                num_choices=body.num_choices,
                include_usage=body.include_usage,
                include_timings=bool(body.timings),
            )

        async def complete() -> dict[str, Any]:
            answer = await admit()
            return await answer.collect()

        try:
            if body.stream:
                answer = await until_disconnect(request.receive, admit())
                return EventStream(answer.events(), on_close=close)
            return JSONResponse(await until_disconnect(request.receive, complete()))
        except BaseException:
            close()
            raise


async def _start(
    model: "ServedModel", requests: Sequence[GenerationRequest], num_samples: int, started: "list[Generation]"
) -> "list[Generation]":
    """Admit all samples of all requests, in order. `started` gets each as it is admitted, also when a later one is
    refused."""

    async def start(request: GenerationRequest) -> "list[Generation]":
        generations = await model.generate_samples(request, num_samples)
        started.extend(generations)
        return generations

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(start(request)) for request in requests]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [generation for task in tasks for generation in task.result()]


def _prepare_chat(
    body: ChatCompletionRequest, request_id: str, model: "ServedModel"
) -> tuple[Sequence[GenerationRequest], Reply]:
    reply = ChatReply(
        model.tokenizer.token_bytes,
        with_logprobs=bool(body.logprobs),
        with_prompt_logprobs=body.prompt_logprobs is not None,
    )
    return [chat_request(body, request_id, model.default_sampling)], reply


def _prepare_completion(
    body: CompletionRequest, request_id: str, model: "ServedModel"
) -> tuple[Sequence[GenerationRequest], Reply]:
    requests = completion_requests(body, request_id, model.default_sampling)
    echoes: list[str] = []
    if body.echo:
        texts = [_prompt_text(prompt, model) for prompt in body.prompts]
        echoes = [text for text in texts for _ in range(body.num_samples)]
    reply = CompletionReply(
        model.tokenizer.token_bytes,
        num_logprobs=body.logprobs,
        num_choices=len(requests) * body.num_samples,
        echoes=echoes,
        with_prompt_logprobs=body.prompt_logprobs is not None,
    )
    return requests, reply


def _prompt_text(prompt: str | list[int], model: "ServedModel") -> str:
    if isinstance(prompt, str):
        return prompt
    return b"".join(map(model.tokenizer.token_bytes, prompt)).decode(errors="replace")


def _model_object(info: "ModelInfo") -> dict[str, Any]:
    return {
        "id": info.name,
        "object": "model",
        "created": info.created,
        "owned_by": "mlxserve",
        "context_length": info.context_length,
        "loaded": info.loaded,
        "description": info.description,
    }
