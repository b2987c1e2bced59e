"""Tables in Markdown, and the raw figures as files."""

import csv
import dataclasses
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from serving_bench.workloads import METRICS, Cell, Measurement, Metric, is_better

MEASUREMENTS = "measurements.csv"
"""One figure a line; beside it `requests.jsonl` has when every chunk of every request came."""

CAPTIONS = {
    "concurrency": "Closed-loop streams, all started at the same moment; tokens/s is output of all streams in total, "
    "prefill included.",
    "mixed": "A long prompt beside running streams (prompts of 128 tokens): the gaps between chunks of the streams "
    "while it waits for its first token, and the median gap of the same streams before (quiet).",
    "multi-turn": "A chat whose first message is long: TTFT of its first and of its second turn.",
}


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
        with self._open(MEASUREMENTS, newline="") as file:
            writer = csv.writer(file)
            if file.tell() == 0:
                writer.writerow(["workload", "prompt_tokens", "streams", "server", "run", "figure", "value"])
            for figure, value in (measurement.figures | {"client_load": measurement.client_load}).items():
                where = (cell.workload, cell.num_prompt_tokens, cell.num_streams, measurement.server, measurement.run)
                writer.writerow([*where, figure, f"{value:.6g}"])
        with self._open("requests.jsonl") as file:
            for answer in measurement.answers:
                record = dataclasses.asdict(answer)
                del record["text"]
                record |= {**dataclasses.asdict(cell), "server": measurement.server, "run": measurement.run}
                file.write(json.dumps(record) + "\n")

    def of(self, cell: Cell, server: str) -> list[Measurement]:
        """In order of their runs."""
        return [one for one in self.measurements if (one.cell, one.server) == (cell, server)]

    def better(self, cell: Cell, servers: Iterable[str]) -> str:
        """Of variants of one server the one that did better in the first run."""
        best, *others = servers
        for other in others:
            if is_better(cell, self.of(cell, other)[0].figures, self.of(cell, best)[0].figures):
                best = other
        return best

    def _open(self, name: str, newline: str | None = None) -> TextIO:
        assert self._folder is not None
        return (self._folder / name).open("a", encoding="utf-8", newline=newline)


def tables(results: Results, cells: list[Cell], counted: dict[Cell, list[str]]) -> str:
    """All tables. `counted` has the servers whose figures count in each cell, ours first."""
    parts: list[str] = []
    for workload in dict.fromkeys(cell.workload for cell in cells):
        rows = [cell for cell in cells if cell.workload == workload]
        parts += [f"## {workload}", CAPTIONS[workload], _figures(results, workload, rows, counted)]
        parts += [f"mlxserve / other, by run:\n\n{_ratios(results, workload, rows, counted)}"]
    parts.append(_notes(results, counted))
    return "\n\n".join(parts)


def spread(values: list[float]) -> str:
    """Median (least to largest), three digits each."""
    middle = _number(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({_number(min(values))}-{_number(max(values))})"


def ratios(ours: list[Measurement], others: list[Measurement], metric: Metric) -> list[float]:
    """Ours by theirs, for each run that both have; runs without a value are left out."""
    theirs = {one.run: one.figures[metric.key] for one in others}
    pairs = [(one.figures[metric.key], theirs[one.run]) for one in ours if one.run in theirs]
    return [our / their for our, their in pairs if their]


def _figures(results: Results, workload: str, cells: list[Cell], counted: dict[Cell, list[str]]) -> str:
    metrics = METRICS[workload]
    lines = [_line(["prompt", "streams", "server", "runs", *(metric.title for metric in metrics)])]
    lines.append("|---" * (4 + len(metrics)) + "|")
    for cell in cells:
        for server in counted[cell]:
            runs = results.of(cell, server)
            values = [spread([one.figures[metric.key] * metric.scale for one in runs]) for metric in metrics]
            lines.append(_line([str(cell.num_prompt_tokens), str(cell.num_streams), server, str(len(runs)), *values]))
    return "\n".join(lines)


def _ratios(results: Results, workload: str, cells: list[Cell], counted: dict[Cell, list[str]]) -> str:
    metrics = METRICS[workload]
    titles = [f"{metric.title.removesuffix(' ms').removesuffix(' s')}" for metric in metrics]
    lines = [_line(["prompt", "streams", "other", *titles]), "|---" * (3 + len(metrics)) + "|"]
    for cell in cells:
        ours, *others = counted[cell]
        for other in others:
            pairs = [ratios(results.of(cell, ours), results.of(cell, other), metric) for metric in metrics]
            values = [spread(pair) if pair else "-" for pair in pairs]
            lines.append(_line([str(cell.num_prompt_tokens), str(cell.num_streams), other, *values]))
    return "\n".join(lines)


def _notes(results: Results, counted: dict[Cell, list[str]]) -> str:
    """What a reader must know to trust the tables: early stops, other prompt lengths, coalesced chunks, the client."""
    lines = []
    for server in dict.fromkeys(one.server for one in results.measurements):
        runs = [one for one in results.measurements if one.server == server]
        stops = sum(int(one.figures.get("early_stops", 0)) for one in runs)
        lengths = [
            (int(one.figures["prompt_tokens_min"]), int(one.figures["prompt_tokens_max"]), one.cell.num_prompt_tokens)
            for one in runs
            if one.cell.workload != "multi-turn"
        ]
        others = sorted({(low, high, wanted) for low, high, wanted in lengths if not low == high == wanted})
        chunks = [one.figures["tokens_per_chunk"] for one in runs if "tokens_per_chunk" in one.figures]
        facts = [f"{stops} answers ended early"]
        if chunks:
            facts.append(f"{statistics.median(chunks):.2f} tokens a chunk")
        if others:
            facts.append(
                "prompts counted as " + ", ".join(f"{low}-{high} for {wanted}" for low, high, wanted in others)
            )
        left_out = [cell for cell, servers in counted.items() if server not in servers and results.of(cell, server)]
        if left_out:
            facts.append(
                f"not counted in {len(left_out)} of the loads, where another setting did better in the first run"
            )
        lines.append(f"- {server}: {'; '.join(facts)}.")
    loads = [one.client_load for one in results.measurements]
    lines.append(
        f"- The client used {statistics.mean(loads):.1%} of one core on average, {max(loads):.1%} at most, "
        "making prompts included."
    )
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float) -> str:
    """Three digits, never as a power of ten."""
    digits = next((digits for digits, limit in ((2, 9.995), (1, 99.95)) if abs(value) < limit), 0)
    return f"{value:.{digits}f}"
