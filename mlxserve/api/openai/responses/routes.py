"""The endpoints of /v1/responses, each with and without the /v1 before it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlxserve.api.connection import until_disconnect
from mlxserve.api.exchange import Exchange, Order, StreamFormat, reply_id
from mlxserve.api.openai.responses.answer import Answer, early_failure
from mlxserve.api.openai.responses.convert import (
    chat_prompt,
    generation_request,
    listed_items,
    request_items,
    request_toolbox,
)
from mlxserve.api.openai.responses.items import Item
from mlxserve.api.openai.responses.output import Output
from mlxserve.api.openai.responses.reply import Reply
from mlxserve.api.openai.responses.schema import InputTokensRequest, PromptFields, ResponseRequest
from mlxserve.api.openai.responses.store import ResponseStore, StoredResponse
from mlxserve.api.sse import WAITING, EventStream
from mlxserve.api.wire import read_body
from mlxserve.errors import InvalidParameter, RequestNotFound

if TYPE_CHECKING:
    from mlxserve.engine.generation import Generation
    from mlxserve.engine.model_host import ModelHost
    from mlxserve.engine.served_model import ServedModel

Body = TypeVar("Body", bound=PromptFields)

_OUTPUT_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


class ResponseRoutes:
    def __init__(self, host: "ModelHost", *, max_body_bytes: int) -> None:
        self._host = host
        self._max_body_bytes = max_body_bytes
        self._store = ResponseStore()

    def routes(self) -> list[Route]:
        return [
            route
            for prefix in ("/v1/responses", "/responses")
            for route in (
                Route(prefix, self.create, methods=["POST"]),
                Route(prefix + "/input_tokens", self.count_tokens, methods=["POST"]),
                Route(prefix + "/{response_id}", self.get, methods=["GET"]),
                Route(prefix + "/{response_id}", self.delete, methods=["DELETE"]),
                Route(prefix + "/{response_id}/input_items", self.list_input_items),
            )
        ]

    async def create(self, request: Request) -> Response:
        body = await read_body(request, ResponseRequest, self._max_body_bytes)
        exchange = Exchange(request, self._host)
        response_id = reply_id(request, "resp", "_")
        earlier = self._earlier_items(body)
        tools = request_toolbox(body)
        prompt = chat_prompt(body, earlier, tools)

        def place(model: "ServedModel") -> Order:
            def answer(generations: "list[Generation]") -> Answer:
                (generation,) = generations
                return Answer(
                    Reply(body, response_id, model.name),
                    Output(response_id, tools),
                    generation,
                    lambda response: self._remember(body, earlier, response),
                )

            return Order([generation_request(body, prompt, response_id, model.default_sampling)], answer)

        stream = StreamFormat(
            respond=lambda pieces, close: EventStream(pieces, on_close=close),
            failure=lambda error: early_failure(Reply(body, response_id, body.model), error),
            waiting=WAITING,
        )
        return await exchange.respond(body.model, place, stream=stream if body.stream else None)

    async def count_tokens(self, request: Request) -> Response:
        body = await read_body(request, InputTokensRequest, self._max_body_bytes)
        prompt = chat_prompt(body, self._earlier_items(body), request_toolbox(body))

        async def count() -> int:
            lease = await self._host.acquire(body.model)
            try:
                return await lease.model.count_tokens(prompt)
            finally:
                lease.release()

        num_tokens = await until_disconnect(request.receive, count())
        return JSONResponse({"object": "response.input_tokens", "input_tokens": num_tokens})

    async def get(self, request: Request) -> Response:
        if request.query_params.get("stream", "false").lower() in ("true", "1"):
            raise InvalidParameter("Responses are streamed while they are made, not later.", param="stream")
        return JSONResponse(self._stored(request).response)

    async def delete(self, request: Request) -> Response:
        response_id = self._stored(request).response["id"]
        self._store.remove(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def list_input_items(self, request: Request) -> Response:
        items = self._stored(request).input_items
        if request.query_params.get("order", "desc") != "asc":
            items = items[::-1]
        page = {"object": "list", "data": items, "has_more": False}
        return JSONResponse(page | {"first_id": items[0]["id"], "last_id": items[-1]["id"]})

    def _stored(self, request: Request) -> StoredResponse:
        response_id = request.path_params["response_id"]
        stored = self._store.get(response_id)
        if stored is None:
            raise RequestNotFound(f"There is no response with the id {response_id[:100]!r} here, or no longer.")
        return stored

    def _earlier_items(self, body: PromptFields) -> Sequence[Item]:
        if body.previous_response_id is None:
            return ()
        stored = self._store.get(body.previous_response_id)
        if stored is None:
            raise InvalidParameter(
                f"There is no response with the id {body.previous_response_id[:100]!r} here, or no longer; send the "
                "conversation itself as 'input'.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return stored.conversation

    def _remember(self, body: ResponseRequest, earlier: Sequence[Item], response: dict[str, Any]) -> None:
        if body.store is False:
            return
        items = request_items(body)
        conversation = (*earlier, *items, *_OUTPUT_ITEMS.validate_python(response["output"]))
        self._store.add(StoredResponse(response, listed_items(items, response["id"]), conversation))
