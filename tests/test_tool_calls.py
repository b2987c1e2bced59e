"""Parsers of tool calls: every family, fed in one piece, one character at a time and cut anywhere."""

import json
import os
import random
from itertools import pairwise
from typing import Any

import pytest
from tool_call_cases import ALL, CALLS, CASES, CLOCK, FILE, TOOLS, WEATHER, Call, Part, tool, write

from mlxserve.text.output import CallArguments, CallStart, Content, Piece
from mlxserve.text.tool_calls import checked_tools
from mlxserve.text.tool_calls import families as known
from mlxserve.text.tool_calls.family import Family
from mlxserve.text.tool_calls.parser import ToolCallParser

SEED = int(os.environ.get("MLXSERVE_TEST_SEED", random.randrange(10**6)))
HERMES, QWEN = known.HERMES, known.QWEN3_CODER


def parse_pieces(family: Family, pieces: list[str], tools: list[dict[str, Any]]) -> list[Part]:
    parser = ToolCallParser(family, checked_tools(tools))
    parts: list[Part] = []
    out: list[Piece] = [piece for text in pieces for piece in parser.push(text)]
    for piece in [*out, *parser.finish()]:
        last = parts[-1] if parts else None
        match piece:
            case Content(text):
                assert text
                parts = [*parts[:-1], last + text] if isinstance(last, str) else [*parts, text]
            case CallStart(name):
                parts.append((name, ""))
            case CallArguments(text):
                assert isinstance(last, tuple)
                parts[-1] = (last[0], last[1] + text)
    return parts


def parse(family: Family, text: str, tools: list[dict[str, Any]] | None = None) -> list[Part]:
    """The same however the text is cut."""
    tools = TOOLS if tools is None else tools
    whole = parse_pieces(family, [text], tools)
    assert parse_pieces(family, list(text), tools) == whole
    chance = random.Random(SEED)
    for _ in range(4):
        cuts = sorted({0, len(text), *(chance.randrange(len(text) + 1) for _ in range(chance.randrange(1, 9)))})
        pieces = [text[start:end] for start, end in pairwise(cuts)]
        assert parse_pieces(family, pieces, tools) == whole, f"cut at {cuts}, MLXSERVE_TEST_SEED={SEED}"
    return whole


def calls_of(parts: list[Part]) -> list[Call]:
    assert all(isinstance(part, tuple) for part in parts), parts
    return [(name, json.loads(arguments)) for name, arguments in parts]


@pytest.mark.parametrize("calls", CALLS, ids=lambda calls: "+".join(name for name, _ in calls))
@pytest.mark.parametrize("family", ALL, ids=lambda family: family.name)
def test_calls_of_every_family(family: Family, calls: list[Call]) -> None:
    assert calls_of(parse(family, write(family, calls))) == calls
    text = f"First this.\n\n{write(family, calls)}\n"
    assert parse(family, text)[0] == "First this."
    assert calls_of(parse(family, text)[1:]) == calls


@pytest.mark.parametrize("family", ALL, ids=lambda family: family.name)
def test_a_call_without_arguments(family: Family) -> None:
    assert calls_of(parse(family, write(family, [CLOCK, WEATHER]))) == [CLOCK, WEATHER]


@pytest.mark.parametrize("family", ALL, ids=lambda family: family.name)
def test_names_of_all_kinds_are_read(family: Family) -> None:
    calls: list[Call] = [("mcp__a.b-c:d/e_2", {"city": "a"}), ("get", {"city": "b"})]
    text = write(family, calls)
    assert calls_of(parse(family, text, [tool(name) for name, _ in calls])) == calls


@pytest.mark.parametrize("family", ALL, ids=lambda family: family.name)
def test_text_between_and_after_calls_is_kept(family: Family) -> None:
    text = f"a  b\n{write(family, [WEATHER])}\n\nand then\n{write(family, [FILE])}\n\nthat  was it.\n"
    parts = parse(family, text)
    assert [part if isinstance(part, str) else part[0] for part in parts] == [
        "a  b",
        "get_weather",
        "and then",
        "write_file",
        "that  was it.\n",
    ]


@pytest.mark.parametrize("family", ALL, ids=lambda family: family.name)
def test_a_call_of_a_tool_that_nobody_offered_is_text(family: Family) -> None:
    text = f"See: {write(family, [('rm_rf', {'path': '/'})])} so."
    if not family.opening and family.line_starts:
        text = text.replace("See: ", "See:\n")
    assert parse(family, text) == [text]
    other = write(family, [("rm_rf", {"path": write(family, [WEATHER])})])
    assert "rm_rf" in parse(family, other)[0]


@pytest.mark.parametrize("family", ALL, ids=lambda family: family.name)
def test_an_answer_that_breaks_off_anywhere(family: Family) -> None:
    text = f"So:\n{write(family, [WEATHER, FILE])}"
    for length in range(len(text)):
        parts = parse_pieces(family, list(text[:length]), TOOLS)
        assert parts == parse_pieces(family, [text[:length]], TOOLS)
        calls = [part for part in parts if isinstance(part, tuple)]
        if not calls:
            assert parts == ([text[:length]] if length else [])
        for (name, arguments), (wanted, whole) in zip(calls, parse_pieces(family, [text], TOOLS)[1:], strict=False):
            assert name == wanted
            assert whole.startswith(arguments)


@pytest.mark.parametrize("family", ALL, ids=lambda family: family.name)
def test_an_answer_without_calls_is_not_touched(family: Family) -> None:
    for text in [
        "",
        " ",
        "\n\n",
        "  a\n",
        "2 < 3 [a](b) {c} <| <tool <ar",
        '{"a": 1}',
        "[1](x) [f(x)](y)\n[1, 2]",
        "\n[x]\n",
    ]:
        assert "".join(map(str, parse(family, text))) == text


@pytest.mark.parametrize("family", ALL, ids=lambda family: family.name)
def test_markers_without_a_call_are_text(family: Family) -> None:
    for start in (*family.starts, *family.line_starts):
        for text in (
            start,
            f"{start} no call",
            f"{start}{start}",
            f"{start}\n\n",
            f"a {start}{{",
            f"{start}[]",
            f"{start}é",
        ):
            assert "".join(map(str, parse(family, text))) == text


@pytest.mark.parametrize("family", ALL, ids=lambda family: family.name)
def test_noise_loses_nothing_and_raises_nothing(family: Family) -> None:
    chance = random.Random(SEED)
    whole = write(family, [WEATHER, ("search", {"query": "a", "exact": False})])
    parts = [
        *family.all_markers,
        *family.line_starts,
        whole,
        '"',
        "{",
        "}",
        "]",
        "\\",
        "\n",
        " x ",
        ":",
        ",",
        "é",
        "get_weather(",
    ]
    for _ in range(60):
        chosen = chance.choices(parts, k=chance.randrange(1, 8))
        text = "".join(part if chance.random() < 0.7 else part[: chance.randrange(len(part) + 1)] for part in chosen)
        found = parse(family, text)
        if all(isinstance(part, str) for part in found):
            assert "".join(map(str, found)) == text, f"MLXSERVE_TEST_SEED={SEED}"


@pytest.mark.parametrize(("family", "text", "expected"), CASES)
def test_cases(family: Family, text: str, expected: list[Part]) -> None:
    assert parse(family, text) == expected


def test_pieces_come_as_soon_as_they_are_certain() -> None:
    parser = ToolCallParser(HERMES, checked_tools(TOOLS))
    assert parser.push("Hi <") == [Content("Hi")]
    assert parser.push("b> <tool") == [Content(" <b>")]
    assert parser.push('_call>{"name": "get_weather", "arguments":') == []
    assert parser.push(' {"ci') == [CallStart("get_weather"), CallArguments('{"ci')]
    assert parser.push('ty": "Pa') == [CallArguments('ty": "Pa')]
    assert parser.push('ris"}') == [CallArguments('ris"}')]
    assert parser.push("}</tool_call>") == []
    assert parser.finish() == []


def test_string_arguments_stream_in_formats_that_are_not_json() -> None:
    parser = ToolCallParser(QWEN, checked_tools(TOOLS))
    assert parser.push("<tool_call>\n<function=write_file>") == [CallStart("write_file"), CallArguments("{")]
    assert parser.push('\n<parameter=content>\nline "1"\n') == [CallArguments('"content": "line \\"1\\"')]
    assert parser.push("line 2") == [CallArguments("\\nline 2")]
    assert parser.push("\n</parameter>\n</function>") == [CallArguments('"}')]


def test_deep_nesting_is_read_without_recursion() -> None:
    deep = '{"a": ' * 3000 + "1" + "}" * 3000
    text = f'<tool_call>{{"name": "clock", "arguments": {deep}}}</tool_call>'
    assert parse_pieces(HERMES, [text], TOOLS) == [("clock", deep)]
    for family, text in [
        (known.LFM2, "[clock(a=" + "[" * 3000),
        (known.GEMMA4, "<|tool_call>call:clock{a:" + "[" * 3000),
    ]:
        assert parse_pieces(family, [text], TOOLS)[0][0] == "clock"


def test_types_come_from_the_schema() -> None:
    parameters = {
        "type": "object",
        "$defs": {"Id": {"type": "string"}},
        "properties": {
            "id": {"$ref": "#/$defs/Id"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "ratio": {"type": "number"},
            "pick": {"enum": ["1", "2"]},
            "loop": {"$ref": "#/properties/loop"},
        },
    }
    values = {"id": "007", "maybe": "null", "ratio": "2", "pick": "1", "loop": "x", "more": "[1, 2]"}
    text = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    (call,) = parse(QWEN, f"<tool_call>\n<function=f>\n{text}</function>\n</tool_call>", [tool("f", parameters)])
    assert json.loads(call[1]) == {"id": "007", "maybe": None, "ratio": 2, "pick": "1", "loop": "x", "more": [1, 2]}
