"""Names into addresses."""

from __future__ import annotations

import socket

import pytest

from spark_kafka_sink.common.errors import BootstrapResolutionError
from spark_kafka_sink.network.transport import Address, canonical_names, resolve


def test_numeric_address_resolves_to_itself() -> None:
    assert resolve("127.0.0.1", 9092) == [(socket.AF_INET, ("127.0.0.1", 9092), "127.0.0.1")]
    assert resolve("::1", 9092)[0].family == socket.AF_INET6


def test_each_address_comes_once() -> None:
    found = resolve("localhost", 9092)
    assert found
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 64 + ".b", "null\0byte"])
def test_name_without_address_is_named(host: str) -> None:
    with pytest.raises(BootstrapResolutionError, match=f"{host.replace(chr(0), '.')}:9092 cannot be resolved"):
        resolve(host, 9092)


@pytest.mark.parametrize("port", [0, 9092])
def test_host_of_a_broker_is_no_line_of_the_log(port: int) -> None:
    with pytest.raises(BootstrapResolutionError) as refused:
        resolve("evil\n2026-01-01 CRITICAL root: forged\x1b[2J", port)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("host", ["127.0.0.1\nforged", "h\x1b[2J", "h\u202e"])
def test_host_with_control_characters_is_not_asked_for(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old C library gives it an address. Errors and log lines about the connection would then show it."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("it was asked for"))
    with pytest.raises(BootstrapResolutionError, match="a host has no control characters") as refused:
        resolve(host, 9092)
    assert str(refused.value).isprintable()


def test_no_name_is_not_this_machine() -> None:
    with pytest.raises(BootstrapResolutionError, match="there is no host"):
        resolve("", 9092)


@pytest.mark.parametrize("port", [0, -1, 65_536, 70_000])
def test_port_out_of_range_is_named(port: int) -> None:
    with pytest.raises(BootstrapResolutionError, match=f"h:{port} .* 1 to 65535"):
        resolve("h", port)


def test_address_reads_as_text() -> None:
    assert str(Address(socket.AF_INET, ("10.0.0.1", 1))) == "10.0.0.1:1"
    assert str(Address(socket.AF_INET6, ("::1", 1, 0, 0))) == "[::1]:1"


def test_canonical_names_are_names_of_the_hosts_addresses() -> None:
    names = canonical_names("127.0.0.1")
    assert names
    assert all(any(address.sockaddr[0] in ("127.0.0.1", "::1") for address in resolve(name, 1)) for name in names)


def test_address_without_reverse_dns_stands_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """glibc gives the address where there is no name, but fails where the DNS does, as many do backwards."""

    def fail(*_: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getnameinfo", fail)
    assert canonical_names("127.0.0.1") == ["127.0.0.1"]


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 64 + ".\u00e9"])
def test_canonical_names_of_no_host_name_it(host: str) -> None:
    with pytest.raises(BootstrapResolutionError, match=f"{host} cannot be resolved"):
        canonical_names(host)
