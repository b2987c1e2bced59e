"""The KV blocks on disk: one folder and two threads for all models of a process.

engine thread                                   the two threads
-------------                                   ---------------
ModelDisk.read()  ---------- reads ------->     read a file, check it
ModelDisk.give()  ---------- writes ------>     remove what must go, write a file
KVDisk.poll()     <------- finished -------     then wake the engine thread

The index belongs to the engine thread, which knows of a removal before it is done and of a file after it is written.
Removals and writes are done in the order in which they were decided, so the folder never exceeds its bound.
"""

import functools
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlxserve.core.block_data import BlockData
from mlxserve.core.stats import DiskStats
from mlxserve.core.step import BlockSave
from mlxserve.errors import EngineError
from mlxserve.kv.block_hash import BlockHash
from mlxserve.kv.disk_index import DiskIndex, DiskKey
from mlxserve.store.block_file import BadBlockFile, BlockFormat
from mlxserve.store.block_folder import BlockFolder, FolderInUse, NameTaken

logger = logging.getLogger(__name__)

MAX_WRITES = 8
"""Blocks of a model that wait in memory to be written; while there are so many, none is saved."""


@dataclass(frozen=True, slots=True)
class _Read:
    disk: "ModelDisk"
    name: BlockHash


@dataclass(frozen=True, slots=True)
class _Write:
    disk: "ModelDisk"
    name: BlockHash
    parent: bytes
    data: BlockData
    removed: tuple[DiskKey, ...]
    """To be removed first."""


@dataclass(frozen=True, slots=True)
class _Finished:
    job: "_Read | _Write"
    data: BlockData | None = None
    """Of a read that is right."""
    is_error: bool = False


class KVDisk:
    """Made by open_kv_disk(). open_model() and everything of ModelDisk belong to the engine thread."""

    def __init__(self, folder: BlockFolder | None, index: DiskIndex, failure: str | None, wake: Callable[[], None]):
        """`folder`: scanned into `index`; None with the reason in `failure`. `wake` is called from other threads."""
        self._folder = folder
        self._index = index
        self._wake = wake
        self.failure = failure
        """Why nothing is read and written any more; None while all is well."""
        self._reads: queue.SimpleQueue[_Read | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[_Finished] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._failing = threading.Lock()

    def start(self) -> None:
        """Start the threads, if there is something for them."""
        if self._folder is None:
            return
        for name, work in (("read", self._read_all), ("write", self._write_all)):
            thread = threading.Thread(target=work, args=(self._folder,), name=f"mlxserve-kv-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """Finish what was given to the threads and let others have the folder."""
        self._reads.put(None)
        self._writes.put(None)
        for thread in self._threads:
            thread.join()
        if self._folder is not None:
            self._folder.close()

    def open_model(self, format: BlockFormat, block_size: int) -> "ModelDisk | None":
        """The blocks of one model, of `block_size` tokens; None if none can be kept."""
        if self.failure is not None:
            return None
        if format.file_size > self._index.max_bytes:
            logger.warning(
                "kv_disk allows %d bytes and one KV block of this model takes %d: raise it, none is kept",
                self._index.max_bytes,
                format.file_size,
            )
            return None
        return ModelDisk(self, format, block_size, self._index, self._reads, self._writes)

    @property
    def has_news(self) -> bool:
        return not self._finished.empty()

    def poll(self) -> None:
        """Take what the threads have done, for all models: also for one that was unloaded meanwhile."""
        while self.has_news:
            finished = self._finished.get()
            finished.job.disk.settle(finished)

    def turn_off(self, reason: str) -> None:
        """After a failure that is not one file's own: go on without."""
        with self._failing:
            if self.failure is not None:
                return
            self.failure = reason
        logger.warning("KV blocks are no longer kept on disk: %s", reason)

    def _read_all(self, folder: BlockFolder) -> None:
        while (job := self._reads.get()) is not None:
            self._do(job, functools.partial(self._read, folder, job))

    def _write_all(self, folder: BlockFolder) -> None:
        while (job := self._writes.get()) is not None:
            self._do(job, functools.partial(self._write, folder, job))

    def _do(self, job: "_Read | _Write", work: Callable[[], _Finished]) -> None:
        """Whatever happens, the job is finished: a request may be waiting for it."""
        finished = _Finished(job, is_error=True)
        if self.failure is None:
            try:
                finished = work()
            except Exception as error:
                self.turn_off(f"{'reading' if isinstance(job, _Read) else 'writing'} failed: {error}")
        self._finished.put(finished)
        self._wake()

    def _read(self, folder: BlockFolder, job: _Read) -> _Finished:
        format = job.disk.format
        try:
            return _Finished(job, format.decode(job.name, folder.read(format.model, job.name)))
        except BadBlockFile as bad:
            logger.warning("ignoring the KV block %s/%s on disk: %s", format.model, job.name.hex(), bad)
            if not bad.is_foreign:
                folder.remove(format.model, job.name)
        except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
            logger.warning("ignoring the KV block %s/%s on disk: %s", format.model, job.name.hex(), error)
        return _Finished(job, is_error=True)

    def _write(self, folder: BlockFolder, job: _Write) -> _Finished:
        format = job.disk.format
        for key in job.removed:
            folder.remove(key.model, key.name)
        try:
            folder.write(format.model, job.name, format.encode(job.name, job.parent, job.data))
        except NameTaken as error:
            logger.warning("a KV block is not written to disk: %s", error)
            return _Finished(job, is_error=True)
        return _Finished(job)


class ModelDisk:
    """One model's blocks: kv.disk_tier.BlockDisk for the books, core.block_data.BlockTransfer for the runner."""

    def __init__(
        self,
        disk: KVDisk,
        format: BlockFormat,
        block_size: int,
        index: DiskIndex,
        reads: "queue.SimpleQueue[_Read | None]",
        writes: "queue.SimpleQueue[_Write | None]",
    ) -> None:
        self.format = format
        self._disk = disk
        self._block_size = block_size
        self._index = index
        self._reads = reads
        self._writes = writes
        self._finished_reads: list[tuple[BlockHash, bool]] = []
        self._file_size = format.file_size
        self._ready: dict[bytes, BlockData] = {}
        self._num_writing = 0
        self._num_loaded_blocks = 0
        self._num_writes = 0
        self._num_errors = 0

    @property
    def is_on(self) -> bool:
        return self._disk.failure is None

    @property
    def num_free_slots(self) -> int:
        return MAX_WRITES - self._num_writing if self.is_on else 0

    @property
    def has_news(self) -> bool:
        return bool(self._finished_reads) or self._disk.has_news

    def has(self, name: BlockHash) -> bool:
        return self.is_on and self._index.is_written(self._key(name))

    def knows(self, name: BlockHash) -> bool:
        return self._key(name) in self._index

    def touch(self, name: BlockHash) -> None:
        self._index.touch(self._key(name))

    def read(self, name: BlockHash) -> None:
        self._index.begin_read(self._key(name))
        self._reads.put(_Read(self, name))

    def finished_reads(self) -> list[tuple[BlockHash, bool]]:
        self._disk.poll()
        reads, self._finished_reads = self._finished_reads, []
        return reads

    def settle(self, finished: _Finished) -> None:
        """Enter what a thread did for this model into the books."""
        job, key = finished.job, self._key(finished.job.name)
        if isinstance(job, _Write):
            self._num_writing -= 1
            if not finished.is_error:
                self._num_writes += 1
                self._index.mark_written(key)
        else:
            self._index.end_read(key)
            self._finished_reads.append((job.name, finished.data is not None))
            if finished.data is not None:
                self._ready[job.name] = finished.data
        if finished.is_error:
            self._num_errors += 1
            self._index.remove(key)

    def discard(self, name: BlockHash) -> None:
        self._ready.pop(name, None)

    def forget_reads(self) -> None:
        """The books were made anew: nobody waits for what was read."""
        self._ready.clear()
        self._finished_reads.clear()

    def take(self, name: bytes) -> BlockData:
        if name not in self._ready:
            raise EngineError("a KV block that was read from disk is gone")
        self._num_loaded_blocks += 1
        return self._ready.pop(name)

    def give(self, save: BlockSave, data: BlockData) -> None:
        name = BlockHash(save.name)
        if not self.is_on or self.knows(name):
            return
        removed = self._index.add(self._key(name), BlockHash(save.parent), self._file_size)
        if removed is not None:
            self._num_writing += 1
            self._writes.put(_Write(self, name, save.parent, data, tuple(removed)))

    def stats(self) -> DiskStats:
        model = self.format.model
        return DiskStats(
            is_on=self.is_on,
            num_blocks=self._index.num_blocks(model),
            num_bytes=self._index.num_bytes(model),
            num_loaded_tokens=self._num_loaded_blocks * self._block_size,
            num_writes=self._num_writes,
            num_errors=self._num_errors,
        )

    def _key(self, name: BlockHash) -> DiskKey:
        return DiskKey(self.format.model, name)


def open_kv_disk(root: Path, max_bytes: int, wake: Callable[[], None]) -> KVDisk:
    """The blocks in a folder, of at most `max_bytes` together. One that cannot be used is a warning, and is off.

    Reads the beginning of every file there: not for the event loop or the engine thread.
    """
    index = DiskIndex(max_bytes)
    try:
        folder = BlockFolder.open(root)
        try:
            blocks = folder.scan()
            for block in blocks:
                key = DiskKey(block.model, BlockHash(block.name))
                removed = index.add(key, BlockHash(block.parent), block.num_bytes)
                for old in (key,) if removed is None else removed:
                    folder.remove(old.model, old.name)
                index.mark_written(key)
        except OSError:
            folder.close()
            raise
    except (OSError, FolderInUse) as error:
        logger.warning("KV blocks are not kept on disk: %s", error)
        return KVDisk(None, index, str(error), wake)
    logger.info("%d KV blocks on disk in %s, %.1f GB", len(blocks), root, index.total_bytes / 1e9)
    return KVDisk(folder, index, None, wake)
