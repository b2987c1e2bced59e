"""Ollama's endpoints that generate, and those about the server and the models it has loaded."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from mlxserve.api.connection import until_disconnect
from mlxserve.api.exchange import Embedded, Exchange, Order, StreamFormat, reply_id
from mlxserve.api.ndjson import LineStream, line
from mlxserve.api.ollama import models
from mlxserve.api.ollama.answer import Answer
from mlxserve.api.ollama.body import read
from mlxserve.api.ollama.convert import chat_request, generate_request, known_name
from mlxserve.api.ollama.embed import (
    EmbeddingsRequest,
    EmbedFields,
    EmbedRequest,
    embed_object,
    embedding_requests,
)
from mlxserve.api.ollama.errors import error_object
from mlxserve.api.ollama.library_routes import LibraryRoutes
from mlxserve.api.ollama.reply import ChatReply, GenerateReply, Logprobs, Part, Reply, chat_message, done, head
from mlxserve.api.ollama.schema import ChatRequest, GenerateRequest, GenerationFields
from mlxserve.core.generation import GenerationRequest
from mlxserve.errors import ModelNotFound

if TYPE_CHECKING:
    from mlxserve.engine.generation import Generation
    from mlxserve.engine.model_host import ModelHost
    from mlxserve.engine.served_model import ServedModel

COMPATIBLE_VERSION = "0.13.5"
"""The version of Ollama whose API this is. Clients compare it: Codex wants 0.13.4 at least."""

LINES = StreamFormat(
    respond=lambda pieces, close: LineStream(pieces, on_close=close),
    failure=lambda error: line(error_object(error)),
)
Body = TypeVar("Body", bound=GenerationFields)
JSON_TYPE = "application/json; charset=utf-8"


class OllamaRoutes:
    def __init__(self, host: "ModelHost", *, max_body_bytes: int, allow_pull: bool, model_dirs: Sequence[Path]) -> None:
        self._host = host
        self._max_body_bytes = max_body_bytes
        self._library = LibraryRoutes(host, max_body_bytes=max_body_bytes, allow_pull=allow_pull, model_dirs=model_dirs)

    def routes(self) -> list[Route]:
        return [
            Route("/api/generate", self.generate, methods=["POST"]),
            Route("/api/chat", self.chat, methods=["POST"]),
            Route("/api/embed", self.embed, methods=["POST"]),
            Route("/api/embeddings", self.embeddings, methods=["POST"]),
            Route("/api/version", self.version),
            Route("/api/ps", self.ps),
            *self._library.routes(),
        ]

    async def running(self, request: Request) -> Response:
        """What Ollama says at `/`, by which clients know it."""
        return PlainTextResponse("Ollama is running")

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": COMPATIBLE_VERSION})

    async def ps(self, request: Request) -> Response:
        return JSONResponse({"models": [entry for info in self._host.loaded() for entry in models.loaded(info)]})

    async def generate(self, request: Request) -> Response:
        body = await read(request, GenerateRequest, self._max_body_bytes)
        if body.is_empty:
            reason = await self._load_or_unload(request, body)
            return JSONResponse({**head(body.model), "response": "", **done(reason)})

        def reply(logprobs: Logprobs) -> Reply:
            return GenerateReply(body.model, logprobs, gives_context=not body.raw)

        return await self._answer(request, body, "generate", generate_request, reply)

    async def chat(self, request: Request) -> Response:
        body = await read(request, ChatRequest, self._max_body_bytes)
        if body.is_empty:
            reason = await self._load_or_unload(request, body)
            return JSONResponse({**head(body.model), "message": chat_message(Part()), **done(reason)})
        return await self._answer(request, body, "chat", chat_request, lambda logprobs: ChatReply(body.model, logprobs))

    async def embed(self, request: Request) -> Response:
        body = await read(request, EmbedRequest, self._max_body_bytes)
        requests = embedding_requests(
            body.texts, reply_id(request, "embed"), truncate=body.truncate is not False, options=body.options
        )
        embedded = await self._embed(request, body, requests)
        return JSONResponse(embed_object(body, embedded, time.monotonic() - request.state.received))

    async def embeddings(self, request: Request) -> Response:
        body = await read(request, EmbeddingsRequest, self._max_body_bytes)
        texts = {"prompt": body.prompt} if body.prompt else {}
        requests = embedding_requests(texts, reply_id(request, "embed"), truncate=True, options=body.options)
        embedded = await self._embed(request, body, requests)
        return JSONResponse({"embedding": next(iter(embedded.vectors), [])})

    async def _embed(self, request: Request, body: EmbedFields, requests: Sequence[GenerationRequest]) -> Embedded:
        """Without a text the model is loaded, and that is all."""
        return await Exchange(request, self._host).embed(known_name(body.model), requests, keep_alive=body.keep_alive)

    async def _answer(
        self,
        request: Request,
        body: Body,
        id_prefix: str,
        convert: "Callable[[Body, str, ServedModel], GenerationRequest]",
        make_reply: Callable[[Logprobs], Reply],
    ) -> Response:
        exchange = Exchange(request, self._host)
        request_id = reply_id(request, id_prefix)

        def place(model: "ServedModel") -> Order:
            reply = make_reply(Logprobs(model.tokenizer.token_bytes, is_wanted=bool(body.logprobs)))

            def answer(generations: "list[Generation]") -> Answer:
                return Answer(reply, generations[0])

            return Order([convert(body, request_id, model)], answer)

        is_stream = body.stream is not False
        response = await exchange.respond(
            known_name(body.model), place, stream=LINES if is_stream else None, keep_alive=body.keep_alive
        )
        if not is_stream:
            response.headers["content-type"] = JSON_TYPE
        return response

    async def _load_or_unload(self, request: Request, body: GenerationFields) -> str:
        """Load the model, or with keep_alive 0 unload it; the reason that the answer gives for its end."""
        name = known_name(body.model)
        if body.keep_alive == 0:
            try:
                await until_disconnect(request.receive, self._host.unload(name))
            except ModelNotFound:
                # What is here and not loaded is as it is wanted.
                await asyncio.to_thread(self._host.library.show, name)
            return "unload"
        await until_disconnect(request.receive, self._host.preload(name, keep_alive=body.keep_alive))
        return "load"
