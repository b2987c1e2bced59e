"""`mlxserve service`: the server as a service of the user's, by launchd on macOS and systemd on Linux."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

import typer

from mlxserve import config
from mlxserve.cli import service_files
from mlxserve.cli.addresses import client_url
from mlxserve.cli.daemon import probe
from mlxserve.errors import ConfigError, EngineError

service = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)
COMMAND_TIMEOUT = 30.0


@service.callback()
def _service() -> None:
    """Start the server at login, with launchd or systemd.

    Example: mlxserve service install -- --model qwen3-4b
    """


@service.command(context_settings={"allow_interspersed_args": False})
def install(
    context: typer.Context,
    flags: Annotated[list[str] | None, typer.Argument(metavar="-- FLAGS", hidden=True)] = None,
    prints: Annotated[bool, typer.Option("--print", help="Show the file, and write nothing.")] = False,
) -> None:
    """Write the service's file, start it now and at every login.

    FLAGS are those of `mlxserve serve`; a setting of config.toml needs none.

    Example: mlxserve service install -- --model qwen3-4b --port 8080
    """
    flags = flags or []
    _check(context, flags)
    manager = _manager()
    content = manager.file(service_files.command(flags), service_files.passed_on(os.environ))
    if prints:
        print(content.decode(), end="")
        return
    manager.path.parent.mkdir(parents=True, exist_ok=True)
    manager.path.write_bytes(content)
    print(f"wrote {manager.path}")
    if shutil.which(manager.tool) is None:
        print(f"{manager.tool} is not here; load the file with the service manager of this machine")
        return
    manager.start()
    print(f"started; `mlxserve service status` shows it, {manager.log_hint}")


@service.command()
def uninstall() -> None:
    """Stop the service and remove its file. Example: mlxserve service uninstall"""
    manager = _manager()
    if not manager.path.exists():
        raise ConfigError(f"the service is not installed: there is no {manager.path}")
    if shutil.which(manager.tool) is not None:
        manager.stop()
    manager.path.unlink()
    print(f"stopped, and removed {manager.path}")


@service.command()
def status() -> None:
    """Show whether the service runs. Example: mlxserve service status

    The exit code is 1 if it does not.
    """
    manager = _manager()
    _, server_config = config.load_config()
    installed = manager.path.exists()
    running = installed and shutil.which(manager.tool) is not None and manager.is_running()
    url = client_url(server_config.host, server_config.port)
    print(f"file     {manager.path if installed else 'not installed'}")
    print(f"service  {'running' if running else 'not running'}")
    print(f"address  {url}: {probe(url) or 'nothing answers'}")
    raise typer.Exit(0 if running else 1)


class _Manager(Protocol):
    """What starts services here."""

    @property
    def tool(self) -> str: ...

    @property
    def log_hint(self) -> str: ...

    @property
    def path(self) -> Path: ...

    def file(self, arguments: Sequence[str], environment: dict[str, str]) -> bytes: ...

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def is_running(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class _Launchd:
    path: Path
    log: Path
    tool: str = "launchctl"

    @property
    def log_hint(self) -> str:
        return f"its log is {self.log}"

    def file(self, arguments: Sequence[str], environment: dict[str, str]) -> bytes:
        return service_files.plist(arguments, environment, self.log)

    def start(self) -> None:
        # What is loaded already keeps its old file until it is taken out.
        _ask("launchctl", "bootout", f"{_domain()}/{service_files.NAME}")
        _call("launchctl", "bootstrap", _domain(), str(self.path))

    def stop(self) -> None:
        _ask("launchctl", "bootout", f"{_domain()}/{service_files.NAME}")

    def is_running(self) -> bool:
        done = _ask("launchctl", "print", f"{_domain()}/{service_files.NAME}")
        return done.returncode == 0 and "state = running" in done.stdout


@dataclass(frozen=True, slots=True)
class _Systemd:
    path: Path
    tool: str = "systemctl"
    log_hint: str = f"`journalctl --user -u {service_files.NAME}` its log"

    def file(self, arguments: Sequence[str], environment: dict[str, str]) -> bytes:
        return service_files.unit(arguments, environment)

    def start(self) -> None:
        _call("systemctl", "--user", "daemon-reload")
        _call("systemctl", "--user", "enable", service_files.NAME)
        # Not `start`, which would leave a running one with its old file.
        _call("systemctl", "--user", "restart", service_files.NAME)

    def stop(self) -> None:
        _ask("systemctl", "--user", "disable", "--now", service_files.NAME)

    def is_running(self) -> bool:
        return _ask("systemctl", "--user", "is-active", service_files.NAME).returncode == 0


def _manager() -> _Manager:
    if sys.platform == "darwin":
        return _Launchd(service_files.plist_path(), Path.home() / "Library" / "Logs" / f"{service_files.NAME}.log")
    if sys.platform == "linux":
        return _Systemd(service_files.unit_path())
    raise ConfigError(f"there is no service manager known for {sys.platform}; start `mlxserve serve` by its own means")


def _domain() -> str:
    return f"gui/{os.getuid()}"


def _check(context: typer.Context, flags: list[str]) -> None:
    """Refuse what `serve` would refuse, before a service fails at it again and again."""
    words = {flag.partition("=")[0] for flag in flags}
    if "--daemon" in words:
        raise ConfigError("a service must not detach itself; leave --daemon out")
    if "--api-key" in words:
        raise ConfigError(f"a key in the service's file can be read by others; put it into {config.config_file()}")
    serve = context.find_root().command.commands["serve"]  # type: ignore[attr-defined]
    serve.make_context("mlxserve serve", list(flags))


def _ask(*command: str) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT, check=False)
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"`{' '.join(command)}` did not end in {COMMAND_TIMEOUT:g} s") from error


def _call(*command: str) -> None:
    done = _ask(*command)
    if done.returncode != 0:
        raise EngineError(f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip() or done.returncode}")
