"""How a tokenizer turns one token into bytes, read from the tokenizer's own description of its decoder.

Three kinds are in use by language models:

- ByteLevel (GPT-2 and most since): each character of a token stands for one byte.
- Replace, ByteFallback, Fuse, Strip (SentencePiece, written out as steps): U+2581 stands for a space, <0xE2> for the
  byte, and the text may lose leading spaces.
- Metaspace (SentencePiece as one step): U+2581 stands for a space, and the first token loses its own.
"""

import re
from dataclasses import dataclass
from typing import Any

METASPACE = "\u2581"

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class UnsupportedDecoder(ValueError):
    """The description has a step that is not one of the kinds above."""


@dataclass(frozen=True, slots=True)
class TokenDecoder:
    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    num_stripped_spaces: int = 0
    """Spaces the whole text loses at its start, at most."""
    drops_first_spaces: bool = False
    """The first token of a text loses every U+2581 in it."""

    @classmethod
    def from_description(cls, decoder: dict[str, Any] | None) -> "TokenDecoder":
        """Read the `decoder` object of a tokenizer.json.

        Raises:
            UnsupportedDecoder: it cannot be done token by token in one of the known ways.
        """
        match decoder:
            case {"type": "ByteLevel"} | {"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}:
                return cls(byte_level=True)
            case {"type": "Metaspace", "replacement": replacement, "prepend_scheme": scheme}:
                return cls(replacements=((replacement, " "),), drops_first_spaces=scheme != "never")
            case {"type": "Sequence", "decoders": list(steps)}:
                return cls._from_steps(steps)
            case _:
                raise UnsupportedDecoder(f"decoder {decoder and decoder.get('type')}")

    @classmethod
    def _from_steps(cls, steps: list[dict[str, Any]]) -> "TokenDecoder":
        replacements: list[tuple[str, str]] = []
        byte_fallback = fused = False
        num_stripped = 0
        for step in steps:
            match step:
                case {"type": "Replace", "pattern": {"String": pattern}, "content": content} if not byte_fallback:
                    replacements.append((pattern, content))
                case {"type": "ByteFallback"} if not fused:
                    byte_fallback = True
                case {"type": "Fuse"}:
                    fused = True
                case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if fused:
                    num_stripped = start
                case _:
                    raise UnsupportedDecoder(f"decoder step {step} in this place")
        return cls(byte_fallback=byte_fallback, replacements=tuple(replacements), num_stripped_spaces=num_stripped)

    def bytes_of(self, token: str) -> bytes:
        """The bytes a token stands for, anywhere but at the start of a text."""
        if self.byte_level:
            try:
                return bytes(BYTE_OF_CHAR[char] for char in token)
            except KeyError:
                return token.encode()
        if self.is_byte(token):
            return bytes.fromhex(token[3:5])
        for pattern, content in self.replacements:
            token = token.replace(pattern, content)
        return token.encode()

    def first_bytes_of(self, token: str) -> bytes:
        """The bytes a token stands for as the first one of a text, before `num_stripped_spaces` is applied."""
        if self.drops_first_spaces:
            for pattern, _ in self.replacements:
                token = token.replace(pattern, "")
        return self.bytes_of(token)

    def is_byte(self, token: str) -> bool:
        """Whether the token stands for one byte that may be a part of a character."""
        return self.byte_fallback and _BYTE_TOKEN.fullmatch(token) is not None


def _byte_of_char() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 characters stand for themselves, the other bytes for U+0100 and up, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


BYTE_OF_CHAR = _byte_of_char()
