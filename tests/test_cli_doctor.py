"""`mlxserve doctor` and `mlxserve config`: healthy machines, and broken ones."""

import json
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxserve import config
from mlxserve.cli import checks, doctor
from mlxserve.cli.checks import Check, Status
from mlxserve.config import EngineConfig, ServerConfig

MLX = {"version": "0.32.4", "mlx_lm": "0.32.2", "metal": True, "device": "Device(gpu, 0)", "blas": None}


def statuses(found: list[Check]) -> dict[str, Status]:
    return {check.name: check.status for check in found}


def answer(monkeypatch: pytest.MonkeyPatch, stdout: str, returncode: int = 0, stderr: str = "") -> None:
    """What the processes say that a check starts."""

    def run(command: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
        if options.get("check") and returncode:
            raise subprocess.CalledProcessError(returncode, command)
        return subprocess.CompletedProcess(command, returncode, stdout, stderr)

    monkeypatch.setattr(checks, "subprocess", types.SimpleNamespace(**(vars(subprocess) | {"run": run})))


# --- doctor


def test_doctor_prints_a_line_each_and_fails_if_one_does(mlxserve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fine, odd = Check("one", Status.OK, "fine"), Check("two", Status.WARN, "odd", "do this")
    monkeypatch.setattr(doctor, "CHECKS", (lambda: [fine], lambda: [odd]))
    done = mlxserve("doctor")
    assert done.returncode == 0
    assert done.stdout.decode().splitlines() == [
        "ok    one           fine",
        "warn  two           odd",
        "                    -> do this",
    ]
    monkeypatch.setattr(doctor, "CHECKS", (lambda: [fine, Check("three", Status.FAIL, "broken", "mend it")],))
    done = mlxserve("doctor", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout) == [
        {"name": "one", "status": "ok", "detail": "fine", "advice": ""},
        {"name": "three", "status": "fail", "detail": "broken", "advice": "mend it"},
    ]


def test_mlx_of_this_machine() -> None:
    found = {check.name: check for check in checks.mlx()}
    assert found["MLX"].status is Status.OK
    assert "mlx-lm" in found["MLX"].detail
    assert found["device"].status is not Status.FAIL


@pytest.mark.parametrize(
    ("platform", "facts", "expected"),
    [
        ("darwin", {}, {"MLX": Status.OK, "device": Status.OK}),
        ("darwin", {"metal": False}, {"MLX": Status.OK, "device": Status.FAIL}),
        ("linux", {"metal": False}, {"MLX": Status.OK, "device": Status.WARN, "BLAS": Status.WARN}),
        ("linux", {"metal": False, "blas": "MKL"}, {"MLX": Status.OK, "device": Status.WARN, "BLAS": Status.OK}),
    ],
)
def test_devices(
    monkeypatch: pytest.MonkeyPatch, platform: str, facts: dict[str, Any], expected: dict[str, Status]
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    answer(monkeypatch, json.dumps(MLX | facts) + "\n")
    assert statuses(checks.mlx()) == expected


@pytest.mark.parametrize(
    ("stdout", "returncode", "stderr", "words"),
    [
        ("", 1, "Traceback\nImportError: libmlx.so is missing", "ImportError: libmlx.so is missing"),
        ("", -6, "", "the process ended with -6"),
        ("no json", 0, "", "it does not work"),
        ("", 0, "", "it does not work"),
    ],
)
def test_broken_mlx(monkeypatch: pytest.MonkeyPatch, stdout: str, returncode: int, stderr: str, words: str) -> None:
    answer(monkeypatch, stdout, returncode, stderr)
    (check,) = checks.mlx()
    assert check.status is Status.FAIL
    assert words in check.detail
    assert "pip install" in check.advice


@pytest.mark.parametrize(
    ("megabytes", "status", "words"),
    [
        ("0\n", Status.OK, "the system's own"),
        ("12288\n", Status.OK, "12288 MB"),
        ("16384\n", Status.WARN, "nearly all"),
    ],
)
def test_wired_limit(monkeypatch: pytest.MonkeyPatch, megabytes: str, status: Status, words: str) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(checks.os, "sysconf", {"SC_PAGE_SIZE": 2**14, "SC_PHYS_PAGES": 2**20}.__getitem__)
    answer(monkeypatch, megabytes)
    memory, limit = checks.memory()
    assert (memory.status, memory.detail) == (Status.OK, "17 GB")
    assert (limit.status, words in limit.detail) == (status, True)
    answer(monkeypatch, "", 1)
    assert checks.memory()[1].status is Status.WARN


def test_little_memory_and_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(checks.os, "sysconf", {"SC_PAGE_SIZE": 2**12, "SC_PHYS_PAGES": 2**20}.__getitem__)
    assert statuses(checks.memory()) == {"memory": Status.WARN}
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "not" / "made" / "yet"))
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=10**9))
    (check,) = checks.disk()
    assert check.status is Status.WARN
    assert check.detail.startswith("1 GB free")
    monkeypatch.setattr(checks.os, "access", lambda path, mode: False)
    assert checks.disk()[0].status is Status.FAIL


@pytest.mark.parametrize(
    ("platform", "load", "threads", "status"),
    [
        ("linux", 3.9, "", Status.OK),
        ("linux", 4.1, "", Status.WARN),
        ("linux", 4.1, "2", Status.OK),
        ("darwin", 4.1, "", Status.OK),
    ],
)
def test_a_busy_processor(
    monkeypatch: pytest.MonkeyPatch, platform: str, load: float, threads: str, status: Status
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(checks.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(checks.os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setenv("MLXSERVE_THREADS", threads)
    (check,) = checks.processor()
    assert check.status is status
    assert f"8 cores, load average {load}" in check.detail
    assert ("threads is 2 (environment)" in check.detail) == bool(threads)
    assert ("--threads 1" in check.advice) == (status is Status.WARN)


def test_settings_and_models_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLXSERVE_CONFIG_DIR", str(tmp_path))
    assert statuses(checks.config_file() + checks.models_file()) == {"settings": Status.OK, "models.toml": Status.OK}
    monkeypatch.setenv("MLXSERVE_PROT", "1")
    assert statuses(checks.config_file())["environment"] is Status.WARN
    (tmp_path / "config.toml").write_text("port = 'http'")
    (tmp_path / "models.toml").write_text("[broken")
    (settings,), (models,) = checks.config_file(), checks.models_file()
    assert (settings.status, models.status) == (Status.FAIL, Status.FAIL)
    assert "port in " in settings.detail
    assert "models.toml" in models.detail


def test_ports(monkeypatch: pytest.MonkeyPatch, free_port: int, tmp_path: Path) -> None:
    monkeypatch.setenv("MLXSERVE_PORT", str(free_port))
    assert checks.port() == [Check("port", Status.OK, f"{free_port} is free at 127.0.0.1")]
    with socket.create_server(("127.0.0.1", free_port)):
        monkeypatch.setattr("mlxserve.cli.daemon.PROBE_TIMEOUT", 0.1)
        (check,) = checks.port()
    assert (check.status, check.detail) == (Status.WARN, f"something listens at http://127.0.0.1:{free_port}")
    monkeypatch.setenv("MLXSERVE_HOST", "203.0.113.9")
    monkeypatch.setattr("mlxserve.cli.daemon.probe", lambda url: None)
    assert statuses(checks.port()) == {"port": Status.FAIL}


@pytest.mark.parametrize(
    ("reply", "status"),
    [(httpx.Response(200), Status.OK), (httpx.Response(503), Status.WARN), (httpx.ConnectError("off"), Status.WARN)],
)
def test_hub(monkeypatch: pytest.MonkeyPatch, reply: httpx.Response | Exception, status: Status) -> None:
    def head(url: str, **options: Any) -> httpx.Response:
        if isinstance(reply, Exception):
            raise reply
        return reply

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert statuses(checks.hub()) == {"hub": Status.WARN}
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(httpx, "head", head)
    assert statuses(checks.hub()) == {"hub": status}


# --- config


def test_config_tells_values_and_where_they_come_from(mlxserve: Any, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('max_queue = 7\nallowed_hosts = ["a.example", "b.example"]\n')
    done = mlxserve("config", MLXSERVE_PORT="8080", MLXSERVE_API_KEY="s3cret")
    assert (done.returncode, done.stderr) == (0, b"")
    lines = [line.split(maxsplit=2) for line in done.stdout.decode().splitlines()]
    assert lines[0] == ["config", "file:", f"{tmp_path}/config.toml"]
    for expected in (
        ["port", "8080", "environment (MLXSERVE_PORT)"],
        ["api_key", "********", "environment (MLXSERVE_API_KEY)"],
        ["max_queue", "7", "file"],
        ["allowed_hosts", "a.example,", "b.example    file"],
        ["enable_prefix_caching", "true", "default"],
        ["kv_bits", "-", "default"],
    ):
        assert [word.strip() for word in expected] in lines
    assert b"s3cret" not in done.stdout


def test_config_as_json_has_every_setting(mlxserve: Any) -> None:
    done = mlxserve("config", "--json", MLXSERVE_API_KEY="s3cret", MLXSERVE_KV_DISK_PATH="/blocks")
    settings = json.loads(done.stdout)["settings"]
    assert set(settings) == {*EngineConfig.__dataclass_fields__, *ServerConfig.__dataclass_fields__}
    assert settings["api_key"] == {"value": "********", "origin": "environment"}
    assert settings["kv_disk_path"]["value"] == "/blocks"
    assert settings["allowed_hosts"] == {"value": [], "origin": "default"}


def test_config_tells_what_is_wrong(mlxserve: Any) -> None:
    done = mlxserve("config", MLXSERVE_BLOCK_SIZE="12", MLXSERVE_BLOK_SIZE="1")
    assert done.returncode == 1
    assert b"block_size" in done.stdout
    warning, error = done.stderr.decode().splitlines()
    assert warning.endswith("did you mean MLXSERVE_BLOCK_SIZE?")
    assert error.startswith("Error: block_size must be a power of two")


def test_unknown_variables() -> None:
    environ = {"MLXSERVE_PORT": "1", "MLXSERVE_CACHE_DIR": "x", "MLXSERVE_TEST_SEED": "1", "PATH": "y"}
    assert config.unknown_variables(environ) == []
    assert config.unknown_variables({"MLXSERVE_Q": "1"}) == [
        "MLXSERVE_Q is set and means nothing to mlxserve; `mlxserve config` lists the settings"
    ]
