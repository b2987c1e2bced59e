"""The pools are written in place: no step copies one. And an engine that is dropped gives its memory back."""

import gc

import mlx.core as mx
import pytest
import tiny_models
from tiny_models import decode_row, quantised_kernels

from mlxserve.core.step import BlockCopy, PrefillChunk, ScheduledStep
from mlxserve.engine.build import build_engine
from mlxserve.runner import device, probe
from mlxserve.runner.kv_format import kv_format
from mlxserve.runner.kv_storage import KVStorage, LayerShape
from mlxserve.runner.model_runner import ModelRunner
from mlxserve.runner.paged_model import PagedModel

BLOCK_SIZE = 64
POOL_BYTES = 74_000_000
NUM_ROWS = 4
NUM_STEPS = 200


@pytest.fixture(params=[None, 8, 4], ids=["plain", "8 bit", "4 bit"])
def paged(request: pytest.FixtureRequest) -> PagedModel:
    """A tiny model with a pool thousands of times what a step computes with."""
    model = tiny_models.build("llama")
    paged = PagedModel(model, probe.layer_shapes(model), BLOCK_SIZE, quantised_kernels(request.param))
    paged.storage.grow(POOL_BYTES // paged.storage.bytes_per_block)
    return paged


def decode_step(index: int) -> ScheduledStep:
    tables = [tuple(range(1 + 10 * row, 9 + 10 * row)) for row in range(NUM_ROWS)]
    rows = tuple(decode_row(f"{row}", (index + row) % 100, index, tables[row]) for row in range(NUM_ROWS))
    return ScheduledStep(index, (), (), rows, (0,))


def rise_over(steps: list[ScheduledStep], runner: ModelRunner) -> int:
    """Bytes that peak memory rises over what is active before."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for step in steps:
        runner.run(step)
    return mx.get_peak_memory() - before


def array_bytes(paged: PagedModel) -> int:
    """One array of the pool: keys of one layer."""
    num_arrays = 2 * 3
    return paged.storage.num_blocks * paged.storage.bytes_per_block // num_arrays


def test_decoding_copies_no_pool(paged: PagedModel) -> None:
    runner = ModelRunner(paged, max_pass_tokens=256)
    rise = rise_over([decode_step(index) for index in range(NUM_STEPS)], runner)
    # Far stricter than a quarter of the pool: even the keys of a single layer were never there twice.
    assert rise < array_bytes(paged) / 4


def test_prefill_copies_no_pool(paged: PagedModel) -> None:
    runner = ModelRunner(paged, max_pass_tokens=64)
    table = tuple(range(1, 9))
    chunks = [PrefillChunk("a", tuple(range(40)), 40 * index, (table,)) for index in range(10)]
    rise = rise_over([ScheduledStep(i, (), (chunk,), (), (0,)) for i, chunk in enumerate(chunks)], runner)
    assert rise < array_bytes(paged) / 4


def test_a_second_reference_to_a_pool_shows(paged: PagedModel) -> None:
    """That these tests can fail: a reference held over a step makes MLX copy every array of the pool."""
    runner = ModelRunner(paged, max_pass_tokens=256)
    runner.run(decode_step(0))
    held = paged.storage.arrays()
    assert rise_over([decode_step(1)], runner) > 5 * array_bytes(paged)
    del held
    assert rise_over([decode_step(2)], runner) < array_bytes(paged) / 4


def test_a_growing_pool_has_one_array_twice_at_most(paged: PagedModel) -> None:
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    old_bytes = array_bytes(paged)
    paged.storage.grow(2 * paged.storage.num_blocks)
    grown = mx.get_active_memory() - before
    assert grown == pytest.approx(6 * old_bytes, rel=0.01)
    # Twice one array: the old half of it, and what is put behind it while both are joined.
    assert mx.get_peak_memory() - before - grown < 2.5 * old_bytes


def test_an_engine_that_is_dropped_frees_its_memory() -> None:
    def active() -> int:
        gc.collect()
        mx.clear_cache()
        return mx.get_active_memory()

    def serve(name: str) -> None:
        loaded = tiny_models.loaded(tiny_models.build(name))
        built = build_engine(loaded, tiny_models.engine_config(), device.detect(), 4096)
        tiny_models.run(built.engine, [tiny_models.make_request("a", tiny_models.prompt(40), 10)])

    # Once for what stays for good: modules of mlx-lm, compiled functions of ours.
    for name in ("llama", "gemma3"):
        serve(name)
    before = active()
    for name in ("llama", "gemma3"):
        serve(name)
    assert active() - before < 10_000


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_copying_a_block_copies_no_pool(bits: int | None) -> None:
    """A prefix hit within a block copies that block; the cost must not grow with the pool."""
    storage = KVStorage([LayerShape(2, 16, 16, mx.float32)] * 2, 16, kv_format(bits))
    storage.grow(2000)
    keys, values = storage.take()
    for pool in (*keys, *values):
        pool[3] = mx.ones(pool.shape[1:], pool.dtype)
    storage.put((keys, values))
    del keys, values, pool
    mx.eval(storage.arrays())
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    storage.copy([BlockCopy(0, 3, 7, 5), BlockCopy(0, 3, 8, 16)])
    one_pool = 2000 * storage.bytes_per_block // 4
    assert mx.get_peak_memory() - before < one_pool / 4
    for pool in (*storage.arrays()[0], *storage.arrays()[1]):
        assert pool[7, :, :5].min().item() == pool[8].min().item() == 1.0
        assert pool[9].max().item() == 0.0
