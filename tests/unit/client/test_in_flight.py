from __future__ import annotations

import pytest

from spark_kafka_sink.client.backoff import FOREVER_MS
from spark_kafka_sink.client.in_flight import InFlightRequest, InFlightRequests
from spark_kafka_sink.client.seams import ClientRequest
from spark_kafka_sink.common.errors import IllegalStateError
from spark_kafka_sink.network.channel import NetworkSend
from spark_kafka_sink.protocol.metadata import MetadataRequest


def in_flight(node_id: str = "1", sent_ms: int = 0, timeout_ms: int = 1_000) -> InFlightRequest:
    request = ClientRequest(node_id, MetadataRequest(()), 0, sent_ms, True, timeout_ms)
    send = NetworkSend(node_id, [memoryview(b"abc")])
    return InFlightRequest(request, 12, None, send, sent_ms, is_internal=False)


def sent(request: InFlightRequest) -> InFlightRequest:
    request.send.advance(request.send.remaining)
    return request


def test_requests_complete_in_order_and_separately_for_each_node() -> None:
    requests = InFlightRequests(5)
    first, second, other = sent(in_flight()), sent(in_flight()), sent(in_flight("2"))
    for each in (first, second, other):
        requests.add(each)
    assert requests.count() == 3
    assert requests.count("1") == 2
    assert requests.oldest("1") is first
    assert requests.newest("1") is second
    assert requests.complete_oldest("1") is first
    assert requests.complete_newest("1") is second
    assert requests.count("1") == 0
    assert requests.oldest("1") is requests.newest("1") is requests.oldest("3") is None
    assert requests.complete_oldest("2") is other


def test_no_send_before_the_newest_send_is_complete() -> None:
    requests = InFlightRequests(5)
    assert requests.can_send_more("1")
    request = in_flight()
    requests.add(request)
    assert not requests.can_send_more("1")
    sent(request)
    assert requests.can_send_more("1")


def test_no_send_at_max_in_flight() -> None:
    requests = InFlightRequests(2)
    requests.add(sent(in_flight()))
    assert requests.can_send_more("1")
    requests.add(sent(in_flight()))
    assert not requests.can_send_more("1")
    requests.complete_oldest("1")
    assert requests.can_send_more("1")


def test_clear_returns_one_nodes_requests_in_the_order_sent() -> None:
    requests = InFlightRequests(5)
    mine = [in_flight() for _ in range(3)]
    for each in (*mine, in_flight("2")):
        requests.add(each)
    assert requests.clear("1") == mine
    assert requests.clear("1") == []
    assert requests.count() == 1


def test_request_times_out_after_its_own_limit() -> None:
    requests = InFlightRequests(5)
    requests.add(in_flight("1", sent_ms=100, timeout_ms=5_000))
    requests.add(in_flight("2", sent_ms=100, timeout_ms=200))
    assert requests.next_timeout_ms(100) == 201
    assert requests.nodes_with_timed_out_requests(300) == []
    assert requests.nodes_with_timed_out_requests(301) == ["2"]
    assert requests.next_timeout_ms(400) == 0
    assert requests.nodes_with_timed_out_requests(5_101) == ["1", "2"]


def test_any_request_of_a_node_may_time_out_first() -> None:
    requests = InFlightRequests(5)
    requests.add(in_flight("1", timeout_ms=5_000))
    requests.add(in_flight("1", timeout_ms=100))
    assert requests.nodes_with_timed_out_requests(101) == ["1"]


def test_throttle_does_not_count_against_the_timeout() -> None:
    requests = InFlightRequests(5)
    requests.add(in_flight("1", timeout_ms=200))
    requests.add(in_flight("2", timeout_ms=200))
    requests.add_throttle("1", 300)
    requests.add_throttle("1", 100)
    requests.add_throttle("3", 100)
    assert requests.nodes_with_timed_out_requests(600) == ["2"]
    assert requests.nodes_with_timed_out_requests(601) == ["1", "2"]


def test_empty_in_flight_has_no_timeout() -> None:
    requests = InFlightRequests(5)
    assert requests.next_timeout_ms(0) == FOREVER_MS
    with pytest.raises(IllegalStateError, match="node 9"):
        requests.complete_oldest("9")
