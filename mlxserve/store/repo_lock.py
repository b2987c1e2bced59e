"""One at a time, in any process, fetches or removes a repository of the hub's cache."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

LOCK_FILE = ".mlxserve-lock"


@contextmanager
def repo_lock(folder: Path, wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a repository's folder, which is made if it is not there.

    `wait` is called again and again while another one has it; what it raises ends that.
    """
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = (folder / LOCK_FILE).open("w")
        except FileNotFoundError:  # removed in between
            continue
        with lock:
            if _is_taken(lock, folder / LOCK_FILE):
                yield
                return
        wait()


def _is_taken(lock: TextIO, file: Path) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Who removes a repository removes this file with it, and who waited for it holds nothing then.
        return os.path.samestat(os.fstat(lock.fileno()), file.stat())
    except (BlockingIOError, FileNotFoundError):
        return False
