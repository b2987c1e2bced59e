"""Random texts of an exact number of tokens."""

import random
from pathlib import Path

from tokenizers import Tokenizer

MIN_WORDS = 500
ATTEMPTS = 50
WORD_STARTS = ("\u0120", "\u2581")
"""How a token that starts with a space is written in byte-level and in SentencePiece vocabularies."""


class PromptMaker:
    """Texts of random words, each one token, so that every server tokenises them alike and none finds them cached."""

    def __init__(self, tokenizer_file: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self._random = random.Random()
        self._words = self._find_words()

    def seed(self, seed: str) -> None:
        """From here on the texts depend on `seed` alone."""
        self._random.seed(seed)

    def text(self, num_tokens: int) -> str:
        """A text of `num_tokens` tokens, those that the tokenizer itself adds at its ends included.

        Raises:
            ValueError: this tokenizer cannot make one.
        """
        words = self._random.choices(self._words, k=num_tokens)
        for _ in range(ATTEMPTS):
            text = " ".join(words)
            excess = len(self._tokenizer.encode(text).ids) - num_tokens
            if excess == 0:
                return text
            words = words[:-excess] if excess > 0 else words + self._random.choices(self._words, k=-excess)
        raise ValueError(f"found no text of {num_tokens} tokens; is that fewer than the tokenizer adds by itself?")

    def _find_words(self) -> list[str]:
        tokens = sorted(self._tokenizer.get_vocab())
        candidates = [
            token[1:]
            for token in tokens
            if token.startswith(WORD_STARTS) and token[1:].isascii() and token[1:].isalpha()
        ]
        encoded = self._tokenizer.encode_batch([f"the {word}" for word in candidates], add_special_tokens=False)
        one = len(self._tokenizer.encode("the", add_special_tokens=False).ids) + 1
        words = [word for word, encoding in zip(candidates, encoded, strict=True) if len(encoding.ids) == one]
        if len(words) < MIN_WORDS:
            raise ValueError(f"the vocabulary has only {len(words)} words that are one token; {MIN_WORDS} are needed")
        return words
