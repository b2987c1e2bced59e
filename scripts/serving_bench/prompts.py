"""Random texts of an exact number of tokens."""

import random
from pathlib import Path

from tokenizers import Tokenizer

MIN_WORDS = 500
ATTEMPTS = 50
WORD_STARTS = ("\u0120", "\u2581")
"""How a token that starts with a space is written in byte-level and in SentencePiece vocabularies."""


class PromptMaker:
    """Texts of random words, one token each wherever they stand: all servers count them alike, none has them cached."""

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
        # The first word of a text stands without a space before it, and is another token there.
        first = self._tokenizer.encode_batch(candidates, add_special_tokens=False)
        later = self._tokenizer.encode_batch([f"the {word}" for word in candidates], add_special_tokens=False)
        before = len(self._tokenizer.encode("the", add_special_tokens=False).ids)
        words = [
            word
            for word, alone, behind in zip(candidates, first, later, strict=True)
            if len(alone.ids) == 1 and len(behind.ids) == before + 1
        ]
        if len(words) < MIN_WORDS:
            raise ValueError(f"the vocabulary has only {len(words)} words of one token; {MIN_WORDS} are needed")
        return words
