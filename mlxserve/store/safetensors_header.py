"""Headers of safetensors files: what is in them, and whether it can all be there.

The format: 8 bytes with the header's length, the header in JSON, then the data, into which the header points.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

MAX_HEADER = 100_000_000
"""Bytes; the safetensors library's own limit."""

_ITEM_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1}
_ITEM_SIZES |= {"U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}
"""Bytes of a value in safetensors' types; the ones smaller than a byte are left out."""


class BadHeader(Exception):
    """The file cannot be whole; the message goes after its name."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    dtype: str
    """As the format has it: 'BF16', 'U32'."""
    shape: tuple[int, ...]
    num_bytes: int


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of a file by name.

    Raises:
        BadHeader: not such a file, damaged, or cut short.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            header_size = int.from_bytes(stream.read(8), "little")
            if size < 8 or header_size > min(size - 8, MAX_HEADER):
                raise BadHeader(f"not a safetensors file, or cut short inside its header (it has {size} bytes)")
            header = json.loads(stream.read(header_size))
        last = 8 + header_size
        tensors: dict[str, TensorInfo] = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            item_size = _ITEM_SIZES.get(entry["dtype"])
            if begin < 0 or (item_size and math.prod(entry["shape"]) * item_size != end - begin):
                raise BadHeader(f"tensor {name} has a size that does not fit its shape")
            last = max(last, 8 + header_size + end)
            tensors[name] = TensorInfo(entry["dtype"], tuple(entry["shape"]), end - begin)
    except OSError as error:
        raise BadHeader(f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError, AttributeError, TypeError, LookupError) as error:
        raise BadHeader("its header is damaged") from error
    if last > size:
        raise BadHeader(f"cut short: its tensors end at byte {last}, the file at byte {size}")
    return tensors
