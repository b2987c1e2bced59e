"""Points and lengths of time as Ollama writes them: RFC 3339, nanoseconds, and durations in Go's notation."""

import math
import re
from datetime import UTC, datetime
from typing import Any

from pydantic_core import PydanticCustomError

FOREVER = "2318-01-01T00:00:00Z"
"""When a model expires that never does. Ollama, too, gives a date some 292 years ahead: clients parse it as a date."""

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+")


def timestamp(unix_time_ns: int) -> str:
    """RFC 3339 in UTC, to the nanosecond."""
    seconds, nanoseconds = divmod(unix_time_ns, 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{nanoseconds:09d}Z"


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def seconds_of(value: Any) -> float | None:
    """A duration from JSON: seconds as a number, or a string such as "5m", "1h30m", "300" (seconds) or "-1".

    Raises:
        PydanticCustomError: it is none.
    """
    if value is None:
        return None
    seconds: float | None = None
    if isinstance(value, str):
        seconds = _parse(value.strip())
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(value)
    if seconds is None or not math.isfinite(seconds):
        raise PydanticCustomError(
            "duration_type", 'Input should be a number of seconds or a string such as "5m"; negative for ever'
        )
    return seconds


def _parse(text: str) -> float | None:
    sign = -1.0 if text.startswith("-") else 1.0
    size = text[1:] if text[:1] in ("-", "+") else text
    if len(size) > 50:
        return None
    if _NUMBER.fullmatch(size):
        return sign * float(size)
    parts = list(_PART.finditer(size))
    if not parts or "".join(part[0] for part in parts) != size:
        return None
    return sign * sum(float(part[1]) * _UNITS[part[2]] for part in parts)
