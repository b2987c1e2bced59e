"""Quality, memory and speed of quantised KV caches against the model's own type, on the same weights, in one process.

Quality: the distributions of the next token after every token of a text, from passes over the block cache as the engine
runs them, with each cache. KL is the divergence from the plain cache's distribution, in nats; top-1 the share of
positions where both find the same token likeliest.

Speed: the same prompts are computed, and then tokens added to them, with each cache in turns; ratios are medians of the
ratios of neighbours, above 1 where the quantised cache is faster.
"""

import argparse
import importlib.metadata
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxserve import blas
from mlxserve.config import EngineConfig

if TYPE_CHECKING:
    import mlx.core as mx

    from mlxserve.runner.paged_model import PagedModel
    from mlxserve.store.loader import LoadedModel

TEXT = Path(__file__).parent / "data" / "mixed_text.txt"
ROWS_PER_PASS = 16
BLOCK_SIZE = EngineConfig().block_size
STEPS_PER_BLOCK = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["quality", "speed", "all"], nargs="?", default="all")
    parser.add_argument("--model", default="smollm2-135m", help="alias, folder or .gguf file")
    parser.add_argument("--bits", type=int, nargs="+", choices=[8, 4], default=[8, 4])
    parser.add_argument("--text", type=Path, default=TEXT, help="file with the text")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of the text")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, nargs="+", default=[1024], help="prompt lengths in tokens")
    parser.add_argument("--turns", type=int, default=6, help=f"measured blocks of {STEPS_PER_BLOCK} decode steps")
    parser.add_argument("--threads", type=int, default=None, help="threads of the BLAS")
    arguments = parser.parse_args()
    info = blas.preload(arguments.threads)

    from mlxserve.engine import build
    from mlxserve.store import hub, loader
    from mlxserve.store.registry import Registry

    source = Registry().resolve(arguments.model, allow_paths=True)
    device = build.configure_device()
    loaded = loader.load(hub.ensure_local(source), name=source.name, dtype_policy=device.dtype_policy)
    caches = Caches(loaded, arguments.bits)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("mlxserve", "mlx"))
    print(f"{source.name} ({loaded.quantization}), keys and values in {caches.dtype_name}, {versions}")
    print(f"{platform.machine()}, {os.cpu_count()} cores, {device.name}, BLAS: {info}")
    if arguments.part != "speed":
        token_ids = loaded.tokenizer.encode(arguments.text.read_text(encoding="utf-8"))[: arguments.tokens]
        if len(token_ids) < arguments.tokens:
            sys.exit(f"{arguments.text} has only {len(token_ids)} tokens")
        print(f"\n{arguments.text.name}, {len(token_ids)} tokens\n")
        print("| KV cache | bytes a token | share | KL mean | KL max | top-1 | perplexity | plain |")
        print("|---|---|---|---|---|---|---|---|")
        for bits, quality in caches.qualities(token_ids):
            print(caches.quality_row(bits, quality), flush=True)
    if arguments.part != "quality":
        print(f"\nratios, medians of {arguments.turns} turns of {STEPS_PER_BLOCK} steps\n")
        print("| KV cache | streams | context | decode ratio | plain tokens/s | prefill ratio | plain tokens/s |")
        print("|---|---|---|---|---|---|---|")
        for context in arguments.prompt:
            for num_streams in arguments.streams:
                for row in caches.speed_rows(num_streams, context, arguments.turns):
                    print(row, flush=True)


@dataclass(frozen=True)
class Quality:
    """How far the answers of a quantised cache are from the plain one's over a text."""

    kl_mean: float
    kl_max: float
    top1_agreement: float
    perplexity: float
    plain_perplexity: float


class Caches:
    """One model over a plain cache and quantised ones."""

    def __init__(self, loaded: "LoadedModel", all_bits: Sequence[int]) -> None:
        from mlxserve.engine import build
        from mlxserve.runner import device, probe

        found = device.detect()
        self._bits = all_bits
        self._max_pass_tokens = found.max_pass_tokens
        self.dtype_name = str(probe.layer_shapes(loaded.model)[0].dtype).removeprefix("mlx.core.")
        kernels = build.device_kernels(loaded, found)
        self._paged = {
            bits: build.paged_model(loaded, EngineConfig(kv_bits=bits), found, kernels) for bits in (None, *all_bits)
        }

    def bytes_per_token(self, bits: int | None) -> int:
        return self._paged[bits].storage.bytes_per_block // BLOCK_SIZE

    def qualities(self, token_ids: Sequence[int]) -> Iterator[tuple[int, Quality]]:
        """Compare each quantised cache with the plain one; they take turns, so that no pass's logits are kept."""
        import mlx.core as mx

        table = tuple(range(1, 2 + len(token_ids) // BLOCK_SIZE))
        for paged in self._paged.values():
            paged.storage.grow(len(table) + 1)
        sums: dict[int | None, list[tuple[mx.array, ...]]] = {bits: [] for bits in self._paged}
        for first in range(0, len(token_ids) - 1, ROWS_PER_PASS):
            span = range(first, min(first + ROWS_PER_PASS, len(token_ids) - 1))
            rows = [(token_ids[position], position, table) for position in span]
            following = mx.array([token_ids[position + 1] for position in span])[:, None]
            plain = _logprobs(self._paged[None], rows)
            for bits in self._paged:
                logprobs = plain if bits is None else _logprobs(self._paged[bits], rows)
                found = (
                    (mx.exp(plain) * (plain - logprobs)).sum(axis=-1),
                    plain.argmax(axis=-1) == logprobs.argmax(axis=-1),
                    mx.take_along_axis(logprobs, following, axis=-1),
                )
                mx.eval(found)
                sums[bits].append(found)
        columns = {bits: [mx.concatenate(column) for column in zip(*each, strict=True)] for bits, each in sums.items()}

        def perplexity(bits: int | None) -> float:
            return float(mx.exp(-columns[bits][2].mean()).item())

        for bits in self._bits:
            divergences, agrees, _ = columns[bits]
            yield (
                bits,
                Quality(
                    kl_mean=float(divergences.mean().item()),
                    kl_max=float(divergences.max().item()),
                    top1_agreement=float(agrees.mean().item()),
                    perplexity=perplexity(bits),
                    plain_perplexity=perplexity(None),
                ),
            )

    def quality_row(self, bits: int, quality: Quality) -> str:
        num_bytes, plain_bytes = self.bytes_per_token(bits), self.bytes_per_token(None)
        return (
            f"| {bits} bit | {num_bytes} of {plain_bytes} | {num_bytes / plain_bytes:.3f} | {quality.kl_mean:.5f} "
            f"| {quality.kl_max:.4f} | {quality.top1_agreement:.2%} | {quality.perplexity:.3f} "
            f"| {quality.plain_perplexity:.3f} |"
        )

    def speed_rows(self, num_streams: int, context: int, num_turns: int) -> Iterator[str]:
        streams = {bits: _Streams(paged, num_streams, context) for bits, paged in self._paged.items()}
        prefill: dict[int | None, list[float]] = {bits: [] for bits in streams}
        decode: dict[int | None, list[float]] = {bits: [] for bits in streams}
        for each in streams.values():
            each.prefill(0, self._max_pass_tokens)
            each.decode()
        firsts = range(0, context, self._max_pass_tokens)
        num_rounds = -(-num_turns // len(firsts))
        for first in list(firsts) * num_rounds:
            for bits, each in streams.items():
                prefill[bits].append(each.prefill(first, self._max_pass_tokens))
        for _ in range(num_turns):
            for bits, each in streams.items():
                decode[bits].append(each.decode())
        rates = {
            "decode": num_streams * STEPS_PER_BLOCK / statistics.median(decode[None]),
            "prefill": num_rounds * context / sum(prefill[None]),
        }
        for bits in self._bits:
            decode_ratio = statistics.median(a / b for a, b in zip(decode[None], decode[bits], strict=True))
            prefill_ratio = sum(prefill[None]) / sum(prefill[bits])
            yield (
                f"| {bits} bit | {num_streams} | {context} | {decode_ratio:.2f} | {rates['decode']:.1f} "
                f"| {prefill_ratio:.2f} | {rates['prefill']:.0f} |"
            )


def _logprobs(paged: "PagedModel", rows: Sequence[Any]) -> "mx.array":
    """(rows, vocabulary) log-probabilities after each of a sequence's next tokens, computed in one pass."""
    import mlx.core as mx

    logits = paged.prefill([], rows)
    assert logits is not None
    logits = logits.astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.eval(logprobs, paged.storage.arrays())
    return logprobs


class _Streams:
    """Sequences of one length. All tokens are the same: what is computed with them takes as long as with any other."""

    def __init__(self, paged: "PagedModel", num_streams: int, context: int) -> None:
        num_blocks = -(-context // BLOCK_SIZE) + 2
        self._paged = paged
        self._tables = [tuple(range(1 + i * num_blocks, 1 + (i + 1) * num_blocks)) for i in range(num_streams)]
        self._context = context
        paged.storage.grow(1 + num_streams * num_blocks)

    def prefill(self, first: int, num_tokens: int) -> float:
        """Compute a chunk of one of the streams; returns seconds."""
        import mlx.core as mx

        num_tokens = min(num_tokens, self._context - first)
        began = time.perf_counter()
        self._paged.prefill([([100] * num_tokens, first, self._tables[0])])
        mx.eval(self._paged.storage.arrays())
        return time.perf_counter() - began

    def decode(self) -> float:
        """Compute some steps of all streams at the end of their context; returns seconds."""
        import mlx.core as mx

        began = time.perf_counter()
        for _ in range(STEPS_PER_BLOCK):
            logits = self._paged.decode([100] * len(self._tables), [self._context] * len(self._tables), self._tables)
            mx.eval(logits, self._paged.storage.arrays())
        return time.perf_counter() - began


if __name__ == "__main__":
    main()
