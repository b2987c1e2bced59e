"""Which requests with tools a model can take, and what their answers must be."""

from mlxserve.core.constraint import Grammar
from mlxserve.core.generation import ChatPrompt
from mlxserve.errors import InvalidParameter
from mlxserve.text.tokenizer import Tokenizer
from mlxserve.text.tool_calls.definitions import checked_tools
from mlxserve.text.tool_calls.families import knows_tools
from mlxserve.text.tool_calls.tool_format import ToolFormat


def check_tools(prompt: ChatPrompt, tokenizer: Tokenizer, *, model: str) -> None:
    """
    Raises:
        InvalidParameter: tools that are none, or that the model, of that name, has no way to call.
    """
    checked_tools(prompt.tools, prompt.tool_params)
    is_offered = prompt.tools and prompt.tool_choice.mode != "none"
    if is_offered and not knows_tools(tokenizer.tool_template, tokenizer.has_token):
        raise InvalidParameter(
            f"{model} does not support tools: its chat template has no place for them; leave them out", param="tools"
        )


def answer_grammar(prompt: ChatPrompt, grammar: Grammar | None, tool_format: ToolFormat | None) -> Grammar | None:
    """What the answer must be: what the request's own grammar says, or calls where it must call.

    Raises:
        InvalidParameter: both, or calls that cannot be enforced.
    """
    choice = prompt.tool_choice
    if choice.mode != "required":
        return grammar
    if grammar is not None:
        raise InvalidParameter(
            f"'{choice.param}' asks for a call and '{grammar.param}' for another answer; send one of them",
            param=choice.param,
        )
    if not prompt.tools or tool_format is None:
        raise InvalidParameter(f"'{choice.param}' asks for a call, and there are no tools", param=choice.param)
    return tool_format.grammar(prompt.tools, choice, prompt.tool_params)
