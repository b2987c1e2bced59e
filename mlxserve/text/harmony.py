"""gpt-oss's answers: OpenAI's harmony format (https://github.com/openai/harmony, docs/format.md).

An answer is messages in channels. The prompt ends with `<|start|>assistant`, and the model goes on, for example:

    <|channel|>analysis<|message|>thoughts<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>

analysis is thoughts, final is the answer, commentary is either a preamble for the user or, with a recipient, a call.
The recipient may stand before the channel too.
"""

import re
from collections.abc import Callable, Iterable

from mlxserve.text.output import CallArguments, CallStart, Content, Piece, Thought
from mlxserve.text.reasoning import first_marker, partial_length

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
FUNCTIONS = "functions."
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
PROMPT_END = f"{START}assistant"
"""What a prompt ends with."""
THOUGHTS_START = f"{CHANNEL}analysis{MESSAGE}"
NO_THOUGHTS = f"{THOUGHTS_START}{END}{PROMPT_END}"
"""Put behind a prompt, it tells the model that it has thought already."""

_MAX_HEADER_LENGTH = 200
"""Characters; a longer one is no header."""
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_HEADER_BEGINNINGS = (*MARKERS, "to=", "assistant")

ANSWER_BEGINS = re.compile(
    rb"<\|start\|>(?:(?!to=)[^<])*<\|channel\|>(?!\s*analysis)(?:(?!to=)[^<])*(?:<\|constrain\|>[^<]*)?<\|message\|>"
)
"""The header of a message that is content, whole."""


def is_harmony(has_token: Callable[[str], bool]) -> bool:
    return all(map(has_token, (START, CHANNEL, MESSAGE, END)))


class HarmonyParser:
    def __init__(self, tool_names: Iterable[str] = (), *, header: str | None = None) -> None:
        """A call of a tool that is not among `tool_names` is content.

        `header`: that of the message which the prompt has begun, if it has got as far as its text.
        """
        self._tool_names = frozenset(tool_names)
        self._kind: type[Content] | type[Thought] | type[CallArguments] | None = None
        """Of the message under way; None while its header is."""
        self._held = ""
        if header is not None:
            self._begin(header, [])

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._advance(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        if self._kind is not None:
            return [self._kind(held)] if held else []
        # A header that was cut off says nothing; what looks like the beginning of one may be all there is.
        is_header = "<" in held or held.lstrip().startswith("to=")
        return [Content(held)] if held and not is_header else []

    def _advance(self, pieces: list[Piece]) -> bool:
        return self._read_header(pieces) if self._kind is None else self._read_message(self._kind, pieces)

    def _read_header(self, pieces: list[Piece]) -> bool:
        header, found, rest = self._held.partition(MESSAGE)
        length = len(header) if found else len(header) - partial_length(header, (MESSAGE,))
        if length > _MAX_HEADER_LENGTH or not _is_header(header, is_whole=bool(found)):
            # A model that fell out of the format: what it says is kept.
            marker = first_marker(self._held, MARKERS)
            if marker is not None and marker[0] == 0:
                self._held = self._held.removeprefix(marker[1])
            self._kind = Content
            return True
        if not found:
            return False
        self._held = rest
        self._begin(header, pieces)
        return True

    def _begin(self, header: str, pieces: list[Piece]) -> None:
        recipient = _RECIPIENT.search(header)
        channel = _CHANNEL.search(header)
        name = "" if recipient is None else recipient[1]
        if name.startswith(FUNCTIONS) and name.removeprefix(FUNCTIONS) in self._tool_names:
            self._kind = CallArguments
            pieces.append(CallStart(name.removeprefix(FUNCTIONS)))
        elif channel is not None and channel[1] == "analysis" and not name.startswith(FUNCTIONS):
            self._kind = Thought
        else:
            self._kind = Content

    def _read_message(self, kind: type[Content] | type[Thought] | type[CallArguments], pieces: list[Piece]) -> bool:
        found = first_marker(self._held, MARKERS)
        end = len(self._held) - partial_length(self._held, MARKERS) if found is None else found[0]
        if end:
            pieces.append(kind(self._held[:end]))
        self._held = self._held[end:]
        if found is None:
            return False
        marker = found[1]
        if marker in (END, CALL, RETURN, START):
            self._held = self._held.removeprefix(marker)
        self._kind = None
        return True


def _is_header(text: str, *, is_whole: bool) -> bool:
    """Whether the text is a header, or may become one if it is not whole yet."""
    text = text.lstrip()
    if not text or text.startswith(_HEADER_BEGINNINGS):
        return True
    return not is_whole and any(beginning.startswith(text) for beginning in _HEADER_BEGINNINGS)


def header_at_end_of(prompt: str) -> str | None:
    """The header of the message that a prompt has begun, up to its `<|message|>`; None if it has not got so far."""
    header, found, _ = prompt.rpartition(START)[2].partition(MESSAGE)
    return header if found else None
