"""The masks that compiled grammars give: every kind of tokenizer, drafts, failures."""

import json
import random
import threading
import time
from typing import Any

import pytest
import tiny_tokenizers
from helpers_grammar import (
    TOKENIZERS,
    accepts,
    allowed,
    compile_regex,
    compile_schema,
    compiler,
    encode,
    token_ids,
    tokenizer,
)

from mlxserve.core.constraint import JSON_OBJECT, ConstrainedRow, Grammar
from mlxserve.errors import InvalidParameter
from mlxserve.text import grammar as grammar_module
from mlxserve.text.detokenizer import IncrementalDetokenizer
from mlxserve.text.grammar import GrammarCompiler
from mlxserve.text.token_constraint import compute_masks
from mlxserve.text.tokenizer import Tokenizer

# --- what is allowed ---


def test_whitespace_is_bounded_unless_a_pattern_says_otherwise() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], "additionalProperties": False}
    compact, pretty, wide = '{"a":null}', json.dumps({"a": None}, indent=4), '{"a":   null}'
    for pattern, expected in ((None, (1, 1, 0)), ("", (1, 0, 0)), (r"\s*", (1, 1, 1)), (" {0,3}", (1, 0, 1))):
        constraint = compile_schema(schema, whitespace_pattern=pattern)
        assert tuple(accepts(constraint, text) for text in (compact, pretty, wide)) == expected


def test_the_end_is_allowed_just_where_the_grammar_can_end() -> None:
    (eos,) = tokenizer().eos_token_ids
    constraint = compile_regex("a(bc)?")
    assert eos not in allowed(constraint)
    assert eos in allowed(constraint, encode("a"))
    assert eos not in allowed(constraint, encode("b"))
    assert allowed(constraint, encode("c")) == [eos]
    assert constraint.num_tokens == 3


def test_every_end_of_sequence_token_ends_and_none_is_text() -> None:
    """Also one that the tokenizer does not call special."""
    hf_tokenizer = tiny_tokenizers.byte_level()
    ends = hf_tokenizer.convert_tokens_to_ids(["</s>", "<|im_end|>", "</think>"])
    made = Tokenizer(hf_tokenizer, frozenset({*ends, 10_000}))
    assert [made.is_special(end) for end in ends] == [True, True, False]
    constraint = GrammarCompiler(made).compile(Grammar("regex", r"(.|\n){4}", "p"))
    assert not set(allowed(constraint)) & set(ends)
    assert not any(map(made.is_special, allowed(constraint)))
    assert allowed(constraint, made.encode("abcd", add_special_tokens=False)) == sorted(ends)


def test_a_model_without_an_end_is_refused() -> None:
    for ends in (frozenset[int](), frozenset({10_000})):
        made = GrammarCompiler(Tokenizer(tiny_tokenizers.byte_level(), ends))
        with pytest.raises(InvalidParameter, match="no end-of-sequence token"):
            made.compile(Grammar("json_schema", JSON_OBJECT, "p"))


CAT_SCHEMA = {
    "type": "object",
    "properties": {"the cat": {"const": "on the mat"}},
    "required": ["the cat"],
    "additionalProperties": False,
}
GRAMMARS = [
    Grammar("json_schema", CAT_SCHEMA, "p"),
    Grammar("regex", "(the cat|the dog) sat on the (mat|log)", "p"),
    Grammar("regex", "[a-t ]{1,12}", "p"),
    Grammar("choice", ("the log", "them", "their", "then"), "p"),
]


def walk(kind: str, grammar: Grammar, rng: random.Random) -> tuple[str, bytes]:
    """The answer of a model that chooses anything that is allowed: as clients see it, and as the grammar does."""
    constraint = compiler(kind).compile(grammar)
    made = tokenizer(kind)
    detokenizer = IncrementalDetokenizer(made)
    text, data, new = "", b"", []
    while True:
        choices = allowed(constraint, new)
        token_id = rng.choice(choices)
        if token_id in made.eos_token_ids:
            return text + detokenizer.finish(), data
        text += detokenizer.add(token_id)
        data += made.token_bytes(token_id)
        new = [token_id]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_every_kind_of_tokenizer(kind: str) -> None:
    """What the client reads is what the grammar allowed, also where a decoder drops the space of a first token."""
    rng = random.Random(3)
    # The last vocabulary has no braces.
    for grammar in GRAMMARS[kind == "metaspace" :]:
        texts = set()
        for _ in range(12):
            text, data = walk(kind, grammar, rng)
            assert text == data.decode()
            ids = tokenizer("single bytes").encode(text, add_special_tokens=False)
            again = compiler("single bytes").compile(grammar)
            assert again.num_accepted([*ids, *tokenizer("single bytes").eos_token_ids]) == len(ids) + 1
            texts.add(text)
        assert len(texts) > 1 or grammar.kind == "json_schema"


def test_text_without_a_choice_is_written_as_the_tokenizer_would() -> None:
    made = tokenizer()
    constraint = compile_regex("the cat sat on the mat")
    expected, ids = encode("the cat sat on the mat"), []
    for _ in expected:
        (token_id,) = allowed(constraint, ids[-1:])
        ids.append(token_id)
    assert ids == expected
    assert allowed(constraint, ids[-1:]) == list(made.eos_token_ids)


def test_what_the_vocabulary_cannot_write() -> None:
    """Metaspace has no bytes to fall back to: known at once where nothing can be begun, else when it comes to it."""
    for pattern in ("\u0416+", "\u0416[ab]", "(\u0416|\u0417)a"):
        with pytest.raises(InvalidParameter, match="no text that this model can write"):
            compile_regex(pattern, "metaspace")
    constraint = compile_regex("the[\u0416\u0417]", "metaspace")
    ids = tokenizer("metaspace").encode("the", add_special_tokens=False)
    rows = [ConstrainedRow(1, constraint, ids[1:] if tokenizer("metaspace").token_bytes(ids[0]) == b" " else ids)]
    masks = compute_masks(rows, 3)
    assert set(masks.failures) == {1}
    assert masks.failures[1]


def test_a_token_that_is_not_allowed_fails_that_row_for_good() -> None:
    wrong, right = compile_regex("a+"), compile_regex("a+")
    masks = compute_masks([ConstrainedRow(0, wrong, encode("x")), ConstrainedRow(2, right, encode("a"))], 3)
    assert set(masks.failures) == {0}
    assert "doesn't satisfy the grammar" in masks.failures[0]
    assert masks.row(0).failures == {0: masks.failures[0]}
    assert not masks.row(2).failures
    assert set(compute_masks([ConstrainedRow(0, wrong, encode("a"))], 1).failures) == {0}


# --- many rows, drafts ---


def test_rows_together_have_the_masks_they_have_alone() -> None:
    patterns = ["a+", "the (cat|dog)", "[a-z]{3}", "\\d+", "x?y?z?"] * 2
    for num_together in (3, len(patterns)):
        some = patterns[:num_together]
        rows = [ConstrainedRow(2 * index, compile_regex(pattern), ()) for index, pattern in enumerate(some)]
        masks = compute_masks(rows, 2 * num_together)
        for index, pattern in enumerate(some):
            assert token_ids(masks.row(2 * index).bits) == allowed(compile_regex(pattern))
            assert set(masks.row(2 * index + 1).bits) == {0xFF}


def test_masks_after_drafts_are_those_that_the_tokens_would_lead_to() -> None:
    pattern, text = "(the|then) (cat|dog)!", encode("the cat!")
    drafted, plain, late = compile_regex(pattern), compile_regex("a+"), compile_regex(pattern)
    rows = [
        ConstrainedRow(0, plain, ()),
        ConstrainedRow(1, drafted, (), text),
        ConstrainedRow(len(text) + 2, late, text[:2], text[2:]),
    ]
    num_rows = 2 + len(text) + len(text) - 1
    masks = compute_masks(rows, num_rows)
    assert not masks.failures
    step_by_step = compile_regex(pattern)
    expected = [allowed(step_by_step), *(allowed(step_by_step, [token_id]) for token_id in text)]
    assert [token_ids(masks.row(index).bits) for index in range(1, len(text) + 2)] == expected
    assert [token_ids(masks.row(index).bits) for index in range(len(text) + 2, num_rows)] == expected[2:]
    assert (drafted.num_tokens, late.num_tokens) == (0, 2)
    assert allowed(drafted) == expected[0]
    assert allowed(late) == expected[2]


def test_drafts_that_are_not_allowed() -> None:
    constraint = compile_regex("abc")
    draft = [*encode("a"), *encode("x"), *encode("c")]
    assert constraint.num_accepted(draft) == 1
    masks = compute_masks([ConstrainedRow(0, constraint, (), draft)], 4)
    assert not masks.failures
    assert draft[1] not in token_ids(masks.row(1).bits)
    assert constraint.num_tokens == 0
    assert constraint.num_accepted(encode("abc")) == len(encode("abc"))


def test_the_vocabulary_is_built_once_also_by_threads_that_want_it_together(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Tokenizer] = []
    stock = grammar_module._vocabulary

    def slow(made: Tokenizer) -> Any:
        built.append(made)
        time.sleep(0.02)
        return stock(made)

    monkeypatch.setattr(grammar_module, "_vocabulary", slow)
    made = GrammarCompiler(tokenizer())
    assert not built
    threads = [threading.Thread(target=made.compile, args=(Grammar("regex", "a", "p"),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
