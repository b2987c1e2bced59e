"""`mlxserve top`: a running server's requests, steps and KV blocks, in the terminal."""

import time
from typing import Annotated, Any

import typer

from mlxserve.cli.console import open_rich
from mlxserve.cli.options import Host, Port, load_config
from mlxserve.cli.server_client import ServerClient, open_client
from mlxserve.errors import MlxserveError

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
        raise typer.BadParameter(
            f"--interval must be from {MIN_INTERVAL:g} to {MAX_INTERVAL:g} seconds, not {interval:g}"
        )
    _, server_config = load_config(host=host, port=port)
    from rich.live import Live

    from mlxserve.cli.top_view import frame

    with open_client(server_config) as client:
        console = open_rich()
        snapshot = _snapshot(client)
        if once or not console.is_terminal:
            console.print(frame(*snapshot, console, client.address))
            return
        note = ""
        try:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while True:
                    live.update(frame(*snapshot, console, note or client.address), refresh=True)
                    time.sleep(interval)
                    try:
                        snapshot, note = _snapshot(client), ""
                    except MlxserveError as error:
                        note = f"{error} (trying again)"
        except KeyboardInterrupt:
            return


def _snapshot(client: ServerClient) -> tuple[dict[str, Any], dict[str, Any]]:
    """What /debug/requests and /debug/steps say now; raises as ServerClient."""
    requests = client.get("/debug/requests", "requests")
    return requests, client.get(f"/debug/steps?limit={NUM_STEPS}", "models")
