"""The command line over a fake model and a fake engine: `python tests/fake_cli.py run any-model hello`.

The fake model repeats what it was told; some messages make it behave in other ways, see FakeBackend.answer.
"""

import asyncio
import os
import sys
import types
from collections.abc import AsyncGenerator
from typing import Any

from mlxserve.cli import app, run
from mlxserve.cli.chat_backend import AnswerEvent, Message, ModelFacts
from mlxserve.cli.parameters import ChatParameters
from mlxserve.core.generation import Finished, ReasoningDelta, TextDelta, Timings, Usage
from mlxserve.core.request import FinishReason
from mlxserve.errors import EngineError, ModelLoadError

FINISHED = Finished(
    reason=FinishReason.STOP,
    stop_string=None,
    usage=Usage(num_prompt_tokens=40, num_cached_tokens=16, num_generated_tokens=11),
    timings=Timings(front_end=0.001, queue=0.002, prefill=0.24, delivery=0.0005, decode=0.5, total=0.75),
)


class FakeBackend:
    def __init__(self) -> None:
        self.requests: list[tuple[list[Message], ChatParameters]] = []
        self.closed = False
        self.kept: float | None = None
        self.is_broken = False

    async def load(self, keep_alive: float | None = None) -> float:
        if self.is_broken:
            raise ModelLoadError("the fake model is broken", model="broken")
        self.kept = keep_alive
        return 2.5

    async def facts(self) -> ModelFacts:
        rows = {"model": "fake", "context length": "77"}
        return ModelFacts(rows, {"temperature": 0.7}, template="{{ messages }}", context_length=77)

    async def models(self) -> list[str]:
        return ["fake", "other"]

    async def answer(self, messages: list[Message], parameters: ChatParameters) -> AsyncGenerator[AnswerEvent, None]:
        self.requests.append((messages, parameters))
        async for event in self._answer(messages):
            yield TextDelta(event, ()) if isinstance(event, str) else event
        yield FINISHED

    async def _answer(self, messages: list[Message]) -> AsyncGenerator[str | ReasoningDelta, None]:
        match messages[-1]["content"]:
            case content if content.split("\n\n")[-1] == "fail":
                raise EngineError("the fake failed as it was told to")
            case "endless":
                yield "one "
                await asyncio.Event().wait()
            case "flood":
                while True:
                    yield "spam " * 1000
                    await asyncio.sleep(0)
            case "recount":
                yield " | ".join(f"{message['role']}: {message['content']}" for message in messages)
            case "ponder":
                for thought in ("\nHm, ", "let me see."):
                    yield ReasoningDelta(thought, ())
                yield "42"
            case "markdown":
                for piece in ("# Title\n\nSome *text*\nand ", "more.\n\n- one\n- two\n"):
                    yield piece
            case "controls":
                yield "\x1b[2Jred\x9b1m\ttab\n"
            case content:
                yield "You said: "
                yield content

    async def close(self) -> None:
        self.closed = True


async def open_fake(*args: Any, **kwargs: Any) -> FakeBackend:
    return FakeBackend()


class FakeHost:
    """What `serve` needs of a ModelHost. The app beside it has one endpoint, which takes two seconds."""

    def __init__(self, config: Any, registry: Any, **options: Any) -> None:
        self.num_in_flight = 0
        self.all_ended = asyncio.Event()

    async def start(self) -> None: ...

    async def preload(self, name: str, **options: Any) -> None:
        if name == "broken":
            raise ModelLoadError("broken.gguf ends in the middle of a tensor; download it again", model=name)
        if name == "slow":
            print("loading", flush=True)
            await asyncio.sleep(60)

    def models(self) -> list[Any]:
        return [types.SimpleNamespace(name="listed")]

    async def close(self, timeout: float) -> None:
        while timeout > 0 and self.num_in_flight:
            await asyncio.sleep(0.05)
            timeout -= 0.05


def create_fake_app(host: FakeHost, config: Any, metrics: Any) -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response
    from starlette.routing import Route

    from mlxserve.api.connection import Bodies

    async def work(request: Request) -> Response:
        host.num_in_flight += 1
        try:
            print("working", flush=True)
            await asyncio.sleep(float(request.query_params.get("seconds", "1")))
        finally:
            host.num_in_flight -= 1
        return PlainTextResponse("done")

    app = Starlette(routes=[Route("/health", lambda request: PlainTextResponse("ok")), Route("/work", work)])
    app.state.bodies = Bodies()
    return app


def install_fake_engine() -> None:
    """Put fakes in place of the modules that `serve` imports when it starts."""
    for name, contents in {
        "mlxserve.engine.model_host": {"ModelHost": FakeHost},
        "mlxserve.api.app": {"create_app": create_fake_app},
        "mlxserve.api.metrics": {"Metrics": object},
    }.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        sys.modules[name] = module


if __name__ == "__main__":
    run.open_backend = open_fake
    install_fake_engine()
    # The fake needs no BLAS, and the first use of one compiles.
    sys.modules["mlxserve.blas"].preload = lambda threads: None
    os.environ.setdefault("PROMPT_TOOLKIT_NO_CPR", "1")
    app.main()
