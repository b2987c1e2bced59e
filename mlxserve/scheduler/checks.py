"""What a request must be to be taken in, and what must hold between the scheduler's books."""

from collections.abc import Mapping, Sequence

from mlxserve.core.request import Request, RequestStatus
from mlxserve.errors import ContextLengthExceeded, InvalidParameter
from mlxserve.kv.block_pool import CacheIntegrityError


def check_length(request: Request, limit: int | None) -> None:
    """`limit`: the tokens that prompt and answer may have together, by what the cache holds; None for no limit.

    Raises:
        InvalidParameter: the prompt is empty.
        ContextLengthExceeded: the prompt leaves no room for an answer, or the request does not fit even alone.
    """
    if request.num_tokens == 0:
        raise InvalidParameter("the prompt is empty; it needs one token at least", param="prompt")
    if request.max_total_tokens <= request.num_tokens:
        raise ContextLengthExceeded(
            f"the prompt has {request.num_tokens} tokens and prompt and answer together may have "
            f"{request.max_total_tokens}: shorten the prompt",
            num_tokens=request.num_tokens + 1,
            limit=request.max_total_tokens,
        )
    if limit is not None and request.max_total_tokens > limit:
        raise ContextLengthExceeded(
            f"prompt and answer may have {request.max_total_tokens} tokens and the KV cache holds {limit}: "
            "shorten the prompt, lower max_tokens, or give the cache more memory (kv_cache_bytes)",
            num_tokens=request.max_total_tokens,
            limit=limit,
        )


def check_queues(
    requests: Mapping[str, Request], running: Sequence[Request], waiting: Sequence[Request], max_num_seqs: int
) -> None:
    """Raises CacheIntegrityError unless queues and request states agree."""
    for status, queue in ((RequestStatus.RUNNING, running), (RequestStatus.WAITING, waiting)):
        for request in queue:
            if request.status is not status or requests.get(request.request_id) is not request:
                raise CacheIntegrityError(f"request {request.request_id} is {status.value} and not known as such")
            if request.num_uncomputed_tokens < 1:
                raise CacheIntegrityError(f"request {request.request_id} has no token left to compute")
            if status is RequestStatus.WAITING and request.num_computed_tokens > 0:
                raise CacheIntegrityError(f"request {request.request_id} waits and has computed tokens")
    if len(running) + len(waiting) != len(requests):
        raise CacheIntegrityError("some request is neither running nor waiting, or both")
    if len(running) > max_num_seqs:
        raise CacheIntegrityError("more requests run than max_num_seqs allows")
