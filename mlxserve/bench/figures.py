"""From the answers of one run to its figures; times in seconds."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mlxserve.bench.client import Answer
from mlxserve.errors import TargetError

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Metric:
    """How a figure is shown, and which way is better."""

    key: str
    title: str
    scale: float = 1.0
    is_better_higher: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request must keep to count as good: seconds at most; None: anything will do."""

    ttft: float | None = None
    tpot: float | None = None

    def __bool__(self) -> bool:
        return self.ttft is not None or self.tpot is not None

    def __str__(self) -> str:
        named = (("TTFT", self.ttft), ("TPOT", self.tpot))
        return " and ".join(f"{name} of at most {value * 1000:g} ms" for name, value in named if value is not None)

    def are_kept_by(self, answer: Answer) -> bool:
        return (self.ttft is None or answer.ttft <= self.ttft) and (self.tpot is None or answer.tpot <= self.tpot)


_OUTPUT = Metric("output_tokens_mean", "tokens out")
_E2E = Metric("e2e_p50", "E2E p50 s")
_TTFT = Metric("ttft_p50", "TTFT p50 s")
_TPOT = Metric("tpot_p50", "TPOT ms", 1000)
GOODPUT = (
    Metric("goodput", "good requests/s", is_better_higher=True),
    Metric("goodput_share", "good %", 100, is_better_higher=True),
)
"""Shown beside the others where there are limits."""

METRICS = {
    "input-length": (
        _TTFT,
        Metric("prompt_tokens_per_second", "prompt tokens/s", is_better_higher=True),
        _TPOT,
        _E2E,
        _OUTPUT,
    ),
    "output-length": (_E2E, _TTFT, _TPOT, Metric("tokens_per_second", "tokens/s", is_better_higher=True), _OUTPUT),
    "concurrency": (
        Metric("tokens_per_second", "tokens/s", is_better_higher=True),
        _TTFT,
        _TPOT,
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
    "shared-prefix": (
        Metric("ttft_first", "TTFT first s"),
        Metric("ttft_later", "TTFT later p50 s"),
        Metric("first_to_later", "first / later", is_better_higher=True),
        Metric("cached_share", "found cached %", 100, is_better_higher=True),
    ),
    "revisit": (
        Metric("ttft_first", "TTFT first time s"),
        Metric("ttft_later", "TTFT again p50 s"),
        Metric("first_to_later", "first / again", is_better_higher=True),
        Metric("cached_share", "found cached %", 100, is_better_higher=True),
    ),
    "cold-start": (
        Metric("ready", "start to ready s"),
        Metric("ttft_first", "TTFT first request s"),
        Metric("ttft_later", "TTFT steady p50 s"),
        Metric("first_to_later", "first / steady"),
    ),
}
"""By workload; the first one decides which variant of a server is the better."""

REQUEST_WORKLOADS = ("input-length", "output-length", "concurrency")
"""Requests of one kind: their percentiles are also taken over all runs."""


def percentile(values: list[float], percent: float) -> float:
    """Linear between the two nearest ranks; 0 where there are no values."""
    return float(np.percentile(values, percent)) if values else 0.0


def request_figures(
    answers: list[Answer], num_output_tokens: int, limits: Limits | None = None, num_refused: int = 0
) -> dict[str, float]:
    """Of requests of one kind. Output tokens/s run from the first request sent to the last token received, prefill
    included. Requests that were refused have no times, and none of them was good.
    """
    num_tokens = sum(answer.num_tokens for answer in answers)
    seconds = max(answer.chunk_times[-1] for answer in answers) - min(answer.sent for answer in answers)
    values = {
        "ttft": [answer.ttft for answer in answers],
        "tpot": [answer.tpot for answer in answers if answer.num_tokens > 1],
        "itl": [gap for answer in answers for gap in answer.gaps],
        "e2e": [answer.e2e for answer in answers],
    }
    num_good = sum((limits or Limits()).are_kept_by(answer) for answer in answers)
    return {
        "tokens_per_second": num_tokens / seconds,
        "requests_per_second": len(answers) / seconds,
        "prompt_tokens_per_second": percentile([answer.num_prompt_tokens / answer.ttft for answer in answers], 50),
        **{f"{name}_p{percent}": percentile(each, percent) for name, each in values.items() for percent in PERCENTILES},
        "ttft_max": max(values["ttft"]),
        "tokens_per_chunk": num_tokens / sum(len(answer.chunk_times) for answer in answers),
        "output_tokens_mean": num_tokens / len(answers),
        **({"goodput": num_good / seconds, "goodput_share": num_good / (len(answers) + num_refused)} if limits else {}),
        "refused": num_refused,
        **length_figures(answers, num_output_tokens),
    }


def length_figures(answers: list[Answer], num_output_tokens: int) -> dict[str, float]:
    """Whether the work was the work that was asked for."""
    return {
        "early_stops": sum(answer.num_tokens < num_output_tokens for answer in answers),
        "overlong": sum(answer.num_tokens > num_output_tokens for answer in answers),
        "prompt_tokens_min": min(answer.num_prompt_tokens for answer in answers),
        "prompt_tokens_max": max(answer.num_prompt_tokens for answer in answers),
        "cached_tokens": sum(answer.num_cached_tokens for answer in answers),
    }


def mixed_figures(running: list[Answer], long: Answer) -> dict[str, float]:
    """The gaps of the running streams that touch the time from sending the long prompt to its first token, beside the
    median of those between the last stream's first token and the long prompt.

    Raises:
        TargetError: there are no such gaps.
    """
    quiet_from, quiet_to = max(answer.chunk_times[0] for answer in running), long.sent
    gaps = [gap for answer in running for gap in pairwise(answer.chunk_times)]
    quiet = [after - before for before, after in gaps if before >= quiet_from and after <= quiet_to]
    beside = [after - before for before, after in gaps if after > long.sent and before < long.chunk_times[0]]
    if not quiet or not beside:
        raise TargetError("the running streams ended before the long prompt had its answer, or never ran undisturbed")
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


def reuse_figures(first: list[Answer], later: list[Answer], num_output_tokens: int) -> dict[str, float]:
    """Of requests whose prompts begin as earlier ones did."""
    ttft_first = percentile([answer.ttft for answer in first], 50)
    ttft_later = percentile([answer.ttft for answer in later], 50)
    lengths = length_figures([*first, *later], num_output_tokens)
    cached = sum(answer.num_cached_tokens for answer in later)
    return {
        "ttft_first": ttft_first,
        "ttft_later": ttft_later,
        "first_to_later": ttft_first / ttft_later,
        "cached_share": cached / max(sum(answer.num_prompt_tokens for answer in later), 1),
        **lengths,
    }
