"""Compiling grammars, and the masks they give: what is refused, every kind of tokenizer, drafts, failures."""

import functools
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tiny_tokenizers
from corpus_grammars import REFUSED
from corpus_schemas import UNSUPPORTED
from transformers import PreTrainedTokenizerFast

from mlxserve.core.constraint import JSON_OBJECT, ConstrainedRow, Grammar
from mlxserve.errors import InvalidParameter
from mlxserve.text import grammar as grammar_module
from mlxserve.text import grammar_text, json_schema
from mlxserve.text.detokenizer import IncrementalDetokenizer
from mlxserve.text.grammar import GrammarCompiler
from mlxserve.text.token_constraint import MIN_PARALLEL_ROWS, GrammarConstraint, compute_masks
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


# --- schemas that are refused ---


@pytest.mark.parametrize(
    "schema",
    [
        {"const": -(2**63)},
        {"enum": [[{"a": 2**53 + 1}]]},
        {"type": "integer", "minimum": -1e300, "maximum": -1e200},
        {"minLength": 10**400},
    ],
)
def test_numbers_that_doubles_do_not_hold_are_refused(schema: dict[str, Any]) -> None:
    """Some of these crash the process, others would be enforced as another number."""
    with pytest.raises(InvalidParameter, match="a number beyond 2\\*\\*53"):
        compile_schema(schema)


@pytest.mark.parametrize("number", [2**53, -(2**53), 10**15])
def test_numbers_that_doubles_hold_are_enforced(number: int) -> None:
    constraint = compile_schema({"type": "integer", "minimum": number, "maximum": number})
    assert accepts(constraint, str(number))
    assert not accepts(constraint, str(number - 1))


def test_numbers_beyond_a_double_in_a_description_are_refused() -> None:
    with pytest.raises(InvalidParameter, match="cannot be read: number out of range"):
        compile_schema({"default": 10**400})


PATTERNS = [{"type": "string", "pattern": f"[a-z]{{{size}}}"} for size in range(60)]


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"allOf": PATTERNS}, "8 patterns"),
        ({"allOf": [{"properties": {"a": each}} for each in PATTERNS]}, "8 patterns"),
        ({"$defs": {"a": {"allOf": PATTERNS[:5]}}, "allOf": [*PATTERNS[5:9], {"$ref": "#/$defs/a"}]}, "8 patterns"),
        ({"allOf": [{"anyOf": [{"maxLength": i}] * 10} for i in range(10)]}, "32 alternatives"),
        ({"properties": {f"p{i}": {"allOf": [{}]} for i in range(101)}}, "more than 100 schemas have"),
    ],
)
def test_what_would_take_minutes_to_combine_is_refused(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidParameter, match=reason):
        compile_schema(schema)


def test_a_few_patterns_can_be_combined_and_many_stand_side_by_side() -> None:
    combined = compile_schema({"allOf": [{"type": "string", "pattern": "^a"}, {"pattern": "b$"}, {"maxLength": 5}]})
    assert accepts(combined, '"axb"')
    assert not accepts(combined, '"axc"')
    compile_schema({"anyOf": PATTERNS})


@pytest.mark.parametrize(
    ("pattern", "text"), [(r"[ \n]*", '{ "a":1}'), (r"\s?", '{\t"a":1}'), (r"[\s]{0,2}", '{ \n"a":1}')]
)
def test_whitespace_patterns(pattern: str, text: str) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": False}
    assert accepts(compiler().compile(Grammar("json_schema", schema, "p", pattern)), text)


@pytest.mark.parametrize("pattern", [".*", '[a-z"]*', "[^a]", r"\S", "x"])
def test_whitespace_patterns_that_let_other_things_in_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidParameter, match="a whitespace pattern may have spaces"):
        compiler().compile(Grammar("json_schema", {}, "p", pattern))


@pytest.mark.parametrize("keyword", UNSUPPORTED)
def test_unsupported_keywords_are_refused_by_name(keyword: str) -> None:
    for schema, place in (
        (UNSUPPORTED[keyword], "#"),
        ({"type": "object", "properties": {"a/b": UNSUPPORTED[keyword]}}, "#/properties/a~1b"),
        ({"anyOf": [{"type": "null"}, UNSUPPORTED[keyword]]}, "#/anyOf/1"),
    ):
        with pytest.raises(InvalidParameter) as refused:
            compile_schema(schema)
        assert f"the keyword {keyword!r} is not supported (at {place})" in str(refused.value)
        assert refused.value.param == "response_format"


def test_a_property_may_have_the_name_of_any_keyword() -> None:
    names = [*UNSUPPORTED, *json_schema.KEYWORDS]
    schema = {"type": "object", "properties": {name: {"type": "null"} for name in names}, "additionalProperties": False}
    assert accepts(compile_schema(schema), '{"not":null}')


@pytest.mark.parametrize("name", ["uri-reference", "regex", "int32", "unknown", ""])
def test_unsupported_formats_are_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidParameter, match=f"the format '{name}' is not supported; date, date-time"):
        compile_schema({"type": "string", "format": name})


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "strin"}, "'type' must be one or some of array, boolean"),
        ({"type": []}, "'type'"),
        ({"type": {"a": 1}}, "'type'"),
        ({"type": [["string"]]}, "'type'"),
        ({"minLength": -1}, "'minLength' must be a whole number from 0"),
        ({"minLength": 1.5}, "'minLength'"),
        ({"minItems": True}, "'minItems'"),
        ({"maxItems": "3"}, "'maxItems'"),
        ({"minimum": "3"}, "'minimum' must be a number"),
        ({"exclusiveMinimum": True}, "'exclusiveMinimum'"),
        ({"multipleOf": 0}, "'multipleOf' must be positive"),
        ({"multipleOf": -3}, "'multipleOf'"),
        ({"multipleOf": 1_000_003}, "'multipleOf'"),
        ({"multipleOf": 0.000123457}, "'multipleOf'"),
        ({"pattern": 3}, "'pattern' must be a string"),
        ({"pattern": "("}, "regex"),
        ({"pattern": "(?=a)b"}, "look-around"),
        ({"pattern": r"(a)\1"}, "backreference"),
        ({"enum": []}, "'enum' must be a list of values"),
        ({"enum": "a"}, "'enum'"),
        ({"anyOf": []}, "'anyOf' must be a list of schemas"),
        ({"allOf": {}}, "'allOf'"),
        ({"properties": []}, "'properties' must be an object of schemas"),
        ({"properties": {"a": 3}}, "a schema must be an object or a boolean (at #/properties/a)"),
        ({"required": "a"}, "'required' must be a list of names"),
        ({"required": [1]}, "'required'"),
        ({"items": 3}, "'items' must be a schema or a list of schemas"),
        ({"additionalProperties": "no"}, "'additionalProperties' must be a schema"),
        ({"$ref": 3}, "'$ref' must be a string"),
        ({"properties": {"a": {"$id": "x"}}}, "'$id' is not supported (at #/properties/a)"),
        ([], "a schema must be an object or a boolean"),
        ("object", "a schema must be"),
        (None, "a schema must be"),
        (False, "nothing satisfies"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum (3) is greater than maximum (2)"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength (3) is greater"),
        ({"type": "integer", "minimum": float("nan")}, "not JSON"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf is supported where"),
        ({"allOf": [{"type": "integer"}, {"type": "string"}]}, "nsatisfiable"),
    ],
)
def test_schemas_that_are_wrong(schema: Any, reason: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        compile_schema(schema)
    assert reason in str(refused.value)
    assert refused.value.param == "response_format"


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("https://example.com/schema.json", "leads out of the schema"),
        ("other.json#/$defs/a", "leads out of the schema"),
        ("file:///etc/passwd", "leads out of the schema"),
        ("#anchor", "leads out of the schema"),
        ("", "leads out of the schema"),
        ("#/$defs/missing", "leads to no schema"),
        ("#/title", "leads to no schema"),
        ("#/$defs", "leads to no schema"),
    ],
)
def test_references_that_lead_nowhere_good(reference: str, reason: str) -> None:
    schema = {"title": "t", "type": "object", "properties": {"a": {"$ref": reference}}, "$defs": {"a": {}}}
    with pytest.raises(InvalidParameter, match=reason):
        compile_schema(schema)


ROOT = {"$ref": "#"}
ENDLESS: dict[str, dict[str, Any]] = {
    "itself": {"$ref": "#"},
    "a circle": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "required": {"type": "object", "properties": {"a": ROOT}, "required": ["a"]},
    "required of others": {"type": "object", "additionalProperties": ROOT, "required": ["a"]},
    "two required of each other": {
        "$ref": "#/$defs/a",
        "$defs": {
            "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
            "b": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1},
        },
    },
    "items": {"type": "array", "items": ROOT, "minItems": 1},
    "prefixItems": {"type": "array", "prefixItems": [{"type": "null"}, ROOT], "minItems": 2},
    "every choice": {"anyOf": [{"type": "array", "items": ROOT, "minItems": 1}, ROOT]},
    "a part of all": {"allOf": [{"type": "array"}, ROOT]},
    "one choice of two": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#/$defs/a"}}},
}


@pytest.mark.parametrize("name", ENDLESS)
def test_recursion_without_end_is_refused(name: str) -> None:
    with pytest.raises(InvalidParameter, match="recursive without end"):
        compile_schema(ENDLESS[name])


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def chained(length: int) -> dict[str, Any]:
    defs: dict[str, Any] = {f"a{index}": {"$ref": f"#/$defs/a{index + 1}"} for index in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": defs | {f"a{length}": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"enum": ["x" * 30] * 3000}, "characters"),
        ({"properties": {f"p{index}": {} for index in range(1001)}}, "more than 1000 schemas"),
        (chained(1001), "more than 1000 schemas"),
        (nested(101), "more than 100 levels"),
        ({"type": "string", "pattern": "(" * 300 + "a" + ")" * 300}, "nest"),
    ],
    ids=["long", "properties", "references", "deep", "pattern"],
)
def test_schemas_that_are_too_large(schema: Any, reason: str) -> None:
    with pytest.raises(InvalidParameter, match=reason):
        compile_schema(schema)


def test_the_largest_schemas_that_are_allowed() -> None:
    """They are compiled on threads whose stack is what the system gives: one that is too deep would end the process."""
    large = [
        chained(json_schema.MAX_SUBSCHEMAS - 2),
        nested(80),
        {"type": "object", "properties": {f"p{index}": {} for index in range(998)}},
    ]
    lark = "start: r0\n" + "".join(f"r{index}: r{index + 1}\n" for index in range(grammar_text.MAX_RULES - 2))
    grammars = [Grammar("json_schema", schema, "s") for schema in large]
    grammars.append(Grammar("grammar", f'{lark}r{grammar_text.MAX_RULES - 2}: "a"', "g"))
    constraints: list[GrammarConstraint] = []
    thread = threading.Thread(target=lambda: constraints.extend(map(compiler().compile, grammars)))
    thread.start()
    thread.join()
    assert [constraint.num_accepted(encode("{")) for constraint in constraints] == [0, 0, 1, 0]
    # So many at once that other threads compute them, whose stacks are smaller.
    constraints += map(compiler().compile, grammars)
    assert len(constraints) >= MIN_PARALLEL_ROWS
    masks = compute_masks([ConstrainedRow(i, each, ()) for i, each in enumerate(constraints)], len(constraints))
    assert not masks.failures


# --- other grammars that are refused ---


@pytest.mark.parametrize("text", REFUSED)
def test_grammars_that_are_refused(text: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        compiler().compile(Grammar("grammar", text, "guided_grammar"))
    assert REFUSED[text] in str(refused.value)
    assert refused.value.param == "guided_grammar"


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("regex", "(", "p"), "unclosed group"),
        (Grammar("regex", r"\bword\b", "p"), "lookaround"),
        (Grammar("regex", "a" * 70_000, "p"), "70000 characters"),
        (Grammar("regex", "[^\\x00-\\U0010FFFF]", "p"), "p"),
        (Grammar("grammar", "", "p"), "mpty"),
        (Grammar("grammar", "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(501)), "p"), "500 rules"),
        (Grammar("grammar", "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000, "p"), "GBNF"),
        (Grammar("grammar", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000, "p"), "nested"),
        (Grammar("choice", (), "p"), "0 choices"),
        (Grammar("choice", ("x",) * 1001, "p"), "1001 choices"),
        (Grammar("json_schema", JSON_OBJECT, "p", whitespace_pattern="("), "unclosed group"),
    ],
)
def test_other_grammars_that_are_wrong(grammar: Grammar, reason: str) -> None:
    with pytest.raises(InvalidParameter, match=reason) as refused:
        compiler().compile(grammar)
    assert len(str(refused.value)) < 600


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
