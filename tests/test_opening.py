"""Thoughts before a grammar: masks and drafts are what taking token after token would give."""

import functools
import os
import random

import numpy as np
import pytest
from helpers_chat_models import FINAL, SAID, model, token_ids

from mlxserve.core.constraint import ConstrainedRow, Grammar
from mlxserve.core.generation import ChatPrompt
from mlxserve.text.answer_format import AnswerFormat
from mlxserve.text.chat_template import render
from mlxserve.text.grammar import GrammarCompiler
from mlxserve.text.token_constraint import GrammarConstraint, compute_masks

SEED = int(os.environ.get("MLXSERVE_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
GRAMMAR = Grammar("regex", "(the|then|Here)( cat| dog){1,3}", "regex")
NAMES = ["qwen", "r1", "magistral", "granite", "harmony"]
TEXTS = {
    "qwen": ("<think>", "\nHm, the cat größer", "</think>", "then dog cat"),
    "r1": ("", "Hm 🎉", "</think>", "the cat dog"),
    "magistral": ("[THINK]", "the cat", "[/THINK]", "then cat"),
    "granite": ("Here is my thought process:", " the: cat ", "Here is my response:", "Here cat"),
    "harmony": ("<|channel|>analysis<|message|>", "the", f"<|end|>{FINAL}", "then dog"),
}
"""Start, thoughts, end, answer."""


@functools.cache
def compiler(name: str) -> GrammarCompiler:
    return GrammarCompiler(model(name))


@functools.cache
def answer_format(name: str) -> AnswerFormat:
    return AnswerFormat(model(name))


def constraint(name: str) -> GrammarConstraint:
    prompt = ChatPrompt(SAID)
    opening = answer_format(name).opening(prompt, render(model(name), prompt))
    assert opening is not None
    return compiler(name).compile(GRAMMAR, opening)


def allowed(bits: bytes) -> np.ndarray:
    return np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")


def ids(name: str, rng: random.Random) -> list[int]:
    """Tokens of the text, of its thoughts random ones."""
    start, thoughts, end, answer = TEXTS[name]
    random_ids = token_ids(name, thoughts, rng=rng)
    parts = [token_ids(name, part) for part in (start, end, answer)]
    return [*parts[0], *random_ids, *parts[1], *parts[2]]


@pytest.mark.parametrize("name", NAMES)
def test_drafts_get_the_masks_that_tokens_would_get(name: str) -> None:
    rng = random.Random(SEED)
    print(f"replay with MLXSERVE_TEST_SEED={SEED}")
    for _ in range(10):
        text = ids(name, rng)
        single = constraint(name)
        # masks[i]: before token i; each is computed for a row of its own, without drafts.
        masks = []
        for position in range(len(text) + 1):
            taken = text[position - 1 : position]
            masks.append(compute_masks([ConstrainedRow(0, single, taken)], 1).bits)
        assert all(allowed(mask)[token] for mask, token in zip(masks, text, strict=False))
        start = rng.randrange(len(text))
        end = rng.randrange(start, len(text)) + 1
        drafted = constraint(name)
        assert drafted.num_accepted(text) == len(text)
        drafted.advance(text[:start])
        other = rng.randrange(model(name).vocab_size)
        drafts = [*text[start:end], other]
        row = ConstrainedRow(1, drafted.copy(), [], drafts)
        found = compute_masks([row], 2 + len(drafts) + 1)
        assert not found.failures
        for offset in range(len(drafts)):
            assert found.row(1 + offset).bits == masks[start + offset], (name, text, start, offset)
        # What num_accepted says is what the masks allow.
        num = drafted.num_accepted(drafts)
        assert num == len(drafts) - (not allowed(masks[end])[other])
        # Rows of others stay free.
        assert allowed(found.row(0).bits).all()


@pytest.mark.parametrize("name", NAMES)
def test_no_end_within_thoughts(name: str) -> None:
    made = constraint(name)
    text = ids(name, random.Random(1))
    answer = token_ids(name, TEXTS[name][-1])
    (eos,) = model(name).eos_token_ids
    for number in range(len(text) - len(answer) + 1):
        begun = made.copy()
        begun.advance(text[:number])
        assert begun.num_accepted([eos]) == 0
    made.advance(text)
    assert made.num_accepted([eos]) == 1


def test_a_token_with_more_than_the_end_is_refused() -> None:
    """The grammar would miss what stands behind the end in the same token."""
    name = "granite"
    tokenizer = model(name)
    made = constraint(name)
    made.advance(token_ids(name, "Here is my thought process: Hm Here is my response"))
    colon = tokenizer.token_id(":")
    assert colon is not None
    bits = allowed(compute_masks([ConstrainedRow(0, made, [])], 1).bits)
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.token_bytes(token_id)
        if text.startswith(b":"):
            assert bits[token_id] == (not text[1:].strip())
    assert made.num_accepted([colon, *token_ids(name, "the cat")]) > 1


def test_where_nothing_is_thought_there_is_no_opening() -> None:
    prompt = ChatPrompt(SAID)
    for name, prompt in [
        ("plain", ChatPrompt(SAID)),
        ("qwen", ChatPrompt(SAID, template_kwargs={"enable_thinking": False})),
        ("qwen", ChatPrompt((*SAID, {"role": "assistant", "content": "It is"}))),
    ]:
        assert answer_format(name).opening(prompt, render(model(name), prompt)) is None
