"""Tokenizers of models that chat, one for each way in which they think, and texts in their tokens."""

import functools
import random

import tiny_tokenizers

from mlxserve.text.harmony import MARKERS
from mlxserve.text.tokenizer import Tokenizer

QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
QWEN_TOOLS = "{% for tool in tools or [] %}{{ tool.function.name }} <tool_call>{% endfor %}" + QWEN
KIMI = (
    "{{ (tools or []) | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if x %}<|tool_calls_section_begin|>{% endif %}<|im_end|><think>"
)
KIMI_TOKENS = [
    f"<|tool_call{part}|>" for part in ("s_section_begin", "s_section_end", "_begin", "_argument_begin", "_end")
]
R1 = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}<|im_end|><think>\n"
MAGISTRAL = "{% for m in messages %}{{ m.content }}{% endfor %}[THINK][/THINK]<|im_end|>"
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}<|im_end|>"
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if tools %}# Tools{% endif %}Reasoning: {{ reasoning_effort }}<|start|>assistant"
)
FINAL = "<|start|>assistant<|channel|>final<|message|>"
SAID = ({"role": "user", "content": "hi"},)


@functools.cache
def model(name: str) -> Tokenizer:
    hf_tokenizer = {
        "qwen": lambda: tiny_tokenizers.chatting(QWEN),
        "qwen-tools": lambda: tiny_tokenizers.chatting(QWEN_TOOLS, added=["<tool_call>", "</tool_call>"]),
        "kimi": lambda: tiny_tokenizers.chatting(KIMI, special=KIMI_TOKENS),
        "r1": lambda: tiny_tokenizers.chatting(R1),
        "magistral": lambda: tiny_tokenizers.chatting(MAGISTRAL, special=["[THINK]", "[/THINK]"]),
        "harmony": lambda: tiny_tokenizers.chatting(HARMONY, special=MARKERS),
        "plain": lambda: tiny_tokenizers.chatting(PLAIN),
        "granite": lambda: tiny_tokenizers.chatting("Here is my thought process: Here is my response:" + PLAIN),
    }[name]()
    return Tokenizer(hf_tokenizer, frozenset({hf_tokenizer.eos_token_id}))


def token_ids(name: str, text: str, *, rng: random.Random | None = None) -> list[int]:
    """The text's tokens; with `rng` cut anywhere, so that markers without a token of their own are cut as well."""
    if rng is None:
        return model(name).encode(text, add_special_tokens=False)
    data = text.encode()
    by_bytes = {model(name).token_bytes(token_id): token_id for token_id in range(model(name).vocab_size)}
    ids = []
    while data:
        fitting = [length for length in range(1, len(data) + 1) if data[:length] in by_bytes]
        length = rng.choice(fitting)
        ids.append(by_bytes[data[:length]])
        data = data[length:]
    return ids
