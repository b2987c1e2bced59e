"""How much of each prompt a step computes."""

from mlxserve.core.request import Request
from mlxserve.scheduler.budget import PrefillBudget
from mlxserve.scheduler.plan import Plan

MIN_SHARE = 64
"""Prompt tokens that are not split between two prompts: each chunk has a cost of its own."""


class ChunkGrants:
    """Gives out a step's prefill budget, a prompt after the other."""

    def __init__(self, budget: PrefillBudget, block_size: int, max_num_seqs: int) -> None:
        self._budget = budget
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs

    def has_room(self, plan: Plan, start: int) -> bool:
        """Whether a chunk at position `start` may still be added."""
        return self._budget.num_tokens(plan.load(), start) > 0

    def grant(self, plan: Plan, request: Request, *, num_requests: int | None) -> None:
        """Plan the request's share of the budget, one of `num_requests` under way, or all that is left for None; more
        than planned before, never less."""
        start, wanted = request.num_computed_tokens, request.num_prefill_tokens
        allowed = self._budget.num_tokens(plan.load(without=request), start)
        if num_requests is not None:
            allowed = min(allowed, self._share(plan, allowed, num_requests))
        end = start + min(wanted, allowed)
        if wanted > allowed:
            # A chunk that ends with a block publishes all it wrote. A quarter of a chunk is not too much for that.
            aligned = end - end % self._block_size
            end = aligned if end - aligned <= allowed // 4 else end
        if end > start or wanted == 0:
            plan.chunk_ends[request] = max(end, plan.chunk_ends.get(request, end))

    def _share(self, plan: Plan, num_left: int, num_requests: int) -> int:
        """How many of the `num_left` tokens that the step may still prefill the next prompt in turn may take.

        Beside streams half of them: the oldest soon streams too. While nobody streams all prompts advance side by side:
        prompts that came together begin to stream together, and then decode as one batch. One that began before the
        others would have each of them wait for its steps, which take hardly less for one row than for all.
        """
        min_share = min(MIN_SHARE, self._budget.max_prefill_tokens // 2)
        if plan.streams:
            return max(num_left // 2, min_share)
        num_prompts = min(num_requests, self._max_num_seqs)
        return max(self._budget.max_prefill_tokens // num_prompts, min_share)
