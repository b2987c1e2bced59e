"""Several models on one host: streams beside loads, unloading, eviction, aliases, memory, and what is told of it."""

import asyncio
import gc
import itertools
import logging
import threading
import time
import types
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny_models
import tiny_tokenizers
from helpers_engine import TIMEOUT, Gate, Recorder, expected_text, held, on_loop
from helpers_http import serving
from helpers_scheduler import BLOCK_SIZE
from helpers_served import BUDGET, FakeBuild, get, make_generation_request, read

from mlxserve.config import EngineConfig
from mlxserve.core.generation import TextDelta
from mlxserve.engine.model_host import ModelHost
from mlxserve.errors import CapacityError, EngineDead, ModelLoadError, ModelNotFound
from mlxserve.store.registry import Registry


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> FakeBuild:
    return FakeBuild(monkeypatch)


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    file = tmp_path / "models.toml"
    for name in ("one", "two", "three"):
        (tmp_path / f"{name}.gguf").touch()
    entries = {"one": "one", "two": "two", "three": "three", "uno": "one"}
    file.write_text(
        "".join(f"[{name}]\nsource = {{ path = '{tmp_path}/{at}.gguf' }}\n" for name, at in entries.items())
    )
    with file.open("a") as stream:
        stream.write("context_length = 50\nsampling = { temperature = 0.25 }\n")
        stream.write("template = '{{ messages }}uno'\nstop = ['Halt']\n")
    return Registry(user_file=file)


@asynccontextmanager
async def hosting(registry: Registry, observer: Recorder | None = None, **settings: Any) -> AsyncIterator[ModelHost]:
    host = ModelHost(EngineConfig(block_size=BLOCK_SIZE, **settings), registry, observer=observer)
    await host.start()
    try:
        yield host
    finally:
        await asyncio.wait_for(host.close(timeout=0.0), TIMEOUT)


def names(host: ModelHost) -> list[str]:
    return [info.name for info in host.loaded()]


@on_loop
async def test_streams_go_on_while_another_model_is_loaded(
    build: FakeBuild, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that moves by a second with each look at it: steps and pieces of a load take a few seconds each."""
    ticks = itertools.count()
    clock = types.SimpleNamespace(monotonic=lambda: float(next(ticks)))
    monkeypatch.setattr("mlxserve.engine.engine_thread.time", clock)
    async with hosting(registry) as host:
        model, thread = await get(host, "one"), host._thread
        stock, steps = build._load_pieces, []

        def load_pieces(*arguments: Any) -> Any:
            for _ in range(20):
                steps.append(host.stats()["one"].num_steps)
                yield
            return (yield from stock(*arguments))

        monkeypatch.setattr("mlxserve.engine.loading.loader.load_pieces", load_pieces)
        with held(Gate()) as gate:
            assert thread is not None
            thread.call(gate)
            generation = await model.generate(make_generation_request(max_tokens=None))
            getting = asyncio.create_task(get(host, "two"))
            while thread._inbox.qsize() < 2:  # noqa: ASYNC110 -- worker threads look at the files
                await asyncio.sleep(0.001)
        await getting
        generation.cancel()
    assert len(steps) == 20
    assert max(Counter(steps).values()) <= 3, "pieces of the load without a step between them"


@on_loop
async def test_what_counts_against_the_budget(
    build: FakeBuild, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="mlxserve")
    budget = 10**15
    async with hosting(registry, memory_budget=budget, max_loaded_models=2, kv_cache_bytes=1000) as host:
        assert host.locations() == set()
        await get(host, "one")
        (info,) = host.loaded()
        assert info.reserved == info.weight_bytes + 1000
        assert not info.on_gpu
        assert host.locations() == {registry.resolve("one", allow_paths=False).location}
    assert "device: fake, 1000000.00 GB for models (memory_budget)" in caplog.text
    assert "memory_budget is 1000000.0 GB and this machine has" in caplog.text


@on_loop
async def test_a_lease_keeps_a_model_and_its_end_lets_it_go(build: FakeBuild, registry: Registry) -> None:
    recorder = Recorder()
    async with hosting(registry, recorder, keep_alive=0.0) as host:
        lease = await host.acquire("one")
        other = await host.acquire("one")
        other.release()
        other.release()
        (info,) = host.loaded()
        assert (info.name, info.expires_at, info.context_length) == ("one", None, 200)
        answer = await read(await lease.model.generate(make_generation_request()))
        assert answer.text == expected_text("the cat", 8)
        lease.release()
        assert names(host) == []
        with pytest.raises(EngineDead, match="unloaded"):
            await asyncio.wait_for(_until_refused(lease.model), TIMEOUT)
        await get(host, "one")
    assert build.loads == ["one", "one"]
    assert recorder.unloads == [("one", "expired")]


async def _until_refused(model: Any) -> None:
    while True:
        await read(await model.generate(make_generation_request()))


@on_loop
async def test_unload_waits_for_running_requests(build: FakeBuild, registry: Registry) -> None:
    async with hosting(registry) as host:
        with pytest.raises(ModelNotFound, match="one is not loaded"):
            await host.unload("one")
        lease = await host.acquire("one")
        with held(Gate()) as gate:
            build.runners[0].before_step = gate
            reading = asyncio.create_task(read(await lease.model.generate(make_generation_request())))
            await gate.arrival()
            unloading = asyncio.create_task(host.unload("one"))
            late = asyncio.create_task(get(host, "one"))
            await asyncio.sleep(0.01)
            assert not unloading.done()
        assert (await reading).text == expected_text("the cat", 8)
        lease.release()
        await asyncio.wait_for(unloading, TIMEOUT)
        model = await asyncio.wait_for(late, TIMEOUT)
        assert (await read(await model.generate(make_generation_request()))).text == expected_text("the cat", 8)
    assert build.loads == ["one", "one"]


@on_loop
async def test_preload_and_keep_alive(build: FakeBuild, registry: Registry) -> None:
    async with hosting(registry, keep_alive=300.0) as host:
        await host.preload("one")
        await host.preload("two", keep_alive=-1.0)
        first, second = host.loaded()
        assert first.expires_at == pytest.approx(time.time() + 300.0, abs=TIMEOUT)
        assert second.expires_at is None
        await host.preload("two", keep_alive=0.0)
        assert names(host) == ["one"]


@on_loop
async def test_a_model_makes_room_for_another(build: FakeBuild, registry: Registry) -> None:
    build.sizes = {"one": BUDGET // 4, "two": BUDGET // 4, "three": BUDGET // 2}
    recorder = Recorder()
    async with hosting(registry, recorder, kv_cache_bytes=1000) as host:
        for name in ("one", "two", "one"):
            await host.preload(name)
        assert names(host) == ["one", "two"]
        await host.preload("three")
        assert names(host) == ["one", "three"]
    assert recorder.unloads == [("two", "evicted")]


@on_loop
async def test_what_can_never_fit_is_refused(build: FakeBuild, registry: Registry) -> None:
    build.sizes = {"one": 700, "two": 2000, "three": 500}
    async with hosting(registry, memory_budget=1000, kv_cache_bytes=10, pin=("one",)) as host:
        with pytest.raises(ModelLoadError, match="two needs"):
            await get(host, "two")
        await host.preload("one", keep_alive=0.0)
        with pytest.raises(CapacityError, match="one, which must stay"):
            await get(host, "three")
        assert names(host) == ["one"]


@on_loop
async def test_pins_are_checked_when_the_host_starts(build: FakeBuild, registry: Registry) -> None:
    host = ModelHost(EngineConfig(pin=("nothing",)), registry)
    with pytest.raises(ModelNotFound):
        await host.start()
    await host.close(timeout=0.0)


@on_loop
async def test_names_of_one_location_share_its_engine(build: FakeBuild, registry: Registry) -> None:
    recorder = Recorder()
    async with hosting(registry, recorder) as host:
        first, second = await get(host, "one"), await get(host, "uno")
        assert build.loads == ["one"]
        assert (second.name, second.context_length, second.default_sampling) == ("uno", 50, {"temperature": 0.25})
        assert (first.name, first.context_length, first.default_sampling) == ("one", 200, {})
        assert (first.tokenizer.chat_template, second.tokenizer.chat_template) == (None, "{{ messages }}uno")
        assert (first.description.stop, second.description.stop) == ((), ("Halt",))
        assert first.tokenizer.difference(second.tokenizer) is None
        generations = [await model.generate(make_generation_request(model.name)) for model in (first, second)]
        answers = [await read(generation) for generation in generations]
        assert [answer.text for answer in answers] == [expected_text("the cat", 8)] * 2
        assert [(info.name, info.loaded) for info in host.models()][:2] == [("one", True), ("uno", True)]
        (info,) = host.loaded()
        one, uno = info.names
        assert (info.format, one.name, uno.name, uno.context_length) == ("gguf", "one", "uno", 50)
        assert (one.digest, len(uno.digest)) == (info.digest, 64)
        assert names(host) == ["one"]
    step_ids = [record.step_id for record in recorder.steps]
    assert len(step_ids) == len(set(step_ids)), "a step was counted for each name"
    assert recorder.outcomes() == {"one": "length", "uno": "length"}


@pytest.mark.parametrize("what", ["load", "unload", "evict"])
@on_loop
async def test_close_while_models_come_and_go(what: str, build: FakeBuild, registry: Registry) -> None:
    async with hosting(registry, max_loaded_models=1 if what == "evict" else None) as host:
        await host.preload("one")
        with held(Gate()) as gate:
            blocking = host._thread.call(gate)  # type: ignore[union-attr]
            await gate.arrival()
            name = "one" if what == "unload" else "two"
            unloading = asyncio.create_task(host.unload("one")) if what == "unload" else None
            getting = [asyncio.create_task(get(host, name)) for _ in range(2)]
            await asyncio.sleep(0.01)
            closing = asyncio.create_task(host.close(0.0))
            results = await asyncio.gather(*getting, return_exceptions=True)
            assert [type(result) for result in results] == [EngineDead] * 2
        blocking.result(TIMEOUT)
        await asyncio.wait_for(closing, TIMEOUT)
        if unloading is not None:
            await asyncio.wait_for(unloading, TIMEOUT)


def test_a_request_that_waits_for_its_model_is_seen_and_its_failure_kept(build: FakeBuild, tmp_path: Path) -> None:
    with held(Gate()) as gate:
        build.before_load = gate
        with serving(build, tmp_path, preload=False) as server:
            caller = threading.Thread(target=server.complete)
            caller.start()
            gate.wait()
            (trace,) = server.traces()
            assert (trace["state"], trace["model"], trace["outcome"]) == ("loading", "one", None)
            assert trace["stages"]["front_end"] == trace["total"] > 0
            gate.open()
            caller.join(TIMEOUT)
            (trace,) = server.traces()
            assert (trace["state"], trace["outcome"]) == ("done", "length")
            events = server.get(f"/debug/requests/{trace['id']}").json()["events"]
            assert "loaded" in {event["kind"] for event in events}
            assert server.complete(model="nothing").status_code == 404
            newest = server.traces()[0]
            assert (newest["state"], newest["model"], newest["outcome"]) == ("done", "nothing", "ModelNotFound")


def test_metrics_of_models(build: FakeBuild, tmp_path: Path) -> None:
    build.sizes = {"one": 12345}
    with serving(build, tmp_path, keep_alive=-1.0) as server:
        lines = server.get("/metrics").text.splitlines()
        assert "mlxserve_models_loaded 1.0" in lines
        assert 'mlxserve_model_memory_bytes{kind="weights",model="one"} 12345.0' in lines
        assert 'mlxserve_model_memory_bytes{kind="kv_cache",model="one"} 0.0' in lines


@on_loop
async def test_an_unloaded_model_leaves_no_memory_behind(tmp_path: Path) -> None:
    folder = tiny_models.save(tmp_path / "tiny", "llama")
    tiny_tokenizers.byte_level().save_pretrained(folder)
    host = ModelHost(EngineConfig(kv_cache_bytes=30_000_000), Registry(), allow_paths=True)
    await host.start()
    try:
        # What earlier tests left behind in cycles would go during this one.
        gc.unfreeze()
        gc.collect()
        before = mx.get_active_memory()
        leases = []
        for _ in range(5):
            lease = await host.acquire(str(folder))
            generation = await lease.model.generate(make_generation_request())
            assert [event async for event in generation if isinstance(event, TextDelta)]
            (info,) = host.loaded()
            assert mx.get_active_memory() - before >= info.size > 30_000_000 / 2
            lease.release()
            # What clients and connections still refer to must not matter.
            leases.append((lease, lease.model, generation))
            await host.unload(str(folder))
            assert mx.get_active_memory() - before < 10_000
    finally:
        await asyncio.wait_for(host.close(timeout=0.0), TIMEOUT)
