"""What a model's tokenizer and chat template make of a text, asked for its own sake. Runs on the event loop."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TypeVar

from mlxserve.core.generation import ChatPrompt, Prompt
from mlxserve.errors import InvalidParameter
from mlxserve.text.chat_template import encode_prompt, render, with_system
from mlxserve.text.plain_text import decode_tokens, encode_text
from mlxserve.text.tokenizer import Tokenizer

T = TypeVar("T")


class TextService:
    """Every method does its work on a worker thread and needs no engine.

    Raises from every method:
        InvalidParameter: the template refuses the messages, a token id is unknown, or a text is not valid Unicode.
    """

    def __init__(self, tokenizer: Tokenizer, executor: Executor, system: str | None = None) -> None:
        """`system`: the message of chats that have none."""
        self._tokenizer = tokenizer
        self._executor = executor
        self._system = system

    async def tokenize(self, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        """Token ids of a text, which may be none. `param`: the client's field, for errors."""
        return await self._run(
            lambda: encode_text(self._tokenizer, text, add_special_tokens=add_special_tokens, param=param)
        )

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, control tokens as the vocabulary writes them."""
        return await self._run(lambda: self._detokenize(token_ids))

    async def render(self, prompt: ChatPrompt) -> str:
        """The text that the chat template makes of messages."""
        return await self._run(lambda: render(self._tokenizer, with_system(prompt, self._system)))

    async def count_tokens(self, prompt: Prompt) -> int:
        """How many tokens a prompt has, whether it fits or not."""
        if isinstance(prompt, ChatPrompt):
            prompt = with_system(prompt, self._system)
        return len(await self._run(lambda: encode_prompt(self._tokenizer, prompt)))

    def _detokenize(self, token_ids: Sequence[int]) -> str:
        for position, token_id in enumerate(token_ids):
            if token_id not in self._tokenizer:
                raise InvalidParameter(
                    f"token {position} is {token_id}, which this model does not have", param=f"tokens[{position}]"
                )
        return decode_tokens(self._tokenizer, token_ids)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)
