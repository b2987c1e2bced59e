"""How well the scheduler's cost model predicts the time of a step, and where it does not.

Drives the engine of one model, in this process, through streams alone, bursts of prompts, and prompts that arrive among
streams. Every step is predicted before it is learned from, as when serving. Prints, by kind of step and number of rows,
the medians of predicted and measured time and the median relative error, and writes all steps to a CSV and a plot
beside it (the plot needs matplotlib).
"""

import argparse
import csv
import importlib.metadata
import math
import os
import platform
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from mlxserve import blas
from mlxserve.config import EngineConfig

ROW_GROUPS = ((0, 0), (1, 1), (2, 4), (5, 8), (9, 32))
COLUMNS = (
    "load", "kind", "step_id", "rows", "chunks", "prefill_tokens", "budget", "predicted_ms", "measured_ms"
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="alias, folder or .gguf file")
    parser.add_argument("--output", type=Path, default=Path("cost_model"), help="folder for the CSV and the plot")
    parser.add_argument("--seconds", type=float, default=60.0, help="about how long, divided among the loads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=None, help="threads of the BLAS")
    arguments = parser.parse_args()
    info = blas.preload(arguments.threads)

    bench = CostBench(arguments.model, arguments.seed)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("mlxserve", "mlx"))
    print(f"{arguments.model}, {versions}, {platform.machine()}, {os.cpu_count()} cores, BLAS: {info}")
    print(f"loads: {', '.join(bench.loads)}; {arguments.seconds:g} s in all, seed {arguments.seed}\n")
    rows = bench.run(arguments.seconds)
    print("\n".join(table(rows)))
    arguments.output.mkdir(parents=True, exist_ok=True)
    file = arguments.output / "steps.csv"
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    print(f"\n{len(rows)} steps in {file}")
    plot(rows, arguments.output / "steps.png", f"{arguments.model}: predicted and measured step times")


class CostBench:
    """The loads are generators that submit requests; a step is computed each time one yields."""

    def __init__(self, model: str, seed: int) -> None:
        from mlxserve.engine import build
        from mlxserve.store import hub, loader
        from mlxserve.store.registry import Registry

        source = Registry().resolve(model, allow_paths=True)
        device = build.configure_device()
        loaded = loader.load(hub.ensure_local(source), name=source.name, dtype_policy=device.dtype_policy)
        config = EngineConfig(enable_prefix_caching=False)
        self._engine = build.build_engine(loaded, config, device, loaded.context_length).engine
        self._random = random.Random(seed)
        self._num_requests = 0
        self.loads = {"streams": self._streams, "bursts": self._bursts, "mixed": self._mixed}

    def run(self, seconds: float) -> list[dict[str, object]]:
        rows: list[dict[str, object]] = []
        for name, load in self.loads.items():
            end = time.monotonic() + seconds / len(self.loads)
            while time.monotonic() < end:
                for _ in load():
                    before = self._engine.last_record
                    self._engine.step()
                    record = self._engine.last_record
                    if record is not before and record.kind != "empty":
                        rows.append(csv_row(name, record))
                    if time.monotonic() >= end:
                        break
                self._stop()
        return rows

    def _streams(self) -> Iterator[None]:
        """1 to 12 streams of one prompt length, decoding."""
        num_streams = self._random.choice((1, 2, 4, 8, 12))
        num_tokens = self._random.choice((32, 128, 256))
        for _ in range(num_streams):
            self._add(num_tokens, 40)
        yield from self._until_done()

    def _bursts(self) -> Iterator[None]:
        """Prompts that come at once, with short answers."""
        for _ in range(self._random.choice((1, 2, 4, 8))):
            self._add(self._random.randint(64, 512), 4)
        yield from self._until_done()

    def _mixed(self) -> Iterator[None]:
        """Streams, among which a prompt arrives every few steps."""
        for _ in range(self._random.choice((1, 3, 6))):
            self._add(48, 60)
        for _ in range(5):
            for _ in range(10):
                yield
            self._add(self._random.randint(100, 600), 8)
        yield from self._until_done()

    def _until_done(self) -> Iterator[None]:
        while self._engine.has_work:
            yield

    def _add(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        from mlxserve.core.request import Request
        from mlxserve.core.sampling_params import SamplingParams

        prompt = self._random.choices(range(300, 40_000), k=num_prompt_tokens)
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        limit = num_prompt_tokens + num_output_tokens
        request_id = f"bench-{self._num_requests}"
        self._num_requests += 1
        self._engine.add(Request(request_id, prompt, sampling, frozenset(), 0, limit, time.monotonic()))

    def _stop(self) -> None:
        from mlxserve.core.request import FinishReason

        for index in range(self._num_requests):
            self._engine.abort(f"bench-{index}", FinishReason.CANCELLED)
        while self._engine.has_work:
            self._engine.step()


def csv_row(load: str, record) -> dict[str, object]:
    return {
        "load": load,
        "kind": record.kind,
        "step_id": record.step_id,
        "rows": len(record.rows),
        "chunks": len(record.chunks),
        "prefill_tokens": record.num_prefill_tokens,
        "budget": record.budget,
        "predicted_ms": round(record.predicted * 1e3, 3),
        "measured_ms": round(record.measured * 1e3, 3),
    }


def table(rows: list[dict[str, object]]) -> list[str]:
    groups: dict[tuple[str, tuple[int, int]], list[dict]] = defaultdict(list)
    for row in rows:
        group = next(group for group in ROW_GROUPS if group[0] <= row["rows"] <= group[1])
        groups[row["kind"], group].append(row)
        groups["all", (0, 0)].append(row)
    lines = [
        "| kind | rows | steps | predicted ms | measured ms | median error | P90 error | bias |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (kind, (low, high)), members in sorted(groups.items(), key=lambda item: (item[0][0] == "all", item[0])):
        ratios = [row["predicted_ms"] / row["measured_ms"] for row in members]
        errors = sorted(abs(ratio - 1) for ratio in ratios)
        shown = "" if kind == "all" else str(low) if low == high else f"{low}-{high}"
        lines.append(
            f"| {kind} | {shown} | {len(members)} | {statistics.median(row['predicted_ms'] for row in members):.1f} "
            f"| {statistics.median(row['measured_ms'] for row in members):.1f} | {statistics.median(errors):.1%} "
            f"| {errors[math.ceil(0.9 * len(errors)) - 1]:.1%} | {statistics.median(ratios) - 1:+.1%} |"
        )
    return lines


def plot(rows: list[dict[str, object]], file: Path, title: str) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed (pip install matplotlib)")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    figure.suptitle(title)
    for kind, marker in (("decode", "o"), ("mixed", "s"), ("prefill", "^")):
        members = [row for row in rows if row["kind"] == kind]
        measured = [row["measured_ms"] for row in members]
        predicted = [row["predicted_ms"] for row in members]
        left.scatter(measured, predicted, s=9, marker=marker, alpha=0.5, label=f"{kind} ({len(members)})")
        errors = sorted(100 * (p / m - 1) for p, m in zip(predicted, measured, strict=True))
        right.plot(errors, [index / max(len(errors) - 1, 1) for index in range(len(errors))], label=kind)
    limits = [min(row["measured_ms"] for row in rows), max(row["measured_ms"] for row in rows)]
    left.plot(limits, limits, color="grey", linewidth=1)
    left.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="predicted, ms")
    left.legend()
    right.axvline(0, color="grey", linewidth=1)
    right.set(xlim=(-60, 60), xlabel="predicted against measured, %", ylabel="share of steps with less")
    right.legend()
    figure.savefig(file, dpi=120)
    print(f"plot in {file}")


if __name__ == "__main__":
    main()
