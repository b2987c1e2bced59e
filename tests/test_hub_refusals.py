"""What a pull refuses before anything large has come, and what it says when the hub or this machine is at fault."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from helpers_hub import ADAPTER, FILES, PULL, REMOVE, finish, own_code, pull, run, start
from standin_hub import Hub, Repo, serve_hub
from tiny_repos import FIRST, SECOND, gguf_head


def index(weight_map: Any) -> Repo:
    return Repo({**FILES, "model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode()})


LARGE = 40 << 20
"""Bytes more than are looked at before the rest is fetched, by far."""
REPOS = {
    "test/model": lambda: Repo(dict(FILES)),
    "test/gated": lambda: Repo({}, gated=True),
    "test/nothing": lambda: Repo({"README.md": b"readme"}),
    "test/pickles": lambda: Repo({"config.json": b"{}", "pytorch_model.bin": b"pickle"}),
    "test/own-code": lambda: own_code(model_file="own.py"),
    "test/auto-map": lambda: own_code(model_type="never_heard_of", auto_map={"AutoModel": "own.Model"}),
    "test/no-tokenizer": lambda: Repo({name: data for name, data in FILES.items() if "tokenizer" not in name}),
    "test/gguf": lambda: Repo({f"m-{tag}.gguf": gguf_head("llama", 8) for tag in ("Q4_K_M", "Q4_0", "Q8_0", "F16")}),
    "test/k-quants": lambda: Repo({"m.Q4_K_M.gguf": b"x", "m.IQ2_XS.gguf": b"y"}),
    "test/lora": lambda: Repo(
        {**ADAPTER, "README.md": b"readme", "optimizer.safetensors": b"x", "0001_adapters.safetensors": b"y"}
    ),
    "test/mamba-gguf": lambda: Repo({"m-Q8_0.gguf": gguf_head("mamba", 8) + bytes(LARGE)}),
    "test/mixed-gguf": lambda: Repo({"m-Q8_0.gguf": gguf_head("llama", 14) + bytes(LARGE)}),
    "test/no-gguf": lambda: Repo({"m-Q8_0.gguf": b"hello" + bytes(LARGE)}),
    "test/short-gguf": lambda: Repo({"m-Q8_0.gguf": gguf_head("llama", 8)[:-4000]}),
    "test/unknown": lambda: own_code(model_type="never_heard_of"),
    "test/part": lambda: own_code(model_type="cache"),
    "test/no-json": lambda: Repo({**FILES, "config.json": b"{nope"}),
    "test/lacks": lambda: Repo({name: data for name, data in FILES.items() if name != SECOND}),
    "test/outside": lambda: index({"a": "../../../../etc/passwd"}),
    "test/no-map": lambda: index([]),
    "test/broken": lambda: Repo({**FILES, SECOND: FILES[SECOND][:-1]}),
    "test/gemma-gguf": lambda: Repo({"m-Q8_0.gguf": b"x"}, card={"gguf": {"architecture": "gemma3"}}),
}


@pytest.fixture
def server() -> Iterator[Hub]:
    with serve_hub({name: make() for name, make in REPOS.items()}) as running:
        yield running


REFUSALS = {
    "test/none": "test/none is not on the hub, or is private: check the spelling, or log in",
    "test/gated": "test/gated asks for its licence to be accepted",
    "test/model@v9": "test/model has no revision 'v9'",
    "test/nothing": "it has no weights in model*.safetensors or GGUF files",
    "test/pickles": "it has its weights as pickles, which can run code when they are read",
    "test/unknown": "it is of the model type 'never_heard_of', which mlx-lm does not know; a newer one may",
    "test/part": "it is of the model type 'cache', which mlx-lm does not know",
    "test/no-json": "config.json is broken on the hub itself",
    "test/lacks": f"it lacks files that its model.safetensors.index.json names: {SECOND}",
    "test/outside": "it has a model.safetensors.index.json that names files of other folders ('../",
    "test/no-map": "it has a model.safetensors.index.json without a weight_map",
    "test/own-code": "it needs its own code ('own.py'), which mlxserve never runs",
    "test/auto-map": "it needs its own code: the model type 'never_heard_of' is not one of mlx-lm's",
    "test/no-tokenizer": "it has no tokenizer (tokenizer.json)",
    "test/model:Q4_0": "it has no GGUF files; leave the quantisation out of the name",
    "test/gguf:Q4_K_M": "it has no GGUF file of Q4_K_M that can be read (it has F16, Q4_0, Q4_K_M, Q8_0; ",
    "test/gguf:Q4_1": "it has no GGUF file of Q4_1 that can be read (it has F16, Q4_0, Q4_K_M, Q8_0; ",
    "test/k-quants": "it has no GGUF file that can be read (it has IQ2_XS, Q4_K_M; ",
    "test/lora": "it holds an adapter and no model",
    "test/gemma-gguf": "architecture 'gemma3' is not supported in GGUF files",
}


def test_what_is_refused_before_any_weights_come(server, tmp_path):
    results = finish(start(server.url, tmp_path, *({"method": "pull", "name": name} for name in REFUSALS)))
    assert {name: result["error"] for name, result in zip(REFUSALS, results, strict=True)} == {
        **dict.fromkeys(REFUSALS, "UnusableRepository"),
        "test/none": "RepositoryNotFound",
        "test/model@v9": "RepositoryNotFound",
        "test/gated": "AccessDenied",
    }
    for words, result in zip(REFUSALS.values(), results, strict=True):
        assert words in result["message"]
    fetched = [path for path in server.requested if "/resolve/" in path and "index.json" not in path]
    assert not any("safetensors" in path or "gguf" in path for path in fetched)


HEADS = {
    "test/mamba-gguf": "it has m-Q8_0.gguf: architecture 'mamba' is not supported in GGUF files",
    "test/mixed-gguf": "it has m-Q8_0.gguf: it holds tensors of the types Q6_K, which cannot be read",
    "test/no-gguf": "it has m-Q8_0.gguf, which is broken on the hub itself: not a GGUF file",
    "test/short-gguf": "it has m-Q8_0.gguf, which is broken on the hub itself: the file is cut short",
}


def test_a_gguf_file_is_refused_by_its_head(server, tmp_path):
    results = finish(start(server.url, tmp_path, *({"method": "pull", "name": name} for name in HEADS)))
    for words, result in zip(HEADS.values(), results, strict=True):
        assert result["error"] == "UnusableRepository"
        assert words in result["message"]
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 1000


def test_the_head_of_a_gguf_file_that_comes_damaged_is_fetched_again(server, tmp_path):
    server.damaged["m-Q8_0.gguf"] = 1
    assert "damaged" not in pull(server, tmp_path, "test/gguf").get("message", "")
    assert len(server.fetched("m-Q8_0.gguf")) == 2


def test_what_is_broken_on_the_hub_itself(server, tmp_path):
    pulled, removed = run(server.url, tmp_path, {**PULL, "name": "test/broken"}, {**REMOVE, "name": "test/broken"})
    assert pulled["error"] == "UnusableRepository"
    assert pulled["message"].startswith(f"test/broken cannot be used: {SECOND}: cut short: its tensors end at byte")
    assert pulled["message"].endswith("pulling it again does not help; mlxserve rm test/broken removes it")
    assert removed["result"] > 0
    assert not (tmp_path / "hub" / "models--test--broken").exists()


STATUSES = {
    401: ("AccessDenied", "the hub does not let this account have test/model (status 401): log in with"),
    403: ("AccessDenied", "the hub does not let this account have test/model (status 403)"),
    429: ("DownloadError", "the hub had too many requests from here (status 429); wait some minutes"),
    500: ("DownloadError", "the hub is out of order (status 500); try again later"),
}


@pytest.mark.parametrize("status", STATUSES)
def test_what_the_hub_says_in_words(server, tmp_path, status):
    server.statuses["test/model"] = status
    result = pull(server, tmp_path)
    error, words = STATUSES[status]
    assert (result["error"], words in result["message"]) == (error, True), result["message"]


def test_a_cache_that_cannot_be_written(server, tmp_path):
    (tmp_path / "file").touch()
    (result,) = run(server.url, tmp_path, PULL, HF_HOME=str(tmp_path / "file" / "home"))
    assert result["error"] == "DownloadError"
    assert "test/model cannot be kept in" in result["message"]
    assert "make that folder writable, or set HF_HOME to one that is" in result["message"]


def test_disk_full(server, tmp_path):
    result = pull(server, tmp_path, free=100_000)
    assert result["error"] == "DownloadError"
    assert re.search(r"test/model needs \d+ KB more and the disk of \S+ has 100 KB free; make room", result["message"])
    assert not server.fetched(FIRST)
