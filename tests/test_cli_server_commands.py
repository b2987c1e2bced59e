"""Commands that talk to a running server or start one: ps, stop, serve --daemon."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from fake_engine import serve
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from mlxserve.cli.loaded_models import format_bytes, until

NOW = datetime(2030, 1, 1, tzinfo=UTC)


class OllamaServer:
    """The endpoints of a server that `ps` and `stop` use."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.models = [
            {
                "name": "qwen3-4b:latest",
                "digest": "sha256:0123456789abcdef",
                "size": 2_500_000_000,
                "size_vram": 2_500_000_000,
                "size_reserved": 9_000_000_000,
                "context_length": 40960,
                "expires_at": (datetime.now(UTC) + timedelta(minutes=4, seconds=30)).isoformat(),
            },
            {"name": "tiny", "digest": "fedcba9876543210", "size": 397_000_000, "size_vram": 0, "expires_at": None},
        ]
        routes = [
            Route("/api/ps", lambda request: JSONResponse({"models": self.models})),
            Route("/api/generate", self._generate, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def _generate(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        return JSONResponse({"model": self.bodies[-1]["model"], "done": True, "done_reason": "unload"})


@pytest.fixture
def ollama() -> Iterator[tuple[OllamaServer, list[str]]]:
    """A server, and the flags that name it."""
    server = OllamaServer()
    with serve(server.app) as address:
        yield server, ["--port", address.rpartition(":")[2]]


def test_ps(mlxserve: Any, ollama: tuple[OllamaServer, list[str]]) -> None:
    server, flags = ollama
    done = mlxserve("ps", *flags)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode().splitlines() == [
        "NAME               ID              SIZE      RESERVED    PROCESSOR    CONTEXT    UNTIL",
        "qwen3-4b:latest    0123456789ab    2.5 GB    9.0 GB      100% GPU     40960      4 minutes from now",
        "tiny               fedcba987654    397 MB    397 MB      100% CPU                Forever",
    ]
    assert json.loads(mlxserve("ps", "--json", *flags).stdout) == server.models
    server.models = []
    assert mlxserve("ps", *flags).stdout == b"NAME    ID    SIZE    RESERVED    PROCESSOR    CONTEXT    UNTIL\n"


def test_stop(mlxserve: Any, ollama: tuple[OllamaServer, list[str]]) -> None:
    server, flags = ollama
    assert mlxserve("stop", "QWEN3-4B", "tiny:latest", *flags).stdout == b"stopped 'QWEN3-4B'\nstopped 'tiny:latest'\n"
    assert server.bodies == [
        {"model": "QWEN3-4B", "keep_alive": 0, "stream": False},
        {"model": "tiny:latest", "keep_alive": 0, "stream": False},
    ]


def test_stop_of_what_is_not_loaded_stops_nothing(mlxserve: Any, ollama: tuple[OllamaServer, list[str]]) -> None:
    server, flags = ollama
    done = mlxserve("stop", "tiny", "other", *flags)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"Error: other is not loaded; `mlxserve ps` lists what is\n"
    assert server.bodies == []


@pytest.mark.parametrize("command", [["ps"], ["stop", "m"]])
def test_without_a_server_or_with_another_one(mlxserve: Any, command: list[str]) -> None:
    done = mlxserve(*command, "--port", "1")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"start one with `mlxserve serve`" in done.stderr
    with serve(Starlette(routes=[Route("/api/ps", lambda request: PlainTextResponse("hello"))])) as address:
        done = mlxserve(*command, "--port", address.rpartition(":")[2])
    assert b"it is no mlxserve" in done.stderr


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (299, "4 minutes from now"),
        (60, "1 minute from now"),
        (59.5, "59 seconds from now"),
        (0.5, "Less than a second"),
        (0, "Stopping..."),
        (7300, "2 hours from now"),
        (200_000, "2 days from now"),
        (9e9, "Forever"),
    ],
)
def test_until(seconds: float, words: str) -> None:
    assert until((NOW + timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z"), NOW) == words


@pytest.mark.parametrize("text", [None, "", "0001-01-01T00:00:00Z", "never"])
def test_until_no_time(text: str | None) -> None:
    assert until(text, NOW) == "Forever"


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 KB"), (999_999, "1.0 MB"), (9_960_000, "10 MB"), (5e12, "5.0 TB")],
)
def test_sizes(size: float, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize("buffered", ["", "1"])
def test_a_reader_that_goes_away_is_no_failure(environment: dict[str, str], buffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "mlxserve", "config"]
    env = environment | {"PYTHONUNBUFFERED": buffered}
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=env, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


# --- serve --daemon


def test_daemon(process: Callable[..., subprocess.CompletedProcess[bytes]], tmp_path: Path, free_port: int) -> None:
    flags = ("serve", "--daemon", "--port", str(free_port))
    done = process(*flags)
    assert (done.returncode, done.stderr) == (0, b"")
    first, pid_line, log_line = done.stdout.decode().splitlines()
    pid = int(pid_line.split()[1])
    try:
        assert first == f"mlxserve serves at http://127.0.0.1:{free_port}"
        assert log_line == f"  log  {tmp_path}/serve.log"
        assert "curl http" in (tmp_path / "serve.log").read_text()
        assert (tmp_path / "serve.log").stat().st_mode & 0o777 == 0o600
        assert os.getsid(pid) == pid, "the end of this terminal does not reach it"
        again = process(*flags)
        assert again.returncode == 1
        assert b"an mlxserve answers at" in again.stderr
    finally:
        os.kill(pid, signal.SIGTERM)
        while _is_running(pid):
            time.sleep(0.02)


def _is_running(pid: int) -> bool:
    """It is nobody's child here, so who adopted it may leave it as a zombie."""
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return bool(done.stdout.strip()) and not done.stdout.startswith("Z")


def test_daemon_that_does_not_start(
    process: Callable[..., subprocess.CompletedProcess[bytes]], tmp_path: Path, free_port: int
) -> None:
    (tmp_path / "broken.gguf").touch()
    done = process("serve", "--daemon", "--port", str(free_port), "--model", f"{tmp_path}/broken.gguf")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode() == (
        "Error: the server ended with code 1: broken.gguf ends in the middle of a tensor; download it again "
        f"(all of it: {tmp_path}/serve.log)\n"
    )


def test_a_daemons_warnings_reach_the_terminal(
    process: Callable[..., subprocess.CompletedProcess[bytes]],
) -> None:
    done = process("serve", "--daemon", "--host", "0.0.0.0", "--port", "0", MLXSERVE_PROT="1")
    assert done.returncode == 1
    assert b"did you mean MLXSERVE_PORT?" in done.stderr
    assert b"Set a key (MLXSERVE_API_KEY)" in done.stderr


def test_daemon_needs_a_known_port(mlxserve: Any) -> None:
    done = mlxserve("serve", "--daemon", "--port", "0")
    assert done.returncode == 1
    assert b"choose one with --port" in done.stderr


def test_serve_tells_unknown_variables(process: Callable[..., subprocess.CompletedProcess[bytes]]) -> None:
    done = process("serve", "--port", "0", "--model", "smollm2-135", MLXSERVE_MAX_QUEU="3")
    assert b"MLXSERVE_MAX_QUEU is set and means nothing to mlxserve; did you mean MLXSERVE_MAX_QUEUE?" in done.stderr


def test_the_daemons_command_is_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxserve.cli.daemon import own_command

    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "mlxserve", "serve", "--daemon", "--port", "1"])
    assert own_command() == [sys.executable, "-m", "mlxserve", "serve", "--port", "1"]
