"""One answer on its way out: the events of its generations as a stream of chunks, or collected into one object."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxserve.api.openai.errors import error_object
from mlxserve.api.openai.reply import Envelope, Reply, timings_object, usage_object
from mlxserve.api.sse import DONE, event
from mlxserve.core.generation import Finished, GenerationEvent, TextDelta
from mlxserve.errors import EngineError, MlxserveError

if TYPE_CHECKING:
    from mlxserve.engine.generation import Generation

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    envelope: Envelope
    reply: Reply
    generations: "Sequence[Generation]"
    """One for each choice, in order."""
    include_usage: bool
    """Whether a stream ends with a chunk of usage; an object always has it."""
    include_timings: bool

    async def collect(self) -> dict[str, Any]:
        """The whole answer as one object.

        Raises:
            EngineError, RequestTimeout, RequestCancelled: a generation ended so.
        """
        deltas: list[list[TextDelta]] = [[] for _ in self.generations]
        finished: dict[int, Finished] = {}
        async for index, item in _merge(self.generations):
            if isinstance(item, Finished):
                finished[index] = item
            else:
                deltas[index].append(item)
        choices = [self.reply.choice(index, parts, finished[index]) for index, parts in enumerate(deltas)]
        return self._with_totals(self.envelope.wrap(self.reply.kind, choices), list(finished.values()))

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events: opening chunks, deltas, finish chunks, usage if asked for, [DONE].

        A failure after the first byte can have no status of its own: it becomes an event with the error object, and the
        stream ends without [DONE], which is how OpenAI's clients tell a broken answer from a whole one.
        """
        try:
            async for chunk in self._chunks():
                yield event(chunk)
            yield DONE
        except Exception as error:
            if not isinstance(error, MlxserveError):
                logger.exception("streaming %s failed", self.envelope.request_id)
            yield event(error_object(error)[1])

    async def _chunks(self) -> AsyncIterator[dict[str, Any]]:
        finished: list[Finished] = []
        for index in range(len(self.generations)):
            if (opening := self.reply.opening(index)) is not None:
                yield self._chunk([opening])
        async for index, item in _merge(self.generations):
            if isinstance(item, TextDelta):
                if (delta := self.reply.delta(index, item)) is not None:
                    yield self._chunk([delta])
                continue
            finished.append(item)
            chunk = self._chunk([self.reply.finish(index, item)])
            is_last = len(finished) == len(self.generations) and not self.include_usage
            yield self._with_timings(chunk, finished) if is_last else chunk
        if self.include_usage:
            yield self._with_totals(self._chunk([]), finished)

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self.envelope.wrap(self.reply.chunk_kind, choices)
        if self.include_usage:
            chunk["usage"] = None
        return chunk

    def _with_totals(self, content: dict[str, Any], finished: Sequence[Finished]) -> dict[str, Any]:
        content["usage"] = usage_object(item.usage for item in finished)
        return self._with_timings(content, finished)

    def _with_timings(self, content: dict[str, Any], finished: Sequence[Finished]) -> dict[str, Any]:
        if self.include_timings:
            content["timings"] = timings_object(finished[0].usage, finished[0].timings)
        return content


async def _merge(generations: "Sequence[Generation]") -> AsyncIterator[tuple[int, GenerationEvent]]:
    """The events of several generations as they come, each with the index of its generation.

    Raises:
        MlxserveError: a generation failed; the others are not waited for.
    """
    ended = 0
    if len(generations) == 1:
        # The usual case, without a task for each event.
        async for item in generations[0]:
            ended += isinstance(item, Finished)
            yield 0, item
    else:
        waiting = {asyncio.ensure_future(anext(each)): index for index, each in enumerate(generations)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    index = waiting.pop(task)
                    item = task.result()
                    if isinstance(item, Finished):
                        ended += 1
                    else:
                        waiting[asyncio.ensure_future(anext(generations[index]))] = index
                    yield index, item
        finally:
            for task in waiting:
                task.cancel()
    if ended < len(generations):
        raise EngineError("the generation ended without saying why; try again")
