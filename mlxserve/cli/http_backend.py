"""Answers from a running mlxserve server, over its OpenAI dialect."""

import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any
from urllib.parse import quote

import httpx

from mlxserve.cli.addresses import client_url
from mlxserve.cli.chat_backend import AnswerEvent, Message, ModelFacts
from mlxserve.cli.parameters import OLLAMA_NAMES, ChatParameters
from mlxserve.core.generation import Finished, ReasoningDelta, TextDelta, Timings, Usage
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
DETAILS_TIMEOUT = 5.0


async def find_server(
    model: str,
    host: str,
    port: int,
    api_key: str | None,
    *,
    keep_alive: float | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> "HttpBackend | None":
    """The server at host:port, if it is an mlxserve and has `model`; None otherwise. `keep_alive`: open_backend()'s.

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
        return HttpBackend(model, client, description, keep_alive)
    await client.aclose()
    if reply.status_code == 401 and reply.headers.get("server", "").startswith("mlxserve"):
        raise ConfigError(
            f"the server at {client.base_url} wants another API key: set MLXSERVE_API_KEY to it, "
            "or run the model in this process with --local"
        )
    return None


class HttpBackend:
    """One model of a running server. `description` is what GET /v1/models/{model} said of it."""

    def __init__(
        self, model: str, client: httpx.AsyncClient, description: dict[str, Any], keep_alive: float | None = None
    ) -> None:
        self._model = model
        self._client = client
        self._description = description
        self._keep_alive = keep_alive

    async def load(self, keep_alive: float | None = None) -> float:
        seconds = 0.0
        if not self._description.get("loaded") or keep_alive is not None:
            # The dialect has no call that only loads: a model is loaded by the first request for it.
            start = time.monotonic()
            events = self._answer([{"role": "user", "content": "."}], _ONE_TOKEN, keep_alive)
            async with contextlib.aclosing(events):
                async for _ in events:
                    pass
            seconds = 0.0 if self._description.get("loaded") else time.monotonic() - start
            self._description["loaded"] = True
        return seconds

    async def facts(self) -> ModelFacts:
        # Asked anew: until a model is loaded, a server may not know how long its context is.
        description = self._description | await self._ask("GET", f"/v1/models/{quote(self._model)}")
        shown = await self._ask("POST", "/api/show", {"model": self._model})
        details = shown.get("details") or {}
        context_length = description.get("context_length")
        rows = {
            "model": self._model,
            "server": str(self._client.base_url),
            "architecture": details.get("family"),
            "parameters": details.get("parameter_size"),
            "context length": context_length,
            "quantization": details.get("quantization_level"),
            "capabilities": ", ".join(shown.get("capabilities") or ()),
        }
        return ModelFacts(
            rows={label: str(value) for label, value in rows.items() if value},
            default_sampling=_parameter_lines(shown.get("parameters") or ""),
            template=shown.get("template") or None,
            system=shown.get("system") or None,
            license=shown.get("license") or None,
            context_length=context_length,
        )

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """What the server says there; nothing where it does not, since nothing depends on it but what is shown."""
        with contextlib.suppress(httpx.HTTPError, ValueError):
            reply = await self._client.request(method, path, json=body, timeout=DETAILS_TIMEOUT)
            content = reply.json()
            if reply.status_code == 200 and isinstance(content, dict):
                return content
        return {}

    async def models(self) -> list[str]:
        try:
            reply = await self._client.get("/v1/models")
            return [str(model["id"]) for model in reply.json()["data"]]
        except (httpx.HTTPError, ValueError, TypeError, KeyError) as error:
            raise EngineError(f"the server at {self._client.base_url} gave no list of models: {error}") from error

    def answer(self, messages: list[Message], parameters: ChatParameters) -> AsyncGenerator[AnswerEvent, None]:
        return self._answer(messages, parameters, self._keep_alive)

    async def _answer(
        self, messages: list[Message], parameters: ChatParameters, keep_alive: float | None
    ) -> AsyncGenerator[AnswerEvent, None]:
        body = {
            "model": self._model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "timings": True,
            **parameters.given(),
        }
        if keep_alive is not None:
            body["keep_alive"] = keep_alive
        answer = _AnswerReader()
        try:
            async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise _error(self._model, response.status_code, await response.aread())
                async for data in _sse_data(response):
                    if data == "[DONE]":
                        break
                    for event in answer.read(json.loads(data)):
                        yield event
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

    def read(self, chunk: dict[str, Any]) -> list[TextDelta | ReasoningDelta]:
        """The new text of a chunk."""
        if "error" in chunk:
            raise EngineError(chunk["error"]["message"])
        self._usage = chunk.get("usage") or self._usage
        self._timings = chunk.get("timings") or self._timings
        events: list[TextDelta | ReasoningDelta] = []
        for choice in chunk.get("choices", ()):
            delta = choice["delta"]
            if thought := delta.get("reasoning_content"):
                events.append(ReasoningDelta(thought, ()))
            if text := delta.get("content"):
                events.append(TextDelta(text, ()))
            self._reason = choice.get("finish_reason") or self._reason
        return events

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


def _parameter_lines(text: str) -> dict[str, Any]:
    """The parameters of Ollama's /api/show, one `name value` a line; several lines of a name are a list."""
    values: dict[str, list[Any]] = {}
    for line in text.splitlines():
        name, _, value = line.strip().partition(" ")
        if name:
            try:
                parsed = json.loads(value)
            except ValueError:
                parsed = value.strip()
            values.setdefault(OLLAMA_NAMES.get(name, name), []).append(parsed)
    return {name: found if name == "stop" or len(found) > 1 else found[0] for name, found in values.items()}


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
