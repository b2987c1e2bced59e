"""`mlxserve service` with launchd and systemd that only note what they are asked, and the scripts for shells."""

import plistlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlxserve.cli import service, service_files

COMMAND = [sys.executable, "-m", "mlxserve", "serve"]


class Manager:
    """launchctl and systemctl; `failing` names the words of a call that fails."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing: str | None = None
        self.is_there = True

    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        call = " ".join(command)
        self.calls.append(call)
        failed = self.failing is not None and self.failing in call
        return subprocess.CompletedProcess(command, int(failed), "state = running", "no bus here" if failed else "")


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Manager:
    manager = Manager()
    monkeypatch.setattr(service, "_ask", manager.run)
    monkeypatch.setattr(service, "probe", lambda url: None)
    monkeypatch.setattr(service.shutil, "which", lambda tool: f"/bin/{tool}" if manager.is_there else None)
    monkeypatch.setattr(service.os, "getuid", lambda: 501)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    return manager


@pytest.fixture
def unit(monkeypatch: pytest.MonkeyPatch, manager: Manager, tmp_path: Path) -> Path:
    monkeypatch.setattr(sys, "platform", "linux")
    return tmp_path / ".config" / "systemd" / "user" / "mlxserve.service"


@pytest.fixture
def plist(monkeypatch: pytest.MonkeyPatch, manager: Manager, tmp_path: Path) -> Path:
    monkeypatch.setattr(sys, "platform", "darwin")
    return tmp_path / "Library" / "LaunchAgents" / "mlxserve.plist"


def test_systemd(mlxserve: Any, manager: Manager, unit: Path) -> None:
    assert mlxserve("service", "status").returncode == 1
    done = mlxserve("service", "install", "--", "--port", "8080")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode().startswith(f"wrote {unit}\nstarted; ")
    assert 'serve" "--port" "8080"\n' in unit.read_text()
    assert manager.calls == [
        "systemctl --user daemon-reload",
        "systemctl --user enable mlxserve",
        "systemctl --user restart mlxserve",
    ]
    done = mlxserve("service", "status")
    assert done.returncode == 0
    assert done.stdout.decode().splitlines()[:2] == [f"file     {unit}", "service  running"]
    assert mlxserve("service", "uninstall").returncode == 0
    assert manager.calls[-1] == "systemctl --user disable --now mlxserve"
    assert not unit.exists()
    done = mlxserve("service", "uninstall")
    assert done.returncode == 1
    assert b"is not installed" in done.stderr


def test_launchd(mlxserve: Any, manager: Manager, plist: Path, tmp_path: Path) -> None:
    done = mlxserve("service", "install", "--", "--model", "qwen3-4b", HF_HOME="/models")
    assert (done.returncode, done.stderr) == (0, b"")
    job = plistlib.loads(plist.read_bytes())
    assert job["ProgramArguments"] == [*COMMAND, "--model", "qwen3-4b"]
    assert job["EnvironmentVariables"]["HF_HOME"] == "/models"
    assert job["StandardErrorPath"] == f"{tmp_path}/Library/Logs/mlxserve.log"
    assert manager.calls == ["launchctl bootout gui/501/mlxserve", f"launchctl bootstrap gui/501 {plist}"]
    assert mlxserve("service", "status").returncode == 0
    assert mlxserve("service", "uninstall").returncode == 0
    assert manager.calls[-1] == "launchctl bootout gui/501/mlxserve"
    assert not plist.exists()


def test_print_writes_nothing(mlxserve: Any, manager: Manager, unit: Path) -> None:
    done = mlxserve("service", "install", "--print", "--", "--port", "8080")
    assert done.stdout.startswith(b"[Unit]\n")
    assert not unit.exists()
    assert manager.calls == []


def test_without_a_service_manager(mlxserve: Any, manager: Manager, unit: Path) -> None:
    manager.is_there = False
    done = mlxserve("service", "install")
    assert done.returncode == 0
    assert b"systemctl is not here" in done.stdout
    assert unit.exists()
    assert mlxserve("service", "uninstall").returncode == 0
    assert manager.calls == []


def test_a_manager_that_refuses(mlxserve: Any, manager: Manager, unit: Path) -> None:
    manager.failing = "restart"
    done = mlxserve("service", "install")
    assert done.returncode == 1
    error = done.stderr.decode()
    assert error.startswith(
        f"Error: `systemctl --user restart mlxserve` failed: no bus here. {unit} was removed again. "
    )
    assert "loginctl enable-linger" in error
    assert "--print" in error
    assert (done.stdout, unit.exists()) == (b"", False)


def test_a_failed_installation_leaves_the_service_that_was_there(mlxserve: Any, manager: Manager, unit: Path) -> None:
    mlxserve("service", "install")
    content = unit.read_bytes()
    manager.failing = "restart"
    done = mlxserve("service", "install", "--", "--port", "8080")
    assert f"{unit} is as it was before.".encode() in done.stderr
    assert unit.read_bytes() == content


def test_what_cannot_be_asked_is_not_called_stopped(mlxserve: Any, manager: Manager, unit: Path) -> None:
    mlxserve("service", "install")
    manager.failing = "systemctl"
    done = mlxserve("service", "status")
    assert (done.returncode, b"service  not known: no bus here" in done.stdout) == (1, True)
    done = mlxserve("service", "uninstall")
    assert (done.returncode, done.stdout.decode()) == (0, f"removed {unit}; nothing was stopped: no bus here\n")


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--prot", "1"], 2, b"--prot"),
        (["--port", "many"], 2, b"--port"),
        (["--api-key", "x"], 2, b"config.toml"),
        (["--api-key=x"], 2, b"config.toml"),
        (["--daemon"], 2, b"--daemon"),
    ],
)
def test_flags_that_serve_would_refuse(
    mlxserve: Any, manager: Manager, unit: Path, flags: list[str], code: int, words: bytes
) -> None:
    done = mlxserve("service", "install", "--", *flags)
    assert done.returncode == code
    assert words in done.stderr
    assert not unit.exists()


def test_elsewhere(mlxserve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    done = mlxserve("service", "install")
    assert done.returncode == 1
    assert b"win32" in done.stderr


def test_unit_words_come_back_as_they_were() -> None:
    words = ["plain", "two words", 'a "quote"', "back\\slash", "100%", "$HOME"]
    line = next(
        line for line in service_files.unit(words, {"A": "50% of $x"}).decode().splitlines() if "ExecStart" in line
    )
    read = [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(line.removeprefix("ExecStart="))]
    assert read == words
    assert 'Environment="A=50%% of $x"\n' in service_files.unit(words, {"A": "50% of $x"}).decode()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    file = tmp_path / "mlxserve.service"
    file.write_bytes(service_files.unit([*COMMAND, "--model", "a b%$"], {"HF_HOME": "/a b"}))
    done = subprocess.run(
        ["systemd-analyze", "--user", "verify", str(file)], capture_output=True, text=True, check=False
    )
    assert "mlxserve.service" not in done.stderr


# --- completion


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_ask_this_program(mlxserve: Any, shell: str) -> None:
    done = mlxserve("completion", shell)
    assert (done.returncode, done.stderr) == (0, b"")
    assert f"_MLXSERVE_COMPLETE=complete_{shell}".encode() in done.stdout
    if shutil.which(shell) is not None:
        subprocess.run([shell, "-n"], input=done.stdout, check=True)


def test_completion_of_another_shell(mlxserve: Any) -> None:
    assert mlxserve("completion", "csh").returncode == 2


def test_completions(process: Any) -> None:
    done = process(_MLXSERVE_COMPLETE="complete_bash", COMP_WORDS="mlxserve ser", COMP_CWORD="1")
    assert done.stdout.split() == [b"serve", b"service"]
