"""How many prompt tokens a step may compute beside the streams that run."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlxserve.core.step import ScheduledStep, StepResult
from mlxserve.scheduler.cost_model import LinearCost


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What the time of a step depends on. The context of a position is the positions it attends to, itself included."""

    num_chunks: int = 0
    prefill_tokens: int = 0
    prefill_context: int = 0
    """Sum of the contexts of all prefilled positions."""
    decode_rows: int = 0
    decode_context: int = 0
    """Sum of the contexts of all decode rows."""
    draft_rows: int = 0
    """Positions of drafts, which are computed as rows beside those of the streams themselves."""
    draft_context: int = 0
    draft_passes: int = 0
    """Passes of the draft model, one after the other."""

    @classmethod
    def of(cls, step: ScheduledStep) -> "StepLoad":
        load = cls()
        for chunk in step.prefill:
            load = load.with_chunk(chunk.start, len(chunk.token_ids))
        load = load.with_rows([row.start for row in step.decode])
        for row in step.decode:
            load = load.with_drafts(row.start, row.num_drafts, by_model=row.draft_order is not None)
        return load

    def with_chunk(self, start: int, num_tokens: int) -> "StepLoad":
        return replace(
            self,
            num_chunks=self.num_chunks + 1,
            prefill_tokens=self.prefill_tokens + num_tokens,
            prefill_context=self.prefill_context + num_tokens * start + num_tokens * (num_tokens + 1) // 2,
        )

    def with_rows(self, starts: Sequence[int]) -> "StepLoad":
        return replace(
            self,
            decode_rows=self.decode_rows + len(starts),
            decode_context=self.decode_context + sum(starts) + len(starts),
        )

    def with_drafts(self, start: int, num_drafts: int, *, by_model: bool) -> "StepLoad":
        """Add drafts of a row at position `start`; the draft model makes those of all its rows side by side."""
        if num_drafts == 0:
            return self
        return replace(
            self,
            draft_rows=self.draft_rows + num_drafts,
            draft_context=self.draft_context + num_drafts * (start + 1) + num_drafts * (num_drafts + 1) // 2,
            draft_passes=max(self.draft_passes, num_drafts if by_model else 0),
        )

    @property
    def prefill_features(self) -> tuple[int, int, int]:
        return self.num_chunks, self.prefill_tokens, self.prefill_context

    @property
    def decode_features(self) -> tuple[int, int, int, int, int]:
        """Several rows are told apart from one: products with a matrix begin at another cost than with a vector."""
        num_rows = self.decode_rows + self.draft_rows
        context = self.decode_context + self.draft_context
        return int(num_rows > 0), int(num_rows > 1), num_rows, context, self.draft_passes


@dataclass(frozen=True, slots=True)
class StepForecast:
    seconds: float
    """0 while nothing is measured."""
    budget: int | None
    """Prefill tokens it could take beside its streams, from the position of its first chunk; None: it has no chunk."""


class PrefillBudget:
    """Prefill tokens for one step: many when nobody decodes; else what keeps the predicted step time under the limit.

    The limit is `target_itl` seconds, or `decode_multiple` times the step without prefill where that is more (a machine
    that decodes at 90 ms would otherwise prefill 10 ms a step; well below three, so that no stream takes three times
    its own pace). `min_prefill_tokens` are given in any case: a prompt always advances, and smaller chunks would cost a
    forward pass each for next to nothing.

    Step times come from observe(): at warm-up for a spread of loads, then for every step as the engine runs.
    """

    def __init__(
        self,
        *,
        max_prefill_tokens: int,
        target_itl: float,
        decode_multiple: float = 2.2,
        min_prefill_tokens: int = 16,
    ) -> None:
        self.max_prefill_tokens = max_prefill_tokens
        self.min_prefill_tokens = min(min_prefill_tokens, max_prefill_tokens)
        self.target_itl = target_itl
        self.decode_multiple = decode_multiple
        self._prefill_cost = LinearCost()
        self._mixed_cost = LinearCost()
        """What chunks add to a step with decode rows in the same pass."""
        self._decode_cost = LinearCost()
        self._forecast: tuple[ScheduledStep, StepLoad] | None = None
        """The last step that forecast() was asked about: observe() needs its load again."""

    def observe(self, step: ScheduledStep, result: StepResult) -> None:
        """Learn from a step's measured times."""
        load = self._forecast[1] if self._forecast and self._forecast[0] is step else StepLoad.of(step)
        if result.decode_time is None:
            added = result.prefill_time - self._decode_cost.predict(load.decode_features)
            self._mixed_cost.observe(load.prefill_features, added)
            return
        if load.num_chunks > 0:
            self._prefill_cost.observe(load.prefill_features, result.prefill_time)
        if load.decode_rows > 0:
            self._decode_cost.observe(load.decode_features, result.decode_time)

    def predict(self, load: StepLoad) -> float:
        """Seconds a step of this load takes."""
        prefill_cost = self._prefill_cost_of(load)
        return prefill_cost.predict(load.prefill_features) + self._decode_cost.predict(load.decode_features)

    def limit(self, load: StepLoad) -> float:
        """Seconds a step with the streams of `load` may take, whatever stands beside them."""
        streams = StepLoad(decode_rows=load.decode_rows, decode_context=load.decode_context)
        return max(self.target_itl, self.decode_multiple * self.predict(streams))

    def forecast(self, step: ScheduledStep) -> StepForecast:
        """What is known of a step before it ran. Rows of prompts that end in it are no streams yet."""
        load = StepLoad.of(step)
        self._forecast = step, load
        seconds = self.predict(load)
        if not step.prefill:
            return StepForecast(seconds, None)
        streams = StepLoad().with_rows([row.start for row in step.decode if row.output_index > 0])
        return StepForecast(seconds, self.num_tokens(streams, step.prefill[0].start))

    def num_tokens(self, load: StepLoad, start: int) -> int:
        """How many tokens a chunk that begins at position `start` may have in a step that does `load` already."""
        room = self.max_prefill_tokens - load.prefill_tokens
        minimum = min(self.min_prefill_tokens, room) if load.prefill_tokens == 0 else 0
        if load.decode_rows == 0:
            num_tokens = room
        elif not self._prefill_cost_of(load).is_measured:
            num_tokens = minimum
        else:
            per_chunk, per_token, per_context = self._prefill_cost_of(load).weights
            spare = self.limit(load) - self.predict(load) - per_chunk
            num_tokens = bisect_right(
                range(1, room + 1),
                spare,
                key=lambda n: n * (per_token + per_context * start) + per_context * n * (n + 1) / 2,
            )
        return num_tokens if num_tokens >= self.min_prefill_tokens else minimum

    def _prefill_cost_of(self, load: StepLoad) -> LinearCost:
        is_mixed = load.decode_rows > 0 and self._mixed_cost.is_measured
        return self._mixed_cost if is_mixed else self._prefill_cost
