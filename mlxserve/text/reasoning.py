"""How models mark what they think before they answer, and the parser that takes the two apart."""

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mlxserve.text.output import Content, Piece, Thought

SPACE = " \t\r\n"
"""What templates and models put between a marker and the text beside it; it belongs to neither."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Markers around the thoughts: start, thoughts, end, answer."""

    starts: tuple[str, ...]
    """Any of these; the first is the one to write."""
    ends: tuple[str, ...]
    answer_start: str | None = None
    """May follow the end, or begin the answer where nothing is thought. After it `answer_ends` are markers too."""
    answer_ends: tuple[str, ...] = ()
    is_recurring: bool = False
    """A start later in the answer counts as well: these markers are control tokens, which nobody writes as text."""
    signs: tuple[str, ...] = ()
    """What tells the format where a template does not spell its markers out."""

    @property
    def start(self) -> str:
        return self.starts[0]

    @property
    def end(self) -> str:
        return self.ends[0]

    @property
    def markers(self) -> tuple[str, ...]:
        answer = () if self.answer_start is None else (self.answer_start, *self.answer_ends)
        return (*self.starts, *self.ends, *answer)

    def is_written_by(self, chat_template: str) -> bool:
        """Whether a chat template has its markers; of those around thoughts one will do, since some templates do
        nothing but cut old thoughts off."""
        if self.signs:
            return all(sign in chat_template for sign in self.signs)
        if self.answer_start is not None and self.answer_start not in chat_template:
            return False
        return any(marker in chat_template for marker in (*self.starts, *self.ends))


THINK = ReasoningFormat(("<think>",), ("</think>",))
"""DeepSeek-R1, QwQ, Qwen3, GLM-4.5, MiniMax-M2, Nemotron, SmolLM3, Kimi-K2-Thinking and most others."""

FORMATS = (
    ReasoningFormat(("<seed:think>",), ("</seed:think>",)),  # Seed-OSS
    ReasoningFormat(("<longcat_think>",), ("</longcat_think>",)),
    ReasoningFormat(("<|think:start|>",), ("<|think:end|>",)),
    ReasoningFormat(  # Gemma 4
        ("<|channel>thought",), ("<channel|>",), is_recurring=True, signs=("<|channel>", "<channel|>")
    ),
    ReasoningFormat(  # Kimi K3
        ("<|open|>think<|sep|>",),
        ("<|close|>think<|sep|>",),
        "<|open|>response<|sep|>",
        ("<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        is_recurring=True,
        signs=("<|open|>", "<|close|>", "<|sep|>"),
    ),
    ReasoningFormat(  # Command A Reasoning
        ("<|START_THINKING|>",),
        ("<|END_THINKING|>",),
        "<|START_RESPONSE|>",
        ("<|END_RESPONSE|>",),
        is_recurring=True,
    ),
    ReasoningFormat(("[THINK]",), ("[/THINK]",)),  # Magistral, Ministral
    ReasoningFormat(("◁think▷",), ("◁/think▷",)),  # Kimi-VL
    ReasoningFormat(("<thought>",), ("</thought>",)),  # EXAONE Deep
    ReasoningFormat(  # Granite 3.2; the second form is what quantised ones write now and then
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
    ReasoningFormat(("Here are my reasoning steps:",), ("[BEGIN FINAL RESPONSE]",)),  # Apriel
    ReasoningFormat(("<think>",), ("</think>",), "<answer>", ("</answer>",)),  # Hunyuan A13B
    ReasoningFormat(("<think>",), ("</think>",), "<response>", ("</response>",)),  # Granite 3.3
    THINK,
)


def find_reasoning_format(chat_template: str | None, has_token: Callable[[str], bool]) -> ReasoningFormat | None:
    """The format that a model's chat template writes, or else the one whose markers are tokens of its vocabulary.

    Tokens alone are no sign that the model thinks: it may share its vocabulary with one that does.
    """
    if chat_template is not None:
        for form in FORMATS:
            if form.is_written_by(chat_template):
                return form
    for form in FORMATS:
        signs = form.signs or (form.start, form.end)
        if form.answer_start is None and all(map(has_token, signs)):
            return form
    return None


class Stage(enum.Enum):
    START = enum.auto()
    """Nothing but space so far: thoughts may begin."""
    OPEN = enum.auto()
    """Thoughts began, and have no text yet."""
    THOUGHTS = enum.auto()
    ANSWER_START = enum.auto()
    """The thoughts are over, and the answer has no text yet."""
    ANSWER = enum.auto()


def stage_after(prompt: str, form: ReasoningFormat, begun: str = "") -> Stage:
    """Where in its answer a model is after `prompt`, which ends with what is there of the answer, if anything.

    `begun`: the text of the message that the prompt ends with, if the model is to go on with that.
    """
    if begun:
        is_open = begun.lstrip(SPACE).startswith(form.starts) and not any(end in begun for end in form.ends)
        return Stage.THOUGHTS if is_open else Stage.ANSWER
    text = prompt.rstrip(SPACE)
    if text.endswith(form.starts):
        return Stage.OPEN
    closing = form.ends if form.answer_start is None else (*form.ends, form.answer_start)
    return Stage.ANSWER if text.endswith(closing) else Stage.START


class ReasoningParser:
    """Takes thoughts and answer apart, and the markers and the space beside them out.

    Thoughts come first, unless their markers are recurring: in the middle of an answer `<think>` is text. Marker-like
    text is held back until it is clear what it is.
    """

    def __init__(
        self, form: ReasoningFormat, stage: Stage, *, is_wrapped: bool = False, interrupts: Sequence[str] = ()
    ) -> None:
        """`is_wrapped`: the prompt has begun the answer with the format's `answer_start`. `interrupts`: what ends the
        thoughts too, and is content itself: some models forget the end marker before a tool call.
        """
        self._form = form
        self._stage = stage
        self._is_wrapped = is_wrapped
        self._interrupts = tuple(interrupts)
        self._held = ""

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._advance(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        if self._stage in (Stage.START, Stage.ANSWER):
            return [Content(held)] if held else []
        if not held.strip(SPACE):
            return []
        return [Content(held) if self._stage is Stage.ANSWER_START else Thought(held)]

    def _advance(self, pieces: list[Piece]) -> bool:
        """Take what is certain from the held text; return whether that led on to something."""
        form = self._form
        match self._stage:
            case Stage.START:
                return self._open(form.starts, form.answer_start, otherwise=Stage.ANSWER, keeps_space=True)
            case Stage.OPEN:
                # Some models write the marker again that the prompt ended with.
                return self._open(form.starts, None, otherwise=Stage.THOUGHTS)
            case Stage.ANSWER_START:
                starts = form.starts if form.is_recurring else ()
                return self._open(starts, form.answer_start, otherwise=Stage.ANSWER)
            case Stage.THOUGHTS:
                marker = self._read(Thought, (*form.ends, *self._interrupts), pieces, trims=True)
                if marker is None:
                    return False
                if marker in self._interrupts:
                    self._held = marker + self._held
                self._stage = Stage.ANSWER_START
            case Stage.ANSWER:
                ends = form.answer_ends if self._is_wrapped else ()
                starts = form.starts if form.is_recurring else ()
                marker = self._read(Content, (*ends, *starts), pieces, trims=self._is_wrapped)
                if marker is None:
                    return False
                if marker in starts:
                    self._stage = Stage.OPEN
                else:
                    self._is_wrapped = form.is_recurring
        return True

    def _open(
        self, starts: tuple[str, ...], answer_start: str | None, *, otherwise: Stage, keeps_space: bool = False
    ) -> bool:
        """Where a marker may stand behind space: take it out, wait for the rest of it, or go on without."""
        text = self._held.lstrip(SPACE)
        for marker in starts:
            if text.startswith(marker):
                self._stage, self._held = Stage.OPEN, text.removeprefix(marker)
                return True
        if answer_start is not None and text.startswith(answer_start):
            self._stage, self._held = Stage.ANSWER_START, text.removeprefix(answer_start)
            self._is_wrapped = True
            return True
        if not keeps_space:
            self._held = text
        markers = starts if answer_start is None else (*starts, answer_start)
        if not text or any(marker.startswith(text) for marker in markers):
            return False
        self._stage = otherwise
        return True

    def _read(
        self, kind: type[Content] | type[Thought], markers: tuple[str, ...], pieces: list[Piece], *, trims: bool
    ) -> str | None:
        """Give the held text out as far as it is certain, or up to the first of `markers`, which is returned.

        `trims`: space before a marker goes with it.
        """
        held = self._held
        found = first_marker(held, markers)
        end = len(held) - partial_length(held, markers) if found is None else found[0]
        text = held[:end].rstrip(SPACE) if trims else held[:end]
        if text:
            pieces.append(kind(text))
        if found is None:
            self._held = held[len(text) :]
            return None
        self._held = held[end + len(found[1]) :]
        return found[1]


def first_marker(text: str, markers: Iterable[str]) -> tuple[int, str] | None:
    """Where in the text the first of the markers begins, and which it is."""
    found = [(position, marker) for marker in markers if (position := text.find(marker)) >= 0]
    return min(found, default=None)


def partial_length(text: str, markers: Iterable[str]) -> int:
    """How many characters at the end of the text may be the beginning of a marker."""
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest
