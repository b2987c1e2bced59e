"""A report as blocks, written out as Markdown and as one HTML page that needs nothing else but its plots."""

import html
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Heading:
    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Paragraph:
    text: str
    """`code` and **bold** are understood, nothing else."""


@dataclass(frozen=True, slots=True)
class Bullets:
    items: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Picture:
    file: str
    """Relative to the report."""
    caption: str


Block = Heading | Paragraph | Bullets | Table | Picture

STYLE = """\
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; display: block; overflow-x: auto; font-variant-numeric: tabular-nums }
th, td { border: 1px solid #8886; padding: .25rem .6rem; text-align: right }
th:first-child, td:first-child { text-align: left }
img { max-width: 100%; background: #fff }
code { background: #8882; padding: 0 .2em }"""


def write(folder: Path, blocks: list[Block], name: str = "report") -> None:
    """NAME.md and NAME.html."""
    (folder / f"{name}.md").write_text(markdown(blocks), encoding="utf-8")
    (folder / f"{name}.html").write_text(page(blocks), encoding="utf-8")


def markdown(blocks: Iterable[Block]) -> str:
    return "\n\n".join("\n".join(_markdown(block)) for block in blocks) + "\n"


def page(blocks: list[Block]) -> str:
    """The blocks as an HTML document; its title is the first heading."""
    title = next((block.text for block in blocks if isinstance(block, Heading)), "Report")
    body = "\n".join(line for block in blocks for line in _html(block))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def line(cells: Iterable[str]) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _markdown(block: Block) -> Iterator[str]:
    match block:
        case Heading(level, text):
            yield f"{'#' * level} {text}"
        case Paragraph(text):
            yield text
        case Bullets(items):
            yield from (f"- {item}" for item in items)
        case Table(head, rows):
            yield line(head)
            yield "|---" * len(head) + "|"
            yield from map(line, rows)
        case Picture(file, caption):
            yield f"![{caption}]({file})"


def _html(block: Block) -> Iterator[str]:
    match block:
        case Heading(level, text):
            yield f"<h{level}>{_inline(text)}</h{level}>"
        case Paragraph(text):
            yield f"<p>{_inline(text)}</p>"
        case Bullets(items):
            yield "<ul>"
            yield from (f"<li>{_inline(item)}</li>" for item in items)
            yield "</ul>"
        case Table(head, rows):
            yield "<table>"
            yield f"<tr>{''.join(f'<th>{_inline(cell)}</th>' for cell in head)}</tr>"
            yield from (f"<tr>{''.join(f'<td>{_inline(cell)}</td>' for cell in row)}</tr>" for row in rows)
            yield "</table>"
        case Picture(file, caption):
            yield f'<p><img src="{html.escape(file)}" alt="{html.escape(caption)}"></p>'


def _inline(text: str) -> str:
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
    return re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", text)
