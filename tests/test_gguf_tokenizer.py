"""The tokenizer of a GGUF file is the model's own."""

import itertools
import json
import random
import unicodedata
from pathlib import Path

import pytest
import tiny_gguf
from gguf import TokenType
from helpers_gguf import F32, open_
from tiny_gguf import TinyGguf

from mlxserve.errors import ModelLoadError
from mlxserve.store import gguf_tokenizer
from mlxserve.store.hub import find_local
from mlxserve.store.registry import Registry

# --- tokenizers ---


def tokenizer_of(tmp_path, **metadata):
    keys = {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if key != "chat_template"}
    if "chat_template" in metadata:
        keys["tokenizer.chat_template"] = metadata["chat_template"]
    path = TinyGguf("llama", F32, metadata=keys).write(tmp_path / "t.gguf")
    return gguf_tokenizer.build_tokenizer(open_(path))


def test_the_demo_models_tokenizer_and_template():
    path = find_local(Registry().resolve("smollm2-135m", allow_paths=False))
    assert path is not None, "the demo extra is not installed"
    file = open_(path)
    tokenizer = gguf_tokenizer.build_tokenizer(file)
    cases = json.loads((Path(__file__).parent / "data" / "smollm2-greedy.json").read_text())["cases"]
    assert len(cases) > 10
    for case in cases:
        text = tokenizer.apply_chat_template(case["messages"], add_generation_prompt=True, tokenize=False)
        assert text == case["prompt_text"]
        assert tokenizer.encode(text, add_special_tokens=False) == case["prompt_ids"], case["name"]
        assert tokenizer.encode(text) == case["prompt_ids"], "this model wants no bos in front"
        assert tokenizer.decode(case["greedy_ids"], skip_special_tokens=True) == case["text"]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert gguf_tokenizer.eos_token_ids(file) == {2}


def test_bytes_merges_and_special_tokens(tmp_path):
    tokenizer = tokenizer_of(tmp_path)
    text = "hello the\n\U0001f600<|turn|>x<note>y"
    ids = tokenizer.encode(text)
    pieces = tokenizer.convert_ids_to_tokens(ids)
    assert pieces[:4] == ["hell", "o", "Ġthe", "Ċ"]
    assert pieces[-4:] == ["<|turn|>", "x", "<note>", "y"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text.replace("<|turn|>", "")
    assert tokenizer.chat_template is None


def test_end_tokens(tmp_path):
    path = TinyGguf("llama", F32, metadata={"tokenizer.ggml.eom_token_id": 3}).write(tmp_path / "t.gguf")
    assert gguf_tokenizer.eos_token_ids(open_(path)) == {1, 2, 3}


@pytest.mark.parametrize(
    ("metadata", "around"),
    [
        ({}, ([], [])),
        ({"add_bos_token": True}, ([0], [])),
        ({"add_bos_token": True, "add_eos_token": True}, ([0], [1])),
        ({"add_eos_token": True}, ([], [1])),
        ({"pre": "llama-bpe"}, ([0], [])),
        ({"pre": "llama-bpe", "add_bos_token": False}, ([], [])),
        ({"add_bos_token": True, "bos_token_id": None}, ([], [])),
        ({"add_bos_token": True, "bos_token_id": 2**32 - 1}, ([], [])),
    ],
)
def test_tokens_put_around(tmp_path, metadata, around):
    tokenizer = tokenizer_of(tmp_path, **metadata)
    inner = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the") == [*around[0], *inner, *around[1]]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["It", "'s", " 12345", " x", "\n\n", " y", "..", "\n", "DON", "'", "T"]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", "5", " x", "\n\n", " y", "..", "\n", "DON", "'", "T"]),
        ("default", ["It", "'", "s", " ", "123", "45", " x", "\n\n", " y", "..", "\n", "DON", "'", "T"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", " x", "\n\n", " y", "..\n", "DON", "'T"]),
        ("llama-bpe", ["It", "'s", " ", "123", "45", " x", "\n\n", " y", "..\n", "DON", "'T"]),
        ("tekken", ["It", "'s", " ", "1", "2", "3", "4", "5", " x", "\n\n", " y", "..\n", "DON", "'T"]),
    ],
)
def test_pre_tokenizers(tmp_path, pre, pieces):
    tokenizer = tokenizer_of(tmp_path, pre=pre)
    text = "It's 12345 x\n\n y..\nDON'T"
    found = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in found] == pieces


def test_qwen2_composes_letters_first(tmp_path):
    decomposed = unicodedata.normalize("NFD", "é")
    assert len(decomposed) == 2
    assert tokenizer_of(tmp_path, pre="qwen2").decode(tokenizer_of(tmp_path, pre="qwen2").encode(decomposed)) == "é"
    assert tokenizer_of(tmp_path).decode(tokenizer_of(tmp_path).encode(decomposed)) == decomposed


def test_llama_bpe_takes_a_whole_token_before_merging(tmp_path):
    tokens = [*tiny_gguf.TOKENS, "xyz"]
    types = [*map(int, tiny_gguf.TOKEN_TYPES), int(TokenType.NORMAL)]
    whole = tokenizer_of(tmp_path, tokens=tokens, token_type=types, pre="llama-bpe", add_bos_token=False)
    assert whole.encode("xyz") == [len(tokens) - 1]
    assert len(tokenizer_of(tmp_path, tokens=tokens, token_type=types, pre="gpt-2").encode("xyz")) == 3


SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
SPM_PIECES = ["▁", "a", "b", "c", "d", "e", "▁a", "▁ab", "ab", "abc", "cd", "de", "cde", "▁▁", "▁▁a", "bc"]


def spm_tokenizer(tmp_path, **metadata):
    tokens = SPM_TOKENS + SPM_PIECES
    types = [2, 3, 3, *[6] * 256, *[1] * len(SPM_PIECES)]
    scores = [0.0] * len(SPM_TOKENS) + [-float(rank) for rank in range(len(SPM_PIECES))]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "eot_token_id": None}
    kinds = {"model": "llama", "pre": "default", "merges": None, "tokens": tokens, "token_type": types}
    return tokenizer_of(tmp_path, **{**kinds, "scores": scores, **ids, **metadata})


def spm_reference(text: str) -> list[str]:
    """SentencePiece's BPE: of all neighbours that make a token, merge the best-scored, the leftmost of equals."""
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        made = [
            (SPM_PIECES.index(a + b), at) for at, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in SPM_PIECES
        ]
        if not made:
            return [
                p
                for piece in pieces
                for p in ([piece] if piece in SPM_PIECES else [f"<0x{b:02X}>" for b in piece.encode()])
            ]
        _, at = min(made)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


def test_sentencepiece_merges_by_score_with_byte_fallback(tmp_path):
    tokenizer = spm_tokenizer(tmp_path)
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(500):
        text = "".join(rng.choice("aaabbbcccdde  é\n") for _ in range(rng.randint(1, 20)))
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.convert_ids_to_tokens(ids) == spm_reference(text), repr(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("ab")[0] == 1, "the llama kind puts bos in front unless told not to"


def test_sentencepiece_options(tmp_path):
    tokenizer = spm_tokenizer(tmp_path, add_space_prefix=False, add_bos_token=False)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("ab</s>")) == ["ab", "</s>"]
    with pytest.raises(ModelLoadError, match="and 1 scores"):
        spm_tokenizer(tmp_path, scores=[0.0])
