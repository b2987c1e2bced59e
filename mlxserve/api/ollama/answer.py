"""One answer on its way out: the events of its generation as lines of a stream, or collected into one object."""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlxserve.api.failures import log_failure
from mlxserve.api.ndjson import line
from mlxserve.api.ollama.errors import error_object
from mlxserve.api.ollama.reply import Part, Reply, ToolCall
from mlxserve.core.generation import Finished, ReasoningDelta, TextDelta, ToolCallDelta
from mlxserve.core.step import SampledToken
from mlxserve.errors import EngineError

if TYPE_CHECKING:
    from mlxserve.engine.generation import Generation

_NO_END = "the generation ended without saying why; try again"


@dataclass(slots=True)
class _OpenCall:
    """A tool call as far as it has come. Ollama's clients get calls whole."""

    index: int
    call_id: str
    name: str = ""
    arguments: str = ""
    tokens: list[SampledToken] = field(default_factory=list)

    def add(self, delta: ToolCallDelta) -> None:
        self.name += delta.name or ""
        self.arguments += delta.arguments
        self.tokens += delta.tokens

    def close(self) -> Part:
        """The call; what is no object, since the answer was cut off in it, as text: it is not lost."""
        try:
            arguments = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            text = f'{{"name": {json.dumps(self.name, ensure_ascii=False)}, "arguments": {self.arguments}'
            return Part(text=text, tokens=tuple(self.tokens))
        call = ToolCall(self.index, self.call_id, self.name, arguments)
        return Part(calls=(call,), tokens=tuple(self.tokens))


@dataclass(frozen=True, slots=True)
class Answer:
    reply: Reply
    generation: "Generation"

    async def collect(self) -> dict[str, Any]:
        """The whole answer as one object.

        Raises:
            EngineError, RequestTimeout, RequestCancelled: the generation ended so.
        """
        parts: list[Part] = []
        async for item in self._items():
            if isinstance(item, Finished):
                return self.reply.end(_joined(parts), item, self.generation.token_ids)
            parts.append(item)
        raise EngineError(_NO_END)

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as lines; the last one has `done: true`. A failure is a last line of its own, without it."""
        try:
            async for item in self._items():
                if isinstance(item, Finished):
                    yield line(self.reply.end(Part(), item, self.generation.token_ids))
                elif item.text or item.thinking or item.calls or (self.reply.logprobs.is_wanted and item.tokens):
                    yield line(self.reply.line(item))
        except Exception as error:
            log_failure(error, self.generation.request_id)
            yield line(error_object(error))

    async def _items(self) -> AsyncIterator[Part | Finished]:
        """The parts of the answer as they come, then Finished.

        Raises:
            MlxserveError: the generation failed, or ended without Finished.
        """
        call: _OpenCall | None = None
        async for item in self.generation:
            if call is not None and not (isinstance(item, ToolCallDelta) and item.index == call.index):
                yield call.close()
                call = None
            match item:
                case TextDelta():
                    yield Part(text=item.text, tokens=item.tokens)
                case ReasoningDelta():
                    yield Part(thinking=item.text, tokens=item.tokens)
                case ToolCallDelta():
                    call = call or _OpenCall(item.index, item.call_id)
                    call.add(item)
                case Finished():
                    yield item
                    return
        raise EngineError(_NO_END)


def _joined(parts: Sequence[Part]) -> Part:
    return Part(
        text="".join(part.text for part in parts),
        thinking="".join(part.thinking for part in parts),
        calls=tuple(call for part in parts for call in part.calls),
        tokens=tuple(token for part in parts for token in part.tokens),
    )
