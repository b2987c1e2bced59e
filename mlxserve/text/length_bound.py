"""How few tokens a text can have, told from its length alone."""

import math
from dataclasses import dataclass
from typing import Any

from mlxserve.text.token_decoder import BYTE_OF_CHAR, METASPACE, TokenDecoder

NFC_SHRINKAGE = 3.5
"""NFC divides the UTF-8 length of a text by this at most (U+1FBE U+0308 U+0301, 7 bytes, become U+0390, 2 bytes)."""


@dataclass(frozen=True, slots=True)
class LengthBound:
    """Bytes of a text, less those the tokenizer may lose, by the bytes of its longest token."""

    max_bytes_per_token: float
    """Bytes of a text that one token can stand for, normalisation included."""
    lost_bytes: bytes
    """Byte values that the vocabulary cannot express, so that the tokenizer drops them."""
    strips_whitespace: bool
    """Whether some added token takes in the whitespace beside it, however long."""

    @classmethod
    def from_description(
        cls, description: dict[str, Any], decoder: TokenDecoder, *, longest_token: int
    ) -> "LengthBound | None":
        """Read a tokenizer.json; `longest_token` is in bytes. None if the tokenizer is not known to keep every byte."""
        model = description["model"]
        vocab = model["vocab"]
        tokens = vocab.keys() if isinstance(vocab, dict) else {token for token, _ in vocab}
        if decoder.byte_level:
            lost = bytes(byte for char, byte in BYTE_OF_CHAR.items() if char not in tokens)
        elif model.get("byte_fallback") and all(f"<0x{byte:02X}>" in tokens for byte in range(256)):
            lost = b""
        else:
            return None
        shrinkage = _normalizer_shrinkage(description["normalizer"])
        if shrinkage is None or not _keeps_everything(description["pre_tokenizer"]):
            return None
        strips = any(token["lstrip"] or token["rstrip"] for token in description["added_tokens"])
        return cls(longest_token * shrinkage, lost, strips)

    def min_num_tokens(self, text: str) -> int:
        kept = "".join(text.split()) if self.strips_whitespace else text
        num_bytes = len(kept.encode(errors="replace").translate(None, self.lost_bytes))
        return math.ceil(num_bytes / self.max_bytes_per_token)


def _normalizer_shrinkage(normalizer: dict[str, Any] | None) -> float | None:
    """By what factor the normaliser can shorten a text at most, or None if that is not known."""
    match normalizer:
        case None | {"type": "Prepend"}:
            return 1.0
        case {"type": "Replace", "pattern": {"String": " "}, "content": content} if content == METASPACE:
            return 1.0
        case {"type": "NFC"}:
            return NFC_SHRINKAGE
        case {"type": "Sequence", "normalizers": steps}:
            factors = [_normalizer_shrinkage(step) for step in steps]
            known = [factor for factor in factors if factor is not None]
            return math.prod(known) if len(known) == len(factors) else None
        case _:
            return None


def _keeps_everything(pre_tokenizer: dict[str, Any] | None) -> bool:
    match pre_tokenizer:
        case None | {"type": "ByteLevel" | "Metaspace" | "Digits" | "UnicodeScripts"}:
            return True
        case {"type": "Split" | "Punctuation", "behavior": behavior}:
            return bool(behavior != "Removed")
        case {"type": "Sequence", "pretokenizers": steps}:
            return all(map(_keeps_everything, steps))
        case _:
            return False
