"""A server from the start of its process: until it is ready, its first request, then its steady state."""

import asyncio
import time
from pathlib import Path

from mlxserve.bench.figures import Limits, reuse_figures
from mlxserve.bench.process import Server, ServerSpec
from mlxserve.bench.prompts import Prompts
from mlxserve.bench.workloads import Cell, Load, Measurement


async def measure(cell: Cell, spec: ServerSpec, prompts: Prompts, folder: Path, *, run: int) -> Measurement:
    """Start the server, ask it cell.num_requests times, one after the other, and stop it. Its log goes into `folder`.

    Raises:
        TargetError: it did not start, or a request failed.
    """
    texts = [prompts.text(cell.num_prompt_tokens) for _ in range(cell.num_requests)]
    server = Server(spec, folder / f"cold-start-{run}.log")
    started, cpu = time.perf_counter(), time.process_time()
    server.start()
    try:
        await server.wait_until_healthy()
        ready = time.perf_counter() - started
        load = Load(cell, server.target, prompts, Limits())
        answers = [await load.ask(text, cell.num_output_tokens) for text in texts]
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    finally:
        await asyncio.to_thread(server.stop)
    figures = {"ready": ready, **reuse_figures(answers[:1], answers[1:], cell.num_output_tokens)}
    return Measurement(cell, spec.name, run, figures, tuple(answers), cpu / seconds)
