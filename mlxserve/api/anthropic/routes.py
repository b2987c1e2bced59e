"""The Anthropic endpoints. Those of models are at paths that are OpenAI's as well: api/models.py chooses."""

from typing import TYPE_CHECKING, Any, TypeVar

from sse_starlette import ServerSentEvent
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlxserve.api.anthropic.answer import Answer
from mlxserve.api.anthropic.convert import chat_prompt, generation_request
from mlxserve.api.anthropic.errors import error_object, error_response
from mlxserve.api.anthropic.reply import Reply
from mlxserve.api.anthropic.schema import CountTokensRequest, MessagesRequest, PromptFields
from mlxserve.api.connection import until_disconnect
from mlxserve.api.dates import utc
from mlxserve.api.exchange import Exchange, Order, StreamFormat, reply_id
from mlxserve.api.sse import EventStream, event
from mlxserve.api.wire import dotted, read_body
from mlxserve.errors import ModelNotFound

if TYPE_CHECKING:
    from mlxserve.engine.generation import Generation
    from mlxserve.engine.model_host import ModelHost, ModelInfo
    from mlxserve.engine.served_model import ServedModel

Body = TypeVar("Body", bound=PromptFields)

PING = ServerSentEvent(event="ping", data='{"type":"ping"}', sep="\n")


class AnthropicRoutes:
    def __init__(self, host: "ModelHost", *, max_body_bytes: int) -> None:
        self._host = host
        self._max_body_bytes = max_body_bytes

    def routes(self) -> list[Route]:
        return [
            Route("/v1/messages", self.messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
        ]

    async def messages(self, request: Request) -> Response:
        body = await self._read(request, MessagesRequest)
        exchange = Exchange(request, self._host)
        message_id = reply_id(request, "msg", "_")
        shows_thinking = body.thinking is None or body.thinking.display != "omitted"

        def place(model: "ServedModel") -> Order:
            reply = Reply(message_id, model.name, body.max_tokens, shows_thinking)

            def answer(generations: "list[Generation]") -> Answer:
                (generation,) = generations
                return Answer(reply, generation)

            return Order([generation_request(body, message_id, model.default_sampling)], answer)

        stream = _stream_format(message_id) if body.stream else None
        response = await exchange.respond(body.model, place, stream=stream)
        response.headers["request-id"] = message_id
        return response

    async def count_tokens(self, request: Request) -> Response:
        body = await self._read(request, CountTokensRequest)
        count = await until_disconnect(request.receive, self._count(body))
        return JSONResponse({"input_tokens": count}, headers={"request-id": request.state.request_id})

    async def list_models(self, request: Request) -> Response:
        models = [_model_object(info) for info in self._host.models()]
        ids = [model["id"] for model in models]
        page = {"data": models, "has_more": False, "first_id": ids[0] if ids else None}
        return JSONResponse(page | {"last_id": ids[-1] if ids else None})

    async def get_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        for info in self._host.models():
            if info.name == name:
                return JSONResponse(_model_object(info))
        error = ModelNotFound(f"There is no model {name!r} here; GET /v1/models lists those there are.", model=name)
        return error_response(error, request.state.request_id)

    async def _read(self, request: Request, schema: type[Body]) -> Body:
        return await read_body(request, schema, self._max_body_bytes, path=dotted)

    async def _count(self, body: CountTokensRequest) -> int:
        lease = await self._host.acquire(body.model)
        try:
            return await lease.model.count_tokens(chat_prompt(body))
        finally:
            lease.release()


def _stream_format(message_id: str) -> StreamFormat:
    return StreamFormat(
        respond=lambda pieces, close: EventStream(pieces, on_close=close, keep_alive=PING),
        failure=lambda error: event(error_object(error, message_id), "error"),
        waiting=event({"type": "ping"}, "ping"),
    )


def _model_object(info: "ModelInfo") -> dict[str, Any]:
    created = utc(info.created)
    return {
        "type": "model",
        "id": info.name,
        "display_name": info.description or info.name,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": info.context_length,
    }
