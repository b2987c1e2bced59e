"""The runner: storage, forward passes, the steps of both runners, tuned operations, device."""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny_models
from mlx_lm.models import activations
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import CPU_KERNELS, STOCK_KERNELS, decode_row

from mlxserve.config import EngineConfig
from mlxserve.core.constraint import MaskSource
from mlxserve.core.step import BlockCopy, DecodeRow, PrefillChunk, ScheduledStep, StepResult
from mlxserve.engine.build import build_engine
from mlxserve.errors import EngineError
from mlxserve.runner import cpu_ops, device, probe
from mlxserve.runner.compiled import CompiledByShape
from mlxserve.runner.fallback_runner import FallbackRunner
from mlxserve.runner.kv_storage import KVStorage, LayerShape
from mlxserve.runner.model_runner import ModelRunner
from mlxserve.runner.paged_model import Kernels, PagedModel

BLOCK_SIZE = 8


# --- storage ---


@pytest.fixture
def storage() -> KVStorage:
    return KVStorage([LayerShape(2, 4, 6, mx.float32), LayerShape(2, 8, 8, mx.float16)], BLOCK_SIZE)


def fill(storage: KVStorage, seed: int) -> list[np.ndarray]:
    """Random contents; returns copies, which keep no reference to the pools."""
    keys, values = storage.take()
    mx.random.seed(seed)
    keys = [mx.random.normal(pool.shape).astype(pool.dtype) for pool in keys]
    values = [mx.random.normal(pool.shape).astype(pool.dtype) for pool in values]
    mx.eval(keys, values)
    storage.put((keys, values))
    return contents(storage)


def contents(storage: KVStorage) -> list[np.ndarray]:
    keys, values = storage.arrays()
    return [np.array(pool, copy=True) for pool in [*keys, *values]]


def test_storage_grows_and_keeps_contents(storage: KVStorage) -> None:
    assert storage.bytes_per_block == BLOCK_SIZE * 2 * ((4 + 6) * 4 + (8 + 8) * 2)
    storage.grow(4)
    before = fill(storage, 0)
    assert [pool.shape for pool in before] == [(4, 2, BLOCK_SIZE, dim) for dim in (4, 8, 6, 8)]
    storage.grow(10)
    storage.grow(3)
    assert storage.num_blocks == 10
    for old, new in zip(before, contents(storage), strict=True):
        np.testing.assert_array_equal(new[:4], old)
        assert new.shape[0] == 10
        assert not new[4:].any()


def test_storage_copies_blocks(storage: KVStorage) -> None:
    storage.grow(6)
    before = fill(storage, 1)
    storage.copy([BlockCopy(0, 1, 3, 5), BlockCopy(0, 1, 4, BLOCK_SIZE), BlockCopy(0, 2, 5, 2)])
    for old, new in zip(before, contents(storage), strict=True):
        np.testing.assert_array_equal(new[:3], old[:3])
        np.testing.assert_array_equal(new[3, :, :5], old[1, :, :5])
        np.testing.assert_array_equal(new[4], old[1])
        np.testing.assert_array_equal(new[5, :, :2], old[2, :, :2])


def test_storage_that_lost_its_pools_says_so(storage: KVStorage) -> None:
    storage.grow(2)
    storage.take()
    for use in (storage.take, storage.arrays, lambda: storage.grow(3)):
        with pytest.raises(EngineError, match="lost"):
            use()
    storage.clear()
    storage.grow(3)
    assert not any(pool.any() for pool in contents(storage))


# --- forward passes ---


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_models.build("llama")


def make_paged(model: Any, num_blocks: int = 40, kernels: Kernels = CPU_KERNELS) -> PagedModel:
    paged = PagedModel(model, probe.layer_shapes(model), BLOCK_SIZE, kernels)
    paged.storage.grow(num_blocks)
    return paged


def reference_logits(model: Any, token_ids: Sequence[int]) -> np.ndarray:
    return np.array(model(mx.array([token_ids]), cache=make_prompt_cache(model))[0, -1])


@pytest.mark.parametrize("kernels", [CPU_KERNELS, STOCK_KERNELS], ids=["cpu", "stock"])
def test_one_pass_serves_many_sequences_and_touches_no_other_block(llama: Any, kernels: Kernels) -> None:
    paged = make_paged(llama, kernels=kernels)
    before = fill(paged.storage, 2)
    prompts = [tiny_models.prompt(length, seed=length) for length in (30, 1, 17, 9, 21)]
    tables = [(5, 2, 9, 30), (7,), (4, 1, 3), (11, 12), (20, 22, 21)]
    # The first three in pieces, several sequences a pass; a sequence of one token is a decode row only.
    paged.prefill([(prompts[0][:20], 0, tables[0]), (prompts[2][:16], 0, tables[2]), (prompts[3][:8], 0, tables[3])])
    paged.prefill([(prompts[4][:20], 0, tables[4]), (prompts[0][20:29], 20, tables[0])])
    logits = paged.decode([ids[-1] for ids in prompts], [len(ids) - 1 for ids in prompts], tables)
    mx.eval(logits, paged.storage.arrays())
    assert logits.shape == (5, tiny_models.VOCABULARY)
    for row, ids in enumerate(prompts):
        np.testing.assert_allclose(np.array(logits[row]), reference_logits(llama, ids), atol=2e-3)
    used = {0} | {block for table in tables for block in table}
    untouched = [block for block in range(40) if block not in used]
    assert untouched
    for old, new in zip(before, contents(paged.storage), strict=True):
        np.testing.assert_array_equal(new[untouched], old[untouched])
        # Of the last block of the first sequence (positions 24 .. 31), positions 30 and 31 are nobody's yet.
        np.testing.assert_array_equal(new[30, :, 6:], old[30, :, 6:])


def test_runner_copies_before_it_computes(llama: Any) -> None:
    """A sequence that shares 12 tokens with another goes on from copies of the other's blocks."""
    runner = ModelRunner(make_paged(llama), max_pass_tokens=256)
    first = tiny_models.prompt(16)
    second = [*first[:12], *tiny_models.prompt(8, seed=5)]
    runner.run(ScheduledStep(0, (), (PrefillChunk("a", tuple(first), 0, ((1, 2),)),), (), (40,)))
    copies = (BlockCopy(0, 2, 7, 4),)
    chunk = PrefillChunk("b", tuple(second[12:-1]), 12, ((1, 7, 8),))
    result = runner.run(ScheduledStep(1, copies, (chunk,), (decode_row("b", second[-1], 19, (1, 7, 8)),), (40,)))
    assert [token.token_id for (token,) in result.tokens] == [reference_logits(llama, second).argmax()]
    # The source still is the first sequence's.
    result = runner.run(ScheduledStep(2, (), (), (decode_row("a", first[-1], 15, (1, 2)),), (40,)))
    assert [token.token_id for (token,) in result.tokens] == [reference_logits(llama, first).argmax()]


@pytest.mark.parametrize("max_pass_tokens", [1, 7, 16, 1000])
def test_long_steps_are_done_in_passes(llama: Any, max_pass_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    paged = make_paged(llama)
    sizes: list[int] = []
    num_rows: list[int] = []
    stock_prefill = paged.prefill

    def spy(chunks: Any, rows: Any = ()) -> Any:
        sizes.append(sum(len(token_ids) for token_ids, _, _ in chunks))
        num_rows.append(len(rows))
        return stock_prefill(chunks, rows)

    monkeypatch.setattr(paged, "prefill", spy)
    runner = ModelRunner(paged, max_pass_tokens=max_pass_tokens)
    prompts = {name: tiny_models.prompt(length, seed=length) for name, length in (("a", 20), ("b", 3), ("c", 15))}
    tables = {"a": (1, 2, 3), "b": (4,), "c": (5, 6)}
    result = runner.run(
        ScheduledStep(
            0,
            (),
            tuple(PrefillChunk(name, tuple(ids[:-1]), 0, (tables[name],)) for name, ids in prompts.items()),
            tuple(decode_row(name, ids[-1], len(ids) - 1, tables[name]) for name, ids in prompts.items()),
            (40,),
        )
    )
    assert sum(sizes) == 19 + 2 + 14
    assert all(size == max_pass_tokens for size in sizes[:-1])
    assert sizes[-1] <= max_pass_tokens
    assert num_rows == [0] * (len(sizes) - 1) + [3], "the rows go with the last chunks"
    assert [token.token_id for (token,) in result.tokens] == [
        reference_logits(llama, ids).argmax() for ids in prompts.values()
    ]


def test_runner_after_reset_has_forgotten(llama: Any) -> None:
    paged = make_paged(llama)
    runner = ModelRunner(paged, max_pass_tokens=256)
    ids = tiny_models.prompt(12)
    step = ScheduledStep(
        0,
        (),
        (PrefillChunk("a", tuple(ids[:-1]), 0, ((1, 2),)),),
        (decode_row("a", ids[-1], 11, (1, 2)),),
        (40,),
    )
    before = runner.run(step)
    # As a pass that failed half-way leaves it.
    paged.storage.take()
    with pytest.raises(EngineError, match="lost"):
        runner.run(step)
    runner.reset()
    assert paged.storage.num_blocks == 0
    assert runner.run(step).tokens == before.tokens


def test_steps_are_plain_data_and_can_be_replayed(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded run, with prefix copies and preemptions in it, on a fresh runner from its pickled steps alone."""
    record: list[tuple[bytes, StepResult]] = []
    run = ModelRunner.run

    def recording(self: ModelRunner, step: ScheduledStep, masks: MaskSource | None = None) -> StepResult:
        result = run(self, step, masks)
        record.append((pickle.dumps(step), result))
        return result

    loaded = tiny_models.loaded(llama)
    built = build_engine(loaded, small_pool(), device.detect(), tiny_models.CONTEXT_LENGTH, run_ahead=False)
    monkeypatch.setattr(ModelRunner, "run", recording)
    shared = tiny_models.prompt(21)
    requests = [
        tiny_models.make_request(f"{i}", [*shared, *tiny_models.prompt(1 + 4 * i, seed=i)], 24) for i in range(6)
    ]
    tiny_models.run(built.engine, requests)
    monkeypatch.undo()

    steps = [pickle.loads(pickled) for pickled, _ in record]
    assert built.engine.stats().num_preemptions > 0
    assert any(step.copies for step in steps)
    assert max(len(pickled) for pickled, _ in record) < 10_000
    fresh = ModelRunner(PagedModel(llama, probe.layer_shapes(llama), BLOCK_SIZE, CPU_KERNELS), max_pass_tokens=64)
    for step, (_, result) in zip(steps, record, strict=True):
        assert fresh.run(step).tokens == result.tokens


def small_pool() -> EngineConfig:
    """25 blocks of 8 tokens."""
    bytes_per_token = 3 * 2 * (16 + 16) * 4  # layers, key/value heads, key and value dimensions, float32
    return tiny_models.engine_config(block_size=BLOCK_SIZE, kv_cache_bytes=25 * BLOCK_SIZE * bytes_per_token)


# --- fallback runner ---


def test_fallback_runner_keeps_sequences_apart() -> None:
    model = tiny_models.build("gemma3")
    runner = FallbackRunner(model, max_pass_tokens=8)
    prompts = {"a": tiny_models.prompt(50), "b": tiny_models.prompt(20, seed=1)}
    expected = {name: tiny_models.reference(model, ids, 6) for name, ids in prompts.items()}
    chunks = [PrefillChunk(name, tuple(ids[:10]), 0, ()) for name, ids in prompts.items()]
    chunks += [PrefillChunk(name, tuple(ids[10:-1]), 10, ()) for name, ids in prompts.items()]
    runner.run(ScheduledStep(0, (), tuple(chunks), (), ()))
    answers: dict[str, list[int]] = {name: [] for name in prompts}
    for step_id in range(1, 7):
        rows = tuple(
            DecodeRow(name, (ids + answers[name])[-1], len(ids) - 1 + step_id - 1, (), tiny_models.GREEDY, 0, 0)
            for name, ids in prompts.items()
        )
        for row, (token,) in zip(rows, runner.run(ScheduledStep(step_id, (), (), rows, ())).tokens, strict=True):
            answers[row.request_id].append(token.token_id)
    assert answers == expected


def test_fallback_runner_drops_what_is_released_and_starts_over_at_0() -> None:
    model = tiny_models.build("gemma3")
    runner = FallbackRunner(model, max_pass_tokens=8)
    ids = tiny_models.prompt(20)
    chunk = PrefillChunk("a", tuple(ids[:-1]), 0, ())
    row = DecodeRow("a", ids[-1], 19, (), tiny_models.GREEDY, 0, 0)
    first = runner.run(ScheduledStep(0, (), (chunk,), (row,), ()))
    assert [token.token_id for (token,) in first.tokens] == tiny_models.reference(model, ids, 1)
    assert runner.run(ScheduledStep(1, (), (chunk,), (row,), ())).tokens == first.tokens
    with pytest.raises(EngineError, match="has no cache"):
        runner.run(ScheduledStep(2, (), (), (row,), (), released=("a",)))


# --- operations and device ---


def test_tuned_exp_and_swiglu_equal_the_stock_ones() -> None:
    print("seed 3")
    random = np.random.default_rng(3)
    scores = random.uniform(-80, 0, size=(64, 500)).astype(np.float32)
    found = np.array(cpu_ops.shifted_exp(mx.array(scores), mx.zeros((64, 1))))
    np.testing.assert_allclose(found, np.exp(scores.astype(np.float64)), rtol=5e-6)
    far = np.array(cpu_ops.shifted_exp(mx.array([0.0, -90.0, -1e4, -1e30]), mx.zeros((1,))))
    assert far[0] == 1.0
    assert (far[1:] < 1e-37).all()

    gate, x = (mx.array(random.normal(size=(8, 1000)).astype(np.float32) * 20) for _ in range(2))
    np.testing.assert_allclose(
        np.array(cpu_ops.swiglu(gate, x)), np.array(mx.sigmoid(gate) * gate * x), rtol=2e-5, atol=1e-6
    )
    extremes = cpu_ops.swiglu(mx.array([-1e30, -200.0, 0.0, 200.0, 1e30]), mx.ones(5))
    np.testing.assert_allclose(np.array(extremes), [0.0, 0.0, 0.0, 200.0, 1e30], atol=1e-6)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_tuned_swiglu_leaves_half_precision_to_mlx_lm(dtype: mx.Dtype) -> None:
    gate, x = mx.random.normal((2, 4, 8), key=mx.random.key(0)).astype(dtype)
    found = cpu_ops.swiglu(gate, x)
    assert found.dtype == dtype
    assert mx.array_equal(found, cpu_ops._stock_swiglu(gate, x)).item()


def test_tuned_swiglu_can_replace_mlx_lms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some models' layers live in mlx_lm.models.activations itself; ours still finds the stock one."""
    monkeypatch.setattr(activations, "swiglu", cpu_ops._stock_swiglu)
    other = type(activations)("other")
    other.swiglu = activations.swiglu  # type: ignore[attr-defined]
    cpu_ops.install([activations])
    cpu_ops.install([activations, other])
    assert activations.swiglu is other.swiglu is cpu_ops.swiglu
    assert activations.swiglu(mx.ones((2,), mx.float16), mx.ones((2,), mx.float16)).dtype == mx.float16


def test_device_describes_this_machine() -> None:
    found = device.detect()
    assert found.is_metal == (found.kind == "metal") == mx.metal.is_available()
    assert found.dtype_policy == ("keep" if found.is_metal else "float32")
    assert 1e8 < found.memory_budget < 1e13
    assert found.max_prefill_tokens >= found.max_pass_tokens


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("2000000000\n", 1_400_000_000), ("max\n", None), (str(2**62), None), (None, None)],
)
def test_memory_budget_heeds_the_control_group(
    limit: str | None, expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "memory.max"
    if limit is not None:
        file.write_text(limit)
    total = 8 * 2**30
    monkeypatch.setattr(device, "Path", lambda _: file)
    monkeypatch.setattr(device.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": total // 4096}.__getitem__)
    monkeypatch.setattr(device.mx.metal, "is_available", lambda: False)
    assert device.detect().memory_budget == (expected or int(total * 0.7))


def test_configuring_bounds_the_cache_of_freed_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []
    monkeypatch.setattr(device.mx, "set_cache_limit", limits.append)
    cpu = device.Device("cpu", "CPU", 1_000_000, "float32", max_pass_tokens=1, max_prefill_tokens=1)
    device.configure(cpu)
    assert limits == [50_000]


def test_compiled_functions_keep_the_shapes_used_last() -> None:
    traced: list[int] = []

    def function(x: mx.array) -> mx.array:
        traced.append(x.size)
        return x + 1

    compiled = CompiledByShape(function, max_traces=2)
    for size in (1, 2, 1, 2, 3, 2, 3, 1, 3):
        assert compiled(size, mx.zeros(size)).tolist() == [1.0] * size
    assert traced == [1, 2, 3, 1]
