"""The commands for models, in this process, over a folder and a small hub cache of their own."""

import io
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tiny_repos import TEMPLATE, model_files

from mlxserve.cli import app, logs, model_view
from mlxserve.store import download_plan

COMMIT = "b" * 40


@dataclass(frozen=True)
class Done:
    code: int | str | None
    out: str
    err: str


Command = Callable[..., Done]


@pytest.fixture
def mlxserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MLXSERVE_")}
    monkeypatch.setattr(os, "environ", clean | {"MLXSERVE_CONFIG_DIR": str(tmp_path / "config"), "COLUMNS": "80"})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(logs, "configure", lambda level: None)

    def call(*words: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["mlxserve", *words])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        try:
            app.main()
        except SystemExit as ended:
            return Done(ended.code, *capsys.readouterr())
        raise AssertionError("main() returned instead of exiting")

    return call


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder outside of the hub's cache."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name, data in model_files().items():
        if "/" not in name:
            (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def cached(mlxserve: Command, folder: Path) -> None:
    """org/name in the hub's cache."""
    repo = download_plan.repo_folder("org/name")
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    (repo / "snapshots").mkdir()
    folder.rename(repo / "snapshots" / COMMIT)


@contextmanager
def server_with(*loaded: str) -> Iterator[str]:
    """The port of a server that has these models loaded."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            body = json.dumps({"models": [{"name": name} for name in loaded]}).encode()
            self.send_response(200 if self.path == "/api/ps" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield str(server.server_port)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_list(mlxserve: Command, cached: None) -> None:
    for command in ("list", "ls"):
        lines = mlxserve(command).out.splitlines()
        assert lines[0].split() == ["NAME", "ID", "SIZE", "PARAMETERS", "QUANTIZATION", "CONTEXT", "MODIFIED"]
        (line,) = [line for line in lines if line.startswith("org/name ")]
        assert line.split()[4:7] == ["192K", "bfloat16", "512"]
        assert line.endswith("just now")
    listed = json.loads(mlxserve("list", "--json").out)
    (model,) = [model for model in listed if model["name"] == "org/name"]
    assert (model["source"], model["license"], model["capabilities"]) == (
        "org/name",
        "apache-2.0",
        ["completion", "insert"],
    )
    assert [line.split()[0] for line in mlxserve("list", "no-such").out.splitlines()] == ["NAME"]


def test_show(mlxserve: Command, cached: None) -> None:
    assert mlxserve("cp", "org/name", "mine").out == "copied 'org/name' to 'mine'\n"
    parameters = ("--parameter", "top_k=5", "--parameter", "stop=a=b", "--parameter", "stop=\n")
    done = mlxserve("create", "mine", "--from", "mine", "--system", "Be brief.", *parameters)
    assert (done.code, done.out) == (0, "created 'mine' from org/name\n")
    sections = {
        part.splitlines()[0].strip(): part.splitlines()[1:] for part in mlxserve("show", "mine").out.split("\n\n")
    }
    assert list(sections) == ["Model", "Capabilities", "Parameters", "System", "License"]
    assert sections["Capabilities"] == ["    completion", "    insert"]
    assert sections["System"] == ["    Be brief."]
    assert sections["License"] == ["    apache-2.0"]
    assert ["architecture", "llama"] in [line.split() for line in sections["Model"]]
    assert mlxserve("show", "mine", "--template").out == TEMPLATE + "\n"
    assert mlxserve("show", "mine", "--system").out == "Be brief.\n"
    assert mlxserve("show", "mine", "--license").out == "apache-2.0\n"
    lines = [line.split(maxsplit=1) for line in mlxserve("show", "mine", "--parameters").out.splitlines()]
    assert lines == [["top_k", "5"], ["stop", '"a=b"'], ["stop", r'"\n"']]
    shown = json.loads(mlxserve("show", "mine", "--json").out)
    assert (shown["template"], shown["parameters"]) == (TEMPLATE, {"top_k": 5, "stop": ["a=b", "\n"]})
    assert json.loads(mlxserve("show", "mine", "--system", "--json").out) == {"system": "Be brief."}


def test_show_whether_it_fits(mlxserve: Command, folder: Path) -> None:
    out = mlxserve("show", str(folder), "--fit").out
    assert [line for line in out.splitlines() if line[:3] != "   "] == ["  Memory", "", "  KV cache"]
    fit = json.loads(mlxserve("show", str(folder), "--fit", "--json").out)
    assert fit["fits"] is True
    assert [cache["bits"] for cache in fit["kv_cache"]][1:] == [8, 4]
    assert all(cache["max_context"] == 512 for cache in fit["kv_cache"])


def test_create_by_a_modelfile(mlxserve: Command, folder: Path, tmp_path: Path) -> None:
    file = folder.parent / "Modelfile"
    file.write_text('FROM ./model\nSYSTEM """Two\nlines"""\nPARAMETER temperature 0.1\n')
    (tmp_path / "t.jinja").write_text("{{ messages[-1].content }}")
    words = (
        "create",
        "new",
        "-f",
        str(file),
        "--parameter",
        "temperature=0.2",
        "--template",
        str(tmp_path / "t.jinja"),
    )
    assert mlxserve(*words).code == 0
    shown = json.loads(mlxserve("show", "new", "--json").out)
    assert (shown["system"], shown["parameters"]) == ("Two\nlines", {"temperature": 0.2})
    assert shown["template"] == "{{ messages[-1].content }}"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("create x --from none-such", "no model is called 'none-such'"),
        ("create x --from smollm2-135m --template none.jinja", "none.jinja cannot be read"),
        ("create x -f none", "none cannot be read"),
        ("create ../x --from smollm2-135m", "'../x' cannot be a name"),
        ("cp none-such x", "no model is called 'none-such'"),
        ("cp org/name x", "org/name is not on this machine; download it first: mlxserve pull org/name"),
        ("show ../none", "../none does not exist"),
        ("rm none-such", "no model is called 'none-such'"),
        ("rm /etc/passwd", "no model is called '/etc/passwd'"),
        ("rm smollm2-135m", "which mlxserve did not put there and does not remove"),
        ("pull smollm2-135x", "did you mean smollm2-135m or "),
    ],
)
def test_errors_say_what_to_do(mlxserve: Command, command: str, words: str) -> None:
    done = mlxserve(*command.split())
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("Error: ")
    assert words in done.err


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("create x", "name the model to begin with: --from MODEL, or -f FILE"),
        (
            "create x --from smollm2-135m --parameter top_k",
            "--parameter takes NAME=VALUE, as temperature=0.2, not 'top_k'",
        ),
        ("create x --from smollm2-135m --parameter top_p=7", "--parameter top_p"),
        ("show smollm2-135m --fit --system", "choose one of --fit"),
    ],
)
def test_wrong_flags_are_wrong_usage(mlxserve: Command, command: str, words: str) -> None:
    done = mlxserve(*command.split())
    assert (done.code, done.out) == (2, "")
    assert words in done.err.splitlines()[-1]


def test_names_that_come_with_mlxserve_are_hidden_by_force_only(mlxserve: Command, cached: None) -> None:
    mlxserve("cp", "org/name", "keeps-the-files")
    for command in (("cp", "org/name", "qwen3-4b"), ("create", "qwen3-4b", "--from", "org/name")):
        done = mlxserve(*command)
        assert done.code == 1
        assert "'qwen3-4b' is a name that comes with mlxserve" in done.err
        assert mlxserve(*command, "--force").code == 0
        assert mlxserve(*command).code == 0, "it is one's own by now"
        assert mlxserve("rm", "qwen3-4b").code == 0
    # What it stood for before is there again, and is not on this machine.
    assert "download it first: mlxserve pull qwen3-4b" in mlxserve("show", "qwen3-4b").err


def test_pull_goes_on_after_a_failure(mlxserve: Command) -> None:
    done = mlxserve("pull", "no-such", "smollm2-135m", "nor-such")
    assert (done.code, done.err.count("success")) == (1, 1)
    assert done.err.count("Error: no model is called") == 2


def test_pull_of_what_is_no_hub_model(mlxserve: Command) -> None:
    done = mlxserve("pull", "smollm2-135m")
    assert (done.code, done.err) == (0, "success\n")


def test_rm(mlxserve: Command, cached: None) -> None:
    mlxserve("cp", "org/name", "mine")
    assert "is the name it has already" in mlxserve("cp", "mine", "Mine").err
    mlxserve("cp", "mine", "other")
    with server_with("Mine:latest") as port:
        # No file goes with it.
        assert mlxserve("rm", "other", "--port", port).out == "deleted 'other'\n"
        for name in ("mine", "org/name"):
            done = mlxserve("rm", name, "--port", port)
            assert done.code == 1
            assert (
                f"the server at http://127.0.0.1:{port} has Mine loaded; stop that first (mlxserve stop Mine)"
                in done.err
            )
        done = mlxserve("rm", "mine", "no-such", "--port", port, "--force")
        assert done.code == 1
        assert re.fullmatch(r"deleted 'mine', \d+ KB freed\n", done.out)
        assert "Error: no model is called 'no-such'" in done.err
    with server_with("another", "smollm2-135m") as port:
        assert mlxserve("rm", "org/name", "--port", port).err.startswith("Error: org/name is not on this machine")


def test_units() -> None:
    assert [model_view.size(number) for number in (0, 999, 1500, 2.34e9, 1.2e11)] == [
        "0 B",
        "999 B",
        "1.5 KB",
        "2.3 GB",
        "120 GB",
    ]
    assert [model_view.count(number) for number in (192_000, 134_515_008, 4_022_468_096)] == ["192K", "135M", "4.0B"]
    ages = [model_view.age(0, seconds) for seconds in (5, 60, 7200, 86400, 8 * 86400, 40 * 86400, 800 * 86400)]
    assert ages == [
        "just now",
        "1 minute ago",
        "2 hours ago",
        "1 day ago",
        "1 week ago",
        "1 month ago",
        "2 years ago",
    ]
