"""Base models in memory: read once, for all engines that compute with their weights. Event loop only."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from mlxserve.engine.engine_thread import EngineThread
from mlxserve.store.loader import LoadedModel
from mlxserve.store.model_source import Location, ModelSource
from mlxserve.text.tokenizer import Tokenizer

Read = Callable[[ModelSource, Path], Awaitable[tuple[LoadedModel, Tokenizer]]]


@dataclass(slots=True, eq=False)
class _Base:
    content: tuple[LoadedModel, Tokenizer] | None = None
    num_users: int = 0
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    def clear(self) -> None:
        self.content = None


class BaseModels:
    """Models as their files have them. Nobody changes their modules: who needs to takes copies of these.

    Each stays until everybody who took it gave it back, and is let go on the engine thread.
    """

    def __init__(self, thread: EngineThread, read: Read) -> None:
        self._thread = thread
        self._read = read
        self._bases: dict[Location, _Base] = {}

    async def take(self, source: ModelSource, path: Path) -> tuple[LoadedModel, Tokenizer]:
        """The model at the source's location, whose files are at `path`, until give_back(). Raises what `read` does."""
        base = self._bases.setdefault(source.location, _Base())
        base.num_users += 1
        try:
            async with base.reading:
                if base.content is None:
                    base.content = await self._read(source, path)
        except BaseException:
            self.give_back(source.location)
            raise
        return base.content

    def give_back(self, location: Location) -> None:
        base = self._bases[location]
        base.num_users -= 1
        if not base.num_users:
            del self._bases[location]
            self._thread.call(base.clear)

    def clear(self) -> None:
        """Let all go, whoever uses them: the engines are about to end."""
        for base in self._bases.values():
            self._thread.call(base.clear)
