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
from mlxserve.cli.command import Command
from mlxserve.cli.daemon import probe
from mlxserve.errors import ConfigError, EngineError

service = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)
COMMAND_TIMEOUT = 30.0
RUNNING = "running"


@service.callback()
def _service() -> None:
    """Start the server at login, with launchd or systemd.

    Example: mlxserve service install -- --model qwen3-4b
    """


@service.command(cls=Command, context_settings={"allow_interspersed_args": False})
def install(
    context: typer.Context,
    flags: Annotated[list[str] | None, typer.Argument(metavar="-- FLAGS")] = None,
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
    old = manager.path.read_bytes() if manager.path.exists() else None
    manager.path.parent.mkdir(parents=True, exist_ok=True)
    manager.path.write_bytes(content)
    if shutil.which(manager.tool) is None:
        print(f"wrote {manager.path}")
        print(f"{manager.tool} is not here; load the file with the service manager of this machine")
        return
    try:
        manager.start()
    except EngineError as error:
        raise EngineError(f"{error}. {_take_back(manager, old)} {manager.advice}") from error
    print(f"wrote {manager.path}")
    print(f"started; `mlxserve service status` shows it, {manager.log_hint}")


@service.command(cls=Command)
def uninstall() -> None:
    """Stop the service and remove its file. Example: mlxserve service uninstall"""
    manager = _manager()
    if not manager.path.exists():
        raise ConfigError(f"the service is not installed: there is no {manager.path}")
    problem = manager.stop() if shutil.which(manager.tool) is not None else f"{manager.tool} is not here"
    manager.path.unlink()
    print(
        f"removed {manager.path}; nothing was stopped: {problem}" if problem else f"stopped, and removed {manager.path}"
    )


@service.command(cls=Command)
def status() -> None:
    """Show whether the service runs. Example: mlxserve service status

    The exit code is 1 if it does not.
    """
    manager = _manager()
    _, server_config = config.load_config()
    installed = manager.path.exists()
    state = manager.state() if installed and shutil.which(manager.tool) is not None else "not running"
    url = client_url(server_config.host, server_config.port)
    print(f"file     {manager.path if installed else 'not installed'}")
    print(f"service  {state}")
    print(f"address  {url}: {probe(url) or 'nothing answers'}")
    raise typer.Exit(0 if state == RUNNING else 1)


class _Manager(Protocol):
    """What starts services here."""

    @property
    def tool(self) -> str: ...

    @property
    def log_hint(self) -> str: ...

    @property
    def advice(self) -> str:
        """What to do where services cannot be started."""

    @property
    def path(self) -> Path: ...

    def file(self, arguments: Sequence[str], environment: dict[str, str]) -> bytes: ...

    def start(self) -> None:
        """Raises EngineError: it cannot be started."""

    def stop(self) -> str:
        """Stop it now and for the next logins; why that could not be done, or nothing."""

    def state(self) -> str:
        """RUNNING, or what else is known."""


@dataclass(frozen=True, slots=True)
class _Launchd:
    path: Path
    log: Path
    tool: str = "launchctl"
    advice: str = (
        "launchd starts agents of users who are logged in at the screen: try it there, or see the file with "
        "`mlxserve service install --print` and load it by other means"
    )

    @property
    def log_hint(self) -> str:
        return f"its log is {self.log}"

    def file(self, arguments: Sequence[str], environment: dict[str, str]) -> bytes:
        return service_files.plist(arguments, environment, self.log)

    def start(self) -> None:
        # What is loaded already keeps its old file until it is taken out.
        _ask("launchctl", "bootout", f"{_domain()}/{service_files.NAME}")
        _call("launchctl", "bootstrap", _domain(), str(self.path))

    def stop(self) -> str:
        return _problem(_ask("launchctl", "bootout", f"{_domain()}/{service_files.NAME}"))

    def state(self) -> str:
        done = _ask("launchctl", "print", f"{_domain()}/{service_files.NAME}")
        return RUNNING if done.returncode == 0 and "state = running" in done.stdout else "not running"


@dataclass(frozen=True, slots=True)
class _Systemd:
    path: Path
    tool: str = "systemctl"
    log_hint: str = f"`journalctl --user -u {service_files.NAME}` its log"
    advice: str = (
        "Without a session of the user's own (under su, sudo or in a container) there is no service manager to ask: "
        "log in as this user, let `sudo loginctl enable-linger USER` start one without a login, or see the file with "
        "`mlxserve service install --print`"
    )

    def file(self, arguments: Sequence[str], environment: dict[str, str]) -> bytes:
        return service_files.unit(arguments, environment)

    def start(self) -> None:
        _call("systemctl", "--user", "daemon-reload")
        _call("systemctl", "--user", "enable", service_files.NAME)
        # Not `start`, which would leave a running one with its old file.
        _call("systemctl", "--user", "restart", service_files.NAME)

    def stop(self) -> str:
        return _problem(_ask("systemctl", "--user", "disable", "--now", service_files.NAME))

    def state(self) -> str:
        done = _ask("systemctl", "--user", "is-active", service_files.NAME)
        # It says `inactive` or `failed` on stdout; on stderr, that it cannot be asked.
        return (
            RUNNING if done.returncode == 0 else f"not known: {done.stderr.strip()}" if done.stderr else "not running"
        )


def _manager() -> _Manager:
    if sys.platform == "darwin":
        return _Launchd(service_files.plist_path(), Path.home() / "Library" / "Logs" / f"{service_files.NAME}.log")
    if sys.platform == "linux":
        return _Systemd(service_files.unit_path())
    raise ConfigError(f"there is no service manager known for {sys.platform}; start `mlxserve serve` by its own means")


def _take_back(manager: _Manager, old: bytes | None) -> str:
    """Undo an installation that failed: the file is as it was before. What was done, as a sentence."""
    if old is not None:
        manager.path.write_bytes(old)
        return f"{manager.path} is as it was before."
    manager.stop()
    manager.path.unlink()
    return f"{manager.path} was removed again."


def _domain() -> str:
    return f"gui/{os.getuid()}"


def _check(context: typer.Context, flags: list[str]) -> None:
    """Refuse what `serve` would refuse, before a service fails at it again and again."""
    words = {flag.partition("=")[0] for flag in flags}
    if "--daemon" in words:
        raise typer.BadParameter("a service must not detach itself; leave --daemon out")
    if "--api-key" in words:
        raise typer.BadParameter(
            f"a key in the service's file can be read by others; put it into {config.config_file()}"
        )
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
        raise EngineError(f"`{' '.join(command)}` failed: {_problem(done)}")


def _problem(done: "subprocess.CompletedProcess[str]") -> str:
    """Why a command failed, in its own words; empty if it did not."""
    return "" if done.returncode == 0 else (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
