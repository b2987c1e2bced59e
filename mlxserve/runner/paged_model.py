"""mlx-lm's model files, unmodified, on the block cache.

A model of mlx-lm takes one cache object a layer, calls its `update_and_fetch`, and passes it on to
`scaled_dot_product_attention`. Ours is a LayerView, and that one function is routed: a LayerView attends over the
pools, any other cache goes to mlx-lm as before.

Every token of a pass is a batch row of length 1. So each has a rotary offset of its own, and one pass can hold tokens
of any sequences at any positions; projections and MLP see the same matrix product as for one long row.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxserve.core.step import BlockTable
from mlxserve.runner import rotary
from mlxserve.runner.attention import paths, prefill
from mlxserve.runner.attention.decode import DecodeInputs, ShiftedExp
from mlxserve.runner.attention.paths import DecodePath, RowAttention
from mlxserve.runner.attention.prefill import ChunkAttention, ChunkInputs
from mlxserve.runner.compiled import CompiledByShape
from mlxserve.runner.kv_format import PLAIN, KVFormat
from mlxserve.runner.kv_storage import KVStorage, LayerShape
from mlxserve.runner.rotary import Rotations
from mlxserve.runner.trunk import find_trunk

MAX_DECODE_TRACES = 64

Piece = tuple[Sequence[int], int, BlockTable]
"""A prefill chunk: token ids, position of the first one, block table."""
Row = tuple[int, int, BlockTable]
"""A decode row: token id, its position, block table."""

ATTENTION_FUNCTION = "scaled_dot_product_attention"


class UnsupportedByBlockCache(Exception):
    """The model does something with its cache that the block cache does not do; the message says what."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The device's choice of the inner functions of attention."""

    shifted_exp: ShiftedExp
    chunk_attention: ChunkAttention
    rotations: Rotations | None = None
    """Where layers share the matrices of their rotary embedding; None: each layer calls its own."""
    kv_format: KVFormat = PLAIN


class _Pass:
    """What all layers share while one forward pass is built."""

    def __init__(
        self,
        positions: mx.array,
        slots: mx.array,
        *,
        num_rows: int = 0,
        row_attention: RowAttention | None = None,
        chunks: Sequence[ChunkInputs] = (),
    ) -> None:
        self.positions = positions
        self.slots = slots
        self.num_rows = num_rows
        self.row_attention = row_attention
        self.num_query_heads = 0
        self.chunks = chunks


@dataclass(slots=True)
class _Bound:
    """What a LayerView works on while one forward pass is built."""

    keys: mx.array
    values: mx.array
    current: _Pass
    written: tuple[mx.array, mx.array] | None = None
    """What update_and_fetch returned."""
    is_read: bool = False


class LayerView:
    """One layer's cache as mlx-lm's attention sees it. It holds pools only between bind() and unbind()."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._bound: _Bound | None = None

    def bind(self, keys: mx.array, values: mx.array, current: _Pass) -> None:
        self._bound = _Bound(keys, values, current)

    def unbind(self) -> tuple[mx.array, mx.array]:
        """The pools after the pass. The view keeps no reference: it would make the next write a copy."""
        bound, self._bound = self._required, None
        return bound.keys, bound.values

    def check_used(self) -> None:
        """Raises UnsupportedByBlockCache unless the pass wrote this layer's keys and values and attended to them."""
        if not self._required.is_read:
            raise UnsupportedByBlockCache("some of its layers attend in a way of their own")

    @property
    def _required(self) -> _Bound:
        if self._bound is None:
            raise UnsupportedByBlockCache("it uses its cache outside of a forward pass")
        return self._bound

    @property
    def offset(self) -> mx.array:
        """Rotary offset of each batch row."""
        return self._required.current.positions

    def make_mask(self, num_tokens: int, return_array: bool = False, window_size: int | None = None) -> None:
        """No mask: attend() knows which positions count."""
        if window_size is not None:
            raise UnsupportedByBlockCache("it attends to a sliding window")

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write (tokens, Hkv, 1, D) keys and values to their blocks."""
        bound = self._required
        if keys.shape[2] != 1:
            raise UnsupportedByBlockCache("its attention folds tokens together")
        if bound.written is not None:
            raise UnsupportedByBlockCache("some layer writes to its cache more than once in a pass")
        encode = self._kernels.kv_format.encode
        bound.keys = _write(bound.keys, encode(keys), bound.current.slots)
        bound.values = _write(bound.values, encode(values), bound.current.slots)
        bound.written = keys, values
        return keys, values

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: object, sinks: object
    ) -> mx.array:
        """queries (tokens, Hq, 1, Dk), keys and values what update_and_fetch returned. Returns (tokens, Hq, 1, Dv)."""
        if mask is not None or sinks is not None:
            raise UnsupportedByBlockCache("its attention has a mask of its own or sinks")
        if queries.shape[2] != 1:
            raise UnsupportedByBlockCache("its attention folds tokens together")
        bound, kernels = self._required, self._kernels
        # The pools are read in their place: had the model changed them, or taken another layer's, that would be lost.
        if bound.written is None or keys is not bound.written[0] or values is not bound.written[1]:
            raise UnsupportedByBlockCache("its attention reads other keys and values than its cache returned")
        bound.is_read = True
        current, queries = bound.current, kernels.kv_format.turn(queries[:, :, 0])
        current.num_query_heads = queries.shape[1]
        outputs = []
        if current.row_attention is not None:
            outputs.append(current.row_attention(queries[: current.num_rows], bound.keys, bound.values, scale))
        for chunk in current.chunks:
            keys, blocks = kernels.kv_format.open(bound.keys, chunk.blocks, queries.dtype)
            values, _ = kernels.kv_format.open(bound.values, chunk.blocks, queries.dtype)
            own = queries[chunk.first : chunk.first + chunk.num_tokens]
            opened = replace(chunk, blocks=blocks)
            outputs.append(prefill.attend(own, keys, values, opened, scale, kernels.chunk_attention))
        output = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
        return kernels.kv_format.turn_back(output)[:, :, None]


def _write(pool: mx.array, states: mx.array, slots: mx.array) -> mx.array:
    """`pool` with (tokens, Hkv, 1, width) rows at `slots`: its own buffer, if nobody else refers to it."""
    rows = pool.reshape(-1, pool.shape[-1])
    rows[slots] = states.reshape(-1, pool.shape[-1]).astype(pool.dtype)
    return rows.reshape(pool.shape)


class PagedModel:
    """A model of mlx-lm over a KVStorage. Both passes leave arrays unevaluated: evaluate them with storage.arrays()."""

    def __init__(
        self,
        model: nn.Module,
        shapes: Sequence[LayerShape],
        block_size: int,
        kernels: Kernels,
        make_view: Callable[[Kernels], LayerView] = LayerView,
    ) -> None:
        self.storage = KVStorage(shapes, block_size, kernels.kv_format)
        self._model = model
        self._num_kv_heads = shapes[0].num_kv_heads
        self._rotations = kernels.rotations
        self.num_query_heads = 0
        """Of one layer; known after the first pass."""
        self._path = paths.candidates(kernels.kv_format, kernels.shifted_exp)[0]
        self.choose_path: Callable[[int, int], DecodePath] = lambda num_rows, num_blocks: self._path
        """(rows, blocks of the longest) -> how they attend."""
        self._views = [make_view(kernels) for _ in shapes]
        self._compiled_decode = CompiledByShape(self._decode, MAX_DECODE_TRACES)
        self._trunk = find_trunk(model)
        self.can_mix = self._trunk is not None
        """Whether chunks and decode rows may stand in one pass."""
        route_attention(model)
        if kernels.rotations is not None:
            rotary.share(model, kernels.rotations, shapes[0].key_dim)

    def decode(
        self, token_ids: Sequence[int] | mx.array, starts: Sequence[int], tables: Sequence[BlockTable]
    ) -> mx.array:
        """One token of each sequence at position starts[i]. Returns logits, (rows, vocabulary), unevaluated.

        `token_ids` may be an array that is still being computed.
        """
        num_rows = len(starts)
        padding = [0] * (row_bucket(num_rows) - num_rows)
        block_size = self.storage.block_size
        blocks = [table[start // block_size] for start, table in zip(starts, tables, strict=True)]
        inputs = DecodeInputs.build(starts, tables, block_size, num_rows + len(padding))
        logits: mx.array
        self._path = self.choose_path(*inputs.row_pairs.shape)
        logits, keys, values = self._compiled_decode(
            (self._path.name, self.storage.num_blocks, *inputs.pair_rows.shape, *inputs.row_pairs.shape),
            mx.pad(token_ids if isinstance(token_ids, mx.array) else mx.array(list(token_ids)), (0, len(padding))),
            mx.array([*starts, *padding]),
            mx.array([*blocks, *padding]),
            tuple(inputs),
            *self.storage.take(),
        )
        self.storage.put((keys, values))
        return logits[:num_rows]

    def prefill(self, chunks: Sequence[Piece], rows: Sequence[Row] = ()) -> mx.array:
        """Keys and values of chunks of different sequences, in one pass; with decode rows in it too where can_mix.

        A row may be of the same sequence as a chunk that ends before it. Returns logits, unevaluated: the rows', (rows,
        vocabulary), or without rows those of all tokens, which MLX never computes if nobody evaluates them.
        """
        block_size = self.storage.block_size
        token_ids = [token_id for token_id, _, _ in rows]
        positions = [start for _, start, _ in rows]
        blocks = [table[start // block_size] for _, start, table in rows]
        inputs: list[ChunkInputs] = []
        for chunk_ids, start, table in chunks:
            inputs.append(ChunkInputs.build(len(token_ids), len(chunk_ids), start, table, block_size))
            token_ids.extend(chunk_ids)
            chunk_positions = range(start, start + len(chunk_ids))
            positions.extend(chunk_positions)
            blocks.extend(table[position // block_size] for position in chunk_positions)
        places = mx.array(positions)
        slots = self._slots(places, mx.array(blocks))
        current = _Pass(places, slots, num_rows=len(rows), chunks=inputs)
        if rows:
            starts, tables = [start for _, start, _ in rows], [table for _, _, table in rows]
            row_inputs = DecodeInputs.build(starts, tables, block_size, len(rows))
            path = self.choose_path(*row_inputs.row_pairs.shape)
            row_positions = current.positions[: len(rows)]
            current.row_attention = path.prepare(row_inputs, row_positions, self._num_kv_heads, block_size)
        logits, keys, values = self._forward(mx.array(token_ids), current, *self.storage.take())
        self.storage.put((keys, values))
        return logits

    def prefill_for_head(self, chunks: Sequence[Piece]) -> mx.array:
        """prefill() that returns what head() takes a slice of: (tokens, ...) of all chunks in order, unevaluated.

        Where can_mix these are the hidden states after the last norm, (tokens, 1, hidden size).

        Where the head is part of the model these are the logits themselves.
        """
        if self._trunk is None or not self.can_mix:
            return self.prefill(chunks)
        seen: list[mx.array] = []
        self._trunk.observe = seen.append
        try:
            self.prefill(chunks)
        finally:
            self._trunk.observe = None
        return seen[0]

    def head(self, hidden: mx.array) -> mx.array:
        """Logits, (tokens, vocabulary), unevaluated, of a slice of what prefill_for_head() gave."""
        if self._trunk is None or not self.can_mix:
            return hidden
        self._trunk.source = lambda: hidden
        try:
            logits: mx.array = self._model(mx.zeros(hidden.shape[:2], dtype=mx.int32))[:, 0]
        finally:
            self._trunk.source = None
        return logits

    def _decode(
        self,
        token_ids: mx.array,
        positions: mx.array,
        blocks: mx.array,
        inputs: tuple[mx.array, ...],
        keys: list[mx.array],
        values: list[mx.array],
    ) -> tuple[mx.array, list[mx.array], list[mx.array]]:
        block_size = self.storage.block_size
        row_attention = self._path.prepare(DecodeInputs(*inputs), positions, self._num_kv_heads, block_size)
        num_rows = token_ids.shape[0]
        slots = self._slots(positions, blocks)
        current = _Pass(positions, slots, num_rows=num_rows, row_attention=row_attention)
        return self._forward(token_ids, current, keys, values)

    def _slots(self, positions: mx.array, blocks: mx.array) -> mx.array:
        """Where the (Hkv, D) states of each token go in a pool seen as (num_blocks * Hkv * block_size, D)."""
        block_size = self.storage.block_size
        head_blocks = blocks[:, None] * self._num_kv_heads + mx.arange(self._num_kv_heads)
        return (head_blocks * block_size + positions[:, None] % block_size).reshape(-1)

    def _forward(
        self, token_ids: mx.array, current: _Pass, keys: list[mx.array], values: list[mx.array]
    ) -> tuple[mx.array, list[mx.array], list[mx.array]]:
        """Run the model on (tokens,) ids; returns the logits of the rows, if any, and the pools after the pass."""
        for view, layer_keys, layer_values in zip(self._views, keys, values, strict=True):
            view.bind(layer_keys, layer_values, current)
        if self._rotations is not None:
            self._rotations.begin(current.positions)
        if self._trunk is not None:
            self._trunk.num_rows = current.num_rows or None
        try:
            logits = self._model(token_ids[:, None], cache=self._views)[:, 0]
            for view in self._views:
                view.check_used()
        finally:
            pools = [view.unbind() for view in self._views]
            if self._rotations is not None:
                self._rotations.end()
            if self._trunk is not None:
                self._trunk.num_rows = None
        self.num_query_heads = current.num_query_heads
        return logits, [keys for keys, _ in pools], [values for _, values in pools]


def route_attention(model: nn.Module) -> None:
    """Let the modules that define a model's layers send LayerViews to attend(). Other caches are not affected."""
    for name in {type(module).__module__ for module in model.modules()}:
        module = sys.modules[name]
        stock = getattr(module, ATTENTION_FUNCTION, None)
        if stock is not None and not hasattr(stock, "routes_layer_views"):
            setattr(module, ATTENTION_FUNCTION, _routed(stock))


def _routed(stock: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def scaled_dot_product_attention(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: Any = None,
        **kwargs: Any,
    ) -> mx.array:
        if isinstance(cache, LayerView):
            if kwargs:
                raise UnsupportedByBlockCache(f"its attention passes {', '.join(kwargs)}")
            return cache.attend(queries, keys, values, scale, mask, sinks)
        return stock(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks, **kwargs)

    scaled_dot_product_attention.routes_layer_views = True  # type: ignore[attr-defined]
    return scaled_dot_product_attention


def row_bucket(num_rows: int) -> int:
    """`num_rows` rounded up so that the compiled step is traced for few batch sizes."""
    if num_rows <= 4:
        return num_rows
    step = 1 << (num_rows.bit_length() - 2)
    return -(-num_rows // step) * step
