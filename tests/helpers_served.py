"""What serves an engine without a model as it is: text, requests, host; and who reads the answers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import helpers_engine
import mlx.nn as nn
import pytest
from helpers_engine import (
    CONTEXT_LENGTH,
    TIMEOUT,
    FakeRunner,
    Gate,
    Recorder,
    engine_thread,
    make_engine,
    passes,
    settled,
)
from helpers_scheduler import BLOCK_SIZE

from mlxserve.config import EngineConfig
from mlxserve.core.constraint import Grammar
from mlxserve.core.generation import Finished, GenerationRequest, TextDelta, TextPrompt
from mlxserve.core.pieces import Pieces
from mlxserve.core.request import Pooling
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.engine import loading
from mlxserve.engine.build import BuiltEngine
from mlxserve.engine.engine_thread import EngineThread
from mlxserve.engine.generation import Generation
from mlxserve.engine.kv_disk import KVDisk
from mlxserve.engine.model_description import ModelDescription
from mlxserve.engine.model_host import ModelHost
from mlxserve.engine.served_model import ServedModel
from mlxserve.errors import MlxserveError
from mlxserve.runner.device import Device
from mlxserve.store.estimate import MemoryEstimate
from mlxserve.store.loader import LoadedModel
from mlxserve.text.tokenizer import Tokenizer

BUDGET = 10**9
"""Bytes of memory of the device that FakeBuild has."""


@dataclass
class Served:
    model: ServedModel
    runner: FakeRunner
    thread: EngineThread
    observer: Recorder
    executor: ThreadPoolExecutor

    async def start(self, request_id: str = "r", prompt: str = "the cat", **fields: Any) -> Generation:
        return await self.model.generate(make_generation_request(request_id, prompt, **fields))

    async def settled(self) -> None:
        await settled(self.thread)

    async def idle(self) -> None:
        """Wait until the engine has nothing to compute; then no request may hold a block."""
        await self.settled()
        while self.model._handle.engine.has_work:
            await self.settled()
        assert self.model.stats().num_blocks_used == 0
        await asyncio.wrap_future(self.thread.call(self.model._handle.engine.check_integrity))


def make_generation_request(
    request_id: str = "r",
    prompt: str = "the cat",
    *,
    max_tokens: int | None = 8,
    stop: tuple[str, ...] = (),
    timeout: float | None = None,
    grammar: Grammar | None = None,
    **sampling: Any,
) -> GenerationRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, **sampling)
    return GenerationRequest(request_id, TextPrompt(prompt), params, stop, timeout, grammar=grammar)


@asynccontextmanager
async def serving(
    runner: FakeRunner | None = None,
    *,
    observer: Recorder | None = None,
    max_blocks: int = 128,
    model_tokenizer: Tokenizer | None = None,
    **settings: Any,
) -> AsyncIterator[Served]:
    runner = runner or FakeRunner()
    observer = observer or Recorder()
    config = EngineConfig(block_size=BLOCK_SIZE, **settings)
    with ThreadPoolExecutor(2) as executor:
        async with engine_thread() as thread:
            engine = make_engine(runner, config, max_blocks=max_blocks)
            handle = await asyncio.wrap_future(thread.add_engine("fake", engine))
            model = ServedModel(
                make_description("fake"),
                model_tokenizer or helpers_engine.tokenizer(),
                thread=thread,
                handle=handle,
                config=config,
                executor=executor,
                observer=observer,
            )
            try:
                yield Served(model, runner, thread, observer, executor)
            finally:
                if isinstance(runner.before_step, Gate):
                    runner.before_step.open()


def make_description(name: str) -> ModelDescription:
    return ModelDescription(
        name=name,
        context_length=CONTEXT_LENGTH,
        architecture="fake",
        num_parameters=0,
        quantization="none",
        default_sampling={},
        load_seconds=0.0,
        created=1,
    )


class FakeBuild:
    """In place of all that loads a model for ModelHost: each model is a tokenizer and a FakeRunner."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loads: list[str] = []
        """Names of the models whose load was begun."""
        self.num_failed = 0
        self.runners: list[FakeRunner] = []
        """One for each model that was loaded, in order."""
        self.load_error: Exception | None = None
        self.pooling = Pooling.LAST
        self.can_embed = True
        self.before_load: Callable[[], None] = passes
        self.before_build: Callable[[], None] = passes
        self.sizes: dict[str, int] = {}
        """Bytes of weights by name, for those that have any."""
        monkeypatch.setattr(loading.loader, "open_files", self._open_files)
        monkeypatch.setattr(loading.loader, "load_pieces", self._load_pieces)
        monkeypatch.setattr(loading.build, "build_pieces", self._build_pieces)
        monkeypatch.setattr(loading.build, "configure_device", self._configure_device)
        monkeypatch.setattr(loading, "estimate", self._estimate)
        monkeypatch.setattr(loading, "_exempt_from_collection", passes)
        monkeypatch.setattr(loading.device, "give_back", passes)
        monkeypatch.setattr(loading.device, "release", passes)

    def _configure_device(self) -> Device:
        return Device("cpu", "fake", BUDGET, "float32", max_pass_tokens=64, max_prefill_tokens=64)

    def _estimate(self, path: Path, **_: object) -> MemoryEstimate:
        return MemoryEstimate(self.sizes.get(path.stem, 0), kv_bytes_per_token=1, context_length=CONTEXT_LENGTH)

    def _open_files(self, path: Path, *, name: str) -> LoadedModel:
        return LoadedModel(
            name=name,
            model=nn.Module(),
            config={},
            tokenizer=helpers_engine.tokenizer().hf_tokenizer,
            eos_token_ids=helpers_engine.tokenizer().eos_token_ids,
            context_length=CONTEXT_LENGTH,
            num_parameters=0,
            weight_bytes=self.sizes.get(path.stem, 0),
            quantization="none",
            architecture="fake",
            pooling=self.pooling,
        )

    def _load_pieces(self, files: LoadedModel, dtype_policy: str) -> Pieces[LoadedModel]:
        self.loads.append(files.name)
        yield
        self.before_load()
        if self.load_error is not None:
            self.num_failed += 1
            raise self.load_error
        return files

    def _build_pieces(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        found: Device,
        context_length: int,
        *,
        draft: LoadedModel | None,
        kv_disk: KVDisk | None,
        kv_bytes: int,
    ) -> Pieces[BuiltEngine]:
        yield
        self.before_build()
        self.runners.append(FakeRunner())
        return BuiltEngine(
            make_engine(self.runners[-1], config),
            context_length,
            uses_block_cache=True,
            has_draft_model=draft is not None,
            can_embed=self.can_embed,
        )


@dataclass
class Answer:
    """What somebody who read a generation to its end got."""

    deltas: list[TextDelta] = field(default_factory=list)
    finished: Finished | None = None
    error: MlxserveError | None = None

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def num_tokens(self) -> int:
        return sum(len(delta.tokens) for delta in self.deltas)


async def read(generation: Generation) -> Answer:
    """Read to the end; what comes after the last event is an error."""
    answer = Answer()
    ends = 0
    try:
        async with asyncio.timeout(TIMEOUT):
            async for event in generation:
                assert ends == 0, f"{event} after the last event"
                if isinstance(event, Finished):
                    answer.finished = event
                    ends += 1
                else:
                    answer.deltas.append(event)
    except MlxserveError as error:
        answer.error = error
        ends += 1
    assert ends == 1, f"{ends} last events"
    async with asyncio.timeout(TIMEOUT):
        assert [event async for event in generation] == []
    return answer


async def get(host: ModelHost, name: str) -> ServedModel:
    """A model that stays."""
    return (await host.acquire(name)).model
