"""Adapters against mlx-lm's own loading of them; several beside their base, over one copy of its weights."""

import asyncio
import gc
import json
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
import tiny_adapters
import tiny_models
from helpers_engine import TIMEOUT, on_loop
from helpers_served import Answer, get, read
from mlx.utils import tree_flatten

from mlxserve.config import EngineConfig
from mlxserve.core.generation import GenerationRequest, TokenPrompt
from mlxserve.core.pieces import finish
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.engine.model_host import ModelHost
from mlxserve.errors import ModelLoadError, ModelNotFound
from mlxserve.store import adapter_loader, loader
from mlxserve.store.adapter import read_adapter
from mlxserve.store.registry import Registry

NUM_TOKENS = 24

ROUNDING = 1e-4
"""Difference of logits, as a share of their spread, that two orders of the same float32 sums may make."""


def make_prompt(length: int, *, seed: int = 0) -> list[int]:
    """Of the tokens that the tokenizer has, too, which are fewer than the model's."""
    return [token_id % 400 for token_id in tiny_models.prompt(length, seed=seed)]


PROMPT = make_prompt(70)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tmp_path_factory.mktemp("base") / "base", "llama")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """Holds the adapters french and pirate, and a models.toml that names them, their base, and them both."""
    folder = tmp_path_factory.mktemp("adapters")
    tiny_adapters.save(folder / "french", checkpoint, seed=1)
    tiny_adapters.save(folder / "pirate", checkpoint, seed=2, keys=["self_attn.q_proj", "self_attn.v_proj"])
    (folder / "models.toml").write_text(
        f"[base]\nsource = {{ path = '{checkpoint}' }}\n"
        f"[french]\nadapter = {{ path = '{folder}/french' }}\n"
        f"[pirate]\nadapter = {{ path = '{folder}/pirate' }}\n"
        f"[parrot]\nsource = {{ path = '{checkpoint}' }}\nadapter = {{ path = '{folder}/pirate' }}\n"
        f"context_length = 100\ndescription = 'A parrot'\n"
    )
    return folder


@asynccontextmanager
async def hosting(folder: Path, **settings: Any) -> AsyncIterator[ModelHost]:
    config = EngineConfig(**({"block_size": 16, "kv_cache_bytes": 2_000_000, "keep_alive": -1.0} | settings))
    host = ModelHost(config, Registry(user_file=folder / "models.toml"))
    await host.start()
    try:
        yield host
    finally:
        await asyncio.wait_for(host.close(timeout=TIMEOUT), TIMEOUT)


async def ask(
    host: ModelHost, name: str, prompt: list[int] | None = None, request_id: str = "r", cache_salt: str | None = None
) -> Answer:
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, num_logprobs=1)
    request = GenerationRequest(request_id, TokenPrompt(tuple(prompt or PROMPT)), sampling, cache_salt=cache_salt)
    lease = await host.acquire(name)
    try:
        answer = await read(await lease.model.generate(request))
    finally:
        lease.release()
    assert answer.error is None
    return answer


def ids(answer: Answer) -> list[int]:
    return [token.token_id for delta in answer.deltas for token in delta.tokens]


def reference(checkpoint: Path, adapter: Path | None, prompt: list[int] | None = None) -> list[int]:
    model, _ = mlx_lm.load(str(checkpoint), adapter_path=None if adapter is None else str(adapter))[:2]
    return tiny_models.reference(model, prompt or PROMPT, NUM_TOKENS)


def adapted(checkpoint: Path, adapter: Path, dtype_policy: loader.DtypePolicy = "float32") -> nn.Module:
    base = loader.load(checkpoint, name="base", dtype_policy=dtype_policy)
    pieces = adapter_loader.adapt_pieces(base, read_adapter(adapter, "base"), "base+adapter", dtype_policy)
    return finish(pieces).model


def assert_equal(ours: nn.Module, theirs: nn.Module) -> None:
    expected = theirs(mx.array([PROMPT])).astype(mx.float32)
    difference = (ours(mx.array([PROMPT])).astype(mx.float32) - expected).abs().max()
    assert difference.item() <= ROUNDING * (expected - expected.mean()).abs().max().item()


@pytest.mark.parametrize(
    ("architecture", "bits", "kind"),
    [
        ("llama", None, "lora"),
        ("llama", 4, "lora"),
        ("llama", None, "dora"),
        ("llama", 8, "dora"),
        ("qwen3-moe", None, "lora"),
        ("qwen3-moe", 4, "lora"),
        ("gemma3", 4, "lora"),
        ("gpt-oss", None, "lora"),
        ("deepseek-v3", None, "lora"),
    ],
)
@pytest.mark.parametrize("dtype_policy", ["float32", "keep"])
def test_logits_are_mlx_lms(
    architecture: str, bits: int | None, kind: str, dtype_policy: loader.DtypePolicy, tmp_path: Path
) -> None:
    checkpoint = tiny_models.save(tmp_path / "base", architecture, bits=bits)
    adapter = tiny_adapters.save(tmp_path / "adapter", checkpoint, kind=kind)
    theirs = mlx_lm.load(str(checkpoint), adapter_path=str(adapter))[0]
    assert_equal(adapted(checkpoint, adapter, dtype_policy), theirs)
    plain = mlx_lm.load(str(checkpoint))[0]
    with pytest.raises(AssertionError):
        assert_equal(plain, theirs)


@pytest.mark.parametrize(
    ("architecture", "bits", "kind"), [("llama", 4, "dora"), ("qwen3-moe", 4, "lora"), ("gemma3", None, "lora")]
)
@on_loop
async def test_answers_are_mlx_lms(architecture: str, bits: int | None, kind: str, tmp_path: Path) -> None:
    """Over the block cache and over mlx-lm's own."""
    checkpoint = tiny_models.save(tmp_path / "base", architecture, bits=bits)
    adapter = tiny_adapters.save(tmp_path / "adapter", checkpoint, kind=kind)
    (tmp_path / "models.toml").write_text(
        f"[base]\nsource = {{ path = '{checkpoint}' }}\n[mine]\nadapter = {{ path = '{adapter}' }}\n"
    )
    expected = reference(checkpoint, adapter)
    assert len(expected) > 4
    async with hosting(tmp_path) as host:
        answers = await asyncio.gather(ask(host, "base+mine"), ask(host, "base"))
    assert ids(answers[0])[: len(expected)] == expected
    assert ids(answers[1])[: len(expected)] != expected


@pytest.mark.parametrize("num_layers", [-1, 1])
def test_layers_and_embeddings_by_name(num_layers: int, checkpoint: Path, tmp_path: Path) -> None:
    keys = ["mlp.down_proj", "lm_head", "model.embed_tokens"]
    adapter = tiny_adapters.save(tmp_path / "adapter", checkpoint, num_layers=num_layers, keys=keys)
    model = adapted(checkpoint, adapter)
    assert_equal(model, mlx_lm.load(str(checkpoint), adapter_path=str(adapter))[0])
    assert "lora_a" in model.lm_head
    assert "lora_a" in model.model.embed_tokens


@on_loop
async def test_each_gives_its_own_answers_side_by_side(checkpoint: Path, folder: Path) -> None:
    seed = int(os.environ.get("MLXSERVE_TEST_SEED") or random.randrange(2**32))
    print(f"replay with MLXSERVE_TEST_SEED={seed}")
    adapters = {"base": None, "base+french": folder / "french", "base+pirate": folder / "pirate"}
    prompts = [make_prompt(length, seed=length) for length in (3, 40, 90)]
    expected = {
        (name, number): reference(checkpoint, adapter, prompt)
        for name, adapter in adapters.items()
        for number, prompt in enumerate(prompts)
    }
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected)
    async with hosting(folder) as host:
        for _ in range(2):
            wishes = list(expected)
            random.Random(seed).shuffle(wishes)
            asked = [ask(host, name, prompts[number], f"{name} {number}") for name, number in wishes]
            answers = await asyncio.gather(*asked)
            for wish, answer in zip(wishes, answers, strict=True):
                tokens = expected[wish]
                assert ids(answer)[: len(tokens)] == tokens
        assert {info.name for info in host.loaded()} == adapters.keys()


@on_loop
async def test_the_base_answers_alike_to_the_bit_whatever_is_beside_it(folder: Path) -> None:
    async with hosting(folder) as host:
        answers = [await ask(host, "base", cache_salt="alone")]
        await ask(host, "base+french")
        await ask(host, "base+pirate")
        answers.append(await ask(host, "base", cache_salt="beside them"))
        beside = ask(host, "base+pirate", cache_salt="too")
        answers.append((await asyncio.gather(ask(host, "base", cache_salt="with them"), beside))[0])
        await host.unload("base+french")
        answers.append(await ask(host, "base", cache_salt="beside one"))
    first, *others = ([token for delta in answer.deltas for token in delta.tokens] for answer in answers)
    assert len(first) == NUM_TOKENS
    assert first[0].logprobs is not None
    for tokens in others:
        assert tokens == first


@on_loop
async def test_three_take_the_memory_of_one_and_go_in_any_order(checkpoint: Path, folder: Path) -> None:
    orders = [["base", "base+french", "base+pirate"], ["base+pirate", "base", "base+french"]]
    base_bytes = loader.load(checkpoint, name="base", dtype_policy="float32").weight_bytes
    async with hosting(folder, kv_cache_bytes=200_000) as host:
        for loading, unloading in zip(orders, reversed(orders), strict=True):
            # What earlier tests left is not of this one; loads have exempted it from collection.
            gc.unfreeze()
            gc.collect()
            before = mx.get_active_memory()
            for name in loading:
                await host.preload(name)
            infos = host.loaded()
            assert [info.weight_bytes >= base_bytes for info in infos] == [True, False, False]
            active = mx.get_active_memory() - before
            own_bytes = sum(info.weight_bytes for info in infos) - base_bytes
            assert 0 < own_bytes < base_bytes / 2
            assert base_bytes < sum(info.size for info in infos) <= active + 1000
            assert active < base_bytes * 1.2 + own_bytes + 3 * 200_000
            expected = {name: ids(await ask(host, name)) for name in loading}
            for index, name in enumerate(unloading):
                await host.unload(name)
                for other in unloading[index + 1 :]:
                    assert ids(await ask(host, other)) == expected[other]
            assert host.loaded() == []
            assert mx.get_active_memory() - before < 10_000


@on_loop
async def test_a_name_for_base_and_adapter_is_a_name_for_the_same_engine(folder: Path) -> None:
    async with hosting(folder) as host:
        first, second = await get(host, "base+pirate"), await get(host, "Parrot")
        assert (first.name, second.name, second.context_length) == ("base+pirate", "parrot", 100)
        (info,) = host.loaded()
        assert info.name == "base+pirate"
        assert ids(await ask(host, "parrot", PROMPT[:30])) == ids(await ask(host, "base+pirate", PROMPT[:30]))
        listed = {each.name: each.loaded for each in host.models()}
        assert listed.items() >= {"base+pirate": True, "parrot": True, "base": False}.items()
        assert not listed.keys() & {"french", "pirate", "base+french"}


@on_loop
async def test_an_adapter_that_is_taken_out_of_the_file_while_it_is_loaded(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text((folder / "models.toml").read_text())
    async with hosting(tmp_path) as host:
        await host.preload("base+french")
        file.write_text(file.read_text().replace("[french]", "[francais]"))
        assert "base+french" not in {info.name for info in host.models()}
        with pytest.raises(ModelNotFound, match="no adapter is called 'french'"):
            await host.acquire("base+french")
        assert (await get(host, "base+francais")).name == "base+francais"
        assert [info.name for info in host.loaded()] == ["base+french"]


@on_loop
async def test_who_come_at_once_read_the_base_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, reads = loader.load_pieces, []

    def load_pieces(files: Any, dtype_policy: Any) -> Any:
        reads.append(files)
        return stock(files, dtype_policy)

    monkeypatch.setattr("mlxserve.engine.loading.loader.load_pieces", load_pieces)
    async with hosting(folder) as host:
        await asyncio.gather(*(host.preload(name) for name in ("base+french", "base", "parrot")))
        assert len(host.loaded()) == 3
    assert len(reads) == 1


@on_loop
async def test_an_adapter_that_does_not_fit_leaves_nothing_behind(folder: Path, tmp_path: Path) -> None:
    other = tiny_models.save(tmp_path / "other", "qwen3-moe")
    tiny_adapters.save(tmp_path / "strange", other)
    file = tmp_path / "models.toml"
    file.write_text((folder / "models.toml").read_text() + f"[strange]\nadapter = {{ path = '{tmp_path}/strange' }}\n")
    async with hosting(tmp_path) as host:
        await host.preload("base")
        await host.unload("base")
        before = mx.get_active_memory()
        errors = []
        for _ in range(2):
            with pytest.raises(ModelLoadError, match=r"does not fit this model \(llama") as caught:
                await host.preload("base+strange")
            errors.append(caught.value)
            assert mx.get_active_memory() - before < 10_000
        assert "not an adapter parameter" in str(errors[0])
        assert ids(await ask(host, "base+french")) != ids(await ask(host, "base"))


@on_loop
async def test_blocks_on_disk_are_an_adapters_own(checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    """Also of two that differ in nothing but their scale."""
    louder = tmp_path / "louder"
    louder.mkdir()
    (louder / "adapters.safetensors").write_bytes((folder / "french" / "adapters.safetensors").read_bytes())
    config = json.loads((folder / "french" / "adapter_config.json").read_text())
    config["lora_parameters"]["scale"] *= 3
    (louder / "adapter_config.json").write_text(json.dumps(config))
    file = tmp_path / "models.toml"
    file.write_text((folder / "models.toml").read_text() + f"[louder]\nadapter = {{ path = '{louder}' }}\n")
    adapters = {"base": None, "base+french": folder / "french", "base+louder": louder}
    expected = {name: reference(checkpoint, adapter) for name, adapter in adapters.items()}
    for is_again in (False, True):
        async with hosting(tmp_path, kv_disk=100_000_000, kv_disk_path=tmp_path / "disk") as host:
            for name, tokens in expected.items():
                answer = await ask(host, name)
                assert ids(answer)[: len(tokens)] == tokens
                assert answer.finished is not None
                assert answer.finished.usage.num_cached_tokens == (64 if is_again else 0)


def test_copies_of_a_model_share_its_arrays_and_nothing_else(checkpoint: Path) -> None:
    base = loader.load(checkpoint, name="base", dtype_policy="float32")
    names, size = dict(tree_flatten(base.model.parameters())), base.weight_bytes
    view = adapter_loader.view(base, "view")
    assert view.weight_bytes == 0
    copies = dict(tree_flatten(view.model.parameters()))
    assert copies.keys() == names.keys()
    assert all(copies[name] is array for name, array in names.items())
    view.model.model.layers[0].self_attn.q_proj = nn.Identity()
    view.model.freeze()
    view.model.lm_head.weight = mx.zeros((1,))
    assert dict(tree_flatten(base.model.trainable_parameters())).keys() == names.keys()
    assert sum(array.nbytes for _, array in tree_flatten(base.model.parameters())) == size
