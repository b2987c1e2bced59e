"""Runs of cells on one server, with what a report has to say about them."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxserve.bench import machine, plot, report, summary, workloads
from mlxserve.bench.client import Target
from mlxserve.bench.figures import METRICS, Limits
from mlxserve.bench.model_files import ModelFiles
from mlxserve.bench.prompts import CommonWords, PromptMaker, Prompts
from mlxserve.bench.report import Block, Bullets, Heading, Paragraph
from mlxserve.bench.results import Results
from mlxserve.bench.target import KnownTarget
from mlxserve.bench.workloads import Cell, Measurement
from mlxserve.errors import BenchError, TargetError

SUMMARY = "run.json"
"""What `bench compare` reads: the workload, the target, every figure of every run."""
FORMAT = 1

Log = Callable[[str], None]


@dataclass(slots=True)
class Session:
    """Measures, and remembers what failed."""

    results: Results
    prompts: Prompts
    seed: int
    limits: Limits
    log: Log
    text_tokens: dict[str, int | None] = field(default_factory=dict)
    failure: str | None = "it was interrupted."
    """Why it is not complete; None when it is."""

    async def run(self, cells: list[Cell], runs: int, target: Target, server: str) -> None:
        """Warm up, then all cells, as often as there are runs.

        Raises:
            TargetError: a request failed; what was measured before is in the results.
        """
        self.prompts.seed(f"{self.seed} warm-up")
        self.log(f"{server}: warm-up")
        await workloads.warm_up(cells, target, self.prompts)
        for run in range(runs):
            for cell in cells:
                self.prompts.seed(f"{self.seed} {run} {cell}")
                try:
                    measurement = await workloads.measure(
                        cell, target, self.prompts, server=server, run=run, limits=self.limits
                    )
                except TargetError as error:
                    message = f"run {run + 1} of {cell.workload} ({_load(cell)}) on {server} broke: {error}"
                    raise TargetError(message, status=error.status) from error
                except ValueError as error:
                    raise BenchError(f"no prompts for {cell.workload} ({_load(cell)}): {error}") from error
                self.add(measurement)

    def add(self, measurement: Measurement) -> None:
        """Keep a measurement, and count its texts."""
        self.results.add(measurement)
        self.log(brief(measurement))
        counts = [self.prompts.count(answer.text) for answer in measurement.answers if answer.num_tokens]
        before = self.text_tokens.get(measurement.server, 0)
        known = [count for count in counts if count is not None]
        self.text_tokens[measurement.server] = (
            None if before is None or len(known) < len(counts) else before + sum(known)
        )


def make_prompts(files: ModelFiles | None) -> Prompts:
    """By the model's tokenizer where it is here and has enough plain words."""
    if files is None:
        return CommonWords()
    try:
        return PromptMaker(files.tokenizer)
    except ValueError:
        return CommonWords()


def brief(measurement: Measurement) -> str:
    """A measurement in a line, for whoever waits."""
    metrics = METRICS[measurement.cell.workload][:2]
    figures = ", ".join(f"{metric.title} {measurement.figures[metric.key] * metric.scale:.3g}" for metric in metrics)
    return (
        f"run {measurement.run + 1}, {measurement.cell.workload} {_load(measurement.cell)}, "
        f"{measurement.server}: {figures}"
    )


def facts(
    name: str, known: KnownTarget | None, files: ModelFiles | None, prompts: Prompts, settings: list[str]
) -> dict[str, str]:
    """What a figure must not stand without, by its title. Without a target the servers are our own."""
    lengths = (
        "random words of one token each, counted by the model's own tokenizer"
        if isinstance(prompts, PromptMaker)
        else "random everyday words, about one token each: the model's tokenizer is not here, and lengths are as the "
        "server counts them"
    )
    description = known.card.get("description") if known else None
    found = {
        "Server": f"{known.target.url}, which calls itself {known.software}" if known else "`mlxserve serve`",
        "Model": name + (f" ({description})" if description else ""),
        "Quantisation": files.quantization if files else "not known: the model's files are not on this machine",
        "Machine" if known is None else "Client's machine": machine.describe(),
        "Versions" if known is None else "Versions at the client": machine.versions("mlxserve", "mlx", "mlx-lm"),
        "Environment": machine.library_variables(),
        "Prompts": f"{lengths}; different from their first token on, unless a workload is about prefixes",
        "Settings": "; ".join(settings),
    }
    if known is not None:
        loading = "" if known.card.get("loaded") else "; if the model was not loaded, its load is in it"
        found["First request"] = (
            f"{known.first_ttft:.3f} s to its first text, before any warm-up and in no figure below{loading}"
        )
    return found


def report_blocks(session: Session, facts: dict[str, str], notes: tuple[str, ...], folder: Path) -> Iterator[Block]:
    """The whole report of one server."""
    yield Heading(1, "Benchmark")
    if session.failure:
        yield Paragraph(f"**INCOMPLETE: {session.failure}** What follows was measured before.")
    yield Bullets(tuple(f"{title}: {text}" for title, text in facts.items()))
    yield Paragraph(
        "Figures are medians over the runs (least-largest). TTFT: sending to first text. ITL: gap between two chunks. "
        "TPOT: (last chunk - first chunk) / (tokens - 1). E2E: sending to last text. A percentile of n values is "
        f"between the two nearest; with fewer than {summary.FEW_REQUESTS} of them P99 is hardly more than the largest."
    )
    for workload, heading in summary.heading_blocks(session.results):
        yield heading
        yield from summary.workload_blocks(session.results, workload, folder)
    if session.results.measurements:
        yield Heading(2, "Notes")
        yield summary.bullets(iter([*notes, *summary.notes(session.results, session.text_tokens)]))
    if not plot.is_available():
        yield Paragraph(plot.MISSING)


def write(session: Session, facts: dict[str, str], notes: tuple[str, ...], folder: Path, workload: Any) -> None:
    """Report and summary. `workload` is what two sessions must have in common to be compared."""
    report.write(folder, list(report_blocks(session, facts, notes, folder)))
    content = {
        "format": FORMAT,
        "workload": workload,
        "facts": facts,
        "failure": session.failure,
        "measurements": [
            {"cell": dataclasses.asdict(one.cell), "server": one.server, "run": one.run, "figures": one.figures}
            for one in session.results.measurements
        ],
    }
    (folder / SUMMARY).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def describe_workload(cells: list[Cell], runs: int, seed: int, limits: Limits) -> dict[str, Any]:
    """The part of a session that is the same wherever it is run."""
    return {
        "cells": [dataclasses.asdict(cell) for cell in cells],
        "runs": runs,
        "seed": seed,
        "limits": dataclasses.asdict(limits),
    }


def _load(cell: Cell) -> str:
    load = f"{cell.rate:g}/s" if cell.rate is not None else str(cell.num_streams)
    return f"{load} x {cell.num_prompt_tokens} in, {cell.num_output_tokens} out"
