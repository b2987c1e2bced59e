"""JSON schemas for the tests of structured output, by name. Every supported keyword and format is among them."""

from typing import Any

Schema = dict[str, Any] | bool

INTEGER, NUMBER, STRING = {"type": "integer"}, {"type": "number"}, {"type": "string"}
BOOLEAN, NULL = {"type": "boolean"}, {"type": "null"}
WORD = {"type": "string", "pattern": "^[a-z]{1,4}$"}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
DIALECT_7 = "http://json-schema.org/draft-07/schema#"


def obj(required: str = "", /, *, extra: Schema | None = False, **properties: Schema) -> dict[str, Any]:
    """An object; `required` are names separated by spaces, `extra` additionalProperties."""
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": required.split()}
    return schema if extra is None else schema | {"additionalProperties": extra}


def all_of(**properties: Schema) -> dict[str, Any]:
    """An object with exactly these properties."""
    return obj(" ".join(properties), **properties)


def arr(items: Schema, least: int = 0, most: int = 3, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most} | more


def tagged(tag: str, **properties: Schema) -> dict[str, Any]:
    return all_of(kind={"const": tag}, **properties)


SCALARS: dict[str, Schema] = {
    "string": STRING,
    "integer": INTEGER,
    "number": NUMBER,
    "boolean": BOOLEAN,
    "null": NULL,
    "string or null": {"type": ["string", "null"]},
    "integer or boolean": {"type": ["integer", "boolean"]},
    "any scalar": {"type": ["string", "number", "boolean", "null"]},
    "one type in a list": {"type": ["boolean"]},
    "enum of strings": {"enum": ["red", "green", "blue"]},
    "enum of a type": {"type": "string", "enum": ["north", "south"]},
    "enum of all types": {"enum": [1, -2.5, "x", True, None, [1, "a"], {"k": [None]}]},
    "enum of awkward strings": {
        "enum": ['quo"te', "back\\slash", "line\nbreak", "tab\t", "\u00e9\u4e2d\U0001f389", ""]
    },
    "enum of one": {"enum": ["only"]},
    "enum of prefixes": {"enum": ["a", "ab", "abc"]},
    "enum cut by type": {"type": "integer", "enum": [1, "a", 2, None]},
    "const string": {"const": "fixed"},
    "const number": {"const": 42},
    "const float": {"const": -0.125},
    "const null": {"const": None},
    "const true": {"const": True},
    "const object": {"const": {"a": 1, "b": [True, "x"]}},
    "const list": {"const": [1, [2, []]]},
    "const empty object": {"const": {}},
}
STRINGS: dict[str, Schema] = {
    "minLength": {"type": "string", "minLength": 3, "maxLength": 30},
    "maxLength": {"type": "string", "maxLength": 2},
    "exact length": {"type": "string", "minLength": 4, "maxLength": 4},
    "length 0": {"type": "string", "maxLength": 0},
    "pattern anchored": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "pattern open at both ends": {"type": "string", "pattern": "ab", "maxLength": 8},
    "pattern open at the end": {"type": "string", "pattern": "^x-", "maxLength": 8},
    "pattern open at the start": {"type": "string", "pattern": "y$", "maxLength": 8},
    "pattern of alternatives": {"type": "string", "pattern": "^(cat|dog|bird)s?$"},
    "pattern with a class": {"type": "string", "pattern": '^[^"\\\\a-y]{1,3}$'},
    "pattern with digits": {"type": "string", "pattern": "^\\d{4}-\\d{2}$"},
    "pattern with words": {"type": "string", "pattern": "^\\w{1,5}$"},
    "pattern with quotes": {"type": "string", "pattern": '^"[a-c]"$'},
    "pattern with unicode": {"type": "string", "pattern": "^[\u00e0-\u00ff]{1,3}$"},
    "pattern and length": {"type": "string", "pattern": "^a+$", "minLength": 2, "maxLength": 4},
    "pattern optional parts": {"type": "string", "pattern": "^v?[0-9](\\.[0-9]){0,2}$"},
    "format date": {"type": "string", "format": "date"},
    "format time": {"type": "string", "format": "time"},
    "format date-time": {"type": "string", "format": "date-time"},
    "format duration": {"type": "string", "format": "duration"},
    "format email": {"type": "string", "format": "email"},
    "format hostname": {"type": "string", "format": "hostname"},
    "format ipv4": {"type": "string", "format": "ipv4"},
    "format ipv6": {"type": "string", "format": "ipv6"},
    "format uri": {"type": "string", "format": "uri"},
    "format uuid": {"type": "string", "format": "uuid"},
    "format in an object": all_of(day={"type": "string", "format": "date"}, id={"type": "string", "format": "uuid"}),
}
NUMBERS: dict[str, Schema] = {
    "minimum": {"type": "integer", "minimum": 17},
    "maximum": {"type": "integer", "maximum": -4},
    "range": {"type": "integer", "minimum": -3, "maximum": 12},
    "range of one": {"type": "integer", "minimum": 5, "maximum": 5},
    "wide range": {"type": "integer", "minimum": -12345, "maximum": 987654},
    "exclusive range": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6},
    "both kinds of bounds": {"type": "integer", "minimum": 3, "exclusiveMinimum": 3, "maximum": 9},
    "positive number": {"type": "number", "exclusiveMinimum": 0, "maximum": 100},
    "unit interval": {"type": "number", "minimum": 0, "maximum": 1},
    "open unit interval": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "bounds with decimals": {"type": "number", "minimum": -1.25, "maximum": 3.75},
    "integers between decimals": {"type": "integer", "minimum": 1.5, "maximum": 4.5},
    "multipleOf": {"type": "integer", "multipleOf": 7},
    "multipleOf and range": {"type": "integer", "multipleOf": 5, "minimum": 12, "maximum": 40},
    "multipleOf a half": {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 10},
    "multipleOf a cent": {"type": "number", "multipleOf": 0.25},
    "bounds without a type": {"minimum": 3, "maximum": 5},
}
ARRAYS: dict[str, Schema] = {
    "array": {"type": "array", "maxItems": 2},
    "items": arr(INTEGER),
    "items of strings": arr(WORD, 1, 4),
    "exact items": arr(BOOLEAN, 3, 3),
    "no items": arr(STRING, 0, 0),
    "items without a type": {"items": DIGIT, "maxItems": 3},
    "many items": arr(DIGIT, 6, 9),
    "nested arrays": arr(arr(DIGIT, 1, 2), 1, 2),
    "matrix": arr(arr(DIGIT, 3, 3), 3, 3),
    "array of objects": arr(all_of(x=DIGIT), 1, 2),
    "array of enums": arr({"enum": ["a", "b"]}, 2, 2),
    "array of nulls": arr(NULL, 0, 4),
    "prefixItems": {"type": "array", "prefixItems": [DIGIT, WORD], "items": False, "minItems": 2},
    "prefixItems and items": {"type": "array", "prefixItems": [WORD], "items": BOOLEAN, "minItems": 1, "maxItems": 3},
    "prefixItems, some needed": {"type": "array", "prefixItems": [DIGIT, DIGIT, DIGIT], "items": False, "minItems": 1},
    "prefixItems of true": {"type": "array", "prefixItems": [True], "items": False, "minItems": 1},
    "items as a list": {"$schema": DIALECT_7, "type": "array", "items": [DIGIT, WORD], "additionalItems": False},
    "additionalItems": {
        "$schema": DIALECT_7,
        "type": "array",
        "items": [WORD],
        "additionalItems": NULL,
        "minItems": 1,
        "maxItems": 3,
    },
}
OBJECTS: dict[str, Schema] = {
    "object": {"type": "object"},
    "object of digits": {"type": "object", "additionalProperties": DIGIT},
    "empty object": {"type": "object", "additionalProperties": False},
    "properties": all_of(name=WORD, age=DIGIT),
    "one optional": obj("a", a=DIGIT, b=DIGIT),
    "all optional": obj(a=DIGIT, b=WORD, c=NULL),
    "last required": obj("c", a=DIGIT, b=DIGIT, c=DIGIT),
    "required without a schema": {"type": "object", "required": ["k"], "additionalProperties": DIGIT},
    "required and open": obj("a", a=DIGIT, extra=None),
    "open with a type": obj("a", a=DIGIT, extra=WORD),
    "property of any value": obj("a", a=True),
    "property that must not be": obj("a", a=DIGIT, b=False),
    "properties without a type": {"properties": {"a": DIGIT}, "required": ["a"], "additionalProperties": False},
    "awkward names": obj('q"', **{'q"': DIGIT, "back\\": DIGIT, "\u00fc": DIGIT, "a b": DIGIT, "": DIGIT}),
    "names that begin alike": all_of(a=DIGIT, ab=DIGIT, abc=DIGIT),
    "patternProperties": {"type": "object", "patternProperties": {"^x[0-9]$": DIGIT}, "additionalProperties": False},
    "patternProperties, two": {
        "type": "object",
        "patternProperties": {"^n_[a-z]$": DIGIT, "^s_[a-z]$": WORD},
        "additionalProperties": False,
    },
    "patternProperties beside properties": obj("id", id=DIGIT) | {"patternProperties": {"^x-[a-z]$": WORD}},
    "minProperties": {"type": "object", "additionalProperties": DIGIT, "minProperties": 1, "maxProperties": 3},
    "maxProperties": {"type": "object", "additionalProperties": NULL, "maxProperties": 1},
    "nested": all_of(a=all_of(b=all_of(c=DIGIT))),
    "deeply nested": all_of(a=all_of(b=all_of(c=all_of(d=all_of(e=all_of(f=BOOLEAN)))))),
    "array inside": all_of(tags=arr(WORD), scores=arr(DIGIT, 1, 3)),
    "many properties": obj("p03 p11", **{f"p{index:02}": DIGIT for index in range(16)}),
    "twenty required": all_of(**{f"k{index}": NULL for index in range(20)}),
    "annotated": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://schemas.example/person",
        "$comment": "c",
        "title": "Person",
        "description": "d",
        "examples": [{"a": 1}],
        "deprecated": False,
        **obj("a", a=DIGIT | {"title": "A", "default": 1, "readOnly": True, "writeOnly": False}),
    },
}
COMBINED: dict[str, Schema] = {
    "true": True,
    "empty": {},
    "anyOf": {"anyOf": [DIGIT, WORD]},
    "anyOf of objects": {"anyOf": [all_of(a=DIGIT), all_of(b=WORD)]},
    "anyOf beside a type": {"type": "integer", "anyOf": [{"minimum": 90, "maximum": 99}, {"minimum": 1, "maximum": 3}]},
    "anyOf with null": all_of(a={"anyOf": [WORD, NULL]}),
    "anyOf within anyOf": {"anyOf": [{"anyOf": [DIGIT, NULL]}, {"anyOf": [BOOLEAN, {"const": "x"}]}]},
    "anyOf of lengths": {"anyOf": [{"type": "string", "maxLength": 1}, {"type": "string", "pattern": "^zz{0,3}$"}]},
    "oneOf by type": {"oneOf": [DIGIT, WORD, NULL]},
    "oneOf by constant": {"oneOf": [tagged("cat", lives=DIGIT), tagged("dog", good=BOOLEAN)]},
    "oneOf of constants": {"oneOf": [{"const": "a"}, {"const": "b"}, {"const": 1}]},
    "oneOf by enum": {"oneOf": [all_of(k={"enum": ["a", "b"]}), all_of(k={"enum": ["c"]})]},
    "oneOf in an array": arr({"oneOf": [tagged("n", v=DIGIT), tagged("s", v=WORD)]}, 1, 2),
    "allOf": {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 8}]},
    "allOf of objects": {
        "allOf": [obj("a", a=DIGIT, extra=None), obj("b", b=WORD, extra=None)],
        "maxProperties": 2,
    },
    "allOf beside properties": {"allOf": [{"required": ["a"]}], **obj(a=DIGIT, b=DIGIT)},
    "allOf of lengths": {"type": "string", "allOf": [{"minLength": 2}, {"maxLength": 4}]},
    "allOf of patterns": {"type": "string", "allOf": [{"pattern": "^[a-f]{2,4}$"}, {"pattern": "^[c-z]{1,3}$"}]},
    "allOf of enums": {"allOf": [{"enum": ["a", "b", "c"]}, {"enum": ["b", "c", "d"]}]},
    "allOf with a reference": {
        "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"b": WORD}, "required": ["b"]}],
        "maxProperties": 2,
        "$defs": {"base": obj("a", a=DIGIT, extra=None)},
    },
    "anyOf within allOf": {"allOf": [{"anyOf": [DIGIT, WORD]}, {"type": "integer"}]},
}
REFERENCES: dict[str, Schema] = {
    "$ref": {"$ref": "#/$defs/digit", "$defs": {"digit": DIGIT}},
    "$ref to definitions": {"$ref": "#/definitions/d", "definitions": {"d": WORD}},
    "$ref in a property": all_of(a={"$ref": "#/$defs/d"}, b={"$ref": "#/$defs/d"}) | {"$defs": {"d": DIGIT}},
    "$ref to a property": all_of(a=DIGIT, b={"$ref": "#/properties/a"}),
    "$ref and more": {"$ref": "#/$defs/d", "minimum": 5, "$defs": {"d": DIGIT}},
    "$ref of a $ref": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/c"}, "c": DIGIT},
    },
    "$ref with an escape": {"$ref": "#/$defs/a~1b", "$defs": {"a/b": DIGIT}},
    "$ref with a per cent": {"$ref": "#/$defs/a%20b", "$defs": {"a b": WORD}},
    "unused $defs": DIGIT | {"$defs": {"unused": STRING}},
    "linked list": {
        "$ref": "#/$defs/node",
        "$defs": {"node": all_of(v=DIGIT, next={"anyOf": [NULL, {"$ref": "#/$defs/node"}]})},
    },
    "tree": {"$ref": "#/$defs/t", "$defs": {"t": all_of(v=DIGIT, kids=arr({"$ref": "#/$defs/t"}, 0, 2))}},
    "recursion to the root": obj("v", v=DIGIT, child={"$ref": "#"}),
    "nested lists": {"$ref": "#/$defs/l", "$defs": {"l": arr({"anyOf": [DIGIT, {"$ref": "#/$defs/l"}]}, 0, 2)}},
    "mutual recursion": {
        "$ref": "#/$defs/even",
        "$defs": {"even": obj(odd={"$ref": "#/$defs/odd"}), "odd": obj("n", n=DIGIT, even={"$ref": "#/$defs/even"})},
    },
    "expression": {
        "$ref": "#/$defs/e",
        "$defs": {
            "e": {"anyOf": [DIGIT, {"$ref": "#/$defs/sum"}]},
            "sum": all_of(op={"enum": ["+", "-"]}, a={"$ref": "#/$defs/e"}, b={"$ref": "#/$defs/e"}),
        },
    },
}
USES: dict[str, Schema] = {
    "person": obj(
        "name age",
        name=WORD,
        age={"type": "integer", "minimum": 0, "maximum": 150},
        email={"type": "string", "format": "email"},
    ),
    "weather call": all_of(
        city=WORD, unit={"enum": ["celsius", "fahrenheit"]}, days={"type": "integer", "minimum": 1, "maximum": 7}
    ),
    "search call": obj("query", query={"type": "string", "maxLength": 20}, limit=DIGIT, sort={"enum": ["asc", "desc"]}),
    "tool call": {
        "anyOf": [
            all_of(name={"const": "get_time"}, arguments=all_of(zone=WORD)),
            all_of(name={"const": "add"}, arguments=all_of(a=DIGIT, b=DIGIT)),
        ]
    },
    "classification": all_of(
        label={"enum": ["spam", "ham"]}, confidence={"type": "number", "minimum": 0, "maximum": 1}
    ),
    "sentiment": all_of(
        sentiment={"enum": ["positive", "neutral", "negative"]}, because={"type": "string", "maxLength": 25}
    ),
    "invoice": all_of(
        id={"type": "string", "pattern": "^INV-[0-9]{4}$"},
        lines=arr(
            all_of(sku=WORD, count=DIGIT, price={"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 99}),
            1,
            2,
        ),
        paid=BOOLEAN,
    ),
    "calendar": all_of(
        title=WORD,
        start={"type": "string", "format": "date-time"},
        guests=arr({"type": "string", "format": "email"}, 0, 1),
    ),
    "quiz": all_of(
        question={"type": "string", "maxLength": 20},
        answers=arr(WORD, 4, 4),
        right={"type": "integer", "minimum": 0, "maximum": 3},
    ),
    "shapes": arr({"oneOf": [tagged("circle", r=DIGIT), tagged("box", w=DIGIT, h=DIGIT)]}, 1, 3),
    "chess move": all_of(
        start={"type": "string", "pattern": "^[a-h][1-8]$"}, end={"type": "string", "pattern": "^[a-h][1-8]$"}
    ),
    "rgb": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 255}, "minItems": 3, "maxItems": 3},
    "point": {"type": "array", "prefixItems": [NUMBER, NUMBER], "items": False, "minItems": 2},
    "settings": obj(
        theme={"enum": ["dark", "light"]}, size=DIGIT, flags={"type": "object", "additionalProperties": BOOLEAN}
    ),
    "thoughts and answer": all_of(steps=arr({"type": "string", "maxLength": 15}, 1, 2), answer=DIGIT),
    "pydantic's optional": {
        "$defs": {"Inner": obj("x", x=DIGIT) | {"title": "Inner"}},
        **obj("inner", inner={"$ref": "#/$defs/Inner"}, note={"anyOf": [WORD, NULL], "default": None, "title": "Note"}),
        "title": "Outer",
    },
    "openai's strict": all_of(steps=arr(all_of(explanation=WORD, output=WORD), 0, 2), final_answer=WORD),
    "file tree": {
        "$ref": "#/$defs/entry",
        "$defs": {"entry": obj("name", name=WORD, entries=arr({"$ref": "#/$defs/entry"}, 0, 2), size=DIGIT)},
    },
}

SCHEMAS: dict[str, Schema] = SCALARS | STRINGS | NUMBERS | ARRAYS | OBJECTS | COMBINED | REFERENCES | USES

UNSUPPORTED: dict[str, Schema] = {
    "$anchor": DIGIT | {"$anchor": "d"},
    "$dynamicAnchor": DIGIT | {"$dynamicAnchor": "d"},
    "$dynamicRef": {"$dynamicRef": "#d"},
    "$recursiveRef": {"$recursiveRef": "#"},
    "$vocabulary": {"$vocabulary": {}},
    "contains": arr(DIGIT, contains=DIGIT),
    "contentEncoding": STRING | {"contentEncoding": "base64"},
    "contentMediaType": STRING | {"contentMediaType": "text/html"},
    "contentSchema": STRING | {"contentSchema": {}},
    "dependencies": {"dependencies": {"a": ["b"]}},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"dependentSchemas": {"a": {}}},
    "else": {"else": False},
    "if": {"if": DIGIT},
    "maxContains": arr(DIGIT, maxContains=1),
    "minContains": arr(DIGIT, minContains=1),
    "not": {"not": DIGIT},
    "nullable": STRING | {"nullable": True},
    "propertyNames": {"type": "object", "propertyNames": {"maxLength": 2}},
    "then": {"then": False},
    "unevaluatedItems": arr(DIGIT, unevaluatedItems=False),
    "unevaluatedProperties": obj(a=DIGIT, extra=None) | {"unevaluatedProperties": False},
    "uniqueItems": arr(DIGIT, uniqueItems=True),
    "x-guidance": DIGIT | {"x-guidance": {"lenient": True}},
    "requierd": obj(a=DIGIT) | {"requierd": ["a"]},
}
"""By the keyword that is refused."""
