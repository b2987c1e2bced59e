"""All measurements, and the raw figures as files."""

import csv
import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any, TextIO

from mlxserve.bench.client import Answer
from mlxserve.bench.figures import Metric
from mlxserve.bench.workloads import Cell, Measurement
from mlxserve.errors import BenchError

MEASUREMENTS = "measurements.csv"
"""One figure a line."""
REQUESTS = "requests.csv"
"""One request a line; beside it `requests.jsonl` has when every chunk of every request came."""


class Results:
    """All measurements, as they come; with a folder they are also written down at once."""

    def __init__(self, folder: Path | None) -> None:
        self.measurements: list[Measurement] = []
        self._folder = folder

    def add(self, measurement: Measurement) -> None:
        self.measurements.append(measurement)
        if self._folder is None:
            return
        cell = measurement.cell
        where: dict[str, Any] = {
            "workload": cell.workload,
            "prompt_tokens": cell.num_prompt_tokens,
            "output_tokens": cell.num_output_tokens,
            "streams": cell.num_streams,
            "rate": cell.rate,
            "server": measurement.server,
            "run": measurement.run,
        }
        figures = measurement.figures | {"client_load": measurement.client_load}
        self._append(MEASUREMENTS, [where | {"figure": key, "value": f"{figures[key]:.6g}"} for key in figures])
        self._append(REQUESTS, [where | _row(answer) for answer in measurement.answers])
        with self._open("requests.jsonl") as file:
            for answer in measurement.answers:
                record = dataclasses.asdict(answer)
                del record["text"]
                record |= {**dataclasses.asdict(cell), "server": measurement.server, "run": measurement.run}
                file.write(json.dumps(record) + "\n")

    @property
    def cells(self) -> list[Cell]:
        """In order of their first runs."""
        return list(dict.fromkeys(one.cell for one in self.measurements))

    @property
    def servers(self) -> list[str]:
        return list(dict.fromkeys(one.server for one in self.measurements))

    def of(self, cell: Cell, server: str) -> list[Measurement]:
        """In order of their runs."""
        return [one for one in self.measurements if (one.cell, one.server) == (cell, server)]

    def _append(self, name: str, rows: list[dict[str, Any]]) -> None:
        with self._open(name, newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            if file.tell() == 0:
                writer.writeheader()
            writer.writerows(rows)

    def _open(self, name: str, newline: str | None = None) -> TextIO:
        assert self._folder is not None
        return (self._folder / name).open("a", encoding="utf-8", newline=newline)


def new_folder(folder: Path) -> Path:
    """Make a folder for the files of one measurement.

    Raises:
        BenchError: it holds the figures of another one.
    """
    if (folder / MEASUREMENTS).exists():
        raise BenchError(f"{folder} holds the figures of another time; name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def spread(values: list[float]) -> str:
    """Median (least to largest), three digits each."""
    middle = number(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({number(min(values))}-{number(max(values))})"


def number(value: float) -> str:
    """Three digits, never as a power of ten."""
    digits = next((digits for digits, limit in ((2, 9.995), (1, 99.95)) if abs(value) < limit), 0)
    return f"{value:.{digits}f}"


def ratios(ours: list[Measurement], others: list[Measurement], metric: Metric) -> list[float]:
    """Ours by theirs, for each run that both have; runs without a value are left out."""
    theirs = {one.run: one.figures[metric.key] for one in others}
    pairs = [(one.figures[metric.key], theirs[one.run]) for one in ours if one.run in theirs]
    return [our / their for our, their in pairs if their]


def _row(answer: Answer) -> dict[str, Any]:
    """Times in seconds, to the microsecond."""
    return {
        "sent": f"{answer.sent:.6f}",
        "ttft": f"{answer.ttft:.6f}",
        "tpot": f"{answer.tpot:.6f}" if answer.num_tokens > 1 else "",
        "e2e": f"{answer.e2e:.6f}",
        "prompt_tokens_counted": answer.num_prompt_tokens,
        "cached_tokens": answer.num_cached_tokens,
        "tokens": answer.num_tokens,
        "reasoning_tokens": answer.num_reasoning_tokens,
        "chunks": len(answer.chunk_times),
        "finish_reason": answer.finish_reason or "",
    }
