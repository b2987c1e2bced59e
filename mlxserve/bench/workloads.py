"""The loads, and what each of them asks of a server in one run."""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from mlxserve.bench import client
from mlxserve.bench.client import Answer, Target
from mlxserve.bench.figures import Limits, length_figures, mixed_figures, request_figures, reuse_figures
from mlxserve.bench.prompts import Prompts
from mlxserve.errors import TargetError

STREAM_PROMPT_TOKENS = 128
MAX_STREAM_TOKENS = 1000
"""Of a running stream in `mixed`: more than it has time for, it is cut off."""
QUIET_CHUNKS = 24
"""Of each running stream before the long prompt comes: these make its undisturbed pace."""
SECOND_TURN_TOKENS = 32
TEMPLATE_TOKENS = 128
POLL_SECONDS = 0.02
QUESTION = "What is a list of words? Say it in a few words, then stop."
"""Begins the prompts that a model is to end its answers to: to words alone it would say more of them."""
REFUSALS = (429, 503)
"""Statuses of a server that is too busy: with open-loop arrivals they are counted instead of ending the run."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One load: a row of a table. All servers get the same cells, in the same order."""

    workload: str
    """A key of figures.METRICS."""
    num_streams: int
    num_prompt_tokens: int
    num_output_tokens: int
    requests_per_stream: int = 1
    rate: float | None = None
    """Requests that arrive in a second, whatever became of those before; None: each stream waits for its answer."""
    num_shared_tokens: int = 0
    """Of `shared-prefix`: with how many tokens all prompts begin alike."""
    stops_at_eos: bool = False
    """The model ends the answers, as the only message of a chat; num_output_tokens is only the limit."""

    @property
    def num_requests(self) -> int:
        return self.num_streams * self.requests_per_stream

    @property
    def total_prompt_tokens(self) -> int:
        """Of all requests of one run, but for the running streams of `mixed`."""
        return (self.num_requests if self.workload not in ("mixed", "multi-turn") else 1) * self.num_prompt_tokens

    @property
    def context_length(self) -> int:
        """Tokens a sequence of this load may have, with room for a chat template around it."""
        if self.workload == "multi-turn":
            return self.num_prompt_tokens + 2 * self.num_output_tokens + SECOND_TURN_TOKENS + TEMPLATE_TOKENS
        longest_stream = STREAM_PROMPT_TOKENS + MAX_STREAM_TOKENS if self.workload == "mixed" else 0
        return max(self.num_prompt_tokens + self.num_output_tokens, longest_stream) + TEMPLATE_TOKENS


@dataclass(frozen=True, slots=True)
class Load:
    """A cell on its way to a server."""

    cell: Cell
    target: Target
    prompts: Prompts
    limits: Limits

    async def ask(self, text: str, max_tokens: int) -> Answer:
        """Stream the answer to a text, and know how many tokens it has."""
        if self.cell.stops_at_eos:
            fields = {name: value for name, value in self.target.fields.items() if name != "ignore_eos"}
            target = dataclasses.replace(self.target, fields=fields, has_completions=False)
            return self.counted(await client.complete(target, text, max_tokens))
        return self.counted(await client.complete(self.target, text, max_tokens))

    async def chat(self, messages: list[dict[str, str]], max_tokens: int) -> Answer:
        return self.counted(await client.chat(self.target, messages, max_tokens))

    def counted(self, answer: Answer) -> Answer:
        """With the tokenizer's count where the server gives none.

        Raises:
            TargetError: nobody can tell.
        """
        if answer.num_tokens:
            return answer
        num_tokens = self.prompts.count(answer.text)
        if num_tokens is None:
            raise TargetError(
                "the server does not tell how many tokens it generated (no `usage` in its streams), and the model's "
                "tokenizer is not here to count them; name it with --tokenizer"
            )
        return dataclasses.replace(answer, num_tokens=num_tokens)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of one cell on one server."""

    cell: Cell
    server: str
    run: int
    figures: dict[str, float]
    """Times in seconds."""
    answers: tuple[Answer, ...]
    client_load: float
    """CPU seconds of this process per second."""


T = TypeVar("T")
Result = tuple[list[Answer], dict[str, float]]


async def measure(
    cell: Cell, target: Target, prompts: Prompts, *, server: str, run: int, limits: Limits | None = None
) -> Measurement:
    """Put one load on one server.

    Raises:
        TargetError: a request failed.
    """
    started, cpu = time.perf_counter(), time.process_time()
    answers, figures = await _WORKLOADS[cell.workload](Load(cell, target, prompts, limits or Limits()))
    load = (time.process_time() - cpu) / (time.perf_counter() - started)
    return Measurement(cell, server, run, figures, tuple(answers), load)


async def warm_up(cells: list[Cell], target: Target, prompts: Prompts) -> None:
    """Meet every number of streams and the longest prompt once, so that nothing is compiled or allocated later."""
    for num_streams in sorted({cell.num_streams for cell in cells}):
        load = Load(Cell("concurrency", num_streams, 64, 8), target, prompts, Limits())
        await _all(load.ask(prompts.text(64), 8) for _ in range(num_streams))
    await client.complete(target, prompts.text(max(cell.num_prompt_tokens for cell in cells)), 4)


async def _all(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all, at the same time; the first failure ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def _requests(load: Load) -> Result:
    """Requests of one kind: in a closed loop each stream sends its prompts one after the other."""
    cell, prompts = load.cell, load.prompts
    if cell.rate is not None:
        return await _arrivals(load, cell.rate)
    beginning = QUESTION if cell.stops_at_eos else ""
    texts = [
        [prompts.text(cell.num_prompt_tokens, beginning) for _ in range(cell.requests_per_stream)]
        for _ in range(cell.num_streams)
    ]

    async def stream(texts: list[str]) -> list[Answer]:
        return [await load.ask(text, cell.num_output_tokens) for text in texts]

    answers = [answer for answers in await _all(map(stream, texts)) for answer in answers]
    return answers, request_figures(answers, cell.num_output_tokens, load.limits)


async def _arrivals(load: Load, rate: float) -> Result:
    """An open loop: requests come as a Poisson process, so the gaps between them are exponential."""
    cell, prompts = load.cell, load.prompts
    texts = [prompts.text(cell.num_prompt_tokens) for _ in range(cell.num_requests)]
    offsets = [0.0]
    while len(offsets) < len(texts):
        offsets.append(offsets[-1] + prompts.random.expovariate(rate))
    loop = asyncio.get_running_loop()
    start = loop.time()

    async def arrive(text: str, offset: float) -> tuple[float, Answer | None]:
        await asyncio.sleep(start + offset - loop.time())
        late = loop.time() - start - offset
        try:
            return late, await load.ask(text, cell.num_output_tokens)
        except TargetError as error:
            if error.status not in REFUSALS:
                raise
            return late, None

    results = await _all(map(arrive, texts, offsets))
    answers = [answer for _, answer in results if answer is not None]
    if not answers:
        raise TargetError(f"the server refused all {len(texts)} requests as too busy; lower the rate", status=503)
    figures = request_figures(answers, cell.num_output_tokens, load.limits, len(texts) - len(answers))
    return answers, figures | {"client_late_max": max(late for late, _ in results)}


async def _mixed(load: Load) -> Result:
    """Running streams, then a long prompt beside them. When its answer is there, the streams are cut off."""
    cell = load.cell
    texts = [load.prompts.text(STREAM_PROMPT_TOKENS) for _ in range(cell.num_streams)]
    long_text = load.prompts.text(cell.num_prompt_tokens)
    streams = [client.start() for _ in texts]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(client.run_completion(stream, load.target, text, MAX_STREAM_TOKENS))
                for stream, text in zip(streams, texts, strict=True)
            ]
            while min(len(stream.events) for stream in streams) < QUIET_CHUNKS:
                if any(task.done() for task in tasks):
                    raise TargetError(f"a stream ended before all {len(tasks)} had sent {QUIET_CHUNKS} chunks")
                await asyncio.sleep(POLL_SECONDS)
            long = await load.ask(long_text, cell.num_output_tokens)
            for task in tasks:
                task.cancel()
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    running = [client.parse(stream) for stream in streams]
    return [*running, long], mixed_figures(running, long)


async def _multi_turn(load: Load) -> Result:
    cell = load.cell
    messages = [{"role": "user", "content": load.prompts.text(cell.num_prompt_tokens)}]
    first = await load.chat(messages, cell.num_output_tokens)
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": load.prompts.text(SECOND_TURN_TOKENS)},
    ]
    second = await load.chat(messages, cell.num_output_tokens)
    return [first, second], {
        "ttft_first": first.ttft,
        "ttft_second": second.ttft,
        "first_to_second": first.ttft / second.ttft,
        **length_figures([first, second], cell.num_output_tokens),
        "cached_tokens": second.num_cached_tokens,
    }


async def _shared_prefix(load: Load) -> Result:
    """Prompts that begin alike, one after the other; what the first one computed can serve the others."""
    cell = load.cell
    beginning = load.prompts.text(cell.num_shared_tokens)
    texts = [load.prompts.text(cell.num_prompt_tokens, beginning) for _ in range(cell.num_requests)]
    answers = [await load.ask(text, cell.num_output_tokens) for text in texts]
    return answers, reuse_figures(answers[:1], answers[1:], cell.num_output_tokens)


async def _revisit(load: Load) -> Result:
    """Different prompts, then the same ones again: those whose blocks were evicted meanwhile are computed anew."""
    cell = load.cell
    texts = [load.prompts.text(cell.num_prompt_tokens) for _ in range(cell.num_requests)]
    answers = [await load.ask(text, cell.num_output_tokens) for text in [*texts, *texts]]
    return answers, reuse_figures(answers[: len(texts)], answers[len(texts) :], cell.num_output_tokens)


_WORKLOADS: dict[str, Callable[[Load], Awaitable[Result]]] = {
    "input-length": _requests,
    "output-length": _requests,
    "concurrency": _requests,
    "mixed": _mixed,
    "multi-turn": _multi_turn,
    "shared-prefix": _shared_prefix,
    "revisit": _revisit,
}
