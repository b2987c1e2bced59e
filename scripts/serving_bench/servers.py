"""Server processes on free loopback ports: started once, and stopped by SIGSTOP while it is another one's turn.

A server that waits must cost nothing (on two cores a polling thread or a spinning BLAS is seen in every figure), and
one that is started anew for each run would be measured cold.
"""

import asyncio
import contextlib
import json
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

from serving_bench import client
from serving_bench.client import HOST, LoadError, Target

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
    """{port} stands for the port."""
    model: str | None
    """What requests call the model; None: the one of /v1/models that is loaded."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Sent with every request."""


class Server:
    """A running server process."""

    def __init__(self, spec: ServerSpec, log: Path) -> None:
        self.spec = spec
        self.target = Target(free_port(), spec.model or "", spec.fields)
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [part.replace("{port}", str(self.target.port)) for part in self.spec.command]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        with self._log.open("wb") as log:
            # A session of its own: Ctrl-C ends this script first, which then ends the servers.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    async def wait_until_healthy(self) -> None:
        """
        Raises:
            LoadError: it ended, or is not healthy in time; with the end of its log.
        """
        deadline = time.monotonic() + START_TIMEOUT
        while not await self._is_healthy():
            if self._process is None or self._process.poll() is not None:
                raise LoadError(f"{self.spec.name} does not run:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise LoadError(f"{self.spec.name} is not healthy after {START_TIMEOUT:g} s:\n{self.log_tail()}")
            await asyncio.sleep(POLL_SECONDS)
        if self.spec.model is None:
            self.target = Target(self.target.port, await _loaded_model(self.target.port), self.spec.fields)

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
            status, _ = await client.get(self.target.port, "/health")
        except (OSError, EOFError):
            return False
        return status == 200


def mlxserve(model: str, threads: int) -> ServerSpec:
    command = [sys.executable, "-m", "mlxserve", "serve", "--model", model, "--port", "{port}"]
    command += ["--threads", str(threads), "--log-level", "warning"]
    return ServerSpec("mlxserve", "mlxserve", tuple(command), None, {"ignore_eos": True})


def mlx_lm(folder: Path, threads: int, prefill_step_size: int) -> ServerSpec:
    launcher = Path(__file__).with_name("mlx_lm_launcher.py")
    command = [sys.executable, str(launcher), str(threads), "--model", str(folder), "--host", HOST, "--port", "{port}"]
    command += ["--prefill-step-size", str(prefill_step_size), "--log-level", "WARNING"]
    return ServerSpec(f"mlx_lm.server, step {prefill_step_size}", "mlx_lm.server", tuple(command), "default_model")


def llama(binary: Path, file: Path, threads: int, num_slots: int, context_length: int) -> ServerSpec:
    """`context_length` is that of one slot."""
    command = [str(binary), "--model", str(file), "--host", HOST, "--port", "{port}"]
    command += ["--threads", str(threads), "--threads-batch", str(threads)]
    command += ["--parallel", str(num_slots), "--ctx-size", str(num_slots * context_length)]
    return ServerSpec("llama-server", "llama-server", tuple(command), "default", {"ignore_eos": True})


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


async def _loaded_model(port: int) -> str:
    _, body = await client.get(port, "/v1/models")
    return next(str(model["id"]) for model in json.loads(body)["data"] if model.get("loaded"))
