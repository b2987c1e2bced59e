"""Files of KV blocks: the format, and a folder that others, crashes and damage have been at."""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

from mlxserve.core.block_data import ArrayLayout
from mlxserve.store.block_file import BadBlockFile, BlockFormat, read_header
from mlxserve.store.block_folder import BlockFolder, FolderInUse, NameTaken

MODEL, OTHER_MODEL = "a" * 32, "b" * 32
LAYOUT = {"0.0": ArrayLayout("F32", (2, 8, 4), 256), "1.0": ArrayLayout("BF16", (2, 8, 4), 128)}
FORMAT = BlockFormat(MODEL, LAYOUT)
NAME, PARENT = bytes(range(16)), bytes(range(16, 32))
DATA = {"0.0": bytes(range(256)), "1.0": bytes(range(128))}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[BlockFolder]:
    folder = BlockFolder.open(tmp_path / "blocks")
    yield folder
    folder.close()


def content(name: bytes = NAME, format: BlockFormat = FORMAT) -> bytes:
    return b"".join(format.encode(name, PARENT, DATA))


def put(folder: BlockFolder, file: bytes, name: str = f"{NAME.hex()}.safetensors", model: str = MODEL) -> Path:
    path = folder.root / model / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(file)
    return path


def changed(file: bytes, position: int) -> bytes:
    return file[:position] + bytes([file[position] ^ 1]) + file[position + 1 :]


def with_metadata(**changes: str) -> bytes:
    """The file with another header."""
    length = int.from_bytes(content()[:8], "little")
    header = json.loads(content()[8 : 8 + length])
    header["__metadata__"] |= changes
    data = json.dumps(header).encode()
    return len(data).to_bytes(8, "little") + data + content()[8 + length :]


def test_a_file_is_a_safetensors_file(folder: BlockFolder) -> None:
    folder.write(MODEL, NAME, FORMAT.encode(NAME, PARENT, DATA))
    path = folder.root / MODEL / f"{NAME.hex()}.safetensors"
    with safe_open(path, "numpy") as file:
        assert list(file.keys()) == ["0.0", "1.0"]
        assert file.metadata()["block"] == NAME.hex()
        assert file.get_tensor("0.0").tobytes() == DATA["0.0"]
        assert file.get_tensor("0.0").shape == (2, 8, 4)
    assert path.stat().st_size == FORMAT.file_size
    assert path.stat().st_mode & 0o777 == 0o600
    assert folder.root.stat().st_mode & 0o777 == 0o700


def test_what_was_written_is_read(folder: BlockFolder) -> None:
    folder.write(MODEL, NAME, FORMAT.encode(NAME, PARENT, DATA))
    (block,) = folder.scan()
    assert (block.model, block.name, block.parent, block.num_bytes) == (MODEL, NAME, PARENT, FORMAT.file_size)
    data = FORMAT.decode(NAME, folder.read(MODEL, NAME))
    assert {name: bytes(array) for name, array in data.items()} == DATA
    assert list(data) == list(LAYOUT)


DAMAGED = {
    "empty": b"",
    "cut in its length": content()[:5],
    "cut in its header": content()[:40],
    "cut in its arrays": content()[:-1],
    "too long": content() + b"x",
    "a header that is too long": (1 << 40).to_bytes(8, "little") + content()[8:],
    "a header that is no JSON": content()[:8] + b"[" + content()[9:],
    "a header that is no object": (2).to_bytes(8, "little") + b"[]",
    "another block": content(PARENT),
    "another model": content(format=BlockFormat(OTHER_MODEL, LAYOUT)),
}
"""Seen from the header and the length alone."""
DAMAGED_INSIDE = {
    "a changed array": changed(content(), -1 + len(content())),
    "the first changed byte": changed(content(), len(content()) - 384),
    "another checksum": with_metadata(sha256="0" * 64),
    "other arrays": content(format=BlockFormat(MODEL, dict(reversed(LAYOUT.items())))),
}
FOREIGN = {
    "another program's": with_metadata(format="weights"),
    "another version's": with_metadata(format="mlxserve-kv-block-2"),
}


@pytest.mark.parametrize("file", [*DAMAGED.values(), *DAMAGED_INSIDE.values(), *FOREIGN.values()])
def test_what_is_not_the_block_is_not_read(file: bytes) -> None:
    with pytest.raises(BadBlockFile):
        FORMAT.decode(NAME, memoryview(file))


def test_any_changed_byte_is_seen() -> None:
    for position in range(len(content())):
        with pytest.raises(BadBlockFile):
            FORMAT.decode(NAME, memoryview(changed(content(), position)))


def test_any_cut_is_seen() -> None:
    for length in range(len(content())):
        with pytest.raises(BadBlockFile):
            FORMAT.decode(NAME, memoryview(content()[:length]))


def test_a_scan_removes_damaged_files_and_says_so(folder: BlockFolder, caplog: pytest.LogCaptureFixture) -> None:
    for file in DAMAGED.values():
        path = put(folder, file)
        caplog.clear()
        assert folder.scan() == []
        assert not path.exists()
        assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize("file", DAMAGED_INSIDE.values(), ids=DAMAGED_INSIDE)
def test_a_scan_reads_headers_only(folder: BlockFolder, file: bytes) -> None:
    put(folder, file)
    assert len(folder.scan()) == 1


@pytest.mark.parametrize("file", FOREIGN.values(), ids=FOREIGN)
def test_files_of_others_stay(folder: BlockFolder, file: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = put(folder, file)
    assert folder.scan() == []
    assert "something else" in caplog.text
    with pytest.raises(NameTaken):
        folder.write(MODEL, NAME, FORMAT.encode(NAME, PARENT, DATA))
    assert path.read_bytes() == file
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_names_of_others_are_not_touched(folder: BlockFolder) -> None:
    names = ["notes.txt", "model.safetensors", f"{NAME.hex()}", f"{NAME.hex()}.partial", f"{NAME.hex()}.gguf"]
    paths = [put(folder, b"precious", name) for name in names]
    paths += [put(folder, b"precious", f"{NAME.hex()}.safetensors", model="photos")]
    (folder.root / "x.safetensors.partial").write_bytes(b"precious")
    assert folder.scan() == []
    assert all(path.read_bytes() == b"precious" for path in [*paths, folder.root / "x.safetensors.partial"])


def test_what_a_crash_left_is_removed(folder: BlockFolder, caplog: pytest.LogCaptureFixture) -> None:
    partial = put(folder, content()[:100], f"{NAME.hex()}.safetensors.partial")
    put(folder, content())
    assert [block.name for block in folder.scan()] == [NAME]
    assert not partial.exists()
    assert caplog.records == []


def test_a_write_that_fails_leaves_nothing(folder: BlockFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def rename(self: Path, target: Path) -> Path:
        raise OSError(5, "no")

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="no"):
        folder.write(MODEL, NAME, FORMAT.encode(NAME, PARENT, DATA))
    assert list((folder.root / MODEL).iterdir()) == []


def test_blocks_come_in_the_order_of_their_last_use(folder: BlockFolder) -> None:
    names = [bytes([number] * 16) for number in range(4)]
    for number, name in enumerate(names):
        folder.write(MODEL, name, FORMAT.encode(name, PARENT, DATA))
        os.utime(folder.root / MODEL / f"{name.hex()}.safetensors", (1000 - number, 1000 - number))
    assert [block.name for block in folder.scan()] == names[::-1]
    folder.read(MODEL, names[3])
    assert [block.name for block in folder.scan()] == [names[2], names[1], names[0], names[3]]


def test_one_at_a_time(folder: BlockFolder) -> None:
    with pytest.raises(FolderInUse, match="another process"):
        BlockFolder.open(folder.root)
    folder.close()
    BlockFolder.open(folder.root).close()


def test_a_header_may_end_the_content() -> None:
    length = 8 + int.from_bytes(content()[:8], "little")
    assert read_header(content()[:length]).file_size == FORMAT.file_size
