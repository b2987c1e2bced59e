"""Grammars as clients write them, Lark or llama.cpp's GBNF, brought to the Lark that llguidance compiles.

llguidance's Lark has more than a grammar needs. Most directives, attributes and special tokens are refused by name:
they change how text is generated, reach past the checks of schemas, or name tokens that are no text.
"""

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

MAX_RULES = 500
"""The compiler follows rules on the stack: some 3,000 in a chain are the end of a thread's 8 MB."""

# Quantifiers are possessive, and what is not closed ends with its line, so that every text takes linear time.
_LEXEME = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\\n])*+"?i?)
    |(?P<regex>/(?![/*])(?:\\.|[^/\\\n])++/?[a-z]*+)
    |(?P<comment>//[^\n]*+|\#[^\n]*+)
    |(?P<directive>%\w++)
    |(?P<gbnf>::=)
    |(?P<colons>:++)
    |(?P<special><[^<>\n]*+>)
    |(?P<nested>@\w++)
    |(?P<attribute>^[ \t]*+[?!]*+[\w.-]++\s*+\[)
    |.""",
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)
_DIRECTIVES = ("%ignore", "%import")


class UnsupportedGrammar(ValueError):
    """The message says what."""


def to_lark(text: str) -> str:
    """The grammar in Lark.

    Raises:
        UnsupportedGrammar: it is too large, uses what is not supported, or is GBNF that cannot be read.
    """
    if _is_gbnf(text):
        try:
            # Its first line is an empty directive, which is refused from clients.
            text = gbnf_to_lark(text).removeprefix("%llguidance {}")
        except Exception as error:  # it raises what its parser runs into, IndexError and RecursionError included
            raise UnsupportedGrammar(f"the GBNF grammar cannot be read: {error or type(error).__name__}") from error
    _check(text)
    return text


def _is_gbnf(text: str) -> bool:
    return any(match.lastgroup == "gbnf" for match in _LEXEME.finditer(text))


def _check(lark: str) -> None:
    num_rules = 0
    for match in _LEXEME.finditer(lark):
        lexeme = match.group().strip()
        match match.lastgroup:
            case "colons":
                num_rules += 1
            case "directive" if lexeme not in _DIRECTIVES:
                raise UnsupportedGrammar(f"the directive {lexeme} is not supported")
            case "attribute":
                raise UnsupportedGrammar(f"attributes of rules are not supported: {lexeme}")
            case "special":
                raise UnsupportedGrammar(f"special tokens are not supported: {lexeme}")
            case "nested":
                raise UnsupportedGrammar(f"references to other grammars are not supported: {lexeme}")
    if num_rules > MAX_RULES:
        raise UnsupportedGrammar(f"it has more than {MAX_RULES} rules")
