"""Engines whose blocks lie on disk: restarts, damaged files, failures. Answers are those without any cache."""

import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
import tiny_models
from helpers_arrivals import serve
from helpers_disk import block_files, opened, save_all
from helpers_engine import Gate, held
from tiny_models import CONTEXT_LENGTH, make_request, prompt

from mlxserve.core.request import Request, Speculation
from mlxserve.core.stats import DiskStats
from mlxserve.core.step import BlockLoad, BlockSave, PrefillChunk, ScheduledStep
from mlxserve.engine import warm_up
from mlxserve.engine.build import build_engine
from mlxserve.engine.engine import Engine
from mlxserve.engine.kv_disk import KVDisk
from mlxserve.runner import device, probe
from mlxserve.runner.block_io import BlockIO
from mlxserve.runner.kv_storage import KVStorage, LayerShape
from mlxserve.runner.model_runner import ModelRunner
from mlxserve.runner.paged_model import PagedModel
from mlxserve.store import block_folder
from mlxserve.store.block_folder import BlockFolder
from mlxserve.store.fingerprint import weights_fingerprint

SEED = int(os.environ.get("MLXSERVE_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
PROMPT = prompt(100)
"""Six full blocks of 16 tokens, and four tokens."""
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def expected() -> list[int]:
    answer = tiny_models.reference(tiny_models.build("llama"), PROMPT, NUM_TOKENS)
    assert len(answer) == NUM_TOKENS, "a near tie: choose another prompt"
    return answer


def make_engine(kv_disk: KVDisk | None, *, name: str = "llama", seed: int = 0, **settings: object) -> Engine:
    loaded = tiny_models.loaded(tiny_models.build(name, seed=seed))
    config = tiny_models.engine_config(**settings)
    return build_engine(loaded, config, device.detect(), CONTEXT_LENGTH, kv_disk=kv_disk).engine


def disk_stats(engine: Engine) -> DiskStats:
    stats = engine.stats().disk
    assert stats is not None
    return stats


def answer(engine: Engine, request: Request | None = None) -> list[int]:
    request = request or make_request("r", PROMPT, NUM_TOKENS)
    return tiny_models.run_ids(engine, [request])[request.request_id]


def fill(root: Path, **fields: object) -> None:
    """Answer PROMPT, and end."""
    with opened(root) as kv_disk:
        engine = make_engine(kv_disk, **fields)  # type: ignore[arg-type]
        answer(engine)
        save_all(engine)
    assert len(block_files(root)) == 6


@contextmanager
def restarted(root: Path) -> Iterator[tuple[Engine, Request]]:
    with opened(root) as kv_disk:
        yield make_engine(kv_disk), make_request("again", PROMPT, NUM_TOKENS)


def test_a_prompt_is_found_after_a_restart(tmp_path: Path, expected: list[int]) -> None:
    fill(tmp_path)
    with restarted(tmp_path) as (engine, request):
        assert answer(engine, request) == expected
        assert request.num_cached_tokens == 96
        stats = engine.stats()
        assert stats.num_prefix_hit_tokens == disk_stats(engine).num_loaded_tokens == 96
        save_all(engine)
        # What came from disk does not go there again.
        assert (disk_stats(engine).num_writes, disk_stats(engine).num_errors) == (0, 0)


def test_blocks_that_memory_evicted_come_back(tmp_path: Path, expected: list[int]) -> None:
    bytes_per_block = 16 * 3 * 2 * 32 * 4
    with opened(tmp_path) as kv_disk:
        engine = make_engine(kv_disk, kv_cache_bytes=10 * bytes_per_block)
        answer(engine)
        save_all(engine)
        for seed in (3, 4):
            answer(engine, make_request("other", prompt(110, seed=seed), NUM_TOKENS))
        save_all(engine)
        request = make_request("again", PROMPT, NUM_TOKENS)
        assert answer(engine, request) == expected
        assert request.num_cached_tokens == 96
        assert disk_stats(engine).num_loaded_tokens == 96


def test_a_hit_goes_on_on_disk_where_memory_ends(tmp_path: Path, expected: list[int]) -> None:
    fill(tmp_path)
    with restarted(tmp_path) as (engine, request):
        first = make_request("first", PROMPT[:40], 1)
        answer(engine, first)
        assert (first.num_cached_tokens, disk_stats(engine).num_loaded_tokens) == (32, 32)
        assert answer(engine, request) == expected
        assert (request.num_cached_tokens, disk_stats(engine).num_loaded_tokens) == (96, 96)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def change(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)


def replace_by_others(file: Path) -> None:
    mx.save_safetensors(str(file), {"weight": mx.zeros((4, 4))})


def swap(file: Path) -> None:
    """Another block's file under this one's name."""
    other = next(each for each in block_files(file.parent.parent) if each != file)
    file.write_bytes(other.read_bytes())


DAMAGES = [cut, change, replace_by_others, swap, lambda file: file.write_bytes(b""), Path.unlink]


@pytest.mark.parametrize("when", ["before the start", "while it runs"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_never_an_answer(
    tmp_path: Path, expected: list[int], damage: Callable[[Path], None], when: str, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path)
    print(f"replay with MLXSERVE_TEST_SEED={SEED}")
    victim = random.Random(SEED).choice(block_files(tmp_path))
    if when == "before the start":
        damage(victim)
    with restarted(tmp_path) as (engine, request):
        if when == "while it runs":
            damage(victim)
        assert answer(engine, request) == expected
        assert request.num_cached_tokens < 96
        assert disk_stats(engine).is_on
        save_all(engine)
    has_vanished_before = damage is Path.unlink and when == "before the start"
    assert len([record for record in caplog.records if "ignoring" in record.getMessage()]) == (not has_vanished_before)
    if damage is not replace_by_others:
        # It was computed again, and written again.
        with restarted(tmp_path) as (engine, request):
            assert answer(engine, request) == expected
            assert request.num_cached_tokens == 96


@pytest.mark.parametrize(
    "other",
    [{"seed": 1}, {"name": "qwen3"}, {"name": "llama-scaled"}, {"block_size": 32}],
    ids=["weights", "architecture", "rotary embedding", "block size"],
)
def test_another_model_never_hits(tmp_path: Path, other: dict[str, object]) -> None:
    fill(tmp_path)
    with opened(tmp_path) as kv_disk:
        engine = make_engine(kv_disk, **other)  # type: ignore[arg-type]
        request = make_request("r", PROMPT, NUM_TOKENS)
        got = answer(engine, request)
        assert (request.num_cached_tokens, disk_stats(engine).num_loaded_tokens) == (0, 0)
        assert got == answer(make_engine(None, **other))  # type: ignore[arg-type]


def test_a_file_in_another_models_folder_is_not_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(tmp_path)
    with opened(tmp_path) as kv_disk:
        engine = make_engine(kv_disk, seed=1)
        answer(engine)
        save_all(engine)
    mine, others = sorted({file.parent for file in block_files(tmp_path)}, key=lambda folder: folder.stat().st_mtime)
    for file in block_files(tmp_path):
        if file.parent == mine:
            file.rename(others / file.name)
    with opened(tmp_path) as kv_disk:
        engine = make_engine(kv_disk)
        request = make_request("r", PROMPT, NUM_TOKENS)
        answer(engine, request)
        assert request.num_cached_tokens == 0
    assert "another model's" in caplog.text


def test_the_fingerprint_sees_every_weight() -> None:
    model = tiny_models.build("llama")
    before = weights_fingerprint(model)
    assert weights_fingerprint(tiny_models.build("llama")) == before
    weight = model.model.layers[1].mlp.up_proj.weight
    row = weight[5] + 0
    weight[5, 7] += 1e-3
    assert weights_fingerprint(model) != before
    weight[5] = weight[6]
    weight[6] = row
    assert weights_fingerprint(model) != before
    model.set_dtype(mx.bfloat16)
    assert weights_fingerprint(model) != before


@pytest.mark.parametrize("draft_seed", [0, 1])
def test_a_draft_models_blocks_come_along(tmp_path: Path, expected: list[int], draft_seed: int) -> None:
    """After a restart it guesses as well as before: its keys and values are in the files."""

    def served() -> tuple[list[int], Request, Engine]:
        with opened(tmp_path) as kv_disk:
            loaded, draft = (tiny_models.loaded(tiny_models.build("llama", seed=seed)) for seed in (0, draft_seed))
            config = tiny_models.engine_config()
            built = build_engine(loaded, config, device.detect(), CONTEXT_LENGTH, draft=draft, kv_disk=kv_disk)
            request = make_request("r", PROMPT, NUM_TOKENS)
            request.speculation = Speculation.DRAFT
            got = answer(built.engine, request)
            save_all(built.engine)
        return got, request, built.engine

    first, request, engine = served()
    assert (first, request.num_cached_tokens) == (expected, 0)
    before = engine.stats()
    second, request, engine = served()
    assert (second, request.num_cached_tokens) == (expected, 96)
    after = engine.stats()
    assert (after.num_draft_tokens, after.num_accepted_tokens) == (before.num_draft_tokens, before.num_accepted_tokens)
    assert after.num_draft_tokens > 0
    # Without it the model's blocks are others.
    with opened(tmp_path) as kv_disk:
        engine, request = make_engine(kv_disk), make_request("r", PROMPT, NUM_TOKENS)
        assert (answer(engine, request), request.num_cached_tokens) == (expected, 0)


def test_salted_requests_leave_nothing(tmp_path: Path, expected: list[int]) -> None:
    with opened(tmp_path) as kv_disk:
        engine = make_engine(kv_disk)
        salted = replace(make_request("r", PROMPT, NUM_TOKENS), cache_salt="mine")
        assert answer(engine, salted) == expected
        assert engine.num_unsaved_blocks == 0
        assert disk_stats(engine).num_blocks == 0
        answer(engine)
        save_all(engine)
    with restarted(tmp_path) as (engine, _):
        salted = replace(make_request("r", PROMPT, NUM_TOKENS), cache_salt="mine")
        assert answer(engine, salted) == expected
        assert salted.num_cached_tokens == 0


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_streams_go_on_while_the_disk_reads(
    tmp_path: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch, runs_ahead: bool
) -> None:
    monkeypatch.setattr(warm_up, "gains_by_running_ahead", tiny_models.decided(runs_ahead))
    fill(tmp_path)
    gate = Gate()
    stock_read = BlockFolder.read

    def slow_read(self: BlockFolder, model: str, name: bytes) -> memoryview:
        gate()
        return stock_read(self, model, name)

    monkeypatch.setattr(BlockFolder, "read", slow_read)
    with held(gate), restarted(tmp_path) as (engine, request):
        engine.add(make_request("stream", prompt(20, seed=9), 60))
        num_tokens = 0
        while num_tokens < 5:
            num_tokens += sum(len(output.tokens) for output in engine.step())
        engine.add(request)
        while num_tokens < 40:
            outputs = engine.step()
            assert {output.request_id for output in outputs} == {"stream"}
            num_tokens += sum(len(output.tokens) for output in outputs)
        gate.open()
        got: list[int] = []
        while engine.has_work:
            for output in engine.step():
                if output.request_id == "again":
                    got += [token.token_id for token in output.tokens]
        assert got == expected
        assert request.num_cached_tokens == 96


def test_nothing_is_computed_while_all_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine thread must sleep then, and not spin."""
    fill(tmp_path)
    gate = Gate()
    monkeypatch.setattr(BlockFolder, "read", lambda *_: gate() or memoryview(b""))
    with held(gate), restarted(tmp_path) as (engine, request):
        engine.add(request)
        assert engine.has_work
        assert not engine.is_waiting
        assert engine.step() == []
        assert engine.is_waiting
        engine.add(make_request("other", prompt(5), 1))
        assert not engine.is_waiting
        gate.open()
        while engine.has_work:
            engine.step()


def test_a_failed_disk_is_only_no_cache(
    tmp_path: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def write_all(file: object, part: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(block_folder, "_write_all", write_all)
    with opened(tmp_path) as kv_disk:
        engine = make_engine(kv_disk)
        requests = [make_request(f"{index}", PROMPT, NUM_TOKENS) for index in range(20)]
        answers = serve(engine, [(8 * index, request) for index, request in enumerate(requests)])
        while disk_stats(engine).is_on:
            time.sleep(0.001)
        assert all(answers.ids(request.request_id) == expected for request in requests)
        assert engine.num_unsaved_blocks == 0
        assert not engine.has_work or engine.step() == []
        assert answer(engine) == expected
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == [
        "KV blocks are no longer kept on disk: writing failed: [Errno 28] No space left on device"
    ]


def test_a_step_that_fails_with_blocks_on_their_way(
    tmp_path: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)
    failures = iter([True, False, True])
    stock_load = BlockIO.load

    def load(self: BlockIO, step: ScheduledStep) -> None:
        if step.loads and next(failures, False):
            raise RuntimeError("lost")
        stock_load(self, step)

    monkeypatch.setattr(BlockIO, "load", load)
    with restarted(tmp_path) as (engine, request):
        answers = serve(engine, [(0, request), (3, make_request("b", PROMPT, NUM_TOKENS))])
        assert answers.num_failures >= 1
        assert answers.ids("again") == answers.ids("b") == expected


def test_models_without_a_block_cache_keep_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as kv_disk:
        engine = make_engine(kv_disk, name="gemma3")
        answer(engine)
        assert engine.stats().disk is None


def saving_step(index: int, num_blocks: int, **work: object) -> ScheduledStep:
    return ScheduledStep(index, (), num_blocks=(num_blocks,), **({"prefill": (), "decode": ()} | work))  # type: ignore[arg-type]


@pytest.mark.parametrize("ahead", [False, True])
def test_saving_and_loading_copy_no_pool(ahead: bool) -> None:
    """Beside streams too, also in a step that is built while another is computed."""
    num_blocks = 1500
    model = tiny_models.build("llama")
    paged = PagedModel(model, probe.layer_shapes(model), 64, tiny_models.CPU_KERNELS)
    paged.storage.grow(num_blocks)
    saved: dict[bytes, dict[str, bytes]] = {}

    class Kept:
        def give(self, save: BlockSave, data: dict[str, bytes]) -> None:
            saved[save.name] = data

        def take(self, name: bytes) -> dict[str, bytes]:
            return saved[name]

    runner = ModelRunner(paged, max_pass_tokens=64, block_io=BlockIO([paged.storage], Kept()))
    chunk = PrefillChunk("a", tuple(range(64)), 0, ((5, 6),))
    runner.run(saving_step(0, num_blocks, prefill=(chunk,)))
    save = BlockSave(b"5", b"", (5,))
    row = tiny_models.decode_row("a", 3, 64, (5, 6))
    runner.run(saving_step(1, num_blocks, decode=(row,)))

    before = mx.get_active_memory()
    mx.reset_peak_memory()
    started = runner.start(saving_step(2, num_blocks, decode=(row,)), None)
    if ahead:
        unknown = replace(row, token_id=None, start=65)
        second = runner.start(saving_step(3, num_blocks, decode=(unknown,), saves=(save,)), started)
        runner.finish(started)
        runner.finish(second)
    else:
        runner.finish(started)
        runner.run(saving_step(3, num_blocks, decode=(row,), saves=(save,)))
    runner.run(saving_step(4, num_blocks, decode=(row,), loads=(BlockLoad(b"5", (700,)), BlockLoad(b"5", (9,)))))
    one_array = num_blocks * paged.storage.bytes_per_block / 6
    assert mx.get_peak_memory() - before < one_array / 4
    for pools in paged.storage.arrays():
        for pool in pools:
            assert mx.array_equal(pool[700], pool[5]).item()
            assert mx.array_equal(pool[9], pool[5]).item()
            assert mx.abs(pool[5]).max().item() > 0


def test_blocks_of_half_precision_are_the_same_bytes(tmp_path: Path) -> None:
    storage = KVStorage([LayerShape(2, 4, 8, mx.bfloat16), LayerShape(2, 4, 8, mx.float16)], block_size=8)
    storage.grow(4)
    for pools in storage.arrays():
        for index, pool in enumerate(pools):
            pool[1] = mx.random.normal(pool.shape[1:], key=mx.random.key(index)).astype(pool.dtype)
    arrays = storage.block_bytes(1)
    mx.eval(arrays)
    data = {name: bytes(memoryview(array)) for name, array in arrays.items()}  # type: ignore[arg-type]
    layout = storage.block_layout()
    assert {name: array.dtype for name, array in layout.items()} == {
        "0.0": "BF16",
        "0.1": "F16",
        "1.0": "BF16",
        "1.1": "F16",
    }
    assert {name: array.num_bytes for name, array in layout.items()} == {name: len(each) for name, each in data.items()}
    storage.write_blocks([(3, data)])
    for pools in storage.arrays():
        for pool in pools:
            assert mx.array_equal(pool[3], pool[1]).item()
            assert pool[2].max().item() == 0
