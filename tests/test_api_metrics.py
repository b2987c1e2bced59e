"""/metrics and /health."""

import asyncio
from typing import Any

import httpx
import pytest
from fake_engine import FakeHost
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from mlxserve.api.app import create_app
from mlxserve.api.interval_histogram import IntervalHistogram
from mlxserve.api.metrics import Metrics
from mlxserve.config import ServerConfig
from mlxserve.core.generation import Timings, Usage
from mlxserve.core.stats import ChunkRecord, DiskStats, EngineStats, Observer, RequestRecord, StepRecord

TIMINGS = Timings(front_end=0.1, queue=0.2, prefill=0.3, delivery=0.05, decode=1.0, total=2.0)
NOT_STARTED = Timings(front_end=0.1, queue=0.0, prefill=0.0, delivery=0.0, decode=0.0, total=0.1)


def get(host: FakeHost, metrics: Metrics, path: str) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(host, ServerConfig(), metrics))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get(path)

    return asyncio.run(send())


def samples(text: str) -> dict[tuple[str, ...], float]:
    """(name, label values in order of label name) -> value, as a Prometheus server reads them."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def record(outcome: str, usage: Usage, timings: Timings = TIMINGS) -> RequestRecord:
    return RequestRecord("id", "fake", outcome, usage, timings)


def test_intervals_are_counted_as_the_librarys_own_histogram_counts_them() -> None:
    bounds = (0.1, 0.5, 1, 2.5)
    registry, expected = CollectorRegistry(), CollectorRegistry()
    ours = IntervalHistogram("latency_seconds", "Latency", bounds)
    registry.register(ours)
    theirs = Histogram("latency_seconds", "Latency", ("model",), buckets=bounds, registry=expected)
    for model, seconds in [("a", 0.1), ("a", 0.10001), ("a", 0.0), ("b", 2.5), ("a", 7.0), ("b", 1.0)]:
        ours.of(model).observe(seconds)
        theirs.labels(model).observe(seconds)
    created = [line for line in generate_latest(expected).splitlines() if b"_created" not in line]
    assert generate_latest(registry).splitlines() == created


def test_requests() -> None:
    metrics = Metrics()
    observer: Observer = metrics
    observer.request_finished(record("stop", Usage(10, 4, 3, num_reasoning_tokens=2)))
    observer.request_finished(record("length", Usage(5, 0, 2)))
    observer.request_finished(record("cancelled", Usage(7, 0, 1)))
    observer.request_finished(record("QueueFull", Usage(0, 0, 0), NOT_STARTED))
    observer.inter_token_latency("fake", 0.03)
    observer.inter_token_latency("fake", 0.2)
    response = get(FakeHost(), metrics, "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    found = samples(response.text)
    assert found["mlxserve_requests_total", "fake", "stop"] == 1
    assert found["mlxserve_requests_total", "fake", "QueueFull"] == 1
    assert found["mlxserve_prompt_tokens_total", "fake"] == 22
    assert found["mlxserve_generation_tokens_total", "fake"] == 6
    assert found["mlxserve_reasoning_tokens_total", "fake"] == 2
    # Whoever got no token has no time to its first one; whoever did not finish has no latency.
    assert found["mlxserve_time_to_first_token_seconds_count", "fake"] == 3
    assert found["mlxserve_time_to_first_token_seconds_sum", "fake"] == pytest.approx(3 * 0.65)
    assert found["mlxserve_queue_time_seconds_sum", "fake"] == pytest.approx(3 * 0.2)
    assert found["mlxserve_e2e_request_latency_seconds_count", "fake"] == 2
    assert found["mlxserve_e2e_request_latency_seconds_sum", "fake"] == pytest.approx(4.0)
    assert found["mlxserve_inter_token_latency_seconds_count", "fake"] == 2
    assert found["mlxserve_inter_token_latency_seconds_bucket", "0.05", "fake"] == 1

    assert found["mlxserve_front_end_time_seconds_sum", "fake"] == pytest.approx(3 * 0.1)
    assert found["mlxserve_request_prefill_time_seconds_sum", "fake"] == pytest.approx(3 * 0.3)
    assert found["mlxserve_first_token_delivery_time_seconds_sum", "fake"] == pytest.approx(3 * 0.05)
    assert found["mlxserve_cached_prompt_tokens_total", "fake"] == 4
    # Two of three have a second token: 1 s for two more tokens, 1 s for one.
    assert found["mlxserve_request_time_per_output_token_seconds_count", "fake"] == 2
    assert found["mlxserve_request_time_per_output_token_seconds_sum", "fake"] == pytest.approx(1.5)
    assert found["mlxserve_request_decode_time_seconds_count", "fake"] == 2
    assert found["mlxserve_request_prompt_tokens_count", "fake"] == 3
    assert found["mlxserve_request_errors_total", "QueueFull", "fake"] == 1
    assert ("mlxserve_request_errors_total", "cancelled", "fake") not in found


def step(kind: str, **fields: Any) -> StepRecord:
    parts: dict[str, Any] = {
        "decode": {"rows": ("a", "b")},
        "prefill": {"chunks": (ChunkRecord("c", 0, 30),)},
        "mixed": {"rows": ("a",), "chunks": (ChunkRecord("c", 0, 30), ChunkRecord("d", 8, 10))},
        "empty": {},
    }
    whole = {"rows": (), "chunks": (), "released": (), "num_draft_tokens": 0, "budget": None} | parts[kind] | fields
    return StepRecord(step_id=1, end=9.0, num_running=1, num_waiting=0, num_blocks_used=1, num_blocks_cached=0, **whole)


def test_steps() -> None:
    metrics = Metrics()
    for kind in ("decode", "decode", "prefill", "mixed", "empty"):
        record = step(kind, predicted=0.02, measured=0.03)
        assert record.kind == kind
        metrics.step_finished("fake", record)
    found = samples(metrics.render().decode())
    assert found["mlxserve_step_time_seconds_count", "decode", "fake"] == 2
    assert found["mlxserve_step_time_seconds_sum", "decode", "fake"] == pytest.approx(0.06)
    assert found["mlxserve_step_predicted_seconds_total", "mixed", "fake"] == pytest.approx(0.02)
    assert found["mlxserve_iteration_tokens_total_sum", "fake"] == 2 + 2 + 30 + 41
    assert found["mlxserve_iteration_tokens_total_count", "fake"] == 5


def test_loads_responses_and_memory() -> None:
    host, metrics = FakeHost(), Metrics()
    metrics.model_loaded("fake", "ok", 3.0)
    metrics.model_loaded("fake", "ModelLoadError", 0.5)
    assert get(host, metrics, "/nowhere").status_code == 404
    found = samples(get(host, metrics, "/metrics").text)
    assert found["mlxserve_model_loads_total", "fake", "ok"] == 1
    assert found["mlxserve_model_loads_total", "fake", "ModelLoadError"] == 1
    assert found["mlxserve_model_load_time_seconds_count", "fake"] == 1
    assert found["mlxserve_http_responses_total", "404"] == 1
    assert found["mlxserve_process_peak_memory_bytes",] > 1e6
    assert found["mlxserve_device_memory_peak_bytes",] >= found["mlxserve_device_memory_active_bytes",] >= 0


def test_engines() -> None:
    host = FakeHost()
    host.engine_stats["fake"] = EngineStats(
        num_running=3,
        num_waiting=2,
        num_blocks_used=5,
        num_blocks_cached=7,
        max_blocks=20,
        num_steps=99,
        num_preemptions=1,
        num_prefix_queried_tokens=1000,
        num_prefix_hit_tokens=640,
        num_draft_tokens=300,
        num_accepted_tokens=210,
        num_evicted_blocks=4,
        num_blocks_shared=2,
        disk=DiskStats(True, 7, 7000, num_loaded_tokens=448, num_writes=9, num_errors=2),
    )
    host.engine_stats["fallback"] = EngineStats(1, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0)
    found = samples(get(host, Metrics(), "/metrics").text)
    assert {name: value for name, value in found.items() if "fake" in name} == {
        ("mlxserve_num_requests_running", "fake"): 3,
        ("mlxserve_num_requests_waiting", "fake"): 2,
        ("mlxserve_kv_cache_blocks_used", "fake"): 5,
        ("mlxserve_kv_cache_blocks_shared", "fake"): 2,
        ("mlxserve_kv_cache_blocks_cached", "fake"): 7,
        ("mlxserve_kv_cache_blocks_max", "fake"): 20,
        ("mlxserve_kv_cache_evictions_total", "fake"): 4,
        ("mlxserve_steps_total", "fake"): 99,
        ("mlxserve_kv_cache_usage_ratio", "fake"): 0.25,
        ("mlxserve_prefix_cache_queries_total", "fake"): 1000,
        ("mlxserve_prefix_cache_hits_total", "fake"): 640,
        ("mlxserve_num_preemptions_total", "fake"): 1,
        ("mlxserve_spec_decode_num_draft_tokens_total", "fake"): 300,
        ("mlxserve_spec_decode_num_accepted_tokens_total", "fake"): 210,
        ("mlxserve_kv_disk_enabled", "fake"): 1,
        ("mlxserve_kv_disk_blocks", "fake"): 7,
        ("mlxserve_kv_disk_bytes", "fake"): 7000,
        ("mlxserve_kv_disk_hits_total", "fake"): 448,
        ("mlxserve_kv_disk_writes_total", "fake"): 9,
        ("mlxserve_kv_disk_errors_total", "fake"): 2,
    }
    assert found["mlxserve_kv_cache_usage_ratio", "fallback"] == 0
    assert found["mlxserve_num_requests_running", "fallback"] == 1
    assert found["mlxserve_kv_disk_enabled", "fallback"] == 0


def test_engines_are_asked_at_every_scrape() -> None:
    host, metrics = FakeHost(), Metrics()
    metrics.watch(host.stats)
    assert ("mlxserve_num_requests_running", "late") not in samples(metrics.render().decode())
    host.engine_stats["late"] = EngineStats(4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    assert samples(metrics.render().decode())["mlxserve_num_requests_running", "late"] == 4


@pytest.mark.parametrize(("healthy", "status"), [(True, 200), (False, 503)])
def test_health(healthy: bool, status: int) -> None:
    response = get(FakeHost(healthy=healthy), Metrics(), "/health")
    assert response.status_code == status
    assert response.json()["status"] == ("ok" if healthy else "error")
    assert ("out of memory" in response.json()["detail"]) is not healthy
