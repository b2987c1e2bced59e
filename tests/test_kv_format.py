"""Quantised pools: rows and what is lost in them, attention over them, models on them, and who is refused."""

import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import test_probe
import tiny_models
from tiny_models import CONTEXT_LENGTH, CPU_KERNELS, STOCK_KERNELS, quantised_kernels

from mlxserve.config import EngineConfig
from mlxserve.core.pieces import Pieces
from mlxserve.engine.build import build_engine
from mlxserve.errors import ModelLoadError
from mlxserve.runner import device, probe
from mlxserve.runner.attention import paths, prefill
from mlxserve.runner.attention.decode import DecodeInputs
from mlxserve.runner.attention.prefill import ChunkInputs
from mlxserve.runner.kv_format import HEADER_BYTES, QuantisedFormat, kv_format
from mlxserve.runner.kv_storage import LayerShape
from mlxserve.runner.paged_model import Kernels, PagedModel
from mlxserve.store import loader

SCRIPTS = Path(__file__).parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench_kv_quant  # noqa: E402

BITS = pytest.mark.parametrize("bits", [8, 4])
BLOCK_SIZE, NUM_HEADS, NUM_KV_HEADS, KEY_DIM, VALUE_DIM = 8, 4, 2, 16, 24


def vectors(*shape: int, seed: int = 0) -> mx.array:
    """Normal numbers, of which one element in each vector is large, as in keys."""
    array = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    array[..., 3] *= 30
    return mx.array(array)


def scales(rows: mx.array) -> np.ndarray:
    return np.array(rows[..., -HEADER_BYTES:].view(mx.bfloat16).astype(mx.float32)[..., 0])


# --- rows ---


@BITS
@pytest.mark.parametrize("dim", [8, 16, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("size", [1e-20, 1e-3, 1.0, 1e4, 1e20])
def test_no_element_is_further_off_than_half_a_step(bits: int, dim: int, size: float) -> None:
    kv_format = QuantisedFormat(bits)
    given = vectors(5, 3, dim) * size
    rows = kv_format.encode(given)
    assert (rows.shape[-1], rows.dtype) == kv_format.row(dim, mx.float32)
    turned = np.array(kv_format.turn(given))
    steps = scales(rows)
    error = np.abs(np.array(kv_format.decode(rows, mx.float32)) - turned)
    assert (error.max(axis=-1) <= 0.5 * steps + 1e-6 * np.abs(turned).max(axis=-1)).all()
    # A step is what the vector's range needs, and what rounding it outwards adds.
    ranges = np.ptp(turned, axis=-1) / (2**bits - 1)
    assert ((steps >= ranges) & (steps <= 1.03 * ranges)).all()


@BITS
@pytest.mark.parametrize("value", [0.0, 1.0, -7.5, 1e-20, 1e30])
def test_vectors_without_a_range_are_kept(bits: int, value: float) -> None:
    kv_format = QuantisedFormat(bits)
    constant = mx.full((2, 64), value / 64)
    turned = mx.zeros((2, 64))
    turned[1] = value  # in no direction of its own: every turned element is the same
    for given in (constant, kv_format.turn_back(turned) / 8):
        found = kv_format.turn_back(kv_format.decode(kv_format.encode(given), mx.float32))
        assert mx.isfinite(found).all()
        largest = mx.abs(given).max()
        assert mx.allclose(found, given, rtol=0, atol=(8 / (2**bits - 1) * largest).item())


@BITS
def test_a_row_depends_on_its_own_vector_only(bits: int) -> None:
    kv_format = QuantisedFormat(bits)
    given, others = vectors(6, 2, 64), vectors(6, 2, 64, seed=1) * 100
    mixed = mx.concatenate([others[:3], given[3:]])
    assert mx.array_equal(kv_format.encode(mixed)[3:], kv_format.encode(given)[3:])


@BITS
def test_turning_keeps_products_and_sums(bits: int) -> None:
    kv_format = QuantisedFormat(bits)
    a, b = vectors(7, 80), vectors(7, 80, seed=1)
    assert mx.allclose((kv_format.turn(a) * kv_format.turn(b)).sum(-1), (a * b).sum(-1), rtol=1e-4, atol=1e-3)
    assert mx.allclose(kv_format.turn_back(kv_format.turn(a)), a, atol=1e-4)


@BITS
def test_products_and_sums_are_those_of_decoded_rows(bits: int) -> None:
    kv_format = QuantisedFormat(bits)
    rows = kv_format.encode(vectors(3, 2, 9, 16))
    decoded = kv_format.decode(rows, mx.float32)
    queries, weights = mx.random.normal((3, 2, 5, 16)), mx.random.uniform(shape=(3, 2, 5, 9))
    assert mx.allclose(kv_format.products(queries, rows), queries @ decoded.swapaxes(-1, -2), rtol=1e-4, atol=1e-3)
    assert mx.allclose(kv_format.sums(weights, rows), weights @ decoded, rtol=1e-4, atol=1e-3)


def test_memory_of_a_token() -> None:
    """The figures of docs/architecture.md: of 32- and 16-bit keys and values, at heads of 64 and 128."""
    shares = {
        (bits, dtype.size, dim): LayerShape(3, dim, dim, dtype).bytes_per_token(kv_format(bits))
        / LayerShape(3, dim, dim, dtype).bytes_per_token(kv_format(None))
        for bits in (8, 4)
        for dtype in (mx.float32, mx.bfloat16)
        for dim in (64, 128)
    }
    assert {key: round(share, 3) for key, share in shares.items()} == {
        (8, 4, 64): 0.266,
        (8, 4, 128): 0.258,
        (8, 2, 64): 0.531,
        (8, 2, 128): 0.516,
        (4, 4, 64): 0.141,
        (4, 4, 128): 0.133,
        (4, 2, 64): 0.281,
        (4, 2, 128): 0.266,
    }


# --- attention ---


@BITS
@pytest.mark.parametrize("kernels", [CPU_KERNELS, STOCK_KERNELS], ids=["cpu", "stock"])
@pytest.mark.parametrize("starts", [[0], [40], [0, 7, 8, 40]])
def test_attention_over_quantised_pools_is_that_over_decoded_ones(
    bits: int, kernels: Kernels, starts: list[int]
) -> None:
    kv_format = QuantisedFormat(bits)
    tables = [(9, 8, 7, 2, 1, 10), (4,), (5, 6), (3, 11, 12, 13, 14, 15)][-len(starts) :]
    queries = mx.random.normal((len(starts), NUM_HEADS, KEY_DIM), key=mx.random.key(0))
    keys = kv_format.encode(vectors(16, NUM_KV_HEADS, BLOCK_SIZE, KEY_DIM))
    values = kv_format.encode(vectors(16, NUM_KV_HEADS, BLOCK_SIZE, VALUE_DIM))
    decoded = [kv_format.decode(pool, mx.float32) for pool in (keys, values)]
    inputs, positions = DecodeInputs.build(starts, tables, BLOCK_SIZE, len(starts)), mx.array(starts)

    def attend(path: paths.DecodePath, *pools: mx.array) -> mx.array:
        return path.prepare(inputs, positions, NUM_KV_HEADS, BLOCK_SIZE)(queries, *pools, 0.3)

    expected = attend(paths.GatherMM(kernels.shifted_exp), *decoded)
    for path in paths.candidates(kv_format, kernels.shifted_exp):
        found = attend(path, keys, values)
        assert found.shape == (len(starts), NUM_HEADS, VALUE_DIM)
        assert mx.allclose(found, expected, atol=1e-4), path.name
    for row, (start, table) in enumerate(zip(starts, tables, strict=True)):
        chunk = ChunkInputs.build(0, 1, start, table, BLOCK_SIZE)
        opened, blocks = kv_format.open(keys, chunk.blocks, mx.float32)
        chunk = ChunkInputs(0, 1, start, blocks)
        opened_values, _ = kv_format.open(values, ChunkInputs.build(0, 1, start, table, BLOCK_SIZE).blocks, mx.float32)
        found = prefill.attend(queries[row : row + 1], opened, opened_values, chunk, 0.3, kernels.chunk_attention)
        assert mx.allclose(found[0], expected[row], atol=1e-4)


# --- models ---


@BITS
@pytest.mark.parametrize("name", tiny_models.BLOCK_CACHE)
def test_answers_are_those_of_mlx_lm_with_rounded_keys_and_values(bits: int, name: str) -> None:
    """Chunks, rows beside a chunk and rows alone, all attend to what the pool holds, their own positions included."""
    model = tiny_models.build(name)
    token_ids = tiny_models.prompt(40)
    rounded = model(mx.array([token_ids]), cache=tiny_models.rounded_caches(model, bits))[0, -3:]
    plain = model(mx.array([token_ids]))[0, -3:]
    paged = PagedModel(model, probe.layer_shapes(model), BLOCK_SIZE, quantised_kernels(bits))
    paged.storage.grow(8)
    table = (3, 1, 2, 5, 4)
    paged.prefill([(token_ids[:13], 0, table)])
    mx.eval(paged.storage.arrays())
    paged.prefill([(token_ids[13:30], 13, table)])
    mx.eval(paged.storage.arrays())
    found = []
    for mixed in ([(token_ids[30:37], 30, table)], []):
        position = 37 + len(found)
        found.append(paged.prefill(mixed, [(token_ids[position], position, table)]))
        mx.eval(found[-1], paged.storage.arrays())
    found.append(paged.decode([token_ids[39]], [39], [table]))
    mx.eval(found[-1])
    lost = mx.abs(rounded - plain).max()
    # A code that rounding tips over is a part of what is lost, and a small one.
    assert mx.abs(mx.concatenate(found) - rounded).max() < 0.1 * lost


@pytest.mark.parametrize("name", tiny_models.FALLBACK)
def test_models_on_other_caches_are_refused(name: str) -> None:
    loaded = tiny_models.loaded(tiny_models.build(name))
    with pytest.raises(ModelLoadError, match=r"cannot be quantised.*mlx-lm's own caches.*leave kv_bits out"):
        build_engine(loaded, tiny_models.engine_config(kv_bits=8), device.detect(), CONTEXT_LENGTH)


def test_heads_that_fill_no_whole_bytes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*_: Any) -> Pieces[probe.Findings]:
        yield
        return probe.Findings(4, True)

    monkeypatch.setattr(probe, "layer_shapes", lambda _: [LayerShape(2, 8, 7, mx.float32)])
    monkeypatch.setattr(probe, "check_equivalence", found)
    loaded = tiny_models.loaded(test_probe.Quirky())
    with pytest.raises(ModelLoadError, match=r"kv_bits=4 does not suit tiny: its heads of dimension 7.*8 bits"):
        build_engine(loaded, tiny_models.engine_config(kv_bits=4), device.detect(), CONTEXT_LENGTH)


def test_the_same_memory_holds_more_blocks() -> None:
    def max_blocks(bits: int | None) -> int:
        loaded = tiny_models.loaded(tiny_models.build("llama"))
        config = EngineConfig(kv_bits=bits, kv_cache_bytes=1_000_000, max_num_seqs=1)
        return build_engine(loaded, config, device.detect(), CONTEXT_LENGTH).engine.stats().max_blocks

    per_token = 3 * 2 * 2  # layers, keys and values, heads
    assert max_blocks(None) == 1_000_000 // (64 * per_token * 16 * 4)
    assert max_blocks(8) == 1_000_000 // (64 * per_token * (16 + 4))
    assert max_blocks(4) == 1_000_000 // (64 * per_token * (8 + 4))


@pytest.mark.slow
def test_divergence_of_the_demo_model(demo_model: Path) -> None:
    """On the first 160 tokens of the script's text; docs/architecture.md has the figures on 2,000."""
    loaded = loader.load(demo_model, name="smollm2-135m", dtype_policy="float32")
    caches = bench_kv_quant.Caches(loaded, [8, 4])
    token_ids = loaded.tokenizer.encode(bench_kv_quant.TEXT.read_text(encoding="utf-8"))[:160]
    found: dict[int, Any] = dict(caches.qualities(token_ids))
    assert 0 < found[8].kl_mean < 0.01
    assert found[8].kl_mean < found[4].kl_mean < 0.1
    assert found[8].top1_agreement > 0.9
    assert found[8].perplexity == pytest.approx(found[8].plain_perplexity, rel=0.01)
    assert caches.bytes_per_token(8) <= caches.bytes_per_token(None) / 2
