"""What `mlxserve run` reads and writes: answers on stdout, everything else on stderr."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from mlxserve.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

# C0 and C1 controls except tab and newline: an answer must not be able to move the cursor or retitle the window.
_CONTROLS = {code: None for code in [*range(0x20), 0x7F, *range(0x80, 0xA0)] if chr(code) not in "\t\n"}


def write_answer(text: str) -> None:
    """Write a piece of an answer to stdout at once; bytes as they are to a file or pipe, no controls to a terminal."""
    sys.stdout.write(clean(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def write_dimmed(text: str) -> None:
    """Write clean text to stdout at once, less bright than an answer where stdout is a terminal that can."""
    dims = sys.stdout.isatty() and not is_plain()
    sys.stdout.write(f"\x1b[2m{text}\x1b[0m" if dims and text else text)
    sys.stdout.flush()


def clean(text: str) -> str:
    """The text without control characters."""
    return text.translate(_CONTROLS)


def is_dumb_terminal() -> bool:
    """Whether TERM says that escape sequences would only litter the screen."""
    return os.environ.get("TERM", "").lower() in ("", "dumb", "unknown")


def is_plain() -> bool:
    """Whether nothing is to be coloured, bold or dimmed: NO_COLOR (https://no-color.org), or a terminal that cannot."""
    return bool(os.environ.get("NO_COLOR")) or is_dumb_terminal()


def open_rich(*, stderr: bool = False, **options: Any) -> "Console":
    """A console of rich's that keeps to is_plain()."""
    # Not at the top: rich takes long to import.
    from rich.console import Console

    # rich's own idea of NO_COLOR leaves bold and dim.
    return Console(stderr=stderr, color_system=None if is_plain() else "auto", **options)


def notice(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    notice(f"Warning: {text}")


def read_stdin() -> str | None:
    """What was piped in, as text; None when stdin is a terminal or closed. Bytes that are not UTF-8 become U+FFFD."""
    if sys.stdin is None or sys.stdin.isatty():
        return None
    return sys.stdin.buffer.read().decode("utf-8", errors="replace").removeprefix("\ufeff")


def interactive() -> bool:
    """Whether somebody sits at both ends."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def make_stdout_lenient() -> None:
    """Let text that the terminal's encoding lacks come out as `?` instead of ending the program.

    Raises:
        ConfigError: stdout is closed.
    """
    if sys.stdout is None:
        raise ConfigError("standard output is closed; there is nowhere to write the answer to")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]


def abandon_stdout() -> None:
    """After a broken pipe: point stdout elsewhere, or Python complains when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_stdout_broken() -> bool:
    """Whether stdout takes nothing any more, as on a full disk; if so it is pointed elsewhere."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        abandon_stdout()
        return True
    return False


def leave(code: int) -> NoReturn:
    """Exit now, without waiting for threads: a download or a load in one of them cannot be interrupted."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


@contextmanager
def spinner(text: str) -> Iterator[None]:
    """A spinner on stderr while the block runs, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    with open_rich(stderr=True).status(text):
        yield
