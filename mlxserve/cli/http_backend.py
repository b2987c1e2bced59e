"""Answers from a running mlxserve server, over its OpenAI dialect."""

import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any
from urllib.parse import quote

import httpx

from mlxserve.cli.addresses import client_url
from mlxserve.cli.chat_backend import Message, ModelFacts
from mlxserve.cli.parameters import ChatParameters
from mlxserve.core.generation import Finished, Timings, Usage
from mlxserve.core.request import FinishReason
from mlxserve.errors import (
    CapacityError,
    ConfigError,
    EngineError,
    InvalidParameter,
    MlxserveError,
    ModelNotFound,
    RequestError,
)

# A server on this machine answers within a millisecond; who has none must not wait for it.
PROBE_TIMEOUT = httpx.Timeout(1.0, connect=0.5)
# Loading a model and a long prompt come before the first byte.
ANSWER_TIMEOUT = httpx.Timeout(None, connect=5.0)


async def find_server(
    model: str, host: str, port: int, api_key: str | None, *, transport: httpx.AsyncBaseTransport | None = None
) -> "HttpBackend | None":
    """The server at host:port, if it is an mlxserve and has `model`; None otherwise.

    Raises:
        ConfigError: it wants another API key.
    """
    # An alias has no case and may carry a tag, as in Ollama; the name of a repository is taken as it stands.
    model = model if "/" in model else model.lower().removesuffix(":latest")
    client = httpx.AsyncClient(
        base_url=client_url(host, port),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=PROBE_TIMEOUT,
        # Environment proxies are for the outside world, not for a server that was named by its address.
        trust_env=False,
        transport=transport,
    )
    try:
        reply = await client.get(f"/v1/models/{quote(model)}")
        description = reply.json()
    except (httpx.HTTPError, ValueError):
        await client.aclose()
        return None
    if reply.status_code == 200 and description.get("owned_by") == "mlxserve":
        client.timeout = ANSWER_TIMEOUT
        return HttpBackend(model, client, description)
    await client.aclose()
    if reply.status_code == 401 and reply.headers.get("server", "").startswith("mlxserve"):
        raise ConfigError(
            f"the server at {client.base_url} wants another API key: set MLXSERVE_API_KEY to it, "
            "or run the model in this process with --local"
        )
    return None


class HttpBackend:
    """One model of a running server. `description` is what GET /v1/models/{model} said of it."""

    def __init__(self, model: str, client: httpx.AsyncClient, description: dict[str, Any]) -> None:
        self._model = model
        self._client = client
        self._description = description

    async def load(self) -> float:
        if self._description.get("loaded"):
            return 0.0
        # The dialect has no call that only loads: a model is loaded by the first request for it.
        start = time.monotonic()
        async with contextlib.aclosing(self.answer([{"role": "user", "content": "."}], _ONE_TOKEN)) as events:
            async for _ in events:
                pass
        self._description["loaded"] = True
        return time.monotonic() - start

    def facts(self) -> ModelFacts:
        rows = {"model": self._model, "server": str(self._client.base_url)}
        if self._description.get("context_length"):
            rows["context length"] = str(self._description["context_length"])
        return ModelFacts(rows=rows)

    async def answer(self, messages: list[Message], parameters: ChatParameters) -> AsyncGenerator[str | Finished, None]:
        body = {
            "model": self._model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "timings": True,
            **parameters.given(),
        }
        answer = _AnswerReader()
        try:
            async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise _error(self._model, response.status_code, await response.aread())
                async for data in _sse_data(response):
                    if data == "[DONE]":
                        break
                    text = answer.read(json.loads(data))
                    if text:
                        yield text
        except httpx.HTTPError as error:
            raise EngineError(f"the connection to {self._client.base_url} was lost: {error}") from error
        except ValueError as error:
            raise EngineError(f"the server at {self._client.base_url} sent no valid stream: {error}") from error
        yield answer.finished()

    async def close(self) -> None:
        await self._client.aclose()


_ONE_TOKEN = ChatParameters(max_tokens=1)


class _AnswerReader:
    """Collects from the chunks of one stream what Finished needs."""

    def __init__(self) -> None:
        self._reason: str | None = None
        self._usage: dict[str, Any] = {}
        self._timings: dict[str, float] = {}

    def read(self, chunk: dict[str, Any]) -> str:
        """The new text of a chunk."""
        if "error" in chunk:
            raise EngineError(chunk["error"]["message"])
        self._usage = chunk.get("usage") or self._usage
        self._timings = chunk.get("timings") or self._timings
        text = ""
        for choice in chunk.get("choices", ()):
            text += choice["delta"].get("content") or ""
            self._reason = choice.get("finish_reason") or self._reason
        return text

    def finished(self) -> Finished:
        if self._reason is None:
            raise EngineError("the server ended the answer without saying why; its log tells more")
        details = self._usage.get("prompt_tokens_details") or {}
        milliseconds = self._timings.get
        front_end, queue = milliseconds("front_end_ms", 0.0), milliseconds("queue_ms", 0.0)
        prefill = milliseconds("prompt_ms", 0.0)
        return Finished(
            reason=FinishReason.LENGTH if self._reason == "length" else FinishReason.STOP,
            stop_string=None,
            usage=Usage(
                num_prompt_tokens=self._usage.get("prompt_tokens", 0),
                num_cached_tokens=details.get("cached_tokens", 0),
                num_generated_tokens=self._usage.get("completion_tokens", 0),
                num_draft_tokens=int(self._timings.get("draft_n", 0)),
                num_accepted_tokens=int(self._timings.get("draft_n_accepted", 0)),
            ),
            timings=Timings(
                front_end=front_end / 1e3,
                queue=queue / 1e3,
                prefill=prefill / 1e3,
                delivery=max(0.0, milliseconds("ttft_ms", 0.0) - front_end - queue - prefill) / 1e3,
                decode=milliseconds("predicted_ms", 0.0) / 1e3,
                total=milliseconds("total_ms", 0.0) / 1e3,
            ),
        )


async def _sse_data(response: httpx.Response) -> AsyncIterator[str]:
    """The data of each server-sent event, one line each here.

    httpx's own aiter_lines also cuts at U+2028 and its like, which may stand inside JSON.
    """
    buffer = b""
    async for part in response.aiter_bytes():
        *lines, buffer = (buffer + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").decode().strip()


def _error(model: str, status: int, body: bytes) -> MlxserveError:
    """The error a non-200 reply stands for."""
    try:
        error = json.loads(body)["error"]
        message, param, code = error["message"], error.get("param"), error.get("code")
    except (ValueError, TypeError, KeyError):
        return EngineError(f"the server answered with status {status}")
    if status == 404:
        return ModelNotFound(message, model=model)
    if status in (400, 413, 422):
        return InvalidParameter(message, param=param, code=code) if param else RequestError(message, code=code)
    if status in (429, 503):
        return CapacityError(message)
    return EngineError(message)
