"""Which streams get drafts, whose, and how many: as many as make the streams faster by the cost model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mlxserve.core.request import Request, Speculation
from mlxserve.core.step import DecodeRow, DraftOrder
from mlxserve.scheduler.budget import PrefillBudget, StepLoad
from mlxserve.scheduler.ngram import HitRate, NgramIndex

MAX_DRAFTS = 15
"""Of one row."""
UNWEIGHED_DRAFTS = 7
"""Of a row whose request names its drafter."""
ROW_TOTALS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Rows of a step with drafts, theirs included. Few, since each number of rows is compiled for itself."""
MIN_GAIN = 0.05
"""By which drafts have to be expected to speed streams up: neither costs nor chances are known exactly."""
MODEL_PRIOR = 0.6
"""Chance of a draft model's guess before any was tried."""
MAX_INDEXED_TOKENS = 4096
"""Of one prompt in one step: some 10 ms."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """What a row carries: tokens, or an order to the draft model."""

    token_ids: tuple[int, ...] = ()
    order: DraftOrder | None = None

    def __len__(self) -> int:
        return len(self.token_ids) if self.order is None else self.order.num_tokens

    def cut(self, num_tokens: int) -> "Drafts":
        """The first `num_tokens` of them, or all if there are no more."""
        if num_tokens >= len(self):
            return self
        if self.order is None or num_tokens == 0:
            return Drafts(self.token_ids[:num_tokens])
        return Drafts(order=DraftOrder(num_tokens, self.order.missing))


NO_DRAFTS = Drafts()


@dataclass(slots=True)
class _State:
    """What is remembered of a request from its admission to its end."""

    index: NgramIndex
    model_rate: HitRate = field(default_factory=lambda: HitRate(MODEL_PRIOR))
    num_model_tokens: int = 0
    """Leading tokens whose keys and values the draft model has computed."""


@dataclass(slots=True)
class _Candidate:
    """Drafts that a stream could get; `chances` that each and all before it are right."""

    request: Request
    chances: list[float]
    is_from_model: bool
    num_tokens: int = 0
    """How many it gets."""


class Drafting:
    """Chooses drafts for streams, and learns from what becomes of them."""

    def __init__(self, budget: PrefillBudget, *, takes_drafts: bool = True, has_draft_model: bool = False) -> None:
        """`takes_drafts`: whether the runner does; otherwise nobody gets any."""
        self._budget = budget
        self._takes_drafts = takes_drafts
        self._has_draft_model = has_draft_model
        self._states: dict[Request, _State] = {}
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    def plan(self, streams: Sequence[Request]) -> dict[Request, Drafts]:
        """Drafts for the next step of requests of which only the last token is not computed.

        Requests that name their drafter get its drafts. For the others it is weighed: with E tokens expected of a step
        that takes T seconds, those drafts are taken, likeliest first, that make E / T largest. So a stream alone gets
        many, as computing a few more rows costs little; the more streams there are, the likelier a draft must be. No
        step is made longer than prompts may make it.
        """
        plain = StepLoad().with_rows([request.num_tokens - 1 for request in streams])
        best: list[_Candidate] = []
        best_rate = -1.0
        for asks_model in (False, True) if self._has_draft_model else (False,):
            found = (self._candidate(request, asks_model=asks_model) for request in streams)
            candidates = [candidate for candidate in found if candidate is not None]
            rate = self._allot(candidates, plain) if candidates else 0.0
            if rate > best_rate:
                best, best_rate = candidates, rate
        return {candidate.request: self._drafts(candidate) for candidate in best if candidate.num_tokens > 0}

    def admit(self, request: Request) -> None:
        """A request begins or resumes with the tokens that the cache holds, the draft model's part included."""
        state = self._state(request)
        state.num_model_tokens = request.num_computed_tokens

    def finish_chunk(self, request: Request, start: int, end: int) -> None:
        """A chunk was computed, by the draft model too."""
        state = self._state(request)
        if state.num_model_tokens == start:
            state.num_model_tokens = end

    def finish_row(self, row: DecodeRow, request: Request, num_accepted: int) -> None:
        """A row came back; its request's tokens are appended by now."""
        state = self._state(request)
        self.num_draft_tokens += row.num_drafts
        self.num_accepted_tokens += num_accepted
        request.num_draft_tokens += row.num_drafts
        request.num_accepted_tokens += num_accepted
        if row.draft_order is None:
            state.model_rate.fade()
            return
        num_drafts = row.draft_order.num_tokens
        # The last draft is nobody's input yet.
        state.num_model_tokens = row.start + 1 + min(num_accepted, num_drafts - 1)
        for index in range(min(num_accepted + 1, num_drafts)):
            state.model_rate.observe(index < num_accepted)

    def forget(self, request: Request) -> None:
        self._states.pop(request, None)

    def _state(self, request: Request) -> _State:
        state = self._states.get(request)
        if state is None:
            state = self._states[request] = _State(NgramIndex(request.token_ids, request.num_prompt_tokens))
        return state

    def _candidate(self, request: Request, *, asks_model: bool) -> _Candidate | None:
        """`asks_model`: whether the draft model is asked where the text promises less than it."""
        kind = request.speculation
        # The last token of an answer is never computed, so nothing is guessed past it.
        limit = request.max_total_tokens - request.num_tokens - 1
        limit = min(limit, MAX_DRAFTS if kind is Speculation.AUTO else UNWEIGHED_DRAFTS)
        if kind is Speculation.OFF or not self._takes_drafts or limit <= 0:
            return None
        state = self._state(request)
        found: list[_Candidate] = []
        if kind is not Speculation.DRAFT and state.index.advance(MAX_INDEXED_TOKENS):
            found.append(_Candidate(request, state.index.chances(limit), is_from_model=False))
        if self._has_draft_model and (kind is Speculation.DRAFT or (kind is Speculation.AUTO and asks_model)):
            rate = state.model_rate.value
            chances = [rate ** (index + 1) for index in range(limit)]
            found.append(_Candidate(request, chances, is_from_model=True))
        return max(found, key=lambda candidate: sum(candidate.chances), default=None)

    def _allot(self, candidates: list[_Candidate], plain: StepLoad) -> float:
        """Set how many drafts each candidate gets; returns the tokens a second that are expected then."""
        for candidate in candidates:
            if candidate.request.speculation is not Speculation.AUTO:
                candidate.num_tokens = len(candidate.chances)
        limit = self._budget.limit(plain)
        while any(c.num_tokens for c in candidates) and self._seconds(candidates, plain) > limit:
            for candidate in candidates:
                candidate.num_tokens //= 2
        seconds = self._seconds(candidates, plain)
        if seconds <= 0.0:  # nothing is measured yet
            return 0.0
        num_rows = plain.decode_rows + sum(candidate.num_tokens for candidate in candidates)
        expected = plain.decode_rows + sum(sum(c.chances[: c.num_tokens]) for c in candidates)
        weighed = [candidate for candidate in candidates if candidate.request.speculation is Speculation.AUTO]
        ranked = [(chance, candidate) for candidate in weighed for chance in candidate.chances]
        ranked.sort(key=lambda pair: -pair[0])
        best, best_rate = 0, expected / seconds
        wanted = (1 + MIN_GAIN) * best_rate
        for number, (chance, candidate) in enumerate(ranked, 1):
            candidate.num_tokens += 1
            expected += chance
            if num_rows + number in ROW_TOTALS or number == len(ranked):
                seconds = self._seconds(candidates, plain)
                if seconds > limit:
                    break
                if expected / seconds > max(best_rate, wanted):
                    best, best_rate = number, expected / seconds
        for candidate in weighed:
            candidate.num_tokens = 0
        for _, candidate in ranked[:best]:
            candidate.num_tokens += 1
        return best_rate

    def _seconds(self, candidates: Iterable[_Candidate], plain: StepLoad) -> float:
        """What a step with these drafts takes."""
        load = plain
        for candidate in candidates:
            start = candidate.request.num_tokens - 1
            load = load.with_drafts(start, candidate.num_tokens, by_model=candidate.is_from_model)
        return self._budget.predict(load)

    def _drafts(self, candidate: _Candidate) -> Drafts:
        request, state = candidate.request, self._state(candidate.request)
        if not candidate.is_from_model:
            return Drafts(tuple(_allowed(request, state.index.guess(candidate.num_tokens))))
        missing = request.token_ids[state.num_model_tokens : request.num_tokens - 1]
        return Drafts(order=DraftOrder(candidate.num_tokens, tuple(missing)))


def _allowed(request: Request, drafts: list[int]) -> list[int]:
    """The drafts up to the first that the request's grammar, if it has one, would not let the model choose."""
    constraint = request.constraint
    if constraint is None:
        return drafts
    unseen = request.token_ids[request.num_prompt_tokens + constraint.num_tokens :]
    return drafts[: max(0, constraint.num_accepted([*unseen, *drafts]) - len(unseen))]
