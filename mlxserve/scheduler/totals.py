"""What a scheduler counted since it was made, and how fast its requests end."""

from dataclasses import dataclass

MIN_RETRY_AFTER = 1.0
MAX_RETRY_AFTER = 60.0


@dataclass(slots=True)
class Totals:
    """Taken over, as it is, by a scheduler that goes on for another one."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_evicted_before: int = 0
    """Blocks evicted by the schedulers before this one."""
    _finish_interval: float = MIN_RETRY_AFTER
    _last_finish: float | None = None

    def note_finish(self, now: float) -> None:
        """A request ended by itself."""
        if self._last_finish is not None:
            self._finish_interval = 0.8 * self._finish_interval + 0.2 * (now - self._last_finish)
        self._last_finish = now

    @property
    def retry_after(self) -> float:
        """Seconds until there should be room for another request: the mean time between two ends of late."""
        return min(max(self._finish_interval, MIN_RETRY_AFTER), MAX_RETRY_AFTER)
