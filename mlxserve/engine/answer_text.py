"""An answer's tokens to the deltas of a generation: detokenizer, parser, stop strings."""

import secrets
from collections import deque
from dataclasses import dataclass, field

from mlxserve.core.generation import ReasoningDelta, TextDelta, ToolCallDelta
from mlxserve.core.step import SampledToken
from mlxserve.engine.token_spans import TokenSpans
from mlxserve.text.detokenizer import IncrementalDetokenizer
from mlxserve.text.output import CallArguments, CallStart, Content, OutputParser, Piece, Thought
from mlxserve.text.stop_strings import StopStringMatcher

Delta = TextDelta | ReasoningDelta | ToolCallDelta
Tokens = list[SampledToken]


class AnswerText:
    """Takes an answer token by token and gives deltas, neighbours of a kind joined.

    A token goes with the text that it completes, and a marker's with the thoughts or the call that it marks. Those that
    are neither, such as the header of a message that is content, are in no delta.

    Stop strings are looked for in the content alone: one within thoughts or a call's arguments does not end the answer,
    and none reaches from one text into the next.
    """

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer,
        stop: tuple[str, ...],
        parser: OutputParser | None = None,
        *,
        must_call: bool = False,
    ) -> None:
        """Without `parser` all of the text is content. `must_call`: nothing is but thoughts and calls."""
        self._detokenizer = detokenizer
        self._parser = parser
        self._must_call = must_call
        self._stop = stop
        self._stop_strings = StopStringMatcher(stop)
        self._spans = TokenSpans()
        self._last: type[Piece] | None = None
        self._call_id = ""
        self._deltas: deque[_Delta] = deque()
        self.num_tool_calls = 0
        self.num_reasoning_tokens = 0

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the content; what comes after it is no part of the answer."""
        return self._stop_strings.matched

    def add(self, token: SampledToken, *, is_free: bool) -> None:
        """Take the next token. `is_free`: no stop string may end the content within its text."""
        text = self._detokenizer.add(token.token_id)
        if self._parser is None:
            self._add_content(text, [token], is_free=is_free)
        else:
            self._spans.add(token, text)
            self._add_pieces(self._parser.push(text), is_free=is_free)

    def finish(self, *, is_cut: bool = False) -> None:
        """Give out what is held back: no token follows.

        `is_cut`: the answer might have gone on. Half a character at its end is left out, and so is the head of a call
        where nothing but calls may come: it is markup.
        """
        text = self._detokenizer.cut() if is_cut else self._detokenizer.finish()
        if self._parser is None:
            self._add_content(text, [], is_free=False)
        else:
            self._spans.add_text(text)
            pieces = [*self._parser.push(text), *self._parser.finish()]
            if is_cut and self._must_call:
                pieces = [piece for piece in pieces if not isinstance(piece, Content)]
            self._add_pieces(pieces, is_free=False)
            self._add_marker(self._spans.take_all(), self._last)
        if self.stop_string is None:
            self._end_content()

    def take(self) -> list[Delta]:
        """The deltas since the last call."""
        deltas = [delta.finished() for delta in self._deltas]
        self._deltas.clear()
        return deltas

    def _add_pieces(self, pieces: list[Piece], *, is_free: bool) -> None:
        for number, piece in enumerate(pieces, 1):
            if self._last is Content and not isinstance(piece, Content):
                self._end_content()
            if self.stop_string is not None:
                return
            text = "" if isinstance(piece, CallStart) else piece.text
            marker, tokens = self._spans.take(text, is_last=number == len(pieces))
            last, self._last = self._last, type(piece)
            if isinstance(piece, Thought) or last is Thought:
                self._add_marker(marker, Thought)
            elif isinstance(piece, Content):
                self._add_marker(marker, last)
            else:
                tokens = [*marker, *tokens]
            match piece:
                case Content():
                    self._add_content(text, tokens, is_free=is_free)
                case Thought():
                    self._add_thought(text, tokens)
                case CallStart(name):
                    self.num_tool_calls += 1
                    self._call_id = f"call_{secrets.token_hex(12)}"
                    self._deltas.append(_Delta(CallStart, index=self._call_index, call_id=self._call_id, name=name))
                    self._deltas[-1].tokens += tokens
                case CallArguments():
                    self._add(CallArguments, text, tokens)

    @property
    def _call_index(self) -> int:
        return self.num_tool_calls - 1

    def _add_content(self, text: str, tokens: Tokens, *, is_free: bool) -> None:
        self._add(Content, text if is_free else self._stop_strings.push(text), tokens)

    def _end_content(self) -> None:
        """No content follows at once: what the stop strings held back is not one."""
        self._add(Content, self._stop_strings.flush(), [])
        if self.stop_string is None:
            self._stop_strings = StopStringMatcher(self._stop)

    def _add_thought(self, text: str, tokens: Tokens) -> None:
        self.num_reasoning_tokens += len(tokens)
        self._add(Thought, text, tokens)

    def _add_marker(self, tokens: Tokens, kind: type[Piece] | None) -> None:
        if kind is Thought:
            self._add_thought("", tokens)
        elif kind in (CallStart, CallArguments):
            self._add(CallArguments, "", tokens)

    def _add(self, kind: type[Piece], text: str, tokens: Tokens) -> None:
        if not text and not tokens:
            return
        last = self._deltas[-1] if self._deltas else None
        if last is None or not last.takes(kind):
            last = _Delta(kind, index=self._call_index, call_id=self._call_id)
            self._deltas.append(last)
        if text:
            last.texts.append(text)
        last.tokens += tokens


@dataclass(slots=True)
class _Delta:
    """A delta that more may come to."""

    kind: type[Piece]
    index: int
    call_id: str
    name: str | None = None
    texts: list[str] = field(default_factory=list)
    tokens: Tokens = field(default_factory=list)

    def takes(self, kind: type[Piece]) -> bool:
        return kind is self.kind or (kind is CallArguments and self.kind is CallStart)

    def finished(self) -> Delta:
        text, tokens = "".join(self.texts), tuple(self.tokens)
        if self.kind is Content:
            return TextDelta(text, tokens)
        if self.kind is Thought:
            return ReasoningDelta(text, tokens)
        return ToolCallDelta(self.index, self.call_id, self.name, text, tokens)
