"""Compiles grammars for one model's vocabulary. Any thread may call it; it is meant for one beside the event loop."""

import json
import re
import threading
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from mlxserve.core.constraint import MAX_CHOICES, Grammar
from mlxserve.errors import InvalidParameter
from mlxserve.text import grammar_text, json_schema
from mlxserve.text.opening import Opening
from mlxserve.text.token_constraint import GrammarConstraint, Unwritable
from mlxserve.text.tokenizer import Tokenizer

MAX_GRAMMAR_LENGTH = 64 * 1024
"""Characters of a grammar, or of a schema as JSON."""

MAX_LARK_LENGTH = 4 * MAX_GRAMMAR_LENGTH
"""Of a grammar that this package writes, of the schemas of many tools."""

WHITESPACE = r"( |\n[ \t]{0,20})?"
"""Between two tokens of JSON: none, a space, or a new line with its indentation. Without a bound a model can go on with
whitespace until its answer is cut, and small models do."""

_WHITESPACE_PATTERN = r"(?:[ \t\n\r]|\\[ntrs]|\[(?:[ \t\n\r]|\\[ntrs])+\]|\((?:\?:)?|[)|?*+]|\{\d+(?:,\d*)?\})*"

# About a quarter of the library's own, so that the slowest grammar that passes takes a fraction of a second to compile
# and some milliseconds for a mask. One that outgrows them while an answer follows it ends that request alone.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    max_items_in_row=8_000,
    verbose_errors=False,
)


class GrammarCompiler:
    """`tokenizer`: the model's. What llguidance makes of the vocabulary is built with the first grammar and kept."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._first_masked = b""

    def compile(self, grammar: Grammar, opening: Opening | None = None) -> GrammarConstraint:
        """A constraint at the beginning of an answer. `opening`: what comes before the text that the grammar is about.

        Raises:
            InvalidParameter: the grammar is too large, not valid, uses what is not supported, or allows no text that
                this model can write. `param` is the client's field.
        """
        try:
            constraint = self._compile(grammar)
        except (json_schema.UnsupportedSchema, grammar_text.UnsupportedGrammar) as error:
            raise InvalidParameter(f"Invalid '{grammar.param}': {error}.", param=grammar.param) from error
        constraint.opening = opening
        return constraint

    def _compile(self, grammar: Grammar) -> GrammarConstraint:
        source = _source(grammar)
        if not _eos_token_ids(self._tokenizer):
            raise InvalidParameter(
                "this model names no end-of-sequence token, without which an answer cannot end where its grammar does",
                param=grammar.param,
            )
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = _vocabulary(self._tokenizer)
                self._first_masked = _stripped_tokens(self._tokenizer)
        constraint = GrammarConstraint(
            LLMatcher(self._vocabulary, source, log_level=0, limits=_LIMITS),
            vocab_size=self._tokenizer.vocab_size,
            first_masked=self._first_masked,
        )
        # The first mask does what the compiler put off, and shows whether there is any text.
        failure = constraint.failure_at_start()
        if failure is not None:
            raise InvalidParameter(f"Invalid '{grammar.param}': {_explained(failure, grammar)}.", param=grammar.param)
        return constraint


def _source(grammar: Grammar) -> str:
    """llguidance's own form of a grammar."""
    match grammar.kind:
        case "json_schema":
            return _schema_source(grammar)
        case "choice":
            choices = grammar.source
            if not 1 <= len(choices) <= MAX_CHOICES:
                raise grammar_text.UnsupportedGrammar(f"it has {len(choices)} choices; 1 to {MAX_CHOICES} are allowed")
            # A string of Lark is one of JSON.
            text = "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
            _check_length(text)
            return LLMatcher.grammar_from_lark(text)
        case "regex":
            _check_length(grammar.source)
            return LLMatcher.grammar_from_regex(grammar.source)
        case "grammar":
            _check_length(grammar.source)
            return LLMatcher.grammar_from_lark(grammar_text.to_lark(grammar.source))
        case "lark":
            _check_length(grammar.source, MAX_LARK_LENGTH)
            return LLMatcher.grammar_from_lark(grammar.source)


def _schema_source(grammar: Grammar) -> str:
    try:
        text = json.dumps(grammar.source, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise json_schema.UnsupportedSchema(f"it is not JSON: {error}") from error
    _check_length(text)
    json_schema.check(grammar.source)
    if grammar.source is False:
        raise json_schema.UnsupportedSchema("nothing satisfies the schema 'false'")
    if grammar.source is True:
        text = "{}"
    whitespace = WHITESPACE if grammar.whitespace_pattern is None else _whitespace(grammar.whitespace_pattern)
    try:
        return LLMatcher.grammar_from_json_schema(
            text, overrides={"lenient": False, "coerce_one_of": False, "whitespace_pattern": whitespace}
        )
    except ValueError as error:  # its JSON reader takes no number beyond a double, not even in a description
        raise json_schema.UnsupportedSchema(f"it cannot be read: {error}") from error


def _whitespace(pattern: str) -> str:
    """The client's pattern, of which only whitespace can come that JSON has."""
    _check_length(pattern)
    if not re.fullmatch(_WHITESPACE_PATTERN, pattern):
        raise json_schema.UnsupportedSchema(
            "a whitespace pattern may have spaces, \\n, \\t, \\r, \\s, groups, classes and repetitions, nothing else"
        )
    in_class = re.sub(r"\[[^]]*\]", lambda found: found[0].replace(r"\s", r" \t\n\r"), pattern)
    return in_class.replace(r"\s", r"[ \t\n\r]")


def _check_length(text: str, limit: int = MAX_GRAMMAR_LENGTH) -> None:
    if len(text) > limit:
        raise grammar_text.UnsupportedGrammar(f"it has {len(text)} characters; {limit} are allowed")


def _explained(failure: str, grammar: Grammar) -> str:
    if grammar.kind == "lark":
        # Where it stands in a grammar that the client has never seen says nothing.
        failure = re.sub(r"^at \d+\(\d+\): |failed to compile JSON schema: ", "", failure).partition(" | ")[0]
        failure = failure.partition(" ... ")[0]
    if failure.startswith("oneOf constraints"):
        return "oneOf is supported where its schemas exclude one another by a type or a constant property"
    return failure.rstrip(".")


class _Vocabulary:
    """What llguidance asks of a tokenizer, answered with the bytes that our own detokenizer will give the tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        eos_token_ids = _eos_token_ids(tokenizer)
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        # Whatever the tokenizer calls it: a token that ends the answer is no text within it.
        is_special = {*eos_token_ids, *filter(tokenizer.is_special, range(tokenizer.vocab_size))}
        self.special_token_ids = sorted(is_special)
        self._tokenizer = tokenizer
        self._ids = {
            token: token_id for token_id, token in enumerate(self.tokens) if token and token_id not in is_special
        }
        self._longest = max(map(len, self._ids))

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a text that the grammar leaves no choice about; exactly these bytes.

        Raises:
            Unwritable: some byte is in no token. The library takes any error here for a failure of the grammar; fewer
                tokens than the text has it would take for the whole.
        """
        return self._encode(text) or self._longest_first(text)

    def _encode(self, text: bytes) -> list[int] | None:
        """As the tokenizer has it in the middle of a text; None where that would be other bytes."""
        # Some tokenizers put a space before a text: a line break takes it, and is dropped again.
        token_ids = self._tokenizer.encode("\n" + text.decode(), add_special_tokens=False)
        for first in range(1, min(4, len(token_ids) + 1)):
            rest = token_ids[first:]
            if b"".join(self.tokens[token_id] for token_id in rest) == text:
                return rest
        return None

    def _longest_first(self, text: bytes) -> list[int]:
        token_ids = []
        start = 0
        while start < len(text):
            for end in range(min(start + self._longest, len(text)), start, -1):
                token_id = self._ids.get(text[start:end])
                if token_id is not None:
                    token_ids.append(token_id)
                    start = end
                    break
            else:
                raise Unwritable
        return token_ids


def _vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    wrapper: Any = TokenizerWrapper(_Vocabulary(tokenizer))
    return LLTokenizer(wrapper, eos_token=_eos_token_ids(tokenizer))


def _eos_token_ids(tokenizer: Tokenizer) -> list[int]:
    return sorted(token_id for token_id in tokenizer.eos_token_ids if token_id < tokenizer.vocab_size)


def _stripped_tokens(tokenizer: Tokenizer) -> bytes:
    """A bit for each token whose text is another at the start of an answer, where some decoders drop a space."""
    bits = bytearray((tokenizer.vocab_size + 7) // 8)
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.token_bytes(token_id)
        is_stripped = tokenizer.decoder.num_stripped_spaces > 0 and text.startswith(b" ")
        if is_stripped or tokenizer.first_token_bytes(token_id) != text:
            bits[token_id // 8] |= 1 << token_id % 8
    return bytes(bits) if any(bits) else b""
