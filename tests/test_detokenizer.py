"""Incremental detokenisation equals decoding the whole, for any tokens, and gives text out as soon as it can."""

import pytest
import tiny_tokenizers
from hypothesis import given
from hypothesis import strategies as st

from mlxserve.text.detokenizer import IncrementalDetokenizer
from mlxserve.text.tokenizer import Tokenizer

KINDS = {
    "byte_level": tiny_tokenizers.byte_level(),
    "sentencepiece": tiny_tokenizers.sentencepiece(),
    "sentencepiece without strip": tiny_tokenizers.sentencepiece(strip=False),
    "metaspace": tiny_tokenizers.metaspace(),
}
TOKENIZERS = {name: Tokenizer(hf_tokenizer, frozenset()) for name, hf_tokenizer in KINDS.items()}
every_kind = pytest.mark.parametrize("kind", KINDS)


def pieces(kind: str, ids: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(TOKENIZERS[kind])
    return [*map(detokenizer.add, ids), detokenizer.finish()]


def decode(kind: str, ids: list[int]) -> str:
    return KINDS[kind].decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def ids_of(kind: str, *tokens: str) -> list[int]:
    return KINDS[kind].convert_tokens_to_ids(list(tokens))


@every_kind
@given(data=st.data())
def test_any_tokens_give_the_decoded_text(kind, data):
    ids = data.draw(st.lists(st.integers(0, len(KINDS[kind]) + 3), max_size=30))
    assert "".join(pieces(kind, ids)) == decode(kind, ids)


@given(ids=st.lists(st.integers(1, 256), max_size=12).flatmap(lambda run: st.permutations([*run, 0, 300, 310])))
def test_runs_of_byte_tokens_give_the_decoded_text(ids):
    assert "".join(pieces("sentencepiece", ids)) == decode("sentencepiece", ids)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@given(text=st.text())
def test_encoded_text_comes_back(kind, text):
    ids = TOKENIZERS[kind].encode(text, add_special_tokens=False)
    result = "".join(pieces(kind, ids))
    assert result == decode(kind, ids)
    if not any(token in text for token in tiny_tokenizers.SPECIAL):
        assert result == (text if kind == "byte_level" else text.replace("\u2581", " "))


BYTE_TOKENS = {TOKENIZERS["byte_level"].token_bytes(token_id): token_id for token_id in range(400)}


@given(text=st.text())
def test_a_character_comes_with_its_last_byte_and_not_before(text):
    ids = [BYTE_TOKENS[bytes([byte])] for byte in text.encode()]
    expected = [part for char in text for part in [""] * (len(char.encode()) - 1) + [char]]
    assert pieces("byte_level", ids) == [*expected, ""]


def test_an_unfinished_character_ends_as_a_replacement():
    assert pieces("byte_level", [BYTE_TOKENS[b"a"], BYTE_TOKENS[b"\xf0"], BYTE_TOKENS[b"\x9f"]]) == [
        "a",
        "",
        "",
        "\ufffd",
    ]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@given(text=st.text(alphabet="aé的🎉 ", min_size=1), length=st.integers(0, 40))
def test_a_cut_leaves_half_a_character_out(kind, text, length):
    """Whatever tokens there are; wrong bytes before the cut become replacements as ever."""
    if kind == "byte_level":
        ids = [BYTE_TOKENS[bytes([byte])] for byte in text.encode()]
    else:
        ids = ids_of(kind, *(f"<0x{byte:02X}>" for byte in text.encode()))
    detokenizer = IncrementalDetokenizer(TOKENIZERS[kind])
    given_out = "".join(map(detokenizer.add, ids[:length])) + detokenizer.cut()
    expected = text.encode()[:length].decode(errors="ignore")
    assert given_out == (expected if kind == "byte_level" else expected[expected.startswith(" ") :])


def test_wrong_bytes_before_a_cut_are_replaced():
    for kind, ids in (
        ("byte_level", [BYTE_TOKENS[b"\xff"], BYTE_TOKENS[b"\xe2"]]),
        ("sentencepiece", ids_of("sentencepiece", "<0xFF>", "<0xE2>")),
    ):
        detokenizer = IncrementalDetokenizer(TOKENIZERS[kind])
        given_out = "".join(map(detokenizer.add, ids)) + detokenizer.cut()
        assert given_out.startswith("\ufffd")


def test_special_and_unknown_tokens_give_no_text_and_do_not_part_a_character():
    first, second = BYTE_TOKENS[b"\xc3"], BYTE_TOKENS[b"\xa9"]
    special, unknown = ids_of("byte_level", "</s>")[0], 10**6
    assert pieces("byte_level", [special, first, special, unknown, second, special]) == [
        "",
        "",
        "",
        "",
        "\u00e9",
        "",
        "",
    ]


def test_added_tokens_that_are_not_special_give_their_text():
    for kind in KINDS:
        assert pieces(kind, ids_of(kind, "<think>", "</think>")) == ["<think>", "</think>", ""]


@pytest.mark.parametrize(
    ("kind", "first"), [("sentencepiece", "the"), ("sentencepiece without strip", " the"), ("metaspace", "the")]
)
def test_the_space_of_the_first_word(kind, first):
    the = ids_of(kind, "\u2581the")
    assert pieces(kind, the * 2) == [first, " the", ""]
    assert pieces(kind, [*ids_of(kind, "<s>"), *the * 2]) == ["", first, " the", ""]


def test_only_one_leading_space_is_stripped():
    space, letter = ids_of("sentencepiece", "\u2581", "t")
    assert pieces("sentencepiece", [space, space, letter]) == ["", " ", "t", ""]
    assert pieces("sentencepiece", [letter, space]) == ["t", " ", ""]
    assert pieces("sentencepiece", ids_of("sentencepiece", "<0x20>", "<0x20>")) == ["", "", " "]


def test_a_run_of_byte_tokens_comes_when_it_ends():
    party = ids_of("sentencepiece", "<0xF0>", "<0x9F>", "<0x8E>", "<0x89>")
    letter = ids_of("sentencepiece", "t")
    assert pieces("sentencepiece", party + letter) == ["", "", "", "", "\U0001f389t", ""]
    assert pieces("sentencepiece", party) == ["", "", "", "", "\U0001f389"]
    assert pieces("sentencepiece", party[:3] + letter) == ["", "", "", "\ufffd\ufffd\ufffdt", ""]
