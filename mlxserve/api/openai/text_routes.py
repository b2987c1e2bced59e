"""/tokenize, /detokenize and /apply-template, each with and without the /v1 before it: a model's texts, no answers."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlxserve.api.connection import until_disconnect
from mlxserve.api.openai.convert import chat_prompt
from mlxserve.api.openai.reply import token_text
from mlxserve.api.openai.text_schema import ApplyTemplateRequest, DetokenizeRequest, TokenizeRequest
from mlxserve.api.wire import read_body

if TYPE_CHECKING:
    from mlxserve.engine.model_host import ModelHost
    from mlxserve.engine.served_model import ServedModel


class TextRoutes:
    def __init__(self, host: "ModelHost", *, max_body_bytes: int) -> None:
        self._host = host
        self._max_body_bytes = max_body_bytes

    def routes(self) -> list[Route]:
        return [
            Route(prefix + path, endpoint, methods=["POST"])
            for prefix in ("/v1", "")
            for path, endpoint in (
                ("/tokenize", self.tokenize),
                ("/detokenize", self.detokenize),
                ("/apply-template", self.apply_template),
            )
        ]

    async def tokenize(self, request: Request) -> Response:
        body = await read_body(request, TokenizeRequest, self._max_body_bytes)

        async def reply(model: "ServedModel") -> dict[str, Any]:
            text = getattr(body, body.field)
            ids = await model.text.tokenize(text, add_special_tokens=body.adds_special_tokens, param=body.field)
            return await asyncio.to_thread(_tokens_object, ids, body, model)

        return await self._answer(request, body.model, reply)

    async def detokenize(self, request: Request) -> Response:
        body = await read_body(request, DetokenizeRequest, self._max_body_bytes)

        async def reply(model: "ServedModel") -> dict[str, Any]:
            text = await model.text.detokenize(body.tokens)
            return {"content": text, "prompt": text}

        return await self._answer(request, body.model, reply)

    async def apply_template(self, request: Request) -> Response:
        body = await read_body(request, ApplyTemplateRequest, self._max_body_bytes)

        async def reply(model: "ServedModel") -> dict[str, Any]:
            return {"prompt": await model.text.render(chat_prompt(body))}

        return await self._answer(request, body.model, reply)

    async def _answer(
        self, request: Request, name: str, reply: "Callable[[ServedModel], Awaitable[dict[str, Any]]]"
    ) -> Response:
        async def work() -> Response:
            lease = await self._host.acquire(name)
            try:
                content = await reply(lease.model)
            finally:
                lease.release()
            # Off the event loop: a million ids are some megabytes of JSON.
            return await asyncio.to_thread(JSONResponse, content)

        return await until_disconnect(request.receive, work())


def _tokens_object(ids: list[int], body: TokenizeRequest, model: "ServedModel") -> dict[str, Any]:
    content = {"tokens": ids, "count": len(ids), "max_model_len": model.context_length}
    token_bytes = model.tokenizer.token_bytes
    if body.return_token_strs:
        content["token_strs"] = [token_text(token_bytes(token_id)) for token_id in ids]
    if body.with_pieces:
        content["tokens"] = [{"id": token_id, "piece": _piece(token_bytes(token_id))} for token_id in ids]
    return content


def _piece(data: bytes) -> str | list[int]:
    """llama-server's form: the bytes of a token that is no whole UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
