"""The real app on the real host and engine thread, without a model, under uvicorn; and clients of it."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fake_engine import wait_until
from helpers_engine import TIMEOUT, FakeRunner
from helpers_scheduler import BLOCK_SIZE
from helpers_served import FakeBuild

from mlxserve.api.app import create_app
from mlxserve.api.metrics import Metrics
from mlxserve.config import EngineConfig, ServerConfig
from mlxserve.engine.model_host import ModelHost
from mlxserve.store.registry import Registry


class Server:
    """A host and its app under uvicorn, on an event loop in a thread."""

    def __init__(
        self, build: FakeBuild, host: ModelHost, address: str, client: httpx.Client, http: uvicorn.Server
    ) -> None:
        self.build = build
        self.host = host
        self.address = address
        self.client = client
        self._http = http

    @property
    def runner(self) -> FakeRunner:
        return self.build.runners[-1]

    def complete(self, prompt: str = "the cat", **fields: Any) -> httpx.Response:
        body = {"model": "one", "prompt": prompt, "temperature": 0, **fields}
        return self.client.post("/v1/completions", json=body)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.client.get(path, headers=headers)

    def traces(self) -> list[dict[str, Any]]:
        """What /debug/requests lists."""
        return self.get("/debug/requests").json()["requests"]

    def num_unsent_bytes(self) -> int:
        """What all connections together hold for their sockets to take."""
        connections = list(self._http.server_state.connections)
        return sum(connection.transport.get_write_buffer_size() for connection in connections)

    def health(self) -> httpx.Response:
        return self.get("/health")

    def metric(self, name: str) -> float:
        text = self.get("/metrics").text
        return float(
            next(line for line in text.splitlines() if line.startswith(f'mlxserve_{name}{{model="one"}}')).split()[1]
        )


class Caller:
    """A client on a bare socket, which can go away at any moment or stop reading."""

    def __init__(self, server: Server, *, path: str = "/v1/completions", **fields: Any) -> None:
        host, port = server.address.removeprefix("http://").split(":")
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.settimeout(TIMEOUT)
        self.socket.connect((host, int(port)))
        chosen = {"temperature": 0} if path == "/v1/completions" else {}
        body = json.dumps({"model": "one", **chosen, **fields})
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self.socket.sendall((head + body).encode())

    def __enter__(self) -> "Caller":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def read_to_end(self) -> bytes:
        received = bytearray()
        while data := self.socket.recv(65536):
            received += data
        return bytes(received)


@contextmanager
def serving(
    build: FakeBuild,
    tmp_path: Path,
    *,
    preload: bool = True,
    server_config: ServerConfig | None = None,
    **settings: Any,
) -> Iterator[Server]:
    """One model, `one`, loaded before the server starts if `preload` is true."""
    server_config = server_config or ServerConfig()
    (tmp_path / "one.gguf").touch()
    file = tmp_path / "models.toml"
    file.write_text(f"[one]\nsource = {{ path = '{tmp_path}/one.gguf' }}\n")
    metrics = Metrics()
    host = ModelHost(
        EngineConfig(block_size=BLOCK_SIZE, **settings),
        Registry(user_file=file),
        observer=metrics,
        keep_prompts=server_config.debug_prompts,
    )
    started: Future[uvicorn.Server] = Future()

    async def serve(listener: socket.socket) -> None:
        try:
            await host.start()
            if preload:
                await host.preload("one", keep_alive=-1.0)
            app = create_app(host, server_config, metrics)
            server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=5))
            started.set_result(server)
            await server.serve(sockets=[listener])
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
            raise
        finally:
            await host.close(timeout=0.0)

    with socket.socket() as listener:
        # So that a reader that stops is felt after a few kilobytes.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=lambda: asyncio.run(serve(listener)))
        thread.start()
        server = started.result(TIMEOUT)
        try:
            wait_until(lambda: server.started)
            address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            limits = httpx.Limits(max_connections=None)
            with httpx.Client(base_url=address, timeout=TIMEOUT, trust_env=False, limits=limits) as client:
                yield Server(build, host, address, client, server)
        finally:
            server.should_exit = True
            thread.join(TIMEOUT)
            assert not thread.is_alive()
