"""gpt-oss's channels: every cut, calls, headers in all orders, and what falls out of the format."""

import pytest
from helpers_parsers import parsed_in_every_way
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.text.harmony import ANSWER_BEGINS, MARKERS, NO_THOUGHTS, HarmonyParser, header_at_end_of, is_harmony

ARGUMENTS = '{"city": "Zürich 🎉 <b>", "n": 1}'
THOUGHT, CONTENT, CALL, GIVEN = "Thought", "Content", "CallStart", "CallArguments"
FINAL = "<|start|>assistant<|channel|>final<|message|>"


def parse(text: str, tools: tuple[str, ...] = ("get_weather",), header: str | None = None) -> list[tuple[str, str]]:
    return parsed_in_every_way(lambda: HarmonyParser(tools, header=header), text)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", []),
        (f"<|channel|>analysis<|message|>größer<|end|>{FINAL}日本 < 3", [(THOUGHT, "größer"), (CONTENT, "日本 < 3")]),
        (f"<|channel|>analysis<|message|>a<|end|>{FINAL}b<|return|>", [(THOUGHT, "a"), (CONTENT, "b")]),
        ("<|channel|>final<|message|>b", [(CONTENT, "b")]),
        ("<|channel|>final <|constrain|>json<|message|>{}", [(CONTENT, "{}")]),
        ("<|message|>b", [(CONTENT, "b")]),
        ("<|channel|>analysis<|message|>cut off", [(THOUGHT, "cut off")]),
        ("<|channel|>analysis<|message|>cut off<|en", [(THOUGHT, "cut off<|en")]),
        ("<|channel|>analysis<|message|><|end|>", []),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assist", [(THOUGHT, "a")]),
        ("<|channel|>ana", []),
        (" to=functions.get_weather", []),
        (
            f"<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather"
            f" <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
            [(THOUGHT, "a"), (CALL, "get_weather"), (GIVEN, ARGUMENTS)],
        ),
        (
            f" to=functions.get_weather<|channel|>commentary json<|message|>{ARGUMENTS}",
            [(CALL, "get_weather"), (GIVEN, ARGUMENTS)],
        ),
        (
            f"<|channel|>analysis to=functions.get_weather<|message|>{ARGUMENTS}<|call|>",
            [(CALL, "get_weather"), (GIVEN, ARGUMENTS)],
        ),
        (
            f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.get_weather"
            f"<|channel|>commentary<|message|>{ARGUMENTS}<|call|>",
            [(CONTENT, "I look."), (CALL, "get_weather"), (GIVEN, ARGUMENTS)],
        ),
        # Two calls, which the format allows.
        (
            "<|channel|>commentary to=functions.get_weather<|message|>{}<|end|>"
            "<|start|>assistant<|channel|>commentary to=functions.get_weather<|message|>{}<|call|>",
            [(CALL, "get_weather"), (GIVEN, "{}"), (CALL, "get_weather"), (GIVEN, "{}")],
        ),
        # Nobody offered these tools.
        ("<|channel|>commentary to=functions.other<|message|>{}<|call|>", [(CONTENT, "{}")]),
        ("<|channel|>analysis to=functions.other<|message|>{}<|call|>", [(CONTENT, "{}")]),
        ("<|channel|>analysis to=browser.search<|message|>{}<|call|>", [(THOUGHT, "{}")]),
        # An end that is missing.
        ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", [(THOUGHT, "a"), (CONTENT, "b")]),
        (f"<|channel|>analysis<|message|>a{FINAL}b", [(THOUGHT, "a"), (CONTENT, "b")]),
        # Out of the format.
        ("Hello <b>", [(CONTENT, "Hello <b>")]),
        ("a", [(CONTENT, "a")]),
        ("to", [(CONTENT, "to")]),
        ("<|constrain|>x<|message|>b", [(CONTENT, "b")]),
        ("<|channel|>" + "x" * 300, [(CONTENT, "x" * 300)]),
        ("Hello<|message|>b", [(CONTENT, "Hellob")]),
    ],
)  # fmt: skip
def test_cases(text: str, pieces: list[tuple[str, str]]) -> None:
    assert parse(text) == pieces


def test_an_answer_that_the_prompt_began() -> None:
    for prompt, header in [
        ("<|start|>user<|message|>hi<|end|><|start|>assistant", None),
        ("<|start|>assistant<|channel|>final<|message|>Once", "assistant<|channel|>final"),
        ("<|start|>assistant<|channel|>analysis<|message|>Hm", "assistant<|channel|>analysis"),
    ]:
        assert header_at_end_of(prompt) == header
    assert parse(" upon a time", header="assistant<|channel|>final") == [(CONTENT, " upon a time")]
    assert parse(f" so<|end|>{FINAL}x", header="assistant<|channel|>analysis") == [(THOUGHT, " so"), (CONTENT, "x")]


PARTS = st.sampled_from([*MARKERS, "analysis", "final", "assistant", " to=functions.f", "x", "<", "|>", "ä", "\n"])


@given(st.lists(PARTS, max_size=14))
@settings(max_examples=300)
def test_no_marker_leaks_whatever_is_written(parts: list[str]) -> None:
    for _, text in parsed_in_every_way(lambda: HarmonyParser(("f",)), "".join(parts), seed=len(parts)):
        assert not any(marker in text for marker in MARKERS)


@pytest.mark.parametrize(
    ("tail", "begins"),
    [
        ("<|start|>assistant<|channel|>final<|message|>", True),
        ("<|start|>assistant<|channel|>final <|constrain|>json<|message|>", True),
        ("<|start|>assistant<|channel|>commentary<|message|>", True),
        ("<|start|>assistant<|channel|>analysis<|message|>", False),
        ("<|start|>assistant<|channel|>commentary to=functions.f<|message|>", False),
        ("<|start|>assistant to=functions.f<|channel|>commentary<|message|>", False),
        ("<|start|>assistant<|channel|>analysis<|message|>final<|message|>", False),
        ("<|start|>assistant<|channel|>analysis<|message|>x<|end|><|start|>assistant<|channel|>final<|message|>", True),
        (f"<|start|>assistant{NO_THOUGHTS}<|channel|>final<|message|>", True),
        (f"<|start|>assistant{NO_THOUGHTS}", False),
    ],
)
def test_where_a_grammar_begins(tail: str, begins: bool) -> None:
    assert bool(ANSWER_BEGINS.search(tail.encode())) == begins


def test_the_vocabulary_tells() -> None:
    assert is_harmony({"<|start|>", "<|channel|>", "<|message|>", "<|end|>"}.__contains__)
    assert not is_harmony({"<|channel>", "<|end|>"}.__contains__)
