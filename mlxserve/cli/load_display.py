"""What is seen on stderr while a model is downloaded and loaded."""

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from mlxserve.cli.console import notice, open_rich, spinner
from mlxserve.cli.model_view import size

if TYPE_CHECKING:
    from rich.progress import Progress


TELL_SECONDS = 5.0
"""Where there is no spinner: what takes longer than this gets a line."""


class LoadDisplay:
    """A spinner, and a bar for a download; where stderr is no terminal, a line if it takes long, and one for each
    tenth of a download."""

    def __init__(self) -> None:
        self._name = ""
        self._shown = ExitStack()
        self._bar: Progress | None = None
        self._tenths_told = 0

    @contextmanager
    def loading(self, name: str, doing: str = "loading") -> Iterator[None]:
        """Show what is done with `name` while the block runs."""
        self._name = name
        self._shown.enter_context(spinner(f"{doing} {name}"))
        if not sys.stderr.isatty():
            self._shown.enter_context(_told_after(TELL_SECONDS, f"{doing} {name} ..."))
        try:
            yield
        finally:
            self._shown.close()
            self._bar = None
            self._tenths_told = 0

    def progress(self, num_bytes: int, total_bytes: int) -> None:
        """Show how far the download is. Any thread may call this."""
        if sys.stderr.isatty():
            self._show_bar(num_bytes, total_bytes)
        elif total_bytes and num_bytes * 10 // total_bytes > self._tenths_told:
            self._tenths_told = num_bytes * 10 // total_bytes
            notice(f"downloading {self._name}: {self._tenths_told * 10} % of {size(total_bytes)}")

    def _show_bar(self, num_bytes: int, total_bytes: int) -> None:
        if self._bar is None:
            # Not at the top: rich takes long to import, and most runs download nothing.
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
            from rich.progress import TransferSpeedColumn as SpeedColumn

            self._shown.close()
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                SpeedColumn(),
                TimeRemainingColumn(),
            )
            self._bar = self._shown.enter_context(Progress(*columns, console=open_rich(stderr=True)))
            # What is here already must not count as speed.
            self._bar.add_task(f"downloading {self._name}", completed=num_bytes, total=total_bytes or None)
        task = self._bar.tasks[0]
        self._bar.update(task.id, completed=num_bytes, total=total_bytes or None)


@contextmanager
def _told_after(seconds: float, text: str) -> Iterator[None]:
    timer = threading.Timer(seconds, notice, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
