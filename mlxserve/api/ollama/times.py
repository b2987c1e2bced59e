"""Points and lengths of time as Ollama writes them: RFC 3339, nanoseconds, and durations in Go's notation."""

from typing import Any

from pydantic_core import PydanticCustomError

from mlxserve.api.dates import utc
from mlxserve.config import parse_duration

FOREVER = "2318-01-01T00:00:00Z"
"""When a model expires that never does. Ollama, too, gives a date some 292 years ahead: clients parse it as a date."""


def timestamp(unix_time_ns: int) -> str:
    """RFC 3339 in UTC, to the nanosecond."""
    seconds, nanoseconds = divmod(unix_time_ns, 10**9)
    return f"{utc(seconds):%Y-%m-%dT%H:%M:%S}.{nanoseconds:09d}Z"


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def seconds_of(value: Any) -> float | None:
    """A duration from JSON: seconds as a number, or a string such as "5m", "1h30m", "300" (seconds) or "-1";
    as the setting keep_alive.

    Raises:
        PydanticCustomError: it is none.
    """
    if value is None:
        return None
    try:
        return parse_duration(value)
    except ValueError as error:
        raise PydanticCustomError(
            "duration_type", 'Input should be a number of seconds or a string such as "5m"; negative for ever'
        ) from error
