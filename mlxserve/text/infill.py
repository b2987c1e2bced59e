"""Filling in the middle: how each family of code models is told what stands before and after the gap.

A model has learnt this if its vocabulary has the tokens for it. The orders are those of "Efficient Training of Language
Models to Fill in the Middle" (Bavarian et al., 2022): prefix, suffix, middle; or the suffix first.
"""

from collections.abc import Callable
from dataclasses import dataclass

from mlxserve.core.generation import InfillPrompt
from mlxserve.errors import InvalidParameter
from mlxserve.text.plain_text import encode_text
from mlxserve.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class InfillFormat:
    prefix: str
    """The token before the text before the gap."""
    suffix: str
    """The token before the text after the gap."""
    middle: str | None
    """The token before the answer; None: it follows the prefix, which then stands last."""
    suffix_first: bool = False

    @property
    def tokens(self) -> tuple[str, ...]:
        return tuple(token for token in (self.prefix, self.suffix, self.middle) if token is not None)


FORMATS = (
    # Qwen2.5-Coder and later, CodeGemma, Granite 4
    InfillFormat("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    # StarCoder, StarCoder2, Granite Code, Stable Code
    InfillFormat("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    # SantaCoder
    InfillFormat("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    # DeepSeek-Coder
    InfillFormat("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001
    # CodeLlama
    InfillFormat("▁<PRE>", "▁<SUF>", "▁<MID>"),
    # CodeGeeX4, GLM-4
    InfillFormat("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    # Seed-Coder
    InfillFormat("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),
    # Codestral
    InfillFormat("[PREFIX]", "[SUFFIX]", None, suffix_first=True),
)

END_TOKENS = (
    "<|endoftext|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<|file_separator|>",
    "<file_sep>",
    "▁<EOT>",
)
"""What families put behind a middle, where that is not their end-of-sequence token."""


def find_infill_format(has_token: Callable[[str], bool]) -> InfillFormat | None:
    """The format of a model whose vocabulary says of a token whether it is there; None if it knows none."""
    return next((each for each in FORMATS if all(map(has_token, each.tokens))), None)


def encode_infill(tokenizer: Tokenizer, prompt: InfillPrompt) -> list[int]:
    """Token ids of a prompt with a gap, what the tokenizer puts before any text included.

    Raises:
        InvalidParameter: the model has no tokens for this, or a text is not valid Unicode.
    """
    format = find_infill_format(tokenizer.has_token)
    if format is None:
        raise InvalidParameter(
            "this model cannot fill in a middle: its vocabulary has no tokens for it; leave the suffix out",
            param="suffix",
        )
    before = _id(tokenizer, format.prefix) + _encode(tokenizer, prompt.prefix, prompt.param)
    after = _id(tokenizer, format.suffix) + _encode_inside(tokenizer, prompt.suffix)
    middle = [] if format.middle is None else _id(tokenizer, format.middle)
    start = tokenizer.encode("", add_special_tokens=True)
    return start + (after + before if format.suffix_first else before + after) + middle


def infill_end_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that end a middle, beside the end-of-sequence tokens."""
    ids = map(tokenizer.token_id, END_TOKENS)
    return frozenset(token_id for token_id in ids if token_id is not None)


def _id(tokenizer: Tokenizer, token: str) -> list[int]:
    token_id = tokenizer.token_id(token)
    return [] if token_id is None else [token_id]


def _encode(tokenizer: Tokenizer, text: str, param: str) -> list[int]:
    return encode_text(tokenizer, text, add_special_tokens=False, param=param)


def _encode_inside(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text that goes on from another: SentencePiece puts a space before what it takes for a beginning."""
    ids = _encode(tokenizer, text, "suffix")
    if b"".join(map(tokenizer.token_bytes, ids)) != b" " + text.encode():
        return ids
    # As CodeLlama's and Mistral's own tokenizers do: behind a rare character there is no beginning.
    start, longer = _encode(tokenizer, "☺", "suffix"), _encode(tokenizer, "☺" + text, "suffix")
    return longer[len(start) :] if longer[: len(start)] == start else ids
