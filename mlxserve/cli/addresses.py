"""Addresses to listen on and to connect to."""

import errno
import os
import socket
from typing import Any

from mlxserve.errors import ConfigError

AddressInfo = tuple[int, int, int, str, tuple[Any, ...]]
"""An entry of socket.getaddrinfo."""


def client_url(host: str, port: int) -> str:
    """Base URL by which this machine reaches a server that listens on `host`."""
    # The addresses that mean "every interface" can be listened on, but are nothing to connect to.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that accept connections on every address of `host`; port 0 picks a free one.

    Raises:
        ConfigError: the port is taken or forbidden, or the host is not one of this machine's.
    """
    sockets: list[socket.socket] = []
    failure: OSError | None = None
    try:
        for address in dict.fromkeys(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)):
            # Port 0 must give the same free port on every address.
            port = port or (sockets[0].getsockname()[1] if sockets else 0)
            try:
                sockets.append(_listen_on(address, port))
            except OSError as error:
                # "localhost" may stand for an IPv6 address on a machine without IPv6.
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                failure = error
        if not sockets and failure is not None:
            raise failure
    except OSError as error:
        for sock in sockets:
            sock.close()
        raise ConfigError(_listen_failure(host, port, error)) from error
    return sockets


def _listen_on(address: AddressInfo, port: int) -> socket.socket:
    family, kind, protocol, _, target = address
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((target[0], port, *target[2:]))
        # From now on the port is ours; who connects while a model is loading waits instead of being refused.
        sock.listen(2048)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def _listen_failure(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} of {host} is in use by another program, maybe another `mlxserve serve`; "
            "stop that one, or choose another port with --port (0 takes a free one)"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"port {port} needs more rights than this user has; choose one above 1023 with --port"
    reason = error.strerror or os.strerror(error.errno or 0)
    return f"cannot listen on {host}, port {port}: {reason}; --host must name an address of this machine"
