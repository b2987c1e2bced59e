"""Requests that wait to be started, in the order in which they should be."""

from bisect import insort
from collections.abc import Iterator

from mlxserve.core.request import Request

AGEING_SECONDS = 30.0
"""One level of priority is worth this much waiting, so urgent newcomers cannot hold back an older request for ever."""
MAX_PRIORITY = 10


class WaitingQueue:
    """Preempted requests first, then by arrival, moved forward or back by priority."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Goes over the queue as it is now; requests may be added and removed meanwhile."""
        return iter(tuple(self._requests))

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_rank)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)


def _rank(request: Request) -> tuple[bool, float]:
    priority = max(-MAX_PRIORITY, min(MAX_PRIORITY, request.priority))
    return request.num_preemptions == 0, request.arrival_time + priority * AGEING_SECONDS
