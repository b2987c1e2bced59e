"""How the page's files are served. What they do in a browser is in test_page_chat.py and its neighbours."""

import asyncio
import re
from pathlib import Path

import httpx
import pytest
from fake_engine import FakeHost

from mlxserve.api.app import create_app
from mlxserve.api.metrics import Metrics
from mlxserve.api.page.routes import FOLDER
from mlxserve.config import ServerConfig

NAMES = sorted(path.name for path in FOLDER.iterdir())
TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
PATHS = ["/" if name == "index.html" else f"/page/{name}" for name in NAMES]


def ask(path: str, config: ServerConfig | None = None, method: str = "GET", **headers: str) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(FakeHost(), config or ServerConfig(), Metrics()))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:11711") as client:
            named = {"accept": "text/html", **{k.replace("_", "-"): v for k, v in headers.items()}}
            return await client.request(method, path, headers=named)

    return asyncio.run(send())


@pytest.mark.parametrize(("name", "path"), list(zip(NAMES, PATHS, strict=True)))
def test_files(name: str, path: str) -> None:
    response = ask(path)
    assert response.status_code == 200
    assert response.content == (FOLDER / name).read_bytes()
    assert response.headers["content-type"].partition(";")[0] == TYPES[Path(name).suffix]
    assert response.headers["x-content-type-options"] == "nosniff"
    policy = response.headers["content-security-policy"].split("; ")
    assert {"default-src 'none'", "script-src 'self'", "connect-src 'self'", "frame-ancestors 'none'"} <= set(policy)
    assert not [source for source in policy if "unsafe" in source or "*" in source or "http" in source]


def test_a_browser_keeps_files_and_asks_whether_they_changed() -> None:
    first = ask("/page/main.js")
    assert first.headers["cache-control"] == "no-cache"
    again = ask("/page/main.js", if_none_match=f'"other", W/{first.headers["etag"]}')
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert ask("/page/main.js", if_none_match='"other"').status_code == 200
    assert ask("/page/api.js").headers["etag"] != first.headers["etag"]


@pytest.mark.parametrize("path", ["/page", "/page/", "/page/nothing.js", "/page/../routes.py", "/page/index.html"])
def test_nothing_else_is_served(path: str) -> None:
    assert ask(path).status_code == 404


def test_only_reading() -> None:
    head = ask("/", method="HEAD")
    assert (head.status_code, head.content) == (200, b"")
    assert ask("/", method="POST").status_code == 405


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("accept", ["*/*", "application/json", ""])
def test_programs_get_what_ollama_says_at_its_root(method: str, accept: str) -> None:
    response = ask("/", method=method, accept=accept)
    assert response.status_code == 200
    assert response.text == ("Ollama is running" if method == "GET" else "")
    assert response.headers["content-type"].startswith("text/plain")
    assert "Accept" in response.headers["vary"]
    assert "Accept" in ask("/").headers["vary"]


@pytest.mark.parametrize("path", PATHS)
def test_host_and_origin_are_checked(path: str) -> None:
    assert ask(path, host="evil.com").status_code == 403
    assert ask(path, origin="https://evil.com").status_code == 403


def test_files_need_no_key_and_data_does() -> None:
    config = ServerConfig(api_key="secret")
    assert {ask(path, config).status_code for path in PATHS} == {200}
    for path in ("/v1/models", "/page/nothing.js", "/page/", "/index.html", "/debug/requests"):
        assert ask(path, config).status_code == 401


@pytest.mark.parametrize("name", NAMES)
def test_nothing_comes_from_elsewhere_or_parses_html(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://\w|@import|url\(", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(", text)
    assert not re.search(r"<script>|\son\w+=|\sstyle=", text)


def test_modules_import_files_that_are_there() -> None:
    scripts = [name for name in NAMES if name.endswith(".js")]
    imports = {name: re.findall(r' from "\./([^"]+)"', (FOLDER / name).read_text(encoding="utf-8")) for name in scripts}
    assert imports["main.js"]
    assert {target for targets in imports.values() for target in targets} <= set(NAMES)
    index = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert set(re.findall(r'(?:src|href)="page/([^"]+)"', index)) <= set(NAMES)


class TestOwnOrigin:
    """A browser sends its page's Origin with a POST, also where that is the server itself."""

    def test_by_address(self) -> None:
        config = ServerConfig(host="0.0.0.0")
        for origin in ("http://192.168.1.5:11711", "https://192.168.1.5:11711"):
            response = ask("/v1/models", config, host="192.168.1.5:11711", origin=origin)
            assert response.status_code == 200

    def test_by_a_configured_name(self) -> None:
        config = ServerConfig(allowed_hosts=("mybox.local",))
        assert ask("/v1/models", config, host="MyBox.local", origin="http://mybox.local").status_code == 200

    @pytest.mark.parametrize(
        "origin",
        ["http://192.168.1.5", "http://192.168.1.5:80", "http://192.168.1.6:11711", "ftp://192.168.1.5:11711", "null"],
    )
    def test_others(self, origin: str) -> None:
        config = ServerConfig(host="0.0.0.0")
        assert ask("/v1/models", config, host="192.168.1.5:11711", origin=origin).status_code == 403

    def test_of_a_host_that_is_none_of_ours(self) -> None:
        response = ask("/v1/models", host="evil.com:11711", origin="http://evil.com:11711")
        assert response.status_code == 403
        assert "access-control-allow-origin" not in response.headers
