"""From what was asked for to cells: sizes that can be measured, one cell for each combination that makes sense."""

from collections.abc import Callable
from dataclasses import dataclass

from mlxserve.bench.workloads import STREAM_PROMPT_TOKENS, Cell
from mlxserve.errors import BenchError, BenchOptionError

MAX_TOKENS = 1_000_000
MAX_STREAMS = 1000
MAX_REQUESTS = 100_000
MIN_PROMPT_TOKENS = 8
"""Fewer leave no room for what a tokenizer adds by itself."""
MIN_OUTPUT_TOKENS = 2
"""With one there is neither ITL nor TPOT."""
MIN_REUSES = 2
MIXED_STREAMS = 4

WORKLOADS = (
    "input-length",
    "output-length",
    "concurrency",
    "mixed",
    "multi-turn",
    "shared-prefix",
    "cold-start",
)
OF_ANY_SERVER = tuple(name for name in WORKLOADS if name != "cold-start")


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the options say; an empty tuple or None is a workload's own choice."""

    prompts: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    streams: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    num_requests: int | None = None
    """Of each stream, or with a rate in all."""
    is_quick: bool = False

    def check(self, max_context: int | None) -> None:
        """
        Raises:
            BenchError: a size is absurd, or no sequence of `max_context` tokens holds a prompt and its answer.
        """
        for name, values, least, most in (
            ("--prompt", self.prompts, MIN_PROMPT_TOKENS, MAX_TOKENS),
            ("--output-tokens", self.outputs, MIN_OUTPUT_TOKENS, MAX_TOKENS),
            ("--streams", self.streams, 1, MAX_STREAMS),
            ("--requests", () if self.num_requests is None else (self.num_requests,), 1, MAX_REQUESTS),
        ):
            for value in values:
                if not least <= value <= most:
                    raise BenchOptionError(f"{name} must be from {least:,} to {most:,}, not {value:,}")
        for rate in self.rates:
            if not 0.001 <= rate <= 10_000:
                raise BenchOptionError(f"--rate must be from 0.001 to 10,000 requests a second, not {rate:g}")
        longest = max(self.prompts, default=0) + max(self.outputs, default=0)
        if max_context is not None and longest > max_context:
            raise BenchError(
                f"a prompt and its answer take {longest:,} tokens, and the model has a context of {max_context:,}; "
                "lower --prompt or --output-tokens"
            )


def cells(workloads: tuple[str, ...], sizes: Sizes) -> list[Cell]:
    """The cells of workloads, in this order.

    Raises:
        BenchError: an unknown workload, or sizes that do not go together.
    """
    for name in workloads:
        if name not in WORKLOADS:
            raise BenchOptionError(f"no workload {name!r}; there are {', '.join(WORKLOADS)}")
    if sizes.rates and (others := [name for name in workloads if name != "concurrency"]):
        raise BenchOptionError(f"--rate is of the workload concurrency, not of {', '.join(others)}")
    if sizes.rates and sizes.streams:
        raise BenchOptionError("--streams is a closed loop and --rate an open one; give one of them")
    return list(dict.fromkeys(cell for name in workloads for cell in _MAKERS[name](sizes)))


def _input_length(sizes: Sizes) -> list[Cell]:
    lengths = sizes.prompts or ((129, 512) if sizes.is_quick else (129, 256, 512, 1024, 2272))
    return [
        Cell("input-length", _one(sizes.streams, 1), length, _one(sizes.outputs, 32), _requests(sizes, 3))
        for length in lengths
    ]


def _output_length(sizes: Sizes) -> list[Cell]:
    lengths = sizes.outputs or ((32, 64) if sizes.is_quick else (32, 64, 96, 128))
    return [
        Cell("output-length", _one(sizes.streams, 1), _one(sizes.prompts, 250), length, _requests(sizes, 3))
        for length in lengths
    ]


def _concurrency(sizes: Sizes) -> list[Cell]:
    prompts = sizes.prompts or ((128,) if sizes.is_quick else (128, 1024))
    output = _one(sizes.outputs, 16 if sizes.is_quick else 64)
    if sizes.rates:
        requests = sizes.num_requests or (8 if sizes.is_quick else 32)
        return [
            Cell("concurrency", 1, prompt, output, requests, rate=rate) for prompt in prompts for rate in sizes.rates
        ]
    streams = sizes.streams or ((1, 4) if sizes.is_quick else (1, 2, 4, 8, 16))
    return [Cell("concurrency", count, prompt, output, _requests(sizes, 2)) for prompt in prompts for count in streams]


def _mixed(sizes: Sizes) -> list[Cell]:
    prompts = sizes.prompts or ((512,) if sizes.is_quick else (2000,))
    output = _one(sizes.outputs, 16)
    return [Cell("mixed", count, prompt, output) for prompt in prompts for count in sizes.streams or (MIXED_STREAMS,)]


def _multi_turn(sizes: Sizes) -> list[Cell]:
    prompts = sizes.prompts or ((512,) if sizes.is_quick else (2000,))
    return [Cell("multi-turn", 1, prompt, _one(sizes.outputs, 32)) for prompt in prompts]


def _shared_prefix(sizes: Sizes) -> list[Cell]:
    prompts = sizes.prompts or ((512,) if sizes.is_quick else (2048,))
    requests = max(_requests(sizes, 5), MIN_REUSES)
    return [
        Cell("shared-prefix", 1, prompt, _one(sizes.outputs, 16), requests, num_shared_tokens=prompt * 7 // 8)
        for prompt in prompts
    ]


def _cold_start(sizes: Sizes) -> list[Cell]:
    requests = max(_requests(sizes, 5), MIN_REUSES)
    prompts = sizes.prompts or (STREAM_PROMPT_TOKENS,)
    return [Cell("cold-start", 1, prompt, _one(sizes.outputs, 32), requests) for prompt in prompts]


def _one(values: tuple[int, ...], default: int) -> int:
    """The one value of an option that this workload does not vary.

    Raises:
        BenchError: there are several.
    """
    if len(values) > 1:
        raise BenchOptionError(
            f"this workload varies something else and takes one value, not {', '.join(map(str, values))}"
        )
    return values[0] if values else default


def _requests(sizes: Sizes, default: int) -> int:
    return sizes.num_requests or (1 if sizes.is_quick else default)


_MAKERS: dict[str, Callable[[Sizes], list[Cell]]] = {
    "input-length": _input_length,
    "output-length": _output_length,
    "concurrency": _concurrency,
    "mixed": _mixed,
    "multi-turn": _multi_turn,
    "shared-prefix": _shared_prefix,
    "cold-start": _cold_start,
}
