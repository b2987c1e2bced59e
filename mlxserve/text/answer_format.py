"""How one model writes its answers to chats: the parser that takes them apart, and where a grammar begins in them."""

import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from mlxserve.core.generation import ChatPrompt
from mlxserve.text import harmony
from mlxserve.text.chat_template import begun_answer
from mlxserve.text.opening import Opening, OpeningRules
from mlxserve.text.output import Content, OutputParser, Piece
from mlxserve.text.reasoning import SPACE, ReasoningParser, Stage, find_reasoning_format, stage_after
from mlxserve.text.thinking import can_think
from mlxserve.text.tokenizer import Tokenizer

_CALL = harmony.CALL.encode()


class ToolFormat(Protocol):
    """How a model writes tool calls."""

    @property
    def markers(self) -> Sequence[str]:
        """Texts of the format that may be tokens of their own."""
        ...

    def parser(self, tools: Sequence[dict[str, Any]]) -> OutputParser:
        """Takes content without thoughts; gives content and calls."""
        ...


class AnswerFormat:
    def __init__(self, tokenizer: Tokenizer, tool_format: ToolFormat | None = None) -> None:
        template = tokenizer.chat_template
        self._tokenizer = tokenizer
        self._tool_format = tool_format
        self._is_harmony = harmony.is_harmony(tokenizer.has_token)
        self._reasoning = None if self._is_harmony else find_reasoning_format(template, tokenizer.has_token)
        self.can_think = can_think(template, tokenizer.has_token)

    @functools.cached_property
    def kept_ids(self) -> frozenset[int]:
        """Special tokens that a parser has to see as text."""
        markers: list[str] = list(harmony.MARKERS) if self._is_harmony else []
        if self._reasoning is not None:
            markers += self._reasoning.markers
        if self._tool_format is not None and not self._is_harmony:
            markers += self._tool_format.markers
        ids = (self._tokenizer.encode(marker, add_special_tokens=False) for marker in markers)
        return frozenset(itertools.chain.from_iterable(ids))

    @functools.cached_property
    def ending_ids(self) -> frozenset[int]:
        """Tokens that end an answer, whether the model's files say so or not."""
        tokens = (harmony.CALL, harmony.RETURN) if self._is_harmony else ()
        ids = (self._tokenizer.token_id(token) for token in tokens)
        return frozenset(token_id for token_id in ids if token_id is not None)

    def parser(self, prompt: ChatPrompt, rendered: str) -> OutputParser | None:
        """For the answer to a prompt that was rendered so; None if all of it is content."""
        if self._is_harmony:
            header = harmony.header_at_end_of(rendered) if begun_answer(prompt) else None
            return harmony.HarmonyParser(_tool_names(prompt), header=header)
        call_parser = None
        if self._tool_format is not None and prompt.tools and prompt.tool_choice.mode != "none":
            call_parser = self._tool_format.parser(prompt.tools)
        form = self._reasoning
        if form is None:
            return call_parser
        is_wrapped = form.answer_start is not None and rendered.rstrip(SPACE).endswith(form.answer_start)
        parser = ReasoningParser(form, stage_after(rendered, form, begun_answer(prompt)), is_wrapped=is_wrapped)
        return parser if call_parser is None else ChainedParser(parser, call_parser)

    def opening(self, prompt: ChatPrompt, rendered: str) -> Opening | None:
        """What comes before the answer's content; None if the content begins at once."""
        if not self.can_think:
            return None
        if self._is_harmony:
            header = harmony.header_at_end_of(rendered) if begun_answer(prompt) else None
            if header is not None and "analysis" not in header:
                return None
            return Opening(self._rules, len(self._rules.start_ids), harmony.PROMPT_END.encode())
        form = self._reasoning
        if form is None:
            return None
        match stage_after(rendered, form, begun_answer(prompt)):
            case Stage.START:
                return Opening(self._rules, 0)
            case Stage.OPEN | Stage.THOUGHTS:
                return Opening(self._rules, len(self._rules.start_ids))
            case _:
                return None

    @functools.cached_property
    def _rules(self) -> OpeningRules:
        tokenizer = self._tokenizer
        texts = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        if self._is_harmony:
            start, pattern = harmony.CHANNEL, harmony.ANSWER_BEGINS
            ends: tuple[str, ...] = (harmony.MESSAGE,)
        else:
            assert self._reasoning is not None
            start, ends = self._reasoning.start, self._reasoning.ends
            pattern = re.compile(b"|".join(re.escape(end.encode()) for end in ends))
        masked = bytearray((tokenizer.vocab_size + 7) // 8)
        for token_id in self._masked_ids(texts, ends):
            masked[token_id // 8] |= 1 << token_id % 8
        start_ids = tokenizer.encode(start, add_special_tokens=False)
        return OpeningRules(texts, tuple(start_ids), pattern, bytes(masked))

    def _masked_ids(self, texts: Sequence[bytes], ends: Sequence[str]) -> Iterable[int]:
        """An answer of a grammar must not end within thoughts, nor begin in a token that ends them."""
        ending = self._tokenizer.eos_token_ids | self.ending_ids
        # Thoughts may also lead to a call, and no answer.
        yield from (token_id for token_id in ending if token_id < len(texts) and texts[token_id] != _CALL)
        last = {end.encode()[-1:] for end in ends if self._tokenizer.token_id(end) is None}
        for token_id, text in enumerate(texts):
            if any(text.partition(byte)[2].strip() for byte in last):
                yield token_id


class ChainedParser:
    """A parser of thoughts, and one of calls for the content that it leaves."""

    def __init__(self, first: OutputParser, second: OutputParser) -> None:
        self._first = first
        self._second = second

    def push(self, text: str) -> list[Piece]:
        return self._pass_on(self._first.push(text))

    def finish(self) -> list[Piece]:
        return [*self._pass_on(self._first.finish()), *self._second.finish()]

    def _pass_on(self, pieces: Iterable[Piece]) -> list[Piece]:
        passed: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, Content):
                passed += self._second.push(piece.text)
            else:
                passed.append(piece)
        return passed


def _tool_names(prompt: ChatPrompt) -> list[str]:
    if prompt.tool_choice.mode == "none":
        return []
    functions = [tool.get("function") for tool in prompt.tools]
    return [function["name"] for function in functions if isinstance(function, dict) and "name" in function]
