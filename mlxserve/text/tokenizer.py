"""A model's tokenizer: text to token ids, and what each token stands for."""

import json
from typing import TYPE_CHECKING, Any

from mlxserve.errors import ModelLoadError
from mlxserve.text.length_bound import LengthBound
from mlxserve.text.token_decoder import TokenDecoder, UnsupportedDecoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Tokenizer:
    """A transformers fast tokenizer, and the model's end-of-sequence ids.

    It takes the tokenizer over: truncation and padding, which some tokenizer files ask for, are switched off for good.
    Any thread may use it.

    Raises:
        ModelLoadError: the tokenizer has no tokenizers-library backend, or one whose decoder is not supported.
    """

    def __init__(self, hf_tokenizer: "PreTrainedTokenizerFast", eos_token_ids: frozenset[int]) -> None:
        self.hf_tokenizer = hf_tokenizer
        self.eos_token_ids = eos_token_ids
        self._backend = _backend(hf_tokenizer)
        description = json.loads(self._backend.to_str())
        self.decoder = _decoder(description, model=hf_tokenizer.name_or_path)
        tokens = self._backend.get_vocab(with_added_tokens=False)
        added = self._backend.get_added_tokens_decoder()
        self._tokens = {token_id: token for token, token_id in tokens.items()}
        self._tokens |= {token_id: token.content for token_id, token in added.items()}
        self.vocab_size = max(self._tokens) + 1
        """One more than the largest token id. A model's own vocabulary may be padded beyond it."""
        self._bytes = {token_id: self.decoder.bytes_of(token) for token_id, token in self._tokens.items()}
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._byte_ids = frozenset(token_id for token_id, token in self._tokens.items() if self.decoder.is_byte(token))
        self._length_bound = LengthBound.from_description(
            description, self.decoder, longest_token=max(map(len, self._bytes.values()))
        )

    def difference(self, other: "Tokenizer") -> str | None:
        """What tells the vocabularies apart, in words about `other`; None if every token id means the same in both."""
        if self._tokens == other._tokens:
            return None
        if len(self._tokens) != len(other._tokens):
            return f"its vocabulary has {len(other._tokens)} tokens and not {len(self._tokens)}"
        token_id = min(key for key, token in self._tokens.items() if other._tokens.get(key) != token)
        return f"its token {token_id} is {other._tokens.get(token_id)!r} and not {self._tokens[token_id]!r}"

    def __contains__(self, token_id: int) -> bool:
        return token_id in self._tokens

    def token_id(self, token: str) -> int | None:
        """The id of the token that is written so, such as `</think>`; None if the vocabulary has none."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def has_token(self, token: str) -> bool:
        return self.token_id(token) is not None

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the chat template (of the default one, if there are several)."""
        template = self.hf_tokenizer.chat_template
        return template.get("default") if isinstance(template, dict) else template

    @property
    def tool_template(self) -> str | None:
        """The chat template of requests that offer tools: the same, unless there is one named `tool_use`."""
        template = self.hf_tokenizer.chat_template
        return template.get("tool_use", self.chat_template) if isinstance(template, dict) else template

    @property
    def has_chat_template(self) -> bool:
        return bool(self.hf_tokenizer.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`, which may be of any length.

        Raises:
            UnicodeEncodeError: `text` has a lone surrogate, which UTF-8 cannot express.
        """
        text.encode()
        # Of the backend's ways to encode, only those for batches let other threads run meanwhile.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def min_num_tokens(self, text: str) -> int:
        """A lower bound of len(encode(text)), at the cost of a copy of the text.

        0 where the tokenizer may drop or merge characters without limit, so that nothing can be said.
        """
        return 0 if self._length_bound is None else self._length_bound.min_num_tokens(text)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes the token adds to a text, by the tokenizer's own decoder; b"" for ids outside of the vocabulary."""
        return self._bytes.get(token_id, b"")

    def first_token_bytes(self, token_id: int) -> bytes:
        """token_bytes() for the first token of a text, where some decoders drop the space that starts a word."""
        return self.decoder.first_bytes_of(self._tokens.get(token_id, ""))

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a control token, which has no place in a text."""
        return token_id in self._special_ids

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is SentencePiece's <0x..> for a single byte."""
        return token_id in self._byte_ids


def _backend(hf_tokenizer: "PreTrainedTokenizerFast") -> Any:
    backend = getattr(hf_tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelLoadError(
            f"the tokenizer is a {type(hf_tokenizer).__name__}, written in Python; a tokenizer.json is needed",
            model=hf_tokenizer.name_or_path,
        )
    backend.no_truncation()
    backend.no_padding()
    return backend


def _decoder(description: dict[str, Any], *, model: str) -> TokenDecoder:
    try:
        return TokenDecoder.from_description(description["decoder"])
    except UnsupportedDecoder as error:
        raise ModelLoadError(f"tokenizer.json: {error} is not supported", model=model) from error
