"""Where `mlxserve run` gets its answers: a server that is running, or the engine inside this process."""

import asyncio
import dataclasses
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from mlxserve import blas
from mlxserve.cli.parameters import ChatParameters
from mlxserve.config import EngineConfig
from mlxserve.core.generation import ChatPrompt, Finished, GenerationRequest, ReasoningDelta, TextDelta
from mlxserve.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mlxserve.engine.model_host import ModelHost
    from mlxserve.engine.served_model import ServedModel
    from mlxserve.store.hub import ProgressCallback

Message = dict[str, Any]
"""{"role": "system" | "user" | "assistant", "content": str}"""
AnswerEvent = TextDelta | ReasoningDelta | Finished


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What `/show` tells about a model."""

    rows: dict[str, str]
    """Label -> value, in the order to print."""
    default_sampling: dict[str, Any] = field(default_factory=dict)
    template: str | None = None
    """The chat template; None where it is not known here, as in the fields below."""
    system: str | None = None
    """The system message of chats that have none of their own."""
    license: str | None = None
    context_length: int | None = None


class ChatBackend(Protocol):
    """One model that answers messages."""

    async def load(self, keep_alive: float | None = None) -> float:
        """Make the model ready to answer; seconds that took, 0 if it was ready. Call it before answer().

        `keep_alive`: from now on it stays in a server's memory for so many seconds, as in open_backend().
        """

    async def facts(self) -> ModelFacts:
        """What is known of the model, once loaded."""

    async def models(self) -> list[str]:
        """Names of the models that can be asked without a download."""

    def answer(self, messages: list[Message], parameters: ChatParameters) -> AsyncGenerator[AnswerEvent, None]:
        """The answer piece by piece, then one Finished. Cancelling the reader cancels the answer.

        Raises:
            MlxserveError: it cannot be had, or ends early.
        """

    async def close(self) -> None: ...


class LocalBackend:
    """The engine inside this process."""

    def __init__(
        self,
        model: str,
        engine_config: EngineConfig,
        *,
        threads: int | None = None,
        progress: "ProgressCallback | None" = None,
    ) -> None:
        self._model = model
        self._engine_config = engine_config
        self._threads = threads
        self._progress = progress
        self._host: ModelHost | None = None
        self._served: ServedModel | None = None

    async def load(self, keep_alive: float | None = None) -> float:
        # Nothing here outlives the command, so there is nothing to keep.
        if self._served is not None:
            return 0.0
        start = time.monotonic()
        from mlxserve.store.registry import Registry

        registry = Registry()
        # A name that is wrong must not wait for the imports below.
        registry.resolve(self._model, allow_paths=True)
        blas.preload(self._threads)
        # Only now: this imports mlx, which must find the BLAS already there.
        from mlxserve.engine.model_host import ModelHost

        self._host = ModelHost(
            # One conversation: no batches to warm up for.
            dataclasses.replace(self._engine_config, max_num_seqs=1),
            registry,
            allow_paths=True,
            allow_downloads=True,
            progress=self._progress,
        )
        await self._host.start()
        self._served = await self._host.get(self._model)
        return time.monotonic() - start

    async def facts(self) -> ModelFacts:
        served = self._loaded()
        description = served.description
        return ModelFacts(
            rows={
                "model": description.name,
                "architecture": description.architecture,
                "parameters": f"{description.num_parameters / 1e6:,.0f} M",
                "context length": str(description.context_length),
                "quantization": description.quantization,
            },
            default_sampling=dict(description.default_sampling),
            template=served.tokenizer.chat_template,
            context_length=description.context_length,
        )

    async def models(self) -> list[str]:
        from mlxserve.store.registry import Registry

        return [card.name for card in await asyncio.to_thread(Registry().available)]

    async def answer(self, messages: list[Message], parameters: ChatParameters) -> AsyncGenerator[AnswerEvent, None]:
        served = self._loaded()
        request = GenerationRequest(
            request_id=f"run-{secrets.token_hex(8)}",
            prompt=ChatPrompt(messages=tuple(messages), reasoning=parameters.reasoning),
            sampling=SamplingParams(**{**served.default_sampling, **parameters.sampling()}),
            stop=parameters.stop,
            grammar=parameters.grammar,
        )
        generation = await served.generate(request)
        try:
            async for event in generation:
                if isinstance(event, TextDelta | ReasoningDelta | Finished):
                    yield event
        finally:
            generation.cancel()

    async def close(self) -> None:
        if self._host is not None:
            await self._host.close(timeout=0.0)
            self._host = self._served = None

    def _loaded(self) -> "ServedModel":
        if self._served is None:
            raise RuntimeError("load() must come first")
        return self._served


async def open_backend(
    model: str,
    *,
    engine_config: EngineConfig,
    host: str,
    port: int,
    api_key: str | None = None,
    threads: int | None = None,
    local: bool = False,
    keep_alive: float | None = None,
    progress: "ProgressCallback | None" = None,
) -> ChatBackend:
    """The server at host:port if one runs there and has the model, else the engine in this process.

    `local` never looks for a server. `keep_alive`: seconds that a server keeps the model loaded after each answer;
    None: its setting, negative: for ever.

    Raises:
        ConfigError: the server wants another API key.
    """
    if not local:
        from mlxserve.cli.http_backend import find_server

        server = await find_server(model, host, port, api_key, keep_alive=keep_alive)
        if server is not None:
            return server
    return LocalBackend(model, engine_config, threads=threads, progress=progress)
