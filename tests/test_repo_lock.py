"""Who fetches or removes a repository: one at a time."""

import shutil
import threading
from pathlib import Path

import pytest

from mlxserve.store.repo_lock import LOCK_FILE, repo_lock


class Refused(Exception):
    pass


def refuse() -> None:
    raise Refused


def test_the_second_one_waits_or_gives_up(tmp_path: Path) -> None:
    folder = tmp_path / "repo"
    with repo_lock(folder, refuse), pytest.raises(Refused), repo_lock(folder, refuse):
        pass
    with repo_lock(folder, refuse):
        assert (folder / LOCK_FILE).exists()


def test_who_waited_for_what_was_removed_holds_the_new_one(tmp_path: Path) -> None:
    folder = tmp_path / "repo"
    is_waiting, may_end = threading.Event(), threading.Event()
    held: list[bool] = []

    def wait() -> None:
        is_waiting.set()
        may_end.wait(10)

    def take() -> None:
        with repo_lock(folder, wait):
            try:
                with repo_lock(folder, refuse):
                    held.append(False)
            except Refused:
                held.append((folder / LOCK_FILE).exists())

    thread = threading.Thread(target=take)
    with repo_lock(folder, refuse):
        thread.start()
        assert is_waiting.wait(10)
        shutil.rmtree(folder)
    may_end.set()
    thread.join(10)
    assert held == [True]
