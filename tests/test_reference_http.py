"""The real model behind a real server process, asked by the real client: the reference's tokens, alone and together."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from mlxserve.store.gguf_file import GgufFile
from mlxserve.store.gguf_tokenizer import build_tokenizer, eos_token_ids
from mlxserve.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "smollm2-greedy.json").read_text())["cases"]
SHORT_CASES = [case for case in CASES if len(case["prompt_ids"]) < 100][:8]


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    file = GgufFile.open(demo_model, model="smollm2-135m")
    return Tokenizer(build_tokenizer(file), eos_token_ids(file))


@pytest.fixture(scope="module")
def client(demo_model: Path) -> Iterator[openai.OpenAI]:
    command = [sys.executable, "-m", "mlxserve", "serve", "--model", "smollm2-135m", "--port", "0", "--threads", "1"]
    environment = os.environ | {"MLXSERVE_LOG_LEVEL": "warning"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as server:
        assert server.stdout is not None
        announcement = server.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", announcement)
        try:
            assert found is not None, announcement
            with openai.OpenAI(base_url=f"{found[0]}/v1", api_key="none", max_retries=0, timeout=240) as client:
                yield client
        finally:
            server.terminate()
            server.communicate(timeout=60)
        assert server.returncode == 0


def check(tokenizer: Tokenizer, case: dict[str, Any], tokens: list[bytes], text: str) -> None:
    expected = [token_id for token_id in case["greedy_ids"][: case["comparable"]] if token_id not in {2}]
    assert tokens[: len(expected)] == [tokenizer.token_bytes(token_id) for token_id in expected], case["name"]
    assert b"".join(tokens).decode(errors="replace").rstrip("\ufffd") == text.rstrip("\ufffd")
    if case["comparable"] == len(case["greedy_ids"]):
        assert text == case["text"]


def ask(client: openai.OpenAI, case: dict[str, Any]) -> tuple[list[bytes], str]:
    reply = client.chat.completions.create(
        model="smollm2-135m", messages=case["messages"], temperature=0, max_tokens=64, logprobs=True
    )
    choice = reply.choices[0]
    assert choice.logprobs is not None
    assert choice.finish_reason == case["finish"] or case["comparable"] < len(case["greedy_ids"])
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(case["prompt_ids"])
    return [bytes(entry.bytes or ()) for entry in choice.logprobs.content or ()], choice.message.content or ""


def stream(client: openai.OpenAI, case: dict[str, Any]) -> tuple[list[bytes], str]:
    tokens: list[bytes] = []
    text = ""
    for chunk in client.chat.completions.create(
        model="smollm2-135m", messages=case["messages"], temperature=0, max_tokens=64, logprobs=True, stream=True
    ):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            if choice.logprobs is not None:
                tokens += [bytes(entry.bytes or ()) for entry in choice.logprobs.content or ()]
    return tokens, text


@pytest.mark.parametrize("case", SHORT_CASES[:3], ids=lambda case: case["name"])
def test_alone(client: openai.OpenAI, tokenizer: Tokenizer, case: dict[str, Any]) -> None:
    check(tokenizer, case, *ask(client, case))


@pytest.mark.parametrize("case", SHORT_CASES[:1], ids=lambda case: case["name"])
def test_through_anthropics_client(client: openai.OpenAI, case: dict[str, Any]) -> None:
    system = "\n".join(message["content"] for message in case["messages"] if message["role"] == "system")
    prompt: dict[str, Any] = {
        "model": "smollm2-135m",
        "messages": [message for message in case["messages"] if message["role"] != "system"],
        "system": system or anthropic.NOT_GIVEN,
    }
    address = str(client.base_url).removesuffix("/v1/")
    with anthropic.Anthropic(base_url=address, api_key="none", max_retries=0, timeout=240) as other:
        assert other.messages.count_tokens(**prompt).input_tokens == len(case["prompt_ids"])
        with other.messages.stream(**prompt, max_tokens=64, extra_body={"temperature": 0}) as events:
            reply = events.get_final_message()
    assert reply.usage.input_tokens + (reply.usage.cache_read_input_tokens or 0) == len(case["prompt_ids"])
    assert "".join(block.text for block in reply.content) == ask(client, case)[1]


@pytest.mark.parametrize("how", [ask, stream])
def test_eight_at_once(client: openai.OpenAI, tokenizer: Tokenizer, how: Any) -> None:
    with ThreadPoolExecutor(len(SHORT_CASES)) as pool:
        answers = list(pool.map(lambda case: how(client, case), SHORT_CASES))
    for case, answer in zip(SHORT_CASES, answers, strict=True):
        check(tokenizer, case, *answer)
