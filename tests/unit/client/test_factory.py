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


def test_names_that_resolve_stay_as_they_are() -> None:
    servers = [("a", 1), ("b", 2)]
    assert bootstrap_addresses(servers, ALL, resolve, canonical_names) == servers


def test_a_name_that_does_not_resolve_is_passed_over_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert bootstrap_addresses([("bad", 1), ("b", 2)], ALL, resolve, canonical_names) == [("b", 2)]
    assert "bad:1" in caplog.text


@pytest.mark.parametrize("lookup", [ALL, CANONICAL])
def test_without_any_name_that_resolves_the_error_names_the_option_and_all_of_them(lookup: str) -> None:
    with pytest.raises(BootstrapResolutionError, match=r"bootstrap\.servers.*bad1.*bad2"):
        bootstrap_addresses([("bad1", 1), ("bad2", 2)], lookup, resolve, canonical_names)


def test_canonical_lookup_puts_the_full_name_of_each_address_in_the_names_place() -> None:
    found = bootstrap_addresses([("a", 1)], CANONICAL, resolve, canonical_names)
    assert found == [("one.a", 1), ("two.a", 1)]


def test_a_full_name_that_does_not_resolve_keeps_nobody_elses_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = bootstrap_addresses([("a", 1)], CANONICAL, resolve, lambda _: ["bad.a", "two.a"])
    assert found == [("two.a", 1)]
    assert "Passing over bad.a:1" in caplog.text


def test_an_address_given_twice_is_kept_once() -> None:
    assert bootstrap_addresses([("a", 1), ("a", 1)], ALL, resolve, canonical_names) == [("a", 1)]
