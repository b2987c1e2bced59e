"""Downloads from the Hugging Face hub into its own cache: resumed, verified, and one at a time for each repository.

huggingface_hub lays the snapshot out and knows the addresses; the blobs are fetched here, because its own downloads
begin anew after an interruption. A blob that is not whole lies beside the others under a name of its own; its size is
what any process that waits for it shows as progress.
"""

import errno
import glob
import json
import logging
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlxserve.errors import DownloadCancelled, DownloadError, MlxserveError, UnusableRepository
from mlxserve.store import model_facts, repo_files
from mlxserve.store.download_plan import Plan, RemoteFile, check_disk, make_plan
from mlxserve.store.gguf_file import BadGguf, GgufFile
from mlxserve.store.hub_errors import download_error
from mlxserve.store.model_source import HubRepo
from mlxserve.store.repo_lock import repo_lock

logger = logging.getLogger(__name__)

ProgressCallback = Callable[[int, int], None]
"""Called with (bytes here, bytes in all)."""

NUM_CONNECTIONS = 4
MAX_FRUITLESS_TRIES = 5
"""Times in a row that a connection may bring nothing before the download fails."""
RETRY_SECONDS = 0.5
POLL_SECONDS = 0.1
HEAD_BYTES = 16 << 20
"""Of a GGUF file, looked at before the rest is fetched: most have their header in them."""


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
        with repo_lock(plan.blobs.parent, self._wait_with(plan)):
            self.plan = plan
            _remove_damaged(plan)
            _refuse_unusable(self, plan)
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


def _refuse_unusable(job: _Job, plan: Plan) -> None:
    """Look at what is small, and at the head of a GGUF file, before anything large is fetched.

    Raises:
        UnusableRepository: the model could not be loaded.
    """
    names = {file.name for file in plan.files}
    for file in plan.files:
        reason = None
        if file.name == "config.json":
            reason = repo_files.config_refusal(_fetch_json(job, plan, file))
        elif file.name == repo_files.INDEX:
            reason = repo_files.index_refusal(_fetch_json(job, plan, file), names)
        elif file.name.endswith(".gguf"):
            reason = _gguf_refusal(job, plan, file)
        if reason is not None:
            raise UnusableRepository(f"{plan.location} cannot be used: it {reason}", model=job.name)


def _fetch_json(job: _Job, plan: Plan, file: RemoteFile) -> Any:
    if not (plan.blobs / file.blob).exists():
        _fetch_blob(job, plan, file)
    try:
        return json.loads((plan.blobs / file.blob).read_bytes())
    except (ValueError, RecursionError) as error:
        raise UnusableRepository(
            f"{plan.location} cannot be used: {file.name} is broken on the hub itself ({error})", model=job.name
        ) from error


def _gguf_refusal(job: _Job, plan: Plan, file: RemoteFile) -> str | None:
    """Why a GGUF file cannot be used, after the words `it`; what has come of such a one is removed."""
    blob, partial = plan.blobs / file.blob, plan.partial(file)
    num_bytes = min(HEAD_BYTES, file.size)
    has_failed = False
    while True:
        if not blob.exists():
            _receive_all(job, plan, file, num_bytes)
        try:
            head = GgufFile.parse(blob if blob.exists() else partial, model=job.name, size=file.size)
            architecture = head.metadata.get("general.architecture")
            reason = model_facts.unreadable(str(architecture), model_facts.unreadable_types(head))
            if reason is None:
                return None
            reason = f"has {file.name}: {reason}"
        except EOFError:
            num_bytes = min(2 * num_bytes, file.size)
            continue
        except BadGguf as error:
            reason = f"has {file.name}, which is broken on the hub itself: {error}"
            if not has_failed and not blob.exists():
                # Nothing is verified yet: it may have been damaged on its way.
                has_failed = True
                partial.unlink()
                continue
        partial.unlink(missing_ok=True)
        return reason


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
    partial = plan.partial(file)
    for is_first in (True, False):
        _receive_all(job, plan, file, file.size)
        if file.is_in(partial):
            partial.rename(plan.blobs / file.blob)
            return
        if is_first:
            logger.warning("%s of %s came damaged; fetching it again", file.name, plan.location)
        partial.unlink()
    kind = "SHA-256" if file.is_lfs else "SHA-1"
    raise DownloadError(
        f"{file.name} of {plan.location} came damaged twice: it has not the {kind} {file.blob} that the hub tells; "
        "try again later, or check what stands between this machine and the hub",
        model=job.name,
    )


def _receive_all(job: _Job, plan: Plan, file: RemoteFile, num_bytes: int) -> None:
    """Have so many bytes of a file, at least, in its partial file."""
    from huggingface_hub.errors import HfHubHTTPError

    plan.blobs.mkdir(parents=True, exist_ok=True)
    partial = plan.partial(file)
    num_fruitless = 0
    while True:
        job.check()
        start = partial.stat().st_size if partial.exists() else 0
        if start >= num_bytes > 0:
            return
        try:
            _receive(job, plan, file, start, num_bytes)
            if partial.stat().st_size >= num_bytes:
                return
            problem: Exception | None = None
        except MlxserveError:
            raise
        except HfHubHTTPError as error:
            if error.response.status_code == 416:
                raise DownloadError(
                    f"{file.name} of {plan.location} ends after {start} bytes, and the hub says {file.size}: the "
                    "repository is broken, or just being changed; try again later",
                    model=job.name,
                ) from error
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


def _receive(job: _Job, plan: Plan, file: RemoteFile, start: int, num_bytes: int) -> None:
    """One request: append what comes to the partial file, until it has so many bytes or more."""
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
                if num_bytes < file.size and stream.tell() >= num_bytes:
                    return


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
