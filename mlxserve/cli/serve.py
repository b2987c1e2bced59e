"""`mlxserve serve`: the HTTP server, from binding its port to draining it."""

import asyncio
import dataclasses
import json
import logging
import math
import shlex
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlxserve import __version__, blas, config
from mlxserve.cli import addresses, console, logs
from mlxserve.cli.load_display import LoadDisplay
from mlxserve.cli.options import (
    DraftModel,
    Host,
    Port,
    Speculation,
    Threads,
    load_config,
    parse_duration_option,
    parse_size_option,
)
from mlxserve.config import EngineConfig, ServerConfig
from mlxserve.errors import ConfigError, ModelNotFound

if TYPE_CHECKING:
    from mlxserve.engine.model_host import ModelHost
    from mlxserve.store.registry import Registry

logger = logging.getLogger(__name__)

# uvicorn cuts what is left this many seconds after the host has cancelled it: time to write out the last events.
FLUSH_SECONDS = 5


def serve(
    # What is hidden does not fit a screen; docs/cli.md lists every setting.
    model: Annotated[
        list[str] | None, typer.Option("--model", metavar="M", help="Load this model first; may be repeated.")
    ] = None,
    host: Host = None,
    port: Port = None,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Clients must send it; better: MLXSERVE_API_KEY.")
    ] = None,
    allowed_hosts: Annotated[str | None, typer.Option(metavar="H,...", help="More Host headers to accept.")] = None,
    allowed_origins: Annotated[str | None, typer.Option(metavar="O,...", hidden=True)] = None,
    max_body_bytes: Annotated[int | None, typer.Option(metavar="SIZE", parser=parse_size_option, hidden=True)] = None,
    allow_pull: Annotated[bool | None, typer.Option("--allow-pull/--no-allow-pull", hidden=True)] = None,
    model_dirs: Annotated[str | None, typer.Option(metavar="D,...", hidden=True)] = None,
    max_model_len: Annotated[int | None, typer.Option(metavar="N", help="Context length.  [the model's]")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(metavar="N", help="Requests that run at a time.  [32]")] = None,
    max_queue: Annotated[int | None, typer.Option(metavar="N", help="Requests that wait.  [512]")] = None,
    max_prefill_tokens: Annotated[int | None, typer.Option(metavar="N", hidden=True)] = None,
    block_size: Annotated[int | None, typer.Option(metavar="N", hidden=True)] = None,
    kv_cache_bytes: Annotated[
        int | None, typer.Option(metavar="SIZE", parser=parse_size_option, help="Size of the KV cache.")
    ] = None,
    kv_bits: Annotated[int | None, typer.Option(metavar="8|4", hidden=True)] = None,
    kv_disk: Annotated[
        int | None, typer.Option(metavar="SIZE", parser=parse_size_option, help="Keep KV blocks on disk.  [off]")
    ] = None,
    kv_disk_path: Annotated[Path | None, typer.Option(metavar="FOLDER", hidden=True)] = None,
    target_itl_ms: Annotated[float | None, typer.Option(metavar="MS", hidden=True)] = None,
    no_prefix_caching: Annotated[
        bool, typer.Option("--no-prefix-caching", help="Compute every prompt from its start.")
    ] = False,
    speculation: Speculation = None,
    draft_model: DraftModel = None,
    keep_alive: Annotated[float | None, typer.Option(metavar="S", parser=parse_duration_option, hidden=True)] = None,
    pin: Annotated[list[str] | None, typer.Option(metavar="M", hidden=True)] = None,
    max_loaded_models: Annotated[int | None, typer.Option(metavar="N", hidden=True)] = None,
    memory_budget: Annotated[int | None, typer.Option(metavar="SIZE", parser=parse_size_option, hidden=True)] = None,
    request_timeout: Annotated[float | None, typer.Option(metavar="S", help="Seconds a request may take.")] = None,
    shutdown_timeout: Annotated[float | None, typer.Option(metavar="S", hidden=True)] = None,
    debug_prompts: Annotated[bool, typer.Option("--debug-prompts", hidden=True)] = False,
    otlp_traces_endpoint: Annotated[str | None, typer.Option(metavar="URL", hidden=True)] = None,
    threads: Threads = None,
    daemon: Annotated[bool, typer.Option("--daemon", help="Detach, and return when it answers.")] = False,
    log_level: Annotated[str | None, typer.Option(metavar="L", help="debug, info, warning, error.  [info]")] = None,
) -> None:
    """Start the HTTP server. docs/cli.md has every flag.

    Example: mlxserve serve --model qwen3-4b --port 8080
    """
    engine_config, server_config = load_config(
        host=host,
        port=port,
        api_key=api_key,
        allowed_hosts=_split(allowed_hosts),
        allowed_origins=_split(allowed_origins),
        max_body_bytes=max_body_bytes,
        allow_pull=allow_pull,
        model_dirs=_split(model_dirs),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_queue=max_queue,
        max_prefill_tokens=max_prefill_tokens,
        block_size=block_size,
        kv_cache_bytes=kv_cache_bytes,
        kv_bits=kv_bits,
        kv_disk=kv_disk,
        kv_disk_path=kv_disk_path,
        target_itl_ms=target_itl_ms,
        enable_prefix_caching=False if no_prefix_caching else None,
        speculation=speculation,
        draft_model=draft_model,
        keep_alive=keep_alive,
        pin=tuple(pin) if pin else None,
        max_loaded_models=max_loaded_models,
        memory_budget=memory_budget,
        request_timeout=request_timeout,
        shutdown_timeout=shutdown_timeout,
        debug_prompts=debug_prompts or None,
        otlp_traces_endpoint=otlp_traces_endpoint,
        threads=threads,
        log_level=log_level,
    )
    from mlxserve.api.security import exposure_warning

    logs.configure(server_config.log_level)
    for unknown in config.unknown_variables():
        logger.warning("%s", unknown)
    if api_key is not None:
        logger.warning("--api-key can be read in the list of processes; set MLXSERVE_API_KEY instead")
    if (warning := exposure_warning(server_config)) is not None:
        logger.warning("%s", warning)
    if daemon:
        from mlxserve.cli import daemon as daemon_process

        daemon_process.start(daemon_process.own_command(), server_config)
        return
    listeners = addresses.listen(server_config.host, server_config.port)
    asyncio.run(_serve(listeners, model or [], engine_config, server_config))


def _split(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


class Signals:
    """The first SIGINT or SIGTERM asks for a clean stop, the second one ends the process at once."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._receive, number)

    def _receive(self, number: signal.Signals) -> None:
        if self.stop.is_set():
            logger.warning("stopped at once by a second %s", number.name)
            console.leave(128 + number)
        self.stop.set()

    async def interrupts(self, task: asyncio.Task[None]) -> bool:
        """Wait for the task or a signal and tell whether the signal was first. Raises what the task raised."""
        stopping = asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        if task.done():
            task.result()
        return not task.done()


async def _serve(
    listeners: list[socket.socket], models: list[str], engine_config: EngineConfig, server_config: ServerConfig
) -> None:
    signals = Signals()
    signals.install()
    blas.preload(server_config.threads)
    # Only now: these import mlx, which must find the BLAS already there.
    import uvicorn

    from mlxserve.api.app import create_app
    from mlxserve.api.metrics import Metrics
    from mlxserve.api.spans import otlp_spans
    from mlxserve.cli.http_server import HttpServer
    from mlxserve.engine.model_host import ModelHost
    from mlxserve.store.registry import Registry

    registry = Registry()
    registry.check()
    metrics = Metrics()
    if engine_config.draft_model is not None:
        draft_name = _served_name(registry, engine_config.draft_model)
        engine_config = dataclasses.replace(engine_config, draft_model=draft_name)
    pinned = tuple(_served_name(registry, name) for name in engine_config.pin)
    engine_config = dataclasses.replace(engine_config, pin=pinned)
    models = [_served_name(registry, name) for name in models]
    _check_number(registry, models, engine_config)
    # Clients may neither name paths nor start downloads; the models of --model may be both, see _load.
    host = ModelHost(engine_config, registry, observer=metrics, keep_prompts=server_config.debug_prompts)
    spans = None if server_config.otlp_traces_endpoint is None else otlp_spans(server_config.otlp_traces_endpoint)
    if spans is not None:
        host.journal.on_closed = spans.request_ended
    try:
        await host.start()
        if await signals.interrupts(asyncio.create_task(_load(host, registry, models, engine_config.draft_model))):
            logger.info("stopped while a model was loading")
            console.leave(0)
        app = create_app(host, server_config, metrics)
        server = HttpServer(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                headers=[("server", f"mlxserve/{__version__}")],
                timeout_graceful_shutdown=math.ceil(server_config.shutdown_timeout) + FLUSH_SECONDS,
            ),
            on_started=lambda: print(
                _announcement(models or _examples(host, registry), bool(models), listeners, server_config), flush=True
            ),
        )
        serving = asyncio.create_task(server.serve(sockets=listeners))
        if await signals.interrupts(serving):
            server.stop()
            app.state.bodies.stop()
            await _drain(host, server_config.shutdown_timeout)
            await serving
            logger.info("stopped")
    finally:
        await host.close(timeout=0.0)
        if spans is not None:
            await asyncio.to_thread(spans.close)


def _served_name(registry: "Registry", name: str) -> str:
    """The name by which clients ask for a model of --model. A path gets an alias: its last part, without `.gguf`."""
    source = registry.resolve(name, allow_paths=True)
    try:
        return registry.resolve(source.name, allow_paths=False).name
    except ModelNotFound:
        base, plus, adapter = ("", "", source.name) if source.adapter is None else source.name.rpartition("+")
    alias = (_last_part(base) + plus + _last_part(adapter)).lower()
    registry.add(dataclasses.replace(source, name=alias))
    return alias


def _check_number(registry: "Registry", models: list[str], engine_config: EngineConfig) -> None:
    """Raises ConfigError: they cannot all be in memory, so that the first would be loaded for nothing."""
    most = engine_config.max_loaded_models
    number = len({registry.resolve(name, allow_paths=False).weights for name in models})
    if most is not None and number > most:
        raise ConfigError(
            f"--model is there for {number} models and max_loaded_models is {most}: name fewer, or raise it"
        )


def _last_part(name: str) -> str:
    """Of an absolute path; a name that is none stays."""
    return Path(name).name.removesuffix(".gguf") if name.startswith("/") else name


async def _load(host: "ModelHost", registry: "Registry", models: list[str], draft_model: str | None) -> None:
    from mlxserve.store import hub

    display = LoadDisplay()
    if draft_model is not None:
        source = registry.resolve(draft_model, allow_paths=False)
        await asyncio.to_thread(hub.ensure_local, source, display.progress)
    for name in models:
        with display.loading(name):
            source = registry.resolve(name, allow_paths=False)
            for part in (source, source.adapter_source):
                if part is not None:
                    await asyncio.to_thread(hub.ensure_local, part, display.progress)
            # It was named by who started the server: it stays until there is need for its memory.
            await host.preload(name, keep_alive=-1.0)


async def _drain(host: "ModelHost", seconds: float) -> None:
    if host.num_in_flight:
        logger.info(
            "stopping: %d requests are left, they have %g seconds to end; Ctrl-C again stops at once",
            host.num_in_flight,
            seconds,
        )
    await host.close(timeout=seconds)


def _examples(host: "ModelHost", registry: "Registry") -> list[str]:
    """What there is to be asked, those first that are not the user's own: these may behave in any way."""
    own = registry.user_aliases
    return sorted((info.name for info in host.models()), key=own.__contains__)


def _announcement(
    models: list[str], are_loaded: bool, listeners: list[socket.socket], server_config: ServerConfig
) -> str:
    url = addresses.client_url(server_config.host, listeners[0].getsockname()[1])
    loaded = f"serves {', '.join(models)}" if are_loaded else "loads models when they are asked for"
    name = models[0] if models else "MODEL"
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello"}]})
    key = ' -H "Authorization: Bearer $MLXSERVE_API_KEY"' if server_config.api_key else ""
    return (
        f"mlxserve {__version__} at {url} {loaded}. Try:\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"
    )
