"""Two sessions side by side: the same workload on two servers, run by run."""

import json
from pathlib import Path
from typing import Any

from mlxserve.bench.figures import GOODPUT, METRICS, Metric
from mlxserve.bench.report import Block, Bullets, Heading, Paragraph, Table
from mlxserve.bench.results import Results, ratios, spread
from mlxserve.bench.session import FORMAT, SUMMARY
from mlxserve.bench.summary import cell_titles, cell_values
from mlxserve.bench.workloads import Cell, Measurement
from mlxserve.errors import BenchError

MAX_LENGTH_DIFFERENCE = 0.02
"""By which tokens per answer, or per prompt, may differ for the work to be the same."""
LENGTHS = {"output_tokens_mean": "tokens an answer", "prompt_tokens_max": "tokens in the longest prompt"}


def compare(first: Path, second: Path) -> list[Block]:
    """What the first took, by what the second took.

    Raises:
        BenchError: a folder holds no complete session, or the two did not do the same work.
    """
    contents = [_read(folder) for folder in (first, second)]
    _require_same_workload(contents[0]["workload"], contents[1]["workload"])
    ours, theirs = (_results(content) for content in contents)
    blocks: list[Block] = [Heading(1, "Comparison")]
    for name, folder, content in zip("AB", (first, second), contents, strict=True):
        blocks += [Paragraph(f"**{name}**: {folder}"), Bullets(tuple(f"{k}: {v}" for k, v in content["facts"].items()))]
    blocks.append(Paragraph("A / B by run, then the median (least-largest). Columns with (+) are better above 1."))
    for workload in dict.fromkeys(cell.workload for cell in ours.cells):
        blocks += [Heading(2, workload), _table(workload, ours, theirs)]
    return blocks


def _read(folder: Path) -> dict[str, Any]:
    file = folder / SUMMARY
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != FORMAT or not isinstance(content["workload"], dict):
            raise BenchError(f"{file} was written by another version of mlxserve; measure again")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise BenchError(f"{folder} holds no session of `mlxserve bench --output {folder}`: {error}") from error
    if content.get("failure"):
        raise BenchError(f"the session in {folder} is incomplete: {content['failure']}")
    return content


def _require_same_workload(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    if different := [key for key in ours | theirs if ours.get(key) != theirs.get(key)]:
        shown = "; ".join(f"{key}: {_short(ours.get(key))} and {_short(theirs.get(key))}" for key in different)
        raise BenchError(f"these are different workloads, and their figures cannot be compared. {shown}")


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"{len(value)} loads [{'; '.join(_short_cell(cell) for cell in value)}]"
    return json.dumps(value)


def _short_cell(cell: dict[str, Any]) -> str:
    load = f"{cell['rate']:g}/s" if cell["rate"] else str(cell["num_streams"])
    return f"{cell['workload']} {load} x {cell['num_prompt_tokens']} in, {cell['num_output_tokens']} out"


def _results(content: dict[str, Any]) -> Results:
    results = Results(None)
    try:
        for one in content["measurements"]:
            # One server a session: its name need not be the other's.
            results.add(Measurement(Cell(**one["cell"]), "", one["run"], one["figures"], (), 0.0))
    except (LookupError, TypeError) as error:
        raise BenchError(f"a session is damaged: {error!r}; measure again") from error
    return results


def _table(workload: str, ours: Results, theirs: Results) -> Table:
    cells = [cell for cell in ours.cells if cell.workload == workload]
    present = {key for one in ours.measurements if one.cell.workload == workload for key in one.figures}
    metrics = [metric for metric in (*METRICS[workload], *GOODPUT) if metric.key in present]
    rows = []
    for cell in cells:
        pair = ours.of(cell, ""), theirs.of(cell, "")
        _require_same_lengths(cell, *pair)
        found = [ratios(*pair, metric) for metric in metrics]
        rows.append((*cell_values(cell), *(spread(each) if each else "-" for each in found)))
    return Table((*cell_titles(), *map(_title, metrics)), tuple(rows))


def _require_same_lengths(cell: Cell, ours: list[Measurement], theirs: list[Measurement]) -> None:
    """Equal settings are not enough: a server that ends its answers early did less."""
    for key, title in LENGTHS.items():
        sums = [sum(one.figures.get(key, 0.0) for one in runs) / max(len(runs), 1) for runs in (ours, theirs)]
        if all(sums) and abs(sums[0] - sums[1]) > MAX_LENGTH_DIFFERENCE * max(sums):
            raise BenchError(
                f"in {cell.workload} ({cell.num_prompt_tokens} in, {cell.num_output_tokens} out) the servers did not "
                f"do the same work: {title} are {sums[0]:.1f} and {sums[1]:.1f}"
            )


def _title(metric: Metric) -> str:
    title = metric.title.removesuffix(" ms").removesuffix(" s")
    return f"{title} (+)" if metric.is_better_higher else title
