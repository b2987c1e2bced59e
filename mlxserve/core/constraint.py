"""What an answer must be, and which next tokens that leaves.

A `Grammar` is what a client asks for. text/ compiles it into a `TokenConstraint`, which one Request carries. While
the device computes a step's logits, the runner asks a `MaskSource` for its `TokenMasks`; so a step itself stays plain:

    scheduler: constrained rows of the step -> text: masks, in parallel -> runner: added to the logits

A constraint only ever takes tokens that its request has in token_ids, so neither preemption nor a rebuilt engine has to
put it back: it is behind by the tokens it has not seen, and is told them before its next mask.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from mlxserve.core.step import ScheduledStep


@dataclass(frozen=True, slots=True)
class Grammar:
    """A set of texts, of which the answer must be one."""

    kind: Literal["json_schema", "regex", "grammar", "choice", "lark"]
    source: Any
    """json_schema: the schema, an object or a boolean. regex, grammar (Lark or GBNF): a string. choice: strings.

    lark: llguidance's own Lark, written by this package, not by a client: it is compiled unchecked."""
    param: str
    """The client's field, for errors."""
    whitespace_pattern: str | None = None
    """json_schema: regular expression of what may stand between two tokens of JSON; None: a little."""


MAX_CHOICES = 1000
JSON_OBJECT: dict[str, Any] = {"type": "object"}
"""The schema of any JSON object."""


class TokenConstraint(Protocol):
    """A grammar at one place in an answer. Not thread-safe."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer it has taken."""
        ...

    def num_accepted(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, from the first, could come next. Takes none of them."""
        ...


@dataclass(frozen=True, slots=True)
class ConstrainedRow:
    """A row of logits whose token a constraint decides."""

    index: int
    """Which row; those of `draft_token_ids` follow it."""
    constraint: TokenConstraint
    token_ids: Sequence[int]
    """Tokens of the answer that the constraint has not taken yet."""
    draft_token_ids: Sequence[int] = ()
    """Tokens that may come next: the mask after each goes to the row after. The constraint takes none of them."""


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens each row of a step may choose."""

    num_rows: int
    bits: bytes
    """num_rows rows of equal length, a bit a token id: bit i % 8 of byte i // 8 is set if token i is allowed.

    Rows without a constraint are all ones. For the others, tokens beyond these bits are not allowed."""
    failures: Mapping[int, str] = field(default_factory=dict)
    """Rows whose constraint allows no token, with the reason; their bits mean nothing."""

    def row(self, index: int) -> "TokenMasks":
        """The mask of one row alone."""
        num_bytes = len(self.bits) // self.num_rows
        failures = {0: self.failures[index]} if index in self.failures else {}
        return TokenMasks(1, self.bits[index * num_bytes : (index + 1) * num_bytes], failures)


MaskSource = Callable[[ScheduledStep, Mapping[str, int]], TokenMasks]
"""Masks of a step that has constrained rows. The second argument has the tokens, by request id, of the step before it,
if the scheduler has not seen that one's result yet."""
