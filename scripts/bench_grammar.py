"""What structured output costs.

First table, without the model's forward pass: microseconds of a mask, of compiling, and of adding a mask to logits.
Second table: decode steps of batches without, half with, and all with constraints, in turns on one engine. Figures are
medians; ratios are medians of the ratios of neighbouring blocks.
"""

import argparse
import importlib.metadata
import os
import platform
import random
import statistics
import time

from mlxserve import blas
from mlxserve.config import EngineConfig
from mlxserve.core.constraint import JSON_OBJECT, ConstrainedRow, Grammar

STEPS_PER_BLOCK = 8
ADDRESS = {
    "type": "object",
    "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "addresses": {"type": "array", "items": ADDRESS, "minItems": 1},
    },
    "required": ["name", "age", "addresses"],
}
LINES = r"(- [^\n]{1,200}\n){3,}"
ARITHMETIC = 'root ::= term ("+" term)*\nterm ::= factor ("*" factor)*\nfactor ::= [1-9] [0-9]* | "(" root ")"'
GRAMMARS = {
    "JSON object": Grammar("json_schema", JSON_OBJECT, "bench"),
    "JSON schema": Grammar("json_schema", PERSON, "bench"),
    "regex": Grammar("regex", LINES, "bench"),
    "GBNF": Grammar("grammar", ARITHMETIC, "bench"),
    "choice": Grammar("choice", tuple(f"label {index}" for index in range(100)), "bench"),
}
ENDLESS = Grammar("json_schema", {"type": "array", "items": PERSON, "minItems": 1000}, "bench")
"""An answer that lasts as long as the ones without a constraint."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="alias, folder or .gguf file")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--blocks", type=int, default=8, help=f"measured blocks of {STEPS_PER_BLOCK} steps")
    parser.add_argument("--threads", type=int, default=None, help="threads of the BLAS")
    arguments = parser.parse_args()
    info = blas.preload(arguments.threads)
    bench = GrammarBench(arguments.model)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("mlxserve", "mlx", "llguidance"))
    print(f"{arguments.model}, vocabulary of {bench.tokenizer.vocab_size} tokens, {versions}")
    print(f"{platform.machine()}, {os.cpu_count()} cores, {bench.device.name}, BLAS: {info}\n")
    print("| grammar | compile ms | mask us, median | mask us, 99th of 100 | tokens |")
    print("|---|---|---|---|---|")
    for name, grammar in GRAMMARS.items():
        print(bench.mask_row(name, grammar), flush=True)
    print(
        "\n| batch | add to logits us | step ms, free | half constrained | all constrained | half / free | all / free |"
    )
    print("|---|---|---|---|---|---|---|")
    for batch in arguments.batch:
        print(bench.batch_row(batch, arguments.blocks), flush=True)


class GrammarBench:
    def __init__(self, model: str) -> None:
        from mlxserve.engine import build
        from mlxserve.store import hub, loader
        from mlxserve.store.registry import Registry
        from mlxserve.text.grammar import GrammarCompiler
        from mlxserve.text.tokenizer import Tokenizer

        source = Registry().resolve(model, allow_paths=True)
        self.device = build.configure_device()
        loaded = loader.load(hub.ensure_local(source), name=source.name, dtype_policy=self.device.dtype_policy)
        self.tokenizer = Tokenizer(loaded.tokenizer, loaded.eos_token_ids)
        self.compiler = GrammarCompiler(self.tokenizer)
        self.engine = build.build_engine(
            loaded, EngineConfig(enable_prefix_caching=False), self.device, loaded.context_length
        ).engine
        self.random = random.Random(0)
        self.compiler.compile(ENDLESS)  # builds the vocabulary

    def mask_row(self, name: str, grammar: Grammar, num_answers: int = 5, max_tokens: int = 200) -> str:
        """Masks along random answers."""
        import numpy as np

        from mlxserve.text.token_constraint import compute_masks

        compile_times, times = [], []
        for _ in range(num_answers):
            began = time.perf_counter()
            constraint = self.compiler.compile(grammar)
            compile_times.append(time.perf_counter() - began)
            new: list[int] = []
            for _ in range(max_tokens):
                began = time.perf_counter()
                masks = compute_masks([ConstrainedRow(0, constraint, new)], 1)
                times.append(time.perf_counter() - began)
                bits = np.unpackbits(np.frombuffer(masks.bits, np.uint8), bitorder="little")
                token_id = int(self.random.choice(np.flatnonzero(bits)))
                if masks.failures or token_id in self.tokenizer.eos_token_ids:
                    break
                new = [token_id]
        times.sort()
        return (
            f"| {name} | {1e3 * statistics.median(compile_times):.1f} | {1e6 * statistics.median(times):.0f} "
            f"| {1e6 * times[len(times) * 99 // 100]:.0f} | {len(times)} |"
        )

    def batch_row(self, batch: int, num_blocks: int) -> str:
        shares = {"free": 0, "half": batch // 2, "all": batch}
        times: dict[str, list[float]] = {name: [] for name in shares}
        for block in range(num_blocks + 1):
            for name, num_constrained in shares.items():
                seconds = self._decode(batch, num_constrained)
                if block > 0:  # the first one warms up
                    times[name].append(seconds)
        steps = {name: 1e3 * statistics.median(values) / STEPS_PER_BLOCK for name, values in times.items()}

        def ratio(name: str) -> str:
            return f"{statistics.median(a / b for a, b in zip(times[name], times['free'], strict=True)):.3f}"

        return (
            f"| {batch} | {self._addition(batch):.0f} | {steps['free']:.1f} | {steps['half']:.1f} | {steps['all']:.1f} "
            f"| {ratio('half')} | {ratio('all')} |"
        )

    def _decode(self, batch: int, num_constrained: int) -> float:
        """Seconds of a block of decode steps, after the prompts are in."""
        from mlxserve.core.request import FinishReason, Request
        from mlxserve.core.sampling_params import SamplingParams

        waiting = set()
        for index in range(batch):
            constraint = self.compiler.compile(ENDLESS) if index < num_constrained else None
            prompt = self.random.choices(range(300, 40_000), k=64)
            sampling = SamplingParams(temperature=1.0, ignore_eos=constraint is None)
            # Without ends of sequence: all streams must last.
            made = Request(
                f"{index}", prompt, sampling, frozenset(), index, 4096, time.monotonic(), constraint=constraint
            )
            self.engine.add(made)
            waiting.add(made.request_id)
        while waiting:
            waiting -= {output.request_id for output in self.engine.step()}
        began = time.perf_counter()
        for _ in range(STEPS_PER_BLOCK):
            self.engine.step()
        seconds = time.perf_counter() - began
        for index in range(batch):
            self.engine.abort(f"{index}", FinishReason.CANCELLED)
        while self.engine.has_work:
            self.engine.step()
        return seconds

    def _addition(self, batch: int) -> float:
        """Microseconds of making biases of masks and adding them to float32 logits."""
        import mlx.core as mx

        from mlxserve.core.constraint import TokenMasks
        from mlxserve.core.sampling_params import SamplingParams
        from mlxserve.core.step import DecodeRow
        from mlxserve.runner.token_mask import apply_masks

        vocab_size = self.tokenizer.vocab_size
        logits = mx.random.normal((batch, vocab_size))
        num_bytes = batch * ((vocab_size + 31) // 32 * 4)
        masks = TokenMasks(batch, self.random.randbytes(num_bytes))
        rows = [DecodeRow("", 0, 0, (), SamplingParams(), 0, 0, is_constrained=True)] * batch
        times = []
        for _ in range(50):
            mx.eval(logits)
            began = time.perf_counter()
            mx.eval(apply_masks(logits, rows, masks))
            times.append(time.perf_counter() - began)
        return 1e6 * statistics.median(times)


if __name__ == "__main__":
    main()
