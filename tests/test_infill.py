"""Filling in the middle: every family's order, and what stands between its tokens."""

import helpers_engine
import pytest
import tiny_tokenizers
from helpers_engine import expected_ids, on_loop
from helpers_served import read, serving
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from mlxserve.core.generation import GenerationRequest, InfillPrompt, TokenPrompt
from mlxserve.core.request import FinishReason
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.errors import ContextLengthExceeded, InvalidParameter
from mlxserve.text import infill
from mlxserve.text.chat_template import encode_prompt
from mlxserve.text.infill import END_TOKENS, FORMATS, InfillFormat, find_infill_format, infill_end_ids
from mlxserve.text.tokenizer import Tokenizer

PROMPT = InfillPrompt("def main():\n", "\n    return  0")


def with_tokens(base: PreTrainedTokenizerFast, *tokens: str) -> Tokenizer:
    base.add_special_tokens({"additional_special_tokens": [AddedToken(token, normalized=False) for token in tokens]})
    return Tokenizer(base, frozenset({base.eos_token_id}))


def shown(tokenizer: Tokenizer, ids: list[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ("<|fim_prefix|> <|fim_suffix|> <|fim_middle|>", "<|fim_prefix|>{p}<|fim_suffix|>{s}<|fim_middle|>"),
        ("<fim_prefix> <fim_suffix> <fim_middle>", "<fim_prefix>{p}<fim_suffix>{s}<fim_middle>"),
        ("<fim-prefix> <fim-suffix> <fim-middle>", "<fim-prefix>{p}<fim-suffix>{s}<fim-middle>"),
        (
            "<｜fim▁begin｜> <｜fim▁hole｜> <｜fim▁end｜>",  # noqa: RUF001
            "<｜fim▁begin｜>{p}<｜fim▁hole｜>{s}<｜fim▁end｜>",  # noqa: RUF001
        ),
        ("▁<PRE> ▁<SUF> ▁<MID>", "▁<PRE>{p}▁<SUF>{s}▁<MID>"),
        ("<|code_prefix|> <|code_suffix|> <|code_middle|>", "<|code_prefix|>{p}<|code_suffix|>{s}<|code_middle|>"),
        ("<[fim-prefix]> <[fim-suffix]> <[fim-middle]>", "<[fim-suffix]>{s}<[fim-prefix]>{p}<[fim-middle]>"),
        ("[PREFIX] [SUFFIX]", "[SUFFIX]{s}[PREFIX]{p}"),
    ],
)
def test_order_of_each_family(tokens: str, expected: str) -> None:
    tokenizer = with_tokens(tiny_tokenizers.byte_level(), *tokens.split())
    text = shown(tokenizer, encode_prompt(tokenizer, PROMPT))
    assert text == "<s>" + expected.format(p=PROMPT.prefix, s=PROMPT.suffix)


def test_every_format_is_tried_above() -> None:
    (mark,) = test_order_of_each_family.pytestmark
    tried = [set(tokens.split()) for tokens, _ in mark.args[1]]
    assert [set(each.tokens) for each in FORMATS] == tried


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.prefix)
def test_found_by_all_of_its_tokens_only(format: InfillFormat) -> None:
    assert find_infill_format(set(format.tokens).__contains__) == format
    assert find_infill_format(set(format.tokens[1:]).__contains__) is None


@pytest.mark.parametrize("strip", [True, False])
@pytest.mark.parametrize("suffix", ["\n    return  0", " the mat", "the mat", "日", ""])
def test_no_space_comes_before_the_suffix_that_is_not_in_it(strip: bool, suffix: str) -> None:
    tokenizer = with_tokens(tiny_tokenizers.sentencepiece(strip=strip), "▁<PRE>", "▁<SUF>", "▁<MID>")
    ids = encode_prompt(tokenizer, InfillPrompt("the cat", suffix))
    begin, end = (ids.index(tokenizer.token_id(token)) for token in ("▁<SUF>", "▁<MID>"))
    assert shown(tokenizer, ids[begin + 1 : end]) == suffix


def test_empty_on_both_sides() -> None:
    tokenizer = with_tokens(tiny_tokenizers.byte_level(), *FORMATS[0].tokens)
    assert shown(tokenizer, encode_prompt(tokenizer, InfillPrompt("", ""))) == "<s>" + "".join(FORMATS[0].tokens)


def test_models_that_cannot() -> None:
    tokenizer = Tokenizer(tiny_tokenizers.byte_level(), frozenset())
    with pytest.raises(InvalidParameter, match="cannot fill in a middle") as caught:
        encode_prompt(tokenizer, PROMPT)
    assert caught.value.param == "suffix"


@pytest.mark.parametrize(
    ("prompt", "param"), [(InfillPrompt("\ud83d", ""), "prompt"), (InfillPrompt("", "\ud83d"), "suffix")]
)
def test_half_characters(prompt: InfillPrompt, param: str) -> None:
    tokenizer = with_tokens(tiny_tokenizers.byte_level(), *FORMATS[0].tokens)
    with pytest.raises(InvalidParameter, match="surrogate") as caught:
        encode_prompt(tokenizer, prompt)
    assert caught.value.param == param


def test_too_long_together() -> None:
    tokenizer = with_tokens(tiny_tokenizers.single_bytes(), *FORMATS[0].tokens)
    with pytest.raises(ContextLengthExceeded) as caught:
        encode_prompt(tokenizer, InfillPrompt("x" * 1000, "y" * 1000), 100)
    assert caught.value.limit == 100 < caught.value.num_tokens < 2000


def test_what_ends_a_middle() -> None:
    tokenizer = with_tokens(tiny_tokenizers.byte_level(), "<|fim_pad|>", "▁<EOT>")
    expected = {tokenizer.token_id("<|fim_pad|>"), tokenizer.token_id("▁<EOT>")}
    assert infill_end_ids(tokenizer) == expected
    assert len(set(END_TOKENS)) == len(END_TOKENS)


@pytest.mark.parametrize("prompt", [InfillPrompt("the", "cat"), TokenPrompt((5, 6, 7))])
@on_loop
async def test_they_end_an_answer_to_such_a_prompt_only(
    prompt: InfillPrompt | TokenPrompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(infill, "FORMATS", (InfillFormat("<think>", "</think>", "<|im_start|>"),))
    tokenizer = helpers_engine.tokenizer()
    text = shown(tokenizer, expected_ids(encode_prompt(tokenizer, prompt), 20))
    monkeypatch.setattr(infill, "END_TOKENS", (text[9],))
    async with serving() as served:
        request = GenerationRequest("r", prompt, SamplingParams(temperature=0.0, max_tokens=20))
        answer = await read(await served.model.generate(request))
    ends = isinstance(prompt, InfillPrompt)
    assert answer.text == (text[: text.index(text[9])] if ends else text)
    assert answer.finished is not None
    assert answer.finished.reason is (FinishReason.STOP if ends else FinishReason.LENGTH)
