"""Schemas and other grammars that are refused, each with its reason."""

import threading
from typing import Any

import pytest
from corpus_grammars import REFUSED
from corpus_schemas import UNSUPPORTED
from helpers_grammar import accepts, compile_schema, compiler, encode

from mlxserve.core.constraint import JSON_OBJECT, ConstrainedRow, Grammar
from mlxserve.errors import InvalidParameter
from mlxserve.text import grammar_text, json_schema
from mlxserve.text.token_constraint import MIN_PARALLEL_ROWS, GrammarConstraint, compute_masks

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
