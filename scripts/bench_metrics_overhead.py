"""What step records, the journal of requests and Prometheus metrics cost, as a share of the engine's steps per second.

Two engines decode the same streams, a block of steps each in turn. One is mlxserve's, with all that is done for each
step and token: the record and its prediction, the request's trace, the histograms, all in the thread that computes (a
server does most of it in another one). The other leaves that out.

First without a model, so that the cost itself shows: microseconds a step, and what that is of a step of 5 ms. Then,
with --model, steps of a real model; the ratio of steps per second is the median over neighbouring blocks.
"""

import argparse
import statistics
import time
from collections.abc import Callable

from mlxserve import blas
from mlxserve.config import EngineConfig

STEP_SECONDS = 0.005
PROMPT_TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--blocks", type=int, default=60, help="measured pairs of blocks")
    parser.add_argument("--steps", type=int, default=100, help="steps of a block without a model")
    parser.add_argument("--model", default=None, help="alias, folder or .gguf file: measure its steps as well")
    parser.add_argument("--model-steps", type=int, default=4, help="steps of a block with the model")
    parser.add_argument("--threads", type=int, default=None, help="threads of the BLAS")
    arguments = parser.parse_args()
    blas.preload(arguments.threads)

    print(f"medians of {arguments.blocks} pairs of blocks, in turns\n")
    print("| | streams | without, a step | with, a step | cost, us | of a 5 ms step | steps/s with : without |")
    print("|---|---|---|---|---|---|---|")
    for num_streams in arguments.streams:
        print(row("no model", num_streams, arguments.blocks, arguments.steps, instant_engine), flush=True)
    if arguments.model is not None:
        make = model_engines(arguments.model)
        for num_streams in arguments.streams:
            print(row(arguments.model, num_streams, arguments.blocks, arguments.model_steps, make), flush=True)


def row(name: str, num_streams: int, num_blocks: int, num_steps: int, make_engine: Callable) -> str:
    loops = [Loop(make_engine(is_bare), num_streams, is_bare=is_bare) for is_bare in (True, False)]
    times: list[tuple[float, float]] = []
    for block in range(num_blocks + 2):
        seconds: dict[bool, float] = {}
        # Who begins changes, or the second would always find warm caches.
        for loop in loops if block % 2 else reversed(loops):
            started = time.perf_counter()
            for _ in range(num_steps):
                loop.step()
            seconds[loop.is_bare] = (time.perf_counter() - started) / num_steps
        if block > 1:
            times.append((seconds[True], seconds[False]))
    for loop in loops:
        loop.finish()
    without, with_all = (statistics.median(values) for values in zip(*times, strict=True))
    cost = statistics.median(full - bare for bare, full in times)
    ratio = statistics.median(bare / full for bare, full in times)
    # An instant step has no pace of its own to compare with.
    shown = f"{ratio:.4f}" if without > STEP_SECONDS else "-"
    return (
        f"| {name} | {num_streams} | {without * 1e6:.0f} us | {with_all * 1e6:.0f} us | {cost * 1e6:.1f} "
        f"| {cost / STEP_SECONDS:.2%} | {shown} |"
    )


def bare_engine_class():
    from mlxserve.core.step import RequestOutput, ScheduledStep, StepResult
    from mlxserve.engine.engine import Engine

    class BareEngine(Engine):
        def _update(self, step: ScheduledStep, result: StepResult) -> list[RequestOutput]:
            return self._scheduler.update(step, result, time.monotonic())

    return BareEngine


def instant_engine(is_bare: bool):
    """An engine whose steps are computed in no time, and said to have taken 5 ms."""
    from mlxserve.core.step import SampledToken, ScheduledStep, StepResult
    from mlxserve.engine.engine import Engine
    from mlxserve.kv.block_pool import BlockPool
    from mlxserve.kv.layer_group import FullAttentionGroup
    from mlxserve.kv.manager import KVManager
    from mlxserve.scheduler.budget import PrefillBudget
    from mlxserve.scheduler.scheduler import Scheduler

    class InstantRunner:
        def run(self, step: ScheduledStep, masks: object = None) -> StepResult:
            token = SampledToken(7)
            return StepResult(step.step_id, tuple((token,) for _ in step.decode), 0.0, STEP_SECONDS)

        def reset(self) -> None:
            pass

    def make_scheduler() -> Scheduler:
        config = EngineConfig(max_num_seqs=64)
        kv = KVManager([FullAttentionGroup(BlockPool(8192, 8192), 64)], block_size=64, model_id="none")
        return Scheduler(config, kv, PrefillBudget(max_prefill_tokens=2048, target_itl=0.1))

    return (bare_engine_class() if is_bare else Engine)(InstantRunner(), make_scheduler)


def model_engines(model: str) -> Callable:
    from mlxserve.engine import build
    from mlxserve.store import hub, loader
    from mlxserve.store.registry import Registry

    source = Registry().resolve(model, allow_paths=True)
    device = build.configure_device()
    config = EngineConfig(max_num_seqs=64, kv_cache_bytes=600_000_000)
    built = {}
    for is_bare in (True, False):
        loaded = loader.load(hub.ensure_local(source), name=source.name, dtype_policy=device.dtype_policy)
        engine = build.build_engine(loaded, config, device, 4096).engine
        if is_bare:
            engine.__class__ = bare_engine_class()
        built[is_bare] = engine
    return built.__getitem__


class Loop:
    """Streams of one engine, and what a server does with each step's record and tokens."""

    def __init__(self, engine, num_streams: int, *, is_bare: bool) -> None:
        from mlxserve.api.metrics import Metrics
        from mlxserve.core.request import Request
        from mlxserve.core.sampling_params import SamplingParams
        from mlxserve.engine.journal import RequestTrace
        from mlxserve.engine.timeline import Timeline

        self.is_bare = is_bare
        self._engine = engine
        self._metrics = Metrics()
        self._traces: dict[str, RequestTrace] = {}
        self._last: dict[str, float] = {}
        greedy = SamplingParams(temperature=0.0, ignore_eos=True)
        for index in range(num_streams):
            request_id = f"stream-{index}"
            prompt = [index + 300] * PROMPT_TOKENS
            engine.add(Request(request_id, prompt, greedy, frozenset(), 0, 4000, time.monotonic()))
            self._traces[request_id] = RequestTrace(request_id, "m", Timeline(), 0, None)
        waiting = set(self._traces)
        while waiting:
            waiting -= {output.request_id for output in engine.step()}

    def step(self) -> None:
        outputs = self._engine.step()
        if self.is_bare:
            return
        record = self._engine.last_record
        for request_id in record.rows:
            self._traces[request_id].note_row(record)
        self._metrics.step_finished("m", record)
        now = record.end
        for output in outputs:
            for _ in output.tokens:
                if output.request_id in self._last:
                    self._metrics.inter_token_latency("m", now - self._last[output.request_id])
                self._last[output.request_id] = now
                self._traces[output.request_id].note_token(now, record.step_id)

    def finish(self) -> None:
        from mlxserve.core.request import FinishReason

        for request_id in self._traces:
            self._engine.abort(request_id, FinishReason.CANCELLED)
        while self._engine.has_work:
            self._engine.step()


if __name__ == "__main__":
    main()
