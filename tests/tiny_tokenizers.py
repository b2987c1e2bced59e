"""Tokenizers of a few hundred tokens, of each kind that models use, trained on the spot."""

import json
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "the cat sat on the mat, and the dog ate the log",
    "Ein süßer Käse läuft über die Straße; größer geht es nicht.",
    "日本語の文章と絵文字 🎉🎊 und 中文 的 的 的",
    "def main():\n    print('hello, world')\n\n\n    return  0",
    "the the the then them there their these",
]
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<think>", "</think>", "  \n"]


def byte_level() -> PreTrainedTokenizerFast:
    """GPT-2's kind: bytes written as characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _finish(tokenizer)


def chatting(chat_template: str, *, special: Sequence[str] = (), added: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """byte_level() with more tokens and a chat template."""
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    tokenizer.chat_template = chat_template
    return tokenizer


def single_bytes() -> PreTrainedTokenizerFast:
    """Every byte a token, and no other text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: token_id for token_id, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def sentencepiece(*, strip: bool = True) -> PreTrainedTokenizerFast:
    """Llama 2's kind (strip), or Gemma's: U+2581 for a space, <0xE2> for bytes of rare characters."""
    spaces = normalizers.Replace(" ", "\u2581")
    normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces]) if strip else spaces
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=120, limit_alphabet=40, show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    pieces = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {token: token_id for token_id, token in enumerate(["<unk>", *byte_tokens, *pieces])}
    merges = [tuple(merge) for merge in _merges(trained)]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizer
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return _finish(tokenizer)


def metaspace() -> PreTrainedTokenizerFast:
    """SentencePiece as T5 has it, without a fallback for rare characters."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"], limit_alphabet=40, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _finish(tokenizer)


def _finish(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def _merges(tokenizer: Tokenizer) -> list[list[str]]:
    return json.loads(tokenizer.to_str())["model"]["merges"]
