"""What this machine offers a model: memory, and how fast it is read. Asks the system and never mlx."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

WIRED_SHARE = 0.75
"""Of unified memory, what macOS lets the GPU keep resident where its limit is not set."""
LINUX_SHARE = 0.7
"""What runner/device.py takes there."""

BANDWIDTHS: dict[str, tuple[tuple[int, int], ...]] = {
    "M1": ((0, 68),),
    "M1 Pro": ((0, 200),),
    "M1 Max": ((0, 400),),
    "M1 Ultra": ((0, 800),),
    "M2": ((0, 100),),
    "M2 Pro": ((0, 200),),
    "M2 Max": ((0, 400),),
    "M2 Ultra": ((0, 800),),
    "M3": ((0, 100),),
    "M3 Pro": ((0, 150),),
    "M3 Max": ((0, 300), (16, 400)),
    "M3 Ultra": ((0, 819),),
    "M4": ((0, 120),),
    "M4 Pro": ((0, 273),),
    "M4 Max": ((0, 410), (16, 546)),
    "M5": ((0, 153),),
    "M5 Max": ((0, 614),),
}
"""Apple's figures, GB/s, by chip: (from so many CPU cores, figure), since a name can stand for two chips."""


@dataclass(frozen=True, slots=True)
class Machine:
    name: str
    memory: int
    """Bytes."""
    budget: int
    """Bytes that weights and caches may take."""
    bandwidth: float | None
    """Bytes of memory read in a second; None where it is not known."""
    is_metal: bool
    """Whether models keep their types; on a CPU everything becomes float32."""


def this_machine() -> Machine:
    if sys.platform == "darwin":
        name, memory = _sysctl("machdep.cpu.brand_string"), int(_sysctl("hw.memsize") or 0)
        wired = int(_sysctl("iogpu.wired_limit_mb") or 0) * 1024 * 1024
        return Machine(name, memory, wired or int(memory * WIRED_SHARE), bandwidth(name, os.cpu_count() or 0), True)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8").strip()
    except OSError:
        limit = ""
    memory = min(memory, int(limit)) if limit.isdigit() else memory
    return Machine("CPU", memory, int(memory * LINUX_SHARE), None, False)


def bandwidth(name: str, num_cores: int) -> float | None:
    """Bytes a second of a chip as the system names it: 'Apple M4 Max'."""
    match = re.fullmatch(r"Apple (M\d+(?: (?:Pro|Max|Ultra))?)", name.strip())
    steps = BANDWIDTHS.get(match[1], ()) if match else ()
    found = [figure for from_cores, figure in steps if num_cores >= from_cores]
    return found[-1] * 1e9 if found else None


def _sysctl(key: str) -> str:
    return subprocess.run(["sysctl", "-n", key], capture_output=True, text=True, check=False).stdout.strip()
