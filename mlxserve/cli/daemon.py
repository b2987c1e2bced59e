"""`mlxserve serve --daemon`: the same command, detached from the terminal."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mlxserve.cli.addresses import client_url
from mlxserve.cli.console import spinner
from mlxserve.config import ServerConfig, cache_dir
from mlxserve.errors import ConfigError, EngineError

PROBE_TIMEOUT = 1.0
PROBE_INTERVAL = 0.2
TAIL_BYTES = 4096


def log_file() -> Path:
    return cache_dir() / "serve.log"


def start(command: Sequence[str], server_config: ServerConfig) -> None:
    """Start a command that serves, and return when it answers.

    Raises:
        ConfigError: something answers at its address already, or the address would not be known.
        EngineError: it ended instead of serving; the message has its last words.
        OSError: it cannot be started, or its log not be written.
    """
    if server_config.port == 0:
        raise ConfigError("--daemon needs a port that can be told; choose one with --port")
    url = client_url(server_config.host, server_config.port)
    if (status := probe(url)) is not None:
        raise ConfigError(
            f"{status} at {url} already; stop it first, or choose another port with --port. "
            "`mlxserve ps` shows the models of an mlxserve there"
        )
    log = log_file()
    log.parent.mkdir(parents=True, exist_ok=True)
    # Prompts may stand in a log of level debug: nobody else may read it.
    with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:
        os.fchmod(output.fileno(), 0o600)
        # A session of its own: neither Ctrl-C nor the end of the terminal reaches it.
        process = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        with spinner("starting"):
            _wait(lambda: probe(url) == "an mlxserve answers", process, log)
    except BaseException:
        process.terminate()
        raise
    print(f"mlxserve serves at {url}\n  pid  {process.pid}    (kill {process.pid} stops it)\n  log  {log}")


def own_command() -> list[str]:
    """The command line of this process without `--daemon`."""
    return [sys.executable, *(word for word in sys.orig_argv[1:] if word != "--daemon")]


def probe(url: str) -> str | None:
    """What is at an address, in words; None for nothing."""
    import httpx

    try:
        with httpx.Client(timeout=PROBE_TIMEOUT, trust_env=False) as client:
            reply = client.get(f"{url}/health")
    except httpx.ConnectError:
        return None
    except httpx.HTTPError:
        # It listens before it answers, while a model loads.
        return "something listens"
    return (
        "an mlxserve answers" if reply.headers.get("server", "").startswith("mlxserve") else "another program answers"
    )


def _wait(is_ready: Callable[[], bool], process: "subprocess.Popen[bytes]", log: Path) -> None:
    while not is_ready():
        if process.poll() is not None:
            raise EngineError(f"the server ended with code {process.returncode}: {_last_line(log)} (all of it: {log})")
        time.sleep(PROBE_INTERVAL)


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("Error: ") if lines else "it said nothing"
