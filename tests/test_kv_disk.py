"""The disk of KV blocks without a model: its bound, kills, failures. Random tests print their seed."""

import errno
import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import disk_writer
import pytest
from disk_writer import FORMAT, give
from helpers_disk import TIMEOUT, block_files, opened

from mlxserve.engine.kv_disk import MAX_WRITES, KVDisk, ModelDisk, open_kv_disk
from mlxserve.kv.block_hash import BlockHash
from mlxserve.store import block_folder
from mlxserve.store.block_file import BlockFormat
from mlxserve.store.block_folder import BlockFolder

SEED = int(os.environ.get("MLXSERVE_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
NUM_KILLS = 8
ROOT = BlockHash(b"r" * 16)


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


def model_of(kv_disk: KVDisk, format: BlockFormat = FORMAT) -> ModelDisk:
    disk = kv_disk.open_model(format, block_size=8)
    assert disk is not None
    return disk


def settled(disk: ModelDisk) -> list[tuple[BlockHash, bool]]:
    """Wait until all is written and read; what was read."""
    end = time.monotonic() + TIMEOUT
    reads = disk.finished_reads()
    while disk.num_free_slots < MAX_WRITES and disk.is_on:
        assert time.monotonic() < end
        time.sleep(0.001)
        reads += disk.finished_reads()
    return reads


def read(disk: ModelDisk, block: BlockHash) -> bool:
    """Whether a block is there and right."""
    disk.read(block)
    end = time.monotonic() + TIMEOUT
    while not (reads := disk.finished_reads()):
        assert time.monotonic() < end
        time.sleep(0.001)
    assert [each for each, _ in reads] == [block]
    return reads[0][1]


def folder_bytes(root: Path) -> int:
    """Everything that is there, unfinished files as well. Only where nobody writes meanwhile."""
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def test_blocks_come_back_in_another_process(tmp_path: Path) -> None:
    with opened(tmp_path) as kv_disk:
        disk = model_of(kv_disk)
        give(disk, name(1), ROOT)
        assert disk.knows(name(1))
        assert not disk.has(name(1)), "a file that may be unfinished must not be asked for"
        settled(disk)
        assert disk.has(name(1))
    with opened(tmp_path) as kv_disk:
        disk = model_of(kv_disk)
        assert disk.has(name(1))
        assert not disk.knows(name(2))
        assert read(disk, name(1))
        data = disk.take(name(1))
        assert {array: bytes(data[array]) for array in data} == {array: name(1) * 6250 for array in data}
        stats = disk.stats()
        assert (stats.num_blocks, stats.num_bytes, stats.num_loaded_tokens) == (1, FORMAT.file_size, 8)


def test_the_bound_holds_at_every_moment_of_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"replay with MLXSERVE_TEST_SEED={SEED}")
    rng = random.Random(SEED)
    max_bytes = 5 * FORMAT.file_size + 1000
    sizes: list[int] = []
    stock_write_all = block_folder._write_all

    def write_all(file: object, part: bytes | memoryview) -> None:
        stock_write_all(file, part)  # type: ignore[arg-type]
        sizes.append(folder_bytes(tmp_path))

    monkeypatch.setattr(block_folder, "_write_all", write_all)
    for _ in range(3):
        with opened(tmp_path, max_bytes) as kv_disk:
            models = [model_of(kv_disk), model_of(kv_disk, BlockFormat("d" * 32, disk_writer.LAYOUT))]
            for _ in range(40):
                give(rng.choice(models), name(rng.randrange(1000)), ROOT)
                if rng.random() < 0.5:
                    settled(rng.choice(models))
        assert folder_bytes(tmp_path) <= max_bytes
    assert len(sizes) > 3 * 50
    assert max(sizes) <= max_bytes
    assert max(sizes) > max_bytes - FORMAT.file_size, "the folder was never full"


def test_a_smaller_bound_holds_from_the_start(tmp_path: Path) -> None:
    with opened(tmp_path) as kv_disk:
        disk = model_of(kv_disk)
        for number in range(6):
            give(disk, name(number), ROOT)
            settled(disk)
    with opened(tmp_path, 3 * FORMAT.file_size) as kv_disk:
        assert folder_bytes(tmp_path) == 3 * FORMAT.file_size
        disk = model_of(kv_disk)
        assert [disk.has(name(number)) for number in range(6)] == [False] * 3 + [True] * 3


def test_a_bound_without_room_for_a_block_keeps_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path, FORMAT.file_size - 1) as kv_disk:
        assert kv_disk.open_model(FORMAT, block_size=8) is None
        assert kv_disk.failure is None
    assert "raise it" in caplog.text


def test_kills_in_the_middle_of_writing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The folder that a killed process leaves is accepted: all blocks are whole, nothing else is there."""
    print(f"replay with MLXSERVE_TEST_SEED={SEED}")
    rng = random.Random(SEED)
    max_bytes = 40 * FORMAT.file_size
    num_unfinished = 0
    for kill in range(NUM_KILLS):
        arguments = [sys.executable, disk_writer.__file__, str(tmp_path), str(max_bytes), str(SEED + kill)]
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": _python_path()})
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"writing\n"
            time.sleep(rng.random() * 0.1)
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=TIMEOUT)
        assert process.returncode == -signal.SIGKILL, "it ended by itself"
        assert folder_bytes(tmp_path) <= max_bytes
        num_unfinished += len(list(tmp_path.rglob("*.partial")))
        with opened(tmp_path, max_bytes) as kv_disk:
            disk = model_of(kv_disk)
            assert list(tmp_path.rglob("*.partial")) == []
            files = block_files(tmp_path)
            assert len(files) == disk.stats().num_blocks > 0
            for file in files:
                block = BlockHash(bytes.fromhex(file.stem))
                assert read(disk, block), file
                assert bytes(disk.take(block)["1.0"]) == block * 6250
    assert caplog.records == []
    assert num_unfinished > 0, "no kill came in the middle of a file"


def _python_path() -> str:
    return os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_a_write_that_fails_turns_it_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def write_all(file: object, part: object) -> None:
        raise OSError(number, os.strerror(number))

    with opened(tmp_path) as kv_disk:
        disk = model_of(kv_disk)
        give(disk, name(0), ROOT)
        settled(disk)
        monkeypatch.setattr(block_folder, "_write_all", write_all)
        for block in range(1, 4):
            give(disk, name(block), ROOT)
        settled(disk)
        end = time.monotonic() + TIMEOUT
        while disk.stats().num_errors < 1:
            assert time.monotonic() < end
            disk.finished_reads()
        assert not disk.is_on
        assert disk.num_free_slots == 0
        assert not disk.has(name(0)), "what is off is off for reading, too"
        give(disk, name(5), ROOT)
        assert kv_disk.open_model(FORMAT, block_size=8) is None
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert os.strerror(number) in warnings[0]
    assert [path.stem for path in block_files(tmp_path)] == [name(0).hex()]
    assert list(tmp_path.rglob("*.partial")) == []


def test_a_folder_that_is_taken_away_turns_it_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as kv_disk:
        disk = model_of(kv_disk)
        (tmp_path / FORMAT.model).write_text("not a folder")
        give(disk, name(0), ROOT)
        settled(disk)
        assert not disk.is_on
    assert "no longer kept on disk: writing failed" in caplog.text


def test_a_read_that_fails_turns_it_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: BlockFolder, model: str, block: bytes) -> memoryview:
        raise OSError(errno.EIO, "I/O error")

    with opened(tmp_path) as kv_disk:
        disk = model_of(kv_disk)
        give(disk, name(0), ROOT)
        settled(disk)
        monkeypatch.setattr(BlockFolder, "read", fails)
        assert not read(disk, name(0))
        assert not disk.is_on


def test_a_file_that_vanished_is_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as kv_disk:
        disk = model_of(kv_disk)
        give(disk, name(0), ROOT)
        settled(disk)
        block_files(tmp_path)[0].unlink()
        assert not read(disk, name(0))
        assert disk.is_on
        assert not disk.knows(name(0))
        assert disk.stats().num_errors == 1
        assert len(caplog.records) == 1
        # It can be written again.
        give(disk, name(0), ROOT)
        settled(disk)
        assert read(disk, name(0))


def test_a_second_process_goes_on_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path):
        second = open_kv_disk(tmp_path, 10**9, wake=lambda: None)
        second.start()
        assert second.open_model(FORMAT, block_size=8) is None
        second.close()
    assert "another process" in caplog.text
    with opened(tmp_path) as kv_disk:
        assert kv_disk.failure is None


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_folder_that_cannot_be_made_is_off(tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str) -> None:
    (tmp_path / "file").write_text("not a folder")
    with opened(tmp_path / place) as kv_disk:
        assert kv_disk.failure is not None
        assert kv_disk.open_model(FORMAT, block_size=8) is None
    assert "not kept on disk" in caplog.text


def test_a_foreign_file_of_a_blocks_name_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / FORMAT.model / f"{name(0).hex()}.safetensors"
    path.parent.mkdir()
    header = b'{"__metadata__":{"format":"pt"}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    before = path.read_bytes()
    with opened(tmp_path) as kv_disk:
        disk = model_of(kv_disk)
        give(disk, name(0), ROOT)
        settled(disk)
        assert disk.is_on
        assert not disk.knows(name(0))
        assert (disk.stats().num_errors, disk.stats().num_bytes) == (1, 0)
    assert path.read_bytes() == before
