"""The OpenAI endpoints, each with and without the /v1 before it."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlxserve.api.exchange import Exchange, Order, StreamFormat, reply_id
from mlxserve.api.openai.answer import Answer
from mlxserve.api.openai.convert import chat_request, completion_requests
from mlxserve.api.openai.embeddings import EmbeddingsRequest, embedding_requests, embeddings_object
from mlxserve.api.openai.errors import error_object
from mlxserve.api.openai.reply import ChatReply, CompletionReply, Envelope, Reply
from mlxserve.api.openai.schema import ChatCompletionRequest, CompletionFields, CompletionRequest
from mlxserve.api.sse import WAITING, EventStream, event
from mlxserve.api.wire import read_body
from mlxserve.core.generation import GenerationRequest
from mlxserve.errors import ModelNotFound

if TYPE_CHECKING:
    from mlxserve.engine.generation import Generation
    from mlxserve.engine.model_host import ModelHost, ModelInfo
    from mlxserve.engine.served_model import ServedModel

Body = TypeVar("Body", bound=CompletionFields)
Prepare = Callable[[Body, str, "ServedModel"], tuple[Sequence[GenerationRequest], Reply]]
"""From a body, the id of its reply and its model: one request for each prompt, and the shape of the reply."""

EVENTS = StreamFormat(
    respond=lambda pieces, close: EventStream(pieces, on_close=close),
    failure=lambda error: event(error_object(error)[1]),
    waiting=WAITING,
)


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
                Route(prefix + "/embeddings", self.embeddings, methods=["POST"]),
            )
        ]

    async def list_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model_object(info) for info in self._host.models()]})

    async def get_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        models = self._host.models()
        for same in (str, _canonical):
            for info in models:
                if same(info.name) == same(name):
                    return JSONResponse(_model_object(info))
        raise ModelNotFound(f"There is no model {name!r} here; GET /v1/models lists those there are.", model=name)

    async def chat_completions(self, request: Request) -> Response:
        body = await read_body(request, ChatCompletionRequest, self._max_body_bytes)
        return await self._answer(request, body, "chatcmpl", _prepare_chat)

    async def completions(self, request: Request) -> Response:
        body = await read_body(request, CompletionRequest, self._max_body_bytes)
        return await self._answer(request, body, "cmpl", _prepare_completion)

    async def embeddings(self, request: Request) -> Response:
        body = await read_body(request, EmbeddingsRequest, self._max_body_bytes)
        exchange = Exchange(request, self._host)
        requests = embedding_requests(body, reply_id(request, "embd"))
        embedded = await exchange.embed(body.model, requests, keep_alive=body.keep_alive)
        return JSONResponse(embeddings_object(body, embedded))

    async def _answer(self, request: Request, body: Body, id_prefix: str, prepare: Prepare[Body]) -> Response:
        exchange = Exchange(request, self._host)
        request_id = reply_id(request, id_prefix)

        def place(model: "ServedModel") -> Order:
            requests, reply = prepare(body, request_id, model)

            def answer(generations: "list[Generation]") -> Answer:
                return Answer(
                    envelope=Envelope(request_id, model.name),
                    reply=reply,
                    generations=generations,
                    num_samples=body.num_samples,
                    num_choices=body.num_choices,
                    include_usage=body.include_usage,
                    include_timings=bool(body.timings),
                )

            return Order(requests, answer, body.num_samples)

        stream = EVENTS if body.stream else None
        return await exchange.respond(body.model, place, stream=stream, keep_alive=body.keep_alive)


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


def _canonical(name: str) -> str:
    """What the spellings of one alias have in common."""
    return name.lower().removesuffix(":latest")


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
