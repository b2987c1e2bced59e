"""Reads JSON while it comes, as text: nothing is decoded that is only passed on."""

import json
import re
from collections.abc import Callable

from mlxserve.text.tool_calls.source import Malformed, Source, Wait

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'["\\/bfnrt]|u[0-9a-fA-F]{4}')
_SCALAR = re.compile(r"[-+.\w]")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?", re.ASCII)

Sink = Callable[[str], None]


def copy_value(source: Source, sink: Sink) -> Wait[None]:
    """Read one JSON value and hand its text to `sink` as it comes.

    Control characters in strings, which JSON does not allow and models write, are escaped.

    Raises:
        Malformed: it is not JSON from here on.
    """
    closings: list[str] = []
    while True:
        sink((yield from source.skip_whitespace()))
        opening = yield from source.accept("{", "[")
        if opening:
            sink(opening)
            closings.append("}" if opening == "{" else "]")
            sink((yield from source.skip_whitespace()))
            if (yield from source.accept(closings[-1])):
                sink(closings.pop())
            else:
                if opening == "{":
                    yield from _copy_key(source, sink)
                continue
        elif (yield from source.peek()) == '"':
            yield from copy_string(source, sink)
        else:
            sink((yield from read_scalar(source)))
        while closings:
            sink((yield from source.skip_whitespace()))
            found = yield from source.expect(",", closings[-1])
            sink(found)
            if found == ",":
                sink((yield from source.skip_whitespace()))
                if closings[-1] == "}":
                    yield from _copy_key(source, sink)
                break
            closings.pop()
        else:
            return


def _copy_key(source: Source, sink: Sink) -> Wait[None]:
    yield from copy_string(source, sink)
    sink((yield from source.skip_whitespace()))
    sink((yield from source.expect(":")))


def copy_string(source: Source, sink: Sink) -> Wait[None]:
    sink((yield from source.expect('"')))
    while True:
        found = _PLAIN.match(source.text, source.position)
        assert found is not None
        source.position = found.end()
        sink(found[0])
        char = yield from source.peek()
        if not char:
            raise source.fault()
        if char == "\\":
            yield from _copy_escape(source, sink)
        elif char < " ":
            source.position += 1
            sink(json.dumps(char)[1:-1])
        elif char == '"':
            source.position += 1
            sink(char)
            return


def _copy_escape(source: Source, sink: Sink) -> Wait[None]:
    while True:
        found = _ESCAPE.match(source.text, source.position + 1)
        if found is not None:
            sink("\\" + found[0])
            source.position = found.end()
            return
        rest = source.text[source.position + 1 :]
        if source.is_ended or not re.fullmatch(r"(u[0-9a-fA-F]{0,3})?", rest):
            raise Malformed if rest else source.fault()
        yield from source.more()


def read_string(source: Source) -> Wait[str]:
    """Read a JSON string, decoded. Raises Malformed."""
    parts: list[str] = []
    yield from copy_string(source, parts.append)
    text: str = json.loads("".join(parts))
    return text


def read_scalar(source: Source) -> Wait[str]:
    """Read a number, true, false or null, as text. Raises Malformed."""
    text = yield from source.ahead(_SCALAR)
    if text not in ("true", "false", "null") and not _NUMBER.fullmatch(text):
        raise source.fault()
    source.position += len(text)
    return text
