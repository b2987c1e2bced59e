"""The host: models are loaded once, by whoever asks first, and again after they died."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers_engine import CONTEXT_LENGTH, TIMEOUT, FakeRunner, Gate, Recorder, expected_text, held, on_loop
from helpers_scheduler import BLOCK_SIZE
from helpers_served import FakeBuild, get, make_generation_request, read

from mlxserve.config import EngineConfig
from mlxserve.core.generation import ChatPrompt, TextPrompt
from mlxserve.engine.engine_thread import MAX_FAILURES_IN_A_ROW
from mlxserve.engine.model_host import ModelHost
from mlxserve.errors import EngineDead, EngineError, InvalidParameter, ModelLoadError, ModelNotFound, RequestCancelled
from mlxserve.store.registry import Registry


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> FakeBuild:
    return FakeBuild(monkeypatch)


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    (tmp_path / "one.gguf").touch()
    file = tmp_path / "models.toml"
    file.write_text(
        f"[one]\nsource = {{ path = '{tmp_path}/one.gguf' }}\ndescription = 'The first'\n"
        f"[two]\nsource = {{ path = '{tmp_path}' }}\ncontext_length = 99\nsampling = {{ temperature = 0.5 }}\n"
        f"[gone]\nsource = {{ path = '{tmp_path}/gone.gguf' }}\n"
    )
    return Registry(user_file=file)


@asynccontextmanager
async def hosting(registry: Registry, **settings: Any) -> AsyncIterator[ModelHost]:
    config = EngineConfig(block_size=BLOCK_SIZE, **settings)
    host = ModelHost(config, registry, observer=Recorder())
    await host.start()
    try:
        yield host
    finally:
        await asyncio.wait_for(host.close(timeout=0.0), TIMEOUT)


async def kill(host: ModelHost, runner: FakeRunner, name: str = "one") -> None:
    """Let every step of the model fail until its engine is given up."""

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    runner.before_step = fail
    model = await get(host, name)
    for i in range(MAX_FAILURES_IN_A_ROW):
        assert isinstance((await read(await model.generate(make_generation_request(f"kill-{i}")))).error, EngineError)


# --- loading ---


@on_loop
async def test_a_model_is_loaded_and_answers(build: FakeBuild, registry: Registry) -> None:
    async with hosting(registry) as host:
        model = await get(host, "one")
        assert (model.name, model.context_length, model.death) == ("one", CONTEXT_LENGTH, None)
        answer = await read(await model.generate(make_generation_request()))
        assert answer.text == expected_text("the cat", 8)
        assert host.stats()["one"].num_steps > 0
        assert host.health().ok
    assert build.loads == ["one"]


@on_loop
async def test_whoever_asks_meanwhile_waits_for_the_same_load(build: FakeBuild, registry: Registry) -> None:
    async with hosting(registry) as host:
        with held(Gate()) as gate:
            build.before_load = gate
            gets = [asyncio.create_task(get(host, name)) for name in ("one", "ONE", "one:latest")]
            await gate.arrival()
            assert host.stats() == {}
        models = await asyncio.gather(*gets)
        assert models[0] is models[1] is models[2] is await get(host, "one")
    assert build.loads == ["one"]


@on_loop
async def test_models_of_one_host_answer_side_by_side(build: FakeBuild, registry: Registry) -> None:
    async with hosting(registry) as host:
        models = await asyncio.gather(get(host, "one"), get(host, "two"))
        assert [model.name for model in models] == ["one", "two"]
        assert (models[1].context_length, models[1].default_sampling) == (99, {"temperature": 0.5})
        requests = [model.generate(make_generation_request("r")) for model in models]
        answers = [await read(generation) for generation in await asyncio.gather(*requests)]
        assert [answer.text for answer in answers] == [expected_text("the cat", 8)] * 2


@on_loop
async def test_a_client_that_goes_away_does_not_stop_the_load(build: FakeBuild, registry: Registry) -> None:
    async with hosting(registry) as host:
        with held(Gate()) as gate:
            build.before_load = gate
            first, second = asyncio.create_task(get(host, "one")), asyncio.create_task(get(host, "one"))
            await gate.arrival()
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
        assert (await second).name == "one"
    assert build.loads == ["one"]


@on_loop
async def test_a_load_goes_on_when_everybody_has_gone(build: FakeBuild, registry: Registry) -> None:
    async with hosting(registry) as host:
        with held(Gate()) as gate:
            build.before_load = gate
            only = asyncio.create_task(get(host, "one"))
            await gate.arrival()
            only.cancel()
            await asyncio.wait([only])
        await get(host, "one")
    assert build.loads == ["one"]


@on_loop
async def test_a_failed_load_is_told_to_all_who_wait_and_tried_again(build: FakeBuild, registry: Registry) -> None:
    async with hosting(registry) as host:
        with held(Gate()) as gate:
            build.before_load = gate
            build.load_error = ModelLoadError("the file is damaged", model="one")
            gets = [asyncio.create_task(get(host, "one")) for _ in range(3)]
            await gate.arrival()
        for result in await asyncio.gather(*gets, return_exceptions=True):
            assert isinstance(result, ModelLoadError)
        assert host.health().ok
        build.load_error = None
        assert (await get(host, "one")).name == "one"
    assert build.loads == ["one", "one"]


@on_loop
async def test_a_load_that_fails_after_everybody_has_gone_is_tried_again(build: FakeBuild, registry: Registry) -> None:
    async with hosting(registry) as host:
        with held(Gate()) as gate:
            build.before_load = gate
            build.load_error = ModelLoadError("the file is damaged", model="one")
            only = asyncio.create_task(get(host, "one"))
            await gate.arrival()
            only.cancel()
            await asyncio.wait([only])
        while build.num_failed == 0:  # noqa: ASYNC110 -- another thread counts
            await asyncio.sleep(0.001)
        build.load_error = None
        assert (await get(host, "one")).name == "one"


@on_loop
async def test_names_that_stand_for_nothing(build: FakeBuild, registry: Registry) -> None:
    async with hosting(registry) as host:
        for name in ("nothing", "gone", "some-org/not-downloaded", "/etc", "./one.gguf"):
            with pytest.raises(ModelNotFound):
                await get(host, name)
        assert host.health().ok
    assert build.loads == []


@on_loop
async def test_the_list_of_models(build: FakeBuild, registry: Registry) -> None:
    async with hosting(registry, max_model_len=50) as host:
        assert {info.name: info.loaded for info in host.models() if info.name in ("one", "two", "gone")} == {
            "one": False,
            "two": False,
        }
        await get(host, "one")
        info = host.models()[0]
        assert (info.name, info.loaded, info.context_length, info.description) == ("one", True, 50, "The first")
        assert [info.name for info in host.models()].count("one") == 1


@on_loop
async def test_tokens_are_counted_as_generating_counts_them(build: FakeBuild, registry: Registry) -> None:
    async with hosting(registry) as host:
        model = await get(host, "one")
        request = make_generation_request("r", "the cat sat")
        assert await model.count_tokens(request.prompt) == (await model.generate(request)).num_prompt_tokens
        too_long = TextPrompt("cat " * CONTEXT_LENGTH)
        assert await model.count_tokens(too_long) > CONTEXT_LENGTH
        with pytest.raises(InvalidParameter, match="chat template"):
            await model.count_tokens(ChatPrompt(({"role": "user", "content": "Hi"},)))


# --- death and resurrection ---


@on_loop
async def test_a_dead_model_turns_health_red_until_it_is_loaded_again(build: FakeBuild, registry: Registry) -> None:
    async with hosting(registry) as host:
        model = await get(host, "one")
        await get(host, "two")
        await kill(host, build.runners[0])
        assert not host.health().ok
        assert "failed 3 times in a row; last: RuntimeError: out of memory" in host.health().detail
        with pytest.raises(EngineDead):
            await model.generate(make_generation_request())
        with held(Gate()) as gate:
            build.before_load = gate
            again = asyncio.create_task(get(host, "one"))
            await gate.arrival()
            assert not host.health().ok
        assert await again is not model
        assert host.health().ok
        answer = await read(await (await again).generate(make_generation_request()))
        assert answer.text == expected_text("the cat", 8)
    assert build.loads == ["one", "two", "one"]


@on_loop
async def test_health_stays_red_while_a_dead_model_cannot_be_loaded_again(build: FakeBuild, registry: Registry) -> None:
    async with hosting(registry) as host:
        await get(host, "one")
        await kill(host, build.runners[0])
        build.load_error = ModelLoadError("the file is damaged", model="one")
        for _ in range(2):
            with pytest.raises(ModelLoadError):
                await get(host, "one")
            assert not host.health().ok
        build.load_error = None
        await get(host, "one")
        assert host.health().ok


@on_loop
async def test_a_dead_thread_is_the_end_of_the_host(build: FakeBuild, registry: Registry) -> None:
    async with hosting(registry) as host:
        model = await get(host, "one")

        def die(*_: object) -> None:
            raise SystemExit("killed")

        build.runners[0].before_step = die
        answer = await read(await model.generate(make_generation_request()))
        assert isinstance(answer.error, EngineDead)
        assert not host.health().ok
        assert "killed" in host.health().detail
        for name in ("one", "two"):
            with pytest.raises(EngineDead, match="killed"):
                await get(host, name)


# --- start and close ---


@on_loop
async def test_a_host_that_was_not_started(build: FakeBuild, registry: Registry) -> None:
    host = ModelHost(EngineConfig(), registry)
    assert (host.health().ok, host.health().detail) == (False, "not started")
    with pytest.raises(EngineDead, match="not started"):
        await get(host, "one")
    await host.close(timeout=0.0)


@on_loop
async def test_a_device_that_cannot_be_configured(
    build: FakeBuild, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("no device")

    monkeypatch.setattr("mlxserve.engine.build.configure_device", fail)
    host = ModelHost(EngineConfig(), registry)
    with pytest.raises(RuntimeError, match="no device"):
        await host.start()
    await asyncio.wait_for(host.close(timeout=0.0), TIMEOUT)


@on_loop
async def test_close_lets_requests_end_in_time(build: FakeBuild, registry: Registry) -> None:
    async with hosting(registry) as host:
        model = await get(host, "one")
        with held(Gate()) as gate:
            build.runners[0].before_step = gate
            reading = asyncio.create_task(read(await model.generate(make_generation_request())))
            await gate.arrival()
            closing = asyncio.create_task(host.close(TIMEOUT))
            await asyncio.sleep(0)
            for name in ("one", "two"):
                with pytest.raises(EngineDead, match="stopping"):
                    await get(host, name)
            assert host.num_in_flight == 1
        await closing
        assert (await reading).text == expected_text("the cat", 8)
        assert host.num_in_flight == 0
        assert not host.health().ok


@on_loop
async def test_close_without_time_cancels_requests(build: FakeBuild, registry: Registry) -> None:
    async with hosting(registry) as host:
        model = await get(host, "one")
        with held(Gate()) as gate:
            build.runners[0].before_step = gate
            reading = asyncio.create_task(read(await model.generate(make_generation_request())))
            await gate.arrival()
            closing = asyncio.create_task(host.close(0.0))
            assert isinstance((await reading).error, RequestCancelled)
        await closing
        with pytest.raises(EngineDead):
            await model.generate(make_generation_request("late"))


@pytest.mark.parametrize("stage", ["load", "build"])
@on_loop
async def test_close_answers_who_waits_for_a_load(stage: str, build: FakeBuild, registry: Registry) -> None:
    async with hosting(registry) as host:
        with held(Gate()) as gate:
            setattr(build, f"before_{stage}", gate)
            gets = [asyncio.create_task(get(host, "one")) for _ in range(2)]
            await gate.arrival()
            # In the inbox behind it.
            gets.append(asyncio.create_task(get(host, "two")))
            await asyncio.sleep(0)
            closing = asyncio.create_task(host.close(TIMEOUT))
            results = await asyncio.gather(*gets, return_exceptions=True)
            assert [type(result) for result in results] == [EngineDead] * 3
        await asyncio.wait_for(closing, TIMEOUT)


@on_loop
async def test_close_before_a_load_has_begun(build: FakeBuild, registry: Registry) -> None:
    async with hosting(registry) as host:
        getting = asyncio.create_task(get(host, "one"))
        closing = asyncio.create_task(host.close(0.0))
        with pytest.raises(EngineDead, match="stopping"):
            await getting
        await closing
    assert build.loads == []


@on_loop
async def test_prompts_in_the_tokeniser_are_answered_after_close(
    build: FakeBuild, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosting(registry) as host:
        model = await get(host, "one")
        with held(Gate()) as gate:
            monkeypatch.setattr("mlxserve.engine.prompt_reader.encode_prompt", lambda *_: gate() or [1])
            # More than there are threads.
            starts = [asyncio.create_task(model.generate(make_generation_request(f"r{i}"))) for i in range(9)]
            await gate.arrival()
            await asyncio.wait_for(host.close(0.0), TIMEOUT)
            for _ in range(9):
                gate.let_go()
            results = await asyncio.gather(*starts, return_exceptions=True)
        assert [type(result) for result in results] == [EngineDead] * 9
