"""Regular expressions, grammars and choices for the tests of structured output, each with a check of its own.

A grammar's check knows nothing of grammars: it is Python's re, or a few lines that read the text.
"""

import ast
import json
import re
from collections.abc import Callable

Check = Callable[[str], bool]

REGEXES: dict[str, str] = {
    "literal": "hello",
    "anchored": "^abc$",
    "class and counts": "[a-c]{2,5}",
    "alternatives": "(yes|no|maybe)",
    "optional": "colou?r",
    "plus": "[0-9]+\\.[0-9]+",
    "star": "x*y",
    "lazy": "a+?b",
    "dot": "...",
    "negated class": "[^a-z\\s]{1,4}",
    "digits": "\\d{3}-\\d{4}",
    "words": "\\w+ \\w+",
    "spaces": "a\\s{1,2}b",
    "escapes": "\\(\\[\\{\\.\\*\\\\/",
    "quotes": "\"[a-z]*\"|'[a-z]*'",
    "unicode": "[\u00e4\u00f6\u00fc]{1,3}",
    "beyond the plane": "\U0001f389{1,2}",
    "line breaks": "(- [a-z]{1,3}\\n){1,3}",
    "case": "(?i)json",
    "named group": "(?P<year>[12][0-9]{3})",
    "nested groups": "((a|b)(c|d)?){1,3}",
    "date": "(19|20)[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])",
    "address": "[a-z]{1,5}@[a-z]{1,5}\\.(com|org)",
    "empty or a": "a?",
    "slashes": "/[a-z]{1,3}(/[a-z]{1,3})*",
}

_NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?"


def _arithmetic(text: str) -> bool:
    """Digits, signs and brackets that Python can read."""
    try:
        ast.parse(text.strip(), mode="eval")
    except SyntaxError:
        return False
    return re.fullmatch(r"[1-9+*() -]+", text) is not None


def _balanced(text: str) -> bool:
    depth = 0
    for char in text:
        depth += {"(": 1, ")": -1}[char]
        if depth < 0:
            return False
    return depth == 0 and bool(text)


def _palindrome(text: str) -> bool:
    return text == text[::-1] and re.fullmatch("[ab]*-[ab]*", text) is not None


def _anbn(text: str) -> bool:
    half = len(text) // 2
    return half > 0 and text == "a" * half + "b" * half


def _json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def matches(pattern: str) -> Check:
    return lambda text: re.fullmatch(pattern, text) is not None


LARK: dict[str, tuple[str, Check]] = {
    "lark literal": ('start: "ab" "c"', matches("abc")),
    "lark alternatives": ('start: "a" | "b" | start "c"', matches("[ab]c*")),
    "lark regex": ("start: /[a-f]{2,4}/", matches("[a-f]{2,4}")),
    "lark terminals": ('start: WORD "=" NUM\nWORD: /[a-z]+/\nNUM: /[0-9]+/', matches("[a-z]+=[0-9]+")),
    "lark repetition": ('start: ("x" "y"?)+ "z"*', matches("(xy?)+z*")),
    "lark counts": ('start: "a"{2,4} ("b" "c"){2}', matches("a{2,4}bcbc")),
    "lark tilde": ('start: "a"~2..3', matches("a{2,3}")),
    "lark optional": ('start: "a" ["b"] "c"', matches("ab?c")),
    "lark case": ('start: "on"i', matches("(?i:on)")),
    "lark import": ("start: INT\n%import common.INT", matches("[0-9]+")),
    "lark ignore": ('start: "a" "b"\n%ignore / +/', matches(" *a *b *")),
    "lark comments": ('// one\nstart: "a" // two\n# three\n', matches("a")),
    "lark escapes": ('start: "\\"" "\\\\" "\\n"', matches('"\\\\\n')),
    "lark unicode": ('start: "\u00e9" | "\u4e2d"', matches("[\u00e9\u4e2d]")),
    "lark and": ("start: A\nA: /[a-z]{1,4}/ & /.*x/", matches("[a-z]{0,3}x")),
    "lark not": (
        "start: A\nA: ~/[ab]+/ & /[abc]{1,3}/",
        lambda text: re.fullmatch("[abc]{1,3}", text) is not None and "c" in text,
    ),
    "lark angle in text": ('start: "<b>" /[a-z]{1,3}/ "</b>"', matches("<b>[a-z]{1,3}</b>")),
    "lark brackets": ('start: pair+\npair: "(" pair* ")"', _balanced),
    "lark palindrome": ('start: "-" | "a" start "a" | "b" start "b"', _palindrome),
    "lark counting": ('start: "a" start "b" | "ab"', _anbn),
    "lark arithmetic": (
        'start: sum\nsum: product ("+" product)*\nproduct: atom ("*" atom)*\natom: /[1-9]/ | "(" sum ")"',
        _arithmetic,
    ),
    "lark list": (f'start: "[" (item ("," item)*)? "]"\nitem: NUMBER\nNUMBER: /{_NUMBER}/', _json),
}
GBNF: dict[str, tuple[str, Check]] = {
    "gbnf literal": ('root ::= "yes" | "no"', matches("yes|no")),
    "gbnf classes": ("root ::= [a-z]+ [0-9]?", matches("[a-z]+[0-9]?")),
    "gbnf negated class": ('root ::= "[" [^\\]\\n"]* "]"', matches(r'\[[^\]\n"]*\]')),
    "gbnf groups": ('root ::= ("a" | "b" "c")+ "!"', matches("(a|bc)+!")),
    "gbnf counts": ('root ::= [0-9]{2,3} "x"{2}', matches("[0-9]{2,3}xx")),
    "gbnf rules": (
        'root ::= greeting " " name\ngreeting ::= "hi" | "hello"\nname ::= [A-Z] [a-z]{1,4}',
        matches("(hi|hello) [A-Z][a-z]{1,4}"),
    ),
    "gbnf dashes in names": ("root ::= a-word\na-word ::= [a-z]{1,5}", matches("[a-z]{1,5}")),
    "gbnf comments": ('# one\nroot ::= "a" # two\n', matches("a")),
    "gbnf lines": ('root ::= line+\nline ::= "- " [a-z]{1,3} "\\n"', matches("(- [a-z]{1,3}\n)+")),
    "gbnf escapes": ('root ::= "\\"" "\\\\" "\\t"', matches('"\\\\\t')),
    "gbnf recursion": ('root ::= "a" root "b" | "ab"', _anbn),
    "gbnf brackets": ('root ::= pair+\npair ::= "(" pair* ")"', _balanced),
    "gbnf arithmetic": (
        'root ::= term ("+" term)*\nterm ::= factor ("*" factor)*\nfactor ::= [1-9] | "(" root ")"',
        _arithmetic,
    ),
    "gbnf json": (
        "root ::= value\n"
        'value ::= "null" | "true" | number | string | "[" (value ("," value)*)? "]" | "{" (pair ("," pair)*)? "}"\n'
        'pair ::= string ":" value\n'
        'string ::= "\\"" [a-z]{0,3} "\\""\n'
        "number ::= [1-9] [0-9]{0,2}\n",
        _json,
    ),
}
CHOICES: dict[str, tuple[str, ...]] = {
    "two": ("positive", "negative"),
    "one": ("only",),
    "prefixes": ("a", "ab", "abc", "b"),
    "awkward": ('quo"te', "back\\slash", "new\nline", "tab\t", "/slash/", "#hash", "<tag>", "%sign"),
    "unicode": ("\u00fcber", "\u65e5\u672c\u8a9e", "\U0001f389\U0001f38a"),
    "empty or not": ("", "x"),
    "many": tuple(f"label {index}" for index in range(200)),
    "numbers": tuple(map(str, range(10))),
}

REFUSED: dict[str, str] = {
    'start: %json {"type": "integer"}': "%json",
    'start: %regex {"substring_chars": "abc"}': "%regex",
    '%llguidance {"no_forcing": true}\nstart: "a"': "%llguidance",
    "start: a\na[max_tokens=3]: /.*/": "a[",
    'start: a\na[capture, stop="x"]: /.*/': "a[",
    'start: <|im_start|> "a"': "<|im_start|>",
    "start: <[3]>": "<[3]>",
    'start: a\na \n [stop="]"]: /.*/': "attributes",
    'start: x::0x1\nx::_: "a"\n%lark {\nstart: "b"\n}': "%lark",
    'start: "a" @other': "@other",
    'start: "a" b': "b",
    "start: /(?=a)b/": "look-around",
    "start: start": "no text",
    "nothing: /a/": "start",
    "root ::= [a-z": "GBNF",
    'other ::= "a"': "root",
    "start: (((": "start",
}
"""Grammars that are refused, and a part of the reason."""
