"""Stop strings are found at every cut of the text, and text is given out as early as it can be."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlxserve.errors import InvalidParameter
from mlxserve.text.stop_strings import StopStringMatcher

few_letters = st.text("ab", min_size=1, max_size=6)


def expected(stops: tuple[str, ...], text: str) -> tuple[str, str | None]:
    """Text before the stop string, and the stop string: the first to start, the longest of those."""
    found = [(text.index(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    start, _, stop = min(found)
    return text[:start], stop


def run(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopStringMatcher(stops)
    text = "".join(map(matcher.push, pieces))
    return text + matcher.flush(), matcher.matched


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({min(place, len(text)) for place in places} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@given(
    stops=st.lists(few_letters, max_size=5).map(tuple),
    text=st.text("abc", max_size=40),
    places=st.lists(st.integers(0, 40), max_size=10),
)
@example(stops=("abcd", "bc"), text="abcabcd", places=[3])
@example(stops=("a", "ab", "abc"), text="xabd", places=[2])
def test_equals_a_search_of_the_whole_text(stops, text, places):
    assert run(stops, cut(text, places)) == expected(stops, text)
    assert run(stops, list(text)) == expected(stops, text)


@given(
    stops=st.lists(st.text(min_size=1, max_size=4), max_size=4).map(tuple),
    text=st.text(),
    places=st.lists(st.integers(0, 30)),
)
def test_any_characters(stops, text, places):
    assert run(stops, cut(text, places)) == expected(stops, text)


@pytest.mark.parametrize("stop", ["</s>", "\n\nHuman:", "e\u0301\U0001f389\u4e2d", "aaab"])
def test_every_cut(stop):
    text = f"before {stop[:-1]} {stop[1:]} aa{stop}after{stop}"
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            assert run((stop,), [text[:first], text[first:second], text[second:]]) == expected((stop,), text)


@given(stops=st.lists(few_letters, min_size=1, max_size=5).map(tuple), text=st.text("abc", max_size=40))
def test_only_what_may_become_a_stop_string_is_held_back(stops, text):
    matcher = StopStringMatcher(stops)
    given_out = ""
    for end, char in enumerate(text, start=1):
        given_out += matcher.push(char)
        if matcher.matched is not None:
            return
        held = text[len(given_out) : end]
        assert given_out + held == text[:end]
        begun = any(stop.startswith(held) for stop in stops)
        waits_for_longer = any(held.startswith(stop) for stop in stops)
        assert begun or waits_for_longer


def test_text_that_cannot_become_a_stop_string_comes_at_once():
    matcher = StopStringMatcher(("</answer>",))
    assert matcher.push("2 <") == "2 "
    assert matcher.push(" 3 </ans") == "< 3 "
    assert matcher.push("wer") == ""
    assert matcher.push(" </answer> more") == "</answer "
    assert matcher.matched == "</answer>"
    assert matcher.push("more") == ""
    assert matcher.flush() == ""


def test_a_match_is_settled_as_soon_as_nothing_can_beat_it():
    matcher = StopStringMatcher(("\n", "\n\n"))
    assert matcher.push("a\n") == "a"
    assert matcher.matched is None
    assert matcher.push("b") == ""
    assert matcher.matched == "\n"

    matcher = StopStringMatcher(("\n", "\n\n"))
    matcher.push("a\n\n")
    assert matcher.matched == "\n\n"

    matcher = StopStringMatcher(("abcd", "bc"))
    assert matcher.push("abc") == ""
    assert matcher.matched is None
    assert matcher.flush() == "a"
    assert matcher.matched == "bc"


def test_no_stop_strings_hold_back_nothing():
    matcher = StopStringMatcher(())
    assert matcher.push("text") == "text"
    assert matcher.flush() == ""
    assert matcher.matched is None


def test_many_long_stop_strings_in_a_long_text():
    stops = tuple("a" * 200 + f"b{number}" for number in range(10, 50))
    before = ("a" * 199 + "b") * 500 + "a" * 100
    pieces = [before[start : start + 3] for start in range(0, len(before), 3)]
    assert run(stops, [*pieces, stops[29], "after"]) == (before, stops[29])


def test_an_empty_stop_string_is_refused():
    with pytest.raises(InvalidParameter) as caught:
        StopStringMatcher(("a", ""))
    assert caught.value.param == "stop"
