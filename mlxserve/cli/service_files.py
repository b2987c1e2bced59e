"""The files by which launchd (macOS) and systemd (Linux) start the server at login."""

import os
import plistlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

NAME = "mlxserve"
PASSED_ON = ("MLXSERVE_CONFIG_DIR", "MLXSERVE_CACHE_DIR", "HF_HOME", "HF_HUB_CACHE")
"""Variables that say where files lie: a service is started without those of the shell."""


def plist_path() -> Path:
    return Path.home() / "Library" / "LaunchAgents" / f"{NAME}.plist"


def unit_path() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "systemd" / "user" / f"{NAME}.service"


def command(flags: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "mlxserve", "serve", *flags]


def passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: environ[name] for name in PASSED_ON if environ.get(name)}


def plist(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> bytes:
    """A property list as launchd.plist(5) has it."""
    job = {
        "Label": NAME,
        "ProgramArguments": list(arguments),
        "RunAtLoad": True,
        # A stop on purpose stays one; a crash starts it again.
        "KeepAlive": {"SuccessfulExit": False},
        # Without it macOS holds back the processor and the disk from what runs in the background.
        "ProcessType": "Interactive",
        "StandardOutPath": str(log),
        "StandardErrorPath": str(log),
    }
    if environment:
        job["EnvironmentVariables"] = dict(environment)
    return plistlib.dumps(job, sort_keys=False)


def unit(arguments: Sequence[str], environment: Mapping[str, str]) -> bytes:
    """A unit as systemd.service(5) has it. Its output goes to the journal."""
    lines = [
        "[Unit]",
        "Description=mlxserve, a server of language models",
        "",
        "[Service]",
        f"ExecStart={' '.join(_quoted(word, '$') for word in arguments)}",
        *(f"Environment={_quoted(f'{name}={value}')}" for name, value in environment.items()),
        "Restart=on-failure",
        "",
        "[Install]",
        "WantedBy=default.target",
    ]
    return ("\n".join(lines) + "\n").encode()


def _quoted(word: str, *doubled: str) -> str:
    """A word as systemd.syntax(7) reads it back; percent signs and `doubled` characters would be expanded."""
    for character in ("%", *doubled):
        word = word.replace(character, character * 2)
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
