"""Drafts in a step: each is a row of its own for model and sampler, and counts while those before it were right."""

import dataclasses
from collections.abc import Mapping, Sequence

from mlxserve.core.step import DecodeRow, SampledToken
from mlxserve.errors import EngineError


def expand(rows: Sequence[DecodeRow]) -> list[DecodeRow]:
    """A row for each position of each of `rows`: its own, then one for each of its drafts.

    The row of a draft is what the decode row of a later step would be if all drafts before it were right.
    """
    return [part for row in rows for part in (_parts(row) if row.draft_token_ids else (row,))]


def _parts(row: DecodeRow) -> list[DecodeRow]:
    if row.token_id is None:
        raise EngineError("a row whose token is not known yet can have no drafts")
    token_ids = (row.token_id, *row.draft_token_ids)
    has_history = row.sampling.penalises_repetition or row.sampling.penalises_answer
    return [
        dataclasses.replace(
            row,
            token_id=token_id,
            start=row.start + index,
            output_index=row.output_index + index,
            history=row.history + token_ids[:index] if has_history else (),
            banned_token_ids=row.banned_token_ids if row.output_index + index < row.sampling.min_tokens else (),
            draft_token_ids=(),
            draft_order=None,
        )
        for index, token_id in enumerate(token_ids)
    ]


def accept(rows: Sequence[DecodeRow], tokens: Sequence[SampledToken]) -> tuple[tuple[SampledToken, ...], ...]:
    """What counts of the tokens chosen for expand(rows): of each row those up to the first that is not its draft."""
    accepted = []
    first = 0
    for row in rows:
        drafts = row.draft_token_ids
        count = 0
        while count < len(drafts) and tokens[first + count].token_id == drafts[count]:
            count += 1
        accepted.append(tuple(tokens[first : first + count + 1]))
        first += len(drafts) + 1
    return tuple(accepted)


def by_row(rows: Sequence[DecodeRow], failures: Mapping[int, str]) -> dict[int, str]:
    """What is said of a row's own position in expand(rows), by the row's index."""
    found = {}
    first = 0
    for index, row in enumerate(rows):
        if first in failures:
            found[index] = failures[first]
        first += len(row.draft_token_ids) + 1
    return found
