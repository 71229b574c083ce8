"""Requests with futures over the network client."""

from __future__ import annotations

import logging

import pytest
from kio.schema.errors import ErrorCode
from support.client_rig import REQUEST_TIMEOUT_MS, ClientRig
from support.scripted_broker import faults

from spark_kafka_sink.admin.request_client import MAX_POLL_MS, RequestClient, RequestFuture, Timer
from spark_kafka_sink.client.seams import ClientResponse
from spark_kafka_sink.common.cluster import Node
from spark_kafka_sink.common.errors import (
    DisconnectError,
    IllegalStateError,
    KafkaError,
    KafkaTimeoutError,
    SaslAuthenticationError,
    TopicAuthorizationError,
    UnsupportedVersionError,
)
from spark_kafka_sink.network.channel import ChannelKind, ChannelState
from spark_kafka_sink.protocol.fetch import ListOffsetsRequest
from spark_kafka_sink.protocol.transactions import InitProducerIdRequest
from spark_kafka_sink.protocol.versions import ApiKey


def test_completed_future_has_its_value() -> None:
    future: RequestFuture[int] = RequestFuture()
    assert future.should_block()
    assert not future.is_done()
    assert not future.succeeded()
    future.complete(3)
    assert future.is_done()
    assert future.succeeded()
    assert not future.failed()
    assert not future.should_block()
    assert future.value() == 3


def test_failed_future_has_its_error() -> None:
    future: RequestFuture[int] = RequestFuture()
    future.fail(DisconnectError())
    assert future.failed()
    assert not future.succeeded()
    with pytest.raises(DisconnectError):
        future.value()


@pytest.mark.parametrize("no_error", [None, ValueError("not ours"), KafkaError])
def test_failure_without_a_kafka_error_is_refused(no_error: object) -> None:
    future: RequestFuture[int] = RequestFuture()
    with pytest.raises(TypeError, match="KafkaError"):
        future.fail(no_error)  # type: ignore[arg-type]
    assert not future.is_done()


def test_none_is_a_value() -> None:
    future: RequestFuture[None] = RequestFuture()
    future.complete(None)
    assert future.value() is None
    assert future.succeeded()


def test_value_or_error_before_completion_raises() -> None:
    future: RequestFuture[int] = RequestFuture()
    with pytest.raises(IllegalStateError):
        future.value()
    with pytest.raises(IllegalStateError):
        _ = future.error
    future.complete(1)
    with pytest.raises(IllegalStateError):
        _ = future.error


@pytest.mark.parametrize("first", ["complete", "fail"])
@pytest.mark.parametrize("second", ["complete", "fail"])
def test_future_ends_only_once(first: str, second: str) -> None:
    future: RequestFuture[int] = RequestFuture()
    ends = {"complete": lambda: future.complete(1), "fail": lambda: future.fail(DisconnectError())}
    ends[first]()
    with pytest.raises(IllegalStateError, match="twice"):
        ends[second]()
    assert future.succeeded() == (first == "complete")


ASK = InitProducerIdRequest()


class Bench:
    """A client whose metadata has arrived."""

    def __init__(self, node_count: int = 1) -> None:
        self.rig = ClientRig(node_count, ["t"])
        self.rig.await_metadata()
        self.rig.client.disconnect("-1")
        self.client: RequestClient = self.rig.consumer()

    def timer(self, timeout_ms: int = 60_000) -> Timer:
        return Timer(self.rig.clock, timeout_ms)

    def finish(self, future: RequestFuture[ClientResponse], timeout_ms: int = 60_000) -> None:
        assert self.client.poll_until(future, self.timer(timeout_ms))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_request_to_a_ready_node_completes_its_future(bench: Bench) -> None:
    node = bench.rig.node(0)
    future = bench.client.send(node, ASK)
    assert not future.is_done()
    bench.finish(future)
    assert future.value().body.producer_id == 1000
    assert not bench.rig.client.has_in_flight_requests()


def test_requests_to_one_node_are_sent_in_order(bench: Bench) -> None:
    futures = [bench.client.send(bench.rig.node(0), ASK) for _ in range(12)]
    bench.finish(futures[-1])
    assert [future.value().body.producer_id for future in futures] == list(range(1000, 1012))


def test_node_that_is_not_ready_delays_no_other_node() -> None:
    bench = Bench(2)
    bench.rig.network.hanging.add(0)
    waiting = bench.client.send(bench.rig.node(0), ASK)
    bench.finish(bench.client.send(bench.rig.node(1), ASK), timeout_ms=100)
    assert not waiting.is_done()


def test_nothing_is_sent_before_a_poll(bench: Bench) -> None:
    bench.rig.connect(0)
    future = bench.client.send(bench.rig.node(0), ASK)
    assert not bench.rig.client.has_in_flight_requests()
    bench.client.poll(bench.timer(0))
    assert bench.rig.client.has_in_flight_requests()
    assert not future.is_done()


def test_request_goes_in_the_poll_that_makes_its_node_ready(bench: Bench) -> None:
    bench.client.send(bench.rig.node(0), ASK)
    while not bench.rig.states.is_ready("0", bench.rig.now_ms):
        assert not bench.rig.client.has_in_flight_requests("0") or bench.rig.states.is_preparing("0")
        bench.client.poll(bench.timer(1_000))
    assert bench.rig.client.in_flight_request_count("0") == 1


def test_node_without_unsent_requests_is_forgotten(bench: Bench) -> None:
    bench.finish(bench.client.send(bench.rig.node(0), ASK))
    assert bench.client._unsent._queues == {}


# ---- how a request can fail ----------------------------------------------------------------------------------------


def test_lost_connection_fails_the_sent_request(bench: Bench) -> None:
    bench.rig.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.close_before())
    future = bench.client.send(bench.rig.node(0), ASK)
    bench.finish(future)
    assert isinstance(future.error, DisconnectError)
    assert future.error.retriable


def test_failed_connection_fails_unsent_requests(bench: Bench) -> None:
    """Bug: the error did not say why the connection failed."""
    bench.rig.network.refusing.add(0)
    node = bench.rig.node(0)
    future = bench.client.send(node, ASK)
    bench.finish(future, timeout_ms=1_000)
    assert isinstance(future.error, DisconnectError)
    assert "broker-0" in str(future.error)
    assert str(future.error).endswith("cannot be connected to: Connection refused.")


def test_answer_to_another_request_fails_it_with_the_reason(bench: Bench) -> None:
    bench.rig.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.wrong_correlation_id())
    future = bench.client.send(bench.rig.node(0), ASK)
    bench.finish(future)
    assert isinstance(future.error, DisconnectError)
    assert "correlation id" in str(future.error)


def test_request_not_answered_in_time_fails_with_its_limit(bench: Bench) -> None:
    bench.rig.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.lose_request())
    future = bench.client.send(bench.rig.node(0), ASK, request_timeout_ms=700)
    bench.finish(future)
    assert isinstance(future.error, KafkaTimeoutError)
    assert "700 ms" in str(future.error)


def test_request_not_sent_in_time_fails_with_its_limit(bench: Bench) -> None:
    bench.rig.connect(0)
    bench.rig.network.stalled.add(0)
    first = bench.client.send(bench.rig.node(0), ASK)
    second = bench.client.send(bench.rig.node(0), ASK, request_timeout_ms=700)
    started_ms = bench.rig.now_ms
    while not second.is_done():
        bench.client.poll(bench.timer(50))
    assert 700 < bench.rig.now_ms - started_ms <= 800
    assert isinstance(second.error, KafkaTimeoutError)
    assert "700 ms" in str(second.error)
    assert not first.is_done()


def refuse(rig: ClientRig, connection_id: str) -> SaslAuthenticationError:
    """Let the selector's next poll report that SASL failed."""
    error = SaslAuthenticationError("wrong password")
    state = ChannelState(ChannelKind.AUTHENTICATION_FAILED, error)
    rig.selector.close(connection_id)
    rig.selector.at(rig.now_ms, lambda: rig.selector.disconnected.update({connection_id: state}))
    return error


def test_refused_login_fails_sent_and_unsent_requests(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    rig = bench.rig
    node = rig.connect(0)
    sent = bench.client.send(node, ASK)
    bench.client.poll(bench.timer(0))
    rig.network.stalled.add(0)
    unsent = bench.client.send(node, ASK)
    error = refuse(rig, "0")
    with caplog.at_level(logging.CRITICAL), pytest.raises(SaslAuthenticationError):
        bench.client.poll(bench.timer(10))
    assert sent.error is error
    assert unsent.error is error


def test_request_to_a_node_too_old_fails_with_the_versions(bench: Bench) -> None:
    bench.rig.cluster.versions = {**bench.rig.cluster.versions, 2: (0, 0)}
    future = bench.client.send(bench.rig.node(0), ListOffsetsRequest({}))
    bench.finish(future)
    assert isinstance(future.error, UnsupportedVersionError)


def test_next_poll_after_disconnect_async_fails_pending_requests() -> None:
    bench = Bench(2)
    node, other = bench.rig.connect(0), bench.rig.connect(1)
    bench.rig.network.held |= {0, 1}
    sent = bench.client.send(node, ASK)
    kept = bench.client.send(other, ASK)
    bench.client.poll(bench.timer(0))
    unsent = bench.client.send(node, ASK)
    bench.client.disconnect_async(node)
    assert not sent.is_done()
    bench.client.poll(bench.timer(0))
    bench.client.poll(bench.timer(0))
    assert isinstance(sent.error, DisconnectError)
    assert isinstance(unsent.error, DisconnectError)
    assert not kept.is_done()
    assert bench.rig.client.connection_failed(node)


# ---- polling -------------------------------------------------------------------------------------------------------


def waited(bench: Bench, timeout_ms: int, condition: RequestFuture[ClientResponse] | None = None) -> int:
    before_ms = bench.rig.now_ms
    bench.client.poll(bench.timer(timeout_ms), condition)
    return bench.rig.now_ms - before_ms


def test_idle_poll_waits_at_most_the_retry_backoff(bench: Bench) -> None:
    assert waited(bench, 60_000) == 100


def test_poll_with_requests_in_flight_waits_to_its_maximum(bench: Bench) -> None:
    bench.rig.connect(0)
    bench.rig.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.lose_request())
    future = bench.client.send(bench.rig.node(0), ASK)
    bench.client.poll(bench.timer(60_000))
    assert waited(bench, 60_000, future) == MAX_POLL_MS
    assert waited(bench, 30) == 30


def test_reconnect_backoff_of_a_node_with_unsent_requests_bounds_poll(bench: Bench) -> None:
    bench.rig.connect(0)
    bench.rig.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.lose_request())
    bench.client.send(bench.rig.node(0), ASK)  # in flight: otherwise the retry backoff would limit the poll
    bench.client.poll(bench.timer(0))
    down = Node(7, "broker-7", 9092)
    bench.rig.states.connecting("7", down.host, down.port, bench.rig.now_ms)
    bench.rig.states.disconnected("7", bench.rig.now_ms)
    left_ms = bench.rig.client.poll_delay_ms(down, bench.rig.now_ms)
    assert 0 < left_ms < 100
    bench.rig.client.connection_failed = lambda node: False  # it must stay queued
    bench.client.send(down, ASK)
    bench.client.poll(bench.timer(0))  # consumes the wake-up of the send
    assert waited(bench, 60_000) == left_ms


def test_all_requests_to_a_ready_node_go_in_one_turn(bench: Bench) -> None:
    bench.rig.connect(0)
    bench.rig.selector.polls = 0
    sent: list[object] = []
    real_send, real_ready = bench.rig.client.send, bench.rig.client.ready
    bench.rig.client.send = lambda request, now_ms: sent.append(request)
    for _ in range(3):
        bench.client.send(bench.rig.node(0), ASK)
    bench.rig.client.ready = lambda node, now_ms: bench.rig.selector.polls == 0 and real_ready(node, now_ms)
    bench.client.poll(bench.timer(0))
    assert len(sent) == 3
    bench.rig.client.send = real_send


def test_requests_to_a_node_that_is_not_ready_stay_queued(bench: Bench) -> None:
    node = bench.rig.connect(0)
    bench.rig.client.ready = lambda node, now_ms: False
    future = bench.client.send(node, ASK)
    bench.client.poll(bench.timer(0))
    assert not future.is_done()
    assert not bench.rig.client.has_in_flight_requests()
    del bench.rig.client.ready
    bench.finish(future)


def test_late_request_expires_behind_one_that_is_not_late(bench: Bench) -> None:
    bench.rig.network.hanging.add(0)
    node = bench.rig.node(0)
    patient = bench.client.send(node, ASK, request_timeout_ms=5_000)
    late = bench.client.send(node, ASK, request_timeout_ms=50)
    bench.client.poll(bench.timer(60))
    bench.client.poll(bench.timer(60))
    assert isinstance(late.error, KafkaTimeoutError)
    assert not patient.is_done()


def test_send_within_the_backoff_after_a_refusal_fails_with_it(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    node = bench.rig.connect(0)
    error = refuse(bench.rig, "0")
    with caplog.at_level(logging.CRITICAL), pytest.raises(SaslAuthenticationError):
        bench.client.poll(bench.timer(0))
    again = bench.client.send(node, ASK)
    bench.client.poll(bench.timer(0))
    assert again.error is error


def test_poll_does_not_wait_for_a_completed_future(bench: Bench) -> None:
    done: RequestFuture[ClientResponse] = RequestFuture()
    done.fail(DisconnectError())
    assert waited(bench, 60_000, done) == 0


def test_poll_until_a_future_ends_at_the_timer(bench: Bench) -> None:
    bench.rig.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.lose_request())
    before_ms = bench.rig.now_ms
    future = bench.client.send(bench.rig.node(0), ASK)
    assert not bench.client.poll_until(future, bench.timer(2_000))
    assert bench.rig.now_ms - before_ms == 2_000


def test_poll_raises_the_error_of_metadata(bench: Bench) -> None:
    values = {"topics": [{"name": "t", "error_code": ErrorCode.topic_authorization_failed}]}
    bench.rig.cluster.on(ApiKey.METADATA, faults.change(lambda answer: answer | values))
    with pytest.raises(TopicAuthorizationError, match="t"):
        bench.client.await_metadata_update(bench.timer())


# ---- metadata and nodes --------------------------------------------------------------------------------------------


def test_metadata_update_can_be_waited_for(bench: Bench) -> None:
    version = bench.rig.metadata.update_version
    assert bench.client.await_metadata_update(bench.timer())
    assert bench.rig.metadata.update_version == version + 1
    bench.rig.cluster.on(ApiKey.METADATA, faults.lose_request())
    assert not bench.client.await_metadata_update(bench.timer(1_000))


def test_nodes_are_those_of_the_network_client(bench: Bench) -> None:
    node = bench.rig.node(0)
    assert bench.client.least_loaded_node() == node
    bench.rig.connect(0)
    bench.client.close()
    with pytest.raises(DisconnectError):
        bench.rig.poll()


def test_default_timeout_is_that_of_the_client(bench: Bench) -> None:
    bench.rig.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.lose_request())
    future = bench.client.send(bench.rig.node(0), ASK)
    bench.finish(future)
    assert f"{REQUEST_TIMEOUT_MS} ms" in str(future.error)
