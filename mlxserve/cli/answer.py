"""Showing one answer while it is generated."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mlxserve.cli.chat_backend import ChatBackend, Message
from mlxserve.cli.console import spinner, write_answer
from mlxserve.cli.parameters import ChatParameters
from mlxserve.core.generation import Finished


@dataclass(slots=True)
class Answer:
    """What has been shown of an answer; `finished` stays None for one that was stopped."""

    text: str = ""
    finished: Finished | None = None


async def show_answer(
    backend: ChatBackend, messages: list[Message], parameters: ChatParameters, answer: Answer
) -> None:
    """Stream an answer to stdout. `answer` is filled as it comes, so that it holds what was shown if this is cancelled.

    Raises:
        MlxserveError: the backend's.
        BrokenPipeError: nobody reads stdout any more.
    """
    with contextlib.ExitStack() as waiting:
        waiting.enter_context(spinner(""))
        async with contextlib.aclosing(backend.answer(messages, parameters)) as events:
            async for event in events:
                if isinstance(event, Finished):
                    answer.finished = event
                else:
                    waiting.close()
                    answer.text += event
                    write_answer(event)
    if not answer.text.endswith("\n"):
        write_answer("\n")


@contextlib.contextmanager
def on_interrupt(action: Callable[[], object]) -> Iterator[None]:
    """Call `action` on the running loop for each Ctrl-C inside the block, in place of what it did before."""
    loop = asyncio.get_running_loop()
    previous = signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, action)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, previous)
