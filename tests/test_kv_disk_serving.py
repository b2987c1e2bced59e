"""A server's models with blocks on disk: a long chat goes on after a restart, from files to text."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import tiny_models
import tiny_tokenizers
from helpers_disk import block_files
from helpers_engine import TIMEOUT, on_loop
from helpers_served import Answer, get, read

from mlxserve.config import EngineConfig, kv_disk_dir
from mlxserve.core.generation import ChatPrompt, GenerationRequest
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.engine.model_host import ModelHost
from mlxserve.store.registry import Registry

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
QUESTION = "the cat sat on the mat, and the dog ate the log; " * 200
BLOCK_SIZE = 64


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_models.save(tmp_path_factory.mktemp("models") / "tiny", "llama")
    tokenizer = tiny_tokenizers.byte_level()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@asynccontextmanager
async def hosting(disk: Path | None) -> AsyncIterator[ModelHost]:
    """A server from its start to its end; on a disk of 100 MB, or without."""
    config = EngineConfig(
        block_size=BLOCK_SIZE, kv_cache_bytes=50_000_000, kv_disk=100_000_000 if disk else None, kv_disk_path=disk
    )
    host = ModelHost(config, Registry(), allow_paths=True)
    await host.start()
    try:
        yield host
    finally:
        await asyncio.wait_for(host.close(timeout=TIMEOUT), TIMEOUT)


async def chat(host: ModelHost, checkpoint: Path, *contents: str, request_id: str = "r") -> Answer:
    """Contents of the user's and the assistant's messages in turn."""
    roles = ("user", "assistant")
    messages = tuple({"role": roles[index % 2], "content": content} for index, content in enumerate(contents))
    model = await get(host, str(checkpoint))
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    return await read(await model.generate(GenerationRequest(request_id, ChatPrompt(messages), sampling)))


@on_loop
async def test_the_second_turn_of_a_long_chat_hits_after_a_restart(checkpoint: Path, tmp_path: Path) -> None:
    async with hosting(tmp_path) as host:
        first = await chat(host, checkpoint, QUESTION)
    assert first.finished is not None
    num_first_tokens = first.finished.usage.num_prompt_tokens
    assert num_first_tokens > 2000
    # The stop waited for the blocks of the prompt and the answer.
    assert len(block_files(tmp_path)) == (num_first_tokens + 23) // BLOCK_SIZE

    conversation = (QUESTION, first.text, "and the mat?")
    async with hosting(tmp_path) as host:
        second = await chat(host, checkpoint, *conversation)
        disk = host.stats()[str(checkpoint)].disk
    async with hosting(None) as host:
        reference = await chat(host, checkpoint, *conversation)
        assert host.stats()[str(checkpoint)].disk is None
    assert second.finished is not None
    assert second.finished.usage.num_cached_tokens >= num_first_tokens // BLOCK_SIZE * BLOCK_SIZE
    assert reference.finished is not None
    assert reference.finished.usage.num_cached_tokens == 0
    assert second.text == reference.text
    assert disk is not None
    assert disk.num_loaded_tokens == second.finished.usage.num_cached_tokens


@on_loop
async def test_blocks_are_written_while_nobody_asks(checkpoint: Path, tmp_path: Path) -> None:
    """A server that is killed has saved what it computed, if it had a moment without requests."""
    async with hosting(tmp_path) as host:
        await chat(host, checkpoint, QUESTION)
        model = await get(host, str(checkpoint))
        end = time.monotonic() + TIMEOUT
        while model.num_unsaved_blocks:
            assert time.monotonic() < end
            await asyncio.sleep(0.01)
        assert model.stats().num_steps > 0


@on_loop
async def test_a_second_server_on_the_same_folder(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with hosting(tmp_path) as first, hosting(tmp_path) as second:
        answers = [await chat(host, checkpoint, "the cat") for host in (first, second)]
        assert answers[0].text == answers[1].text != ""
        assert first.stats()[str(checkpoint)].disk is not None
        assert second.stats()[str(checkpoint)].disk is None
        assert second.health().ok
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [warning for warning in warnings if "another process" in warning] == [
        f"KV blocks are not kept on disk: {tmp_path} is in use by another process"
    ]


@on_loop
async def test_a_host_ends_its_threads_and_lets_go_of_the_folder(checkpoint: Path, tmp_path: Path) -> None:
    for _ in range(2):
        async with hosting(tmp_path) as host:
            assert {"mlxserve-kv-read", "mlxserve-kv-write"} <= {thread.name for thread in threading.enumerate()}
            await chat(host, checkpoint, "the cat")
            assert host.stats()[str(checkpoint)].disk is not None
        assert not any(thread.name.startswith("mlxserve-kv") for thread in threading.enumerate())


def test_the_folder_is_in_the_cache_unless_told() -> None:
    assert kv_disk_dir(EngineConfig()).name == "kv-blocks"
    assert kv_disk_dir(EngineConfig(kv_disk_path=Path("~/blocks"))) == Path.home() / "blocks"
