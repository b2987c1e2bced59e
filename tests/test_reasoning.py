"""Thoughts and answers taken apart: every format, every cut, and what only looks like a marker."""

import re
from pathlib import Path

import pytest
from helpers_parsers import parsed_in_every_way
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.text.reasoning import (
    FORMATS,
    THINK,
    ReasoningFormat,
    ReasoningParser,
    Stage,
    find_reasoning_format,
    partial_length,
    stage_after,
)
from mlxserve.text.thinking import BUDGET, BUDGETS, EFFORTS, SWITCHES

BY_START = {form.start: form for form in FORMATS if form.answer_start not in ("<answer>", "<response>")}
HUNYUAN, GRANITE_3_3 = (form for form in FORMATS if form.answer_start in ("<answer>", "<response>"))


def split(text: str, form: ReasoningFormat = THINK, stage: Stage = Stage.START, **kwargs: bool) -> tuple[str, str]:
    """Thoughts and content; the content must come after, and in one piece each."""
    pieces = parsed_in_every_way(lambda: ReasoningParser(form, stage, **kwargs), text)
    kinds = [kind for kind, _ in pieces]
    assert kinds == [kind for kind in ("Thought", "Content") if kind in kinds]
    found = dict(pieces)
    return found.get("Thought", ""), found.get("Content", "")


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: f"{form.start}{form.answer_start or ''}")
def test_every_format(form: ReasoningFormat) -> None:
    thoughts, answer = "Let me see: größer 的 🎉 < 3?\n\n[1] <b>", "It is <think 3>.\n\n  日本 🎊"
    for start in form.starts:
        for end in form.ends:
            text = f"\n{start}\n{thoughts}\n{end}\n\n{answer}"
            assert split(text, form) == (thoughts, answer)
            assert split(f"{start}{thoughts}{end}{answer}", form) == (thoughts, answer)
            assert split(f"{thoughts}\n{end}\n\n{answer}", form, Stage.OPEN) == (thoughts, answer)
            assert split(f"{start}\n\n{end}\n\n{answer}", form) == ("", answer)
            if form.answer_start is not None:
                wrapped = f"\n{form.answer_start}\n{answer}\n{form.answer_ends[0]}"
                assert split(f"{start}{thoughts}{end}{wrapped}", form) == (thoughts, answer)
                assert split(wrapped, form) == ("", answer)
    assert split(answer, form) == ("", answer)


@pytest.mark.parametrize(
    ("text", "thoughts", "answer"),
    [
        ("", "", ""),
        ("  \n", "", "  \n"),
        ("plain", "", "plain"),
        ("  indented", "", "  indented"),
        ("<think>", "", ""),
        ("<think>\n", "", ""),
        ("<think>cut off", "cut off", ""),
        ("<think>cut off\n\n", "cut off", ""),
        ("<think>cut off </thi", "cut off </thi", ""),
        ("<think>a</think>", "a", ""),
        ("<think>a</think>\n\n", "a", ""),
        ("<think></think>b", "", "b"),
        ("<think>\n\n</think>\n\nb", "", "b"),
        ("<think>a</think>b\n", "a", "b\n"),
        ("<think>a < b </b> </thin </think>c", "a < b </b> </thin", "c"),
        # Twice at the beginning is one too many; later it is what the thoughts are about.
        ("<think>\n<think>\na</think>b", "a", "b"),
        ("<think>a <think> b</think>c", "a <think> b", "c"),
        ("<think>a</think>b</think>c", "a", "b</think>c"),
        ("<think>a</think>b <think>c</think>", "a", "b <think>c</think>"),
        ("Use <think>x</think>.", "", "Use <think>x</think>."),
        ("<thin", "", "<thin"),
        ("<thinker>a</thinker>", "", "<thinker>a</thinker>"),
        (" <thinker", "", " <thinker"),
        ("</think>b", "", "</think>b"),
    ],
)
def test_cases(text: str, thoughts: str, answer: str) -> None:
    assert split(text) == (thoughts, answer)


def test_where_the_prompt_closed_the_thoughts_all_is_answer() -> None:
    assert split("\n<think>a</think>", stage=Stage.ANSWER) == ("", "\n<think>a</think>")


def test_a_prompt_may_stop_within_thoughts_or_within_an_answer_that_is_wrapped() -> None:
    assert split(" and more</think>b", stage=Stage.THOUGHTS) == (" and more", "b")
    assert split("b</answer>", HUNYUAN, Stage.ANSWER, is_wrapped=True) == ("", "b")
    assert split("b</answer>", HUNYUAN, Stage.ANSWER) == ("", "b</answer>")
    assert split("<answer>a </answer> b</answer>", HUNYUAN) == ("", "a b</answer>")


def test_formats_of_control_tokens_may_think_again() -> None:
    gemma = BY_START["<|channel>thought"]
    text = "<|channel>thought\na<channel|>b\n<|channel>thought\nc\n<channel|>d"
    pieces = parsed_in_every_way(lambda: ReasoningParser(gemma, Stage.START), text)
    assert pieces == [("Thought", "a"), ("Content", "b\n"), ("Thought", "c"), ("Content", "d")]


def test_kimi_k3_leaves_its_tools_to_their_own_parser() -> None:
    kimi = BY_START["<|open|>think<|sep|>"]
    calls = '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
    text = f"a<|close|>think<|sep|><|open|>response<|sep|>b<|close|>response<|sep|>{calls}<|close|>message<|sep|>"
    assert split(text, kimi, Stage.OPEN) == ("a", f"b{calls}")


def test_thoughts_end_at_a_call_as_well() -> None:
    text = "<think>a <|call|>b"
    pieces = parsed_in_every_way(lambda: ReasoningParser(THINK, Stage.START, interrupts=("<|call|>",)), text)
    assert pieces == [("Thought", "a"), ("Content", "<|call|>b")]


ALPHABET = st.sampled_from(["<think>", "</think>", "<", "/", "think", ">", "\n", " ", "ä", "🎉", "x"])


def expected(text: str, stage: Stage) -> tuple[str, str]:
    """By the whole text."""
    if stage is Stage.START and not re.match(r"\s*<think>", text):
        stage = Stage.ANSWER
    if stage is Stage.ANSWER:
        return "", text
    if stage is not Stage.THOUGHTS:
        text = re.sub(r"^(\s*<think>)*\s*", "", text)
    thoughts, _, content = text.partition("</think>")
    return thoughts.rstrip(), content.lstrip()


@given(st.lists(ALPHABET, max_size=12), st.sampled_from([Stage.START, Stage.OPEN, Stage.THOUGHTS, Stage.ANSWER]))
@settings(max_examples=300)
def test_nothing_is_lost_and_no_marker_leaks(parts: list[str], stage: Stage) -> None:
    text = "".join(parts)
    assert split(text, stage=stage) == expected(text, stage)


# --- which format, and where in it ---


def no_token(token: str) -> bool:
    return False


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ m.content.split('</think>')[-1] }}<|assistant|>", THINK),
        ("<think>...</think><answer>...</answer>", HUNYUAN),
        ("<think></think><response></response>", GRANITE_3_3),
        ("'<|channel>thought\\n<channel|>'", BY_START["<|channel>thought"]),
        ("open_tag('think') '<|open|>' + tag + '<|sep|>' '<|close|>'", BY_START["<|open|>think<|sep|>"]),
        ("[THINK]...[/THINK]", BY_START["[THINK]"]),
        ("<seed:think>", BY_START["<seed:think>"]),
        ("<|START_THINKING|><|END_THINKING|><|START_RESPONSE|>", BY_START["<|START_THINKING|>"]),
        ("'Here is my thought process:' ... 'Here is my response:'", BY_START["Here is my thought process:"]),
        ("Here are my reasoning steps:\n", BY_START["Here are my reasoning steps:"]),
        ("{{ message.content }}", None),
        (None, None),
    ],
)
def test_a_template_tells_its_format(template: str | None, form: ReasoningFormat | None) -> None:
    assert find_reasoning_format(template, no_token) == form


def test_without_a_word_in_the_template_tokens_tell() -> None:
    assert find_reasoning_format("{{ x }}", {"<think>", "</think>"}.__contains__) == THINK
    assert find_reasoning_format(None, {"[THINK]", "[/THINK]"}.__contains__) == BY_START["[THINK]"]
    assert find_reasoning_format(None, {"<|channel>", "<channel|>"}.__contains__) == BY_START["<|channel>thought"]
    assert find_reasoning_format(None, {"<think>"}.__contains__) is None


@pytest.mark.parametrize(
    ("prompt", "begun", "stage"),
    [
        ("<|user|>what is <think>?<|assistant|>\n", "", Stage.START),
        ("<|user|>hi<|assistant|><think>\n", "", Stage.OPEN),
        ("<|user|>hi<|assistant|><think>\n\n</think>\n\n", "", Stage.ANSWER),
        ("<|user|>hi<|assistant|></think>", "", Stage.ANSWER),
        ("<|user|>hi<|assistant|>So <think>", "So <think>", Stage.ANSWER),
        ("<|user|>hi<|assistant|><think>So", "<think>So", Stage.THOUGHTS),
        ("<|user|>hi<|assistant|><think>So</think>it", "<think>So</think>it", Stage.ANSWER),
    ],
)
def test_the_prompts_end_tells_where_the_answer_goes_on(prompt: str, begun: str, stage: Stage) -> None:
    assert stage_after(prompt, THINK, begun) is stage


def test_the_page_has_all_formats_and_variables() -> None:
    page = (Path(__file__).parent.parent / "docs" / "reasoning.md").read_text(encoding="utf-8").replace("\\|", "|")
    markers = {f"`{marker}`" for form in FORMATS for marker in (form.start, form.end)}
    wrappers = {f"`{form.answer_start}`" for form in (HUNYUAN, GRANITE_3_3)}
    variables = {f"`{name}`" for name in (*SWITCHES, *EFFORTS, BUDGET)}
    assert {each for each in markers | wrappers | variables if each not in page} == set()
    assert ", ".join(map(str, BUDGETS.values())) in page


def test_partial_length() -> None:
    assert partial_length("a</thi", ("</think>",)) == 5
    assert partial_length("a<", ("</think>", "<|x|>")) == 1
    assert partial_length("a</think>", ("</think>",)) == 0
    assert partial_length("aab", ("aabaa",)) == 3
