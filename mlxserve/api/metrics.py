"""Prometheus metrics: what requests took, and what the engines hold at the moment of a scrape."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlxserve.core.request import FinishReason
from mlxserve.core.stats import EngineStats, RequestRecord

# Buckets of vLLM's metrics of the same names, so that dashboards made for it fit.
_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_ITL_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
_REQUEST_BUCKETS = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)

_COMPLETED = frozenset({FinishReason.STOP.value, FinishReason.LENGTH.value})


class Metrics:
    """An Observer of the engine, with a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "mlxserve_requests", "Requests that ended, by outcome", ("model", "outcome"), registry=self.registry
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that ended")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated for requests that ended")
        self._time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Received to first token handed out", _TTFT_BUCKETS
        )
        self._inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Time between two tokens of a request", _ITL_BUCKETS
        )
        self._latency = self._histogram(
            "e2e_request_latency_seconds", "Received to finished, of completed requests", _REQUEST_BUCKETS
        )
        self._queue_time = self._histogram(
            "queue_time_seconds", "Put into the engine's inbox to first scheduled", _REQUEST_BUCKETS
        )

    def watch(self, stats: Callable[[], Mapping[str, EngineStats]]) -> None:
        """Ask `stats` for the engines' numbers, by model name, at every scrape from now on."""
        self.registry.register(EngineCollector(stats))

    def request_finished(self, record: RequestRecord) -> None:
        model = record.model
        self._requests.labels(model, record.outcome).inc()
        self._prompt_tokens.labels(model).inc(record.usage.num_prompt_tokens)
        self._generation_tokens.labels(model).inc(record.usage.num_generated_tokens)
        if record.usage.num_generated_tokens > 0:
            self._time_to_first_token.labels(model).observe(record.timings.time_to_first_token)
            self._queue_time.labels(model).observe(record.timings.queue)
        if record.outcome in _COMPLETED:
            self._latency.labels(model).observe(record.timings.total)

    def inter_token_latency(self, model: str, seconds: float) -> None:
        self._inter_token_latency.labels(model).observe(seconds)

    def render(self) -> bytes:
        """The text exposition format, version 0.0.4."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"mlxserve_{name}", text, ("model",), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"mlxserve_{name}", text, ("model",), buckets=buckets, registry=self.registry)


class EngineCollector(Collector):
    """The engines' own numbers, read when somebody scrapes."""

    def __init__(self, stats: Callable[[], Mapping[str, EngineStats]]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        gauges: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
            "num_requests_running": ("Requests being computed", lambda s: s.num_running),
            "num_requests_waiting": ("Requests that wait for their first step", lambda s: s.num_waiting),
            "kv_cache_blocks_used": ("KV blocks that running requests hold", lambda s: s.num_blocks_used),
            "kv_cache_usage_ratio": (
                "Share of the KV blocks that running requests hold",
                lambda s: s.num_blocks_used / s.max_blocks if s.max_blocks else 0.0,
            ),
            "kv_disk_enabled": (
                "1 while KV blocks are kept on disk, 0 if not or no longer",
                lambda s: bool(s.disk and s.disk.is_on),
            ),
            "kv_disk_blocks": ("KV blocks on disk", lambda s: s.disk.num_blocks if s.disk else 0),
            "kv_disk_bytes": ("Bytes of KV blocks on disk", lambda s: s.disk.num_bytes if s.disk else 0),
        }
        counters: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
            "prefix_cache_queries": (
                "Prompt tokens looked up in the prefix cache",
                lambda s: s.num_prefix_queried_tokens,
            ),
            "prefix_cache_hits": ("Prompt tokens found in the prefix cache", lambda s: s.num_prefix_hit_tokens),
            "spec_decode_num_draft_tokens": ("Drafts computed", lambda s: s.num_draft_tokens),
            "spec_decode_num_accepted_tokens": ("Drafts that were right", lambda s: s.num_accepted_tokens),
            "kv_disk_hits": (
                "Tokens whose KV blocks were brought back from disk",
                lambda s: s.disk.num_loaded_tokens if s.disk else 0,
            ),
            "kv_disk_writes": ("KV blocks written to disk", lambda s: s.disk.num_writes if s.disk else 0),
            "kv_disk_errors": (
                "KV blocks on disk that could not be read, written or used",
                lambda s: s.disk.num_errors if s.disk else 0,
            ),
            "num_preemptions": ("Requests put back to make room", lambda s: s.num_preemptions),
        }
        stats = self._stats()
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"mlxserve_{name}", text, labels=("model",))
            for model, engine in stats.items():
                gauge.add_metric((model,), value(engine))
            yield gauge
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(f"mlxserve_{name}", text, labels=("model",))
            for model, engine in stats.items():
                counter.add_metric((model,), value(engine))
            yield counter

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not ask engines that may not have started."""
        return ()
