"""Metrics of memory: what this process has, and what MLX has on its device, which on a Mac is part of it."""

import resource
import sys
from collections.abc import Iterable
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlxserve.runner import device

_STATM = Path("/proc/self/statm")


class MemoryCollector(Collector):
    """Read when somebody scrapes."""

    def collect(self) -> Iterable[Metric]:
        memory = device.memory()
        for name, text, value in (
            ("device_memory_active_bytes", "Arrays of MLX that are in use", memory.active),
            ("device_memory_peak_bytes", "The most they took so far", memory.peak),
            ("device_memory_cached_bytes", "Buffers MLX keeps for reuse", memory.cached),
            ("process_peak_memory_bytes", "The most this process took so far", _peak_memory()),
            ("process_resident_memory_bytes", "What this process takes now, where the system tells", _resident()),
        ):
            gauge = GaugeMetricFamily(f"mlxserve_{name}", text)
            if value is not None:
                gauge.add_metric((), value)
            yield gauge


def _peak_memory() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts kilobytes here, macOS bytes.
    return peak if sys.platform == "darwin" else peak * 1024


def _resident() -> int | None:
    try:
        return int(_STATM.read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return None
