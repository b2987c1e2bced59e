"""`mlxserve bench study`: what a user's machine does with a model, from its cold start to the edge of its cache.

Each part is one question. Servers are started and stopped here, since settings differ between parts; those that differ
only in a setting get the same prompts.
"""

import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

from mlxserve.bench import client, cold_start, model_files, plot, process, report, session, summary
from mlxserve.bench.charts import Chart, of_settings
from mlxserve.bench.client import Target
from mlxserve.bench.figures import Limits
from mlxserve.bench.process import Server, ServerSpec
from mlxserve.bench.report import Block, Bullets, Heading, Paragraph, Picture, Table
from mlxserve.bench.results import Results, new_folder
from mlxserve.bench.session import Log, Session
from mlxserve.bench.workloads import Cell
from mlxserve.errors import BenchError, TargetError

SMALL_CACHE_BYTES = 64_000_000
"""Of the server whose cache is too small for its prompts; what that holds is asked of the server itself."""
NUM_VISITED = 8
VISITED_SHARE = 4
"""Each visited prompt takes one part in so many of the small cache: the eight together are twice what it holds."""
PREEMPTIONS = "mlxserve_num_preemptions_total"
SERVICE_PATHS = (("GET", "/health"), ("GET", "/v1/models"), ("POST", "/v1/chat/completions"))


@dataclass(frozen=True, slots=True)
class Options:
    model: str
    runs: int
    threads: int | None
    seed: int
    is_quick: bool


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything; quick is for trying it out."""

    cold_requests: int
    input_lengths: tuple[int, ...]
    output_lengths: tuple[int, ...]
    eos_limit: int
    requests: int
    streams: tuple[int, ...]
    load_prompt: int
    load_output: int
    long_prompt: int
    budgets: tuple[int, ...]
    block_sizes: tuple[int, ...]


FULL = Sizes(
    cold_requests=6,
    input_lengths=(129, 256, 512, 1024, 2272),
    output_lengths=(32, 64, 96, 128),
    eos_limit=512,
    requests=3,
    streams=(1, 2, 4, 8, 16),
    load_prompt=256,
    load_output=64,
    long_prompt=2000,
    budgets=(32, 64, 128, 256, 512, 1024),
    block_sizes=(16, 32, 64, 128, 256),
)
QUICK = Sizes(
    cold_requests=3,
    input_lengths=(129, 512, 1024, 2272),
    output_lengths=(32, 64, 128),
    eos_limit=128,
    requests=1,
    streams=(1, 4, 8),
    load_prompt=128,
    load_output=32,
    long_prompt=768,
    budgets=(32, 128, 512),
    block_sizes=(16, 64, 256),
)
OWN_CHOICE = "by itself"
"""The server whose prefill budget the scheduler chooses."""
INPUT_STUDY_OUTPUT = 32
OUTPUT_STUDY_PROMPT = 250


@dataclass(slots=True)
class Study:
    """One run of all parts; each has a session of its own, so that its tables stand alone."""

    options: Options
    sizes: Sizes
    folder: Path
    logs: Path
    log: Log
    files: model_files.ModelFiles
    blocks: list[Block]

    async def run(self) -> None:
        await self.cold_start()
        async with self.server("mlxserve") as server:
            await self.input_length(server)
            await self.output_length(server)
            await self.service_check(server.target)
            await self.concurrency(server)
            budget = self.session("budget")
            await budget.run([self.long_beside_streams], self.options.runs, server.target, OWN_CHOICE)
        await self.budget(budget)
        await self.block_size()
        await self.cache()

    async def cold_start(self) -> None:
        work = self.session("cold-start")
        cell = Cell("cold-start", 1, 128, INPUT_STUDY_OUTPUT, self.sizes.cold_requests)
        for run in range(max(self.options.runs, 2)):
            work.prompts.seed(f"{self.options.seed} {run} {cell}")
            work.add(await cold_start.measure(cell, self.spec("mlxserve"), work.prompts, self.logs, run=run))
        self.close("1. Cold start and steady state", work)

    async def input_length(self, server: Server) -> None:
        cells = [
            Cell("input-length", 1, length, INPUT_STUDY_OUTPUT, self.sizes.requests)
            for length in self.sizes.input_lengths
        ]
        self.close("2. Input length", await self.measure("input-length", cells, [server]))

    async def output_length(self, server: Server) -> None:
        def cell(length: int, stops_at_eos: bool) -> Cell:
            prompt = OUTPUT_STUDY_PROMPT
            return Cell("output-length", 1, prompt, length, self.sizes.requests, stops_at_eos=stops_at_eos)

        cells = [cell(length, False) for length in self.sizes.output_lengths]
        cells.append(cell(self.sizes.eos_limit, True))
        self.close("3. Output length", await self.measure("output-length", cells, [server]))

    async def service_check(self, target: Target) -> None:
        body = {"model": target.model, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}
        rows = []
        for method, path in SERVICE_PATHS:
            started = time.perf_counter()
            try:
                reply = await client.request(target, method, path, body if method == "POST" else None)
            except (OSError, EOFError, ValueError) as error:
                raise TargetError(f"{method} {path} broke: {error!r}") from error
            seconds = time.perf_counter() - started
            rows.append((f"`{method} {path}`", str(reply.status), f"{seconds * 1000:.1f}", reply.text.strip()[:80]))
        self.blocks += [
            Heading(2, "4. Service check"),
            Table(("request", "status", "ms", "answer begins"), tuple(rows)),
        ]
        if failed := [row[0] for row in rows if row[1] != "200"]:
            raise TargetError(f"the service check failed: {', '.join(failed)} did not answer 200")

    async def concurrency(self, server: Server) -> None:
        sizes = self.sizes
        cells = [
            Cell("concurrency", count, sizes.load_prompt, sizes.load_output, sizes.requests) for count in sizes.streams
        ]
        self.close("5. Concurrency", await self.measure("concurrency", cells, [server]))

    @property
    def long_beside_streams(self) -> Cell:
        return Cell("mixed", 4, self.sizes.long_prompt, INPUT_STUDY_OUTPUT // 2)

    async def budget(self, work: Session) -> None:
        """Beside the scheduler's own choice: fixed numbers of prompt tokens a step, whatever the streams feel of it."""
        values = {}
        for budget in self.sizes.budgets:
            name = f"{budget} tokens"
            values[name] = float(budget)
            flags = ("--max-prefill-tokens", str(budget), "--target-itl-ms", "1000000")
            async with self.server(name, *flags) as server:
                await work.run([self.long_beside_streams], self.options.runs, server.target, name)
        panels = {"TTFT of the long prompt, s": ("ttft_long", 1.0), "ITL p99 beside it, ms": ("itl_p99", 1000.0)}
        chart = of_settings(
            "budget", "Prefill budget of a step", "prompt tokens a step at most", work.results, values, panels
        )
        self.close("6. Prefill budget against decode", work, chart)

    async def block_size(self) -> None:
        sizes = self.sizes
        load = Cell("concurrency", 4, sizes.load_prompt, sizes.load_output, 1)
        work = self.session("block-size")
        values = {}
        for size in sizes.block_sizes:
            name = f"blocks of {size}"
            values[name] = float(size)
            async with self.server(name, "--block-size", str(size)) as server:
                await work.run([load], self.options.runs, server.target, name)
        panels = {"output tokens/s": ("tokens_per_second", 1.0), "TTFT p50, s": ("ttft_p50", 1.0)}
        chart = of_settings("block-size", "Block size", "tokens a KV block", work.results, values, panels)
        self.close("7. Block size", work, chart)

    async def cache(self) -> None:
        """The same prompts twice: on a cache that holds them all, on one that holds half of them, and on none.

        Then streams that outgrow the small cache together: they wait for blocks, or are put back and computed anew.
        """
        work = self.session("cache")
        preemptions: list[tuple[str, ...]] = []
        small = ("--kv-cache-bytes", str(SMALL_CACHE_BYTES))
        async with self.server("small cache", *small) as server:
            capacity = await _context_length(server.target)
            revisit = Cell("revisit", 1, max(capacity // VISITED_SHARE, 16), 4, NUM_VISITED)
            await work.run([revisit], self.options.runs, server.target, server.spec.name)
            crowd = Cell("concurrency", NUM_VISITED, max(capacity // 10, 16), max(capacity // 16, 8))
            before = await _counter(server.target, PREEMPTIONS)
            await work.run([crowd], self.options.runs, server.target, server.spec.name)
            preemptions.append(("small cache", f"{await _counter(server.target, PREEMPTIONS) - before:g}"))
        async with self.server("roomy cache") as server:
            await work.run([revisit, crowd], self.options.runs, server.target, server.spec.name)
            preemptions.append(("roomy cache", f"{await _counter(server.target, PREEMPTIONS):g}"))
        async with self.server("no prefix cache", "--no-prefix-caching") as server:
            await work.run([revisit], self.options.runs, server.target, server.spec.name)
        self.close("8. Prefix cache: hit, eviction, recompute", work)
        self.blocks += [
            Paragraph(
                f"The small cache holds {capacity} tokens. Requests put back and computed anew for lack of blocks, in "
                f"all runs of {NUM_VISITED} streams:"
            ),
            Table(("server", "preemptions"), tuple(preemptions)),
        ]

    def session(self, name: str) -> Session:
        return Session(
            Results(new_folder(self.folder / name)),
            session.make_prompts(self.files),
            self.options.seed,
            Limits(),
            self.log,
        )

    async def measure(self, name: str, cells: list[Cell], servers: list[Server]) -> Session:
        work = self.session(name)
        for server in servers:
            await work.run(cells, self.options.runs, server.target, server.spec.name)
        return work

    def close(self, title: str, work: Session, *more: Chart) -> None:
        """Put a part into the report."""
        self.blocks.append(Heading(2, title))
        for workload in dict.fromkeys(cell.workload for cell in work.results.cells):
            prefix = "" if workload in title.lower().replace(" ", "-") else f"{title.split()[1].lower()}-"
            self.blocks += summary.workload_blocks(work.results, workload, self.folder, prefix)
        if plot.is_available():
            self.blocks += [Picture(plot.draw(chart, self.folder), chart.title) for chart in more]
        self.blocks.append(summary.bullets(summary.notes(work.results, work.text_tokens)))

    def spec(self, name: str, *flags: str) -> ServerSpec:
        threads = ("--threads", str(self.options.threads)) if self.options.threads else ()
        return process.mlxserve(self.options.model, *threads, *flags, name=name)

    @contextlib.asynccontextmanager
    async def server(self, name: str, *flags: str) -> AsyncIterator[Server]:
        """A server for the time of the block, with more flags."""
        server = Server(self.spec(name, *flags), self.logs / f"{name.replace(' ', '-')}.log")
        self.log(f"starting {' '.join(server.command)}")
        server.start()
        try:
            await server.wait_until_healthy()
            yield server
        finally:
            server.stop()


async def run(options: Options, folder: Path, log: Log) -> None:
    """All parts, and the report in `folder`.

    Raises:
        BenchError: the model is not here, or a server failed; the parts before are in the report.
    """
    files = model_files.read(options.model)
    new_folder(folder)
    failure: str | None = "it was interrupted."
    with tempfile.TemporaryDirectory(prefix="mlxserve-study-") as logs:
        study = Study(options, QUICK if options.is_quick else FULL, folder, Path(logs), log, files, [])
        started = time.monotonic()
        try:
            await study.run()
            failure = None
        except BenchError as error:
            failure = str(error)
            raise BenchError(f"{error} The report in {folder} has the parts before.") from error
        finally:
            minutes = (time.monotonic() - started) / 60
            report.write(folder, [*_head(study, failure, minutes), *study.blocks])
    log(f"the report is {folder / 'report.md'}, and report.html beside it")


def _head(study: Study, failure: str | None, minutes: float) -> Iterator[Block]:
    yield Heading(1, "Study")
    if failure is not None:
        yield Paragraph(f"**INCOMPLETE: {failure}** What follows was measured before.")
    options = study.options
    settings = [
        f"{options.runs} runs" + (" (`--quick`)" if options.is_quick else ""),
        "greedy, end of sequence ignored unless a row says EOS",
        f"seed {options.seed}",
        f"threads of a server: {options.threads or 'one for each core'}",
        f"{minutes:.1f} minutes in all",
    ]
    facts = session.facts(options.model, None, study.files, session.make_prompts(study.files), settings)
    yield Bullets(tuple(f"{title}: {text}" for title, text in facts.items()))
    yield Paragraph(
        "Figures are medians over the runs (least-largest). TTFT: sending to first text. ITL: gap between two chunks. "
        "TPOT: (last chunk - first chunk) / (tokens - 1). E2E: sending to last text."
    )
    if not plot.is_available():
        yield Paragraph(plot.MISSING)


async def _context_length(target: Target) -> int:
    """Tokens a sequence may have at a server whose cache is smaller than the model's context: what the cache holds."""
    reply = await client.request(target, "GET", f"/v1/models/{target.model}")
    return int(reply.json()["context_length"])


async def _counter(target: Target, name: str) -> float:
    """The sum of a counter over its labels, as /metrics has it."""
    reply = await client.request(target, "GET", "/metrics")
    lines = reply.body.decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))
