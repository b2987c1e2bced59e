"""What `mlxserve doctor` looks at. Every check answers, whatever state the machine is in."""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from mlxserve import __version__, config
from mlxserve.errors import ConfigError

HUB_TIMEOUT = 5.0
PROCESS_TIMEOUT = 60.0
LITTLE_DISK = 20 * 10**9
LITTLE_MEMORY = 8 * 10**9
"""A 4-bit model of some four billion parameters, its cache and the system fit into this."""


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    status: Status
    detail: str
    advice: str = ""
    """What to do; empty where nothing is to be done."""


def python() -> list[Check]:
    version = platform.python_version()
    return [Check("Python", Status.OK, f"{version}, mlxserve {__version__}, {platform.platform()}")]


# In a process of its own: where Metal or the library is broken, the import ends the process.
_MLX_SCRIPT = """
import json
from importlib.metadata import version
from mlxserve import blas
info = blas.preload()
import mlx.core as mx
mx.eval(mx.ones((8, 8)) @ mx.ones((8, 8)))
print(json.dumps({
    "version": mx.__version__,
    "mlx_lm": version("mlx-lm"),
    "metal": mx.metal.is_available(),
    "device": str(mx.default_device()),
    "blas": info and f"{info.name} {info.version}, {info.threads} threads",
}))
"""


def mlx() -> list[Check]:
    """MLX, its device, and on Linux the BLAS."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _MLX_SCRIPT], capture_output=True, text=True, timeout=PROCESS_TIMEOUT, check=False
        )
        lines = done.stderr.strip().splitlines()
        problem = "" if done.returncode == 0 else (lines[-1] if lines else f"the process ended with {done.returncode}")
        facts = {} if problem else json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        problem, facts = str(error), {}
    if problem:
        advice = "install it again: pip install --force-reinstall mlx mlx-lm"
        return [Check("MLX", Status.FAIL, f"it does not work: {problem}", advice)]
    checks = [Check("MLX", Status.OK, f"{facts['version']}, mlx-lm {facts['mlx_lm']}")]
    if facts["metal"]:
        checks.append(Check("device", Status.OK, "Metal GPU"))
    elif sys.platform == "darwin":
        advice = "use a Python built for arm64 (not Rosetta) on macOS 14 or newer"
        checks.append(Check("device", Status.FAIL, "Metal is not available", advice))
    else:
        checks.append(Check("device", Status.WARN, "CPU", "small models only; Apple Silicon is what this is made for"))
    if sys.platform == "linux":
        if facts["blas"]:
            checks.append(Check("BLAS", Status.OK, facts["blas"]))
        else:
            advice = "pip install scipy-openblas32 and a C compiler, or install libopenblas0-pthread"
            checks.append(Check("BLAS", Status.WARN, "none that is fast: products take ten times as long", advice))
    return checks


def memory() -> list[Check]:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return [Check("memory", Status.WARN, "its size is not known")]
    detail = f"{total / 1e9:.0f} GB"
    checks = [Check("memory", Status.OK, detail)]
    if total < LITTLE_MEMORY:
        checks = [Check("memory", Status.WARN, detail, "choose models of up to some 2 billion parameters in 4 bits")]
    if sys.platform == "darwin":
        checks.append(_wired_limit(total))
    return checks


def _wired_limit(total: int) -> Check:
    """How much of the memory the GPU may hold on to."""
    try:
        done = subprocess.run(
            ["sysctl", "-n", "iogpu.wired_limit_mb"],
            capture_output=True,
            text=True,
            timeout=PROCESS_TIMEOUT,
            check=True,
        )
        megabytes = int(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return Check("wired limit", Status.WARN, f"it cannot be read: {error}")
    if megabytes == 0:
        raised = int(total * 0.85 / 2**20)
        advice = f"only for a model that just does not fit: sudo sysctl iogpu.wired_limit_mb={raised}"
        return Check("wired limit", Status.OK, "the system's own, about three quarters of the memory", advice)
    if megabytes * 2**20 > total * 0.95:
        advice = "leave the system more: sudo sysctl iogpu.wired_limit_mb=0 gives its own limit back"
        return Check("wired limit", Status.WARN, f"{megabytes} MB, nearly all of the memory", advice)
    return Check("wired limit", Status.OK, f"{megabytes} MB")


def processor() -> list[Check]:
    """Cores, how busy they are, and the setting threads. The CPU computes where there is no Metal."""
    cores = os.cpu_count() or 1
    try:
        load = os.getloadavg()[0]
        setting = config.resolve({})["threads"]
    except (OSError, ConfigError):
        # A load that is not known is none to speak of; wrong settings are told by config_file().
        return [Check("processor", Status.OK, f"{cores} cores")]
    threads = "threads is not set" if setting.value is None else f"threads is {setting.value} ({setting.origin})"
    detail = f"{cores} cores, load average {load:.1f}, {threads}"
    if sys.platform != "darwin" and setting.value is None and load > cores / 2:
        advice = "other programs compute, too, and threads that wait for one another are slow: try --threads 1"
        return [Check("processor", Status.WARN, detail, f"{advice}, or MLXSERVE_THREADS=1")]
    return [Check("processor", Status.OK, detail)]


def disk() -> list[Check]:
    """Room for models, where the hub's client keeps them."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE)
    existing = next((each for each in (folder, *folder.parents) if each.is_dir()), Path("/"))
    try:
        free = shutil.disk_usage(existing).free
    except OSError as error:
        return [Check("disk", Status.FAIL, f"{folder}: {error.strerror}", "point HF_HOME at a folder that is there")]
    detail = f"{free / 1e9:.0f} GB free for models in {folder}"
    if not os.access(existing, os.W_OK):
        return [Check("disk", Status.FAIL, f"{folder} cannot be written", "point HF_HOME at a folder of yours")]
    if free < LITTLE_DISK:
        return [Check("disk", Status.WARN, detail, "make room, or point HF_HOME at a larger disk")]
    return [Check("disk", Status.OK, detail)]


def config_file() -> list[Check]:
    try:
        config.build(config.resolve({}))
    except ConfigError as error:
        return [Check("settings", Status.FAIL, str(error), "correct it; docs/cli.md lists what is possible")]
    file = config.config_file()
    checks = [Check("settings", Status.OK, f"{file}{'' if file.exists() else ' (there is none: defaults)'}")]
    return checks + [Check("environment", Status.WARN, warning, "unset it") for warning in config.unknown_variables()]


def models_file() -> list[Check]:
    from mlxserve.store.registry import Registry

    try:
        number = len(Registry().aliases)
    except ConfigError as error:
        return [Check("models.toml", Status.FAIL, str(error), "correct the entry, or move the file away")]
    return [Check("models.toml", Status.OK, f"{number} aliases")]


def port() -> list[Check]:
    from mlxserve.cli.addresses import client_url, listen
    from mlxserve.cli.daemon import probe

    try:
        _, server = config.load_config()
    except ConfigError:
        # Told by config_file() already.
        server = config.ServerConfig()
    url = client_url(server.host, server.port)
    if (found := probe(url)) is not None:
        status = Status.OK if found == "an mlxserve answers" else Status.WARN
        advice = "" if status is Status.OK else "stop that program, or choose another port: MLXSERVE_PORT or --port"
        return [Check("port", status, f"{found} at {url}", advice)]
    try:
        for sock in listen(server.host, server.port):
            sock.close()
    except ConfigError as error:
        return [Check("port", Status.FAIL, str(error), "choose another address in config.toml")]
    return [Check("port", Status.OK, f"{server.port} is free at {server.host}")]


def hub() -> list[Check]:
    import httpx
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return [Check("hub", Status.WARN, "HF_HUB_OFFLINE is set: nothing is downloaded", "unset it to download")]
    try:
        reply = httpx.head(constants.ENDPOINT, timeout=HUB_TIMEOUT, follow_redirects=True)
    except httpx.HTTPError as error:
        advice = "models that are here work; for others look at network, proxy (HTTPS_PROXY) and HF_ENDPOINT"
        return [Check("hub", Status.WARN, f"{constants.ENDPOINT} does not answer: {error}", advice)]
    if reply.status_code >= 500:
        detail = f"{constants.ENDPOINT} answers with status {reply.status_code}"
        return [Check("hub", Status.WARN, detail, "try again later; models that are here work")]
    return [Check("hub", Status.OK, f"{constants.ENDPOINT} answers")]


CHECKS: tuple[Callable[[], list[Check]], ...] = (
    python,
    mlx,
    processor,
    memory,
    disk,
    config_file,
    models_file,
    port,
    hub,
)
