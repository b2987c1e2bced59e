"""One download on its way: what it tells its client, and how it ends."""

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

from mlxserve.api.failures import log_failure
from mlxserve.api.ndjson import line
from mlxserve.api.ollama.errors import error_object

if TYPE_CHECKING:
    from mlxserve.engine.library import Library

PROGRESS_INTERVAL = 0.1
"""Seconds between two lines of progress, at least."""
SUCCESS = {"status": "success"}


class Pull:
    """A download in a thread of `executor`, which cancel() ends. Belongs to the event loop it was made on."""

    def __init__(self, library: "Library", name: str, executor: Executor) -> None:
        self._name = name
        self._cancelled = threading.Event()
        self._progress = (0, 0)
        """Bytes here, bytes in all as far as known."""
        self._is_news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.ensure_future(
            self._loop.run_in_executor(executor, library.pull, name, self._note, self._cancelled)
        )
        self._task.add_done_callback(self._ended)

    async def wait(self, timeout: float | None = None) -> None:
        """Wait for its end, or for so long.

        Raises:
            MlxserveError: it has failed.
        """
        await asyncio.wait({self._task}, timeout=timeout)
        if self._task.done():
            self._task.result()

    async def lines(self) -> AsyncIterator[bytes]:
        """What Ollama says of a download; a failure is the last line."""
        yield line({"status": "pulling manifest"})
        try:
            told = (0, 0)
            while not self._task.done():
                await self._is_news.wait()
                self._is_news.clear()
                if self._progress != told:
                    told = self._progress
                    yield line(self._progress_object())
                await asyncio.wait({self._task}, timeout=PROGRESS_INTERVAL)
            self._task.result()
            if self._progress != told:
                yield line(self._progress_object())
            yield line(SUCCESS)
        except Exception as error:
            log_failure(error, f"pulling {self._name}")
            yield line(error_object(error))

    def cancel(self) -> None:
        """Nobody waits for it any more. What has come of it stays, for the next one to go on with."""
        self._cancelled.set()

    def _progress_object(self) -> dict[str, Any]:
        completed, total = self._progress
        # Clients draw a bar for each digest. The files' own are not known before they are here.
        digest = hashlib.sha256(self._name.encode()).hexdigest()
        return {
            "status": f"pulling {digest[:12]}",
            "digest": f"sha256:{digest}",
            "total": max(total, completed),
            "completed": completed,
        }

    def _note(self, num_bytes: int, total: int) -> None:
        self._progress = (num_bytes, total)
        try:
            self._loop.call_soon_threadsafe(self._is_news.set)
        except RuntimeError:  # the loop is closed: the server ends
            self._cancelled.set()

    def _ended(self, task: "asyncio.Future[Any]") -> None:
        self._is_news.set()
        if not task.cancelled():
            task.exception()  # its client may be gone
