"""Embeddings: the model's own hidden states, whatever else the engine computes; over HTTP in OpenAI's shape."""

import base64
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import openai
import pytest
import tiny_models
from helpers_engine import Gate, expected_embedding, expected_text, held, tokenizer
from helpers_http import Caller, Server, serving
from helpers_served import FakeBuild
from openai.types import CreateEmbeddingResponse

from mlxserve.core.request import Pooling, Request
from mlxserve.core.step import RequestOutput
from mlxserve.engine.build import build_engine
from mlxserve.engine.engine import Engine
from mlxserve.runner import device
from mlxserve.store import pooling as declared
from mlxserve.store.pooling import UnsupportedPooling

LENGTHS = (1, 2, 15, 16, 17, 33, 100)
BYTES_PER_TOKEN = 3 * 2 * (16 + 16) * 4
"""Of the tiny checkpoints: layers, key/value heads, key and value dimensions, float32."""


def embedding_request(name: str, length: int, pooling: Pooling, *, seed: int = 0) -> Request:
    made = tiny_models.make_request(name, tiny_models.prompt(length, seed=seed), 1)
    return replace(made, pooling=pooling)


def outputs_of(engine: Engine, requests: list[Request]) -> dict[str, RequestOutput]:
    """The last output of each request; the books must agree after each step."""
    last: dict[str, RequestOutput] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            last[output.request_id] = output
        engine.check_integrity()
    return last


def reference(model: nn.Module, length: int, pooling: Pooling, *, seed: int = 0) -> np.ndarray:
    hidden = np.array(model.model(mx.array([tiny_models.prompt(length, seed=seed)]))[0].astype(mx.float32))
    return hidden[-1] if pooling is Pooling.LAST else hidden.mean(axis=0)


def engine_of(model: nn.Module, **settings: Any) -> Engine:
    found = device.detect()
    return build_engine(tiny_models.loaded(model), tiny_models.engine_config(**settings), found, 4096).engine


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gemma3", "lfm2"])
def test_parity_with_the_models_own_hidden_states_in_a_batch(name: str) -> None:
    model = tiny_models.build(name)
    expected = {
        (length, pooling): reference(model, length, pooling, seed=length) for length in LENGTHS for pooling in Pooling
    }
    alone = tiny_models.run_ids(engine_of(model), [tiny_models.make_request("s", tiny_models.prompt(20), 12)])
    engine = engine_of(model)
    requests = [embedding_request(f"{length}-{pooling}", length, pooling, seed=length) for length, pooling in expected]
    stream = tiny_models.make_request("s", tiny_models.prompt(20), 12)
    engine.add(stream)
    ids: list[int] = []
    last: dict[str, RequestOutput] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            last[output.request_id] = output
            ids += [token.token_id for token in output.tokens]
        engine.check_integrity()
    for (length, pooling), vector in expected.items():
        found = last[f"{length}-{pooling}"]
        assert found.finish_reason == "stop"
        assert not found.tokens
        np.testing.assert_allclose(found.embedding, vector, rtol=1e-3, atol=2e-4)
    assert ids == alone["s"]


def test_the_last_tokens_state_needs_only_what_is_not_cached_and_the_mean_needs_all() -> None:
    model = tiny_models.build("llama")
    engine = engine_of(model)
    for pooling, num_cached in ((Pooling.LAST, 99), (Pooling.MEAN, 0)):
        first = outputs_of(engine, [embedding_request("a", 100, pooling)])["a"]
        again = outputs_of(engine, [embedding_request("a", 100, pooling)])["a"]
        assert again.num_cached_tokens == num_cached
        np.testing.assert_allclose(again.embedding, first.embedding, rtol=1e-4, atol=1e-5)
    # And a prompt finds what an embedding left.
    answer = tiny_models.make_request("b", tiny_models.prompt(100), 3)
    assert outputs_of(engine, [answer])["b"].num_cached_tokens == 99


def test_preempted_ones_start_over() -> None:
    model = tiny_models.build("llama")
    engine = engine_of(model, kv_cache_bytes=9 * 16 * BYTES_PER_TOKEN, enable_prefix_caching=False)
    requests = [
        *(tiny_models.make_request(f"s{index}", tiny_models.prompt(10, seed=index), 70) for index in range(2)),
        *(embedding_request(f"{index}", 60, Pooling.MEAN, seed=index) for index in range(3)),
    ]
    last = outputs_of(engine, requests)
    for index in range(3):
        expected = reference(model, 60, Pooling.MEAN, seed=index)
        np.testing.assert_allclose(last[f"{index}"].embedding, expected, rtol=1e-3, atol=2e-4)


class TestOverHttp:
    @pytest.fixture
    def build(self, monkeypatch: pytest.MonkeyPatch) -> FakeBuild:
        return FakeBuild(monkeypatch)

    @staticmethod
    def embed(server: Server, **fields: Any) -> Any:
        return server.client.post("/v1/embeddings", json={"model": "one", **fields})

    @pytest.mark.parametrize("pooling", Pooling)
    def test_through_openais_own_client(self, build: FakeBuild, tmp_path: Path, pooling: Pooling) -> None:
        build.pooling = pooling
        texts = ["the cat", "the dog ate the log", "a"]
        with serving(build, tmp_path) as server:
            client = openai.OpenAI(base_url=server.address + "/v1", api_key="none", max_retries=0)
            for encoding in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
                reply = client.embeddings.create(model="one", input=texts, **encoding)
                assert [each.index for each in reply.data] == [0, 1, 2]
                for each, text in zip(reply.data, texts, strict=True):
                    vector = each.embedding
                    if isinstance(vector, str):
                        # Whoever asks for it gets it undecoded; who does not ask gets numbers, sent in this form.
                        vector = np.frombuffer(base64.b64decode(vector), np.float32)
                    np.testing.assert_allclose(vector, expected_embedding(text, pooling), rtol=1e-6)
            num_tokens = sum(len(tokenizer().encode(text, add_special_tokens=True)) for text in texts)
            assert reply.usage.prompt_tokens == reply.usage.total_tokens == num_tokens
            client.close()

    def test_the_replys_shape(self, build: FakeBuild, tmp_path: Path) -> None:
        with serving(build, tmp_path) as server:
            reply = self.embed(server, input="the cat")
            assert reply.status_code == 200
            CreateEmbeddingResponse.model_validate(reply.json(), strict=True)
            assert reply.json()["object"] == "list"

    def test_tokens_in_place_of_text(self, build: FakeBuild, tmp_path: Path) -> None:
        ids = tokenizer().encode("the cat", add_special_tokens=True)
        with serving(build, tmp_path) as server:
            for given, count in ((ids, 1), ([ids, ids], 2)):
                data = self.embed(server, input=given).json()["data"]
                assert len(data) == count
                for each in data:
                    np.testing.assert_allclose(each["embedding"], expected_embedding("the cat"), rtol=1e-6)

    def test_dimensions_are_the_first_ones_at_length_one(self, build: FakeBuild, tmp_path: Path) -> None:
        with serving(build, tmp_path) as server:
            whole = np.array(self.embed(server, input="the cat").json()["data"][0]["embedding"])
            short = self.embed(server, input="the cat", dimensions=2).json()["data"][0]["embedding"]
            np.testing.assert_allclose(short, whole[:2] / np.linalg.norm(whole[:2]), rtol=1e-6)
            refused = self.embed(server, input="the cat", dimensions=4)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "dimensions")

    def test_more_inputs_than_the_queue_holds(self, build: FakeBuild, tmp_path: Path) -> None:
        with serving(build, tmp_path, max_num_seqs=2, max_queue=2) as server:
            texts = [f"the cat {number}" for number in range(50)]
            data = self.embed(server, input=texts).json()["data"]
            for each, text in zip(data, texts, strict=True):
                np.testing.assert_allclose(each["embedding"], expected_embedding(text), rtol=1e-6)

    def test_beside_a_stream(self, build: FakeBuild, tmp_path: Path) -> None:
        with serving(build, tmp_path) as server, held(Gate()) as gate, ThreadPoolExecutor(2) as executor:
            server.runner.before_step = gate
            answer = executor.submit(server.complete, max_tokens=20)
            gate.wait()
            vector = executor.submit(self.embed, server, input="the dog ate the log")
            gate.open()
            assert answer.result().json()["choices"][0]["text"] == expected_text("the cat", 20)
            found = vector.result().json()["data"][0]["embedding"]
            np.testing.assert_allclose(found, expected_embedding("the dog ate the log"), rtol=1e-6)

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({}, "input"),
            ({"input": []}, "input"),
            ({"input": ""}, "input"),
            ({"input": ["a", ""]}, "input[1]"),
            ({"input": [1.5]}, "input"),
            ({"input": {"a": 1}}, "input"),
            ({"input": [10**6]}, "input"),
            ({"input": ["a"] * 2049}, "input"),
            ({"input": "the cat " * 5000}, "input"),
            ({"input": "a", "dimensions": 0}, "dimensions"),
            ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
            ({"input": "a", "temperature": 1.0}, "temperature"),
            ({"input": "a", "model": "none"}, "model"),
        ],
    )
    def test_bad_input(self, build: FakeBuild, tmp_path: Path, fields: dict[str, Any], param: str) -> None:
        with serving(build, tmp_path) as server:
            refused = self.embed(server, **fields)
            assert refused.status_code in (400, 404)
            assert refused.json()["error"]["param"] == param

    def test_a_model_that_cannot(self, build: FakeBuild, tmp_path: Path) -> None:
        build.can_embed = False
        with serving(build, tmp_path) as server:
            refused = self.embed(server, input="a")
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")

    def test_a_failed_step_and_a_client_that_goes_away_leave_nothing(self, build: FakeBuild, tmp_path: Path) -> None:
        with serving(build, tmp_path) as server:

            def fail(step: object) -> None:
                raise RuntimeError("a fault of the device")

            server.runner.before_step = fail
            assert self.embed(server, input=["a", "b"]).status_code == 500
            server.runner.before_step = lambda step: None
            with held(Gate()) as gate:
                server.runner.before_step = gate
                with Caller(server, path="/v1/embeddings", input=["a"] * 40):
                    gate.wait()
                gate.open()
            server.runner.before_step = lambda step: None
            assert self.embed(server, input="a").status_code == 200
            assert [trace["state"] for trace in server.traces()] == ["done"] * len(server.traces())


class TestDeclaredPooling:
    @pytest.mark.parametrize(
        ("modes", "expected"),
        [
            ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, Pooling.LAST),
            ({"pooling_mode_mean_tokens": True, "word_embedding_dimension": 64}, Pooling.MEAN),
        ],
    )
    def test_sentence_transformers(self, tmp_path: Path, modes: dict[str, Any], expected: Pooling) -> None:
        assert declared.of_folder(tmp_path) is None
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(modes))
        assert declared.of_folder(tmp_path) is expected

    @pytest.mark.parametrize("text", ['{"pooling_mode_cls_token": true}', "{}", "[]", "{"])
    def test_what_cannot_be_done_is_said(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(text)
        with pytest.raises(UnsupportedPooling):
            declared.of_folder(tmp_path)

    def test_gguf(self) -> None:
        assert [declared.of_gguf(number) for number in (None, 0, 1, 3)] == [None, None, Pooling.MEAN, Pooling.LAST]
        with pytest.raises(UnsupportedPooling, match="pooling_type 2"):
            declared.of_gguf(2)
