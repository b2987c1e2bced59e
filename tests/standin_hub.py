"""A small hub on the loopback interface, which huggingface_hub is sent to by HF_ENDPOINT, in a process of its own.

Repositories are folders of bytes; weights are LFS files, known by their SHA-256, the rest by git's SHA-1.
"""

import hashlib
import json
import re
import socket
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LFS_SUFFIXES = (".safetensors", ".gguf", ".bin")


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Repo:
    files: dict[str, bytes]
    gated: bool = False
    card: dict[str, Any] = field(default_factory=dict)
    """More fields of the API's answer about it."""
    commits: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    """Branch or tag -> commit."""


class Hub(ThreadingHTTPServer):
    """Faults: a file in `cut` ends its connection after so many bytes, each time; one in `damaged` comes with its first
    byte changed, so many times; one in `held` stops after half its bytes until `release` is set; `statuses` are the
    answers to questions about repositories."""

    daemon_threads = True

    def __init__(self, repos: dict[str, Repo]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos = repos
        self.requested: list[str] = []
        """Paths, with the range behind them if there is one."""
        self.cut: dict[str, int] = {}
        self.damaged: dict[str, int] = {}
        self.held: set[str] = set()
        self.statuses: dict[str, int] = {}
        self.holding = threading.Event()
        self.release = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def fetched(self, file: str) -> list[str]:
        """The requests for the content of a file."""
        return [path for path in self.requested if path.startswith("GET ") and f"/resolve/{COMMIT}/{file}" in path]


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        span = self.headers.get("Range", "")
        self.server.requested.append(f"{self.command} {self.path} {span}".strip())
        url = urllib.parse.urlsplit(self.path)
        if url.path == "/api/models":
            self._search(urllib.parse.parse_qs(url.query))
        elif match := re.fullmatch(r"/api/models/(\w+/[\w.-]+)/(revision|tree)/([^/]+)", url.path):
            self._describe(*match.groups())
        elif match := re.fullmatch(r"/(\w+/[\w.-]+)/resolve/(\w+)/(.+)", url.path):
            repo, commit, file = match.groups()
            self._send_file(file, self.server.repos[repo].files[file], span, commit)
        else:
            self._answer(404, {})

    def _search(self, query: dict[str, list[str]]) -> None:
        found = [
            {"id": name, "downloads": 7, **repo.card}
            for name, repo in self.server.repos.items()
            if query.get("search", [""])[0].lower() in name.lower() and "mlx" in query.get("filter", [])
        ]
        self._answer(200, found)

    def _describe(self, name: str, what: str, revision: str) -> None:
        repo = self.server.repos.get(name)
        if name in self.server.statuses:
            self._answer(self.server.statuses[name], {})
        elif repo is None:
            self._answer(404, {}, {"X-Error-Code": "RepoNotFound"})
        elif repo.gated:
            self._answer(403, {}, {"X-Error-Code": "GatedRepo"})
        elif revision not in {**repo.commits, **dict.fromkeys(repo.commits.values(), "")}:
            self._answer(404, {}, {"X-Error-Code": "RevisionNotFound"})
        elif what == "tree":
            self._answer(200, [{"type": "file", **_entry(file, data)} for file, data in repo.files.items()])
        else:
            siblings = [{**_entry(file, data), "rfilename": file} for file, data in repo.files.items()]
            for each in siblings:
                each["blobId"] = each.pop("oid")
                if lfs := each.get("lfs"):
                    each["lfs"] = {"sha256": lfs["oid"], "size": lfs["size"], "pointerSize": 134}
            commit = repo.commits.get(revision, revision)
            self._answer(200, {"id": name, "sha": commit, "siblings": siblings, **repo.card})

    def _send_file(self, file: str, data: bytes, span: str, commit: str) -> None:
        start, _, last = span.removeprefix("bytes=").partition("-")
        etag = hashlib.sha256(data).hexdigest() if file.endswith(LFS_SUFFIXES) else git_hash(data)
        body = data[int(start or 0) : int(last) + 1 if last else None]
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if self.command == "GET" and self.server.damaged.get(file, 0) > 0:
            self.server.damaged[file] -= 1
            body = bytes([body[0] ^ 1]) + body[1:]
        self.send_response(206 if span else 200)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "GET":
            return
        if file in self.server.held:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            body = body[len(body) // 2 :]
            self.server.holding.set()
            self.server.release.wait(30)
        elif (limit := self.server.cut.get(file)) is not None and limit < len(body):
            body = body[:limit]
            self.close_connection = True
        try:
            self.wfile.write(body)
        except OSError:
            self.close_connection = True

    def _answer(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


def _entry(file: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"path": file, "size": len(data), "oid": git_hash(data)}
    if file.endswith(LFS_SUFFIXES):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return entry


@contextmanager
def serve_hub(repos: dict[str, Repo]) -> Iterator[Hub]:
    hub = Hub(repos)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        hub.release.set()
        hub.shutdown()
        thread.join()
        hub.server_close()


def closed_url() -> str:
    """An address where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"
