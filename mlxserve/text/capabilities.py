"""What a model can do, read off its chat template and vocabulary."""

from collections.abc import Callable

_FILL_IN_TOKENS = ("<|fim_prefix|>", "<fim_prefix>", "<|fim_begin|>", "<PRE>", "[PREFIX]")


def capabilities(chat_template: str | None, has_token: Callable[[str], bool]) -> tuple[str, ...]:
    """Out of "completion", "tools", "thinking", "insert", in this order."""
    found = ["completion"]
    if chat_template and "tools" in chat_template:
        found.append("tools")
    if chat_template and ("<think>" in chat_template or "enable_thinking" in chat_template):
        found.append("thinking")
    if any(has_token(token) for token in _FILL_IN_TOKENS):
        found.append("insert")
    return tuple(found)
