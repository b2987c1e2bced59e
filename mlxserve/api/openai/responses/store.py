"""The responses that the server remembers, so that clients can go on from them and look at them again."""

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from mlxserve.api.openai.responses.items import Item

MAX_RESPONSES = 1000
MAX_BYTES = 64_000_000


@dataclass(frozen=True, slots=True)
class StoredResponse:
    response: dict[str, Any]
    input_items: list[dict[str, Any]]
    """What the request itself brought, as it is listed."""
    conversation: tuple[Item, ...]
    """All items from the beginning up to this response's own, which the next request goes on from."""


class ResponseStore:
    """In memory, bounded by number and by size as JSON; the ones not used for the longest time go first.

    A conversation counts in full with every response in it, so memory is never more than the bound says.
    """

    def __init__(self, *, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def add(self, stored: StoredResponse) -> None:
        """Remember a response, and forget others if need be. One larger than the bound is not remembered."""
        num_bytes = len(json.dumps(stored.response)) + sum(len(item.model_dump_json()) for item in stored.conversation)
        if num_bytes > self._max_bytes:
            return
        self._stored[stored.response["id"]] = stored, num_bytes
        self._num_bytes += num_bytes
        while len(self._stored) > self._max_responses or self._num_bytes > self._max_bytes:
            _, (_, freed) = self._stored.popitem(last=False)
            self._num_bytes -= freed

    def get(self, response_id: str) -> StoredResponse | None:
        if response_id not in self._stored:
            return None
        self._stored.move_to_end(response_id)
        return self._stored[response_id][0]

    def remove(self, response_id: str) -> bool:
        """Forget a response; False if there was none."""
        if response_id not in self._stored:
            return False
        _, num_bytes = self._stored.pop(response_id)
        self._num_bytes -= num_bytes
        return True
