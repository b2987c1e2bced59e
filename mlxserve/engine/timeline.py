"""When one request reached each stage. All times are time.monotonic() seconds."""

import time
from dataclasses import dataclass, field

from mlxserve.core.generation import Arrival, Timings


@dataclass(frozen=True, slots=True)
class Stages:
    """Seconds of a request's life by what it was waiting for; they add up to `total`."""

    front_end: float
    queue: float
    prefill: float
    decode: float
    """First to last token, times in which it was preempted included."""
    delivery: float
    """The last token computed to written out: the reader and the connection."""

    @property
    def total(self) -> float:
        return self.front_end + self.queue + self.prefill + self.decode + self.delivery


@dataclass(slots=True)
class Timeline:
    """Stamps of one request, in the order they are set; None means not reached.

    Stages are differences of neighbouring stamps, so they add up by construction: whatever a user waited for
    is in exactly one of them.
    """

    received: float = field(default_factory=time.monotonic)
    """Its headers were there; in this process, it was asked for."""
    parsed: float | None = None
    loaded: float | None = None
    """Its model was there; from here on its deadline and its place in the queue count."""
    templated: float | None = None
    tokenised: float | None = None
    """Chat template and tokenizer done, put into the engine's inbox."""
    scheduled: float | None = None
    """First step that computed some of it began."""
    first_token: float | None = None
    """First token computed."""
    first_delivery: float | None = None
    """First token handed to the dialect."""
    last_token: float | None = None
    computed: float | None = None
    """The engine was done with it."""
    finished: float | None = None
    """Its last event was made for the dialect."""
    delivered: float | None = None
    """The dialect's answer was written out, or given up."""

    @classmethod
    def of(cls, arrival: Arrival | None) -> "Timeline":
        now = time.monotonic()
        if arrival is None:
            return cls(received=now, loaded=now)
        return cls(received=arrival.received, parsed=arrival.parsed, loaded=_first_set(arrival.loaded, now))

    @classmethod
    def waiting(cls, arrival: Arrival) -> "Timeline":
        """Of a request whose model is not there yet."""
        return cls(received=arrival.received, parsed=arrival.parsed)

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
            load=0.0 if self.parsed is None or self.loaded is None else self.loaded - self.parsed,
        )

    def stages(self) -> Stages:
        """Where all of its time went, until now if it is not over. The stage it is in, or ended in, has the rest."""
        end = _first_set(self.delivered, time.monotonic())
        computed = _first_set(self.computed, _first_set(self.finished, end))
        tokenised = _first_set(self.tokenised, computed)
        scheduled = _first_set(self.scheduled, computed)
        first_token = _first_set(self.first_token, computed)
        return Stages(
            front_end=tokenised - self.received,
            queue=scheduled - tokenised,
            prefill=first_token - scheduled,
            decode=computed - first_token,
            delivery=end - computed,
        )

    @property
    def state(self) -> str:
        """front_end, loading, queued, prefill, decode, delivering or done."""
        if self.delivered is not None:
            return "done"
        if self.computed is not None or self.finished is not None:
            return "delivering"
        if self.first_token is not None:
            return "decode"
        if self.scheduled is not None:
            return "prefill"
        if self.tokenised is not None:
            return "queued"
        return "loading" if self.parsed is not None and self.loaded is None else "front_end"

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds; None while no token was handed out."""
        return None if self.first_delivery is None else self.first_delivery - self.received


def _first_set(stamp: float | None, default: float) -> float:
    return default if stamp is None else stamp
