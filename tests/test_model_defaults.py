"""What models.toml says of a model when a request does not: system message, template, stop strings. And whether it fits
at all."""

from pathlib import Path

import pytest
from helpers_engine import expected_text, on_loop, tokenizer
from helpers_scheduler import BLOCK_SIZE
from helpers_served import FakeBuild, make_generation_request, read
from tiny_repos import model_files

from mlxserve.config import EngineConfig
from mlxserve.core.generation import ChatPrompt, GenerationRequest
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.engine import model_host
from mlxserve.engine.model_host import ModelHost
from mlxserve.engine.served_model import ServedModel
from mlxserve.errors import ModelTooLarge
from mlxserve.runner.device import Device
from mlxserve.store.registry import Registry

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}; {% endfor %}"
TEXT = expected_text("the cat", 12)
STOP = TEXT[6:9]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> FakeBuild:
    # One tokenizer for all tests: what the host sets is taken back after this one.
    monkeypatch.setattr(tokenizer().hf_tokenizer, "chat_template", tokenizer().hf_tokenizer.chat_template)
    return FakeBuild(monkeypatch)


def host_of(tmp_path: Path, entry: str) -> ModelHost:
    file = tmp_path / "models.toml"
    file.write_text(f"[one]\nsource = {{ path = '{tmp_path}' }}\n{entry}")
    return ModelHost(EngineConfig(block_size=BLOCK_SIZE), Registry(user_file=file))


def chat(request_id: str, *messages: tuple[str, str]) -> GenerationRequest:
    prompt = ChatPrompt(tuple({"role": role, "content": content} for role, content in messages))
    return GenerationRequest(request_id, prompt, SamplingParams(temperature=0.0, max_tokens=1))


async def prompt_of(model: ServedModel, request: GenerationRequest) -> str:
    generation = await model.generate(request)
    request_of_engine = generation.trace.request
    assert request_of_engine is not None
    await read(generation)
    return str(model.tokenizer.hf_tokenizer.decode(request_of_engine.prompt_token_ids))


@on_loop
async def test_the_system_message_of_a_chat_without_one(build: FakeBuild, tmp_path: Path) -> None:
    host = host_of(tmp_path, f'system = "the cat"\ntemplate = "{TEMPLATE}"\n')
    await host.start()
    try:
        model = (await host.acquire("one")).model
        assert await prompt_of(model, chat("a", ("user", "sat"))) == "system: the cat; user: sat; "
        assert await prompt_of(model, chat("b", ("system", "mat"), ("user", "sat"))) == "system: mat; user: sat; "
        assert await prompt_of(model, chat("c", ("developer", "mat"))) == "developer: mat; "
        assert await prompt_of(model, make_generation_request("d", "sat on")) == "<s>sat on"
    finally:
        await host.close(timeout=0.0)


@on_loop
async def test_stop_strings_of_a_request_without_any(build: FakeBuild, tmp_path: Path) -> None:
    host = host_of(tmp_path, f'stop = ["{STOP}"]\n')
    await host.start()
    try:
        model = (await host.acquire("one")).model
        stopped = await read(await model.generate(make_generation_request("a", max_tokens=12)))
        assert stopped.finished is not None
        assert (stopped.text, stopped.finished.stop_string) == (TEXT[:6], STOP)
        other = await read(await model.generate(make_generation_request("b", max_tokens=12, stop=("zzz",))))
        assert other.text == TEXT
    finally:
        await host.close(timeout=0.0)


@on_loop
async def test_what_cannot_fit_is_refused_before_it_is_read(
    build: FakeBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, data in model_files().items():
        if "/" not in name:
            (tmp_path / name).write_bytes(data)
    budget = 100_000
    device = Device("metal", "fake", budget, "keep", max_pass_tokens=64, max_prefill_tokens=64)
    monkeypatch.setattr(model_host.build, "configure_device", lambda: device)
    caplog.set_level("INFO")
    host = host_of(tmp_path, "")
    await host.start()
    try:
        with pytest.raises(ModelTooLarge) as caught:
            await host.acquire("one")
        assert (caught.value.needed, caught.value.limit) == (3000 * 64 * 2, int(budget * 0.9))
        assert build.loads == []
    finally:
        await host.close(timeout=0.0)
    assert "one: weights 384 KB of 90.0 KB; KV cache 0.3 KB a token, streams that fit: 0 of 512 tokens" in caplog.text
