"""Text to token ids and back, as it stands: no chat template, no answer that still grows."""

from collections.abc import Sequence

from mlxserve.errors import InvalidParameter
from mlxserve.text.tokenizer import Tokenizer


def encode_text(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
    """Token ids of a text; `param` is the client's field.

    Raises:
        InvalidParameter: the text is not valid Unicode.
    """
    try:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except UnicodeEncodeError as error:
        raise InvalidParameter(
            f"the text has half of a surrogate pair at character {error.start}; send whole Unicode characters",
            param=param,
        ) from error


def decode_tokens(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The text of tokens, control tokens as the vocabulary writes them; bytes that are no UTF-8 become U+FFFD."""
    if not token_ids:
        return ""
    first, *rest = token_ids
    data = tokenizer.first_token_bytes(first) + b"".join(map(tokenizer.token_bytes, rest))
    text = data.decode(errors="replace")
    num_spaces = min(tokenizer.decoder.num_stripped_spaces, len(text) - len(text.lstrip(" ")))
    return text[num_spaces:]
