from __future__ import annotations

import random
import socket
from collections.abc import Sequence

import pytest

from spark_kafka_sink.client.backoff import FOREVER_MS
from spark_kafka_sink.client.connection_states import ClusterConnectionStates
from spark_kafka_sink.common.clock import NEVER_MS
from spark_kafka_sink.common.errors import (
    BootstrapResolutionError,
    KafkaError,
    SaslAuthenticationError,
)
from spark_kafka_sink.network.transport import Address

NODE = "7"


class Names:
    """A resolver that counts its calls. A test may change its answers."""

    def __init__(self, *hosts: str) -> None:
        self.hosts = list(hosts)
        self.asked: list[tuple[str, int]] = []

    def __call__(self, host: str, port: int) -> Sequence[Address]:
        self.asked.append((host, port))
        if not self.hosts:
            raise BootstrapResolutionError(f"{host} has no address")
        return [Address(socket.AF_INET, (each, port)) for each in self.hosts]


def make(names: Names | None = None, **changes: int) -> ClusterConnectionStates:
    settings = {
        "reconnect_backoff_ms": 50,
        "reconnect_backoff_max_ms": 1_000,
        "setup_timeout_ms": 10_000,
        "setup_timeout_max_ms": 30_000,
    }
    return ClusterConnectionStates(**(settings | changes), resolve=names or Names("10.0.0.1"), rng=random.Random(3))


def connect(states: ClusterConnectionStates, now_ms: int, host: str = "broker") -> str:
    states.connecting(NODE, host, 9092, now_ms)
    return str(states.current_address(NODE).sockaddr[0])


def test_node_never_tried_may_connect_at_once() -> None:
    states = make()
    assert states.can_connect(NODE, 0)
    assert states.connection_delay(NODE, 0) == 0
    assert states.last_attempt_ms(NODE) == NEVER_MS
    assert not states.is_disconnected(NODE)


def test_states_go_from_connecting_to_ready() -> None:
    states = make()
    connect(states, 0)
    assert states.is_connecting(NODE)
    assert states.is_preparing(NODE)
    assert not states.is_connected(NODE)
    assert not states.can_connect(NODE, 10**6)
    states.checking_api_versions(NODE)
    assert not states.is_connecting(NODE)
    assert states.is_preparing(NODE)
    assert states.is_connected(NODE)
    assert not states.is_ready(NODE, 0)
    states.ready(NODE)
    assert not states.is_preparing(NODE)
    assert states.is_ready(NODE, 0)
    assert states.connection_delay(NODE, 0) == FOREVER_MS
    states.disconnected(NODE, 5)
    assert states.is_disconnected(NODE)
    assert not states.is_connected(NODE)


def test_lost_node_is_not_connected_during_the_backoff() -> None:
    states = make()
    connect(states, 0)
    states.disconnected(NODE, 1_000)
    delay_ms = states.connection_delay(NODE, 1_000)
    assert 40 <= delay_ms <= 60
    assert not states.can_connect(NODE, 1_000 + delay_ms - 1)
    assert states.can_connect(NODE, 1_000 + delay_ms)


def test_reconnect_backoff_grows_and_resets_when_ready() -> None:
    states = make()
    delays = []
    for _ in range(10):
        connect(states, 0)
        states.disconnected(NODE, 0)
        delays.append(states.connection_delay(NODE, 0))
    for failures, delay_ms in enumerate(delays):
        assert min(0.8 * 50 * 2**failures, 800) - 1 <= delay_ms <= min(1.2 * 50 * 2**failures, 1_000)
    assert delays[-1] >= 800
    connect(states, 0)
    states.ready(NODE)
    states.disconnected(NODE, 0)
    assert states.connection_delay(NODE, 0) <= 60


def test_setup_timeout_grows_with_failed_setups_to_its_maximum() -> None:
    states = make()
    timeouts = []
    for _ in range(5):
        connect(states, 0)
        timeouts.append(states.setup_timeout_ms(NODE))
        states.disconnected(NODE, 0)
    for failures, timeout_ms in enumerate(timeouts):
        assert min(8_000 * 2**failures, 24_000) <= timeout_ms <= min(12_000 * 2**failures, 30_000)
    assert timeouts[2] >= 24_000


@pytest.mark.parametrize("move", ["checking_api_versions", "ready"])
def test_setup_that_succeeds_resets_the_setup_timeout(move: str) -> None:
    states = make()
    for _ in range(4):
        connect(states, 0)
        states.disconnected(NODE, 0)
    connect(states, 0)
    getattr(states, move)(NODE)
    assert states.setup_timeout_ms(NODE) <= 12_000


def test_only_connecting_nodes_have_a_setup_timeout() -> None:
    states = make()
    connect(states, 1_000)
    states.connecting("8", "broker", 9092, 2_000)
    limit_ms = states.setup_timeout_ms(NODE)
    assert states.next_setup_timeout_ms(1_000) == min(limit_ms, 1_000 + states.setup_timeout_ms("8"))
    assert states.connection_delay(NODE, 1_500) == limit_ms - 500
    assert NODE not in states.nodes_with_setup_timeout(1_000 + limit_ms - 1)
    assert NODE in states.nodes_with_setup_timeout(1_000 + limit_ms)
    states.checking_api_versions(NODE)
    states.ready("8")
    assert states.nodes_with_setup_timeout(10**9) == []
    assert states.next_setup_timeout_ms(0) == FOREVER_MS


def test_every_address_is_tried_before_the_name_is_resolved_again() -> None:
    names = Names("10.0.0.1", "10.0.0.2", "10.0.0.3")
    states = make(names)
    tried = []
    for _ in range(3):
        tried.append(connect(states, 0))
        states.disconnected(NODE, 0)
    assert tried == names.hosts
    assert names.asked == [("broker", 9092)]
    names.hosts = ["10.0.0.9"]
    assert connect(states, 0) == "10.0.0.9"
    assert len(names.asked) == 2


def test_lost_connection_resolves_again_and_tries_another_address_first() -> None:
    names = Names("10.0.0.1", "10.0.0.2")
    states = make(names)
    assert connect(states, 0) == "10.0.0.1"
    states.checking_api_versions(NODE)
    states.disconnected(NODE, 0)
    assert connect(states, 0) == "10.0.0.2"
    assert len(names.asked) == 2


def test_lost_connections_lead_to_every_address() -> None:
    """Bug: with three addresses that accept a connection and close it, the third was never tried."""
    states = make(Names("10.0.0.1", "10.0.0.2", "10.0.0.3"))
    tried = []
    for _ in range(4):
        tried.append(connect(states, 0))
        states.checking_api_versions(NODE)
        states.disconnected(NODE, 0)
    assert tried == ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.1"]


def test_single_address_is_tried_again_after_a_lost_connection() -> None:
    states = make(Names("10.0.0.1"))
    connect(states, 0)
    states.ready(NODE)
    states.disconnected(NODE, 0)
    assert connect(states, 0) == "10.0.0.1"


def test_unresolved_host_is_resolved_again_at_the_next_attempt() -> None:
    names = Names()
    states = make(names)
    with pytest.raises(BootstrapResolutionError, match="broker"):
        connect(states, 0)
    states.disconnected(NODE, 0)
    names.hosts = ["10.0.0.4"]
    assert connect(states, 0) == "10.0.0.4"


def test_node_that_moved_to_another_host_starts_over() -> None:
    names = Names("10.0.0.1", "10.0.0.2")
    states = make(names)
    for _ in range(6):
        connect(states, 0)
        states.disconnected(NODE, 0)
    assert connect(states, 0, host="elsewhere") == "10.0.0.1"
    assert names.asked[-1] == ("elsewhere", 9092)
    assert states.setup_timeout_ms(NODE) <= 12_000


def test_throttle_blocks_requests_and_never_gets_shorter() -> None:
    states = make()
    connect(states, 0)
    states.ready(NODE)
    states.throttle(NODE, 500)
    states.throttle(NODE, 300)
    assert states.throttle_delay_ms(NODE, 100) == 400
    assert states.poll_delay_ms(NODE, 100) == 400
    assert not states.is_ready(NODE, 499)
    assert states.is_ready(NODE, 500)
    assert states.poll_delay_ms(NODE, 500) == FOREVER_MS
    states.throttle("unknown", 500)
    assert states.throttle_delay_ms("unknown", 0) == 0


def test_throttle_does_not_lengthen_the_backoff_of_a_lost_node() -> None:
    states = make()
    connect(states, 0)
    states.ready(NODE)
    states.throttle(NODE, 10_000)
    states.disconnected(NODE, 0)
    assert states.poll_delay_ms(NODE, 0) <= 60


def test_refusal_is_kept_until_a_later_connection_is_ready() -> None:
    states = make()
    error: KafkaError = SaslAuthenticationError("wrong password")
    connect(states, 0)
    states.disconnected(NODE, 0)
    states.authentication_failed(NODE, error, 0)
    assert states.authentication_error(NODE) is error
    assert states.is_disconnected(NODE)
    assert not states.can_connect(NODE, 0)
    assert states.connection_delay(NODE, 0) > 60, "a refusal counts as one more failure"
    connect(states, 1_000)
    assert states.authentication_error(NODE) is error
    states.ready(NODE)
    assert states.authentication_error(NODE) is None
    assert states.authentication_error("unknown") is None
