"""The histogram of inter-token latency, which every token of every stream goes to."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class Intervals:
    """Counts of one model. The library's own histogram takes five times as long for each, a lock among it."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Intervals up to each bound and above the one before it; the last are above all."""
        self.total = 0.0
        """Their sum in seconds."""

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self._bounds, seconds)] += 1
        self.total += seconds


class IntervalHistogram(Collector):
    """Intervals of each model. To be used by the thread that scrapes."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._models: dict[str, Intervals] = {}

    def of(self, model: str) -> Intervals:
        return self._models.setdefault(model, Intervals(self._bounds))

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=("model",))
        for model, intervals in self._models.items():
            buckets: list[tuple[str, float]] = []
            num_below = 0
            bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
            for bound, count in zip(bounds, intervals.counts, strict=True):
                num_below += count
                buckets.append((bound, num_below))
            family.add_metric((model,), buckets, intervals.total)
        yield family
