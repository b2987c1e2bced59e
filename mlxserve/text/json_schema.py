"""Which JSON schemas can be enforced: every keyword is supported or refused by its name, none is ignored.

The compiler behind it is llguidance's. What that would not refuse by itself is looked for here: keywords it does not
know, values of the wrong type, references that lead out of the schema, sizes that take long, and schemas without end.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

MAX_SUBSCHEMAS = 1000
"""The compiler follows references on the stack: some 3,000 in a chain are the end of a thread's 8 MB."""
MAX_DEPTH = 100
"""Levels of objects and lists within one another; the compiler's JSON reader stops at 128."""
MAX_MULTIPLE = 10_000
"""multipleOf becomes an automaton with a state for each remainder."""

MAX_NUMBER = 2**53
"""The compiler computes with doubles, exact up to here, and crashes on some larger numbers."""
MAX_COMBINATIONS = 100
"""Places where schemas are combined, by allOf or by a $ref beside other keywords."""
MAX_COMBINED_PATTERNS = 8
"""Of one such place. The compiler intersects their automata: with twenty it takes seconds, with sixty minutes."""
MAX_COMBINED_BRANCHES = 32
"""Schemas in the anyOf and oneOf of one such place, of which the compiler may try every combination."""

ANNOTATIONS = frozenset(
    ("$comment", "$schema", "default", "deprecated", "description", "examples", "readOnly", "title", "writeOnly")
)
"""Keywords that ask for nothing."""
FORMATS = frozenset(("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"))
TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_TEXTS = ("pattern", "format", "$ref")
_SCHEMAS = ("items", "additionalItems", "additionalProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_OTHERS = ("type", "enum", "const", "multipleOf", "required")
KEYWORDS = frozenset((*_COUNTS, *_NUMBERS, *_TEXTS, *_SCHEMAS, *_LISTS, *_MAPS, *_OTHERS))
"""Keywords that are enforced."""

Path = tuple[str, ...]


class UnsupportedSchema(ValueError):
    """The message says what and where."""


def check(schema: Any) -> None:
    """Raise UnsupportedSchema unless the schema is one that is enforced as it stands."""
    nodes: dict[Path, Any] = {}
    parents: dict[Path, Path] = {}
    waiting: list[tuple[Path, Any]] = [((), schema)]
    while waiting:
        path, node = waiting.pop()
        if len(path) > MAX_DEPTH:
            raise UnsupportedSchema(f"it has more than {MAX_DEPTH} levels")
        if not isinstance(node, (dict, bool)):
            raise _fault(path, "a schema must be an object or a boolean")
        nodes[path] = node
        if len(nodes) > MAX_SUBSCHEMAS:
            raise UnsupportedSchema(f"it has more than {MAX_SUBSCHEMAS} schemas within it")
        if isinstance(node, dict):
            for keyword, value in node.items():
                _check_keyword(path, keyword, value)
            children = list(_children(path, node))
            parents |= {child: path for child, _ in children}
            waiting += children
    endings = _Endings(nodes, parents)
    endings.check()
    endings.check_combinations()


def check_values(schema: Any) -> None:
    """Raise UnsupportedSchema if a keyword has a value of the wrong type, or the schema is too large.

    For schemas that are shown to a model: keywords that cannot be enforced may stand in them.
    """
    waiting: list[tuple[Path, Any]] = [((), schema)]
    num_schemas = 0
    while waiting:
        path, node = waiting.pop()
        num_schemas += 1
        if len(path) > MAX_DEPTH or num_schemas > MAX_SUBSCHEMAS:
            raise UnsupportedSchema(f"it has more than {MAX_DEPTH} levels, or {MAX_SUBSCHEMAS} schemas within it")
        if not isinstance(node, (dict, bool)):
            raise _fault(path, "a schema must be an object or a boolean")
        if isinstance(node, dict):
            for keyword, value in node.items():
                is_right, wanted = _VALUES.get(keyword, (_is_anything, ""))
                if not is_right(value) and not (keyword == "multipleOf" and _is_number(value) and value > 0):
                    raise _fault(path, f"{keyword!r} must be {wanted}")
            waiting += _children(path, node)


def without_annotations(schema: Any) -> Any:
    """A schema that passed check(), which asks for the same and is shorter."""
    if not isinstance(schema, dict):
        return schema
    kept = {keyword: value for keyword, value in schema.items() if keyword not in ANNOTATIONS}
    for keyword, value in kept.items():
        if keyword in _MAPS:
            kept[keyword] = {name: without_annotations(child) for name, child in value.items()}
        elif isinstance(value, list) and keyword in (*_LISTS, "items"):
            kept[keyword] = [without_annotations(child) for child in value]
        elif keyword in _SCHEMAS:
            kept[keyword] = without_annotations(value)
    return kept


def _fault(path: Path, what: str) -> UnsupportedSchema:
    where = "/".join(part.replace("~", "~0").replace("/", "~1") for part in ("#", *path))
    return UnsupportedSchema(f"{what} (at {where})")


def _check_keyword(path: Path, keyword: str, value: Any) -> None:
    if keyword in ANNOTATIONS or (keyword == "$id" and not path):
        return
    if keyword not in KEYWORDS:
        raise _fault(path, f"the keyword {keyword!r} is not supported")
    is_right, wanted = _VALUES[keyword]
    if not is_right(value):
        raise _fault(path, f"{keyword!r} must be {wanted}")
    if keyword not in (*_SCHEMAS, *_LISTS, *_MAPS) and not _are_small_numbers(value):
        raise _fault(path, f"{keyword!r} has a number beyond 2**53, which cannot be enforced exactly")
    if keyword == "format" and value not in FORMATS:
        raise _fault(path, f"the format {value!r} is not supported; {', '.join(sorted(FORMATS))} are")
    if keyword == "$ref" and not re.fullmatch(r"#(/.*)?", value, re.DOTALL):
        raise _fault(path, f"the reference {value!r} leads out of the schema; '#/$defs/...' is supported")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < float("inf")


def _are_small_numbers(value: Any) -> bool:
    """Whether all numbers in it are such as MAX_NUMBER allows."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, (int, float)) and not abs(part) <= MAX_NUMBER:
            return False
        if isinstance(part, (list, dict)):
            waiting += part.values() if isinstance(part, dict) else part
    return True


def _scaled(value: float) -> Decimal:
    """0.25 -> 25, 30 -> 30."""
    number = Decimal(str(value))
    exponent = number.as_tuple().exponent
    return number.scaleb(-exponent) if isinstance(exponent, int) and exponent < 0 else number


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value) and value >= 0


def _is_multiple(value: Any) -> bool:
    return _is_number(value) and 0 < _scaled(value) <= MAX_MULTIPLE


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _are_types(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and _are_names(names) and TYPES.issuperset(names)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_anything(value: Any) -> bool:
    return True


def _is_schema(value: Any) -> bool:
    return isinstance(value, (dict, bool))


_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_COUNTS, (_is_count, "a whole number from 0")),
    **dict.fromkeys(_NUMBERS, (_is_number, "a number")),
    **dict.fromkeys(_TEXTS, (_is_text, "a string")),
    **dict.fromkeys(_SCHEMAS, (_is_schema, "a schema")),
    **dict.fromkeys(_LISTS, (_is_list, "a list of schemas")),
    **dict.fromkeys(_MAPS, (_is_object, "an object of schemas")),
    "items": (lambda value: _is_schema(value) or isinstance(value, list), "a schema or a list of schemas"),
    "type": (_are_types, f"one or some of {', '.join(sorted(TYPES))}"),
    "enum": (_is_list, "a list of values"),
    "const": (_is_anything, "any value"),
    "multipleOf": (_is_multiple, f"positive and, without its decimal point, at most {MAX_MULTIPLE}"),
    "required": (_are_names, "a list of names"),
}
"""Keyword -> what its value must be."""


def _children(path: Path, node: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    for keyword, value in node.items():
        if keyword in _LISTS or (keyword == "items" and isinstance(value, list)):
            yield from (((*path, keyword, str(index)), child) for index, child in enumerate(value))
        elif keyword in _SCHEMAS:
            yield (*path, keyword), value
        elif keyword in _MAPS:
            yield from (((*path, keyword, name), child) for name, child in value.items())


@dataclass(slots=True)
class _Endings:
    """Finds schemas that only endless values could satisfy, such as an object that must contain one of its own kind.

    A schema has an end if a value of it can be written from parts that have one. `false` counts as having one: it is no
    loop.
    """

    nodes: dict[Path, Any]
    """Each before its children."""
    parents: dict[Path, Path]

    def check(self) -> None:
        dependents: dict[Path, list[Path]] = {path: [] for path in self.nodes}
        for path, node in self.nodes.items():
            if path in self.parents:
                dependents[path].append(self.parents[path])
            if isinstance(node, dict) and "$ref" in node:
                dependents[self._target(path, node["$ref"])].append(path)
        ending: set[Path] = set()
        blocked: set[Path] = set()
        waiting = list(self.nodes)
        while waiting:
            path = waiting.pop()
            if path in ending:
                continue
            if self._ends(path, ending):
                ending.add(path)
                waiting += blocked.intersection(dependents[path])
            else:
                blocked.add(path)
        endless = self.nodes.keys() - ending
        if endless:
            path = min(endless, key=len)
            raise _fault(path, "it is recursive without end: each value would have to contain another of its kind")

    def check_combinations(self) -> None:
        """What is combined must be little: the compiler has no bound of its own for it."""
        children: dict[Path, list[Path]] = {path: [] for path in self.nodes}
        for child, parent in self.parents.items():
            children[parent].append(child)
        num_combinations = 0
        for path, node in self.nodes.items():
            if isinstance(node, bool) or not ("allOf" in node or ("$ref" in node and len(KEYWORDS & node.keys()) > 1)):
                continue
            num_combinations += 1
            if num_combinations > MAX_COMBINATIONS:
                raise _fault(
                    path, f"more than {MAX_COMBINATIONS} schemas have 'allOf', or '$ref' beside other keywords"
                )
            parts = self._parts(path, children)
            num_patterns = sum(len(part.get("patternProperties", ())) for part in parts)
            num_patterns += sum(keyword in part for part in parts for keyword in ("pattern", "format"))
            if num_patterns > MAX_COMBINED_PATTERNS:
                raise _fault(path, f"'allOf' and '$ref' combine more than {MAX_COMBINED_PATTERNS} patterns and formats")
            if sum(len(part.get(key, ())) for part in parts for key in ("anyOf", "oneOf")) > MAX_COMBINED_BRANCHES:
                raise _fault(path, f"'allOf' and '$ref' combine more than {MAX_COMBINED_BRANCHES} alternatives")

    def _parts(self, path: Path, children: dict[Path, list[Path]]) -> list[dict[str, Any]]:
        """The schema at `path` and all that it consists of."""
        found: dict[Path, dict[str, Any]] = {}
        waiting = [path]
        while waiting:
            part = waiting.pop()
            node = self.nodes[part]
            if part in found or isinstance(node, bool):
                continue
            found[part] = node
            waiting += children[part]
            if "$ref" in node:
                waiting.append(self._target(part, node["$ref"]))
        return list(found.values())

    def _ends(self, path: Path, ending: set[Path]) -> bool:
        node = self.nodes[path]
        if isinstance(node, bool):
            return True
        if "$ref" in node and self._target(path, node["$ref"]) not in ending:
            return False
        if not all((*path, "allOf", str(index)) in ending for index in range(len(node.get("allOf", ())))):
            return False
        for keyword in ("anyOf", "oneOf"):
            if keyword in node and not any((*path, keyword, str(i)) in ending for i in range(len(node[keyword]))):
                return False
        if "const" in node or "enum" in node:
            return True
        types = node.get("type", list(TYPES))
        types = types if isinstance(types, list) else [types]
        if set(types) - {"array", "object"}:
            return True
        return ("array" in types and self._array_ends(path, ending)) or (
            "object" in types and self._object_ends(path, ending)
        )

    def _array_ends(self, path: Path, ending: set[Path]) -> bool:
        node = self.nodes[path]
        first = "items" if isinstance(node.get("items"), list) else "prefixItems"
        rest = "additionalItems" if first == "items" else "items"
        num_first = len(node.get(first, ()))
        wanted = int(node.get("minItems", 0))
        needed = [(*path, first, str(index)) for index in range(min(wanted, num_first))]
        if wanted > num_first and rest in node:
            needed.append((*path, rest))
        return all(child in ending for child in needed)

    def _object_ends(self, path: Path, ending: set[Path]) -> bool:
        node = self.nodes[path]
        for name in node.get("required", ()):
            if name in node.get("properties", {}):
                child = (*path, "properties", name)
            elif "additionalProperties" in node and "patternProperties" not in node:
                child = (*path, "additionalProperties")
            else:
                continue
            if child not in ending:
                return False
        return True

    def _target(self, path: Path, reference: str) -> Path:
        parts = unquote(reference).split("/")[1:]
        target = tuple(part.replace("~1", "/").replace("~0", "~") for part in parts)
        if target not in self.nodes:
            raise _fault(path, f"the reference {reference!r} leads to no schema")
        return target
