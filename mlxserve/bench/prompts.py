"""Random texts of a wanted number of tokens, different from their first token on: no prefix cache helps."""

import random
from typing import Protocol

from tokenizers import Tokenizer

MIN_WORDS = 500
ATTEMPTS = 50
WORD_STARTS = ("\u0120", "\u2581")
"""How a token that starts with a space is written in byte-level and in SentencePiece vocabularies."""


class Prompts(Protocol):
    """Where loads get their texts from."""

    random: random.Random

    def seed(self, seed: str) -> None:
        """From here on the texts depend on `seed` alone."""

    def text(self, num_tokens: int, beginning: str = "") -> str:
        """A text of `num_tokens` tokens that starts with `beginning`.

        Raises:
            ValueError: there is none.
        """

    def count(self, text: str) -> int | None:
        """Tokens of a text that a model wrote; None without its tokenizer."""


class PromptMaker:
    """Texts of random words, one token each wherever they stand: all servers count them alike, none has them cached."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.random = random.Random()
        self._tokenizer = tokenizer
        self._words = self._find_words()

    def seed(self, seed: str) -> None:
        """From here on the texts depend on `seed` alone."""
        self.random.seed(seed)

    def text(self, num_tokens: int, beginning: str = "") -> str:
        """A text of `num_tokens` tokens, `beginning` and those that the tokenizer itself adds at its ends included.

        Raises:
            ValueError: this tokenizer cannot make one.
        """
        start = beginning.split()
        words = self.random.choices(self._words, k=max(num_tokens - len(start), 0))
        for _ in range(ATTEMPTS):
            text = " ".join(start + words)
            excess = len(self._tokenizer.encode(text).ids) - num_tokens
            if excess == 0:
                return text
            words = words[:-excess] if excess > 0 else words + self.random.choices(self._words, k=-excess)
        raise ValueError(f"found no text of {num_tokens} tokens; is that fewer than the tokenizer adds by itself?")

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

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


COMMON_WORDS = (
    "the time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number night point home "
    "water room mother area money story fact month lot right study book eye job word business issue side kind "
    "head house service friend father power hour game line end member law car city community name president "
    "team minute idea body information back parent face others level office door health person art war history "
    "party result change morning reason research girl guy moment air teacher force education"
)


class CommonWords:
    """Texts of everyday words, about a token each, for a model whose tokenizer is not here: the server counts them."""

    def __init__(self) -> None:
        self.random = random.Random()
        self._words = COMMON_WORDS.split()

    def seed(self, seed: str) -> None:
        self.random.seed(seed)

    def text(self, num_tokens: int, beginning: str = "") -> str:
        start = beginning.split()
        return " ".join(start + self.random.choices(self._words, k=max(num_tokens - len(start), 0)))

    def count(self, text: str) -> None:
        return None
