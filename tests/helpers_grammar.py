"""What tests of grammars share: tokenizers of every kind, compilers on them, and what a constraint allows."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tiny_tokenizers
from transformers import PreTrainedTokenizerFast

from mlxserve.core.constraint import ConstrainedRow, Grammar
from mlxserve.text.grammar import GrammarCompiler
from mlxserve.text.token_constraint import GrammarConstraint, compute_masks
from mlxserve.text.tokenizer import Tokenizer

TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte-level": tiny_tokenizers.byte_level,
    "sentencepiece": tiny_tokenizers.sentencepiece,
    "sentencepiece, no strip": lambda: tiny_tokenizers.sentencepiece(strip=False),
    "metaspace": tiny_tokenizers.metaspace,
    "single bytes": tiny_tokenizers.single_bytes,
}


@functools.cache
def tokenizer(kind: str = "byte-level") -> Tokenizer:
    hf_tokenizer = TOKENIZERS[kind]()
    return Tokenizer(hf_tokenizer, frozenset({hf_tokenizer.eos_token_id}))


@functools.cache
def compiler(kind: str = "byte-level") -> GrammarCompiler:
    return GrammarCompiler(tokenizer(kind))


def compile_schema(schema: Any, **fields: Any) -> GrammarConstraint:
    return compiler().compile(Grammar("json_schema", schema, "response_format", **fields))


def compile_regex(pattern: str, kind: str = "byte-level") -> GrammarConstraint:
    return compiler(kind).compile(Grammar("regex", pattern, "regex"))


def allowed(constraint: GrammarConstraint, new: Sequence[int] = ()) -> list[int]:
    """Token ids that may come after the ones taken and `new`, which are taken."""
    masks = compute_masks([ConstrainedRow(0, constraint, new)], 1)
    assert not masks.failures
    return token_ids(masks.bits)


def token_ids(bits: bytes) -> list[int]:
    return np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")).tolist()


def encode(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def accepts(constraint: GrammarConstraint, text: str) -> bool:
    ids = [*encode(text), *tokenizer().eos_token_ids]
    return constraint.num_accepted(ids) == len(ids)
