"""The tokenizer wrapper: encoding, the bytes of each token, and the bound on a text's length in tokens."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny_tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from mlxserve.errors import ModelLoadError
from mlxserve.text.tokenizer import Tokenizer

KINDS = {
    "byte_level": tiny_tokenizers.byte_level(),
    "sentencepiece": tiny_tokenizers.sentencepiece(),
    "sentencepiece without strip": tiny_tokenizers.sentencepiece(strip=False),
    "metaspace": tiny_tokenizers.metaspace(),
}
TOKENIZERS = {name: Tokenizer(hf_tokenizer, frozenset({1})) for name, hf_tokenizer in KINDS.items()}
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
@given(text=st.text(), add_special_tokens=st.booleans())
def test_encode_gives_the_ids_of_the_underlying_tokenizer(kind, text, add_special_tokens):
    expected = KINDS[kind].encode(text, add_special_tokens=add_special_tokens)
    assert TOKENIZERS[kind].encode(text, add_special_tokens=add_special_tokens) == expected


def test_encode_from_many_threads():
    tokenizer = TOKENIZERS["byte_level"]
    texts = [f"the cat {number} sat on the mat " * 50 for number in range(200)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda text: tokenizer.encode(text, add_special_tokens=True), texts))
    assert results == [tokenizer.encode(text, add_special_tokens=True) for text in texts]


def test_encode_neither_truncates_nor_pads_nor_warns(caplog):
    hf_tokenizer = tiny_tokenizers.byte_level()
    hf_tokenizer.model_max_length = 8
    hf_tokenizer.backend_tokenizer.enable_truncation(max_length=4)
    hf_tokenizer.backend_tokenizer.enable_padding(length=64)
    tokenizer = Tokenizer(hf_tokenizer, frozenset())
    with caplog.at_level(logging.DEBUG):
        assert len(tokenizer.encode("xyz" * 20, add_special_tokens=False)) == 60
        assert len(tokenizer.encode("x", add_special_tokens=False)) == 1
    assert not caplog.records


def test_a_lone_surrogate_is_refused():
    with pytest.raises(UnicodeEncodeError):
        TOKENIZERS["byte_level"].encode("a\ud800", add_special_tokens=False)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece without strip"])
@given(text=st.text())
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(kind, text):
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    # U+2581 is how SentencePiece writes a space, so it cannot tell the two apart.
    expected = text if kind == "byte_level" else text.replace("\u2581", " ")
    assert b"".join(map(tokenizer.token_bytes, ids)) == expected.encode()


def test_token_bytes_of_each_kind_of_token():
    sentencepiece, hf_tokenizer = TOKENIZERS["sentencepiece"], KINDS["sentencepiece"]
    for token, expected in [("<0xE2>", b"\xe2"), ("\u2581the", b" the"), ("<think>", b"<think>"), ("<s>", b"<s>")]:
        assert sentencepiece.token_bytes(hf_tokenizer.convert_tokens_to_ids(token)) == expected
    byte_level, hf_tokenizer = TOKENIZERS["byte_level"], KINDS["byte_level"]
    for token, expected in [("\u0120the", b" the"), ("\u00e2", b"\xe2"), ("<think>", b"<think>"), ("  \n", b"  \n")]:
        assert byte_level.token_bytes(hf_tokenizer.convert_tokens_to_ids(token)) == expected


@every_kind
def test_ids_outside_of_the_vocabulary_have_no_bytes(kind):
    tokenizer = TOKENIZERS[kind]
    assert tokenizer.vocab_size == len(KINDS[kind])
    for token_id in (-1, tokenizer.vocab_size, 2**40):
        assert tokenizer.token_bytes(token_id) == b""
        assert tokenizer.first_token_bytes(token_id) == b""
        assert not tokenizer.is_special(token_id)
        assert token_id not in tokenizer


@every_kind
def test_special_tokens_are_those_that_decoding_skips(kind):
    special = {token_id for token_id in range(len(KINDS[kind])) if TOKENIZERS[kind].is_special(token_id)}
    unknown = {"<unk>"} & KINDS[kind].get_vocab().keys() if kind == "metaspace" else set()
    assert special == {KINDS[kind].convert_tokens_to_ids(token) for token in {*tiny_tokenizers.SPECIAL, *unknown}}


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "sentencepiece without strip"])
@given(text=st.text(st.sampled_from("the cat\n\u2581<s>\U0001f389\u00e9\x04")) | st.text())
def test_min_num_tokens_is_a_lower_bound(kind, text):
    tokenizer = TOKENIZERS[kind]
    bound = tokenizer.min_num_tokens(text)
    assert bound <= len(tokenizer.encode(text, add_special_tokens=False))
    longest = max(len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocab_size))
    assert bound >= len(text.encode()) / longest


def variant(**components) -> Tokenizer:
    hf_tokenizer = tiny_tokenizers.byte_level()
    for name, component in components.items():
        setattr(hf_tokenizer.backend_tokenizer, name, component)
    return Tokenizer(hf_tokenizer, frozenset())


def test_min_num_tokens_holds_when_the_normaliser_shortens_the_text():
    hf_tokenizer = tiny_tokenizers.byte_level()
    hf_tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    hf_tokenizer.add_tokens([AddedToken("\u0390" * 20, normalized=True)])
    tokenizer = Tokenizer(hf_tokenizer, frozenset())
    text = "\u1fbe\u0308\u0301" * 1000
    assert tokenizer.min_num_tokens(text) == len(tokenizer.encode(text, add_special_tokens=False)) == 50
    assert variant(normalizer=normalizers.NFKC()).min_num_tokens(text) == 0


def test_min_num_tokens_is_silent_when_something_is_dropped():
    assert variant(pre_tokenizer=pre_tokenizers.WhitespaceSplit()).min_num_tokens(" " * 1000) == 0
    removing = pre_tokenizers.Split("x", behavior="removed")
    assert variant(pre_tokenizer=removing).min_num_tokens("x" * 1000) == 0
    assert TOKENIZERS["metaspace"].min_num_tokens("\u4e00" * 1000) == 0


def test_min_num_tokens_counts_no_whitespace_where_an_added_token_takes_it_in():
    hf_tokenizer = tiny_tokenizers.byte_level()
    hf_tokenizer.add_tokens([AddedToken("<|end|>", rstrip=True)])
    tokenizer = Tokenizer(hf_tokenizer, frozenset())
    text = "<|end|>" + "\n \u3000" * 1000
    assert tokenizer.min_num_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False)) < 10


def test_min_num_tokens_counts_no_bytes_that_the_vocabulary_lacks():
    hf_tokenizer = PreTrainedTokenizerFast(tokenizer_object=_without_token(tiny_tokenizers.byte_level(), "\u0104"))
    tokenizer = Tokenizer(hf_tokenizer, frozenset())
    text = "a" + "\x04" * 1000
    assert tokenizer.encode(text, add_special_tokens=False) == tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.min_num_tokens(text) == 1


def _without_token(hf_tokenizer, token):
    description = json.loads(hf_tokenizer.backend_tokenizer.to_str())
    del description["model"]["vocab"][token]
    description["model"]["merges"] = [pair for pair in description["model"]["merges"] if token not in "".join(pair)]
    return Backend.from_str(json.dumps(description))


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.CTC(),
        decoders.Sequence([decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Replace("\u2581", " ")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
    ],
    ids=str,
)
def test_an_unknown_decoder_is_refused_when_the_model_is_loaded(decoder):
    with pytest.raises(ModelLoadError, match="decoder"):
        variant(decoder=decoder)


def test_a_tokenizer_without_a_backend_is_refused():
    class SlowTokenizer:
        name_or_path = "some/model"

    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is needed") as caught:
        Tokenizer(SlowTokenizer(), frozenset())
    assert caught.value.model == "some/model"


def test_chat_template():
    hf_tokenizer = tiny_tokenizers.byte_level()
    tokenizer = Tokenizer(hf_tokenizer, frozenset())
    assert not tokenizer.has_chat_template
    assert tokenizer.chat_template is None
    hf_tokenizer.chat_template = "{{ messages }}"
    assert tokenizer.has_chat_template
    assert tokenizer.chat_template == "{{ messages }}"
    hf_tokenizer.chat_template = {"default": "A", "tool_use": "B"}
    assert tokenizer.chat_template == "A"
