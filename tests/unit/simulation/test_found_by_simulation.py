"""Faults of the producer that the simulation found, each as the shortest script that shows it."""

from __future__ import annotations

from kio.schema.errors import ErrorCode
from support.producer_harness import ProducerHarness
from support.scripted_broker import faults
from support.simulation.hooks import answer_with

from spark_kafka_sink.common.errors import TopicAuthorizationError, UnsupportedCompressionTypeError
from spark_kafka_sink.protocol.versions import ApiKey

_ONE_RECORD_A_BATCH = {"batch.size": 1, "linger.ms": 0, "request.timeout.ms": 1_000, "delivery.timeout.ms": 60_000}


def test_refusal_after_lost_response_duplicates_no_later_batch() -> None:
    harness = ProducerHarness(_ONE_RECORD_A_BATCH)
    harness.warm_up()
    harness.cluster.on(ApiKey.PRODUCE, faults.lose_response(), times=3)  # in the log; the responses are lost
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(TopicAuthorizationError), times=1)

    deliveries = [harness.send(value) for value in (b"first", b"second", b"third")]
    harness.settle()

    assert isinstance(deliveries[0].error, TopicAuthorizationError)
    assert [delivery.error for delivery in deliveries[1:]] == [None, None]
    assert harness.values() == [b"first", b"second", b"third"]


def test_gap_duplicates_no_earlier_batch_of_unknown_outcome() -> None:
    harness = ProducerHarness(_ONE_RECORD_A_BATCH)
    harness.warm_up()
    harness.cluster.on(ApiKey.PRODUCE, answer_with(ErrorCode.request_timed_out), times=1)  # in the log
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(UnsupportedCompressionTypeError), times=1)  # not in the log

    deliveries = [harness.send(value) for value in (b"first", b"second", b"third")]  # the third is out of order
    harness.settle()

    assert [type(delivery.error) for delivery in deliveries] == [
        type(None),
        UnsupportedCompressionTypeError,
        type(None),
    ]
    assert harness.values() == [b"first", b"third"]


def test_window_keeps_batch_with_lost_response_at_leader() -> None:
    harness = ProducerHarness(_ONE_RECORD_A_BATCH)
    harness.warm_up()
    # The first is in the log, and its response is lost twice; the four with it, and then four more, are acknowledged.
    harness.cluster.on(ApiKey.PRODUCE, answer_with(ErrorCode.request_timed_out), times=1)
    harness.cluster.on(ApiKey.PRODUCE, answer_with(ErrorCode.request_timed_out), times=1, skip=4)

    values = [b"%d" % number for number in range(12)]
    deliveries = [harness.send(value) for value in values]
    harness.settle()

    assert [delivery.error for delivery in deliveries] == [None] * 12
    assert harness.values() == values


def test_close_reports_abandoned_records_in_send_order() -> None:
    harness = ProducerHarness(_ONE_RECORD_A_BATCH, topics={"flights": 4})
    harness.warm_up()
    reported: list[int] = []
    for number in range(24):
        harness.producer.send(
            "flights", b"", partition=number % 4, on_completion=lambda *_, number=number: reported.append(number)
        )

    harness.producer.sender.force_close()
    harness.producer.sender.run()

    assert reported == list(range(24))
