"""/api/embed and /api/embeddings on the real engine thread, through Ollama's own client."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ollama
import pytest
from helpers_engine import CONTEXT_LENGTH, expected_embedding, tokenizer
from helpers_http import Server, serving
from helpers_served import FakeBuild

TEXTS = ["the cat", "the dog ate the log", "a"]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    with serving(FakeBuild(monkeypatch), tmp_path) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[ollama.Client]:
    with contextlib.closing(ollama.Client(server.address)) as client:
        yield client


def test_embed(client: ollama.Client) -> None:
    reply = client.embed("one:latest", TEXTS)
    for vector, text in zip(reply.embeddings, TEXTS, strict=True):
        np.testing.assert_allclose(vector, expected_embedding(text), rtol=1e-6)
    assert reply.model == "one:latest"
    assert reply.prompt_eval_count == sum(len(tokenizer().encode(text, add_special_tokens=True)) for text in TEXTS)
    assert reply.total_duration >= reply.load_duration >= 0


def test_the_older_endpoint(client: ollama.Client) -> None:
    reply = client.embeddings("one", TEXTS[0])
    np.testing.assert_allclose(reply.embedding, expected_embedding(TEXTS[0]), rtol=1e-6)


def test_dimensions(client: ollama.Client) -> None:
    whole = np.array(expected_embedding("a"))
    (short,) = client.embed("one", "a", dimensions=2).embeddings
    np.testing.assert_allclose(short, whole[:2] / np.linalg.norm(whole[:2]), rtol=1e-6)


def test_too_long_a_text_is_cut_unless_it_must_not_be(client: ollama.Client) -> None:
    text = "a" * (2 * CONTEXT_LENGTH)
    ids = tokenizer().encode(text, add_special_tokens=True)
    assert len(ids) > CONTEXT_LENGTH
    assert client.embed("one", text).prompt_eval_count == CONTEXT_LENGTH
    assert client.embed("one", text, options={"num_ctx": 16}).prompt_eval_count == 16
    with pytest.raises(ollama.ResponseError, match=f"{CONTEXT_LENGTH}"):
        client.embed("one", text, truncate=False)


@pytest.mark.parametrize("given", [{}, {"input": ""}, {"input": []}, {"input": None}])
def test_without_a_text_the_model_is_loaded(server: Server, given: dict[str, Any]) -> None:
    reply = server.client.post("/api/embed", json={"model": "one", **given})
    assert (reply.status_code, reply.json()["embeddings"]) == (200, [])


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"input": 5}, "'input'"),
        ({"input": ["a", 5]}, "'input[1]'"),
        ({"input": ["a", ""]}, "'input[1]'"),
        ({"input": "a", "dimensions": 9}, "dimensions"),
        ({"input": "a", "truncate": "yes"}, "truncate"),
        ({"input": "a", "options": {"num_ctx": "many"}}, "num_ctx"),
        ({"input": "a", "model": "none"}, "none"),
        ({"input": "a", "format": "json"}, "format"),
    ],
)
def test_bad_input(server: Server, fields: dict[str, Any], word: str) -> None:
    reply = server.client.post("/api/embed", json={"model": "one", **fields})
    assert reply.status_code in (400, 404)
    assert word in reply.json()["error"]
