"""Names into addresses."""

from __future__ import annotations

import socket
from typing import Any

from spark_kafka_sink.common.errors import BootstrapResolutionError
from spark_kafka_sink.common.peer_text import one_line
from spark_kafka_sink.network.transport import Address

_MAX_PORT = 65535


def resolve(host: str, port: int) -> list[Address]:
    """Every address of the name, in the system's order of preference, each once. Blocks as long as the system's
    resolver does.

    Raises BootstrapResolutionError naming the host where it has none.
    """
    shown = one_line(host)  # a broker may have named it
    if not 0 < port <= _MAX_PORT:
        raise BootstrapResolutionError(f"{shown}:{port} cannot be resolved: a port is a number from 1 to {_MAX_PORT}.")
    if not host:
        raise BootstrapResolutionError(f":{port} cannot be resolved: there is no host.")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise BootstrapResolutionError(f"{shown}:{port} cannot be resolved: {one_line(str(error))}") from error
    return list(dict.fromkeys(Address(family, sockaddr, host) for family, _, _, _, sockaddr in found))


def canonical_names(host: str) -> list[str]:
    """The full name of each address of the host, by reverse DNS; the address itself where that gives none.

    For client.dns.lookup=resolve_canonical_bootstrap_servers_only. Raises BootstrapResolutionError naming the host.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise BootstrapResolutionError(f"{host} cannot be resolved: {error}") from error
    return list(dict.fromkeys(_full_name(sockaddr) for _, _, _, _, sockaddr in found))


def _full_name(sockaddr: tuple[Any, ...]) -> str:
    try:
        return socket.getnameinfo(sockaddr, 0)[0]
    except OSError:  # the DNS fails, which is not to say that there is no name
        return str(sockaddr[0])
