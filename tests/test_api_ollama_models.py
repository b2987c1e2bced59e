"""Ollama's endpoints about models: listed, shown, pulled, copied, created, deleted, on a fake library."""

import asyncio
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from fake_engine import FakeHost, LoadedInfo, serve, wait_until
from fake_library import TEMPLATE
from helpers_ollama import lines, strictly
from ollama import ListResponse, ProcessResponse, ProgressResponse, ShowResponse

from mlxserve.api.app import create_app
from mlxserve.api.metrics import Metrics
from mlxserve.api.ollama.times import timestamp
from mlxserve.config import ServerConfig


@pytest.fixture
def sdk(address: str) -> Iterator[ollama.Client]:
    with ollama.Client(address) as client:
        yield client


def send(config: ServerConfig, method: str, path: str, body: Any) -> httpx.Response:
    """A request to a server of that config."""

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(FakeHost(), config, Metrics()))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:11711") as client:
            return await client.request(method, path, json=body)

    return asyncio.run(ask())


class TestTags:
    def test_entries(self, host: FakeHost, http: httpx.Client) -> None:
        content = http.get("/api/tags").json()
        strictly(ListResponse, content)
        newest, other = content["models"]
        assert (newest["name"], newest["model"]) == ("org/fake-4bit:latest", "org/fake-4bit:latest")
        assert other == {
            "name": "fake:latest",
            "model": "fake:latest",
            "modified_at": "2023-11-14T22:13:20.500000000Z",
            "size": 88_000_000,
            "digest": "c0ffee" + "0" * 58,
            "details": {
                "parent_model": "",
                "format": "gguf",
                "family": "llama",
                "families": ["llama"],
                "parameter_size": "134.5M",
                "quantization_level": "Q4_K_M",
            },
        }

    def test_head(self, host: FakeHost, http: httpx.Client) -> None:
        assert (http.head("/api/tags").status_code, http.head("/api/tags").content) == (200, b"")

    def test_names_of_the_list_can_be_asked(self, host: FakeHost, sdk: ollama.Client) -> None:
        for model in sdk.list().models:
            assert sdk.generate(model.model, "Hi").model == model.model
            assert sdk.show(model.model.upper() if "/" not in model.model else model.model).details.family == "llama"


class TestPs:
    def test_entries(self, host: FakeHost, http: httpx.Client) -> None:
        host.loaded_models = [LoadedInfo("fake", on_gpu=True), LoadedInfo("org/fake-4bit", expires_at=None)]
        content = http.get("/api/ps").json()
        strictly(ProcessResponse, content)
        soon, never = content["models"]
        assert (soon["name"], soon["expires_at"]) == ("fake:latest", "2027-01-15T08:00:00.250000000Z")
        assert (soon["size"], soon["size_vram"], soon["context_length"]) == (1_000_000, 1_000_000, 4096)
        assert (soon["size_reserved"], never["size_vram"]) == (2_000_000, 0)
        assert datetime.fromisoformat(never["expires_at"]) > datetime(2300, 1, 1, tzinfo=UTC)

    def test_every_name_of_a_model_is_listed(self, host: FakeHost, http: httpx.Client) -> None:
        host.loaded_models = [LoadedInfo("fake", other_names=("mine", "org/fake"))]
        entries = http.get("/api/ps").json()["models"]
        assert [entry["name"] for entry in entries] == ["fake:latest", "mine:latest", "org/fake:latest"]
        assert {entry["details"]["format"] for entry in entries} == {"gguf"}

    @pytest.mark.parametrize("moment", [-(10**30), -1, 10**15, 10**30])
    def test_no_date_is_too_much(self, moment: int) -> None:
        assert timestamp(moment * 10**9)[:4] in ("1970", "9999")

    def test_nothing_is_loaded(self, host: FakeHost, sdk: ollama.Client) -> None:
        assert sdk.ps().models == []


class TestShow:
    @pytest.mark.parametrize("field", ["model", "name"])
    def test_everything(self, host: FakeHost, http: httpx.Client, field: str) -> None:
        content = http.post("/api/show", json={field: "fake:latest", "verbose": True}).json()
        strictly(ShowResponse, content)
        assert content["model_info"] == {
            "general.architecture": "llama",
            "general.basename": "fake",
            "general.parameter_count": 134_515_008,
            "llama.context_length": 8192,
            "llama.embedding_length": 576,
        }
        assert content["capabilities"] == ["completion", "tools"]
        assert (content["template"], content["license"]) == (TEMPLATE, "apache-2.0")
        assert content["details"]["quantization_level"] == "Q4_K_M"

    def test_parameters_as_continue_reads_them(self, host: FakeHost, http: httpx.Client) -> None:
        content = http.post("/api/show", json={"name": "fake"}).json()
        pairs = [line.split(maxsplit=1) for line in content["parameters"].splitlines()]
        assert [(key, json.loads(value)) for key, value in pairs] == [
            ("temperature", 0.2),
            ("repeat_penalty", 1.1),
            ("stop", "<end>"),
            ("stop", '"'),
        ]
        assert 'PARAMETER stop "\\""\n' in content["modelfile"]
        assert content["modelfile"].startswith("FROM fake\n")

    def test_no_such_model(self, host: FakeHost, sdk: ollama.Client) -> None:
        with pytest.raises(ollama.ResponseError, match="model 'none' not found") as error:
            sdk.show("none")
        assert error.value.status_code == 404


class TestPull:
    @pytest.fixture(autouse=True)
    def headers_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mlxserve.api.ollama.library_routes.HEADERS_AFTER", 0.1)

    def test_stream(self, host: FakeHost, http: httpx.Client) -> None:
        frames = lines(http.post("/api/pull", json={"name": "org/new"}))
        for frame in frames:
            strictly(ProgressResponse, frame)
        assert (frames[0], frames[-1]) == ({"status": "pulling manifest"}, {"status": "success"})
        (progress,) = frames[1:-1]
        assert (progress["completed"], progress["total"]) == (1000, 1000)
        assert progress["digest"].startswith("sha256:")
        assert [model.name for model in host.library.models()][-1] == "org/new"

    def test_progress_comes_as_it_goes(self, host: FakeHost, sdk: ollama.Client) -> None:
        host.library.stall = stall = threading.Event()
        seen = []
        for frame in sdk.pull("org/new", stream=True):
            seen.append((frame.status.split()[0], frame.completed))
            if frame.completed == 500:
                stall.set()
        assert seen == [("pulling", None), ("pulling", 500), ("pulling", 1000), ("success", None)]

    def test_one_object(self, host: FakeHost, sdk: ollama.Client) -> None:
        assert sdk.pull("org/new").status == "success"

    def test_async_sdk(self, host: FakeHost, address: str) -> None:
        async def pull() -> list[str]:
            async with ollama.AsyncClient(address) as client:
                return [frame.status async for frame in await client.pull("org/new", stream=True)]

        assert asyncio.run(pull())[-1] == "success"

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_name_that_is_none_has_a_status(self, host: FakeHost, http: httpx.Client, stream: bool) -> None:
        reply = http.post("/api/pull", json={"model": "none", "stream": stream})
        assert reply.status_code == 404
        assert reply.json() == {"error": "model 'none' not found: no model is called 'none'"}

    def test_a_late_failure_is_the_last_line(self, host: FakeHost, http: httpx.Client) -> None:
        host.library.stall = stall = threading.Event()
        host.library.fails_half_way = True
        with http.stream("POST", "/api/pull", json={"model": "org/new"}) as reply:
            content = []
            for text in reply.iter_lines():
                content.append(json.loads(text))
                stall.set()
        assert content[-1] == {"error": "the connection broke; try again"}

    def test_who_goes_away_ends_the_download(self, host: FakeHost, http: httpx.Client) -> None:
        host.library.stall = threading.Event()
        with http.stream("POST", "/api/pull", json={"model": "org/new"}) as reply:
            next(reply.iter_lines())
        wait_until(lambda: host.library.cancelled == ["org/new"])
        with pytest.raises(httpx.ReadTimeout):
            http.post("/api/pull", json={"model": "org/new", "stream": False}, timeout=0.1)
        wait_until(lambda: host.library.cancelled == ["org/new", "org/new"])

    @pytest.mark.parametrize(
        ("config", "status"),
        [
            (ServerConfig(), 200),
            (ServerConfig(allow_pull=False), 403),
            (ServerConfig(host="0.0.0.0"), 403),
            (ServerConfig(host="0.0.0.0", allow_pull=True), 200),
        ],
    )
    def test_only_where_it_is_allowed(self, config: ServerConfig, status: int) -> None:
        reply = send(config, "POST", "/api/pull", {"model": "org/new", "stream": False})
        assert reply.status_code == status
        assert ("allow_pull" in reply.text) == (status == 403)


class TestChanges:
    def test_copy_and_delete(self, host: FakeHost, sdk: ollama.Client) -> None:
        assert sdk.copy("fake", "mine:latest").status == "success"
        assert "mine:latest" in [model.model for model in sdk.list().models]
        assert sdk.delete("mine").status == "success"
        assert "mine:latest" not in [model.model for model in sdk.list().models]

    def test_a_loaded_model_is_not_deleted(self, host: FakeHost, http: httpx.Client) -> None:
        host.loaded_models = [LoadedInfo("fake")]
        reply = http.request("DELETE", "/api/delete", json={"model": "fake:latest"})
        assert (reply.status_code, reply.json()) == (
            409,
            {"error": "fake is loaded; stop it first: mlxserve stop fake"},
        )
        host.loaded_models = []
        assert http.request("DELETE", "/api/delete", json={"model": "fake"}).status_code == 200

    @pytest.mark.parametrize(
        ("method", "path", "body"),
        [
            ("DELETE", "/api/delete", {"model": "none"}),
            ("POST", "/api/copy", {"source": "none", "destination": "mine"}),
        ],
    )
    def test_no_such_model(self, host: FakeHost, http: httpx.Client, method: str, path: str, body: Any) -> None:
        reply = http.request(method, path, json=body)
        assert (reply.status_code, reply.json()["error"][:22]) == (404, "model 'none' not found")

    def test_create_from_another_model(self, host: FakeHost, sdk: ollama.Client) -> None:
        reply = sdk.create(
            "mine",
            from_="fake:latest",
            system="Be brief.",
            template=TEMPLATE,
            license=["one", "two"],
            parameters={"temperature": 0.5, "stop": ["x"], "num_ctx": 100, "num_gpu": 1},
        )
        assert reply.status == "success"
        assert host.library.created == [
            {
                "name": "mine",
                "base": "fake",
                "system": "Be brief.",
                "template": TEMPLATE,
                "license": "one\n\ntwo",
                "parameters": {"temperature": 0.5, "stop": ["x"], "num_ctx": 100},
                "allow_paths": False,
            }
        ]
        assert [frame.status for frame in sdk.create("other", from_="fake", stream=True)][-1] == "success"


class TestPathsOfCreate:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """A folder that is allowed, with a model, beside one that is not."""
        (tmp_path / "allowed" / "model").mkdir(parents=True)
        (tmp_path / "secret").mkdir()
        (tmp_path / "allowed" / "link").symlink_to(tmp_path / "secret")
        (tmp_path / "way-in").symlink_to(tmp_path / "allowed" / "model")
        return tmp_path

    def test_in_an_allowed_folder(self, folder: Path) -> None:
        host = FakeHost()
        config = ServerConfig(model_dirs=(str(folder / "gone"), str(folder / "allowed")))
        with serve(create_app(host, config, Metrics())) as address, httpx.Client(base_url=address) as http:
            for path in (folder / "allowed" / "model", folder / "way-in"):
                body = {"model": "mine", "from": str(path), "stream": False}
                assert http.post("/api/create", json=body).json() == {"status": "success"}
        assert [(call["base"], call["allow_paths"]) for call in host.library.created] == [
            (str(folder / "allowed" / "model"), True)
        ] * 2

    @pytest.mark.parametrize(
        "path", ["secret", "allowed/link", "allowed/../secret", "allowed/none", "allowed/" + "x" * 500, "allowed/\0"]
    )
    def test_nowhere_else(self, folder: Path, path: str) -> None:
        config = ServerConfig(model_dirs=(str(folder / "allowed"),))
        reply = send(config, "POST", "/api/create", {"model": "mine", "from": f"{folder}/{path}"})
        assert reply.status_code == 400
        assert reply.json()["error"].startswith("'from' is a path")
        assert str(folder) not in reply.text

    @pytest.mark.parametrize("path", ["./model", "../model", "~/model", ".", "/"])
    def test_no_relative_ones(self, folder: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(folder / "allowed")
        config = ServerConfig(model_dirs=(str(folder / "allowed"),))
        assert send(config, "POST", "/api/create", {"model": "mine", "from": path}).status_code == 400

    def test_none_without_the_setting(self, folder: Path) -> None:
        path = str(folder / "allowed" / "model")
        assert send(ServerConfig(), "POST", "/api/create", {"model": "mine", "from": path}).status_code == 400


@pytest.mark.parametrize("path", ["/api/push", "/api/blobs/sha256:00"])
def test_uploads_are_refused(http: httpx.Client, path: str) -> None:
    reply = http.post(path, json={"model": "fake"})
    assert (reply.status_code, reply.json().keys()) == (501, {"error"})
