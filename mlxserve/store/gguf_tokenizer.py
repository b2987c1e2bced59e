"""The tokenizer inside a GGUF file, as a Hugging Face one.

Two kinds are read: `gpt2`, byte-level BPE with merges, whose pre-tokenizer `tokenizer.ggml.pre` names; and `llama`,
SentencePiece BPE with scores and byte fallback. The pre-tokenizers' expressions are those of the models' own
tokenizer.json files; the names llama.cpp has for them are in its llama-vocab.cpp.
"""

import enum
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from mlxserve.store.gguf_file import GgufFile

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN_UPPER, _TEKKEN_LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How a byte-level BPE cuts text before it merges: each expression splits what the one before left."""

    patterns: tuple[str, ...]
    nfc: bool = False
    """Text is brought to Unicode's composed form first."""
    ignore_merges: bool = False
    """A piece that is a token as it stands is not merged from its letters."""
    add_bos: bool = False
    """Where the file does not say: put the beginning-of-sequence token in front."""


_PRE_TOKENIZERS = {
    "gpt-2": _PreTokenizer((_GPT2,)),
    "smollm": _PreTokenizer((r"\p{N}", _GPT2)),
    "starcoder": _PreTokenizer((r"\p{N}", _GPT2)),
    "qwen2": _PreTokenizer(
        (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL,), nfc=True
    ),
    "llama-bpe": _PreTokenizer(
        (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL,),
        ignore_merges=True,
        add_bos=True,
    ),
    "tekken": _PreTokenizer(
        (
            rf"[^\r\n\p{{L}}\p{{N}}]?{_TEKKEN_UPPER}*{_TEKKEN_LOWER}+"
            rf"|[^\r\n\p{{L}}\p{{N}}]?{_TEKKEN_UPPER}+{_TEKKEN_LOWER}*"
            r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL,
        ),
        ignore_merges=True,
    ),
    # What llama.cpp does for files converted without a known pre-tokenizer.
    "default": _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}


class _TokenType(enum.IntEnum):
    """gguf.constants.TokenType: what each token of the vocabulary is for."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def build_tokenizer(file: GgufFile) -> PreTrainedTokenizerFast:
    """The file's tokenizer with its special tokens and, if it has one, its chat template.

    Raises:
        ModelLoadError: a kind or pre-tokenizer that is not known here, or a damaged vocabulary.
    """
    tokens: list[str] = file.require("tokenizer.ggml.tokens", list)
    vocabulary = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(vocabulary) != len(tokens):
        raise file.unusable("its vocabulary names a token twice")
    kind = file.require("tokenizer.ggml.model", str)
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level_bpe(file, vocabulary)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece_bpe(file, tokens, vocabulary), True
    else:
        raise file.unusable(f"tokenizer {kind!r} is not supported (gpt2 and llama are)")
    tokenizer.add_tokens(_added_tokens(file, tokens))
    named = {name: _special_token(file, name, tokens) for name in ("bos", "eos", "unknown", "padding")}
    prefix = named["bos"] if file.get("tokenizer.ggml.add_bos_token", bool, add_bos) else None
    suffix = named["eos"] if file.get("tokenizer.ggml.add_eos_token", bool, False) else None
    around = [token for token in (prefix, suffix) if token is not None]
    if around:
        template = [token for token in (prefix, "$A", suffix) if token is not None]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[(token, vocabulary[token]) for token in dict.fromkeys(around)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=named["bos"],
        eos_token=named["eos"],
        unk_token=named["unknown"],
        pad_token=named["padding"],
        chat_template=file.get("tokenizer.chat_template", str),
        clean_up_tokenization_spaces=False,
    )


def eos_token_ids(file: GgufFile) -> frozenset[int]:
    """Ids that end an answer: end of sequence, end of turn, end of message.

    Raises:
        ModelLoadError: an id outside the vocabulary.
    """
    ids = (_special_id(file, name) for name in ("eos", "eot", "eom"))
    return frozenset(id_ for id_ in ids if id_ is not None)


def _byte_level_bpe(file: GgufFile, vocabulary: dict[str, int]) -> tuple[Tokenizer, bool]:
    name = file.get("tokenizer.ggml.pre", str)
    pre = _PRE_TOKENIZERS.get(name)
    if pre is None:
        said = f"names the pre-tokenizer {name!r}, which is not known here" if name else "does not name a pre-tokenizer"
        raise file.unusable(
            f"it {said} (tokenizer.ggml.pre; known: {', '.join(_PRE_TOKENIZERS)}); without the right one text would be "
            "tokenised wrongly, so use the model's MLX or safetensors repository"
        )
    merges = [tuple(merge.split(" ")) for merge in file.require("tokenizer.ggml.merges", list)]
    try:
        model = models.BPE(vocabulary, merges, fuse_unk=False, byte_fallback=False, ignore_merges=pre.ignore_merges)
    except Exception as error:  # the Rust side raises bare Exception
        raise file.unusable(f"its merges do not fit its vocabulary: {error}") from error
    tokenizer = Tokenizer(model)
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.add_bos


def _sentencepiece_bpe(file: GgufFile, tokens: list[str], vocabulary: dict[str, int]) -> Tokenizer:
    scores: list[float] = file.require("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens):
        raise file.unusable(f"it has {len(tokens)} tokens and {len(scores)} scores")
    model = models.BPE(
        vocabulary,
        _merges_from_scores(tokens, scores, vocabulary),
        unk_token=_special_token(file, "unknown", tokens),
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.get("tokenizer.ggml.add_space_prefix", bool, True):
        steps.insert(0, normalizers.Prepend("▁"))
        back.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(back)
    return tokenizer


def _merges_from_scores(tokens: list[str], scores: list[float], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """SentencePiece merges whatever neighbours make the best-scored token; as a list, that is every way to cut a token
    into two others, the best token first (transformers' convert_slow_tokenizer.generate_merges)."""
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-score, left, right, (token[:cut], token[cut:])))
    return [pair for _, _, _, pair in sorted(ranked)]


def _added_tokens(file: GgufFile, tokens: list[str]) -> list[AddedToken]:
    """Tokens that are matched in text as they stand: control tokens (special) and user-defined ones (not special)."""
    types: list[int] = file.get("tokenizer.ggml.token_type", list, [])
    if len(types) not in (0, len(tokens)):
        raise file.unusable(f"it has {len(tokens)} tokens and {len(types)} token types")
    special = {_TokenType.CONTROL: True, _TokenType.UNKNOWN: True, _TokenType.USER_DEFINED: False}
    return [
        AddedToken(token, special=special[type_], normalized=False)  # type: ignore[index]
        for token, type_ in zip(tokens, types, strict=False)
        if type_ in special and token
    ]


def _special_token(file: GgufFile, name: str, tokens: list[str]) -> str | None:
    id_ = _special_id(file, name)
    return None if id_ is None else tokens[id_]


def _special_id(file: GgufFile, name: str) -> int | None:
    """The id of tokenizer.ggml.NAME_token_id; 2**32 - 1 is how some converters write that there is none."""
    id_: int | None = file.get(f"tokenizer.ggml.{name}_token_id", int)
    if id_ is None or id_ == 2**32 - 1:
        return None
    if not 0 <= id_ < len(file.require("tokenizer.ggml.tokens", list)):
        raise file.unusable(f"tokenizer.ggml.{name}_token_id {id_} is outside its vocabulary")
    return id_
