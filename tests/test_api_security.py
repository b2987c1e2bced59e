"""Who may talk to the server: Host, Origin, CORS, API key."""

import asyncio
import logging

import httpx
import pytest
from fake_engine import FakeHost

from mlxserve.api.app import create_app
from mlxserve.api.metrics import Metrics
from mlxserve.api.security import exposure_warning, host_name, is_loopback
from mlxserve.config import ServerConfig
from mlxserve.errors import ConfigError

KEY = "sk-local-çé"

Headers = list[tuple[str, str]]


def ask(
    config: ServerConfig, headers: Headers | dict[str, str], *, method: str = "GET", path: str = "/v1/models"
) -> httpx.Response:
    """One request; a Host that is not given is loopback."""
    pairs = list(headers.items()) if isinstance(headers, dict) else headers
    if not any(name == "host" for name, _ in pairs):
        pairs.append(("host", "127.0.0.1:11711"))
    raw = [(name.encode(), value.encode()) for name, value in pairs]

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(FakeHost(), config, Metrics()))
        async with httpx.AsyncClient(transport=transport) as client:
            return await client.request(method, "http://server" + path, headers=raw)

    return asyncio.run(send())


def refusal(response: httpx.Response, status: int) -> str:
    assert response.status_code == status
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["x-request-id"]
    return response.json()["error"]["message"]


class TestHost:
    @pytest.mark.parametrize(
        "host",
        [
            *("localhost", "LOCALHOST:1234", "localhost.", "app.localhost:80", "127.0.0.1", "127.0.0.1:11711"),
            *("127.8.9.1", "[::1]", "[::1]:11711"),
        ],
    )
    def test_loopback(self, host: str) -> None:
        assert ask(ServerConfig(), {"host": host}).status_code == 200

    @pytest.mark.parametrize(
        "host",
        [
            *("evil.com", "evil.com:11711", "localhost.evil.com", "127.0.0.1.evil.com", "evillocalhost", "192.168.1.5"),
            *("", "[::1", "[fe80::1]", "localhost:80@evil.com", "127.0.0.1:x", "localhost evil.com", "0.0.0.0"),
        ],
    )
    def test_others(self, host: str) -> None:
        assert "allowed_hosts" in refusal(ask(ServerConfig(), {"host": host}), 403)

    def test_every_header_counts(self) -> None:
        refusal(ask(ServerConfig(), [("host", "localhost"), ("host", "evil.com")]), 403)

    def test_bind_host_and_configured_ones(self) -> None:
        config = ServerConfig(host="Mac.local", allowed_hosts=("llm.example.com", "[FD00::5]"))
        for host in ("mac.local:11711", "LLM.example.com", "[fd00::5]:80", "localhost"):
            assert ask(config, {"host": host}).status_code == 200
        for host in ("other.local", "example.com", "192.168.1.5"):
            refusal(ask(config, {"host": host}), 403)

    @pytest.mark.parametrize("bind", ["0.0.0.0", "::"])
    def test_bound_to_all_addresses(self, bind: str) -> None:
        config = ServerConfig(host=bind)
        for host in ("192.168.1.5:11711", "[fe80::1]:11711", "localhost"):
            assert ask(config, {"host": host}).status_code == 200
        refusal(ask(config, {"host": "evil.com"}), 403)

    def test_every_path_is_behind_it(self) -> None:
        for path in ("/health", "/metrics", "/nothing", "/v1/completions"):
            refusal(ask(ServerConfig(), {"host": "evil.com"}, path=path), 403)


class TestOrigin:
    @pytest.mark.parametrize("origin", ["http://localhost:3000", "https://127.0.0.1", "http://[::1]:8080"])
    def test_loopback(self, origin: str) -> None:
        response = ask(ServerConfig(), {"origin": origin})
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == origin
        assert "origin" in response.headers["vary"].lower()

    @pytest.mark.parametrize(
        "origin",
        ["https://evil.com", "null", "http://localhost.evil.com", "http://192.168.1.5", "http://[", "", "file://"],
    )
    def test_others(self, origin: str) -> None:
        response = ask(ServerConfig(), {"origin": origin})
        assert "allowed_origins" in refusal(response, 403)
        assert "access-control-allow-origin" not in response.headers

    def test_configured(self) -> None:
        config = ServerConfig(allowed_origins=("https://Chat.example.com/", "null"))
        assert ask(config, {"origin": "https://chat.example.com"}).status_code == 200
        assert ask(config, {"origin": "null"}).status_code == 200
        refusal(ask(config, {"origin": "http://chat.example.com"}), 403)
        refusal(ask(config, {"origin": "https://chat.example.com:444"}), 403)

    def test_none_is_no_browser(self) -> None:
        assert "access-control-allow-origin" not in ask(ServerConfig(), {}).headers

    def test_preflight(self) -> None:
        config = ServerConfig(api_key=KEY)
        asked = {
            "origin": "http://localhost:3000",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,x-stainless-os",
        }
        response = ask(config, asked, method="OPTIONS", path="/v1/chat/completions")
        assert (response.status_code, response.content) == (204, b"")
        assert response.headers["access-control-allow-origin"] == "http://localhost:3000"
        assert response.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-os"
        assert "POST" in response.headers["access-control-allow-methods"]

        response = ask(config, asked | {"origin": "https://evil.com"}, method="OPTIONS", path="/v1/chat/completions")
        refusal(response, 403)
        assert not any(name.startswith("access-control") for name in response.headers)

    def test_refusals_can_be_read_by_pages_that_may(self) -> None:
        response = ask(ServerConfig(api_key=KEY), {"origin": "http://localhost"})
        refusal(response, 401)
        assert response.headers["access-control-allow-origin"] == "http://localhost"


class TestApiKey:
    config = ServerConfig(api_key=KEY)

    @pytest.mark.parametrize(
        "headers", [{"authorization": f"Bearer {KEY}"}, {"authorization": f"bearer  {KEY}"}, {"x-api-key": KEY}]
    )
    def test_right(self, headers: dict[str, str]) -> None:
        assert ask(self.config, headers).status_code == 200

    @pytest.mark.parametrize(
        "headers",
        [
            *({}, {"authorization": "Bearer"}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEY}"}),
            *({"authorization": KEY}, {"x-api-key": ""}, {"x-api-key": KEY + "x"}, {"x-api-key": KEY[:-1]}),
        ],
    )
    @pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/nothing", "/health/", "//health"])
    def test_wrong(self, headers: dict[str, str], path: str) -> None:
        response = ask(self.config, headers, path=path)
        refusal(response, 401)
        assert response.json()["error"]["type"] == "authentication_error"
        assert response.headers["www-authenticate"] == "Bearer"

    def test_health_needs_none(self) -> None:
        assert ask(self.config, {}, path="/health").status_code == 200

    def test_is_not_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.DEBUG):
            ask(self.config, {"authorization": f"Bearer {KEY}"})
            ask(self.config, {"authorization": f"Bearer {KEY}x"})
        assert KEY not in caplog.text
        assert KEY not in repr(self.config)


def test_answers_carry_security_headers() -> None:
    assert ask(ServerConfig(), {}).headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("setting", ["allowed_hosts", "allowed_origins"])
def test_wildcards_are_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=setting):
        ask(ServerConfig(**{setting: ("*",)}), {})


@pytest.mark.parametrize(
    ("header", "name"),
    [
        *(("A.b:80", "a.b"), ("a.b.", "a.b"), ("[::1]:80", "::1"), ("[::1]", "::1"), ("a:", "a"), ("a:b", "")),
        *(("[::1]x", ""), ("::1", ""), ("", "")),
    ],
)
def test_host_name(header: str, name: str) -> None:
    assert host_name(header) == name


def test_is_loopback() -> None:
    assert all(map(is_loopback, ["localhost", "127.0.0.1", "::1", "x.localhost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "localhost.com", "10.0.0.1", ""]))


def test_exposure_warning() -> None:
    assert exposure_warning(ServerConfig()) is None
    assert exposure_warning(ServerConfig(host="localhost")) is None
    assert exposure_warning(ServerConfig(host="0.0.0.0", api_key="k")) is None
    assert "0.0.0.0" in str(exposure_warning(ServerConfig(host="0.0.0.0")))
