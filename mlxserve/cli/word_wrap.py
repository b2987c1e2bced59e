"""Breaking text at words while it streams to a terminal."""

from collections.abc import Callable

from rich.cells import cell_len


class WordWrapper:
    """Puts line breaks where a word would not fit, instead of in the middle of it.

    A word is held back until its end is known, so nothing that was written has to be taken back. Wide characters
    (Chinese, Japanese) need no blank to break at. A word longer than a line is left to the terminal.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        """`width`: columns of the terminal, asked at every word."""
        self._width = width
        self._column = 0
        self._word = ""

    def push(self, text: str) -> str:
        """What can be written now that `text` has come."""
        out = ""
        for character in text:
            if character == "\n":
                out += self.finish() + "\n"
                self._column = 0
            elif character in " \t":
                out += self.finish()
                if self._column < self._width():
                    out += character
                    self._column += 1 if character == " " else 8 - self._column % 8
            else:
                if cell_len(character) == 2:
                    out += self.finish()
                self._word += character
                if cell_len(character) == 2:
                    out += self.finish()
        return out

    def finish(self) -> str:
        """The word that was held back."""
        word, self._word = self._word, ""
        if not word:
            return ""
        width, size = max(self._width(), 1), cell_len(word)
        breaks = self._column > 0 and self._column + size > width
        if breaks:
            self._column = 0
        self._column += size
        if self._column > width:
            # The terminal broke the word; a line that is just full has not been left yet.
            self._column = (self._column - 1) % width + 1
        return "\n" + word if breaks else word
