"""What this machine computes on. The rest of the code asks this module and never the platform."""

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import mlx.core as mx

DtypePolicy = Literal["keep", "float32"]

# Share of the memory a process may use on a machine that also runs its user's other programs.
LINUX_MEMORY_SHARE = 0.7
# MLX keeps freed buffers for reuse; without a bound, changing shapes let that pile grow past everything accounted for.
BUFFER_CACHE_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Device:
    kind: Literal["metal", "cpu"]
    name: str
    memory_budget: int
    """Bytes that weights, KV cache and step buffers may take together."""
    dtype_policy: DtypePolicy
    """keep: weights as stored. float32: the CPU's half-precision and quantised products are 10 to 100 times slower."""
    max_pass_tokens: int
    """Prefill tokens of one forward pass: past it a pass only takes longer, on CPU also by more than its tokens."""
    max_prefill_tokens: int
    """Prefill tokens of one step where nothing decodes: a second of work or so, since a step cannot be cut short."""

    @property
    def is_metal(self) -> bool:
        return self.kind == "metal"


def detect() -> Device:
    """The device MLX computes on here."""
    if mx.metal.is_available():
        info = mx.device_info()
        # The wired limit is what the GPU may keep resident: beyond it macOS pages, and a step takes seconds.
        budget = int(info["max_recommended_working_set_size"])
        name = str(info.get("device_name", "Apple GPU"))
        return Device("metal", name, budget, "keep", max_pass_tokens=2048, max_prefill_tokens=2048)
    budget = int(_linux_memory() * LINUX_MEMORY_SHARE)
    return Device("cpu", "CPU", budget, "float32", max_pass_tokens=256, max_prefill_tokens=1024)


def configure(device: Device) -> None:
    """Set MLX's process-wide limits for a device. Call once, on the engine thread, before anything is loaded."""
    if device.is_metal:
        mx.set_wired_limit(device.memory_budget)
    else:
        _keep_freed_memory()
    mx.set_cache_limit(int(device.memory_budget * BUFFER_CACHE_SHARE))


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes that MLX has allocated."""

    active: int
    peak: int
    cached: int


def memory() -> DeviceMemory:
    """What MLX's allocator says now. Any thread may ask: nothing is computed."""
    return DeviceMemory(mx.get_active_memory(), mx.get_peak_memory(), mx.get_cache_memory())


def give_back() -> None:
    """Return the memory of freed arrays to the system."""
    mx.clear_cache()
    try:
        # Without a buffer cache it is malloc's, which _keep_freed_memory() told to keep it.
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:
        return


def release() -> None:
    """End what MLX runs for this thread. Call last on a thread that used MLX: its streams must not outlive it."""
    mx.synchronize()
    mx.clear_streams()


def _keep_freed_memory() -> None:
    """Let glibc reuse the memory of freed arrays instead of giving it back to the system.

    MLX's CPU backend has no buffer cache: every array is a malloc. glibc maps large ones afresh and unmaps them when
    they are freed, so that each pass touches new pages; faulting those in can take longer than the pass's attention.
    The values are the largest that mallopt(3) takes. Where there is no glibc nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return
    m_trim_threshold, m_mmap_threshold = -1, -3
    mallopt(m_mmap_threshold, 32 * 1024 * 1024)
    mallopt(m_trim_threshold, 2**31 - 1)


def _linux_memory() -> int:
    """Bytes of memory of this machine, or of the control group the process is confined to if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total
