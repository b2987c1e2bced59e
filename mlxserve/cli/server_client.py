"""What commands ask of a running server."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mlxserve.cli.addresses import client_url
from mlxserve.config import ServerConfig
from mlxserve.errors import ConfigError, EngineError, ModelNotFound

if TYPE_CHECKING:
    import httpx

TIMEOUT = 5.0


@contextmanager
def open_client(server_config: ServerConfig, timeout: float | None = TIMEOUT) -> "Iterator[ServerClient]":
    """A client of the server that the settings host, port and api_key name; seconds that an answer may take."""
    import httpx

    key = server_config.api_key
    with httpx.Client(
        base_url=client_url(server_config.host, server_config.port),
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=httpx.Timeout(timeout, connect=TIMEOUT),
        # Environment proxies are for the outside world, not for a server that was named by its address.
        trust_env=False,
    ) as client:
        yield ServerClient(client)


class ServerClient:
    """
    Its methods raise:
        ConfigError: the server wants another API key, or is none of ours.
        EngineError: nothing answers.
        ModelNotFound: the server does not know the model of a request.
    """

    def __init__(self, client: "httpx.Client") -> None:
        self._client = client

    @property
    def address(self) -> str:
        return str(self._client.base_url)

    def get(self, path: str, key: str) -> dict[str, Any]:
        """The object at a path; one without `key` is none of ours."""
        return self._ask("GET", path, key)

    def post(self, path: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
        """The object that a body is answered with."""
        return self._ask("POST", path, key, body)

    def _ask(self, method: str, path: str, key: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        import httpx

        try:
            reply = self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise EngineError(
                f"no mlxserve answers at {self.address} ({error}); start one with `mlxserve serve`, "
                "or name another with --host and --port"
            ) from error
        if reply.status_code == 401:
            raise ConfigError(f"the server at {self.address} wants another API key: set MLXSERVE_API_KEY to it")
        try:
            content = reply.json()
        except ValueError:
            content = None
        if reply.status_code == 200 and isinstance(content, dict) and key in content:
            return content
        message = content.get("error") if isinstance(content, dict) else None
        if body is not None and reply.status_code == 404 and isinstance(message, str):
            raise ModelNotFound(message, model=str(body.get("model")))
        raise ConfigError(
            f"the server at {self.address} answers {path.partition('?')[0]} with status {reply.status_code}"
            f"{f' ({message})' if isinstance(message, str) else ''}: "
            "it is no mlxserve, or an older one; name another with --host and --port"
        )
