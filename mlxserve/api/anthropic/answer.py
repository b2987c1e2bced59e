"""One answer on its way out: the events of its generation as a stream, or collected into one object."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxserve.api.anthropic.errors import error_object
from mlxserve.api.anthropic.reply import BlockStream, Delta, Reply, usage_object
from mlxserve.api.failures import log_failure
from mlxserve.api.sse import event
from mlxserve.core.generation import Finished, ReasoningDelta, TextDelta, ToolCallDelta, Usage
from mlxserve.errors import EngineError

if TYPE_CHECKING:
    from mlxserve.engine.generation import Generation


@dataclass(frozen=True, slots=True)
class Answer:
    reply: Reply
    generation: "Generation"

    async def collect(self) -> dict[str, Any]:
        """The whole answer as one object.

        Raises:
            EngineError, RequestTimeout, RequestCancelled: the generation ended so.
        """
        deltas: list[Delta] = []
        async for item in self._items():
            if isinstance(item, Finished):
                return self.reply.message(self.reply.blocks(deltas), item.usage, item)
            deltas.append(item)
        raise _no_ending()

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events: message_start, ping, content blocks, message_delta, message_stop.

        A failure after the first byte can have no status of its own: it becomes an `error` event, and the last one.
        """
        try:
            async for item in self._events():
                yield event(item, item["type"])
        except Exception as error:
            log_failure(error, self.reply.message_id)
            yield event(error_object(error, self.reply.message_id), "error")

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        # Before the first token nobody knows what the cache had of the prompt; message_delta corrects it.
        usage = Usage(self.generation.num_prompt_tokens, num_cached_tokens=0, num_generated_tokens=0)
        yield {"type": "message_start", "message": self.reply.message([], usage, None)}
        yield {"type": "ping"}
        blocks = BlockStream(shows_thinking=self.reply.shows_thinking)
        async for item in self._items():
            if isinstance(item, Finished):
                for each in blocks.close():
                    yield each
                yield {
                    "type": "message_delta",
                    "delta": self.reply.ending(item),
                    "usage": usage_object(item.usage),
                }
                yield {"type": "message_stop"}
                return
            for each in blocks.push(item):
                yield each
        raise _no_ending()

    async def _items(self) -> AsyncIterator[Delta | Finished]:
        async for item in self.generation:
            if isinstance(item, (TextDelta, ReasoningDelta, ToolCallDelta, Finished)):
                yield item


def _no_ending() -> EngineError:
    return EngineError("the generation ended without saying why; try again")
