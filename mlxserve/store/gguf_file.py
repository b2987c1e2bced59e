"""The GGUF container: metadata and tensors, every count and size checked against the file before it is believed.

The layout is llama.cpp's (ggml/docs/gguf.md), little-endian, versions 2 and 3. The `gguf` package's own reader makes a
numpy view of every token and merge, which takes seconds for a vocabulary; this one reads the same in a tenth of one.
"""

import math
import os
import struct
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from mlxserve.errors import ModelLoadError

DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_NAME_LENGTH = 65535
MIN_TENSOR_HEADER_SIZE = 8 + 4 + 8 + 4 + 8
MIN_METADATA_SIZE = 8 + 4 + 1

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    """Row-major, as numpy has it: the reverse of the order in the file."""
    offset: int
    """Bytes from the start of the file."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An opened GGUF file: its metadata, and tensors that can be read one by one."""

    path: Path
    model: str
    """The model's name as the user wrote it, for error messages."""
    metadata: dict[str, Any] = field(repr=False)
    tensors: dict[str, GgufTensor] = field(repr=False)

    @classmethod
    def open(cls, path: Path, *, model: str) -> "GgufFile":
        """Read everything but the tensors' contents.

        Raises:
            ModelLoadError: not a GGUF file, cut short, or damaged.
        """
        try:
            return cls.parse(path, model=model)
        except BadGguf as error:
            advice = "; download it again" if isinstance(error, CutShort) else ""
            raise ModelLoadError(f"{path}: {error}{advice}", model=model) from error
        except EOFError as error:
            raise ModelLoadError(f"{path} became shorter while it was read", model=model) from error
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {error.strerror}", model=model) from error

    @classmethod
    def parse(cls, path: Path, *, model: str, size: int | None = None) -> "GgufFile":
        """The same of a file of which only the beginning may be here; `size`: bytes of all of it.

        Raises:
            BadGguf: not a GGUF file, cut short, or damaged.
            EOFError: its header is longer than what is here.
            OSError: it cannot be read.
        """
        with path.open("rb") as stream:
            metadata, tensors = _Parser(stream, os.fstat(stream.fileno()).st_size if size is None else size).parse()
        return cls(path, model, metadata, tensors)

    @property
    def most_common_type(self) -> str:
        """The type most of the weights have, as GGUF names it: 'Q4_1', 'F16'."""
        sizes: Counter[str] = Counter()
        for tensor in self.tensors.values():
            sizes[tensor.type.name] += math.prod(tensor.shape)
        return sizes.most_common(1)[0][0] if sizes else "no weights"

    def unusable(self, reason: str) -> ModelLoadError:
        """The error to raise for this file."""
        return ModelLoadError(f"{self.path}: {reason}", model=self.model)

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The metadata value of `key`, which must be of `kind` (an int will do for float); `default` if absent.

        Raises:
            ModelLoadError: the value is of another type.
        """
        value = self.metadata.get(key, default)
        if key in self.metadata:
            kinds = (int, float) if kind is float else (kind,)
            if not isinstance(value, kinds) or (kind is not bool and isinstance(value, bool)):
                raise self.unusable(f"{key} is {type(value).__name__} instead of {kind.__name__}")
        return value

    def require(self, key: str, kind: type) -> Any:
        """Like get(), for a key without which nothing goes.

        Raises:
            ModelLoadError: absent, or of another type.
        """
        if key not in self.metadata:
            raise self.unusable(f"{key} is missing from its metadata")
        return self.get(key, kind)

    def read(self, tensor: GgufTensor) -> np.ndarray:
        """The tensor's bytes as uint8 of shape (rows, bytes of a row); a vector is one row.

        Raises:
            ModelLoadError: the file became shorter since it was opened.
        """
        data = np.fromfile(self.path, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)
        if data.size != tensor.num_bytes:
            raise self.unusable(f"tensor {tensor.name} is cut short; download the file again")
        return data.reshape(math.prod(tensor.shape[:-1]), -1)


class BadGguf(Exception):
    """The bytes are not what the format says; the message goes after the file's name."""


class CutShort(BadGguf):
    """The file is shorter than its header says."""


class _Parser:
    """Reads the header front to back. Nothing is read or allocated before it is known to be in the file."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        """`size`: bytes of the file, which the stream may hold the beginning of."""
        self.stream = stream
        self.remaining = size
        self.size = size

    def parse(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self.remaining == 0:
            raise BadGguf("the file is empty")
        if self.remaining < 24 or self._take(4) != b"GGUF":
            raise BadGguf("not a GGUF file (it does not begin with the letters GGUF)")
        version = self._scalar("I")
        if version not in (2, 3):
            order = "a big-endian file" if version & 0xFFFF == 0 else f"GGUF version {version}"
            raise BadGguf(f"{order} is not supported; versions 2 and 3, little-endian, are")
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        if num_keys * MIN_METADATA_SIZE + num_tensors * MIN_TENSOR_HEADER_SIZE > self.remaining:
            raise BadGguf(
                f"it claims {num_tensors} tensors and {num_keys} metadata keys, more than {self.size} bytes can hold"
            )
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._name("a metadata key")
            if key in metadata:
                raise BadGguf(f"metadata key {key} occurs twice")
            metadata[key] = self._value(self._value_type(key), key)
        headers = [self._tensor_header() for _ in range(num_tensors)]
        return metadata, self._place(headers, metadata.get("general.alignment", DEFAULT_ALIGNMENT))

    def _place(
        self, headers: list[tuple[str, GGMLQuantizationType, tuple[int, ...], int]], alignment: Any
    ) -> dict[str, GgufTensor]:
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise BadGguf(f"general.alignment is {alignment!r} instead of a power of two")
        start = -(-(self.size - self.remaining) // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, type_, shape, offset in headers:
            if name in tensors:
                raise BadGguf(f"tensor {name} occurs twice")
            block_size, block_bytes = GGML_QUANT_SIZES[type_]
            if shape[-1] % block_size:
                raise BadGguf(f"tensor {name} has rows of {shape[-1]} values, which blocks of {block_size} do not fill")
            num_bytes = math.prod(shape) // block_size * block_bytes
            if start + offset + num_bytes > self.size:
                raise CutShort(
                    f"the file is cut short: tensor {name} ends at byte {start + offset + num_bytes}, the file at byte "
                    f"{self.size}"
                )
            tensors[name] = GgufTensor(name, type_, shape, start + offset, num_bytes)
        return tensors

    def _tensor_header(self) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        name = self._name("a tensor name")
        num_dimensions = self._scalar("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise BadGguf(f"tensor {name} has {num_dimensions} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(num_dimensions))[::-1]
        if 0 in shape:
            raise BadGguf(f"tensor {name} has a dimension of 0")
        raw_type = self._scalar("I")
        try:
            type_ = GGMLQuantizationType(raw_type)
        except ValueError as error:
            raise BadGguf(f"tensor {name} has the unknown type {raw_type}") from error
        return name, type_, shape, self._scalar("Q")

    def _value_type(self, key: str) -> GGUFValueType:
        raw_type = self._scalar("I")
        try:
            return GGUFValueType(raw_type)
        except ValueError as error:
            raise BadGguf(f"metadata key {key} has the unknown type {raw_type}") from error

    def _value(self, type_: GGUFValueType, key: str) -> Any:
        if type_ is GGUFValueType.STRING:
            return self._strings(1, key)[0]
        if type_ is not GGUFValueType.ARRAY:
            return self._scalar(_SCALARS[type_])
        item_type = self._value_type(key)
        count = self._scalar("Q")
        if item_type is GGUFValueType.ARRAY:
            raise BadGguf(f"metadata key {key} is an array of arrays, which is not supported")
        if item_type is GGUFValueType.STRING:
            return self._strings(count, key)
        item = struct.Struct("<" + _SCALARS[item_type])
        return [value for (value,) in item.iter_unpack(self._take(count * item.size))]

    def _strings(self, count: int, key: str) -> list[str]:
        if count * 8 > self.remaining:
            raise self._cut_short()
        read, remaining, strings = self.stream.read, self.remaining, []
        for _ in range(count):
            length = int.from_bytes(read(8), "little")
            remaining -= 8 + length
            if remaining < 0:
                raise self._cut_short()
            strings.append(read(length))
        self.remaining = remaining
        if self.stream.tell() != self.size - remaining:
            raise EOFError
        try:
            return [string.decode() for string in strings]
        except UnicodeDecodeError as error:
            raise BadGguf(f"metadata key {key} is not UTF-8") from error

    def _name(self, what: str) -> str:
        length = self._scalar("Q")
        if length > MAX_NAME_LENGTH:
            raise BadGguf(f"{what} is {length} bytes long; the file is damaged")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as error:
            raise BadGguf(f"{what} is not UTF-8; the file is damaged") from error

    def _scalar(self, code: str) -> Any:
        item = struct.Struct("<" + code)
        return item.unpack(self._take(item.size))[0]

    def _take(self, count: int) -> bytes:
        if count > self.remaining:
            raise self._cut_short()
        data = self.stream.read(count)
        if len(data) != count:
            raise EOFError
        self.remaining -= count
        return data

    def _cut_short(self) -> CutShort:
        return CutShort(f"the file is cut short inside its header (it has {self.size} bytes)")
