"""The loads, and the figures each of them gives for one run on one server."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from serving_bench import client
from serving_bench.client import Answer, LoadError, Target
from serving_bench.prompts import PromptMaker

STREAM_PROMPT_TOKENS = 128
MAX_STREAM_TOKENS = 1000
"""Of a running stream in `mixed`: more than it has time for, it is cut off."""
QUIET_CHUNKS = 24
"""Of each running stream before the long prompt comes: these make its undisturbed pace."""
SECOND_TURN_TOKENS = 32
TEMPLATE_TOKENS = 128
POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Cell:
    """One load: a row of a table. All servers get the same cells, in the same order."""

    workload: str
    """concurrency, mixed or multi-turn."""
    num_streams: int
    num_prompt_tokens: int
    num_output_tokens: int
    requests_per_stream: int = 1

    @property
    def total_prompt_tokens(self) -> int:
        """Of all requests of one run, but for the running streams of `mixed`."""
        prompts = self.num_streams * self.requests_per_stream if self.workload == "concurrency" else 1
        return prompts * self.num_prompt_tokens

    @property
    def context_length(self) -> int:
        """Tokens a sequence of this load may have, with room for a chat template around it."""
        if self.workload == "multi-turn":
            return self.num_prompt_tokens + 2 * self.num_output_tokens + SECOND_TURN_TOKENS + TEMPLATE_TOKENS
        longest_stream = STREAM_PROMPT_TOKENS + MAX_STREAM_TOKENS if self.workload == "mixed" else 0
        return max(self.num_prompt_tokens + self.num_output_tokens, longest_stream) + TEMPLATE_TOKENS


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


@dataclass(frozen=True, slots=True)
class Metric:
    """How a figure is shown, and which way is better."""

    key: str
    title: str
    scale: float = 1.0
    is_better_higher: bool = False


Result = tuple[list[Answer], dict[str, float]]

METRICS = {
    "concurrency": (
        Metric("tokens_per_second", "tokens/s", is_better_higher=True),
        Metric("ttft_p50", "TTFT p50 s"),
        Metric("tpot_p50", "TPOT ms", 1000),
        Metric("itl_p50", "ITL p50 ms", 1000),
        Metric("itl_p95", "ITL p95 ms", 1000),
        Metric("itl_p99", "ITL p99 ms", 1000),
    ),
    "mixed": (
        Metric("p99_to_quiet", "ITL p99 / quiet"),
        Metric("max_to_quiet", "ITL max / quiet"),
        Metric("itl_quiet", "ITL quiet ms", 1000),
        Metric("itl_p99", "ITL p99 ms", 1000),
        Metric("itl_max", "ITL max ms", 1000),
        Metric("ttft_long", "TTFT of the prompt s"),
    ),
    "multi-turn": (
        Metric("ttft_first", "TTFT first turn s"),
        Metric("ttft_second", "TTFT second turn s"),
        Metric("first_to_second", "first / second", is_better_higher=True),
        Metric("cached_tokens", "tokens found cached", is_better_higher=True),
    ),
}
"""By workload; the first one decides which variant of a server is the better."""


def is_better(cell: Cell, figures: dict[str, float], others: dict[str, float]) -> bool:
    metric = METRICS[cell.workload][0]
    return (figures[metric.key] > others[metric.key]) is metric.is_better_higher


async def measure(cell: Cell, target: Target, prompts: PromptMaker, *, server: str, run: int) -> Measurement:
    """Put one load on one server.

    Raises:
        LoadError: a request failed.
    """
    started, cpu = time.perf_counter(), time.process_time()
    answers, figures = await _WORKLOADS[cell.workload](cell, target, prompts)
    load = (time.process_time() - cpu) / (time.perf_counter() - started)
    return Measurement(cell, server, run, figures, tuple(answers), load)


async def warm_up(cells: list[Cell], target: Target, prompts: PromptMaker) -> None:
    """Meet every number of streams and the longest prompt once, so that nothing is compiled or allocated later."""
    for num_streams in sorted({cell.num_streams for cell in cells}):
        await _wave([[prompts.text(64)] for _ in range(num_streams)], target, 8)
    await client.complete(target, prompts.text(max(cell.num_prompt_tokens for cell in cells)), 4)


def percentile(values: list[float], percent: float) -> float:
    """Linear between the two nearest ranks; 0 where there are no values."""
    return float(np.percentile(values, percent)) if values else 0.0


async def _wave(prompts: list[list[str]], target: Target, max_tokens: int) -> list[Answer]:
    """Closed loop: each stream sends its prompts one after the other, all streams at the same time."""

    async def one(texts: list[str]) -> list[Answer]:
        return [await client.complete(target, text, max_tokens) for text in texts]

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(texts)) for texts in prompts]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [answer for task in tasks for answer in task.result()]


async def _concurrency(cell: Cell, target: Target, prompts: PromptMaker) -> Result:
    texts = [
        [prompts.text(cell.num_prompt_tokens) for _ in range(cell.requests_per_stream)] for _ in range(cell.num_streams)
    ]
    answers = await _wave(texts, target, cell.num_output_tokens)
    return answers, concurrency_figures(answers, cell.num_output_tokens)


def concurrency_figures(answers: list[Answer], num_output_tokens: int) -> dict[str, float]:
    """Output tokens/s run from the first request sent to the last token received, prefill included."""
    num_tokens = sum(answer.num_tokens for answer in answers)
    seconds = max(answer.chunk_times[-1] for answer in answers) - min(answer.sent for answer in answers)
    gaps = [gap for answer in answers for gap in answer.gaps]
    return {
        "tokens_per_second": num_tokens / seconds,
        "ttft_p50": percentile([answer.ttft for answer in answers], 50),
        "ttft_max": max(answer.ttft for answer in answers),
        "tpot_p50": percentile([answer.tpot for answer in answers], 50),
        **{f"itl_p{percent}": percentile(gaps, percent) for percent in (50, 95, 99)},
        "tokens_per_chunk": num_tokens / sum(len(answer.chunk_times) for answer in answers),
        "early_stops": sum(answer.num_tokens < num_output_tokens for answer in answers),
        "prompt_tokens_min": min(answer.num_prompt_tokens for answer in answers),
        "prompt_tokens_max": max(answer.num_prompt_tokens for answer in answers),
        "cached_tokens": sum(answer.num_cached_tokens for answer in answers),
    }


async def _mixed(cell: Cell, target: Target, prompts: PromptMaker) -> Result:
    """Running streams, then a long prompt beside them. When its answer is there, the streams are cut off."""
    texts = [prompts.text(STREAM_PROMPT_TOKENS) for _ in range(cell.num_streams)]
    long_text = prompts.text(cell.num_prompt_tokens)
    streams = [client.start() for _ in texts]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(client.run_completion(stream, target, text, MAX_STREAM_TOKENS))
                for stream, text in zip(streams, texts, strict=True)
            ]
            while min(len(stream.events) for stream in streams) < QUIET_CHUNKS:
                if any(task.done() for task in tasks):
                    raise LoadError(f"a stream ended before all {len(tasks)} had sent {QUIET_CHUNKS} chunks")
                await asyncio.sleep(POLL_SECONDS)
            long = await client.complete(target, long_text, cell.num_output_tokens)
            for task in tasks:
                task.cancel()
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    running = [client.parse(stream) for stream in streams]
    return [*running, long], mixed_figures(running, long)


def mixed_figures(running: list[Answer], long: Answer) -> dict[str, float]:
    """The gaps of the running streams that touch the time from sending the long prompt to its first token, beside the
    median of those between the last stream's first token and the long prompt.
    """
    quiet_from, quiet_to = max(answer.chunk_times[0] for answer in running), long.sent
    gaps = [gap for answer in running for gap in pairwise(answer.chunk_times)]
    quiet = [after - before for before, after in gaps if before >= quiet_from and after <= quiet_to]
    beside = [after - before for before, after in gaps if after > long.sent and before < long.chunk_times[0]]
    if not quiet or not beside:
        raise LoadError("the running streams ended before the long prompt had its answer, or never ran undisturbed")
    median = percentile(quiet, 50)
    return {
        "itl_quiet": median,
        "itl_p50": percentile(beside, 50),
        "itl_p99": percentile(beside, 99),
        "itl_max": max(beside),
        "p99_to_quiet": percentile(beside, 99) / median,
        "max_to_quiet": max(beside) / median,
        "ttft_long": long.ttft,
        "prompt_tokens_min": long.num_prompt_tokens,
        "prompt_tokens_max": long.num_prompt_tokens,
    }


async def _multi_turn(cell: Cell, target: Target, prompts: PromptMaker) -> Result:
    messages = [{"role": "user", "content": prompts.text(cell.num_prompt_tokens)}]
    first = await client.chat(target, messages, cell.num_output_tokens)
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": prompts.text(SECOND_TURN_TOKENS)},
    ]
    second = await client.chat(target, messages, cell.num_output_tokens)
    return [first, second], {
        "ttft_first": first.ttft,
        "ttft_second": second.ttft,
        "first_to_second": first.ttft / second.ttft,
        "cached_tokens": second.num_cached_tokens,
        "prompt_tokens_min": first.num_prompt_tokens,
        "prompt_tokens_max": second.num_prompt_tokens,
        "early_stops": sum(answer.num_tokens < cell.num_output_tokens for answer in (first, second)),
    }


_WORKLOADS: dict[str, Callable[[Cell, Target, PromptMaker], Awaitable[Result]]] = {
    "concurrency": _concurrency,
    "mixed": _mixed,
    "multi-turn": _multi_turn,
}
