from __future__ import annotations

import logging
import socket
from collections.abc import Sequence

import pytest

from spark_kafka_sink.client.factory import bootstrap_addresses
from spark_kafka_sink.common.errors import BootstrapResolutionError
from spark_kafka_sink.network.transport import Address

ALL = "use_all_dns_ips"
CANONICAL = "resolve_canonical_bootstrap_servers_only"


def resolve(host: str, port: int) -> Sequence[Address]:
    if host.startswith("bad"):
        raise BootstrapResolutionError(f"{host}:{port} cannot be resolved: no such name")
    return [Address(socket.AF_INET, ("10.0.0.1", port)), Address(socket.AF_INET, ("10.0.0.2", port))]


def canonical_names(host: str) -> Sequence[str]:
    if host.startswith("bad"):
        raise BootstrapResolutionError(f"{host} cannot be resolved: no such name")
    return [f"one.{host}", f"two.{host}"]


def test_resolvable_names_are_not_changed() -> None:
    servers = [("a", 1), ("b", 2)]
    assert bootstrap_addresses(servers, ALL, resolve, canonical_names) == servers


def test_unresolved_name_is_skipped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert bootstrap_addresses([("bad", 1), ("b", 2)], ALL, resolve, canonical_names) == [("b", 2)]
    assert "bad:1" in caplog.text


@pytest.mark.parametrize("lookup", [ALL, CANONICAL])
def test_unresolved_bootstrap_servers_are_all_named(lookup: str) -> None:
    with pytest.raises(BootstrapResolutionError, match=r"bootstrap\.servers.*bad1.*bad2"):
        bootstrap_addresses([("bad1", 1), ("bad2", 2)], lookup, resolve, canonical_names)


def test_canonical_lookup_replaces_a_name_by_full_names() -> None:
    found = bootstrap_addresses([("a", 1)], CANONICAL, resolve, canonical_names)
    assert found == [("one.a", 1), ("two.a", 1)]


def test_one_unresolved_canonical_name_keeps_the_others(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = bootstrap_addresses([("a", 1)], CANONICAL, resolve, lambda _: ["bad.a", "two.a"])
    assert found == [("two.a", 1)]
    assert "Ignoring bad.a:1" in caplog.text


def test_address_given_twice_is_kept_once() -> None:
    assert bootstrap_addresses([("a", 1), ("a", 1)], ALL, resolve, canonical_names) == [("a", 1)]
