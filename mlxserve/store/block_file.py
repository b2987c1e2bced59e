"""One KV block as a safetensors file.

The format is that of https://github.com/huggingface/safetensors: the length of the header in eight little-endian bytes;
the header, JSON padded with spaces; the arrays' bytes. `__metadata__` says which block it is, of which model, and has a
checksum of the name of the block before it and all that follows the header.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mlxserve.core.block_data import BlockData, BlockLayout

FORMAT = "mlxserve-kv-block-1"
MAX_HEADER_BYTES = 1 << 20
_LENGTH_BYTES = 8
_NO_NAME = bytes(16)


class BadBlockFile(Exception):
    """A file is not the block it should be; the message says in what."""

    def __init__(self, reason: str, *, is_foreign: bool = False) -> None:
        """`is_foreign`: it is whole, and another program's."""
        super().__init__(reason)
        self.is_foreign = is_foreign


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """What a file says of itself. Names are hexadecimal."""

    model: str
    name: str
    parent: str
    checksum: str
    file_size: int


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """What all files of one model's blocks have in common."""

    model: str
    layout: BlockLayout

    @property
    def file_size(self) -> int:
        """Bytes of a file, the same for each block."""
        payload = sum(array.num_bytes for array in self.layout.values())
        return len(self._header(_NO_NAME, _NO_NAME, _checksum(()))) + payload

    def encode(self, name: bytes, parent: bytes, data: BlockData) -> list[bytes | memoryview]:
        """A file, in parts."""
        arrays = [data[array] for array in self.layout]
        return [self._header(name, parent, _checksum([parent, *arrays])), *arrays]

    def decode(self, name: bytes, content: memoryview) -> BlockData:
        """The arrays of a file, as views of its bytes.

        Raises:
            BadBlockFile: it is not a whole file of this block, model and layout.
        """
        header = read_header(content)
        if header.model != self.model:
            raise BadBlockFile("it is another model's")
        if header.name != name.hex():
            raise BadBlockFile(f"it holds the block {header.name}")
        if len(content) != self.file_size:
            raise BadBlockFile(f"it has {len(content)} bytes and not {self.file_size}")
        start = self.file_size - sum(array.num_bytes for array in self.layout.values())
        parent = bytes.fromhex(header.parent)
        if bytes(content[:start]) != self._header(name, parent, header.checksum):
            raise BadBlockFile("its header lists other arrays")
        if _checksum([parent, content[start:]]) != header.checksum:
            raise BadBlockFile("its checksum is wrong")
        data: dict[str, memoryview] = {}
        for array, layout in self.layout.items():
            data[array] = content[start : start + layout.num_bytes]
            start += layout.num_bytes
        return data

    def _header(self, name: bytes, parent: bytes, checksum: str) -> bytes:
        entries: dict[str, Any] = {
            "__metadata__": {
                "format": FORMAT,
                "model": self.model,
                "block": name.hex(),
                "parent": parent.hex(),
                "sha256": checksum,
            }
        }
        start = 0
        for array, layout in self.layout.items():
            end = start + layout.num_bytes
            entries[array] = {"dtype": layout.dtype, "shape": layout.shape, "data_offsets": [start, end]}
            start = end
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % _LENGTH_BYTES)
        return len(header).to_bytes(_LENGTH_BYTES, "little") + header


def read_header(content: bytes | memoryview) -> BlockHeader:
    """The header at the beginning of a file; `content` may end anywhere behind it.

    Raises:
        BadBlockFile: there is none, or not one of this format.
    """
    length = int.from_bytes(content[:_LENGTH_BYTES], "little")
    if not 0 < length <= MAX_HEADER_BYTES or len(content) < _LENGTH_BYTES + length:
        raise BadBlockFile("it has no safetensors header")
    try:
        entries = json.loads(bytes(content[_LENGTH_BYTES : _LENGTH_BYTES + length]))
        metadata = entries.pop("__metadata__", {})
        payload = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
        if metadata.get("format") != FORMAT:
            raise BadBlockFile("it is a safetensors file of something else", is_foreign=True)
        named = [str(metadata[key]) for key in ("model", "block", "parent", "sha256")]
        bytes.fromhex(named[2])
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise BadBlockFile(f"its header cannot be read: {error}") from error
    model, name, parent, checksum = named
    return BlockHeader(model, name, parent, checksum, _LENGTH_BYTES + length + payload)


def _checksum(parts: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
