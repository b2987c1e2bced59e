"""uvicorn's server, started and stopped by `serve` instead of by its own signal handlers."""

import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import uvicorn


class HttpServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        # uvicorn raises the signal again when it is done, which would end a clean stop with an error code.
        return nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_started()

    def stop(self) -> None:
        """Take no new connections; serve() returns when those that are busy have ended."""
        self.should_exit = True
