"""The folder of KV blocks on disk: `<model key>/<block hash>.safetensors`, used by one process at a time.

Only files of such names are touched. A file is written under a name of its own and renamed when it is whole, so that
one of its last name is whole, whenever the process was killed.
"""

import fcntl
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mlxserve.store.block_file import MAX_HEADER_BYTES, BadBlockFile, read_header

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"
SUFFIX = ".safetensors"
PARTIAL_SUFFIX = ".partial"
_HASH = re.compile("[0-9a-f]{32}")


class FolderInUse(Exception):
    """Another process has the folder."""


class NameTaken(Exception):
    """A file that is not ours has the name of a block."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    model: str
    name: bytes
    parent: bytes
    num_bytes: int


class BlockFolder:
    """Made by open(). Methods raise OSError for whatever the file system says; they may be called from any thread."""

    def __init__(self, root: Path, lock: BinaryIO) -> None:
        self.root = root
        self._lock = lock

    @classmethod
    def open(cls, root: Path) -> "BlockFolder":
        """Make the folder, readable for its owner only, and lock it.

        Raises:
            FolderInUse: another process holds the lock.
            OSError: the folder cannot be made or written to.
        """
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (root / LOCK_FILE).open("wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise FolderInUse(f"{root} is in use by another process") from None
        except OSError:
            lock.close()
            raise
        return cls(root, lock)

    def close(self) -> None:
        """Let others have the folder."""
        self._lock.close()

    def scan(self) -> list[StoredBlock]:
        """All blocks, the one that was used longest ago first.

        Removes what a killed process left unfinished, and damaged files; a line in the log tells of them, and of files
        that are not ours and stay.
        """
        found: list[tuple[float, StoredBlock]] = []
        ignored: list[str] = []
        for folder in sorted(self.root.iterdir()):
            if not _HASH.fullmatch(folder.name) or not folder.is_dir():
                continue
            for path in sorted(folder.iterdir()):
                stem = path.name.removesuffix(PARTIAL_SUFFIX)
                if not _HASH.fullmatch(stem.removesuffix(SUFFIX)) or stem == stem.removesuffix(SUFFIX):
                    continue
                if stem != path.name:
                    path.unlink()
                    continue
                try:
                    found.append(_inspect(path))
                except BadBlockFile as bad:
                    ignored.append(f"{path}: {bad}")
                    if not bad.is_foreign:
                        path.unlink()
        if ignored:
            logger.warning("ignoring %d files among the KV blocks on disk, first %s", len(ignored), ignored[0])
        return [block for _, block in sorted(found, key=lambda each: each[0])]

    def write(self, model: str, name: bytes, parts: Sequence[bytes | memoryview]) -> None:
        """Write a block that is not there.

        Raises:
            NameTaken: a file of that name is there, and is not ours.
        """
        path = self._path(model, name)
        partial = path.with_name(path.name + PARTIAL_SUFFIX)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", buffering=0) as file:
                for part in parts:
                    _write_all(file, part)
            # Only this process writes here: nobody makes the file between this look and the renaming.
            if path.exists():
                raise NameTaken(f"{path} is there already, and not ours")
            partial.rename(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def read(self, model: str, name: bytes) -> memoryview:
        """The bytes of a file. It counts as used now."""
        path = self._path(model, name)
        with path.open("rb", buffering=0) as file:
            content = bytearray(os.fstat(file.fileno()).st_size)
            view, num_read = memoryview(content), 0
            while num_read < len(content) and (count := file.readinto(view[num_read:])):
                num_read += count
        os.utime(path)
        return view[:num_read]

    def remove(self, model: str, name: bytes) -> None:
        self._path(model, name).unlink(missing_ok=True)

    def _path(self, model: str, name: bytes) -> Path:
        return self.root / model / (name.hex() + SUFFIX)


def _inspect(path: Path) -> tuple[float, StoredBlock]:
    """When a block was last used, and what its header says. The rest of the file is checked when it is read.

    Raises:
        BadBlockFile: it cannot be the block that its name says.
    """
    try:
        status = path.stat()
        with path.open("rb") as file:
            head = file.read(8)
            header = read_header(head + file.read(min(int.from_bytes(head, "little"), MAX_HEADER_BYTES)))
    except OSError as error:
        raise BadBlockFile(str(error), is_foreign=True) from error
    if header.model != path.parent.name:
        raise BadBlockFile("it is another model's")
    if header.name != path.name.removesuffix(SUFFIX):
        raise BadBlockFile(f"it holds the block {header.name}")
    if header.file_size != status.st_size:
        raise BadBlockFile(f"it has {status.st_size} bytes and not {header.file_size}")
    block = StoredBlock(header.model, bytes.fromhex(header.name), bytes.fromhex(header.parent), status.st_size)
    return status.st_mtime, block


def _write_all(file: BinaryIO, part: bytes | memoryview) -> None:
    view = memoryview(part).cast("B")
    while view:
        view = view[file.write(view) :]
