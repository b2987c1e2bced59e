"""`mlxserve top`: a running server's requests, steps and KV blocks, in the terminal."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlxserve import config
from mlxserve.cli.addresses import client_url
from mlxserve.cli.options import Host, Port
from mlxserve.config import ServerConfig
from mlxserve.errors import ConfigError, EngineError, MlxserveError

if TYPE_CHECKING:
    import httpx

TIMEOUT = 5.0
NUM_STEPS = 500
MIN_INTERVAL, MAX_INTERVAL = 0.1, 60.0


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
    interval: Annotated[float, typer.Option(metavar="S", help="Seconds between frames.")] = 1.0,
    host: Host = None,
    port: Port = None,
) -> None:
    """Watch a running server. Example: mlxserve top --port 8080"""
    if not MIN_INTERVAL <= interval <= MAX_INTERVAL:
        raise ConfigError(f"--interval must be from {MIN_INTERVAL:g} to {MAX_INTERVAL:g} seconds, not {interval:g}")
    _, server_config = config.load_config(host=host, port=port)
    from rich.console import Console
    from rich.live import Live

    from mlxserve.cli.top_view import frame

    with _client(server_config) as client:
        console = Console()
        snapshot = _snapshot(client)
        if once or not console.is_terminal:
            console.print(frame(*snapshot, console.size.height, str(client.base_url)))
            return
        note = ""
        try:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while True:
                    live.update(frame(*snapshot, console.size.height, note or str(client.base_url)), refresh=True)
                    time.sleep(interval)
                    try:
                        snapshot, note = _snapshot(client), ""
                    except MlxserveError as error:
                        note = f"{error} (trying again)"
        except KeyboardInterrupt:
            return


def _client(server_config: ServerConfig) -> "httpx.Client":
    import httpx

    key = server_config.api_key
    return httpx.Client(
        base_url=client_url(server_config.host, server_config.port),
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=TIMEOUT,
        # Environment proxies are for the outside world, not for a server that was named by its address.
        trust_env=False,
    )


def _snapshot(client: "httpx.Client") -> tuple[dict[str, Any], dict[str, Any]]:
    """What /debug/requests and /debug/steps say now.

    Raises:
        ConfigError: the server wants another API key, or is none of ours.
        EngineError: nothing answers.
    """
    requests = _get(client, "/debug/requests", "requests")
    return requests, _get(client, f"/debug/steps?limit={NUM_STEPS}", "models")


def _get(client: "httpx.Client", path: str, key: str) -> dict[str, Any]:
    """The object at a path; one without `key` is none of ours."""
    import httpx

    try:
        reply = client.get(path)
    except httpx.HTTPError as error:
        raise EngineError(
            f"no mlxserve answers at {client.base_url} ({error}); start one with `mlxserve serve`, "
            "or name another with --host and --port"
        ) from error
    if reply.status_code == 401:
        raise ConfigError(f"the server at {client.base_url} wants another API key: set MLXSERVE_API_KEY to it")
    try:
        content = reply.json()
    except ValueError:
        content = None
    if reply.status_code != 200 or not isinstance(content, dict) or key not in content:
        raise ConfigError(
            f"the server at {client.base_url} answers {path.partition('?')[0]} with status {reply.status_code}: "
            "it is no mlxserve, or an older one; name another with --host and --port"
        )
    return content
