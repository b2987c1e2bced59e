"""The tables of a report, and what a reader must know to trust them."""

import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path

from mlxserve.bench import charts, plot
from mlxserve.bench.figures import GOODPUT, METRICS, PERCENTILES, REQUEST_WORKLOADS, Metric, percentile
from mlxserve.bench.report import Block, Bullets, Heading, Paragraph, Picture, Table
from mlxserve.bench.results import Results, number, spread
from mlxserve.bench.workloads import Cell, Measurement

CAPTIONS = {
    "input-length": "One prompt length a row, the answers equally long: what a prompt costs before its first token. "
    "Prompt tokens/s are the whole prompt by TTFT.",
    "output-length": "One answer length a row, the prompts equally long. In a row marked EOS the model "
    "may end the answers.",
    "concurrency": "Closed-loop streams start at the same moment, and each sends its next request when it has its "
    "answer; with a rate requests arrive as a Poisson process instead, whatever became of those before. "
    "tokens/s is output of all streams in total, prefill included.",
    "mixed": "A long prompt beside running streams (prompts of 128 tokens): the gaps between chunks of the streams "
    "while it waits for its first token, and the median gap of the same streams before (quiet).",
    "multi-turn": "A chat whose first message is long: TTFT of its first and of its second turn.",
    "shared-prefix": "Prompts that begin with the same tokens, one after the other: TTFT of the first, which computes "
    "them, and of the later ones, which can find them in a prefix cache.",
    "revisit": "Different prompts one after the other, then the same ones again: what the cache still holds is found, "
    "what it evicted is computed anew.",
    "cold-start": "A server process is started anew in each run. Ready is when `/health` says so, the model loaded; "
    "then one request, then equal ones one after the other (steady).",
}
FEW_REQUESTS = 100
MAX_TOKEN_DIFFERENCE = 0.05
LATE_SECONDS = 0.01


def metrics_of(workload: str, results: Results) -> tuple[Metric, ...]:
    """What the table of a workload shows."""
    has_limits = any("goodput" in one.figures for one in results.measurements if one.cell.workload == workload)
    return METRICS[workload] + (GOODPUT if has_limits else ())


def cell_titles() -> tuple[str, ...]:
    return ("prompt", "out", "load", "requests")


def cell_values(cell: Cell) -> tuple[str, ...]:
    """The columns by which a row says what its load is."""
    prompt = f"{cell.num_shared_tokens} of {cell.num_prompt_tokens}" if cell.num_shared_tokens else None
    output = f"EOS, up to {cell.num_output_tokens}" if cell.stops_at_eos else str(cell.num_output_tokens)
    load = f"{cell.rate:g}/s" if cell.rate is not None else str(cell.num_streams)
    return (prompt or str(cell.num_prompt_tokens), output, load, str(cell.num_requests))


def workload_blocks(results: Results, workload: str, folder: Path | None, name: str = "") -> Iterator[Block]:
    """Caption, figures, percentiles and plots of one workload."""
    cells = [cell for cell in results.cells if cell.workload == workload]
    yield Paragraph(CAPTIONS[workload])
    yield _figures(results, cells, metrics_of(workload, results))
    if workload in REQUEST_WORKLOADS:
        yield Paragraph("Over the requests of all runs (ITL: over all gaps):")
        yield _percentiles(results, cells)
    if folder is not None and plot.is_available():
        for chart in charts.of_workload(results, workload, name):
            yield Picture(plot.draw(chart, folder), chart.title)


def notes(results: Results, text_tokens: Mapping[str, int | None] | None = None) -> Iterator[str]:
    """Of each server: early stops, other lengths than asked for, coalesced chunks, refusals, how much was reasoning;
    then of the client.

    `text_tokens` has what the model's own tokenizer counts in all texts of a server, None where it is not here.
    """
    for server in results.servers:
        runs = [one for one in results.measurements if one.server == server]
        facts = [*_facts(runs)]
        if text_tokens is not None:
            told = sum(answer.num_tokens for one in runs for answer in one.answers)
            facts.append(_token_count(told, text_tokens.get(server)))
        yield f"{server}: {'; '.join(facts)}."
    loads = [one.client_load for one in results.measurements]
    yield (
        f"The client used {statistics.mean(loads):.1%} of one core on average, {max(loads):.1%} at most, "
        "making prompts included."
    )
    late = max((one.figures.get("client_late_max", 0.0) for one in results.measurements), default=0.0)
    if late > LATE_SECONDS:
        yield f"**The client sent a request {late * 1000:.0f} ms later than it should have arrived.**"


def heading_blocks(results: Results) -> Iterator[tuple[str, Block]]:
    """A heading for each workload there is."""
    for workload in dict.fromkeys(cell.workload for cell in results.cells):
        yield workload, Heading(2, workload)


def bullets(lines: Iterator[str]) -> Bullets:
    return Bullets(tuple(lines))


def _figures(results: Results, cells: list[Cell], metrics: tuple[Metric, ...]) -> Table:
    several = len(results.servers) > 1
    head = (*cell_titles(), *(("server",) if several else ()), "runs", *(metric.title for metric in metrics))
    rows = []
    for cell in cells:
        for server in results.servers:
            if runs := results.of(cell, server):
                values = [spread([one.figures[metric.key] * metric.scale for one in runs]) for metric in metrics]
                rows.append((*cell_values(cell), *((server,) if several else ()), str(len(runs)), *values))
    return Table(head, tuple(rows))


def _percentiles(results: Results, cells: list[Cell]) -> Table:
    several = len(results.servers) > 1
    titles = (*cell_titles()[:3], *(("server",) if several else ()), "n")
    names = ("TTFT s", "TPOT ms", "ITL ms", "E2E s")
    head = (*titles, *(f"{name} P50 / P95 / P99" for name in names))
    rows = []
    for cell in cells:
        for server in results.servers:
            answers = [answer for one in results.of(cell, server) for answer in one.answers]
            if not answers:
                continue
            columns = (
                [answer.ttft for answer in answers],
                [answer.tpot * 1000 for answer in answers if answer.num_tokens > 1],
                [gap * 1000 for answer in answers for gap in answer.gaps],
                [answer.e2e for answer in answers],
            )
            shown = (" / ".join(number(percentile(each, percent)) for percent in PERCENTILES) for each in columns)
            rows.append((*cell_values(cell)[:3], *((server,) if several else ()), str(len(answers)), *shown))
    return Table(head, tuple(rows))


def _facts(runs: list[Measurement]) -> Iterator[str]:
    fixed = [one for one in runs if not one.cell.stops_at_eos]
    stops = sum(int(one.figures.get("early_stops", 0)) for one in fixed)
    num_answers = sum(len(one.answers) for one in fixed if "early_stops" in one.figures)
    if stops:
        yield (
            f"**{stops} of {num_answers} answers ended before the wanted length: the server takes no `ignore_eos`, and "
            "their E2E and tokens out are those of shorter answers**"
        )
    elif num_answers:
        yield f"all {num_answers} answers have the wanted length"
    if free := [answer for one in runs if one.cell.stops_at_eos for answer in one.answers]:
        ended = sum(answer.finish_reason == "stop" for answer in free)
        yield f"{ended} of {len(free)} answers of EOS rows were ended by the model, the others by the limit"
    if overlong := sum(int(one.figures.get("overlong", 0)) for one in runs):
        yield f"**{overlong} answers are longer than `max_tokens`, which the server does not keep**"
    chunks = [one.figures["tokens_per_chunk"] for one in runs if "tokens_per_chunk" in one.figures]
    if chunks:
        yield f"{statistics.median(chunks):.2f} tokens a chunk"
    lengths = {
        (int(one.figures["prompt_tokens_min"]), int(one.figures["prompt_tokens_max"]), one.cell.num_prompt_tokens)
        for one in fixed
        if one.cell.workload != "multi-turn" and "prompt_tokens_min" in one.figures
    }
    others = sorted(each for each in lengths if not each[0] == each[1] == each[2])
    if any(low == 0 for low, _, _ in others):
        yield "it does not tell how long it counts the prompts"
    elif others:
        yield "it counts the prompts as " + ", ".join(f"{low}-{high} for {wanted}" for low, high, wanted in others)
    if refused := sum(int(one.figures.get("refused", 0)) for one in runs):
        yield f"{refused} requests were refused as too many (429 or 503), and are in no time"
    answers = [answer for one in runs for answer in one.answers]
    if reasoning := sum(answer.num_reasoning_tokens for answer in answers):
        told = sum(answer.num_tokens for answer in answers)
        yield f"{reasoning} of {told} output tokens were reasoning, by the server's count; all figures are of both"


def _token_count(told: int, counted: int | None) -> str:
    if counted is None:
        return "output tokens are the server's own count, unchecked: the model's tokenizer is not on this machine"
    if told and abs(counted - told) > MAX_TOKEN_DIFFERENCE * told:
        return (
            f"**output tokens are the server's own count, {told}; the model's tokenizer finds {counted} in the texts** "
            "(tokens without a text, such as those that end a message, are one reason)"
        )
    return f"output tokens are the server's own count, {told}; the model's tokenizer finds {counted} in the texts"
