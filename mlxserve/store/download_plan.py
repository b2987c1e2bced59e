"""What a download brings: the files of a revision that make a model, and where they go in the hub's cache."""

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from mlxserve.errors import DownloadError, UnusableRepository
from mlxserve.store import repo_files
from mlxserve.store.model_source import HubRepo
from mlxserve.store.size_text import size_text

PARTIAL_SUFFIX = ".mlxserve-partial"
CHUNK_BYTES = 1 << 20
FREE_BYTES = 100 * 10**6
"""Left on the disk."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    name: str
    size: int
    blob: str
    """Name of its blob in the cache: the SHA-256 of a large file (in LFS), git's SHA-1 of another."""
    is_lfs: bool

    def is_in(self, path: Path) -> bool:
        """Whether a file on disk has exactly this content."""
        if path.stat().st_size != self.size:
            return False
        digest = hashlib.sha256() if self.is_lfs else hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)
        with path.open("rb") as stream:
            while chunk := stream.read(CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest() == self.blob


@dataclass(frozen=True, slots=True)
class Plan:
    """The files of a revision that make a model, and where they go."""

    location: HubRepo
    commit: str
    files: tuple[RemoteFile, ...]
    blobs: Path

    @property
    def total(self) -> int:
        return sum(file.size for file in self.files)

    def num_bytes_here(self) -> int:
        """Bytes that are on disk by now, whoever fetched them."""
        return sum(min(self._num_bytes_of(file), file.size) for file in self.files)

    def partial(self, file: RemoteFile) -> Path:
        return self.blobs / (file.blob + PARTIAL_SUFFIX)

    def _num_bytes_of(self, file: RemoteFile) -> int:
        for path in (self.blobs / file.blob, self.partial(file)):
            try:
                return path.stat().st_size
            except OSError:
                continue
        return 0


def cache_folder() -> Path:
    """The hub's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def repo_folder(repo: str) -> Path:
    return cache_folder() / f"models--{repo.replace('/', '--')}"


def remove_partials(repo: str) -> int:
    """Remove what interrupted downloads left; the bytes that frees."""
    freed = 0
    for path in (repo_folder(repo) / "blobs").glob("*" + PARTIAL_SUFFIX):
        freed += path.stat().st_size
        path.unlink()
    return freed


def make_plan(name: str, location: HubRepo) -> Plan:
    """Ask the hub which files there are.

    Raises:
        UnusableRepository: they make no model that can be used.
        Exception: whatever the hub's client raises.
    """
    from huggingface_hub import HfApi

    info = HfApi().model_info(location.repo, revision=location.revision, files_metadata=True)
    siblings = info.siblings or []
    names = [file.rfilename for file in siblings]
    reason = repo_files.adapter_refusal(names) if location.is_adapter else repo_files.refusal(names, location.gguf)
    if reason is not None:
        raise UnusableRepository(f"{location} cannot be used: it {reason}", model=name)
    wanted = set(repo_files.wanted_adapter(names) if location.is_adapter else repo_files.wanted(names, location.gguf))
    architecture = (info.gguf or {}).get("architecture")
    is_gguf = any(file.endswith(".gguf") for file in wanted)
    if is_gguf and architecture and (reason := repo_files.gguf_refusal(architecture)):
        raise UnusableRepository(f"{location} cannot be used: {reason}", model=name)
    files = []
    for file in siblings:
        if file.rfilename not in wanted:
            continue
        blob = file.lfs.sha256 if file.lfs is not None else file.blob_id
        size = file.lfs.size if file.lfs is not None else file.size
        if blob is None or size is None or info.sha is None:
            raise DownloadError(f"the hub does not tell size and hash of {file.rfilename} in {location}", model=name)
        files.append(RemoteFile(file.rfilename, size, blob, file.lfs is not None))
    return Plan(location, info.sha or "", tuple(files), repo_folder(location.repo) / "blobs")


def check_disk(name: str, plan: Plan) -> None:
    """Raises DownloadError, with both numbers, if what is still to come does not fit on the disk."""
    needed = plan.total - plan.num_bytes_here()
    free = shutil.disk_usage(plan.blobs.parent).free
    if needed and needed + FREE_BYTES > free:
        raise DownloadError(
            f"{plan.location} needs {size_text(needed)} more and the disk of {cache_folder()} has "
            f"{size_text(free)} free; make room (mlxserve list, mlxserve rm), or set HF_HOME to a larger disk",
            model=name,
        )
