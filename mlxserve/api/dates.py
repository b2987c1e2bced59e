"""Dates of the calendar, for clients."""

from datetime import UTC, datetime

_LAST = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)


def utc(unix_seconds: float) -> datetime:
    """The date of a Unix time, which may be anything a file system has; before 1970 and after 9999 the nearest one."""
    return datetime.fromtimestamp(min(max(unix_seconds, 0), _LAST.timestamp()), UTC)
