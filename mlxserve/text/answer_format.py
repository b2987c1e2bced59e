"""How one model writes its answers to chats: the parser that takes them apart, and where a grammar begins in them."""

import functools
import itertools
import re
from collections.abc import Iterable, Sequence

from mlxserve.core.generation import ChatPrompt
from mlxserve.text import harmony
from mlxserve.text.chat_template import begun_answer
from mlxserve.text.opening import Opening, OpeningRules
from mlxserve.text.output import Content, OutputParser, Piece
from mlxserve.text.reasoning import SPACE, ReasoningParser, Stage, find_reasoning_format, stage_after
from mlxserve.text.thinking import can_think
from mlxserve.text.tokenizer import Tokenizer
from mlxserve.text.tool_calls import ToolFormat


class AnswerFormat:
    def __init__(self, tokenizer: Tokenizer, tool_format: ToolFormat | None = None) -> None:
        template = tokenizer.chat_template
        self._tokenizer = tokenizer
        self._tool_format = tool_format
        self._is_harmony = harmony.is_harmony(tokenizer.has_token)
        self._reasoning = None if self._is_harmony else find_reasoning_format(template, tokenizer.has_token)
        self.can_think = can_think(template, tokenizer.has_token)

    def kept_ids(self, prompt: ChatPrompt) -> frozenset[int]:
        """Special tokens that the parser of an answer has to see as text."""
        return self._marker_ids | self._call_marker_ids if self._may_call(prompt) else self._marker_ids

    @functools.cached_property
    def _marker_ids(self) -> frozenset[int]:
        if self._is_harmony:
            return self._ids_of(harmony.MARKERS)
        return frozenset() if self._reasoning is None else self._ids_of(self._reasoning.markers)

    @functools.cached_property
    def _call_marker_ids(self) -> frozenset[int]:
        return frozenset() if self._tool_format is None else self._ids_of(self._tool_format.markers)

    def _ids_of(self, markers: Sequence[str]) -> frozenset[int]:
        ids = (self._tokenizer.encode(marker, add_special_tokens=False) for marker in markers)
        return frozenset(itertools.chain.from_iterable(ids))

    def _may_call(self, prompt: ChatPrompt) -> bool:
        return self._tool_format is not None and bool(prompt.tools) and prompt.tool_choice.mode != "none"

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
        interrupts: Sequence[str] = ()
        if self._tool_format is not None and self._may_call(prompt):
            call_parser = self._tool_format.parser(prompt.tools)
            interrupts = self._tool_format.control_starts
        form = self._reasoning
        if form is None:
            return call_parser
        is_wrapped = form.answer_start is not None and rendered.rstrip(SPACE).endswith(form.answer_start)
        stage = stage_after(rendered, form, begun_answer(prompt))
        parser = ReasoningParser(form, stage, is_wrapped=is_wrapped, interrupts=interrupts)
        return parser if call_parser is None else ChainedParser(parser, call_parser)

    def opening(self, prompt: ChatPrompt, rendered: str) -> Opening | None:
        """What comes before the answer's content; None if the content begins at once."""
        if not self.can_think:
            return None
        if self._is_harmony:
            return self._harmony_opening(prompt, rendered)
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

    def _harmony_opening(self, prompt: ChatPrompt, rendered: str) -> Opening | None:
        header = harmony.header_at_end_of(rendered) if begun_answer(prompt) else None
        if header is not None and "analysis" not in header:
            return None
        if prompt.tool_choice.mode != "required":
            return Opening(self._rules, len(self._rules.start_ids), harmony.PROMPT_END.encode())
        # The grammar of calls has their headers too.
        if rendered.endswith(harmony.NO_THOUGHTS):
            return None
        return Opening(self._call_rules, 0 if header is None else len(self._call_rules.start_ids))

    @functools.cached_property
    def _rules(self) -> OpeningRules:
        if self._is_harmony:
            # Thoughts may also lead to a call, and no answer.
            return self._make_rules(harmony.CHANNEL, (harmony.MESSAGE,), harmony.ANSWER_BEGINS, allowed=harmony.CALL)
        assert self._reasoning is not None
        ends = self._reasoning.ends
        return self._make_rules(
            self._reasoning.start, ends, re.compile(b"|".join(re.escape(end.encode()) for end in ends))
        )

    @functools.cached_property
    def _call_rules(self) -> OpeningRules:
        """Of harmony, where the answer must call: nothing but one message of thoughts."""
        others = (harmony.START, harmony.CHANNEL, harmony.MESSAGE)
        end = re.compile(re.escape(harmony.END.encode()))
        return self._make_rules(harmony.THOUGHTS_START, (harmony.END,), end, masked_tokens=others)

    def _make_rules(
        self,
        start: str,
        ends: tuple[str, ...],
        pattern: re.Pattern[bytes],
        *,
        allowed: str | None = None,
        masked_tokens: Sequence[str] = (),
    ) -> OpeningRules:
        """`allowed`: a token that may end an answer within its thoughts."""
        tokenizer = self._tokenizer
        texts = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        ids = {*self._ending_within(texts, ends), *(tokenizer.token_id(token) for token in masked_tokens)}
        if allowed is not None:
            ids.discard(tokenizer.token_id(allowed))
        masked = bytearray((tokenizer.vocab_size + 7) // 8)
        for token_id in ids:
            if token_id is not None and token_id < tokenizer.vocab_size:
                masked[token_id // 8] |= 1 << token_id % 8
        start_ids = tokenizer.encode(start, add_special_tokens=False)
        return OpeningRules(texts, tuple(start_ids), pattern, bytes(masked))

    def _ending_within(self, texts: Sequence[bytes], ends: Sequence[str]) -> Iterable[int]:
        """Tokens that would end an answer within its thoughts, or begin it in the token that ends them."""
        yield from self._tokenizer.eos_token_ids | self.ending_ids
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
