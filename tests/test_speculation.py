"""Speculation around the engine: settings, what a request may ask for, several tokens of one step on their way out."""

import asyncio
import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers
from helpers_engine import Recorder, letter_ids, on_loop, tokenizer
from helpers_scheduler import make_request
from helpers_served import FakeBuild, get, make_generation_request, read, serving

from mlxserve import config
from mlxserve.config import SPECULATION_KINDS, EngineConfig
from mlxserve.core.generation import Finished, TextDelta, Usage
from mlxserve.core.request import FinishReason, Request, Speculation
from mlxserve.core.step import RequestOutput, SampledToken
from mlxserve.engine.answer_text import AnswerText
from mlxserve.engine.engine_thread import Computed
from mlxserve.engine.generation import Generation
from mlxserve.engine.journal import RequestTrace
from mlxserve.engine.model_host import ModelHost
from mlxserve.engine.timeline import Timeline
from mlxserve.errors import ConfigError, InvalidParameter, ModelLoadError
from mlxserve.store.registry import Registry
from mlxserve.text.detokenizer import IncrementalDetokenizer
from mlxserve.text.tokenizer import Tokenizer

# --- settings ---


def test_kinds_are_the_same_everywhere() -> None:
    assert {kind.value for kind in Speculation} == set(SPECULATION_KINDS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"speculation": "fast"}, "auto, ngram, draft or off"), ({"speculation": "draft"}, "there is no draft_model")],
)
def test_impossible_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


def test_settings_from_flag_and_environment(tmp_path: Path) -> None:
    environ = {"MLXSERVE_SPECULATION": "ngram", "MLXSERVE_DRAFT_MODEL": "small"}
    settings = config.resolve({"speculation": "draft"}, environ=environ, file=tmp_path / "none")
    engine_config, _ = config.build(settings)
    assert (engine_config.speculation, engine_config.draft_model) == ("draft", "small")


# --- what a request may ask for ---


async def speculation_of(served: Any, asked: Speculation | None) -> Speculation:
    """What the engine is told."""
    request = dataclasses.replace(make_generation_request(max_tokens=1), speculation=asked)
    generation = await served.model.generate(request)
    await read(generation)
    kind: Speculation = generation._request.speculation
    return kind


@on_loop
async def test_a_request_goes_before_the_setting() -> None:
    async with serving(speculation="ngram") as served:
        everything = dataclasses.replace(served.model.description, speculation=frozenset(Speculation))
        served.model.description = everything
        assert await speculation_of(served, None) is Speculation.NGRAM
        for kind in Speculation:
            assert await speculation_of(served, kind) is kind


@on_loop
async def test_what_a_model_cannot_do_is_refused_of_a_request_and_let_be_of_a_setting() -> None:
    async with serving(speculation="ngram") as served:
        assert Speculation.NGRAM not in served.model.description.speculation
        assert await speculation_of(served, None) is Speculation.AUTO
        assert await speculation_of(served, Speculation.OFF) is Speculation.OFF
        for kind, reason in ((Speculation.NGRAM, "own caches"), (Speculation.DRAFT, "--draft-model")):
            with pytest.raises(InvalidParameter, match=reason) as refused:
                await speculation_of(served, kind)
            assert refused.value.param == "speculation"


# --- several tokens of one step ---


def generation_of(
    request: Request, recorder: Recorder, ended: list[Usage], *, stop: tuple[str, ...] = ()
) -> Generation:
    timeline = Timeline()
    return Generation(
        request,
        text=AnswerText(IncrementalDetokenizer(tokenizer()), stop),
        timeline=timeline,
        trace=RequestTrace(request.request_id, "fake", timeline, 0, None),
        abort=lambda reason: None,
        on_token_interval=lambda seconds: recorder.inter_token_latency("fake", seconds),
        on_end=lambda generation, outcome, usage, timings: ended.append(usage),
        on_delivered=lambda: None,
        is_delivered_later=False,
    )


def letters(text: str) -> tuple[SampledToken, ...]:
    ids = dict(zip("abcdefghijklmnop", letter_ids(), strict=True))
    return tuple(SampledToken(ids[letter]) for letter in text)


def computed(text: str, time: float, reason: FinishReason | None = None, drafts: tuple[int, int] = (0, 0)) -> Computed:
    return Computed(RequestOutput("r", letters(text), 0, 0, *drafts, reason), time)


async def events_of(generation: Generation, *arrivals: Computed) -> tuple[str, list[SampledToken], Finished]:
    for arrival in arrivals:
        generation.receive(arrival)
    *deltas, finished = [event async for event in generation]
    assert isinstance(finished, Finished)
    assert all(isinstance(delta, TextDelta) for delta in deltas)
    return "".join(d.text for d in deltas), [token for d in deltas for token in d.tokens], finished


@on_loop
async def test_all_tokens_of_a_step_are_told_counted_and_timed() -> None:
    recorder, ended = Recorder(), []
    generation = generation_of(make_request("r", [1, 2]), recorder, ended)
    text, tokens, finished = await events_of(
        generation,
        computed("a", 1.0),
        computed("bcd", 1.5, drafts=(7, 2)),
        computed("ef", 2.25, FinishReason.LENGTH, drafts=(9, 3)),
    )
    assert (text, tuple(tokens), finished.reason) == ("abcdef", letters("abcdef"), FinishReason.LENGTH)
    assert finished.usage == Usage(2, 0, 6, num_draft_tokens=9, num_accepted_tokens=3)
    assert ended == [finished.usage]
    # As many intervals as there are between tokens; together the time from the first to the last.
    assert recorder.intervals == [0.5, 0.0, 0.0, 0.75, 0.0]
    assert finished.timings.decode == 1.25


@on_loop
async def test_the_token_that_ends_an_answer_is_counted_and_not_shown() -> None:
    generation = generation_of(make_request("r", [1, 2]), Recorder(), [])
    text, tokens, finished = await events_of(generation, computed("a", 1.0), computed("bcd", 2.0, FinishReason.STOP))
    assert (text, tuple(tokens), finished.usage.num_generated_tokens) == ("abc", letters("abc"), 4)


@on_loop
async def test_a_stop_string_among_the_tokens_of_a_step() -> None:
    """The answer is that of steps with one token each: what followed the stop string in its step does not count."""
    answers = []
    for parts in (("ab", "cdefg", "h"), tuple("abcdefgh")):
        generation = generation_of(make_request("r", [1, 2]), Recorder(), [], stop=("de",))
        arrivals = [computed(part, float(index)) for index, part in enumerate(parts)]
        text, tokens, finished = await events_of(generation, *arrivals)
        answers.append((text, tokens, finished.reason, finished.stop_string, finished.usage))
    assert answers[0] == answers[1]
    assert answers[0][0] == "abc"
    assert answers[0][4].num_generated_tokens == 5


@on_loop
async def test_the_log_line_has_the_drafts(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as served:
        with caplog.at_level(logging.INFO):
            timings = Timeline().timings()
            served.model._record("r", "stop", Usage(2, 0, 9, num_draft_tokens=12, num_accepted_tokens=5), timings)
    assert "drafts_accepted=5/12 " in caplog.text


# --- the draft model of a host ---


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    for name in ("one", "small"):
        (tmp_path / f"{name}.gguf").touch()
    file = tmp_path / "models.toml"
    file.write_text("".join(f"[{name}]\nsource = {{ path = '{tmp_path}/{name}.gguf' }}\n" for name in ("one", "small")))
    return Registry(user_file=file)


@on_loop
async def test_a_host_loads_the_draft_model_with_the_model(monkeypatch: pytest.MonkeyPatch, registry: Registry) -> None:
    build = FakeBuild(monkeypatch)
    host = ModelHost(EngineConfig(block_size=8, draft_model="small"), registry)
    await host.start()
    try:
        model = await get(host, "one")
        assert build.loads == ["one", "small"]
        assert model.description.speculation == frozenset(Speculation)
    finally:
        await asyncio.wait_for(host.close(timeout=0.0), 10)


@on_loop
async def test_a_draft_model_of_another_vocabulary_is_refused(
    monkeypatch: pytest.MonkeyPatch, registry: Registry
) -> None:
    build = FakeBuild(monkeypatch)
    stock = build._open_files

    def open_files(path: Path, *, name: str) -> Any:
        loaded = stock(path, name=name)
        return dataclasses.replace(loaded, tokenizer=tiny_tokenizers.sentencepiece()) if name == "small" else loaded

    monkeypatch.setattr("mlxserve.engine.loading.loader.open_files", open_files)
    host = ModelHost(EngineConfig(block_size=8, draft_model="small"), registry)
    await host.start()
    try:
        with pytest.raises(
            ModelLoadError, match="small cannot be the draft model of one: its vocabulary has"
        ) as refused:
            await get(host, "one")
        assert refused.value.model == "one"
        assert build.runners == []
    finally:
        await asyncio.wait_for(host.close(timeout=0.0), 10)


def test_vocabularies_are_told_apart_by_what_their_ids_stand_for() -> None:
    def make() -> Tokenizer:
        hf_tokenizer = tiny_tokenizers.byte_level()
        return Tokenizer(hf_tokenizer, frozenset({hf_tokenizer.eos_token_id}))

    assert make().difference(make()) is None
    other = make()
    other._tokens[5], other._tokens[6] = other._tokens[6], other._tokens[5]
    assert make().difference(other) == f"its token 5 is {other._tokens[5]!r} and not {other._tokens[6]!r}"
