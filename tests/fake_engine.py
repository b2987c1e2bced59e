"""A ModelHost without a model: it says what a test tells it to, one byte a token, and notes what it was asked."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import uvicorn
from fake_library import FakeLibrary
from starlette.types import ASGIApp

from mlxserve.core.generation import (
    ChatPrompt,
    Finished,
    GenerationEvent,
    GenerationRequest,
    InfillPrompt,
    PrefillProgress,
    Prompt,
    PromptLogprobs,
    ReasoningDelta,
    TextDelta,
    TextPrompt,
    Timings,
    TokenPrompt,
    ToolCallDelta,
    Usage,
)
from mlxserve.core.request import FinishReason
from mlxserve.core.stats import EngineStats
from mlxserve.core.step import SampledToken, TokenLogprobs
from mlxserve.engine.journal import Journal
from mlxserve.errors import ContextLengthExceeded, ModelNotFound

CONTEXT_LENGTH = 4096
TIMINGS = Timings(front_end=0.001, queue=0.002, prefill=0.05, delivery=0.003, decode=0.5, total=0.6)


class Gate:
    """Something a test holds back until it opens it, from any thread."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.num_waiting = 0
        """How many came to the gate so far."""

    def open(self) -> None:
        self._open.set()

    async def wait(self) -> None:
        self.num_waiting += 1
        while not self._open.is_set():  # noqa: ASYNC110 -- another thread opens it
            await asyncio.sleep(0.002)


@dataclass
class Script:
    """What happens to the requests of a test."""

    text: str = "Hello, world!"
    reasoning: str = ""
    """What is thought before `text`."""
    thought: Gate | None = None
    """Between the two."""
    tool_calls: tuple[tuple[str, str], ...] = ()
    """Names and arguments of the calls after `text`."""
    full_after: int | None = None
    """So many tokens fit into the context behind the prompt."""
    endless: bool = False
    """Say `text` over and over until cancelled."""
    load: Gate | None = None
    tokenise: Gate | None = None
    first_token: Gate | None = None
    load_error: Exception | None = None
    refusal: Exception | None = None
    failure: Exception | None = None
    """Raised after the text, where Finished should be."""
    finishes: bool = True
    """False: the events end without Finished."""
    num_cached_tokens: int = 0
    sample_texts: tuple[str, ...] = ()
    """What each sample of a prompt says, in place of `text`."""
    sample_logprobs: tuple[float, ...] = ()
    """The log-probability of each of its tokens, in place of -0.5."""


@dataclass(frozen=True)
class ModelInfo:
    name: str
    created: int = 1_700_000_000
    context_length: int | None = CONTEXT_LENGTH
    loaded: bool = True
    description: str = "A fake"


@dataclass(frozen=True)
class LoadedName:
    name: str
    context_length: int = CONTEXT_LENGTH
    digest: str = "0f" * 32


@dataclass(frozen=True)
class LoadedInfo:
    name: str
    size: int = 1_000_000
    weight_bytes: int = 900_000
    reserved: int = 2_000_000
    on_gpu: bool = False
    context_length: int = CONTEXT_LENGTH
    expires_at: float | None = 1_800_000_000.25
    digest: str = "0f" * 32
    architecture: str = "fake"
    family: str = "fake"
    num_parameters: int = 134_515_008
    quantization: str = "4-bit"
    format: str = "gguf"
    num_in_flight: int = 0
    other_names: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[LoadedName, ...]:
        return tuple(map(LoadedName, (self.name, *self.other_names)))


@dataclass(frozen=True)
class HealthStatus:
    ok: bool
    detail: str


class ByteTokenizer:
    has_chat_template = True

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


class ByteTexts:
    """engine.text_service.TextService without a tokenizer; its special token is 0."""

    async def tokenize(self, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        return [0] * add_special_tokens + list(text.encode())

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")

    async def render(self, prompt: ChatPrompt) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in prompt.messages)


@dataclass
class FakeHost:
    """The methods of engine.model_host.ModelHost that the API uses."""

    script: Script = field(default_factory=Script)
    names: tuple[str, ...] = ("fake", "org/fake-4bit")
    default_sampling: dict[str, float | int] = field(default_factory=dict)
    healthy: bool = True
    keep_alives: list[float | None] = field(default_factory=list)
    """What each lease, and each preload, was asked for with."""
    loaded_models: "list[LoadedInfo]" = field(default_factory=list)
    library: FakeLibrary = field(default_factory=FakeLibrary)
    requests: list[GenerationRequest] = field(default_factory=list)
    """Every request that reached generate()."""
    abandoned: list[str] = field(default_factory=list)
    """Names and request ids whose load or admission was cancelled."""
    cancelled: list[str] = field(default_factory=list)
    """Ids of the generations that were cancelled before they ended."""
    delivered: list[str] = field(default_factory=list)
    """Ids of the generations whose answers were written out, or given up."""
    engine_stats: dict[str, EngineStats] = field(default_factory=dict)
    leases: "list[FakeLease]" = field(default_factory=list)
    """Those that are not released."""
    journal: Journal = field(default_factory=Journal)

    async def _get(self, name: str) -> "FakeModel":
        if name not in self.names:
            raise ModelNotFound(f"there is no model {name!r}", model=name)
        if self.script.load_error is not None:
            raise self.script.load_error
        await self._pass(self.script.load, name)
        return FakeModel(name, self)

    async def acquire(self, name: str, *, keep_alive: float | None = None) -> "FakeLease":
        self.keep_alives.append(keep_alive)
        lease = FakeLease(await self._get(name), self)
        self.leases.append(lease)
        return lease

    async def preload(self, name: str, *, keep_alive: float | None = None) -> None:
        self.keep_alives.append(keep_alive)
        await self._get(name)
        if all(info.name != name for info in self.loaded_models):
            self.loaded_models.append(LoadedInfo(name))

    async def unload(self, name: str) -> None:
        found = [info for info in self.loaded_models if info.name == name]
        if not found:
            raise ModelNotFound(f"{name} is not loaded", model=name)
        self.loaded_models.remove(found[0])

    def locations(self) -> set[str]:
        """Names stand for where models are."""
        return {info.name for info in self.loaded_models}

    def loaded(self) -> "list[LoadedInfo]":
        return list(self.loaded_models)

    def models(self) -> list[ModelInfo]:
        return [ModelInfo(name) for name in self.names]

    def health(self) -> HealthStatus:
        return HealthStatus(self.healthy, "all is well" if self.healthy else "the engine stopped: out of memory")

    def stats(self) -> dict[str, EngineStats]:
        return self.engine_stats

    def reset(self) -> None:
        self.script = Script()
        self.default_sampling = {}
        self.keep_alives.clear()
        self.loaded_models.clear()
        self.library = FakeLibrary()
        self.requests.clear()
        self.abandoned.clear()
        self.cancelled.clear()

    async def _pass(self, gate: Gate | None, what: str) -> None:
        try:
            if gate is not None:
                await gate.wait()
        except asyncio.CancelledError:
            self.abandoned.append(what)
            raise


class FakeModel:
    context_length = CONTEXT_LENGTH
    tokenizer = ByteTokenizer()
    text = ByteTexts()

    def __init__(self, name: str, host: FakeHost) -> None:
        self.name = name
        self.default_sampling = host.default_sampling
        self._host = host

    async def generate_samples(self, request: GenerationRequest, num_samples: int) -> "list[FakeGeneration]":
        generation = await self.generate(request)
        if num_samples == 1:
            return [generation]
        samples = []
        for index in range(num_samples):
            prompt_logprobs = None if index else request.sampling.prompt_logprobs
            sampling = replace(request.sampling, prompt_logprobs=prompt_logprobs)
            sample = replace(request, request_id=f"{request.request_id}-{index}", sampling=sampling)
            samples.append(FakeGeneration(sample, self._host.script, self._host, index))
        return samples

    async def count_tokens(self, prompt: Prompt) -> int:
        await self._host._pass(self._host.script.tokenise, "count")
        return num_prompt_tokens(prompt)

    async def generate(self, request: GenerationRequest) -> "FakeGeneration":
        script = self._host.script
        self._host.requests.append(request)
        await self._host._pass(script.tokenise, request.request_id)
        if script.refusal is not None:
            raise script.refusal
        num_tokens = num_prompt_tokens(request.prompt)
        if num_tokens >= CONTEXT_LENGTH:
            raise ContextLengthExceeded(
                f"the prompt has {num_tokens} tokens, the model takes {CONTEXT_LENGTH}",
                num_tokens=num_tokens,
                limit=CONTEXT_LENGTH,
            )
        return FakeGeneration(request, script, self._host)


def num_prompt_tokens(prompt: Prompt) -> int:
    match prompt:
        case ChatPrompt(messages=messages):
            return sum(len(message["content"].encode()) for message in messages)
        case TextPrompt(text=text):
            return len(text.encode())
        case InfillPrompt(prefix=prefix, suffix=suffix):
            return len((prefix + suffix).encode())
        case TokenPrompt(token_ids=token_ids):
            return len(token_ids)


def prompt_bytes(request: GenerationRequest) -> bytes:
    match request.prompt:
        case ChatPrompt(messages=messages):
            return "".join(message["content"] for message in messages).encode()
        case TextPrompt(text=text):
            return text.encode()
        case InfillPrompt(prefix=prefix, suffix=suffix):
            return (prefix + suffix).encode()
        case TokenPrompt(token_ids=token_ids):
            return bytes(token_ids)


class FakeLease:
    def __init__(self, model: "FakeModel", host: FakeHost) -> None:
        self.model = model
        self._host = host

    def release(self) -> None:
        self._host.leases.remove(self)


class FakeGeneration:
    def __init__(self, request: GenerationRequest, script: Script, host: FakeHost, index: int = 0) -> None:
        self.request_id = request.request_id
        self.num_prompt_tokens = num_prompt_tokens(request.prompt)
        self._request = request
        self._script = script
        self._host = host
        self._text = script.sample_texts[index] if script.sample_texts else script.text
        self._logprob = script.sample_logprobs[index] if script.sample_logprobs else -0.5
        self._index = index
        self._events = self._run()
        self._ended = False
        self._answer_ids: list[int] = []

    def __aiter__(self) -> "FakeGeneration":
        return self

    async def __anext__(self) -> GenerationEvent:
        if self._ended:
            raise StopAsyncIteration
        return await anext(self._events)

    def delivered(self) -> None:
        self._host.delivered.append(self.request_id)

    def cancel(self) -> None:
        if not self._ended:
            self._ended = True
            self._host.cancelled.append(self.request_id)

    @property
    def token_ids(self) -> list[int]:
        """The prompt's bytes, and those of the answer that were given out."""
        return [*prompt_bytes(self._request), *self._answer_ids]

    async def _run(self):
        if self._script.first_token is not None:
            await self._script.first_token.wait()
        text, reason, stop_string = self._text, FinishReason.STOP, None
        if self._request.wants_progress:
            for num_computed in (self.num_prompt_tokens // 2, self.num_prompt_tokens):
                yield PrefillProgress(
                    self.num_prompt_tokens, self._script.num_cached_tokens, num_computed, TIMINGS.prefill
                )
        if self._request.sampling.prompt_logprobs is not None:
            # The samples after the first one are ahead of it.
            await asyncio.sleep(0.02)
            first, *rest = prompt_bytes(self._request)
            yield PromptLogprobs((SampledToken(first), *(self._scored(byte) for byte in rest)))
        for stop in self._request.stop:
            if stop in text:
                text, stop_string = text[: text.index(stop)], stop
        calls = () if stop_string else self._script.tool_calls
        limits = [self._request.sampling.max_tokens, self._script.full_after]
        limit = min((each for each in limits if each is not None), default=None)
        num_tokens = 0
        while True:
            for delta in self._deltas(text, calls):
                if self._script.thought is not None and not isinstance(delta, ReasoningDelta):
                    await self._script.thought.wait()
                if limit is not None and num_tokens + len(delta.tokens) > limit:
                    reason = FinishReason.LENGTH
                    break
                num_tokens += len(delta.tokens)
                self._answer_ids += [token.token_id for token in delta.tokens]
                yield delta
            if not self._script.endless:
                break
            await asyncio.sleep(0.001)
        self._ended = True
        if self._script.failure is not None:
            raise self._script.failure
        if not self._script.finishes:
            return
        num_cached_tokens = self.num_prompt_tokens - 1 if self._index else self._script.num_cached_tokens
        num_reasoning_tokens = min(num_tokens, len(self._script.reasoning.encode()))
        usage = Usage(self.num_prompt_tokens, num_cached_tokens, num_tokens, num_reasoning_tokens=num_reasoning_tokens)
        yield Finished(reason, stop_string, usage, TIMINGS, len(calls))

    def _deltas(
        self, text: str, calls: tuple[tuple[str, str], ...]
    ) -> Iterator[TextDelta | ReasoningDelta | ToolCallDelta]:
        """Thoughts, text and calls, a character each; a call begins with its name, which costs nothing."""
        for character in self._script.reasoning:
            yield ReasoningDelta(character, self._tokens(character))
        for character in text:
            yield TextDelta(character, self._tokens(character))
        for index, (name, arguments) in enumerate(calls):
            yield ToolCallDelta(index, f"call_{index}", name, "", ())
            for character in arguments:
                yield ToolCallDelta(index, f"call_{index}", None, character, self._tokens(character))

    def _tokens(self, text: str) -> tuple[SampledToken, ...]:
        return tuple(map(self._token, text.encode()))

    def _token(self, byte: int) -> SampledToken:
        """Every token has half the probability, the next `k` byte values have less and less."""
        num_logprobs = self._request.sampling.num_logprobs
        if num_logprobs is None:
            return SampledToken(byte)
        top = tuple(((byte + rank) % 256, self._logprob - rank) for rank in range(num_logprobs))
        return SampledToken(byte, TokenLogprobs(self._logprob, top))

    def _scored(self, byte: int) -> SampledToken:
        """A token of the prompt: as likely as its value says."""
        num_top = self._request.sampling.prompt_logprobs or 0
        top = tuple((rank, -0.25 * (rank + 1)) for rank in range(num_top))
        return SampledToken(byte, TokenLogprobs(-byte / 100, top))


@contextmanager
def serve(app: ASGIApp) -> Iterator[str]:
    """Run an app under uvicorn in a thread, on a free loopback port; gives its address."""
    with run_server(app) as (address, _):
        yield address


@contextmanager
def run_server(app: ASGIApp) -> Iterator[tuple[str, uvicorn.Server]]:
    """serve() for those who need uvicorn's server as well."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        config = uvicorn.Config(app, lifespan="off", log_level="warning", access_log=False, timeout_graceful_shutdown=5)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield f"http://127.0.0.1:{port}", server
        finally:
            server.should_exit = True
            thread.join(10)


def wait_until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait for another thread to bring about a condition.

    Raises:
        TimeoutError: it did not.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the condition did not come about")
        time.sleep(0.002)
