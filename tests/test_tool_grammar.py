"""Grammars of answers that must call: held against the parser, with and without control tokens for the markers."""

import functools
import os
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
import tiny_tokenizers
from test_tool_calls import calls_of, parse_pieces
from tokenizers import AddedToken
from tool_call_cases import ALL, CALLS, CLOCK, INTEGER, STRING, TOOLS, WEATHER, schema, tool, write

from mlxserve.core.constraint import ConstrainedRow
from mlxserve.core.generation import ToolChoice
from mlxserve.errors import InvalidParameter
from mlxserve.text.grammar import GrammarCompiler
from mlxserve.text.token_constraint import GrammarConstraint, compute_masks
from mlxserve.text.tokenizer import Tokenizer
from mlxserve.text.tool_calls import ToolFormat
from mlxserve.text.tool_calls import families as known
from mlxserve.text.tool_calls.family import Family

SEED = int(os.environ.get("MLXSERVE_TEST_SEED", random.randrange(10**6)))
REQUIRED = ToolChoice("required")
PYTHONIC = (known.LFM2, known.LLAMA4)


@functools.cache
def tokenizer(family: Family, *, has_control_tokens: bool) -> Tokenizer:
    hf_tokenizer = tiny_tokenizers.byte_level()
    tokens = [AddedToken(marker, normalized=False, special=has_control_tokens) for marker in family.all_markers]
    hf_tokenizer.add_tokens(tokens, special_tokens=has_control_tokens)
    return Tokenizer(hf_tokenizer, frozenset({hf_tokenizer.eos_token_id}))


def tool_format(family: Family, *, has_control_tokens: bool) -> ToolFormat:
    its = tokenizer(family, has_control_tokens=has_control_tokens)
    ids = {marker: its.token_id(marker) for marker in family.all_markers} if has_control_tokens else {}
    return ToolFormat(family, {marker: token_id for marker, token_id in ids.items() if token_id is not None})


def constraint(
    family: Family,
    choice: ToolChoice = REQUIRED,
    tools: list[dict[str, Any]] = TOOLS,
    *,
    has_control_tokens: bool = True,
) -> GrammarConstraint:
    grammar = tool_format(family, has_control_tokens=has_control_tokens).grammar(tools, choice)
    return _compiler(family, has_control_tokens).compile(grammar)


@functools.cache
def _compiler(family: Family, has_control_tokens: bool) -> GrammarCompiler:
    return GrammarCompiler(tokenizer(family, has_control_tokens=has_control_tokens))


def accepts(family: Family, text: str, found: GrammarConstraint, *, has_control_tokens: bool = True) -> bool:
    """Whether the text may be an answer from beginning to end."""
    its = tokenizer(family, has_control_tokens=has_control_tokens)
    token_ids = its.encode(text, add_special_tokens=False)
    return found.num_accepted([*token_ids, *its.eos_token_ids]) == len(token_ids) + 1


@pytest.mark.parametrize("has_control_tokens", [True, False], ids=["control tokens", "text"])
@pytest.mark.parametrize("family", ALL, ids=lambda family: family.name)
def test_what_templates_write_is_accepted(family: Family, has_control_tokens: bool) -> None:
    found = constraint(family, has_control_tokens=has_control_tokens)
    for calls in CALLS:
        if family in PYTHONIC:
            # Python's quotes are read; JSON's are written.
            calls = [call for call in calls if call == WEATHER]
            text = write(family, calls or [WEATHER]).replace("'", '"')
        else:
            text = write(family, calls)
        assert accepts(family, text, found, has_control_tokens=has_control_tokens), text
    assert accepts(family, write(family, [CLOCK]), found, has_control_tokens=has_control_tokens)


@pytest.mark.parametrize("family", ALL, ids=lambda family: family.name)
def test_what_is_no_call_of_these_tools_is_refused(family: Family) -> None:
    found = constraint(family)
    wrong = [
        [("rm_rf", {"path": "/"})],
        [("get_weather", {})],
        [("get_weather", {"city": "a", "days": [1]})],
        [("get_weather", {"city": "a", "more": "b"})],
        [("search", {"query": "a", "exact": 7})],
    ]
    for calls in wrong:
        text = write(family, calls).replace("'", '"')
        assert not accepts(family, text, found), text
    for text in ("", "Hello", write(family, [WEATHER])[:-1]):
        assert not accepts(family, text, found), text


@pytest.mark.parametrize("family", ALL, ids=lambda family: family.name)
def test_the_choice_decides_how_many_calls_and_of_what(family: Family) -> None:
    one = constraint(family, ToolChoice("required", parallel=False))
    assert accepts(family, write(family, [CLOCK]), one)
    assert not accepts(family, write(family, [CLOCK, CLOCK]), one)
    named = constraint(family, ToolChoice("required", name="clock"))
    assert accepts(family, write(family, [CLOCK, CLOCK]), named)
    assert not accepts(family, write(family, [WEATHER]).replace("'", '"'), named)


@pytest.mark.parametrize("has_control_tokens", [True, False], ids=["control tokens", "text"])
@pytest.mark.parametrize("family", ALL, ids=lambda family: family.name)
def test_whatever_the_grammar_lets_through_is_read_as_valid_calls(family: Family, has_control_tokens: bool) -> None:
    chance = random.Random(SEED)
    schemas = {each["function"]["name"]: each["function"]["parameters"] or {} for each in TOOLS}
    for choice in (REQUIRED, ToolChoice("required", name="search")):
        for _ in range(2):
            text = random_answer(family, choice, chance, has_control_tokens=has_control_tokens)
            if text is None:
                continue
            calls = calls_of(parse_pieces(family, [text], TOOLS))
            assert calls, f"{text!r}, MLXSERVE_TEST_SEED={SEED}"
            for name, arguments in calls:
                jsonschema.validate(arguments, schemas[name])


def random_answer(family: Family, choice: ToolChoice, chance: random.Random, *, has_control_tokens: bool) -> str | None:
    """An answer of tokens chosen at random among those allowed, endings before others; None if it takes too long."""
    found = constraint(family, choice, has_control_tokens=has_control_tokens).copy()
    its = tokenizer(family, has_control_tokens=has_control_tokens)
    (eos,) = its.eos_token_ids
    text = b""
    taken: list[int] = []
    for _ in range(250):
        masks = compute_masks([ConstrainedRow(0, found, taken)], 1)
        assert not masks.failures, masks.failures
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(masks.bits, np.uint8), bitorder="little"))
        if eos in allowed and chance.random() < 0.5:
            return text.decode(errors="replace")
        ending = [token for token in allowed if set(its.token_bytes(token)) & set(b'"}])<|>') or its.is_special(token)]
        pool = ending if ending and chance.random() < 0.5 else list(allowed)
        token = int(chance.choice(pool))
        if token == eos:
            return text.decode(errors="replace")
        text += its.token_bytes(token)
        taken = [token]
    return None


# --- what cannot be enforced, and what is ---


@pytest.mark.parametrize(
    ("choice", "tools", "param", "message"),
    [
        (ToolChoice("required", name="x"), TOOLS, "tool_choice", "no tool has the name 'x'; the tools are get_weather"),
        (REQUIRED, [tool("f", {"not": {}})], "tools[0].function.parameters", "'not' is not supported"),
        (REQUIRED, [TOOLS[0], tool("f", {"properties": {"a": False}, "required": ["a"]})], "tool_choice", "'a' is"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused(choice: ToolChoice, tools: Any, param: str, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message) as caught:
        _compiler(known.HERMES, True).compile(tool_format(known.HERMES, has_control_tokens=True).grammar(tools, choice))
    assert caught.value.param == param


@pytest.mark.parametrize("family", [known.QWEN3_CODER, known.LFM2, known.GLM], ids=lambda family: family.name)
def test_formats_without_an_object_need_listed_parameters(family: Family) -> None:
    parameters = {"anyOf": [schema(["a"], a=STRING), schema(["b"], b=STRING)]}
    constraint(known.HERMES, tools=[tool("f", parameters)])
    with pytest.raises(InvalidParameter, match="listed as 'properties'") as caught:
        constraint(family, tools=[tool("f", parameters)])
    assert caught.value.param == "tools[0].function.parameters"


@pytest.mark.parametrize(
    ("of", "good", "bad"),
    [
        ({"enum": ["red", "dark blue"]}, "dark blue", "blue"),
        ({"const": "x"}, "x", "y"),
        ({"type": "string", "pattern": "^[a-z]+/[a-z]+$"}, "a/b", "a/b/c"),
        ({"type": "string", "pattern": "b+"}, "abba", "aa"),
        ({"type": "string", "minLength": 2, "maxLength": 3}, "äbc", "abcd"),
        ({"anyOf": [STRING, {"type": "null"}]}, "null", None),
        ({"type": "integer", "minimum": 3}, "4", "2"),
        ({"$ref": "#/$defs/Days"}, "4", "many"),
        ({"anyOf": [INTEGER, {"type": "boolean"}]}, "true", "yes"),
        (True, "{any < text", None),
    ],
)
@pytest.mark.parametrize("has_control_tokens", [True, False], ids=["control tokens", "text"])
def test_arguments_as_bare_text_follow_their_schemas(
    of: Any, good: str, bad: str | None, has_control_tokens: bool
) -> None:
    tools = [tool("f", {**schema(["a"], a=of), "$defs": {"Days": INTEGER}})]
    for family in (known.QWEN3_CODER, known.GLM):
        found = constraint(family, tools=tools, has_control_tokens=has_control_tokens)
        assert accepts(family, write(family, [("f", {"a": good})]), found, has_control_tokens=has_control_tokens)
        if bad is not None:
            text = write(family, [("f", {"a": bad})])
            assert not accepts(family, text, found, has_control_tokens=has_control_tokens)


@pytest.mark.parametrize("family", [known.GEMMA4, known.LFM2, known.HERMES], ids=lambda family: family.name)
@pytest.mark.parametrize(
    ("of", "good", "bad"),
    [
        ({"enum": ["red", 2, None]}, "red", "blue"),
        ({"type": "array", "items": INTEGER}, [1, 2], ["a"]),
        ({"type": "object", "properties": {"x": INTEGER}, "required": ["x"]}, {"x": 1}, {"x": "a"}),
        ({"anyOf": [STRING, INTEGER]}, 3, True),
        ({"$ref": "#/$defs/Days"}, 4, "many"),
    ],
)
def test_arguments_with_types_follow_their_schemas(family: Family, of: Any, good: Any, bad: Any) -> None:
    tools = [tool("f", {**schema(["a"], a=of), "$defs": {"Days": INTEGER}})]
    found = constraint(family, tools=tools)
    assert accepts(family, write(family, [("f", {"a": good})]).replace("'", '"'), found)
    assert not accepts(family, write(family, [("f", {"a": bad})]).replace("'", '"'), found)


@pytest.mark.parametrize("family", [known.GEMMA4, known.FUNCTION_GEMMA], ids=lambda family: family.name)
@pytest.mark.parametrize("of", [{"type": "array", "minItems": 2}, {"$ref": "#/properties/a"}, {"const": []}])
def test_what_gemmas_notation_cannot_be_held_to_is_refused(family: Family, of: Any) -> None:
    with pytest.raises(InvalidParameter, match="this model's calls") as caught:
        constraint(family, tools=[tool("f", schema(["a"], a=of))])
    assert caught.value.param == "tools[0].function.parameters"


def test_optional_parameters_may_be_left_out_in_any_combination() -> None:
    tools = [tool("f", schema(["b"], a=INTEGER, b=INTEGER, c=INTEGER))]
    for family in (known.LFM2, known.GEMMA4, known.GLM47, known.KIMI_K3):
        found = constraint(family, tools=tools)
        for names in ("b", "ab", "bc", "abc"):
            assert accepts(family, write(family, [("f", dict.fromkeys(names, 1))]), found)
        for names in ("", "a", "ac", "ba"):
            assert not accepts(family, write(family, [("f", dict.fromkeys(names, 1))]), found)
