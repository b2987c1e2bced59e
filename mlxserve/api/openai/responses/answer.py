"""One answer on its way out: the events of its generation as a stream, or collected into one object."""

from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from mlxserve.api.failures import log_failure
from mlxserve.api.openai.responses.output import Output
from mlxserve.api.openai.responses.reply import Reply
from mlxserve.api.sse import event
from mlxserve.core.generation import Finished, ReasoningDelta, TextDelta, ToolCallDelta
from mlxserve.core.request import FinishReason
from mlxserve.errors import EngineError

if TYPE_CHECKING:
    from mlxserve.engine.generation import Generation


@dataclass(frozen=True, slots=True)
class Answer:
    reply: Reply
    output: Output
    generation: "Generation"
    on_finished: Callable[[dict[str, Any]], None]
    """Is given the response when it is whole, or cut off by a limit."""

    async def collect(self) -> dict[str, Any]:
        """The whole answer as one object.

        Raises:
            EngineError, RequestTimeout, RequestCancelled: the generation ended so.
        """
        response: dict[str, Any] = {}
        async for content in self._events():
            response = content.get("response", response)
        return response

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events, numbered from 0: response.created ... response.completed.

        A failure after the first byte can have no status of its own: it becomes `response.failed`, and the last one.
        """
        numbers = count()
        try:
            async for content in self._events():
                yield numbered(content, next(numbers))
        except Exception as error:
            log_failure(error, self.reply.response_id)
            content = {"type": "response.failed", "response": self.reply.failed(self.output.items, error)}
            yield numbered(content, next(numbers))

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        begun = self.reply.begun()
        yield {"type": "response.created", "response": begun}
        yield {"type": "response.in_progress", "response": begun}
        async for item in self.generation:
            match item:
                case TextDelta() | ReasoningDelta() | ToolCallDelta():
                    for each in self.output.push(item):
                        yield each
                case Finished():
                    status = "incomplete" if item.reason is FinishReason.LENGTH else "completed"
                    for each in self.output.close(status):
                        yield each
                    response = self.reply.finished(self.output.items, item)
                    self.on_finished(response)
                    yield {"type": f"response.{status}", "response": response}
                    return
        raise EngineError("the generation ended without saying why; try again")


def early_failure(reply: Reply, error: Exception) -> bytes:
    """The whole stream of a response that failed before anything of it was sent."""
    contents: Iterable[dict[str, Any]] = (
        {"type": "response.created", "response": reply.begun()},
        {"type": "response.failed", "response": reply.failed([], error)},
    )
    return b"".join(numbered(content, number) for number, content in enumerate(contents))


def numbered(content: dict[str, Any], number: int) -> bytes:
    """An event of a stream, with its place in it."""
    return event(content | {"sequence_number": number}, content["type"])
