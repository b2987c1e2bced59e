"""A small model that guesses what a larger one will say.

Its keys and values stand in pools of its own under the block ids of the larger model: it computes the same positions
into the same blocks, so the prefix cache, copies and preemption are the same for both. Where it did not come along
(rows that had no drafts of it) the step that wants drafts again says what is missing. A cached block that was filled
while it did not come along holds nothing sensible of it; its guesses are worse then, and no answer is.
"""

import dataclasses
from collections.abc import Sequence

import mlx.core as mx

from mlxserve.core.step import BlockCopy, BlockTable, DecodeRow, DraftOrder
from mlxserve.errors import EngineError
from mlxserve.runner.kv_storage import KVStorage
from mlxserve.runner.paged_model import PagedModel, Piece

MAX_CATCH_UP_ROWS = 4
"""Missing tokens of a row that are computed as rows beside it; more are a chunk."""


class DraftModel:
    """`vocab_size`: token ids of the model it guesses for; ids from there on are never guessed."""

    def __init__(self, model: PagedModel, vocab_size: int) -> None:
        self._model = model
        self._vocab_size = vocab_size

    @property
    def storage(self) -> KVStorage:
        return self._model.storage

    def prepare(self, num_blocks: int, copies: Sequence[BlockCopy]) -> None:
        self._model.storage.grow(num_blocks)
        if copies:
            self._model.storage.copy(copies)

    def prefill(self, pieces: Sequence[Piece]) -> None:
        self._model.prefill(pieces)
        mx.eval(self._model.storage.arrays())

    def reset(self) -> None:
        self._model.storage.clear()

    def fill(self, rows: Sequence[DecodeRow]) -> list[DecodeRow]:
        """The rows with the drafts they ask for, greedily chosen, in one pass of all rows for each place in them."""
        filled = list(rows)
        asked = [(index, row, row.draft_order) for index, row in enumerate(rows) if row.draft_order is not None]
        if not asked:
            return filled
        drafts: dict[int, list[int]] = {index: [] for index, _, _ in asked}
        first = self._first_pass([(row, order) for _, row, order in asked])
        for (index, _, _), token_id in zip(asked, first, strict=True):
            drafts[index].append(token_id)
        for place in range(1, max(order.num_tokens for _, _, order in asked)):
            going_on = [(index, row) for index, row, order in asked if order.num_tokens > place]
            token_ids = [drafts[index][-1] for index, _ in going_on]
            chosen = self._choose(
                token_ids, [row.start + place for _, row in going_on], [row.block_tables[0] for _, row in going_on]
            )
            for (index, _), token_id in zip(going_on, chosen, strict=True):
                drafts[index].append(token_id)
        for index, row, _ in asked:
            filled[index] = dataclasses.replace(row, draft_token_ids=tuple(drafts[index]), draft_order=None)
        return filled

    def _first_pass(self, asked: Sequence[tuple[DecodeRow, DraftOrder]]) -> list[int]:
        """The first draft of each row, and whatever is missing before it."""
        token_ids: list[int] = []
        starts: list[int] = []
        tables: list[BlockTable] = []
        last: list[int] = []
        for row, order in asked:
            if row.token_id is None:
                raise EngineError("a row whose token is not known yet can have no drafts")
            missing, table = order.missing, row.block_tables[0]
            if len(missing) > MAX_CATCH_UP_ROWS:
                self.prefill([(missing, row.start - len(missing), table)])
                missing = ()
            token_ids += [*missing, row.token_id]
            starts += range(row.start - len(missing), row.start + 1)
            tables += [table] * (len(missing) + 1)
            last.append(len(starts) - 1)
        chosen = self._choose(token_ids, starts, tables)
        return [chosen[index] for index in last]

    def _choose(self, token_ids: Sequence[int], starts: Sequence[int], tables: Sequence[BlockTable]) -> list[int]:
        logits = self._model.decode(token_ids, starts, tables)
        chosen = mx.argmax(logits[:, : self._vocab_size], axis=-1)
        mx.eval(chosen, self._model.storage.arrays())
        token_list: list[int] = chosen.tolist()  # type: ignore[assignment]
        return token_list
