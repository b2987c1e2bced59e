"""Server processes on free loopback ports: started once, and stopped by SIGSTOP while it is another one's turn.

A server that waits must cost nothing (on two cores a polling thread or a spinning BLAS is seen in every figure), and
one that is started anew for each run would be measured cold.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxserve.bench import client
from mlxserve.bench.client import HOST, Target
from mlxserve.errors import TargetError

START_TIMEOUT = 600.0
STOP_TIMEOUT = 20.0
POLL_SECONDS = 0.2
SETTLE_SECONDS = 0.2
"""What a server gets after a load to clear up before it is stopped."""
WAKE_UP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """How to start a server."""

    name: str
    product: str
    """Servers of one product are variants, of which the better one counts."""
    command: tuple[str, ...]
    """{port} stands for the port, {python} for this Python."""
    model: str | None
    """What requests call the model; None: the one of /v1/models that is loaded."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Sent with every request."""


def mlxserve(model: str, *flags: str, name: str = "mlxserve") -> ServerSpec:
    """`mlxserve serve` of this Python, with more flags of it."""
    command = ["{python}", "-m", "mlxserve", "serve", "--model", model, "--port", "{port}"]
    command += ["--log-level", "warning", *flags]
    return ServerSpec(name, "mlxserve", tuple(command), None, {"ignore_eos": True})


class Server:
    """A running server process."""

    def __init__(self, spec: ServerSpec, log: Path) -> None:
        self.spec = spec
        self.target = Target(free_port(), spec.model or "", spec.fields)
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def command(self) -> list[str]:
        places = {"{port}": str(self.target.port), "{python}": sys.executable}
        return [places.get(part, part) for part in self.spec.command]

    def start(self) -> None:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        with self._log.open("wb") as log:
            # A session of its own: Ctrl-C ends this program first, which then ends the servers.
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    async def wait_until_healthy(self) -> None:
        """
        Raises:
            TargetError: it ended, or is not healthy in time; with the end of its log.
        """
        deadline = time.monotonic() + START_TIMEOUT
        while not await self._is_healthy():
            if self._process is None or self._process.poll() is not None:
                raise TargetError(f"{self.spec.name} does not run:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise TargetError(f"{self.spec.name} is not healthy after {START_TIMEOUT:g} s:\n{self.log_tail()}")
            await asyncio.sleep(POLL_SECONDS)
        if self.spec.model is None:
            self.target = Target(self.target.port, await _loaded_model(self.target), self.spec.fields)

    @contextlib.asynccontextmanager
    async def awake(self) -> AsyncIterator[Target]:
        """Let it run for the time of the block, with one small request before, of which nothing is measured."""
        self._signal(signal.SIGCONT)
        try:
            await client.complete(self.target, f"The time is {time.time()}", WAKE_UP_TOKENS)
            yield self.target
            await asyncio.sleep(SETTLE_SECONDS)
        finally:
            self._signal(signal.SIGSTOP)

    def stop(self) -> None:
        """End it: at first kindly."""
        if self._process is None or self._process.poll() is not None:
            return
        self._signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def log_tail(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-2000:]

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    async def _is_healthy(self) -> bool:
        try:
            reply = await client.request(self.target, "GET", "/health")
        except (OSError, EOFError, ValueError):
            return False
        return reply.status == 200


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


async def _loaded_model(target: Target) -> str:
    reply = await client.request(target, "GET", "/v1/models")
    return next(str(model["id"]) for model in reply.json()["data"] if model.get("loaded"))
