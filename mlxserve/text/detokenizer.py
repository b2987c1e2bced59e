"""Token ids to text, one token at a time."""

import codecs
from collections.abc import Set

from mlxserve.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The text of one growing answer.

    For any token ids, what add() and finish() return joins to `decode(ids, skip_special_tokens=True)` of the
    underlying tokenizer, but that special tokens of `kept_ids` stay in. Text is given out as soon as no later token can
    change it: a byte-level tokenizer holds back an unfinished character; one with <0xE2> byte tokens holds back a run
    of these until another token ends it, because one bad byte turns every byte of its run into U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, kept_ids: Set[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._kept_ids = kept_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._byte_run = bytearray()
        self._num_strippable_spaces = tokenizer.decoder.num_stripped_spaces
        self._is_first_token = True

    def add(self, token_id: int) -> str:
        """Take the next token; return the text that it completes. Special and unknown tokens give none."""
        tokenizer = self._tokenizer
        if token_id not in tokenizer or (tokenizer.is_special(token_id) and token_id not in self._kept_ids):
            return ""
        data = tokenizer.first_token_bytes(token_id) if self._is_first_token else tokenizer.token_bytes(token_id)
        self._is_first_token = False
        if tokenizer.is_byte(token_id):
            self._byte_run += data
            return ""
        return self._strip(self._end_byte_run() + self._utf8.decode(data))

    def finish(self) -> str:
        """Return what was held back: no token follows."""
        return self._strip(self._end_byte_run() + self._utf8.decode(b"", final=True))

    def cut(self) -> str:
        """As finish(), of an answer that was cut off: bytes that only begin a character are left out."""
        return self._strip(self._end_byte_run(is_cut=True))

    def _end_byte_run(self, *, is_cut: bool = False) -> str:
        run = bytes(self._byte_run)
        self._byte_run.clear()
        try:
            return codecs.utf_8_decode(run, "strict", not is_cut)[0]
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _strip(self, text: str) -> str:
        while self._num_strippable_spaces and text:
            if text[0] != " ":
                self._num_strippable_spaces = 0
                break
            text = text[1:]
            self._num_strippable_spaces -= 1
        return text
