"""Prometheus metrics: what requests and steps took, and what the engines hold at the moment of a scrape.

Names and buckets are those of vLLM's metrics where it has them, so that dashboards made for it fit.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlxserve.api.interval_histogram import IntervalHistogram, Intervals
from mlxserve.api.memory import MemoryCollector
from mlxserve.core.request import FinishReason
from mlxserve.core.stats import EngineStats, RequestRecord, StepRecord

if TYPE_CHECKING:
    from mlxserve.engine.model_host import LoadedInfo

Buckets = tuple[float, ...]

_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_ITL_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
_REQUEST_BUCKETS = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
_STAGE_BUCKETS = (0.001, 0.005, 0.01, *_REQUEST_BUCKETS)
_TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_LOAD_BUCKETS = (0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)

_COMPLETED = frozenset({FinishReason.STOP.value, FinishReason.LENGTH.value})
_NOT_ERRORS = _COMPLETED | {FinishReason.CANCELLED.value}


class Metrics:
    """An Observer of the engine, with a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._models: dict[str, _ModelMetrics] = {}
        self._requests = self._counter("requests", "Requests that ended, by outcome", "outcome")
        self._errors = self._counter("request_errors", "Requests that failed or were refused, by kind", "kind")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that ended")
        self._cached_tokens = self._counter("cached_prompt_tokens", "Of these, the ones found in the prefix cache")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated for requests that ended")
        self._reasoning_tokens = self._counter("reasoning_tokens", "Of these, tokens of the reasoning")
        self._time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Received to first token handed out", _TTFT_BUCKETS
        )
        self._inter_token_latency = IntervalHistogram(
            "mlxserve_inter_token_latency_seconds", "Time between two tokens of a request", _ITL_BUCKETS
        )
        self.registry.register(self._inter_token_latency)
        self._time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time between two tokens of a request", _ITL_BUCKETS
        )
        self._latency = self._histogram(
            "e2e_request_latency_seconds", "Received to finished, of completed requests", _REQUEST_BUCKETS
        )
        self._front_end_time = self._histogram(
            "front_end_time_seconds", "Received to put into the engine's inbox", _STAGE_BUCKETS
        )
        self._queue_time = self._histogram(
            "queue_time_seconds", "Put into the engine's inbox to first scheduled", _REQUEST_BUCKETS
        )
        self._prefill_time = self._histogram(
            "request_prefill_time_seconds", "First scheduled to first token", _REQUEST_BUCKETS
        )
        self._decode_time = self._histogram("request_decode_time_seconds", "First to last token", _REQUEST_BUCKETS)
        self._delivery_time = self._histogram(
            "first_token_delivery_time_seconds", "First token computed to handed out", _STAGE_BUCKETS
        )
        self._request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request that ended", _TOKEN_BUCKETS
        )
        self._request_generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens generated for a request that ended", _TOKEN_BUCKETS
        )
        self._step_time = self._histogram("step_time_seconds", "Time of a step, by kind", _ITL_BUCKETS, "kind")
        self._step_predicted = self._counter("step_predicted_seconds", "What steps should have taken", "kind")
        self._iteration_tokens = self._histogram(
            "iteration_tokens_total", "Tokens of a step, prefilled and decoded", _TOKEN_BUCKETS
        )
        self._loads = self._counter("model_loads", "Models loaded, or not, by outcome", "outcome")
        self._unloads = self._counter("model_unloads", "Models unloaded, by reason", "reason")
        self._load_time = self._histogram("model_load_time_seconds", "Time to load a model", _LOAD_BUCKETS)
        self._responses = Counter(
            "mlxserve_http_responses", "HTTP responses, by status", ("status",), registry=self.registry
        )
        self.registry.register(MemoryCollector())

    def watch(
        self, stats: Callable[[], Mapping[str, EngineStats]], loaded: "Callable[[], Sequence[LoadedInfo]]" = tuple
    ) -> None:
        """Ask `stats` for the engines' numbers, by model name, and `loaded` for the models, at every scrape."""
        self.registry.register(EngineCollector(stats))
        self.registry.register(ModelCollector(loaded))

    def request_finished(self, record: RequestRecord) -> None:
        model, usage, timings = record.model, record.usage, record.timings
        self._requests.labels(model, record.outcome).inc()
        if record.outcome not in _NOT_ERRORS:
            self._errors.labels(model, record.outcome).inc()
        self._prompt_tokens.labels(model).inc(usage.num_prompt_tokens)
        self._cached_tokens.labels(model).inc(usage.num_cached_tokens)
        self._generation_tokens.labels(model).inc(usage.num_generated_tokens)
        self._reasoning_tokens.labels(model).inc(usage.num_reasoning_tokens)
        if usage.num_prompt_tokens > 0:
            self._front_end_time.labels(model).observe(timings.front_end)
            self._request_prompt_tokens.labels(model).observe(usage.num_prompt_tokens)
            self._request_generation_tokens.labels(model).observe(usage.num_generated_tokens)
        if usage.num_generated_tokens > 0:
            self._time_to_first_token.labels(model).observe(timings.time_to_first_token)
            self._queue_time.labels(model).observe(timings.queue)
            self._prefill_time.labels(model).observe(timings.prefill)
            self._delivery_time.labels(model).observe(timings.delivery)
        if usage.num_generated_tokens > 1:
            self._decode_time.labels(model).observe(timings.decode)
            mean = timings.decode / (usage.num_generated_tokens - 1)
            self._time_per_output_token.labels(model).observe(mean)
        if record.outcome in _COMPLETED:
            self._latency.labels(model).observe(timings.total)

    def inter_token_latency(self, model: str, seconds: float) -> None:
        self._of(model).inter_token_latency.observe(seconds)

    def step_finished(self, model: str, step: StepRecord) -> None:
        self._of(model).step_finished(step)

    def model_loaded(self, model: str, outcome: str, seconds: float) -> None:
        self._loads.labels(model, outcome).inc()
        if outcome == "ok":
            self._load_time.labels(model).observe(seconds)

    def model_unloaded(self, model: str, reason: str) -> None:
        self._unloads.labels(model, reason).inc()

    def http_response(self, status: int) -> None:
        self._responses.labels(str(status)).inc()

    def render(self) -> bytes:
        """The text exposition format, version 0.0.4."""
        return generate_latest(self.registry)

    def _of(self, model: str) -> "_ModelMetrics":
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = _ModelMetrics(
                self._inter_token_latency.of(model),
                self._iteration_tokens.labels(model),
                {
                    kind: (self._step_time.labels(model, kind), self._step_predicted.labels(model, kind))
                    for kind in ("decode", "prefill", "mixed", "empty")
                },
            )
        return found

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"mlxserve_{name}", text, ("model", *labels), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Buckets, *labels: str) -> Histogram:
        return Histogram(f"mlxserve_{name}", text, ("model", *labels), buckets=buckets, registry=self.registry)


class _ModelMetrics:
    """What every step and token of one model goes to: looking a label up takes longer than counting."""

    def __init__(
        self, inter_token_latency: Intervals, iteration_tokens: Histogram, kinds: dict[str, tuple[Histogram, Counter]]
    ) -> None:
        self.inter_token_latency = inter_token_latency
        self._iteration_tokens = iteration_tokens
        self._kinds = kinds

    def step_finished(self, step: StepRecord) -> None:
        step_time, predicted = self._kinds[step.kind]
        step_time.observe(step.measured)
        predicted.inc(step.predicted)
        self._iteration_tokens.observe(step.num_prefill_tokens + len(step.rows))


class EngineCollector(Collector):
    """The engines' own numbers, read when somebody scrapes."""

    def __init__(self, stats: Callable[[], Mapping[str, EngineStats]]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        gauges: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
            "num_requests_running": ("Requests being computed", lambda s: s.num_running),
            "num_requests_waiting": ("Requests that wait for their first step", lambda s: s.num_waiting),
            "kv_cache_blocks_used": ("KV blocks that running requests hold", lambda s: s.num_blocks_used),
            "kv_cache_blocks_shared": ("Of these, the ones that several hold", lambda s: s.num_blocks_shared),
            "kv_cache_blocks_cached": (
                "KV blocks nobody holds that still answer prefix hits",
                lambda s: s.num_blocks_cached,
            ),
            "kv_cache_blocks_max": ("KV blocks the cache may grow to", lambda s: s.max_blocks),
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
            "kv_cache_evictions": ("Cached KV blocks that gave way to new ones", lambda s: s.num_evicted_blocks),
            "num_preemptions": ("Requests put back to make room", lambda s: s.num_preemptions),
            "steps": ("Steps given to the device", lambda s: s.num_steps),
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


class ModelCollector(Collector):
    """The models in memory, when somebody scrapes."""

    def __init__(self, loaded: "Callable[[], Sequence[LoadedInfo]]") -> None:
        self._loaded = loaded

    def collect(self) -> Iterable[Metric]:
        models = self._loaded()
        yield GaugeMetricFamily("mlxserve_models_loaded", "Models in memory", value=len(models))
        memory = GaugeMetricFamily(
            "mlxserve_model_memory_bytes", "What a model takes, by kind: weights, kv_cache", labels=("model", "kind")
        )
        for model in models:
            memory.add_metric((model.name, "weights"), model.weight_bytes)
            memory.add_metric((model.name, "kv_cache"), model.size - model.weight_bytes)
        yield memory
        reserved = GaugeMetricFamily(
            "mlxserve_model_reserved_bytes", "What of the memory budget a model takes", labels=("model",)
        )
        for model in models:
            reserved.add_metric((model.name,), model.reserved)
        yield reserved

    def describe(self) -> Iterable[Metric]:
        return ()
