"""Ways to attend from decode rows to the pools, behind one interface, and the choice between them by measurement.

No single way is right everywhere. Two gather_mm read the pool in place but are many small products; gathering a copy
and calling MLX's fused attention reads everything twice but is one kernel. Which one wins depends on the device, the
heads, the number of rows and the length of the context, so each is timed for a few of these when a model is loaded.
"""

import importlib.metadata
import json
import logging
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import mlx.core as mx

from mlxserve.runner.attention import decode
from mlxserve.runner.attention.decode import DecodeInputs, ShiftedExp
from mlxserve.runner.kv_format import PLAIN, KVFormat, QuantisedFormat

logger = logging.getLogger(__name__)

GRID = ((1, 2), (1, 16), (1, 64), (8, 2), (8, 16))
"""(rows, blocks a row) that are measured."""
NUM_TIMINGS = 5

RowAttention = Callable[[mx.array, mx.array, mx.array, float], mx.array]
"""(queries (B, Hq, Dk), one layer's keys, its values, scale) -> (B, Hq, Dv)."""


class DecodePath(Protocol):
    """One way to attend from decode rows."""

    @property
    def name(self) -> str: ...

    def prepare(self, inputs: DecodeInputs, positions: mx.array, num_kv_heads: int, block_size: int) -> RowAttention:
        """Do what all layers of a pass share; row i attends to positions 0 .. positions[i]."""
        ...


@dataclass(frozen=True, slots=True)
class GatherMM:
    """attention/decode.py: two gather_mm over (row, block) pairs."""

    shifted_exp: ShiftedExp
    name: str = "gather_mm"

    def prepare(self, inputs: DecodeInputs, positions: mx.array, num_kv_heads: int, block_size: int) -> RowAttention:
        pairs = decode.derive(inputs, positions, num_kv_heads, block_size)
        return partial(_attend_pairs, pairs=pairs, shifted_exp=self.shifted_exp)


def _attend_pairs(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    *,
    pairs: decode.PairInputs,
    shifted_exp: ShiftedExp,
) -> mx.array:
    return decode.attend(queries, keys, values, pairs, scale, shifted_exp)


@dataclass(frozen=True, slots=True)
class GatherFused:
    """A copy of each row's blocks, padded to the longest row, then MLX's fused attention."""

    name: str = "gather_fused"
    kv_format: KVFormat = PLAIN

    def prepare(self, inputs: DecodeInputs, positions: mx.array, num_kv_heads: int, block_size: int) -> RowAttention:
        tables = inputs.pair_blocks[mx.maximum(inputs.row_pairs, 0)]
        length = tables.shape[1] * block_size
        mask = (mx.arange(length) <= positions[:, None])[:, None, None]
        return partial(_attend_copies, tables=tables, mask=mask, kv_format=self.kv_format)


def _attend_copies(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    *,
    tables: mx.array,
    mask: mx.array,
    kv_format: KVFormat,
) -> mx.array:
    def gather(pool: mx.array) -> mx.array:
        """(B, N) block ids -> (B, Hkv, N * block_size, D)"""
        rows = kv_format.decode(pool[tables], queries.dtype).swapaxes(1, 2)
        return rows.reshape(rows.shape[0], rows.shape[1], -1, rows.shape[-1])

    output = mx.fast.scaled_dot_product_attention(
        queries[:, :, None], gather(keys), gather(values), scale=scale, mask=mask
    )
    return output.squeeze(2)


@dataclass(frozen=True, slots=True)
class GatherCodes:
    """A copy of each pair's rows of a quantised pool, attended to as they are: one number a position is decoded."""

    shifted_exp: ShiftedExp
    kv_format: QuantisedFormat
    name: str = "gather_codes"

    def prepare(self, inputs: DecodeInputs, positions: mx.array, num_kv_heads: int, block_size: int) -> RowAttention:
        pairs = decode.derive(inputs, positions, num_kv_heads, block_size)
        return partial(_attend_codes, path=self, inputs=inputs, pairs=pairs)


def _attend_codes(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    *,
    path: GatherCodes,
    inputs: DecodeInputs,
    pairs: decode.PairInputs,
) -> mx.array:
    num_rows, num_heads, _ = queries.shape
    num_kv_heads = keys.shape[1]
    grouped = (queries.astype(mx.float32) * scale).reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, -1)
    scores = path.kv_format.products(grouped[inputs.pair_rows], keys[inputs.pair_blocks]) + pairs.mask
    weigh = partial(path.kv_format.sums, rows=values[inputs.pair_blocks])
    merged = decode.merge(scores, weigh, pairs, path.shifted_exp)
    return merged.reshape(num_rows, num_heads, -1).astype(queries.dtype)


def candidates(kv_format: KVFormat, shifted_exp: ShiftedExp) -> tuple[DecodePath, ...]:
    """The ways there are over pools of this format."""
    if isinstance(kv_format, QuantisedFormat):
        return GatherCodes(shifted_exp, kv_format), GatherFused(kv_format=kv_format)
    return GatherMM(shifted_exp), GatherFused()


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What the speed of a path depends on beside the device and the length of the rows."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    block_size: int
    dtype: mx.Dtype
    kv_format: KVFormat = PLAIN

    def __str__(self) -> str:
        dims = f"{self.num_heads}/{self.num_kv_heads} heads of {self.key_dim}/{self.value_dim}"
        kind = f"{str(self.dtype).removeprefix('mlx.core.')}{self.kv_format.suffix}"
        return f"{dims}, blocks of {self.block_size}, {kind}"


class PathChoice:
    """Which path to take for how many rows of how many blocks: that of the nearest measured point."""

    def __init__(self, paths: dict[tuple[int, int], DecodePath]) -> None:
        self._paths = paths

    def __call__(self, num_rows: int, num_blocks: int) -> DecodePath:
        def distance(point: tuple[int, int]) -> float:
            return math.hypot(math.log2(point[0] / num_rows), math.log2(point[1] / num_blocks))

        return self._paths[min(self._paths, key=distance)]


def choose(paths: Sequence[DecodePath], shape: AttentionShape, device_name: str, file: Path) -> PathChoice:
    """Measure, or take from `file` what was measured before for this shape, device and version of MLX."""
    mlx_version = importlib.metadata.version("mlx")
    key = f"{device_name}, MLX {mlx_version}, {shape}, {', '.join(path.name for path in paths)}"
    by_name = {path.name: path for path in paths}
    known = _read(file)
    names = known.get(key, {})
    if set(names) != {_point(point) for point in GRID} or not set(names.values()) <= by_name.keys():
        names = {_point(point): _fastest(paths, shape, *point) for point in GRID}
        _write(file, {**known, key: names})
    logger.debug("decode attention (%s): %s", key, ", ".join(f"{point} {name}" for point, name in names.items()))
    return PathChoice({point: by_name[names[_point(point)]] for point in GRID})


def _point(point: tuple[int, int]) -> str:
    return f"{point[0]} rows x {point[1]} blocks"


def _fastest(paths: Sequence[DecodePath], shape: AttentionShape, num_rows: int, num_blocks: int) -> str:
    """The name of the path that takes the least time for one layer, by the median of timings in turns."""
    size = shape.block_size
    tables = [tuple(range(1 + row * num_blocks, 1 + (row + 1) * num_blocks)) for row in range(num_rows)]
    starts = [num_blocks * size - 1] * num_rows
    inputs = DecodeInputs.build(starts, tables, size, num_rows)
    pool_shape = (num_rows * num_blocks + 1, shape.num_kv_heads, size)

    def pool(dim: int) -> mx.array:
        return shape.kv_format.encode(mx.random.normal((*pool_shape, dim)).astype(shape.dtype))

    queries = mx.random.normal((num_rows, shape.num_heads, shape.key_dim)).astype(shape.dtype)
    arrays = [queries, pool(shape.key_dim), pool(shape.value_dim)]
    positions = mx.array(starts)
    mx.eval(arrays, positions, *inputs)

    def run(path: DecodePath) -> Callable[..., mx.array]:
        attention = path.prepare(inputs, positions, shape.num_kv_heads, size)
        return mx.compile(lambda queries, keys, values: attention(queries, keys, values, 1.0))

    functions = {path.name: run(path) for path in paths}
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(NUM_TIMINGS + 1):
        for name, function in functions.items():
            began = time.perf_counter()
            mx.eval(function(*arrays))
            if turn > 0:  # the first one compiles
                seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    timings = ", ".join(f"{name} {median * 1e3:.2f} ms" for name, median in medians.items())
    logger.debug("decode attention, one layer, %s: %s", _point((num_rows, num_blocks)), timings)
    return min(medians, key=lambda name: medians[name])


def _read(file: Path) -> dict[str, dict[str, str]]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return {key: dict(names) for key, names in content.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        logger.warning("%s cannot be read (%s); measuring anew", file, error)
        return {}


def _write(file: Path, content: dict[str, dict[str, str]]) -> None:
    """Replace the file in one move, so that who reads it meanwhile sees the old one or the new one."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.name)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            json.dump(content, stream, indent=1)
        os.replace(temporary, file)
    except OSError as error:
        logger.warning("%s cannot be written (%s); it will be measured again", file, error)
