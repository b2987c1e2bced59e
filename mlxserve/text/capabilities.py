"""What a model can do, told from its chat template and its vocabulary."""

from collections.abc import Callable

from mlxserve.text.tool_calls.families import is_harmony, knows_tools

_INFILL_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<|fim_begin|>", "<|fim_hole|>", "<|fim_end|>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),
)
"""Before, after and for the text that is to be written between two others."""
_THINKING = (
    "<think>",
    "enable_thinking",
    "reasoning_content",
    "[THINK]",
    "<|START_THINKING|>",
    "<seed:think>",
    "<|think",
)


def capabilities(chat_template: str | None, has_token: Callable[[str], bool]) -> tuple[str, ...]:
    """Of "completion", "tools", "thinking" and "insert" those that the model has, in this order."""
    found = ["completion"]
    if knows_tools(chat_template, has_token):
        found.append("tools")
    if chat_template is not None and (is_harmony(has_token) or any(mark in chat_template for mark in _THINKING)):
        found.append("thinking")
    if any(all(map(has_token, tokens)) for tokens in _INFILL_TOKENS):
        found.append("insert")
    return tuple(found)
