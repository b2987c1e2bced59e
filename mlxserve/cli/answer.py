"""Showing one answer while it is generated."""

import asyncio
import contextlib
import dataclasses
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mlxserve.cli.answer_view import AnswerView, Style
from mlxserve.cli.chat_backend import ChatBackend, Message
from mlxserve.cli.console import spinner
from mlxserve.cli.parameters import ChatParameters
from mlxserve.core.generation import Finished, TextDelta


@dataclass(slots=True)
class Answer:
    """What has come of an answer; `finished` stays None for one that was stopped."""

    text: str = ""
    finished: Finished | None = None


async def show_answer(
    backend: ChatBackend, messages: list[Message], parameters: ChatParameters, style: Style, answer: Answer
) -> None:
    """Stream an answer to stdout. `answer` is filled as it comes, so that it holds what was shown if this is cancelled.

    Raises:
        MlxserveError: the backend's.
        BrokenPipeError: nobody reads stdout any more.
    """
    if parameters.schema is not None:
        # JSON is no Markdown, and a line break in a string would be wrong.
        style = dataclasses.replace(style, layout="plain")
    view = AnswerView(style)
    with contextlib.ExitStack() as waiting:
        waiting.enter_context(spinner(""))
        try:
            async with contextlib.aclosing(backend.answer(messages, parameters)) as events:
                async for event in events:
                    if isinstance(event, Finished):
                        answer.finished = event
                        continue
                    if isinstance(event, TextDelta):
                        answer.text += event.text
                    if view.shows(event):
                        waiting.close()
                        view.show(event)
        finally:
            waiting.close()
            view.finish()
            # What is cut off in a pipe or file stays as it is.
            if answer.finished or (answer.text and sys.stdout.isatty()):
                view.end_line()


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
