"""The lines that `--verbose` prints after an answer: Ollama's, and where the time to the first token went."""

from mlxserve.core.generation import Finished


def statistics_lines(finished: Finished, load_seconds: float = 0.0) -> list[str]:
    """Lines for one answer; those whose value is zero are left out.

    `load_seconds` is the time this command spent on loading the model for it, which the total includes.
    The prompt rate counts only tokens that were computed, not those found in the prefix cache.
    """
    usage, timings = finished.usage, finished.timings
    num_computed = usage.num_prompt_tokens - usage.num_cached_tokens
    rows = [
        ("total duration", _seconds(timings.total + load_seconds)),
        ("load duration", _seconds(load_seconds)),
        ("prompt eval count", _count(usage.num_prompt_tokens)),
        ("prompt cached count", _count(usage.num_cached_tokens)),
        ("prompt eval duration", _seconds(timings.prefill)),
        ("prompt eval rate", _rate(num_computed, timings.prefill)),
        ("eval count", _count(usage.num_generated_tokens)),
        ("eval duration", _seconds(timings.decode)),
        ("drafts accepted", _share(usage.num_accepted_tokens, usage.num_draft_tokens)),
        # The first token belongs to the prefill; the decode time is that of the others.
        ("eval rate", _rate(usage.num_generated_tokens - 1, timings.decode)),
    ]
    first = _seconds(timings.time_to_first_token)
    if first:
        stages = {
            "front end": timings.front_end,
            "queue": timings.queue,
            "prefill": timings.prefill,
            "delivery": timings.delivery,
        }
        parts = ", ".join(f"{name} {format_duration(seconds)}" for name, seconds in stages.items())
        rows.append(("time to first token", f"{first} ({parts})"))
    return [f"{name + ':':<21} {value}" for name, value in rows if value]


def format_duration(seconds: float) -> str:
    """As Go prints durations: 1m2.5s, 4.648123s, 342.546ms, 12µs."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f}µs"
    if seconds < 1:
        return f"{_trim(seconds * 1e3, 3)}ms"
    minutes, rest = divmod(round(seconds, 6), 60)
    hours, minutes = divmod(int(minutes), 60)
    prefix = f"{hours}h{minutes}m" if hours else f"{minutes}m" if minutes else ""
    return f"{prefix}{_trim(rest, 6)}s"


def _trim(value: float, places: int) -> str:
    return f"{value:.{places}f}".rstrip("0").rstrip(".")


def _seconds(value: float) -> str:
    return format_duration(value) if value > 0 else ""


def _count(value: int) -> str:
    return f"{value} token(s)" if value > 0 else ""


def _share(count: int, total: int) -> str:
    return f"{count} of {total} ({count / total:.0%})" if total > 0 else ""


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds:.2f} tokens/s" if count > 0 and seconds > 0 else ""
