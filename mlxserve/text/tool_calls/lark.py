"""Writes grammars in llguidance's Lark."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mlxserve.text import json_schema

WHITESPACE = "( |\\n[ \\t]{0,20})?"


class LarkWriter:
    """Rules of one grammar.

    `markers`: texts that stand in it as terminals of their own. `control_tokens`: ids of those that are control tokens
    of the vocabulary; they are no text, and stand in the grammar by their ids.
    """

    def __init__(self, markers: Sequence[str], control_tokens: Mapping[str, int]) -> None:
        self._ids = control_tokens
        # The lexer takes the longest terminal and never goes back: none may begin with another and go on elsewhere.
        self._marker = re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))
        self._names: dict[str, str] = {}

    def literal(self, text: str) -> str:
        """Exactly this text."""
        parts: list[str] = []
        start = 0
        for match in self._marker.finditer(text):
            token_id = self._ids.get(match[0])
            parts += [quoted(text[start : match.start()]), quoted(match[0]) if token_id is None else f"<[{token_id}]>"]
            start = match.end()
        parts.append(quoted(text[start:]))
        return " ".join(part for part in parts if part != '""') or '""'

    def until(self, end: str, pattern: str = "(?s:.*)") -> str:
        """Text of a pattern (Rust's) up to and with `end`, which comes nowhere in it."""
        match = self._marker.match(end)
        if match is not None and match[0] in self._ids:
            return self.rule(f"/{pattern}/ {self.literal(end)}")
        return self.rule(f"/{pattern}/", attributes=f"[suffix={quoted(end)}]")

    def json(self, schema: Any) -> str:
        """JSON of a schema.

        Raises:
            UnsupportedSchema: it cannot be enforced.
        """
        json_schema.check(schema)
        if schema is False:
            raise json_schema.UnsupportedSchema("nothing satisfies the schema 'false'")
        bare = {} if schema is True else json_schema.without_annotations(schema)
        options = {"lenient": False, "coerce_one_of": False, "whitespace_pattern": WHITESPACE}
        try:
            text = json.dumps({**bare, "x-guidance": options}, allow_nan=False)
        except (ValueError, RecursionError) as error:
            raise json_schema.UnsupportedSchema(f"it is not JSON: {error}") from error
        return self.rule(f"%json {text}")

    def rule(self, expression: str, *, attributes: str = "") -> str:
        """The name of a rule; there is one of each kind."""
        return self._names.setdefault(f"{attributes}: {expression}", f"rule_{len(self._names)}")

    def choice(self, expressions: Sequence[str]) -> str:
        return self.rule(" | ".join(expressions))

    def listed(self, items: Sequence[tuple[str, bool]], separator: str) -> str:
        """Some of these expressions in their order, with separators: those that are marked True, and any others."""
        between = self.literal(separator)
        first = more = quoted("")
        for item, is_required in reversed(items):
            first, more = (
                self.rule(f"{item} {more}" if is_required else f"{item} {more} | {first}"),
                self.rule(f"{between} {item} {more}" if is_required else f"({between} {item})? {more}"),
            )
        return first

    def source(self, start: str) -> str:
        return "\n".join([f"start: {start}", *(f"{name}{rule}" for rule, name in self._names.items())])


def quoted(text: str) -> str:
    """A string of Lark is one of JSON."""
    return json.dumps(text, ensure_ascii=False)
