"""One frame of `mlxserve top`, from what /debug/requests and /debug/steps say."""

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

STAGES = {
    "front_end": ("magenta", "f"),
    "queue": ("yellow", "q"),
    "prefill": ("blue", "p"),
    "decode": ("green", "d"),
    "delivery": ("red", "w"),
}
"""Each stage's colour, and the letter its part of a bar is made of: a pipe has no colours."""
BAR_WIDTH = 24
RATE_SECONDS = 5.0
"""Rates are over the latest steps, this far back at most."""
CHROME_LINES = 12
"""Lines of a frame beside the requests, for one model."""
PERCENTILES = (50, 95, 99)

Json = dict[str, Any]


def frame(requests: Json, steps: Json, height: int, title: str) -> RenderableType:
    """A frame of `height` lines at most, if it has room for some requests; `title` is its first line."""
    rows = requests["requests"]
    live = [row for row in rows if row["state"] != "done"]
    parts: list[RenderableType] = [Text(f"mlxserve top - {title}", style="bold")]
    for model in steps["models"]:
        parts.append(model_line(model, steps["now"]))
    if not steps["models"]:
        parts.append(Text("no model is loaded yet"))
    parts.append(percentiles_table([row for row in rows if row["state"] == "done"]))
    parts.append(legend())
    room = max(height - CHROME_LINES - len(steps["models"]), 3)
    parts.append(requests_table(rows[:room]))
    if len(rows) > room:
        parts.append(Text(f"... and {len(rows) - room} more ({len(live)} under way)"))
    return Group(*parts)


def model_line(model: Json, now: float) -> Text:
    """Queue, rates of the latest steps, and the block pool of one model."""
    recent = [step for step in model["steps"] if now - step["time"] <= RATE_SECONDS]
    text = Text()
    text.append(f"{model['model']}  ", style="bold")
    text.append(f"running {model['num_running']}  waiting {model['num_waiting']}  ")
    if recent:
        span = max(now - min(step["time"] - step["measured"] for step in recent), 1e-3)
        num_tokens = sum(step["num_rows"] for step in recent)
        num_prefill = sum(step["num_prefill_tokens"] for step in recent)
        measured = sorted(step["measured"] for step in recent)
        text.append(
            f"steps/s {len(recent) / span:.1f}  decode tok/s {num_tokens / span:.1f}  "
            f"prefill tok/s {num_prefill / span:.1f}  step p50 {milliseconds(percentile(measured, 50))}  "
        )
    else:
        text.append("idle  ")
    blocks = model["blocks"]
    if blocks["max"]:
        used, cached, largest = blocks["used"], blocks["cached"], blocks["max"]
        text.append("blocks [")
        width = BAR_WIDTH
        for count, style, letter in ((used, "green", "#"), (cached, "cyan", "=")):
            # What is there shows, however little it is of the whole.
            cells = min(width, math.ceil(BAR_WIDTH * count / largest))
            text.append(letter * cells, style=style)
            width -= cells
        text.append("." * width)
        text.append(f"] {used} used, {cached} cached of {largest}")
    return text


def percentiles_table(done: Sequence[Json]) -> Table:
    """Of the requests that ended well and are remembered."""
    whole = [row for row in done if row["outcome"] in ("stop", "length")]
    values = {
        "TTFT": [row["ttft"] for row in whole if row["ttft"] is not None],
        "TPOT": [
            row["stages"]["decode"] / (row["num_generated_tokens"] - 1)
            for row in whole
            if row["num_generated_tokens"] > 1
        ],
        "E2E": [row["total"] for row in whole],
        "queue": [row["stages"]["queue"] for row in whole],
    }
    table = Table(box=None, pad_edge=False)
    table.add_column(f"{len(whole)} done")
    for number in PERCENTILES:
        table.add_column(f"p{number}", justify="right")
    for name, numbers in values.items():
        numbers.sort()
        cells = [milliseconds(percentile(numbers, number)) if numbers else "-" for number in PERCENTILES]
        table.add_row(name, *cells)
    return table


def legend() -> Text:
    text = Text("stages: ")
    for name, (style, letter) in STAGES.items():
        text.append(f"{letter} {name.replace('_', ' ')}  ", style=style)
    return text


def requests_table(rows: Sequence[Json]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("request", "state", "stages"):
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for name in ("total", "TTFT", "prompt", "cached", "out", "preempted"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            escape(_printable(row["id"])[:24]),
            escape(_printable(row["outcome"] or row["state"] if row["state"] == "done" else row["state"])),
            stage_bar(row["stages"], BAR_WIDTH),
            milliseconds(row["total"]),
            "-" if row["ttft"] is None else milliseconds(row["ttft"]),
            str(row["num_prompt_tokens"]),
            str(row["num_cached_tokens"]),
            str(row["num_generated_tokens"]),
            str(row["num_preemptions"] or ""),
        )
    return table


def stage_bar(stages: dict[str, float], width: int) -> Text:
    """Each stage's share of the time so far. Every cell goes to the stage that its middle falls into."""
    total = sum(stages.values())
    text = Text()
    if total <= 0.0:
        return text
    ends: list[float] = []
    for name in STAGES:
        ends.append((ends[-1] if ends else 0.0) + stages[name] / total * width)
    looks = list(STAGES.values())
    for cell in range(width):
        stage = next((index for index, end in enumerate(ends) if cell + 0.5 < end), len(ends) - 1)
        style, letter = looks[stage]
        text.append(letter, style=style)
    return text


def percentile(ordered: Sequence[float], percent: float) -> float:
    """By nearest rank; of at least one number, in ascending order."""
    return ordered[max(math.ceil(len(ordered) * percent / 100), 1) - 1]


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"


def _printable(text: str) -> str:
    return "".join(character for character in text if character.isprintable())
