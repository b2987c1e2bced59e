"""Decode speed of mlxserve's engine against mlx-lm, on the same weights and BLAS, in one process.

For each batch size and prompt length three loops decode the same prompts greedily, a block of steps each in turn:

- mlxserve: Engine.step(), that is scheduler, block cache, runner and sampler;
- bare: mlx-lm's model called in a loop on its contiguous cache, argmax, eval (the least Python there can be);
- BatchGenerator: mlx-lm's own batched generation.

Figures are medians over the blocks; ratios are medians of the ratios of neighbouring blocks.
"""

import argparse
import importlib.metadata
import os
import platform
import random
import statistics
import time
from collections.abc import Callable

from mlxserve import blas
from mlxserve.config import EngineConfig

STEPS_PER_BLOCK = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="alias, folder or .gguf file")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, nargs="+", default=[128, 1024], help="prompt lengths in tokens")
    parser.add_argument("--blocks", type=int, default=8, help=f"measured blocks of {STEPS_PER_BLOCK} steps")
    parser.add_argument("--threads", type=int, default=None, help="threads of the BLAS")
    arguments = parser.parse_args()
    info = blas.preload(arguments.threads)

    bench = EngineBench(arguments.model)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("mlxserve", "mlx", "mlx-lm"))
    print(f"{arguments.model} ({bench.loaded.quantization}, computed in {bench.dtype}), {versions}")
    print(f"{platform.machine()}, {os.cpu_count()} cores, {bench.device.name}, BLAS: {info}")
    print(f"random prompts, greedy, {arguments.blocks} blocks of {STEPS_PER_BLOCK} steps each, in turns\n")
    print(
        "| batch | prompt | mlxserve tok/s | bare loop | BatchGenerator | vs bare | vs BatchGenerator | prefill tok/s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for num_prompt_tokens in arguments.prompt:
        for batch in arguments.batch:
            print(bench.row(batch, num_prompt_tokens, arguments.blocks), flush=True)


class EngineBench:
    def __init__(self, model: str) -> None:
        import mlx.core as mx

        from mlxserve.engine import build
        from mlxserve.store import hub, loader
        from mlxserve.store.registry import Registry

        source = Registry().resolve(model, allow_paths=True)
        self.device = build.configure_device()
        path = hub.ensure_local(source)
        self.loaded = loader.load(path, name=source.name, dtype_policy=self.device.dtype_policy)
        # mlx-lm's side gets a copy of the module of its own: ours is tuned for the device when the engine is built.
        self.stock = loader.load(path, name=source.name, dtype_policy=self.device.dtype_policy).model
        built = build.build_engine(
            self.loaded, EngineConfig(enable_prefix_caching=False), self.device, self.loaded.context_length
        )
        self.engine = built.engine
        self.dtype = str(mx.float32 if self.device.dtype_policy == "float32" else "the model's own types")
        self.random = random.Random(0)

    def row(self, batch: int, num_prompt_tokens: int, num_blocks: int) -> str:
        vocabulary = range(300, 40_000)
        prompts = [self.random.choices(vocabulary, k=num_prompt_tokens) for _ in range(batch)]
        num_steps = (num_blocks + 1) * STEPS_PER_BLOCK + 4
        started = time.perf_counter()
        ours, finish = self._engine_loop(prompts, num_steps)
        prefill = batch * num_prompt_tokens / (time.perf_counter() - started)
        loops = {"ours": ours, "bare": self._bare_loop(prompts), "batch": self._batch_generator(prompts)}
        times: dict[str, list[float]] = {name: [] for name in loops}
        for block in range(num_blocks + 1):
            for name, loop in loops.items():
                started = time.perf_counter()
                loop()
                if block > 0:  # the first one warms up
                    times[name].append(time.perf_counter() - started)
        finish()
        rate = {name: batch * STEPS_PER_BLOCK / statistics.median(values) for name, values in times.items()}

        def ratio(name: str) -> str:
            return f"{statistics.median(a / b for a, b in zip(times[name], times['ours'], strict=True)):.2f}"

        return (
            f"| {batch} | {num_prompt_tokens} | {rate['ours']:.1f} | {rate['bare']:.1f} | {rate['batch']:.1f} "
            f"| {ratio('bare')} | {ratio('batch')} | {prefill:.0f} |"
        )

    def _engine_loop(self, prompts: list[list[int]], num_steps: int) -> tuple[Callable[[], None], Callable[[], None]]:
        from mlxserve.core.request import FinishReason, Request, Speculation
        from mlxserve.core.sampling_params import SamplingParams

        greedy = SamplingParams(temperature=0.0, ignore_eos=True)
        waiting = set()
        for index, prompt in enumerate(prompts):
            request_id = f"bench-{index}"
            limit = len(prompt) + num_steps + 1000
            request = Request(request_id, prompt, greedy, frozenset(), 0, limit, time.monotonic())
            # A step is counted as one token for each stream, and answers to random prompts repeat themselves.
            request.speculation = Speculation.OFF
            self.engine.add(request)
            waiting.add(request_id)
        while waiting:
            waiting -= {output.request_id for output in self.engine.step()}

        def block() -> None:
            for _ in range(STEPS_PER_BLOCK):
                self.engine.step()

        def finish() -> None:
            for index in range(len(prompts)):
                self.engine.abort(f"bench-{index}", FinishReason.CANCELLED)
            while self.engine.has_work:
                self.engine.step()

        return block, finish

    def _bare_loop(self, prompts: list[list[int]]) -> Callable[[], None]:
        import mlx.core as mx
        from mlx_lm.models.cache import make_prompt_cache

        cache = make_prompt_cache(self.stock)
        tokens = mx.array(prompts)
        for first in range(0, tokens.shape[1], 128):
            logits = self.stock(tokens[:, first : first + 128], cache=cache)[:, -1]
            mx.eval(logits, [layer.state for layer in cache])
        state = {"token": mx.argmax(logits, axis=-1)}

        def block() -> None:
            for _ in range(STEPS_PER_BLOCK):
                state["token"] = mx.argmax(self.stock(state["token"][:, None], cache=cache)[:, -1], axis=-1)
                mx.eval(state["token"])

        return block

    def _batch_generator(self, prompts: list[list[int]]) -> Callable[[], None]:
        import mlx.core as mx
        from mlx_lm.generate import BatchGenerator

        generator = BatchGenerator(self.stock, max_tokens=100_000, prefill_step_size=128)
        generator.insert(prompts)
        while len(generator.next()[1]) < len(prompts):
            pass

        def block() -> None:
            for _ in range(STEPS_PER_BLOCK):
                generator.next()
            mx.synchronize(generator.stream)

        return block


if __name__ == "__main__":
    main()
