"""Ollama's dialect on the real host and engine thread, without a model's weights."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_engine import CONTEXT_LENGTH, expected_text
from helpers_http import Server, serving
from helpers_ollama import lines
from helpers_served import FakeBuild

PROMPT = "the cat"
GREEDY = {"temperature": 0, "num_predict": 8}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    with serving(FakeBuild(monkeypatch), tmp_path) as server:
        yield server


def generate(server: Server, **fields: object) -> list[dict]:
    body = {"model": "ONE:latest", "prompt": PROMPT, "options": GREEDY, **fields}
    return lines(server.client.post("/api/generate", json=body))


def test_an_answer_and_its_times(server: Server) -> None:
    *parts, last = generate(server)
    assert "".join(part["response"] for part in parts) == expected_text(PROMPT, 8)
    assert (last["model"], last["done_reason"], last["eval_count"]) == ("ONE:latest", "length", 8)
    assert len(last["context"]) == last["prompt_eval_count"] + 8
    stages = last["load_duration"] + last["prompt_eval_duration"] + last["eval_duration"]
    assert 0 < stages <= last["total_duration"]


def test_a_context_of_ones_own(server: Server) -> None:
    last = generate(server, options={"temperature": 0, "num_ctx": 12})[-1]
    assert (last["done_reason"], len(last["context"])) == ("length", 12)
    last = generate(server, options={"temperature": 0, "num_ctx": 10 * CONTEXT_LENGTH})[-1]
    assert len(last["context"]) == CONTEXT_LENGTH
    body = {"model": "one", "prompt": PROMPT, "options": {"num_ctx": 3}}
    refused = server.client.post("/api/generate", json=body)
    assert refused.status_code == 400
    assert "context length of 3" in refused.json()["error"]


def test_what_only_a_chat_template_can_do_is_refused(server: Server) -> None:
    body = {"model": "one", "messages": [{"role": "user", "content": "Hi"}], "stream": False}
    for path, fields in (("/api/chat", body), ("/api/generate", {"model": "one", "prompt": "Hi", "system": "x"})):
        reply = server.client.post(path, json=fields)
        assert (reply.status_code, "chat template" in reply.json()["error"]) == (400, True)


def test_requests_show_in_debug_and_metrics(server: Server) -> None:
    reply = server.client.post("/api/generate", json={"model": "one", "prompt": PROMPT, "options": GREEDY})
    assert json.loads(reply.text.splitlines()[-1])["done"]
    (trace,) = server.traces()
    assert trace["id"] == reply.headers["x-request-id"]
    assert trace["id"].startswith("generate-")
