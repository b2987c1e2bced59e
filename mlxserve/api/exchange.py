"""One request that generates, from its parsed body to the last byte of its answer, whatever its dialect.

A dialect brings three things: from a body to an `Order` (requests for the model), and from the generations of that
order to an `Answer`, which can be streamed or collected.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxserve.api.connection import until_disconnect
from mlxserve.api.failures import log_failure
from mlxserve.core.generation import Arrival, Embedding, Finished, GenerationRequest, Usage
from mlxserve.engine.timeline import Timeline
from mlxserve.errors import EngineError

if TYPE_CHECKING:
    from mlxserve.engine.generation import Generation
    from mlxserve.engine.model_host import Lease, ModelHost
    from mlxserve.engine.served_model import ServedModel

T = TypeVar("T")

HEADERS_AFTER = 1.0
"""Seconds after which a stream's headers go out although its model is still loading or its prompt being read.

Whatever is refused until then has a status of its own; later it is an event of the stream. Clients give up on a server
that sends no headers, some of them after half a minute."""


MAX_EMBEDDINGS = 32
"""Texts of one request that the engine has at a time: more would fill the queue, and be refused, in one request."""


class Answer(Protocol):
    """The generations of one order on their way out."""

    async def collect(self) -> dict[str, Any]:
        """The whole answer as one object. Raises MlxserveError: a generation failed."""
        ...

    def events(self) -> AsyncIterator[bytes]:
        """The answer piece by piece. A failure is a piece as well, and the last one."""
        ...


@dataclass(frozen=True, slots=True)
class Order:
    """What is asked of a model: `num_samples` answers to each request."""

    requests: Sequence[GenerationRequest]
    answer: "Callable[[list[Generation]], Answer]"
    """Of the generations, `num_samples` for each request, in order."""
    num_samples: int = 1


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """How a dialect's stream goes over the wire."""

    respond: Callable[[AsyncIterator[bytes], Callable[[], None]], Response]
    """The response that sends these pieces; the second argument is called when it is over, however it ended."""
    failure: Callable[[Exception], bytes]
    """The piece that tells of an error, after which the stream ends."""
    waiting: bytes = b""
    """The piece that says nothing but that the answer is still to come; sent where headers go out before it."""


@dataclass(frozen=True, slots=True)
class Embedded:
    """Vectors of one request's texts, in order, each (hidden size,) and of length 1."""

    model: str
    vectors: list[tuple[float, ...]]
    usages: list[Usage]
    arrival: Arrival


class Exchange:
    """Takes a model on lease, places an order, and replies. No generation and no lease outlives it."""

    def __init__(self, request: Request, host: "ModelHost") -> None:
        """To be made when the request's body is parsed."""
        self._request = request
        self._host = host
        self._arrival = Arrival(
            request.state.received, parsed=time.monotonic(), traceparent=request.headers.get("traceparent")
        )
        self._lease: Lease | None = None
        self._generations: list[Generation] = []
        request.state.on_sent = self._sent

    async def respond(
        self,
        model: str,
        place: "Callable[[ServedModel], Order]",
        *,
        stream: StreamFormat | None,
        keep_alive: float | None = None,
    ) -> Response:
        """Answer with the model of that name; `stream` None: as one JSON object.

        `keep_alive`: seconds that the model stays loaded after this request; None: the server's setting.

        Raises:
            ClientDisconnect: the client went away.
            MlxserveError: the model cannot be had, or a request is refused or failed, before any byte went out.
        """
        try:
            if stream is None:
                return JSONResponse(
                    await until_disconnect(self._request.receive, self._collect(model, place, keep_alive))
                )
            return await self._stream(model, place, keep_alive, stream)
        except BaseException:
            self._cancel()
            raise

    async def embed(
        self, model: str, requests: Sequence[GenerationRequest], *, keep_alive: float | None = None
    ) -> "Embedded":
        """The embeddings that the requests want, in order. Raises as respond()."""
        try:
            return await until_disconnect(self._request.receive, self._embed(model, requests, keep_alive))
        except BaseException:
            self._cancel()
            raise

    async def _embed(self, model: str, requests: Sequence[GenerationRequest], keep_alive: float | None) -> "Embedded":
        served = await self._acquire(model, keep_alive)
        turns = asyncio.Semaphore(max(1, min(MAX_EMBEDDINGS, served.capacity // 2)))

        async def embed(request: GenerationRequest) -> tuple[Embedding, Usage]:
            async with turns:
                generation = await served.generate(replace(request, arrival=self._arrival))
                self._generations.append(generation)
                events = [event async for event in generation]
            match events:
                case [Embedding() as embedding, Finished(usage=usage)]:
                    return embedding, usage
            raise EngineError("the engine gave no embedding; try again")

        results = await _all(embed(request) for request in requests)
        return Embedded(
            served.name, [embedding.vector for embedding, _ in results], [usage for _, usage in results], self._arrival
        )

    async def _collect(
        self, model: str, place: "Callable[[ServedModel], Order]", keep_alive: float | None
    ) -> dict[str, Any]:
        answer = await self._admit(model, place, keep_alive)
        return await answer.collect()

    async def _stream(
        self, model: str, place: "Callable[[ServedModel], Order]", keep_alive: float | None, stream: StreamFormat
    ) -> Response:
        admission = asyncio.create_task(self._admit(model, place, keep_alive))
        try:
            await until_disconnect(self._request.receive, asyncio.wait({admission}, timeout=HEADERS_AFTER))
            pieces = admission.result().events() if admission.done() else self._late_pieces(admission, stream)
        except BaseException:
            admission.cancel()
            await asyncio.gather(admission, return_exceptions=True)
            raise

        def close() -> None:
            admission.cancel()
            self._cancel()

        return stream.respond(pieces, close)

    async def _late_pieces(self, admission: "asyncio.Task[Answer]", stream: StreamFormat) -> AsyncIterator[bytes]:
        if stream.waiting:
            yield stream.waiting
        try:
            answer = await admission
        except Exception as error:
            log_failure(error, self._request.state.request_id)
            yield stream.failure(error)
            return
        async for piece in answer.events():
            yield piece

    async def _admit(self, model: str, place: "Callable[[ServedModel], Order]", keep_alive: float | None) -> Answer:
        served = await self._acquire(model, keep_alive)
        order = place(served)

        async def start(request: GenerationRequest) -> "list[Generation]":
            generations = await served.generate_samples(replace(request, arrival=self._arrival), order.num_samples)
            # Each at once: a later one may be refused.
            self._generations.extend(generations)
            return generations

        return order.answer(list(chain.from_iterable(await _all(start(request) for request in order.requests))))

    async def _acquire(self, model: str, keep_alive: float | None) -> "ServedModel":
        with self._host.journal.loading(self._request.state.request_id, model, Timeline.waiting(self._arrival)):
            self._lease = await self._host.acquire(model, keep_alive=keep_alive)
        self._arrival.loaded = time.monotonic()
        return self._lease.model

    def _cancel(self) -> None:
        for generation in self._generations:
            generation.cancel()

    def _sent(self) -> None:
        for generation in self._generations:
            generation.delivered()
        if self._lease is not None:
            self._lease.release()


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What each gives, in order; when one fails the others are cancelled and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def reply_id(request: Request, prefix: str, separator: str = "-") -> str:
    """The id of a reply, which the request goes by from now on."""
    request_id = f"{prefix}{separator}{request.state.request_id.removeprefix('req-')}"
    request.state.request_id = request_id
    return request_id
