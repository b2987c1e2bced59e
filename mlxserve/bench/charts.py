"""What is plotted of the results: pure data, drawn by plot.py."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mlxserve.bench.figures import percentile
from mlxserve.bench.results import Results
from mlxserve.bench.workloads import Cell, Measurement

MAX_POINTS = 200
"""Of a distribution's curve."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Points with the least and the largest value at each."""

    label: str
    xs: tuple[float, ...]
    ys: tuple[float, ...]
    lows: tuple[float, ...] = ()
    highs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Panel:
    x_title: str
    y_title: str
    curves: tuple[Curve, ...]
    is_distribution: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Panels side by side. `name` is that of its file, without ending."""

    name: str
    title: str
    panels: tuple[Panel, ...]


def of_workload(results: Results, workload: str, name: str = "") -> list[Chart]:
    """The charts of one workload; none where there is nothing to see. `name` is put before the names of the files."""
    cells = [cell for cell in results.cells if cell.workload == workload]
    charts: list[Chart] = []
    draw = _LINES.get(workload)
    if draw is not None and len(cells) > 1:
        charts += draw(results, cells, name)
    if workload in ("concurrency", "output-length"):
        charts.append(_itl_distribution(results, cells, f"{name}{workload}-itl"))
    return charts


def curve(
    results: Results, server: str, cells: list[Cell], x: Callable[[Cell], float], key: str, scale: float, label: str
) -> Curve:
    """Medians over the runs of a figure, at `x` of each cell."""
    runs = [[one.figures[key] * scale for one in results.of(cell, server)] for cell in cells]
    points = sorted((x(cell), values) for cell, values in zip(cells, runs, strict=True) if values)
    return Curve(
        label,
        tuple(at for at, _ in points),
        tuple(statistics.median(values) for _, values in points),
        tuple(min(values) for _, values in points),
        tuple(max(values) for _, values in points),
    )


def _input_length(results: Results, cells: list[Cell], name: str) -> list[Chart]:
    def panel(title: str, key: str, scale: float) -> Panel:
        curves = [curve(results, each, cells, _prompt, key, scale, each) for each in results.servers]
        return Panel("prompt tokens", title, tuple(curves))

    panels = (panel("TTFT p50, s", "ttft_p50", 1.0), panel("TPOT p50, ms", "tpot_p50", 1000.0))
    return [Chart(f"{name}input-length", "TTFT and TPOT against input length", panels)]


def _output_length(results: Results, cells: list[Cell], name: str) -> list[Chart]:
    def generated(cell: Cell) -> float:
        runs = [one for one in results.measurements if one.cell == cell]
        return statistics.median(one.figures["output_tokens_mean"] for one in runs)

    curves = [curve(results, each, cells, generated, "e2e_p50", 1.0, each) for each in results.servers]
    panel = Panel("tokens generated", "E2E p50, s", tuple(curves))
    return [Chart(f"{name}output-length", "E2E against output length", (panel,))]


def _concurrency(results: Results, cells: list[Cell], name: str) -> list[Chart]:
    lengths = sorted({cell.num_prompt_tokens for cell in cells})
    is_open = any(cell.rate is not None for cell in cells)

    def panel(title: str, keys: dict[str, str], scale: float) -> Panel:
        curves = [
            curve(
                results,
                server,
                [cell for cell in cells if cell.num_prompt_tokens == length],
                _rate if is_open else _streams,
                key,
                scale,
                ", ".join([server, f"prompt {length}", *([suffix] if suffix else [])]),
            )
            for server in results.servers
            for length in lengths
            for key, suffix in keys.items()
        ]
        return Panel("requests/s" if is_open else "streams", title, tuple(curves))

    panels = (
        panel("output tokens/s", {"tokens_per_second": ""}, 1.0),
        panel("TTFT, s", {"ttft_p50": "p50", "ttft_p99": "p99"}, 1.0),
        panel("ITL, ms", {"itl_p50": "p50", "itl_p99": "p99"}, 1000.0),
    )
    return [Chart(f"{name}concurrency", "Throughput, TTFT and ITL against load", panels)]


def _itl_distribution(results: Results, cells: list[Cell], name: str) -> Chart:
    curves = []
    for server in results.servers:
        for cell in cells:
            gaps = [gap * 1000 for one in results.of(cell, server) for answer in one.answers for gap in answer.gaps]
            if gaps:
                label = f"{server}, {_load_name(cell)}"
                percents = np.linspace(0, 100, min(MAX_POINTS, len(gaps)))
                curves.append(Curve(label, tuple(percentile(gaps, each) for each in percents), tuple(percents)))
    return Chart(name, "Inter-token latency", (Panel("ITL, ms", "% of gaps up to it", tuple(curves), True),))


def _load_name(cell: Cell) -> str:
    load = f"{cell.rate:g}/s" if cell.rate is not None else f"{cell.num_streams} streams"
    return f"{load}, {cell.num_prompt_tokens} in, {cell.num_output_tokens} out"


def _prompt(cell: Cell) -> float:
    return cell.num_prompt_tokens


def _streams(cell: Cell) -> float:
    return cell.num_streams


def _rate(cell: Cell) -> float:
    return cell.rate or 0.0


_LINES: dict[str, Callable[[Results, list[Cell], str], list[Chart]]] = {
    "input-length": _input_length,
    "output-length": _output_length,
    "concurrency": _concurrency,
}


def of_settings(
    name: str,
    title: str,
    x_title: str,
    results: Results,
    values: dict[str, float],
    keys: dict[str, tuple[str, float]],
) -> Chart:
    """Figures against a setting that differs between servers. `values` has the setting of each server, `keys` the
    figure and its scale by the title of its panel.
    """

    def panel(y_title: str, key: str, scale: float) -> Panel:
        curves = []
        for cell in results.cells:
            runs = {server: _figures(results.of(cell, server), key, scale) for server in values}
            points = sorted((values[server], figures) for server, figures in runs.items() if figures)
            if points:
                ys = tuple(statistics.median(figures) for _, figures in points)
                lows, highs = (tuple(pick(figures) for _, figures in points) for pick in (min, max))
                curves.append(Curve(_load_name(cell), tuple(x for x, _ in points), ys, lows, highs))
        return Panel(x_title, y_title, tuple(curves))

    return Chart(name, title, tuple(panel(y_title, key, scale) for y_title, (key, scale) in keys.items()))


def _figures(runs: list[Measurement], key: str, scale: float) -> list[float]:
    return [one.figures[key] * scale for one in runs if key in one.figures]
