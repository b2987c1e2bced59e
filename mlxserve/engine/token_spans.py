"""Which tokens wrote a piece of an answer."""

from collections import deque

from mlxserve.core.step import SampledToken


class TokenSpans:
    """The tokens of which a parser has not said yet what they are.

    A parser gives texts and not positions. A piece stands where the text that waits begins, or, when a marker was taken
    out before it, as far to the end as it fits. One that is nowhere was written in another way, as the arguments of
    some tool calls are.
    """

    def __init__(self) -> None:
        self._tokens: deque[tuple[SampledToken, int, int]] = deque()
        """With where the text of each begins and ends."""
        self._text = ""
        self._start = 0
        """Where `_text` begins; what stood before it is taken."""

    def add(self, token: SampledToken, text: str) -> None:
        """`text`: what the token completes, which may be nothing."""
        start = self._start + len(self._text)
        self._text += text
        self._tokens.append((token, start, start + len(text)))

    def add_text(self, text: str) -> None:
        """Text that no token completed."""
        self._text += text

    def take(self, piece: str, *, is_last: bool) -> tuple[list[SampledToken], list[SampledToken]]:
        """The tokens of markers before a piece, and its own.

        `is_last`: no other is known that the tokens which wait could belong to.
        """
        offset = 0 if self._text.startswith(piece) else self._text.rfind(piece)
        if not piece or offset < 0:
            return [], self.take_all() if is_last else []
        start = self._start + offset
        end = start + len(piece)
        before = []
        # A token that completes nothing begins a character of the next text.
        while self._tokens and self._tokens[0][1] < start and self._tokens[0][2] <= start:
            before.append(self._tokens.popleft()[0])
        own = []
        while self._tokens and self._tokens[0][1] < end:
            own.append(self._tokens.popleft()[0])
        self._text = self._text[end - self._start :]
        self._start = end
        return before, own

    def take_all(self) -> list[SampledToken]:
        tokens = [token for token, _, _ in self._tokens]
        self._tokens.clear()
        self._start += len(self._text)
        self._text = ""
        return tokens
