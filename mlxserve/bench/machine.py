"""What a figure was measured on."""

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

LIBRARY_VARIABLES = ("OPENBLAS_", "MKL_", "OMP_", "MLX_", "MLXSERVE_")
SECRET = "KEY"
"""Part of the name of a variable whose value must not be shown."""


def describe() -> str:
    """Processor, cores, memory, system, and how busy it is, in a line."""
    return (
        f"{processor()}, {os.cpu_count()} cores, {memory_bytes() / 2**30:.0f} GiB, {platform.platform()}; "
        f"load average at the start {os.getloadavg()[0]:.1f}"
    )


def versions(*packages: str) -> str:
    """Of packages that are installed here, and of Python."""
    found = []
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join([*found, f"Python {platform.python_version()}"])


def library_variables() -> str:
    """Settings of the libraries in the environment."""
    found = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(LIBRARY_VARIABLES) and SECRET not in name
    ]
    return ", ".join(found) or "no variable of these libraries is set"


def processor() -> str:
    """The processor's name where the system tells it, else its architecture."""
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
