"""The tables of several servers beside one another, in Markdown."""

from collections.abc import Iterable

from mlxserve.bench import summary
from mlxserve.bench.figures import METRICS
from mlxserve.bench.report import line
from mlxserve.bench.results import Results, ratios, spread
from mlxserve.bench.workloads import Cell


def better(results: Results, cell: Cell, servers: Iterable[str]) -> str:
    """Of variants of one server the one that did better in the first run, by the first metric of the workload."""
    metric = METRICS[cell.workload][0]

    def figure(server: str) -> float:
        return results.of(cell, server)[0].figures[metric.key]

    return max(servers, key=figure) if metric.is_better_higher else min(servers, key=figure)


def tables(results: Results, cells: list[Cell], counted: dict[Cell, list[str]]) -> str:
    """All tables. `counted` has the servers whose figures count in each cell, ours first."""
    parts: list[str] = []
    for workload in dict.fromkeys(cell.workload for cell in cells):
        rows = [cell for cell in cells if cell.workload == workload]
        parts += [f"## {workload}", summary.CAPTIONS[workload], _figures(results, workload, rows, counted)]
        parts += [f"mlxserve / other, by run:\n\n{_ratios(results, workload, rows, counted)}"]
    parts.append(_notes(results, counted))
    return "\n\n".join(parts)


def _figures(results: Results, workload: str, cells: list[Cell], counted: dict[Cell, list[str]]) -> str:
    metrics = METRICS[workload]
    lines = [line(["prompt", "streams", "server", "runs", *(metric.title for metric in metrics)])]
    lines.append("|---" * (4 + len(metrics)) + "|")
    for cell in cells:
        for server in counted[cell]:
            runs = results.of(cell, server)
            values = [spread([one.figures[metric.key] * metric.scale for one in runs]) for metric in metrics]
            lines.append(line([str(cell.num_prompt_tokens), str(cell.num_streams), server, str(len(runs)), *values]))
    return "\n".join(lines)


def _ratios(results: Results, workload: str, cells: list[Cell], counted: dict[Cell, list[str]]) -> str:
    metrics = METRICS[workload]
    titles = [f"{metric.title.removesuffix(' ms').removesuffix(' s')}" for metric in metrics]
    lines = [line(["prompt", "streams", "other", *titles]), "|---" * (3 + len(metrics)) + "|"]
    for cell in cells:
        ours, *others = counted[cell]
        for other in others:
            pairs = [ratios(results.of(cell, ours), results.of(cell, other), metric) for metric in metrics]
            values = [spread(pair) if pair else "-" for pair in pairs]
            lines.append(line([str(cell.num_prompt_tokens), str(cell.num_streams), other, *values]))
    return "\n".join(lines)


def _notes(results: Results, counted: dict[Cell, list[str]]) -> str:
    """What a reader must know to trust the tables, and which servers are variants that did worse."""
    notes = list(summary.notes(results))
    for server in results.servers:
        left_out = [cell for cell, servers in counted.items() if server not in servers and results.of(cell, server)]
        if left_out:
            notes.append(
                f"{server}: not counted in {len(left_out)} of the loads, where another setting did better in the "
                "first run."
            )
    return "\n".join(f"- {note}" for note in notes)
