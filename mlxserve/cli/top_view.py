"""One frame of `mlxserve top`, from what /debug/requests and /debug/steps say."""

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
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
MIN_BAR_WIDTH = 4
RATE_SECONDS = 5.0
"""Rates are over the latest steps, this far back at most."""
MIN_REQUESTS = 3
"""Shown whatever the number of models."""
ID_WIDTH = 24
MODEL_WIDTH = 20
STATE_WIDTH = 10
MIN_TEXT_WIDTH = 8
NUMBER_WIDTHS = {"total": 7, "TTFT": 7, "prompt": 6, "cached": 6, "out": 5}
"""Of a request, and the columns of the terminal that each takes."""
LESS_IMPORTANT = ("cached", "prompt", "preempted", "out", "total", "TTFT")
"""Numbers that a narrow terminal has no room for, in the order in which they go."""
PERCENTILES = (50, 95, 99)

Json = dict[str, Any]


def frame(requests: Json, steps: Json, console: Console, title: str) -> RenderableType:
    """As much as the console has lines for; `title` is the first one. The requests are a moment older than the steps,
    so that a model of theirs may be gone.
    """
    rows = requests["requests"]
    live = [row for row in rows if row["state"] != "done"]
    head = Text(f"mlxserve top - {title}", style="bold")
    below: list[RenderableType] = [percentiles_table([row for row in rows if row["state"] == "done"]), legend()]
    # Two lines are the requests' titles and what they leave out.
    room = console.height - sum(_num_lines(part, console) for part in [head, *below]) - 2
    models = _model_lines(steps, live, console, room - MIN_REQUESTS)
    room = max(room - sum(_num_lines(line, console) for line in models), MIN_REQUESTS)
    table = requests_table(rows[:room], console.width, with_model=_num_models(rows) > 1)
    parts: list[RenderableType] = [head, *models, *below, table]
    if len(rows) > room:
        parts.append(Text(f"... and {len(rows) - room} more ({len(live)} under way)"))
    return Group(*parts)


def _model_lines(steps: Json, live: Sequence[Json], console: Console, room: int) -> list[Text]:
    """A text for each model that fits into so many lines, and for one in any case; then how many are left out."""
    models = steps["models"]
    if not models:
        waiting = [row["model"] for row in live if row["state"] == "loading"]
        names = ", ".join(dict.fromkeys(map(_printable, waiting)))
        return [Text(f"loading {names}  waiting {len(waiting)}" if waiting else "no model is loaded")]
    texts: list[Text] = []
    for index, model in enumerate(models):
        text = model_line(model, steps["now"], console.width)
        room -= _num_lines(text, console)
        num_left = len(models) - index
        if texts and room < (1 if num_left > 1 else 0):
            texts.append(Text(f"... and {num_left} more models"))
            break
        texts.append(text)
    return texts


def _num_lines(part: RenderableType, console: Console) -> int:
    return len(console.render_lines(part))


def _num_models(rows: Sequence[Json]) -> int:
    return len({row["model"] for row in rows})


def model_line(model: Json, now: float, width: int) -> Text:
    """Queue, rates of the latest steps, and the block pool of one model; that whole on a line of so many columns."""
    recent = [step for step in model["steps"] if now - step["time"] <= RATE_SECONDS]
    text = Text()
    text.append(f"{_printable(model['model'])}  ", style="bold")
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
        before, after = "blocks [", f"] {used} used, {cached} cached of {largest}"
        bar = min(BAR_WIDTH, max(width - len(before) - len(after), MIN_BAR_WIDTH))
        if text.cell_len + len(before) + bar + len(after) > width:
            text.rstrip()
            text.append("\n")
        text.append(before)
        left = bar
        for count, style, letter in ((used, "green", "#"), (cached, "cyan", "=")):
            # What is there shows, however little it is of the whole.
            cells = min(left, math.ceil(bar * count / largest))
            text.append(letter * cells, style=style)
            left -= cells
        text.append("." * left + after)
    return text


def percentiles_table(done: Sequence[Json]) -> Table:
    """Of the requests that ended well and are remembered. What gave no tokens, such as an embedding, stands apart."""
    well = [row for row in done if row["outcome"] in ("stop", "length")]
    answers = [row for row in well if row["num_generated_tokens"] > 0]
    others = [row for row in well if row["num_generated_tokens"] == 0]
    values = {
        "TTFT": [row["ttft"] for row in answers if row["ttft"] is not None],
        "TPOT": [
            row["stages"]["decode"] / (row["num_generated_tokens"] - 1)
            for row in answers
            if row["num_generated_tokens"] > 1
        ],
        "E2E": [row["total"] for row in answers],
        "queue": [row["stages"]["queue"] for row in answers],
    }
    if others:
        values[f"E2E of {len(others)} without tokens"] = [row["total"] for row in others]
    table = Table(box=None, pad_edge=False)
    of_models = f" of {_num_models(well)} models" if _num_models(well) > 1 else ""
    table.add_column(f"{len(answers)} {'answer' if len(answers) == 1 else 'answers'}{of_models}")
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


def requests_table(rows: Sequence[Json], width: int, *, with_model: bool = False) -> Table:
    """One line each, in a terminal of so many columns. What the numbers leave of them, ids, models and bars share."""
    numbers = NUMBER_WIDTHS | ({"preempted": 9} if any(row["num_preemptions"] for row in rows) else {})
    num_texts = 3 if with_model else 2

    # Each column has one of space behind it.
    def room_beside() -> int:
        return width - STATE_WIDTH - sum(numbers.values()) - len(numbers) - num_texts

    for name in LESS_IMPORTANT:
        if room_beside() < num_texts * MIN_TEXT_WIDTH:
            numbers.pop(name, None)
    room = room_beside()
    share = max(room // num_texts, MIN_TEXT_WIDTH)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("request", *(("model",) if with_model else ()), "state", "stages"):
        table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=STATE_WIDTH if name == "state" else None)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = {
            "total": milliseconds(row["total"]),
            "TTFT": "-" if row["ttft"] is None else milliseconds(row["ttft"]),
            "prompt": str(row["num_prompt_tokens"]),
            "cached": str(row["num_cached_tokens"]),
            "out": str(row["num_generated_tokens"]),
            "preempted": str(row["num_preemptions"] or ""),
        }
        table.add_row(
            escape(_shortened(_printable(row["id"]), min(share, ID_WIDTH))),
            *((escape(_shortened(_printable(row["model"]), min(share, MODEL_WIDTH))),) if with_model else ()),
            escape(_printable(row["outcome"] or row["state"] if row["state"] == "done" else row["state"])),
            stage_bar(row["stages"], min(share, BAR_WIDTH)),
            *(cells[name] for name in numbers),
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


def _shortened(text: str, width: int) -> str:
    """With its end, in which ids of one request's inputs and quantisations of one model differ."""
    num_last = width // 3
    return text if len(text) <= width else f"{text[: width - num_last - 1]}…{text[-num_last:]}"


def _printable(text: str) -> str:
    return "".join(character for character in text if character.isprintable())
