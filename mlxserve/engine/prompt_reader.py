"""From a request's prompt to what the engine takes, and from its tokens to the text of the answer."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from mlxserve.core.constraint import Grammar, TokenConstraint
from mlxserve.core.generation import ChatPrompt, GenerationRequest, InfillPrompt, Prompt
from mlxserve.engine.answer_text import AnswerText
from mlxserve.engine.model_description import ModelDescription
from mlxserve.engine.timeline import Timeline
from mlxserve.errors import InvalidParameter
from mlxserve.text.answer_format import AnswerFormat
from mlxserve.text.chat_template import encode_prompt, with_system
from mlxserve.text.detokenizer import IncrementalDetokenizer
from mlxserve.text.grammar import GrammarCompiler
from mlxserve.text.infill import infill_end_ids
from mlxserve.text.opening import Opening
from mlxserve.text.output import OutputParser
from mlxserve.text.token_constraint import GrammarConstraint
from mlxserve.text.tokenizer import Tokenizer
from mlxserve.text.tool_calls import ToolFormat, answer_grammar, check_tools, find_tool_format


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request's prompt, and for each of its answers what that must be and how it is taken apart."""

    prompt_ids: list[int]
    constraints: Sequence[TokenConstraint | None]
    parsers: Sequence[OutputParser | None]


class PromptReader:
    """Knows how one model is written to, and how it answers."""

    def __init__(self, description: ModelDescription, tokenizer: Tokenizer) -> None:
        self._description = description
        self._tokenizer = tokenizer
        self._grammars = GrammarCompiler(tokenizer)
        self._tool_format = find_tool_format(tokenizer)
        self._answer_format = AnswerFormat(tokenizer, self._tool_format)

    def read(self, request: GenerationRequest, num_samples: int, timeline: Timeline) -> Prepared:
        """What the engine and the answers' readers need. It takes its time, and any thread may do it.

        Raises:
            InvalidParameter: the prompt cannot be rendered or tokenised, its tools or its grammar cannot be had, or the
                model cannot do what is asked.
            ContextLengthExceeded: the prompt has more bytes than the context can hold.
        """
        prompt, answer_format = request.prompt, self._answer_format
        rendered = ""

        def note(text: str) -> None:
            nonlocal rendered
            rendered = text
            timeline.templated = time.monotonic()

        if request.wants_embedding:
            return Prepared(self._read_embedded(request), [None] * num_samples, [None] * num_samples)
        if isinstance(prompt, ChatPrompt):
            prompt = with_system(prompt, self._description.system)
            check_tools(prompt, self._tokenizer, model=self._description.name)
        prompt_ids = encode_prompt(self._tokenizer, prompt, self._description.limit_of(request), note)
        parsers: list[OutputParser | None] = [None] * num_samples
        grammar, opening = request.grammar, None
        if isinstance(prompt, ChatPrompt):
            parsers = [answer_format.parser(prompt, rendered) for _ in range(num_samples)]
            opening = answer_format.opening(prompt, rendered)
            grammar = answer_grammar(prompt, grammar, self._tool_format)
        if grammar is None:
            return Prepared(prompt_ids, [None] * num_samples, parsers)
        for param in ("ignore_eos", "min_tokens"):
            if getattr(request.sampling, param):
                raise InvalidParameter(
                    f"'{param}' goes on past the end that '{grammar.param}' gives the answer; send one of them",
                    param=param,
                )
        constraint = self._compile(grammar, prompt, opening)
        constraints = [constraint, *(constraint.copy() for _ in range(num_samples - 1))]
        return Prepared(prompt_ids, constraints, parsers)

    def _compile(self, grammar: Grammar, prompt: Prompt, opening: Opening | None) -> GrammarConstraint:
        try:
            return self._grammars.compile(grammar, opening)
        except InvalidParameter:
            if isinstance(prompt, ChatPrompt) and self._tool_format is not None and grammar.kind == "lark":
                self._check_each_tool(prompt, self._tool_format)
            raise

    def _check_each_tool(self, prompt: ChatPrompt, tool_format: ToolFormat) -> None:
        """Raise InvalidParameter of the tool at fault, if it is one alone."""
        for grammar, tool in tool_format.single_grammars(prompt.tools, prompt.tool_choice, prompt.tool_params):
            try:
                self._grammars.compile(grammar)
            except InvalidParameter:
                # The same fault in the client's own words, without what stands around its schema.
                self._grammars.compile(Grammar("json_schema", {"type": "object", **tool.parameters}, tool.param))
                raise

    def _read_embedded(self, request: GenerationRequest) -> list[int]:
        """The token ids of a text that an embedding is wanted of."""
        if not self._description.can_embed:
            raise InvalidParameter(
                f"{self._description.name} cannot give embeddings; choose another model", param="model"
            )
        limit = self._description.limit_of(request)
        # One more than there may be, so that a text of just the context length passes.
        token_ids = encode_prompt(self._tokenizer, request.prompt, None if request.truncate else limit + 1)
        if request.truncate and len(token_ids) > limit:
            # The last token may be one that the tokenizer puts at every end, and that the vector is taken from.
            last = token_ids[-1:] if self._tokenizer.is_special(token_ids[-1]) else []
            token_ids = token_ids[: limit - len(last)] + last
        return token_ids

    def end_ids(self, prompt: Prompt) -> frozenset[int]:
        """Tokens that end the answer and do not show."""
        ids = self._tokenizer.eos_token_ids
        match prompt:
            case InfillPrompt():
                return ids | infill_end_ids(self._tokenizer)
            case ChatPrompt():
                return ids | self._answer_format.ending_ids
            case _:
                return ids

    def answer_text(self, request: GenerationRequest, parser: OutputParser | None) -> AnswerText:
        """What makes text of an answer's tokens; `parser`: the one of Prepared."""
        kept_ids: frozenset[int] = frozenset()
        must_call = False
        if parser is not None and isinstance(request.prompt, ChatPrompt):
            kept_ids = self._answer_format.kept_ids(request.prompt)
            must_call = request.prompt.tool_choice.mode == "required"
        detokenizer = IncrementalDetokenizer(self._tokenizer, kept_ids)
        return AnswerText(detokenizer, request.stop or self._description.stop, parser, must_call=must_call)
