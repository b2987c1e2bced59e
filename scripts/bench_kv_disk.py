"""What KV blocks on disk save after a restart, and what writing them costs the streams.

In turns, with and without the disk, each time from a new start of the engine:

- first turn: a random prompt, answered with 64 tokens; with the disk, blocks are written meanwhile;
- second turn, after a restart: that prompt and answer and 30 tokens more. Its files are dropped from the page cache
  before, where the system lets a program do that (Linux).

Figures are medians over the rounds; ratios are medians of the ratios of each round.
"""

import argparse
import asyncio
import importlib.metadata
import os
import platform
import random
import shutil
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mlxserve import blas
from mlxserve.config import EngineConfig
from mlxserve.core.generation import Finished, GenerationRequest, TextDelta, TokenPrompt
from mlxserve.core.request import Speculation
from mlxserve.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mlxserve.core.stats import RequestRecord

NUM_ANSWER_TOKENS = 64
NUM_NEW_TOKENS = 30


@dataclass
class Turn:
    token_ids: list[int] = field(default_factory=list)
    intervals: list[float] = field(default_factory=list)
    """Seconds between tokens."""
    ttft: float = 0.0
    num_cached_tokens: int = 0

    def request_finished(self, record: "RequestRecord") -> None:
        """As an Observer."""

    def inter_token_latency(self, model: str, seconds: float) -> None:
        self.intervals.append(seconds)

    def step_finished(self, model: str, step: object) -> None: ...

    def model_loaded(self, model: str, outcome: str, seconds: float) -> None: ...

    def model_unloaded(self, model: str, reason: str) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="alias, folder or .gguf file")
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of the first turn's prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="where to put blocks; else a temporary folder")
    parser.add_argument("--threads", type=int, default=None, help="threads of the BLAS")
    arguments = parser.parse_args()
    info = blas.preload(arguments.threads)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("mlxserve", "mlx", "mlx-lm"))
    print(f"{arguments.model}, {versions}")
    print(f"{platform.machine()}, {os.cpu_count()} cores, BLAS: {info}")
    print(f"prompt of {arguments.prompt} tokens, {NUM_ANSWER_TOKENS} answered, {arguments.rounds} rounds\n", flush=True)
    rounds = [asyncio.run(one_round(arguments, number)) for number in range(arguments.rounds)]
    print("| | with disk | without | ratio |\n|---|---|---|---|")
    print_row("second turn, time to first token", [(disk[1].ttft, none[1].ttft) for disk, none in rounds])
    print_row("first turn, time to first token", [(disk[0].ttft, none[0].ttft) for disk, none in rounds])
    for name, statistic in (("median", statistics.median), ("longest", max)):
        pairs = [(statistic(disk[0].intervals), statistic(none[0].intervals)) for disk, none in rounds]
        print_row(f"first turn, {name} time between tokens", pairs)
    cached = {disk[1].num_cached_tokens for disk, _ in rounds}
    print(f"\ntokens of the second turn from disk: {', '.join(map(str, sorted(cached)))}")


def print_row(name: str, pairs: list[tuple[float, float]]) -> None:
    disk, none = (statistics.median(values) for values in zip(*pairs, strict=True))
    ratio = statistics.median(first / second for first, second in pairs)
    print(f"| {name} | {1000 * disk:.0f} ms | {1000 * none:.0f} ms | {ratio:.3f} |")


async def one_round(arguments: argparse.Namespace, number: int) -> tuple[list[Turn], list[Turn]]:
    """Both turns with the disk, and without."""
    rng = random.Random(number)
    prompt = rng.choices(range(300, 40_000), k=arguments.prompt)
    more = rng.choices(range(300, 40_000), k=NUM_NEW_TOKENS)
    folder = Path(tempfile.mkdtemp(prefix="mlxserve-kv-blocks-", dir=arguments.folder))
    try:
        on = EngineConfig(kv_disk=20 * 10**9, kv_disk_path=folder)
        with_disk, without = [], []
        # In turns, so that a machine that gets slower does so for both.
        for config, turns in ((EngineConfig(), without), (on, with_disk)):
            turns.append(await one_turn(arguments.model, config, prompt))
        drop_from_page_cache(folder)
        for config, turns in ((EngineConfig(), without), (on, with_disk)):
            turns.append(await one_turn(arguments.model, config, [*prompt, *turns[0].token_ids, *more]))
        if with_disk[1].token_ids != without[1].token_ids:
            print("the two second turns differ: rounding decided a token")
        return with_disk, without
    finally:
        shutil.rmtree(folder)


async def one_turn(model: str, config: EngineConfig, prompt: list[int]) -> Turn:
    """Start, answer one request, stop."""
    from mlxserve.engine.model_host import ModelHost
    from mlxserve.store.registry import Registry

    turn = Turn()
    host = ModelHost(config, Registry(), observer=turn, allow_paths=True)
    await host.start()
    try:
        served = (await host.acquire(model)).model
        sampling = SamplingParams(temperature=0.0, max_tokens=NUM_ANSWER_TOKENS, ignore_eos=True)
        # Without drafts: several tokens of a step have no time between them.
        request = GenerationRequest("turn", TokenPrompt(tuple(prompt)), sampling, speculation=Speculation.OFF)
        async for event in await served.generate(request):
            if isinstance(event, TextDelta):
                turn.token_ids += [token.token_id for token in event.tokens]
            elif isinstance(event, Finished):
                turn.ttft = event.timings.time_to_first_token
                turn.num_cached_tokens = event.usage.num_cached_tokens
    finally:
        await host.close(timeout=60.0)
    return turn


def drop_from_page_cache(folder: Path) -> None:
    if not hasattr(os, "posix_fadvise"):
        return
    os.sync()
    for path in folder.rglob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
