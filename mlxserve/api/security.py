"""Who may talk to the server: Host and Origin checks, CORS, the API key.

A page in the user's browser can send requests to a loopback port. It cannot choose the Origin header, and with DNS
rebinding it arrives under a foreign Host; so both are checked, whatever address the server is bound to.
"""

import hmac
import ipaddress
import re
from collections.abc import Set
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxserve.api.error_responses import error_response
from mlxserve.config import ServerConfig

PREFLIGHT_MAX_AGE = 600

_HOST_HEADER = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::[0-9]*)?")


class Security:
    """ASGI middleware in front of every route.

    Refuses with 403 a Host that is neither loopback, nor the bind host, nor configured (bound to all addresses, any IP
    address will do: rebinding needs a name), and an Origin that is neither loopback, nor the server's own, nor
    configured; with 401 a wrong or missing API key, except for `paths_without_key`. Answers CORS preflights of the
    origins it accepts.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, paths_without_key: Set[str]) -> None:
        self._app = app
        self._paths_without_key = paths_without_key
        self._any_address = config.host in ("", "0.0.0.0", "::")
        self._hosts = _names((config.host, *config.allowed_hosts))
        self._origins = _names(config.allowed_origins)
        self._api_key = None if config.api_key is None else config.api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        accepted = origin is not None and (self._accepts_origin(origin) or self._is_own_origin(origin, headers))
        accepted_origin = origin if accepted else None

        async def send_secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                response_headers = MutableHeaders(scope=message)
                response_headers["x-content-type-options"] = "nosniff"
                response_headers.add_vary_header("Origin")
                if accepted_origin is not None:
                    response_headers["access-control-allow-origin"] = accepted_origin
                    response_headers["access-control-expose-headers"] = "x-request-id, request-id, retry-after"
            await send(message)

        try:
            self._check_host(headers)
            if origin is not None and accepted_origin is None:
                raise HTTPException(
                    403, f"Requests from the origin {origin!r} are not allowed; add it to the setting allowed_origins."
                )
            answerer = self._app
            if origin is not None and scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                answerer = _preflight_response(headers)
            elif scope["path"] not in self._paths_without_key:
                self._check_api_key(headers)
        except HTTPException as error:
            answerer = error_response(error, scope)
        await answerer(scope, receive, send_secured)

    def _check_host(self, headers: Headers) -> None:
        hosts = headers.getlist("host")
        if not hosts or not all(self._accepts_host(host_name(host)) for host in hosts):
            raise HTTPException(
                403, f"The host {', '.join(hosts)!r} is not allowed; add it to the setting allowed_hosts."
            )

    def _accepts_host(self, name: str) -> bool:
        return is_loopback(name) or name in self._hosts or (self._any_address and _address(name) is not None)

    def _accepts_origin(self, origin: str) -> bool:
        if origin.lower() in self._origins:
            return True
        try:
            name = urlsplit(origin).hostname
        except ValueError:
            return False
        return name is not None and is_loopback(name)

    def _is_own_origin(self, origin: str, headers: Headers) -> bool:
        """Whether the request comes from this server's own page, at an address by which it may be reached."""
        hosts = [host.lower() for host in headers.getlist("host")]
        return any(origin.lower() in (f"http://{host}", f"https://{host}") for host in hosts) and all(
            self._accepts_host(host_name(host)) for host in hosts
        )

    def _check_api_key(self, headers: Headers) -> None:
        if self._api_key is None:
            return
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = [bearer.strip()] if scheme.lower() == "bearer" else []
        given.append(headers.get("x-api-key", ""))
        # Header values are latin-1 on the wire.
        if not any(hmac.compare_digest(key.encode("latin-1"), self._api_key) for key in given):
            raise HTTPException(
                401,
                "The API key is wrong or missing; send it as 'Authorization: Bearer <key>'.",
                headers={"www-authenticate": "Bearer"},
            )


def host_name(header: str) -> str:
    """The name or address in a Host header, lower case, without port and brackets; empty if it is none."""
    match = _HOST_HEADER.fullmatch(header.strip())
    return (match[1] or match[2] or "").lower().removesuffix(".") if match else ""


def is_loopback(name: str) -> bool:
    """Whether a host name or address (without port) can only be this machine."""
    name = name.lower().removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    address = _address(name)
    return address is not None and address.is_loopback


def exposure_warning(config: ServerConfig) -> str | None:
    """What to tell the user who opens the server to a network without an API key; None if they do not."""
    if is_loopback(config.host) or config.api_key is not None:
        return None
    return (
        f"The server listens on {config.host or 'all addresses'} without an API key: everyone who reaches this machine "
        "can use it. Set a key (MLXSERVE_API_KEY), or bind to 127.0.0.1."
    )


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _names(values: tuple[str, ...]) -> frozenset[str]:
    return frozenset(value.lower().strip("[]").rstrip("/.") for value in values) - {""}


def _preflight_response(headers: Headers) -> Response:
    return Response(
        status_code=204,
        headers={
            "access-control-allow-methods": "GET, POST, DELETE, OPTIONS",
            "access-control-allow-headers": headers.get(
                "access-control-request-headers", "authorization, content-type"
            ),
            "access-control-max-age": str(PREFLIGHT_MAX_AGE),
        },
    )
