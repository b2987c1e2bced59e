"""Tables as the commands that list something print them: columns of text, no lines."""

from collections.abc import Sequence


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Left-aligned columns, four blanks apart."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        print("    ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
