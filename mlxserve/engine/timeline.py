"""When one request reached each stage. All times are time.monotonic() seconds."""

import time
from dataclasses import dataclass, field

from mlxserve.core.generation import Timings


@dataclass(slots=True)
class Timeline:
    """Stamps of one request, in the order they are set; None means not reached.

    Stages are differences of neighbouring stamps, so they add up by construction: whatever a user waited for
    is in exactly one of them.
    """

    received: float = field(default_factory=time.monotonic)
    tokenised: float | None = None
    """Chat template and tokenizer done, put into the engine's inbox."""
    scheduled: float | None = None
    """First step that computed some of it began."""
    first_token: float | None = None
    """First token computed."""
    first_delivery: float | None = None
    """First token handed to the dialect."""
    last_token: float | None = None
    finished: float | None = None

    def timings(self) -> Timings:
        """The stages of a finished request; a stage it never reached took no time, the one it ended in got the rest."""
        end = self.finished if self.finished is not None else time.monotonic()
        tokenised = _first_set(self.tokenised, end)
        scheduled = _first_set(self.scheduled, end)
        first_token = _first_set(self.first_token, end)
        return Timings(
            front_end=tokenised - self.received,
            queue=scheduled - tokenised,
            prefill=first_token - scheduled,
            delivery=_first_set(self.first_delivery, end) - first_token,
            decode=_first_set(self.last_token, first_token) - first_token,
            total=end - self.received,
        )


def _first_set(stamp: float | None, default: float) -> float:
    return default if stamp is None else stamp
