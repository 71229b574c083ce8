"""The network client over scripted nodes: requests, connections, timeouts, metadata and throttling."""

from __future__ import annotations

import logging
import random
import socket
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from support.client_rig import RECONNECT_BACKOFF_MS, REQUEST_TIMEOUT_MS, SETUP_TIMEOUT_MS, ClientRig
from support.scripted_broker import faults
from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_broker.exchange import Answer, Exchange
from support.scripted_broker.versions import KAFKA_2_1

from spark_kafka_sink.client import network_client
from spark_kafka_sink.client.backoff import FOREVER_MS
from spark_kafka_sink.client.metadata_view import MetadataResponse
from spark_kafka_sink.client.network_client import PAUSE_MS, LossLog, client_throttle_ms
from spark_kafka_sink.client.seams import ClientResponse
from spark_kafka_sink.common.cluster import Node
from spark_kafka_sink.common.errors import (
    BootstrapResolutionError,
    DisconnectError,
    IllegalStateError,
    InvalidRequestError,
    ProtocolError,
    SaslAuthenticationError,
    UnsupportedVersionError,
)
from spark_kafka_sink.network.channel import ChannelKind, ChannelState, SetupStep
from spark_kafka_sink.network.transport import Address
from spark_kafka_sink.protocol.fetch import ListOffsetsRequest
from spark_kafka_sink.protocol.metadata import MetadataRequest
from spark_kafka_sink.protocol.produce import ProduceRequest
from spark_kafka_sink.protocol.transactions import InitProducerIdRequest
from spark_kafka_sink.protocol.versions import ApiKey, Message

ASK = InitProducerIdRequest()
BROKERS_ONLY = MetadataRequest((), allow_auto_topic_creation=False)


@pytest.fixture
def rig() -> ClientRig:
    rig = ClientRig(1, ["t"])
    rig.await_metadata()
    rig.connect(0)
    rig.client.disconnect("-1")
    return rig


# ---- requests and responses ----------------------------------------------------------------------------------------


def test_request_ends_with_its_response_and_one_callback(rig: ClientRig) -> None:
    received: list[ClientResponse] = []
    request = rig.send(0, ASK, callback=received.append)
    assert rig.client.in_flight_request_count() == rig.client.in_flight_request_count("0") == 1
    assert rig.client.has_in_flight_requests("0")
    assert not rig.client.has_in_flight_requests("1")
    (response,) = rig.poll_until(lambda: not rig.client.has_in_flight_requests())
    assert received == [response]
    assert response.request is request
    assert response.body.producer_id == 1000
    assert response.version == 5
    assert response.body is not None
    assert not response.disconnected
    assert response.latency_ms == 2, "a millisecond each way"
    assert rig.cluster.requests_of(ApiKey.INIT_PRODUCER_ID)[0].client_id == "rig"


def test_responses_go_to_their_requests_in_the_order_sent(rig: ClientRig) -> None:
    first = rig.send(0, ASK)
    rig.poll()
    second = rig.send(0, BROKERS_ONLY)
    responses = rig.poll_until(lambda: not rig.client.has_in_flight_requests())
    assert [response.request for response in responses] == [first, second]
    assert first.correlation_id != second.correlation_id


def test_bytes_of_frames_are_counted_with_their_size_fields(rig: ClientRig) -> None:
    before = rig.client.metrics(rig.now_ms)
    rig.send(0, ASK)
    rig.poll_until(lambda: not rig.client.has_in_flight_requests())
    (answer,) = rig.selector.completed_receives
    sent = sum(map(len, ASK.encode(5, 0, "rig")))
    after = rig.client.metrics(rig.now_ms)
    for name, size in (("incoming-byte-total", 4 + len(answer.payload)), ("outgoing-byte-total", sent)):
        assert after[name] - before[name] == size, name


def test_callbacks_run_last_and_apart_from_each_other(rig: ClientRig, caplog: pytest.LogCaptureFixture) -> None:
    in_flight_then: list[int] = []

    def broken(_: ClientResponse) -> None:
        in_flight_then.append(rig.client.in_flight_request_count())
        raise RuntimeError("the caller's own fault")

    rig.send(0, ASK, callback=broken)
    rig.poll()
    received: list[ClientResponse] = []
    rig.send(0, ASK, callback=received.append)
    with caplog.at_level(logging.CRITICAL):
        rig.client.disconnect("0")
        rig.poll()
    assert in_flight_then == [0]
    assert len(received) == 1


def test_request_without_response_is_done_when_sent(rig: ClientRig) -> None:
    request = rig.send(0, ProduceRequest(0, 1_000, {}), expect_response=False)
    (response,) = rig.poll()
    assert response.request is request
    assert response.body is None
    assert not response.disconnected
    assert not rig.client.has_in_flight_requests()


def test_request_with_a_response_is_not_done_when_sent(rig: ClientRig) -> None:
    rig.send(0, ASK)
    assert rig.poll() == []
    assert rig.client.has_in_flight_requests()


def test_node_that_is_not_ready_is_refused(rig: ClientRig) -> None:
    with pytest.raises(IllegalStateError, match="Node 5"):
        rig.send(5, ASK)


def test_no_more_than_the_maximum_is_in_flight() -> None:
    rig = ClientRig(1, max_in_flight=2)
    rig.await_metadata()
    node = rig.connect(0)
    for expected in (True, False):
        rig.send(0, ASK)
        rig.poll()
        assert rig.client.ready(node, rig.now_ms) == expected


def test_no_node_is_ready_while_metadata_is_due(rig: ClientRig) -> None:
    rig.clock.advance(200)
    rig.metadata.request_update()
    assert rig.metadata.time_to_next_update(rig.now_ms) == 0
    assert not rig.client.is_ready(rig.node(0), rig.now_ms)
    rig.await_metadata()
    assert rig.client.is_ready(rig.node(0), rig.now_ms)


def test_correlation_ids_stay_out_of_the_range_kept_for_sasl(rig: ClientRig) -> None:
    rig.client._correlation_ids = iter([2**31 - 9, 2**31 - 8])  # type: ignore[assignment]
    ids = [rig.client.new_client_request("0", ASK, 0, True).correlation_id for _ in range(2)]
    assert ids == [2**31 - 9, 0]


# ---- versions ------------------------------------------------------------------------------------------------------


def test_highest_common_version_is_used() -> None:
    rig = ClientRig(1, ["t"])
    rig.cluster.versions = KAFKA_2_1
    rig.await_metadata()
    rig.connect(0)
    rig.send(0, ASK)
    (response,) = rig.poll_until(lambda: not rig.client.has_in_flight_requests())
    assert response.version == 1
    assert [exchange.version for exchange in rig.cluster.requests_of(ApiKey.METADATA)] == [7]
    assert rig.metadata.fetch().topics == {"t"}


def test_too_old_node_gets_no_request_and_is_named(rig: ClientRig) -> None:
    rig.cluster.versions = {**rig.cluster.versions, 2: (0, 0)}
    rig.network.cut(0)
    rig.poll_until(lambda: rig.client.connection_failed(rig.node(0)))
    rig.connect(0)
    rig.send(0, ListOffsetsRequest({}))
    (response,) = rig.poll()
    assert isinstance(response.version_mismatch, UnsupportedVersionError)
    assert "Node 0" in str(response.version_mismatch)
    assert "0 to 0" in str(response.version_mismatch)
    assert "1 to 10" in str(response.version_mismatch)
    assert not response.disconnected
    assert rig.client.ready(rig.node(0), rig.now_ms)


def test_unencodable_request_fails_and_keeps_the_connection(rig: ClientRig) -> None:
    rig.send(0, InitProducerIdRequest("x" * 40_000, producer_epoch=2**20))
    (response,) = rig.poll()
    assert response.version_mismatch is not None
    assert rig.client.ready(rig.node(0), rig.now_ms)


def test_old_node_gets_an_older_versions_request() -> None:
    rig = ClientRig(1)
    rig.cluster.versions = {**rig.cluster.versions, 18: (0, 2)}
    rig.connect(0)
    assert [exchange.version for exchange in rig.cluster.requests_of(ApiKey.API_VERSIONS)][-1] == 2


def test_node_that_closes_for_a_versions_request_it_does_not_know_is_reached() -> None:
    """Bug: the first question had version 4, on which Azure Event Hubs closes the connection."""

    def close_above_3(cluster: ScriptedCluster, exchange: Exchange, proceed: faults.Proceed) -> Answer:
        return Answer(None, close=True) if exchange.version > 3 else proceed()

    rig = ClientRig(1)
    rig.cluster.on(ApiKey.API_VERSIONS, close_above_3, times=None)
    rig.connect(0)
    assert rig.client.ready(rig.node(0), rig.now_ms)


def test_node_without_versions_is_disconnected_and_retried() -> None:
    rig = ClientRig(1, recovery_strategy="none")
    rig.cluster.on(ApiKey.API_VERSIONS, faults.fail_with(InvalidRequestError))
    rig.poll_until(lambda: rig.client.connection_failed(Node(-1, "broker-0", 9092)))
    assert InvalidRequestError.sentence in str(rig.metadata.connection_failure)
    rig.await_metadata()


def test_metadata_of_a_node_too_old_is_a_fatal_error() -> None:
    rig = ClientRig(1)
    rig.cluster.versions = {**rig.cluster.versions, 3: (0, 2)}
    with pytest.raises(UnsupportedVersionError, match="METADATA"):
        rig.poll_until(rig.metadata.maybe_raise_fatal_error)


# ---- wrong answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        faults.wrong_correlation_id(1), faults.wrong_correlation_id(-1), faults.truncate(3),
        faults.corrupt(lambda frame: b"\0\0\0\2ab"),
    ],
    ids=["next id", "last id", "cut short", "two bytes"],
)  # fmt: skip
def test_wrong_response_closes_the_connection(
    rig: ClientRig, fault: faults.Hook, caplog: pytest.LogCaptureFixture
) -> None:
    rig.cluster.on(ApiKey.INIT_PRODUCER_ID, fault)
    first = rig.send(0, ASK)
    rig.poll()
    second = rig.send(0, BROKERS_ONLY)
    with caplog.at_level(logging.CRITICAL):
        responses = rig.poll_until(lambda: rig.client.connection_failed(rig.node(0)))
    assert [response.request for response in responses] == [first, second]
    assert all(response.disconnected and response.body is None for response in responses)
    assert all(isinstance(response.protocol_error, ProtocolError) for response in responses)
    assert "0" not in rig.selector.connection_ids
    rig.connect(0)


def test_bytes_after_the_answer_keep_the_connection(rig: ClientRig) -> None:
    rig.cluster.on(
        ApiKey.INIT_PRODUCER_ID, faults.corrupt(lambda frame: frame[:3] + bytes([frame[3] + 2]) + frame[4:] + b"xx")
    )
    rig.send(0, ASK)
    (response,) = rig.poll_until(lambda: not rig.client.has_in_flight_requests())
    assert response.body is not None
    assert rig.client.ready(rig.node(0), rig.now_ms)


def test_server_that_is_not_kafka_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    rig = ClientRig(1, recovery_strategy="none")
    rig.cluster.on(ApiKey.API_VERSIONS, faults.truncate(3), times=None)
    with caplog.at_level(logging.INFO):
        began_ms = rig.now_ms
        rig.poll_until(lambda: rig.now_ms > began_ms + 50_000)
        attempts = len(rig.cluster.requests_of(ApiKey.API_VERSIONS))
        lines = [record.getMessage() for record in caplog.records]
        rig.poll_until(lambda: rig.now_ms > began_ms + 70_000)
    assert attempts > 20
    assert len(lines) == 1, lines
    assert lines[0].startswith(
        "No metadata yet: The server at broker-0:9092 does not answer as Kafka does: ApiVersions's "
    )
    assert lines[0].endswith(" Is it a Kafka port, and does security.protocol fit it?")
    later = [record.getMessage() for record in caplog.records][1:]
    assert [line.partition(" (")[2].partition(" more of this node")[1] for line in later] == [" more of this node"]
    text = rig.metadata.no_broker_text([("broker-0", 9092)], "within 60000 ms")
    assert text.startswith("The server at broker-0:9092 does not answer as Kafka does: ")
    assert text.endswith("No broker of bootstrap.servers=broker-0:9092 answered within 60000 ms.")


def test_wrong_correlation_id_error_names_node_and_both_ids(rig: ClientRig) -> None:
    rig.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.wrong_correlation_id(5))
    request = rig.send(0, ASK)
    (response,) = rig.poll_until(lambda: rig.client.connection_failed(rig.node(0)))
    text = str(response.protocol_error)
    assert isinstance(response.protocol_error, ProtocolError)
    assert "Node 0" in text
    assert str(request.correlation_id) in text
    assert str(request.correlation_id + 5) in text


def test_unrequested_response_closes_the_connection(rig: ClientRig, caplog: pytest.LogCaptureFixture) -> None:
    rig.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.corrupt(lambda frame: frame + frame))
    rig.send(0, ASK)
    with caplog.at_level(logging.CRITICAL):
        (response,) = rig.poll_until(lambda: rig.client.connection_failed(rig.node(0)))
    assert response.body is not None
    assert "no request was in flight" in str(rig.metadata.connection_failure)


EMPTY: dict[int, bool] = {}
"""Raises KeyError at any access."""


# ---- disconnections and timeouts -----------------------------------------------------------------------------------


def test_unexpected_exception_on_one_answer_costs_that_node_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = ClientRig(2, ["t"])
    rig.await_metadata()
    for node_id in (0, 1):
        rig.connect(node_id)
    real = network_client.client_throttle_ms
    monkeypatch.setattr(
        network_client, "client_throttle_ms", lambda key, body: real(key, body) if body.producer_id > 1000 else EMPTY[1]
    )
    bad, good = rig.send(0, ASK), rig.send(1, ASK)
    by_request = {each.request: each for each in rig.poll_until(lambda: not rig.client.has_in_flight_requests())}
    assert by_request[bad].disconnected
    assert "unexpected KeyError: 1" in str(by_request[bad].protocol_error)
    assert by_request[good].body.producer_id == 1001
    assert not rig.client.is_ready(rig.node(0), rig.now_ms)
    assert "unexpected KeyError" in caplog.text


def test_unexpected_exception_on_metadata_fails_and_retries_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = ClientRig(1, ["t"])
    real, answers = MetadataResponse.from_entity, []

    def fail_once(entity: Message) -> MetadataResponse:
        answers.append(entity)
        if len(answers) == 1:
            raise RuntimeError("a fault of the parser")
        return real(entity)

    monkeypatch.setattr(MetadataResponse, "from_entity", fail_once)
    rig.await_metadata()
    assert len(answers) == 2


def test_unexpected_exception_at_connecting_counts_as_failed_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = ClientRig(1)
    rig.await_metadata()
    monkeypatch.setattr(rig.selector, "connect", lambda *_: EMPTY[1])
    assert not rig.client.ready(rig.node(0), rig.now_ms)
    assert rig.client.connection_failed(rig.node(0))


def test_lost_connection_completes_its_requests_and_asks_for_metadata(rig: ClientRig) -> None:
    sent = []
    for _ in range(3):
        sent.append(rig.send(0, ASK))
        rig.poll()
    rig.network.cut(0)
    responses = [each for each in rig.poll_until(lambda: not rig.client.has_in_flight_requests()) if each.disconnected]
    assert [response.request for response in responses] == sent
    assert all(not response.timed_out and response.protocol_error is None for response in responses)
    assert rig.client.connection_failed(rig.node(0))
    assert rig.metadata.update_requested()
    assert rig.api_versions.get("0") is None


def test_answers_that_came_before_the_connection_was_lost_still_count(rig: ClientRig) -> None:
    rig.cluster.on(ApiKey.INIT_PRODUCER_ID, lambda cluster, exchange, proceed: Answer(proceed().values, close=True))
    rig.send(0, ASK)
    responses = rig.poll_until(lambda: rig.client.connection_failed(rig.node(0)))
    assert [response.body is not None for response in responses] == [True]


def test_timed_out_request_closes_the_connection(rig: ClientRig) -> None:
    rig.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.lose_request(), times=None)
    started_ms = rig.now_ms
    late = rig.send(0, ASK, timeout_ms=500)
    rig.poll()
    other = rig.send(0, ASK)
    responses = rig.client.poll(60_000, rig.now_ms)
    while not responses:
        responses = rig.client.poll(60_000, rig.now_ms)
    assert [response.request for response in responses] == [late, other]
    assert all(response.timed_out and response.disconnected for response in responses)
    assert 500 < rig.now_ms - started_ms <= 502, "the poll ends when the request does"
    assert rig.metadata.update_requested()
    assert "0" not in rig.selector.connection_ids


def test_request_without_timeout_has_that_of_the_client(rig: ClientRig) -> None:
    request = rig.client.new_client_request("0", ASK, 5, True)
    assert request.request_timeout_ms == REQUEST_TIMEOUT_MS
    assert rig.client.new_client_request("0", ASK, 5, True, 0).request_timeout_ms == 0


def test_connection_setup_times_out_and_its_limit_grows() -> None:
    rig = ClientRig(1, recovery_strategy="none")
    rig.network.hanging.add(0)
    node = Node(-1, "broker-0", 9092)
    waits = []
    for _ in range(2):
        rig.poll_until(lambda: rig.states.is_connecting("-1"))
        started_ms = rig.now_ms
        while rig.states.is_connecting("-1"):
            rig.client.poll(60_000, rig.now_ms)
        waits.append(rig.now_ms - started_ms)
        assert rig.client.connection_failed(node)
        assert "could not be connected" in str(rig.metadata.connection_failure)
    assert SETUP_TIMEOUT_MS * 0.8 <= waits[0] <= SETUP_TIMEOUT_MS * 1.2
    assert SETUP_TIMEOUT_MS * 1.6 <= waits[1] <= SETUP_TIMEOUT_MS * 2.4
    rig.network.hanging.clear()
    rig.await_metadata()


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (SetupStep.TLS, "Node -1 is connected, but the TLS handshake did not end within"),
        (SetupStep.SASL, "Node -1 is connected, but the SASL login did not end within"),
    ],
)
def test_connection_that_stalls_names_the_step(
    step: SetupStep, text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = ClientRig(1, recovery_strategy="none")
    rig.network.hanging.add(0)
    monkeypatch.setattr(rig.selector, "setup_step", lambda _: step)
    rig.poll_until(lambda: rig.client.connection_failed(Node(-1, "broker-0", 9092)), limit_ms=SETUP_TIMEOUT_MS * 2)
    assert text in str(rig.metadata.connection_failure)
    assert "socket.connection.setup.timeout.ms" in str(rig.metadata.connection_failure)
    assert "lost (authenticate)" in caplog.text


def test_silent_node_times_out_at_the_versions_request() -> None:
    rig = ClientRig(1, recovery_strategy="none")
    rig.cluster.on(ApiKey.API_VERSIONS, faults.lose_request())
    rig.poll_until(lambda: rig.client.connection_failed(Node(-1, "broker-0", 9092)), limit_ms=REQUEST_TIMEOUT_MS + 50)
    rig.await_metadata()


def test_reconnects_wait_out_the_backoff(rig: ClientRig) -> None:
    rig.network.stop(0)
    rig.poll_until(lambda: rig.client.connection_failed(rig.node(0)))
    attempts = []
    node = rig.node(0)
    for _ in range(4_000):
        if rig.states.connection_delay("0", rig.now_ms) == 0 and not rig.states.is_connecting("0"):
            attempts.append(rig.now_ms)
        rig.client.ready(node, rig.now_ms)
        rig.poll()
        rig.clock.advance(1)
    pauses = [later - earlier for earlier, later in pairwise(attempts)]
    assert len(attempts) < 15
    assert pauses[0] < 150
    assert pauses[-1] >= 800


def test_host_that_does_not_resolve_counts_as_a_failed_connection(caplog: pytest.LogCaptureFixture) -> None:
    def resolve(host: str, port: int) -> Sequence[Address]:
        raise BootstrapResolutionError(f"{host} has no address")

    rig = ClientRig(1, recovery_strategy="none", resolve=resolve)
    with caplog.at_level(logging.WARNING):
        rig.poll()
    assert rig.client.connection_failed(Node(-1, "broker-0", 9092))
    assert "broker-0 has no address" in caplog.text
    assert rig.metadata.connection_failure == "broker-0 has no address"
    assert rig.metadata.time_to_next_update(rig.now_ms) > 0


def test_next_address_is_tried_when_one_fails() -> None:
    def resolve(host: str, port: int) -> Sequence[Address]:
        return [Address(socket.AF_INET, (name, port)) for name in ("dead-end", host)]

    rig = ClientRig(1, recovery_strategy="none", resolve=resolve)
    rig.await_metadata()


def report_loss(rig: ClientRig, connection_id: str, state: ChannelState) -> None:
    """Let the selector's next poll report the end of a connection."""
    rig.selector.at(rig.now_ms, lambda: rig.selector.disconnected.update({connection_id: state}))


def test_late_loss_of_a_connection_that_we_closed_is_ignored(rig: ClientRig) -> None:
    rig.client.disconnect("0")
    left_ms = rig.client.poll_delay_ms(rig.node(0), rig.now_ms)
    report_loss(rig, "0", ChannelState(ChannelKind.READY, DisconnectError("late news")))
    assert rig.poll() == []
    assert rig.metadata.connection_failure is None
    assert rig.client.poll_delay_ms(rig.node(0), rig.now_ms) == left_ms


def test_moved_node_is_connected_at_its_new_address() -> None:
    """Bug: two brokers had exchanged their addresses. Over its old connections the client took each for the other, and
    both refused every record, although the metadata had the right leaders.
    """
    rig = ClientRig(2, ["t"])
    rig.await_metadata()
    stale, others = rig.node(0), rig.cluster.nodes
    others[0].port, others[1].port = others[1].port, others[0].port
    others[0].host, others[1].host = others[1].host, others[0].host
    rig.poll_until(lambda: rig.client.ready(stale, rig.now_ms))
    rig.send(0, ASK)
    rig.poll_until(lambda: not rig.client.has_in_flight_requests())
    rig.metadata.request_update(reset_equivalent_backoff=True)
    rig.await_metadata()
    rig.connect(0)
    rig.send(0, ASK)
    rig.poll_until(lambda: not rig.client.has_in_flight_requests())
    assert [asked.node_id for asked in rig.cluster.requests_of(ApiKey.INIT_PRODUCER_ID)] == [1, 0]


def test_disconnect_completes_requests_and_keeps_metadata(rig: ClientRig) -> None:
    request = rig.send(0, ASK)
    rig.client.disconnect("0")
    assert rig.client.connection_failed(rig.node(0))
    assert "0" not in rig.selector.connection_ids
    (response,) = rig.client.poll(60_000, rig.now_ms)
    assert response.request is request
    assert response.disconnected
    assert not response.timed_out
    assert not rig.metadata.update_requested()
    rig.client.disconnect("0")
    rig.client.disconnect("unknown")
    assert rig.poll() == []


def test_disconnect_of_a_lost_node_keeps_its_backoff(rig: ClientRig) -> None:
    rig.client.disconnect("0")
    assert not rig.states.can_connect("0", rig.now_ms)
    rig.clock.advance(2 * RECONNECT_BACKOFF_MS)
    assert rig.states.can_connect("0", rig.now_ms)
    rig.client.disconnect("0")
    assert rig.states.can_connect("0", rig.now_ms)


def test_disconnect_returns_all_in_flight_requests_in_order(rig: ClientRig) -> None:
    received: list[ClientResponse] = []
    sent = []
    for timeout_ms in (30_000, 1_000):
        sent.append(rig.send(0, ASK, timeout_ms=timeout_ms, callback=received.append))
        rig.network.held.add(0)
        rig.poll()
    assert rig.client.in_flight_request_count("0") == 2
    rig.network.cut(0)
    rig.poll_until(lambda: received)
    assert [response.request for response in received] == sent
    assert all(response.disconnected and not response.timed_out for response in received)
    assert rig.client.in_flight_request_count() == 0


def test_disconnect_during_the_versions_request_returns_no_response() -> None:
    rig = ClientRig(1)
    rig.await_metadata()
    node = rig.node(0)
    rig.network.held.add(0)
    rig.client.ready(node, rig.now_ms)
    rig.poll_until(lambda: rig.client.has_in_flight_requests("0"))
    rig.client.disconnect("0")
    assert rig.poll() == []
    assert rig.client.in_flight_request_count() == 0
    rig.network.held.clear()
    rig.connect(0)


def test_close_of_a_connecting_node_keeps_other_nodes() -> None:
    rig = ClientRig(2)
    rig.await_metadata()
    rig.network.hanging.add(0)
    rig.client.ready(rig.node(0), rig.now_ms)
    rig.client.ready(rig.node(1), rig.now_ms)
    rig.client.disconnect("0")
    assert "0" not in rig.selector.connection_ids
    rig.poll_until(lambda: rig.client.is_ready(rig.node(1), rig.now_ms))
    assert rig.metadata.connection_failure is None, "the client closed it, so it does not count as lost"
    rig.network.hanging.clear()
    rig.connect(0)


def test_metadata_request_lost_with_its_connection_fails_the_update(rig: ClientRig) -> None:
    rig.cluster.on(ApiKey.METADATA, faults.close_before())
    rig.clock.advance(200)
    rig.metadata.request_update()
    assert rig.poll_until(lambda: rig.client.connection_failed(rig.node(0))) == []
    assert rig.metadata.time_to_next_update(rig.now_ms) > 0
    rig.await_metadata()


def test_metadata_request_of_the_caller_is_separate(rig: ClientRig) -> None:
    rig.network.held.add(0)
    request = rig.send(0, BROKERS_ONLY)
    rig.poll()
    failed_updates = []
    rig.updater.handle_failed_request = lambda *arguments: failed_updates.append(arguments)
    rig.client.disconnect("0")
    (response,) = rig.poll()
    assert response.request is request
    assert response.disconnected
    assert failed_updates == []


def test_metadata_request_lost_by_disconnect_is_sent_again(rig: ClientRig) -> None:
    rig.clock.advance(200)
    rig.metadata.request_update()
    rig.poll()
    assert rig.client.has_in_flight_requests("0")
    rig.client.disconnect("0")
    rig.poll_until(lambda: not rig.metadata.update_requested(), limit_ms=5_000)


# ---- refusals ------------------------------------------------------------------------------------------------------


def refuse(rig: ClientRig, connection_id: str) -> SaslAuthenticationError:
    """Let the selector report that SASL failed."""
    error = SaslAuthenticationError("wrong password")
    rig.selector.close(connection_id)
    report_loss(rig, connection_id, ChannelState(ChannelKind.AUTHENTICATION_FAILED, error))
    return error


def test_refused_login_is_reported_at_once_for_its_node(rig: ClientRig, caplog: pytest.LogCaptureFixture) -> None:
    request = rig.send(0, ASK)
    error = refuse(rig, "0")
    with caplog.at_level(logging.CRITICAL):
        (response,) = rig.poll()
    assert response.request is request
    assert response.authentication_error is error
    assert rig.client.authentication_error(rig.node(0)) is error
    assert rig.client.connection_failed(rig.node(0))
    assert rig.client.authentication_error(Node(5, "x", 1)) is None
    with pytest.raises(SaslAuthenticationError):
        rig.metadata.maybe_raise_fatal_error()


def test_refused_node_is_not_connected_again_at_once(rig: ClientRig, caplog: pytest.LogCaptureFixture) -> None:
    refuse(rig, "0")
    with caplog.at_level(logging.CRITICAL):
        rig.poll()
    assert not rig.client.ready(rig.node(0), rig.now_ms)
    assert rig.selector.connection_ids == []
    assert rig.states.connection_delay("0", rig.now_ms) >= RECONNECT_BACKOFF_MS * 1.5


# ---- throttling ----------------------------------------------------------------------------------------------------


def test_throttled_node_gets_nothing_until_the_throttle_is_over(rig: ClientRig) -> None:
    rig.cluster.throttle_ms = 700
    rig.send(0, ASK)
    rig.poll_until(lambda: not rig.client.has_in_flight_requests())
    node = rig.node(0)
    assert not rig.client.ready(node, rig.now_ms)
    assert rig.client.poll_delay_ms(node, rig.now_ms) == 700
    assert rig.states.connection_delay("0", rig.now_ms) == FOREVER_MS
    rig.clock.advance(699)
    assert not rig.client.ready(node, rig.now_ms)
    rig.clock.advance(1)
    assert rig.client.ready(node, rig.now_ms)


def test_client_does_not_repeat_a_throttle_of_the_broker() -> None:
    rig = ClientRig(1)
    rig.cluster.versions = {**rig.cluster.versions, 22: (0, 0)}
    rig.await_metadata()
    node = rig.connect(0)
    rig.cluster.throttle_ms = 700
    rig.send(0, ASK)
    rig.poll_until(lambda: not rig.client.has_in_flight_requests())
    assert rig.client.ready(node, rig.now_ms)


def test_throttle_does_not_time_out_in_flight_requests(rig: ClientRig) -> None:
    rig.cluster.on(ApiKey.METADATA, faults.change(lambda values: {**values, "throttle_time": 1_000}))
    rig.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.delay(900))
    rig.send(0, BROKERS_ONLY)
    rig.poll()
    rig.send(0, ASK, timeout_ms=500)
    responses = rig.poll_until(lambda: not rig.client.has_in_flight_requests())
    assert [response.timed_out for response in responses] == [False, False]


# ---- the least loaded node -----------------------------------------------------------------------------------------


def test_connected_node_with_nothing_in_flight_is_chosen() -> None:
    rig = ClientRig(3)
    rig.await_metadata()
    for node_id in range(3):
        rig.connect(node_id)
    for node_id in (0, 2):
        rig.send(node_id, ASK)
        rig.network.held.add(node_id)
    assert {rig.client.least_loaded_node(rig.now_ms) for _ in range(50)} == {rig.node(1)}


def test_least_loaded_is_the_node_with_fewest_in_flight() -> None:
    rig = ClientRig(3)
    rig.await_metadata()
    for node_id, count in ((0, 3), (1, 2), (2, 4)):
        rig.connect(node_id)
        rig.network.held.add(node_id)
        for _ in range(count):
            rig.send(node_id, ASK)
            rig.poll()
    assert {rig.client.least_loaded_node(rig.now_ms) for _ in range(50)} == {rig.node(1)}


def test_least_loaded_prefers_ready_then_connecting_then_connectable_nodes() -> None:
    rig = ClientRig(3)
    rig.await_metadata()
    for node_id in list(rig.selector.connection_ids):
        rig.client.disconnect(node_id)
    rig.network.hanging.add(1)
    rig.client.ready(rig.node(1), rig.now_ms)
    assert {rig.client.least_loaded_node(rig.now_ms) for _ in range(50)} == {rig.node(1)}
    rig.connect(2)
    rig.send(2, ASK)
    rig.network.held.add(2)
    rig.poll()
    assert {rig.client.least_loaded_node(rig.now_ms) for _ in range(50)} == {rig.node(2)}


def test_least_loaded_prefers_the_oldest_attempt() -> None:
    rig = ClientRig(3)
    rig.await_metadata()
    for node_id in (1, 2, 0):
        rig.states.connecting(str(node_id), "broker", 1, rig.now_ms)
        rig.states.disconnected(str(node_id), rig.now_ms)
        rig.clock.advance(10)
    rig.clock.advance(5_000)
    for connection_id in list(rig.selector.connection_ids):
        rig.selector.close(connection_id)
    assert {rig.client.least_loaded_node(rig.now_ms) for _ in range(50)} == {rig.node(1)}


def test_least_loaded_skips_nodes_in_backoff() -> None:
    rig = ClientRig(2)
    rig.await_metadata()
    for connection_id in list(rig.selector.connection_ids):
        rig.client.disconnect(connection_id)
    for node_id in (0, 1):
        assert rig.client.least_loaded_node(rig.now_ms) is not None
        rig.states.connecting(str(node_id), "broker", 1, rig.now_ms)
        rig.states.disconnected(str(node_id), rig.now_ms)
    assert rig.client.least_loaded_node(rig.now_ms) is None


def test_clients_spread_over_nodes_by_their_seed() -> None:
    def first_choice(seed: int) -> Node | None:
        rig = ClientRig(4, seed=seed)
        return rig.client.least_loaded_node(rig.now_ms)

    assert len({first_choice(seed) for seed in range(40)}) == 4
    assert first_choice(7) == first_choice(7)


def test_no_node_is_chosen_if_there_is_none() -> None:
    assert ClientRig(1, addresses=[]).client.least_loaded_node(0) is None


# ---- life ----------------------------------------------------------------------------------------------------------


def test_wakeup_ends_a_poll(rig: ClientRig) -> None:
    rig.client.wakeup()
    before_ms = rig.now_ms
    rig.client.poll(60_000, rig.now_ms)
    assert rig.now_ms == before_ms


def test_poll_waits_at_most_its_timeout(rig: ClientRig) -> None:
    before_ms = rig.now_ms
    rig.client.poll(1_234, rig.now_ms)
    assert rig.now_ms - before_ms == 1_234


def test_poll_and_send_after_close_raise(rig: ClientRig) -> None:
    request = rig.client.new_client_request("0", ASK, rig.now_ms, True)
    rig.client.close()
    with pytest.raises(DisconnectError):
        rig.poll()
    with pytest.raises(DisconnectError):
        rig.client.send(request, rig.now_ms)
    rig.client.close()
    assert rig.metadata.is_closed
    assert rig.selector.connection_ids == []


@pytest.mark.parametrize("seed", range(12))
def test_every_request_ends_exactly_once_on_any_network(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(seed)
    rig = ClientRig(3, seed=seed)
    rig.network.latency_ms = lambda: rng.randrange(1, 40)
    hooks = [
        faults.lose_request(), faults.lose_response(), faults.close_before(), faults.close_after(),
        faults.wrong_correlation_id(), faults.truncate(2), faults.delay(2_000),
    ]  # fmt: skip
    sent: list[int] = []
    received: list[int] = []

    def receive(response: ClientResponse) -> None:
        received.append(response.request.correlation_id)

    with caplog.at_level(logging.CRITICAL):
        for _ in range(400):
            if rng.random() < 0.1:
                rig.cluster.on(ApiKey.INIT_PRODUCER_ID, rng.choice(hooks))
            if rng.random() < 0.03:
                rig.network.cut(rng.randrange(3))
            node = rig.node(rng.randrange(3))
            if rig.client.ready(node, rig.now_ms):
                sent.append(rig.send(node.id, ASK, timeout_ms=1_000, callback=receive).correlation_id)
            rig.poll(rng.randrange(30))
        rig.poll_until(lambda: not rig.client.has_in_flight_requests())
        rig.poll()
    assert len(sent) > 60
    assert sorted(received) == sent


# ---- which responses throttle ---------------------------------------------------------------------------------------


def throttled(version: int, throttle_ms: int = 250) -> Any:
    return SimpleNamespace(__version__=version, throttle_time=timedelta(milliseconds=throttle_ms))


@pytest.mark.parametrize(
    ("api_key", "first_version"),
    [
        (ApiKey.PRODUCE, 6), (ApiKey.FETCH, 8), (ApiKey.LIST_OFFSETS, 3), (ApiKey.METADATA, 6),
        (ApiKey.OFFSET_FETCH, 4), (ApiKey.FIND_COORDINATOR, 2), (ApiKey.API_VERSIONS, 2), (ApiKey.INIT_PRODUCER_ID, 1),
        (ApiKey.ADD_PARTITIONS_TO_TXN, 1), (ApiKey.ADD_OFFSETS_TO_TXN, 1), (ApiKey.END_TXN, 1),
        (ApiKey.TXN_OFFSET_COMMIT, 1), (ApiKey.CREATE_TOPICS, 3), (ApiKey.DESCRIBE_CONFIGS, 2),
    ],
)  # fmt: skip
def test_client_waits_only_from_the_throttling_version_on(api_key: ApiKey, first_version: int) -> None:
    assert client_throttle_ms(api_key, throttled(first_version - 1)) == 0
    assert client_throttle_ms(api_key, throttled(first_version)) == 250


def test_other_responses_do_not_throttle() -> None:
    assert client_throttle_ms(ApiKey.SASL_HANDSHAKE, SimpleNamespace(__version__=1)) == 0


def test_negative_throttle_has_no_effect() -> None:
    assert client_throttle_ms(ApiKey.PRODUCE, throttled(9, -5)) == 0


# ---- which lost connections are logged -------------------------------------------------------------------------------

log = logging.getLogger("losses")


def shown(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def losses(caplog: pytest.LogCaptureFixture) -> LossLog:
    caplog.set_level(logging.DEBUG)
    return LossLog(log)


def test_same_cause_is_logged_again_after_a_minute(losses: LossLog, caplog: pytest.LogCaptureFixture) -> None:
    for now_ms in range(0, PAUSE_MS + 1, PAUSE_MS // 10):
        losses.log(logging.ERROR, "1", f"answer {now_ms} is not the response", now_ms)
    assert shown(caplog) == [
        "answer 0 is not the response",
        "answer 60000 is not the response (9 more of this node since the last such line)",
    ]
    assert len(caplog.records) == 11  # the lines in between are logged at DEBUG


def test_other_cause_and_other_node_are_logged_at_once(losses: LossLog, caplog: pytest.LogCaptureFixture) -> None:
    for node_id, text in (("1", "a"), ("1", "b"), ("2", "a"), ("1", "a")):
        losses.log(logging.WARNING, node_id, text, 0)
    assert shown(caplog) == ["a", "b", "a"]


def test_log_lines_of_ever_new_causes_are_limited(losses: LossLog, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(500):
        losses.log(logging.ERROR, "1", "x" * number, 0)
    assert len(shown(caplog)) == 8


def test_lines_below_a_warning_are_not_limited(losses: LossLog, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        losses.log(logging.INFO, "1", "closed", 0)
    assert [record.levelno for record in caplog.records] == [logging.INFO] * 3
