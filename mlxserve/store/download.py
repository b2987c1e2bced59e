"""Downloads from the Hugging Face hub into its own cache: resumed, verified, and one at a time for each repository.

huggingface_hub lays the snapshot out and knows the addresses; the blobs are fetched here, because its own downloads
begin anew after an interruption. A blob that is not whole lies beside the others under a name of its own; its size is
what any process that waits for it shows as progress.
"""

import errno
import fcntl
import glob
import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlxserve.errors import DownloadCancelled, DownloadError, MlxserveError
from mlxserve.store import repo_files
from mlxserve.store.download_plan import Plan, RemoteFile, check_disk, make_plan
from mlxserve.store.hub_errors import download_error
from mlxserve.store.model_source import HubRepo

logger = logging.getLogger(__name__)

ProgressCallback = Callable[[int, int], None]
"""Called with (bytes here, bytes in all)."""

LOCK_FILE = ".mlxserve-lock"
NUM_CONNECTIONS = 4
MAX_FRUITLESS_TRIES = 5
"""Times in a row that a connection may bring nothing before the download fails."""
RETRY_SECONDS = 0.5
POLL_SECONDS = 0.1


def pull(name: str, location: HubRepo, progress: ProgressCallback, cancelled: threading.Event) -> Path:
    """The snapshot's folder, with its files complete and verified.

    Two that want the same repository share one download, in this process and with others, and both see its progress.
    It ends early when all who want it have set `cancelled` or were interrupted; what it has brought is kept.

    Raises:
        DownloadError: the hub did not give the files, they cannot be used, or the disk has no room.
        DownloadCancelled: `cancelled` was set.
    """
    job = _join(name, location)
    try:
        while not job.done.wait(POLL_SECONDS):
            if cancelled.is_set():
                raise DownloadCancelled(f"the download of {location} was cancelled; it is resumed later", model=name)
            if (plan := job.plan) is not None:
                progress(plan.num_bytes_here(), plan.total)
    finally:
        job.leave()
    if job.error is not None:
        raise job.error
    if job.plan is None or job.folder is None:
        raise RuntimeError("a download ended without a result")
    progress(job.plan.total, job.plan.total)
    return job.folder


class _Job:
    """One download, on a thread of its own, and whoever waits for it."""

    def __init__(self, name: str, location: HubRepo) -> None:
        self.name = name
        self.location = location
        self.num_waiting = 0
        self.plan: Plan | None = None
        self.folder: Path | None = None
        self.error: MlxserveError | None = None
        self.cancelled = threading.Event()
        self.done = threading.Event()

    def run(self) -> None:
        try:
            self.folder = self._fetch()
        except MlxserveError as error:
            self.error = error
        except Exception as error:  # the hub's client raises those of its HTTP library, another in each version
            self.error = download_error(self.name, self.location, error)
        finally:
            with _lock:
                _jobs.pop(self.location, None)
            self.done.set()

    def leave(self) -> None:
        with _lock:
            self.num_waiting -= 1
            if self.num_waiting == 0:
                self.cancelled.set()

    def check(self) -> None:
        if self.cancelled.is_set():
            raise DownloadCancelled(f"the download of {self.location} was cancelled", model=self.name)

    def _fetch(self) -> Path:
        plan = make_plan(self.name, self.location)
        with _only_here(plan.blobs.parent / LOCK_FILE, self._wait_with(plan)):
            self.plan = plan
            _refuse_code(self, plan)
            _remove_damaged(plan)
            check_disk(self.name, plan)
            self._fetch_blobs(plan)
            return _lay_out(plan)

    def _fetch_blobs(self, plan: Plan) -> None:
        missing = deque(file for file in plan.files if not (plan.blobs / file.blob).exists())
        failures: list[Exception] = []

        def work() -> None:
            while not self.cancelled.is_set():
                try:
                    file = missing.popleft()
                except IndexError:
                    return
                try:
                    _fetch_blob(self, plan, file)
                except Exception as error:
                    failures.append(error)
                    # One failure ends them all: whoever waits should hear of it now.
                    self.cancelled.set()

        # No pool of executors: the interpreter waits for its threads when it ends, and these may wait for the network.
        threads = [threading.Thread(target=work, daemon=True) for _ in range(NUM_CONNECTIONS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        self.check()

    def _wait_with(self, plan: Plan) -> Callable[[], None]:
        """What to do while another process downloads the same: show how far it is."""

        def wait() -> None:
            self.check()
            self.plan = plan
            self.cancelled.wait(POLL_SECONDS)

        return wait


_lock = threading.Lock()
_jobs: dict[HubRepo, _Job] = {}
"""What this process is downloading."""


def _join(name: str, location: HubRepo) -> _Job:
    while True:
        with _lock:
            job = _jobs.get(location)
            if job is None:
                job = _jobs[location] = _Job(name, location)
                threading.Thread(target=job.run, name="mlxserve-download", daemon=True).start()
            if not job.cancelled.is_set():
                job.num_waiting += 1
                return job
        job.done.wait()


@contextmanager
def _only_here(file: Path, wait: Callable[[], None]) -> Iterator[None]:
    """Hold a lock file between processes; `wait` is called again and again while another one has it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                wait()
        yield


def _refuse_code(job: _Job, plan: Plan) -> None:
    """Look at config.json before anything large is fetched.

    Raises:
        DownloadError: the model needs code of its repository.
    """
    for file in plan.files:
        if file.name == "config.json":
            if not (plan.blobs / file.blob).exists():
                _fetch_blob(job, plan, file)
            try:
                config = json.loads((plan.blobs / file.blob).read_bytes())
            except (ValueError, RecursionError) as error:
                raise DownloadError(f"{plan.location}: config.json cannot be read: {error}", model=job.name) from error
            if isinstance(config, dict) and (reason := repo_files.needs_code(config)):
                raise DownloadError(f"{plan.location} cannot be used: it {reason}", model=job.name)


def _remove_damaged(plan: Plan) -> None:
    for file in plan.files:
        path = plan.blobs / file.blob
        if path.exists() and not file.is_in(path):
            logger.warning("%s of %s is damaged on this machine; fetching it again", file.name, plan.location)
            path.unlink()


def _fetch_blob(job: _Job, plan: Plan, file: RemoteFile) -> None:
    """Bring one blob, going on where an earlier try stopped.

    Raises:
        DownloadError: it comes damaged twice.
        DownloadCancelled: nobody wants it any more.
    """
    plan.blobs.mkdir(parents=True, exist_ok=True)
    partial = plan.partial(file)
    for _ in range(2):
        _receive_all(job, plan, file)
        if file.is_in(partial):
            partial.rename(plan.blobs / file.blob)
            return
        logger.warning("%s of %s came damaged; fetching it again", file.name, plan.location)
        partial.unlink()
    kind = "SHA-256" if file.is_lfs else "SHA-1"
    raise DownloadError(
        f"{file.name} of {plan.location} came damaged twice: it has not the {kind} {file.blob} that the hub tells; "
        "try again later, or check what stands between this machine and the hub",
        model=job.name,
    )


def _receive_all(job: _Job, plan: Plan, file: RemoteFile) -> None:
    from huggingface_hub.errors import HfHubHTTPError

    partial = plan.partial(file)
    num_fruitless = 0
    while True:
        job.check()
        start = partial.stat().st_size if partial.exists() else 0
        if start >= file.size > 0:
            return
        try:
            _receive(job, plan, file, start)
            if partial.stat().st_size >= file.size:
                return
            problem: Exception | None = None
        except MlxserveError:
            raise
        except HfHubHTTPError as error:
            if error.response.status_code < 500 and error.response.status_code not in (408, 429):
                raise
            problem = error
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
                raise
            problem = error
        came = (partial.stat().st_size if partial.exists() else 0) - start
        num_fruitless = 0 if came > 0 else num_fruitless + 1
        if num_fruitless >= MAX_FRUITLESS_TRIES:
            raise problem or OSError(f"{file.name} ends after {partial.stat().st_size} of {file.size} bytes")
        job.cancelled.wait(RETRY_SECONDS)


def _receive(job: _Job, plan: Plan, file: RemoteFile, start: int) -> None:
    """One request: append what comes to the partial file."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        get_session,
        hf_raise_for_status,
    )

    url = hf_hub_url(plan.location.repo, file.name, revision=plan.commit)
    # Compressed, the bytes would not be those that a range counts.
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=30) as response:
        hf_raise_for_status(response)
        # 206: the rest, as asked for. Anything else is the whole file.
        with plan.partial(file).open("ab" if response.status_code == 206 else "wb") as stream:
            # As they come: what a larger chunk had gathered would be lost with the connection.
            for chunk in response.iter_bytes():
                stream.write(chunk)
                stream.flush()
                job.check()


def _lay_out(plan: Plan) -> Path:
    """The snapshot's folder, made of links to the blobs that are here."""
    from huggingface_hub import snapshot_download

    names = [glob.escape(file.name) for file in plan.files]
    return Path(
        snapshot_download(
            plan.location.repo, revision=plan.location.revision, allow_patterns=names, tqdm_class=_silent_bar()
        )
    )


def _silent_bar() -> type:
    """A tqdm that shows nothing."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    class Silent(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": True})

    return Silent
