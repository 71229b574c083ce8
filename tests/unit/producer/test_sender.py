"""The Sender's turns against a scripted broker: what it sends, the result of each answer, and its end.

Every test runs a whole producer in one thread.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
from kio.schema.errors import ErrorCode
from support.producer_harness import AT_ONCE, TOPIC, Delivery, ProducerHarness, warm
from support.scripted_broker import faults
from support.scripted_broker.cluster import NO_LEADER, ScriptedCluster
from support.scripted_broker.exchange import Answer, Exchange
from support.scripted_broker.versions import KAFKA_2_1

from spark_kafka_sink.client.seams import ClientResponse
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import (
    BrokerError,
    ClusterAuthorizationError,
    CorruptMessageError,
    InvalidRecordError,
    KafkaError,
    KafkaTimeoutError,
    NotEnoughReplicasError,
    NotLeaderOrFollowerError,
    OutOfOrderSequenceError,
    ProducerClosedError,
    RecordBatchTooLargeError,
    RecordTooLargeError,
    RequestTimedOutError,
    SaslAuthenticationError,
    SslAuthenticationError,
    TopicAuthorizationError,
    UnsupportedVersionError,
)
from spark_kafka_sink.producer.futures import RecordMetadata
from spark_kafka_sink.producer.producer_batch import ProducerBatch
from spark_kafka_sink.protocol.versions import ApiKey
from spark_kafka_sink.record.codecs import Codec
from spark_kafka_sink.record.columns import RecordColumns

SHORT = {"linger.ms": "0", "delivery.timeout.ms": "10000", "request.timeout.ms": "3000"}


def produce_attempts(harness: ProducerHarness) -> list[Exchange]:
    return harness.cluster.requests_of(ApiKey.PRODUCE)


def refused(harness: ProducerHarness, error_code: int, times: int | None = 1) -> Delivery:
    """Send a record whose first attempts get this error, and run until it has its outcome."""
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(error_code), times=times)
    delivery = harness.send(b"record")
    harness.settle()
    return delivery


# ---- a turn ----------------------------------------------------------------------------------------------------------


def test_records_arrive_and_their_futures_tell_where() -> None:
    harness = warm()
    first, second = harness.send(b"a", key=b"k"), harness.send(None)
    harness.settle()
    assert harness.values() == [b"a", None]
    assert first.future is not None
    metadata = first.future.result(0)
    assert (metadata.topic, metadata.partition, metadata.offset) == (TOPIC, 0, 1)
    assert (metadata.serialized_key_size, metadata.serialized_value_size) == (1, 1)
    assert metadata == first.metadata
    assert second.metadata is not None
    assert (second.metadata.offset, second.metadata.serialized_value_size) == (2, -1)
    assert harness.memory_in_use == 0


def test_records_linger_together() -> None:
    harness = warm({"linger.ms": "50"})
    deliveries = [harness.send(b"%d" % index) for index in range(3)]
    harness.settle()
    assert len(produce_attempts(harness)) == 1
    assert 50 <= deliveries[0].took_ms < 60


def test_a_poll_lasts_no_longer_than_the_next_batch_lingers() -> None:
    harness = warm({"linger.ms": "50"})
    start_ms = harness.now_ms
    harness.send()
    harness.turn()  # the send has woken it
    assert harness.now_ms == start_ms
    harness.turn()
    assert harness.now_ms == start_ms + 50


def test_a_turn_that_sent_something_does_not_wait() -> None:
    harness = warm()
    harness.send()
    before_ms = harness.now_ms
    polls: list[int] = []
    harness.client.poll = lambda timeout_ms, now_ms: polls.append(timeout_ms) or []
    harness.turn()
    assert (polls, harness.now_ms) == ([0], before_ms)


def test_sender_does_not_spin_with_retry_backoff_ms_0() -> None:
    """Bug: while the first answer was outstanding it took half of a processor."""
    harness = warm({**AT_ONCE, "retry.backoff.ms": "0", "reconnect.backoff.ms": "50"})
    harness.cluster.on(ApiKey.PRODUCE, faults.delay(20_000), times=None)
    for _ in range(3):
        harness.send(partition=0)
    before_ms = harness.now_ms
    for _ in range(250):
        harness.turn(1_000)
    assert harness.now_ms - before_ms >= 1_000


def test_unready_node_is_connected_and_retried() -> None:
    harness = warm({**AT_ONCE, "reconnect.backoff.ms": "1000"}, node_count=2, topics={TOPIC: 2})
    harness.network.cut(0)
    harness.network.refusing.add(0)
    harness.run_for(10)
    delivery = harness.send(partition=0)
    harness.run_for(500)
    harness.network.refusing.clear()
    harness.settle(20_000)
    assert delivery.error is None
    assert harness.turns < 500


def test_request_has_one_batch_of_each_partition() -> None:
    harness = warm(node_count=2, topics={TOPIC: 4})
    for partition in range(4):
        harness.send(b"%d" % partition, partition=partition)
    harness.settle()
    requests = produce_attempts(harness)
    assert {exchange.node_id for exchange in requests} == {0, 1}
    partitions = [[data.index for data in each.request.topic_data[0].partition_data] for each in requests]
    assert sorted(map(sorted, partitions)) == [[0, 2], [1, 3]]


def test_requests_stay_within_max_request_size() -> None:
    harness = warm({**AT_ONCE, "max.request.size": "2000", "batch.size": "1000"}, topics={TOPIC: 4})
    for partition in range(4):
        harness.send(bytes(700), partition=partition)
    harness.settle()
    assert [len(each.request.topic_data[0].partition_data) for each in produce_attempts(harness)] == [2, 2]


def test_at_most_max_in_flight_requests_go_to_a_node() -> None:
    harness = warm({**AT_ONCE, "max.in.flight.requests.per.connection": "3", "batch.size": "1"})
    harness.network.held.add(0)
    for index in range(6):
        harness.send(b"%d" % index)
    harness.run_for(200)
    assert len(produce_attempts(harness)) == 3
    harness.network.held.clear()
    harness.settle()
    assert harness.values() == [b"%d" % index for index in range(6)]


@pytest.mark.parametrize(
    ("codec", "least", "most"), [("none", 48_000, 60_000), ("gzip", 200, 2_000), ("lz4", 200, 2_000)]
)
def test_batch_in_flight_holds_the_memory_of_its_sent_bytes(codec: str, least: int, most: int) -> None:
    harness = warm({**AT_ONCE, "compression.type": codec})
    harness.network.held.add(0)
    for _ in range(5):
        harness.send(bytes(4_900))
        harness.send_columns(RecordColumns.from_rows([bytes(960)] * 5))
    harness.run_for(10)
    assert len(produce_attempts(harness)) == 1
    assert least < harness.memory_in_use < most
    harness.network.held.clear()
    harness.settle()
    assert harness.memory_in_use == 0


def test_compressed_batches_in_flight_exceed_buffer_memory() -> None:
    harness = warm({**AT_ONCE, "buffer.memory": "20000", "compression.type": "gzip", "max.block.ms": "1000"})
    harness.network.held.add(0)
    for _ in range(4):
        harness.send(bytes(15_000))
        harness.run_for(10)
    harness.network.held.clear()
    harness.settle()
    assert len(harness.values()) == 4
    assert harness.memory_in_use == 0


def test_one_request_in_flight_mutes_its_partition_until_the_answer() -> None:
    settings = {
        **AT_ONCE,
        "enable.idempotence": "false",
        "max.in.flight.requests.per.connection": "1",
        "batch.size": "1",
    }
    harness = warm(settings)
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(RequestTimedOutError), times=2)
    for index in range(4):
        harness.send(b"%d" % index)
    harness.network.held.add(0)
    for _ in range(5):
        harness.turn(1)
    assert len(produce_attempts(harness)) == 1
    harness.network.held.clear()
    harness.settle()
    assert harness.values() == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize(("setting", "acks"), [("0", 0), ("1", 1), ("all", -1), ("-1", -1)])
def test_acks_go_to_the_broker_as_configured(setting: str, acks: int) -> None:
    harness = warm({**AT_ONCE, "acks": setting})
    harness.send(b"x")
    harness.settle()
    harness.run_for(10)
    assert {exchange.request.acks for exchange in harness.cluster.requests_of(ApiKey.PRODUCE)} == {acks}


def test_acks_0_is_done_when_it_is_sent() -> None:
    harness = warm({**AT_ONCE, "acks": "0"})
    delivery = harness.send(b"x")
    harness.settle()
    assert delivery.metadata is not None
    assert delivery.metadata.offset == -1
    harness.run_for(10)
    assert harness.values() == [b"x"]
    assert harness.memory_in_use == 0


def test_records_for_a_topic_without_metadata_expire_with_the_brokers_reason() -> None:
    """Bug: the error of records whose topic is not granted any more said that the cluster does not show the topic."""
    harness = warm(SHORT, topics={TOPIC: 2}, node_count=2)
    harness.cluster.on(ApiKey.METADATA, faults.refuse_topic(TOPIC, TopicAuthorizationError), times=None)
    harness.network.refusing.add(1)
    harness.network.cut(1)
    delivery = harness.send(b"a", partition=1)
    harness.settle()
    assert isinstance(delivery.error, KafkaTimeoutError)
    assert "the brokers gave no metadata: Topic flights: Not authorized for the topic: grant" in str(delivery.error)


def test_batch_without_leader_requests_metadata_until_one_exists() -> None:
    harness = warm()
    harness.cluster.move_leader(TOPIC, 0, NO_LEADER)
    harness.metadata.request_update()
    harness.run_for(200)
    harness.cluster.requests.clear()
    delivery = harness.send(b"x")
    harness.run_for(2_000)
    asked = len(harness.cluster.requests_of(ApiKey.METADATA))
    assert 2 <= asked <= 10  # again and again, with a growing backoff
    harness.cluster.move_leader(TOPIC, 0, 0)
    harness.settle()
    assert delivery.error is None


def test_leader_without_known_address_is_requested() -> None:
    harness = warm(node_count=2, topics={TOPIC: 2})
    harness.cluster.live_node_ids.discard(1)
    harness.metadata.request_update()
    harness.run_for(500)
    harness.cluster.requests.clear()
    delivery = harness.send(b"x", partition=1)
    harness.run_for(3_000)
    assert len(harness.cluster.requests_of(ApiKey.METADATA)) >= 2
    harness.cluster.live_node_ids.add(1)
    harness.settle()
    assert delivery.error is None


def test_a_leaderless_topic_that_was_forgotten_is_added_again() -> None:
    harness = warm()
    harness.cluster.move_leader(TOPIC, 0, NO_LEADER)
    harness.metadata.request_update()
    harness.run_for(200)
    delivery = harness.send(b"x")
    assert not harness.metadata.retain_topic(TOPIC, harness.now_ms + harness.config.metadata_max_idle_ms), "forgotten"
    harness.turn()
    assert TOPIC in harness.known_topics
    harness.cluster.move_leader(TOPIC, 0, 0)
    harness.settle()
    assert delivery.error is None


def test_batch_that_cannot_be_encoded_fails_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = warm(topics={TOPIC: 2})
    bad, good = harness.send(b"bad", partition=0), harness.send(b"good", partition=1)
    seal = ProducerBatch.seal

    def overflows(batch: ProducerBatch, codec: Codec) -> None:
        if batch.topic_partition.partition == 0:
            raise OverflowError("int too big to convert")
        seal(batch, codec)

    monkeypatch.setattr(ProducerBatch, "seal", overflows)
    harness.settle()
    monkeypatch.undo()
    assert "flights-0 could not be encoded" in str(bad.error)
    assert good.error is None
    after = harness.send(b"after", partition=0)
    harness.settle()
    assert after.error is None
    assert harness.values(partition=0) == [b"after"]
    assert harness.memory_in_use == 0


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_log_append_time_replaces_the_times_of_records() -> None:
    harness = warm()

    def stamp(values: dict[str, Any]) -> Mapping[str, Any]:
        for topic in values["responses"]:
            topic["partition_responses"] = [
                {**each, "log_append_time": 1_700_000_000_123} for each in topic["partition_responses"]
            ]
        return values

    harness.cluster.on(ApiKey.PRODUCE, faults.change(stamp))
    stamped = harness.send(b"x", timestamp_ms=5)
    harness.settle()
    own = harness.send(b"y", timestamp_ms=6)
    harness.settle()
    assert stamped.metadata is not None
    assert own.metadata is not None
    assert (stamped.metadata.timestamp_ms, own.metadata.timestamp_ms) == (1_700_000_000_123, 6)


def test_records_with_a_lost_acknowledgement_keep_their_times() -> None:
    """For a batch that they have already, leaders report its latest timestamp as the time of the append."""
    harness = warm({"linger.ms": "5"})
    harness.cluster.on(ApiKey.PRODUCE, faults.close_after(), times=1)
    rows = [harness.send(b"%d" % time_ms, timestamp_ms=time_ms) for time_ms in (5, 6)]
    harness.settle()
    harness.cluster.on(ApiKey.PRODUCE, faults.close_after(), times=1)
    run = harness.send_columns(RecordColumns.from_rows([b"a", b"b"], timestamps_ms=[7, 8]))
    harness.settle()
    assert harness.cluster.log(TOPIC, 0).duplicates == 2
    assert [row.metadata and row.metadata.timestamp_ms for row in rows] == [5, 6]
    assert [(reported.timestamp_ms, error) for reported, error in run.runs] == [(-1, None)]


@pytest.mark.parametrize(
    "error_code",
    [
        ErrorCode.corrupt_message,
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.leader_not_available,
        ErrorCode.not_leader_or_follower,
        ErrorCode.request_timed_out,
        ErrorCode.not_enough_replicas,
        ErrorCode.not_enough_replicas_after_append,
        ErrorCode.kafka_storage_error,
        ErrorCode.fenced_leader_epoch,
        ErrorCode.unknown_topic_id,
    ],
)
def test_retriable_errors_are_retried(error_code: int) -> None:
    """Rows 16, 23, 26."""
    harness = warm()
    delivery = refused(harness, error_code, times=2)
    assert delivery.error is None
    assert harness.values() == [b"record"]
    assert len(produce_attempts(harness)) == 3


@pytest.mark.parametrize(
    ("error_code", "asks"),
    [
        (ErrorCode.unknown_topic_or_partition, True),
        (ErrorCode.leader_not_available, True),
        (ErrorCode.not_leader_or_follower, True),
        (ErrorCode.kafka_storage_error, True),
        (ErrorCode.fenced_leader_epoch, True),
        (ErrorCode.corrupt_message, False),
        (ErrorCode.request_timed_out, True),
    ],
)
def test_invalid_metadata_errors_request_metadata(error_code: int, asks: bool) -> None:
    """Bug: not after a timeout of the leader. One that is cut off answers so for as long as it is asked."""
    harness = warm()
    refused(harness, error_code)
    harness.run_for(500)
    assert bool(harness.cluster.requests_of(ApiKey.METADATA)) is asks


def test_refusal_is_logged_once_for_all_its_partitions(caplog: pytest.LogCaptureFixture) -> None:
    harness = warm(topics={TOPIC: 3})
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(RequestTimedOutError))
    for partition in range(3):
        harness.send(b"x", partition=partition)
    harness.settle()
    (reported,) = (text for text in caplog.messages if "refused" in text)
    assert re.fullmatch(r"Node 0 refused the batch for flights-\d and 2 more partitions: .* time limit\.", reported)


def test_retry_waits_for_its_backoff() -> None:
    harness = warm({**AT_ONCE, "retry.backoff.ms": "400"})
    refused(harness, ErrorCode.request_timed_out)
    first, second = produce_attempts(harness)
    assert 320 <= second.now_ms - first.now_ms <= 490


def test_permanent_error_fails_the_record_at_once_with_its_place() -> None:
    harness = warm()
    delivery = refused(harness, ErrorCode.record_list_too_large)  # row 22: larger than segment.bytes
    assert isinstance(delivery.error, RecordBatchTooLargeError)
    assert "flights-0" in str(delivery.error)
    assert delivery.error.error_code == ErrorCode.record_list_too_large
    assert len(produce_attempts(harness)) == 1
    assert harness.memory_in_use == 0


def test_an_authorization_error_names_the_topic() -> None:
    error = refused(warm(), ErrorCode.topic_authorization_failed).error
    assert isinstance(error, TopicAuthorizationError)
    assert str(error).startswith("Topic flights: ")
    assert error.topic == "flights"


def test_unknown_code_fails_the_record_and_is_named() -> None:
    error = refused(warm(), ErrorCode.broker_not_available).error
    assert isinstance(error, BrokerError)
    assert error.error_code == ErrorCode.broker_not_available


def test_a_corrupt_message_is_sent_again_until_the_delivery_timeout() -> None:
    """Row 23: the error names the cause."""
    harness = warm(SHORT)
    delivery = refused(harness, ErrorCode.corrupt_message, times=None)
    assert isinstance(delivery.error, KafkaTimeoutError)
    assert CorruptMessageError.sentence in str(delivery.error)
    assert 10_000 <= delivery.took_ms <= 11_000
    assert harness.memory_in_use == 0


def test_too_few_replicas_are_waited_for_until_they_return() -> None:
    """Row 26."""
    harness = warm(SHORT)
    script = harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(NotEnoughReplicasError), times=None)
    delivery = harness.send(b"x")
    harness.run_for(8_000)
    assert not delivery.is_settled
    harness.cluster.scripts.remove(script)
    harness.settle()
    assert delivery.error is None
    delivery = refused(harness, ErrorCode.not_enough_replicas, times=None)
    assert NotEnoughReplicasError.sentence in str(delivery.error)


def test_retries_are_limited_by_the_setting() -> None:
    harness = warm({**AT_ONCE, "retries": "2"})
    delivery = refused(harness, ErrorCode.request_timed_out, times=None)
    assert isinstance(delivery.error, RequestTimedOutError)  # the error of the last attempt, instead of the timeout
    assert "flights-0" in str(delivery.error)
    assert len(produce_attempts(harness)) == 3


def test_unanswered_request_is_retried_after_request_timeout_ms() -> None:
    harness = warm(SHORT)
    harness.cluster.on(ApiKey.PRODUCE, faults.lose_response())
    delivery = harness.send(b"x")
    harness.settle()
    assert delivery.error is None
    assert 3_000 <= delivery.took_ms <= 4_000
    assert harness.values() == [b"x"]  # the broker recognized the second as a duplicate
    assert harness.cluster.log(TOPIC, 0).duplicates == 1


@pytest.mark.parametrize(
    "fault",
    [
        faults.close_before(),
        faults.close_after(),
        faults.lose_request(),
        faults.wrong_correlation_id(),
        faults.truncate(3),
        faults.frame_length(2**31 - 1),
        faults.frame_length(-1),
    ],
)
def test_lost_or_garbled_connection_costs_one_retry(fault: faults.Hook) -> None:
    harness = warm(SHORT)
    harness.cluster.on(ApiKey.PRODUCE, fault)
    deliveries = [harness.send(b"a"), harness.send(b"b")]
    harness.settle()
    assert [delivery.error for delivery in deliveries] == [None, None]
    assert harness.values() == [b"a", b"b"]
    assert harness.memory_in_use == 0


def answer_of(change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> faults.Hook:
    """The answer's partitions, changed."""

    def apply(values: dict[str, Any]) -> Mapping[str, Any]:
        for topic in values["responses"]:
            topic["partition_responses"] = change([dict(each) for each in topic["partition_responses"]])
        return values

    return faults.change(apply)


def test_a_partition_left_out_of_an_answer_is_sent_again() -> None:
    """Row 14."""
    harness = warm(topics={TOPIC: 2})
    harness.cluster.on(
        ApiKey.PRODUCE, answer_of(lambda partitions: [each for each in partitions if each["index"] == 1])
    )
    deliveries = [harness.send(b"a", partition=0), harness.send(b"b", partition=1)]
    harness.settle()
    assert [delivery.error for delivery in deliveries] == [None, None]
    assert (harness.values(partition=0), harness.values(partition=1)) == ([b"a"], [b"b"])
    assert harness.cluster.log(TOPIC, 0).duplicates == 1


@pytest.mark.parametrize("last", [0, ErrorCode.not_enough_replicas])
def test_partition_with_two_outcomes_in_an_answer_is_sent_again(last: int, caplog: pytest.LogCaptureFixture) -> None:
    """Bug: the last outcome counted. A refusal before it was lost, and a record that no log had was acknowledged."""

    def refuse_and_acknowledge(cluster: ScriptedCluster, exchange: Exchange, proceed: Callable[[], Answer]) -> Answer:
        answer = faults.fail_with(NotEnoughReplicasError)(cluster, exchange, proceed)
        assert answer.values is not None
        for topic in answer.values["responses"]:
            taken = [{**each, "error_code": 0, "base_offset": 5} for each in topic["partition_responses"]]
            topic["partition_responses"] = [*topic["partition_responses"], *taken][:: 1 if last == 0 else -1]
        return answer

    harness = warm()
    harness.cluster.on(ApiKey.PRODUCE, refuse_and_acknowledge)
    delivery = harness.send(b"a")
    harness.settle()
    assert delivery.error is None
    assert harness.values() == [b"a"]
    assert len(produce_attempts(harness)) == 2
    assert "names the partition more than once, with different outcomes" in caplog.text


def test_partition_twice_in_an_answer_with_one_outcome_is_acknowledged() -> None:
    harness = warm()
    harness.cluster.on(ApiKey.PRODUCE, answer_of(lambda partitions: [*partitions, *partitions]))
    delivery = harness.send(b"a")
    harness.settle()
    assert delivery.error is None
    assert len(produce_attempts(harness)) == 1


def test_answer_for_an_unsent_partition_is_logged_and_ignored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Row 14."""
    harness = warm(topics={TOPIC: 2})
    harness.cluster.on(ApiKey.PRODUCE, answer_of(lambda partitions: [*partitions, {**partitions[0], "index": 77}]))
    delivery = harness.send(b"a", partition=0)
    harness.settle()
    assert delivery.error is None
    assert "flights-77" in caplog.text


def test_answer_for_many_unsent_partitions_is_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Bug: a broker could write a line of the log for each few bytes that it sent."""
    harness = warm()
    strange = [
        {
            "index": 1_000 + index,
            "error_code": ErrorCode.request_timed_out if index % 2 else ErrorCode.message_too_large,
        }
        for index in range(500)
    ]
    harness.cluster.on(
        ApiKey.PRODUCE, answer_of(lambda partitions: [*partitions, *({**partitions[0], **s} for s in strange)])
    )
    delivery = harness.send(b"a")
    harness.settle()
    assert delivery.error is None
    assert [text for text in caplog.messages if "flights" in text] == [
        "Node 0 answered for 500 partitions that were not in the request, such as flights-1000"
    ]


# ---- row 24: single records ------------------------------------------------------------------------------------------


CAUSES = {1: "no key", 2: None}
CODE_WITHOUT_CLASS = ErrorCode.throttling_quota_exceeded


def test_errors_of_single_records_reach_their_own_futures() -> None:
    harness = warm({"linger.ms": "20"})
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_records(InvalidRecordError, CAUSES, "One record is wrong"))
    deliveries = [harness.send(b"%d" % index) for index in range(4)]
    harness.settle()
    errors = [delivery.error for delivery in deliveries]
    assert all(isinstance(error, InvalidRecordError) for error in errors)
    assert "record 1" in str(errors[1])
    assert "no key" in str(errors[1])
    assert "record 2" in str(errors[2])
    assert "One record is wrong" in str(errors[2])
    for other in (errors[0], errors[3]):
        assert "Other records of the same batch" in str(other)
        assert "The first of those: flights-0: record 1 of its batch was refused: no key" in str(other)
        assert other is errors[0]
    assert harness.memory_in_use == 0


def test_a_refused_timestamp_says_what_to_change() -> None:
    harness = warm({"linger.ms": "20"})
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_records(ErrorCode.invalid_timestamp, CAUSES))
    deliveries = [harness.send(b"%d" % index) for index in range(4)]
    harness.settle()
    for delivery in deliveries:
        assert str(delivery.error).count("must be in milliseconds since 1970, not in micro") == 1


def test_other_records_of_a_refused_batch_get_its_code() -> None:
    harness = warm({"linger.ms": "20"})
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_records(CODE_WITHOUT_CLASS, CAUSES))
    deliveries = [harness.send(b"%d" % index) for index in range(4)]
    harness.settle()
    assert [getattr(delivery.error, "error_code", None) for delivery in deliveries] == [CODE_WITHOUT_CLASS] * 4


# ---- row 21: too large -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("is_idempotent", ["true", "false"])
def test_too_large_batch_is_split_without_loss(codec: str, is_idempotent: str) -> None:
    settings = {"linger.ms": "20", "enable.idempotence": is_idempotent, "compression.type": codec}
    if is_idempotent == "false":  # another way to keep the order
        settings["max.in.flight.requests.per.connection"] = "1"
    harness = warm(settings)
    harness.cluster.topics[TOPIC].max_message_bytes = 500
    values = [bytes([index]) * 3 + random_bytes(index, 60) for index in range(20)]
    deliveries = [harness.send(value) for value in values]
    harness.settle()
    assert [delivery.error for delivery in deliveries] == [None] * 20
    assert harness.values() == values
    offsets = [delivery.metadata.offset for delivery in deliveries if delivery.metadata is not None]
    assert offsets == list(range(1, 21))
    assert [len(delivery.calls) for delivery in deliveries] == [1] * 20
    assert harness.memory_in_use == 0
    assert harness.cluster.log(TOPIC, 0).duplicates == 0


def random_bytes(seed: int, count: int) -> bytes:
    return random.Random(seed).randbytes(count)


def test_split_does_not_count_as_a_retry() -> None:
    harness = warm({"linger.ms": "50", "retries": "1"})
    harness.cluster.topics[TOPIC].max_message_bytes = 300
    values = [b"%d" % index * 30 for index in range(8)]
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(NotLeaderOrFollowerError), skip=1)
    deliveries = [harness.send(value) for value in values]
    harness.settle()
    assert [delivery.error for delivery in deliveries] == [None] * 8
    assert harness.values() == values


def test_batches_after_a_split_batch_stay_behind_its_parts() -> None:
    harness = warm({"linger.ms": "0", "batch.size": "1000"})
    harness.cluster.topics[TOPIC].max_message_bytes = 500
    values = [b"%03d" % index + bytes(90) for index in range(40)]
    for value in values:
        harness.send(value)
    harness.settle()
    assert harness.values() == values


@pytest.mark.parametrize(("codec", "grows"), [("none", False), ("gzip", True), ("zstd", True)])
def test_batches_grow_with_their_compression(codec: str, grows: bool) -> None:
    harness = warm({**AT_ONCE, "batch.size": "2000", "compression.type": codec})
    counts = []
    for _ in range(20):
        harness.send_columns(RecordColumns.from_rows([bytes(90)] * 100))
        harness.settle()
        counts.append(harness.sent_batches())
        harness.cluster.requests.clear()
    assert counts[0] == 7
    assert counts[-1] == (2 if grows else 7)
    assert harness.memory_in_use == 0


def test_topic_gets_small_batches_after_the_first_refusal() -> None:
    harness = warm({**AT_ONCE, "batch.size": "2000", "compression.type": "gzip"})
    harness.cluster.topics[TOPIC].max_message_bytes = 1_000
    values = [bytes(60) + random_bytes(index, 30) for index in range(2_000)]
    for start in range(0, 2_000, 100):
        harness.send_columns(RecordColumns.from_rows(values[start : start + 100]))
        harness.settle()
    assert harness.values() == values
    assert 1 <= harness.producer.metrics()["batch-split-total"] <= 3  # the batches that were full before


def test_consecutive_too_large_batches_are_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    harness = warm({**AT_ONCE, "batch.size": "2000", "max.in.flight.requests.per.connection": "1"})
    rows = RecordColumns.from_rows([random_bytes(index, 90) for index in range(100)])

    def warnings(max_message_bytes: int) -> list[str]:
        caplog.clear()
        harness.cluster.topics[TOPIC].max_message_bytes = max_message_bytes
        for _ in range(5):
            harness.send_columns(rows)
            harness.settle()
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    (reported,) = warnings(1_500)
    assert "does not accept a batch of" in reported
    assert warnings(1_500) == []
    assert 1 <= len(warnings(400)) <= 2
    assert harness.producer.metrics()["batch-split-total"] > 50
    assert harness.memory_in_use == 0


def test_rows_of_a_split_batch_are_reported_by_its_parts() -> None:
    harness = warm({"linger.ms": "0"})
    harness.cluster.topics[TOPIC].max_message_bytes = 600
    delivery = harness.send_columns(RecordColumns.from_rows([bytes(90)] * 10))
    harness.settle()
    assert [error for _, error in delivery.runs] == [None] * len(delivery.runs)
    assert sum(run.record_count for run, _ in delivery.runs) == 10
    assert len(delivery.runs) > 1
    assert [run.base_offset for run, _ in delivery.runs] == sorted(run.base_offset for run, _ in delivery.runs)
    assert harness.memory_in_use == 0


@pytest.mark.parametrize(
    "error_code", [ErrorCode.corrupt_message, ErrorCode.not_enough_replicas], ids=["corrupt", "not enough replicas"]
)
def test_too_large_record_of_a_refused_batch_fails_without_others(error_code: int) -> None:
    """Bug: its gap was read as a sign that the whole batch might be in the log. A leader that refuses the batch at once
    does not append it.
    """
    harness = warm({"linger.ms": "20"})
    harness.cluster.topics[TOPIC].max_message_bytes = 1_000
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(error_code), times=1)
    values = [b"%03d" % index + bytes(60) for index in range(6)]
    too_large, *others = [harness.send(value) for value in (bytes(2_000), *values)]
    harness.settle()
    assert isinstance(too_large.error, RecordTooLargeError)
    assert [delivery.error for delivery in others] == [None] * 6
    assert harness.values() == values


@pytest.mark.parametrize("splits", [1, 3])
def test_split_parts_with_lost_response_are_not_duplicated(splits: int) -> None:
    """No leader recognizes a part as a duplicate of its batch: for the leader there is a gap."""
    harness = warm({"linger.ms": "20", "max.in.flight.requests.per.connection": "5"})

    def append_and_lower_the_limit(
        cluster: ScriptedCluster, exchange: Exchange, proceed: Callable[[], Answer]
    ) -> Answer:
        answer = faults.close_after()(cluster, exchange, proceed)
        cluster.topics[TOPIC].max_message_bytes = 1_200 >> splits
        return answer

    harness.cluster.on(ApiKey.PRODUCE, append_and_lower_the_limit, times=1)
    values = [b"%03d" % index + bytes(60) for index in range(16)]
    deliveries = [harness.send(value) for value in values]
    harness.settle()
    assert harness.values() == values
    for delivery in deliveries:
        assert isinstance(delivery.error, OutOfOrderSequenceError)
        assert "they may or may not be in the log" in str(delivery.error)
    assert harness.memory_in_use == 0
    after = harness.send(b"after")
    harness.settle()
    assert after.error is None
    assert harness.values() == [*values, b"after"]


def test_too_large_record_fails_and_later_ones_go_on() -> None:
    harness = warm({**AT_ONCE, "batch.size": "1"})
    harness.cluster.topics[TOPIC].max_message_bytes = 500
    deliveries = [harness.send(value) for value in (b"a", bytes(600), b"b", b"c")]
    harness.settle()
    assert isinstance(deliveries[1].error, RecordTooLargeError)
    assert [delivery.error for delivery in deliveries if delivery is not deliveries[1]] == [None] * 3
    assert harness.values() == [b"a", b"b", b"c"]


def test_an_expired_batch_is_not_split() -> None:
    """Row 21 after the delivery timeout."""
    harness = warm(SHORT | {"linger.ms": "1"})
    refuse = faults.fail_with(RecordTooLargeError)
    harness.cluster.on(ApiKey.PRODUCE, lambda *call: dataclasses.replace(refuse(*call), delay_ms=2_500), times=None)
    first, second = harness.send(b"a"), harness.send(b"b")
    harness.clock.advance(8_000)
    harness.settle()
    harness.run_for(3_000)
    assert isinstance(first.error, KafkaTimeoutError)
    assert isinstance(second.error, KafkaTimeoutError)
    assert len(produce_attempts(harness)) == 1
    assert harness.producer.metrics()["batch-split-total"] == 0
    assert harness.memory_in_use == 0


# ---- expiry ----------------------------------------------------------------------------------------------------------


def test_unsent_records_fail_at_the_delivery_timeout_with_the_cause() -> None:
    harness = warm(SHORT)
    harness.network.stop(0)
    harness.run_for(10)
    delivery = harness.send(b"x")
    harness.settle()
    assert isinstance(delivery.error, KafkaTimeoutError)
    assert "delivery.timeout.ms=10000" in str(delivery.error)
    assert "flights-0" in str(delivery.error)
    assert "no broker of bootstrap.servers answered: Connection to node -1 lost" in str(delivery.error)
    assert 10_000 <= delivery.took_ms <= 10_100
    assert harness.memory_in_use == 0


def test_expiry_with_an_unreachable_broker_names_it() -> None:
    """Bug: the error did not say which broker, nor why, as soon as another broker had given metadata."""
    harness = warm(SHORT, node_count=2, topics={TOPIC: 2})
    harness.network.cut(0)
    harness.network.refusing.add(0)
    harness.run_for(10)
    delivery = harness.send(b"x", partition=0)
    harness.settle()
    leader = str(harness.metadata.fetch().leader_for(TopicPartition(TOPIC, 0)))
    assert f": they could not be sent to {leader}, which is not connected: Connection to node 0 lost" in str(
        delivery.error
    )
    assert str(delivery.error).endswith("cannot be connected to: Connection refused.")


def test_expiry_after_a_lost_answer_says_why_the_leader_is_not_connected() -> None:
    """Bug: the error had only the first loss, and not what kept the producer from connecting again."""
    harness = warm(SHORT, node_count=2, topics={TOPIC: 2})
    harness.network.refusing.add(0)  # it keeps the connection that it has
    harness.cluster.on(ApiKey.PRODUCE, faults.close_before())
    delivery = harness.send(b"x", partition=0)
    harness.settle()
    assert "failed attempts said: Node 0 disconnected before it answered." in str(delivery.error)
    assert "Its leader broker-0" in str(delivery.error)
    assert str(delivery.error).endswith("cannot be connected to: Connection refused.")


def test_expiry_with_a_leader_that_was_lost_and_is_connected_names_no_loss() -> None:
    harness = warm({**SHORT, "linger.ms": "0"}, node_count=2, topics={TOPIC: 2})
    harness.network.cut(0)
    harness.run_for(2_000)
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(NotEnoughReplicasError), times=None)
    delivery = harness.send(b"x", partition=0)
    harness.settle()
    assert isinstance(delivery.error, KafkaTimeoutError)
    assert "not connected" not in str(delivery.error)


def test_expiry_in_flight_under_a_quota_names_the_throttle() -> None:
    harness = warm({**SHORT, "max.in.flight.requests.per.connection": "5"})
    # The broker does not read the second request of a throttled client.
    harness.cluster.on(ApiKey.PRODUCE, faults.lose_response(), skip=1)
    first = harness.send(b"a")
    harness.cluster.throttle_ms = 12_000
    harness.turn()
    second = harness.send(b"b")
    harness.settle()
    assert first.error is None
    assert "they were sent and not answered. It throttles this client for 12000 ms" in str(second.error)


def test_expiry_during_throttling_names_the_throttle() -> None:
    harness = warm(SHORT)
    harness.cluster.throttle_ms = 12_000
    harness.send(b"a")
    harness.settle()
    harness.cluster.throttle_ms = 0
    delivery = harness.send(b"b")
    harness.settle()
    assert str(delivery.error).endswith("It throttles this client for 12000 ms: is there a quota?")
    harness.run_for(12_000)
    harness.network.cut(0)
    harness.network.refusing.add(0)
    harness.run_for(10)
    later = harness.send(b"c")
    harness.settle()
    assert "quota" not in str(later.error)


def test_records_expired_during_a_pause_are_not_sent() -> None:
    harness = warm({**SHORT, "connections.max.idle.ms": "-1"})
    delivery = harness.send(b"late")
    harness.clock.advance(10_000)
    harness.run_for(200)
    assert isinstance(delivery.error, KafkaTimeoutError)
    assert harness.values() == []
    after = harness.send(b"after")
    harness.settle()
    assert after.error is None
    assert harness.values() == [b"after"]


def test_expiry_without_a_leader_names_the_partition() -> None:
    harness = warm(SHORT)
    harness.cluster.move_leader(TOPIC, 0, NO_LEADER)
    harness.metadata.request_update()
    harness.run_for(300)
    delivery = harness.send(b"x")
    harness.settle()
    assert "no leader" in str(delivery.error)


@pytest.mark.parametrize(
    ("left", "why"), [(1, "the topic has 1 partitions now"), (0, "does not show the topic any more")]
)
def test_expiry_for_a_deleted_partition_says_so(left: int, why: str) -> None:
    harness = warm({**SHORT, "linger.ms": "300"}, topics={TOPIC: 2})
    delivery = harness.send(b"x", partition=1)
    harness.cluster.delete_topic(TOPIC)
    if left:
        harness.cluster.create_topic(TOPIC, left)
    harness.metadata.request_update()
    harness.settle()
    assert why in str(delivery.error)


def test_expired_records_in_flight_keep_memory_until_the_request_ends() -> None:
    """Rows 9 and 10: the socket accepts no bytes."""
    harness = warm(SHORT | {"request.timeout.ms": "10000"})
    harness.network.stalled.add(0)
    harness.run_for(5)
    in_use: list[int] = []
    harness.producer.send(TOPIC, b"x", on_completion=lambda *_: in_use.append(harness.memory_in_use))
    delivery = harness.send(b"y")
    before = harness.memory_in_use
    harness.clock.advance(5_000)
    harness.selector.at(delivery.sent_ms + 12_000, lambda: in_use.append(harness.memory_in_use))
    harness.settle()
    assert "sent and not answered" in str(delivery.error)
    assert 10_000 <= delivery.took_ms <= 10_100
    assert in_use == [before, before]
    harness.run_until(lambda: harness.memory_in_use == 0, 20_000)
    assert harness.now_ms - delivery.sent_ms >= 15_000  # the timeout of the request


def test_answer_after_the_expiry_only_frees_the_memory() -> None:
    harness = warm(SHORT | {"request.timeout.ms": "9000"})
    harness.network.held.add(0)
    first = harness.send(b"x")
    harness.clock.advance(2_000)
    harness.turn(1)
    harness.turn(1)
    second = harness.send(b"y")
    harness.selector.at(first.sent_ms + 10_500, harness.network.held.clear)
    harness.settle()
    assert isinstance(first.error, KafkaTimeoutError)
    assert first.took_ms == 10_000
    assert second.error is None
    assert len(first.calls) == 1
    assert harness.values() == [b"x", b"y"]
    assert harness.memory_in_use == 0


# ---- fatal errors, exceptions, the end -------------------------------------------------------------------------------


def test_a_fatal_error_fails_everything_pending_with_its_cause() -> None:
    harness = warm({**AT_ONCE, "batch.size": "1"})
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(ClusterAuthorizationError))
    deliveries = [harness.send(b"%d" % index) for index in range(8)]
    harness.settle()
    assert all(isinstance(delivery.error, ClusterAuthorizationError) for delivery in deliveries)
    assert harness.producer.has_failed
    assert repr(harness.producer).startswith("KafkaProducer(failed")
    later = harness.send(b"later")
    harness.settle()
    assert isinstance(later.error, ClusterAuthorizationError)
    assert harness.memory_in_use == 0


def test_batches_in_flight_at_a_fatal_error_are_not_retried() -> None:
    harness = warm({**AT_ONCE, "batch.size": "1"})
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(ClusterAuthorizationError))
    slow = faults.fail_with(RequestTimedOutError)
    harness.cluster.on(ApiKey.PRODUCE, lambda *call: dataclasses.replace(slow(*call), delay_ms=50), times=None)
    deliveries = [harness.send(b"%d" % index) for index in range(3)]
    harness.settle()
    harness.run_for(500)
    assert [len(delivery.calls) for delivery in deliveries] == [1, 1, 1]
    assert len(produce_attempts(harness)) == 3
    assert not harness.accumulator.has_undrained
    assert harness.memory_in_use == 0


def test_broker_too_old_for_idempotence_is_fatal_and_named() -> None:
    old = {key: ranges for key, ranges in KAFKA_2_1.items() if key != ApiKey.INIT_PRODUCER_ID}
    harness = ProducerHarness(AT_ONCE, cluster=ScriptedCluster(versions=old))
    delivery = harness.send(b"x")
    harness.settle()
    assert isinstance(delivery.error, UnsupportedVersionError)
    assert harness.producer.has_failed


@pytest.mark.parametrize("is_idempotent", [True, False])
def test_a_version_that_the_broker_lacks_fails_the_records(is_idempotent: bool) -> None:
    settings = {**AT_ONCE, "compression.type": "zstd", "enable.idempotence": str(is_idempotent).lower()}
    old = {**KAFKA_2_1, ApiKey.PRODUCE: (0, 6)}
    harness = ProducerHarness(settings, cluster=ScriptedCluster(versions=old))
    delivery = harness.send(b"x")
    harness.settle()
    assert isinstance(delivery.error, UnsupportedVersionError)
    assert harness.producer.has_failed is is_idempotent
    assert harness.memory_in_use == 0


def test_failing_turn_is_logged_and_the_loop_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    harness = warm()
    delivery = harness.send(b"x")
    poll = harness.client.poll
    calls: list[int] = []

    def fail_once(timeout_ms: int, now_ms: int) -> list[ClientResponse]:
        calls.append(timeout_ms)
        if len(calls) == 1:
            raise RuntimeError("a turn went wrong")
        return poll(timeout_ms, now_ms)

    harness.client.poll = fail_once
    harness.close()
    assert "a turn went wrong" in caplog.text
    assert delivery.error is None


def test_close_sends_queued_records_without_lingering() -> None:
    harness = warm({"linger.ms": "60000"})
    delivery = harness.send(b"x")
    start_ms = harness.now_ms
    harness.close()
    assert delivery.error is None
    assert harness.now_ms - start_ms < 1_000
    assert harness.selector.connection_ids == []
    assert harness.metadata.is_closed


def test_close_does_not_wait_after_records_that_cannot_be_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: nothing was sent, and the Sender waited for an answer until the close was forced."""
    harness = warm()
    delivery = harness.send(b"x")
    monkeypatch.setattr(ProducerBatch, "seal", Mock(side_effect=ValueError))
    start_ms = harness.now_ms
    harness.close()
    assert "could not be encoded" in str(delivery.error)
    assert harness.now_ms == start_ms


def test_a_close_ends_the_poll_that_waits() -> None:
    harness = warm()
    woken: list[str] = []
    harness.selector.wakeup = lambda: woken.append("poll")
    harness.producer.sender.initiate_close()
    assert woken == ["poll"]


def test_forced_close_fails_incomplete_batches_and_closes_connections() -> None:
    """Row 52."""
    harness = warm({**AT_ONCE, "batch.size": "1"})
    harness.network.held.add(0)
    deliveries = [harness.send(b"%d" % index) for index in range(8)]
    harness.run_for(50)
    start_ms = harness.now_ms
    harness.producer.sender.force_close()
    harness.producer.sender.run()
    assert harness.now_ms == start_ms
    assert all(isinstance(delivery.error, ProducerClosedError) for delivery in deliveries)
    assert harness.selector.connection_ids == []
    assert harness.memory_in_use == 0


def test_close_without_cluster_ends_with_delivery_timeout() -> None:
    harness = warm(SHORT)
    harness.network.stop(0)
    harness.run_for(10)
    delivery = harness.send(b"x")
    start_ms = harness.now_ms
    harness.close()
    assert isinstance(delivery.error, KafkaTimeoutError)
    assert harness.now_ms - start_ms < 15_000


def test_callbacks_run_in_order_within_a_partition() -> None:
    harness = warm({**AT_ONCE, "batch.size": "200"})
    order: list[int] = []

    def note(index: int, metadata: RecordMetadata, error: KafkaError | None) -> None:
        order.append(index)

    for index in range(20):
        harness.producer.send(TOPIC, b"v", on_completion=partial(note, index))
    harness.cluster.on(ApiKey.PRODUCE, faults.close_after(), skip=1)
    harness.run_until(lambda: len(order) == 20)
    assert order == list(range(20))


def test_raising_callback_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    harness = warm()

    def broken(metadata: object, error: KafkaError | None) -> None:
        raise ValueError("callback broke")

    first = harness.producer.send(TOPIC, b"a", on_completion=broken)
    second = harness.send(b"b")
    harness.settle()
    assert first.result(0).offset == 1
    assert second.error is None
    assert "callback broke" in caplog.text
    assert caplog.records[-1].levelno == logging.ERROR


# ---- throttling and loads --------------------------------------------------------------------------------------------


def test_throttled_node_gets_no_request_meanwhile() -> None:
    """Row 25."""
    harness = warm(SHORT)
    harness.cluster.throttle_ms = 2_000
    first = harness.send(b"a")
    harness.settle()
    harness.cluster.throttle_ms = 0
    second = harness.send(b"b")
    harness.settle()
    assert first.error is None
    assert second.error is None
    one, two = produce_attempts(harness)
    assert 1_990 <= two.now_ms - one.now_ms <= 2_100


def test_waiting_for_metadata_of_throttling_brokers_retries_no_batch() -> None:
    """Without idempotence they would be duplicated."""
    harness = warm({**SHORT, "acks": "1"})
    harness.cluster.on(ApiKey.PRODUCE, faults.change(lambda values: {**values, "throttle_time": 1_000}))
    harness.cluster.on(ApiKey.PRODUCE, faults.delay(500))
    deliveries = [harness.send(b"a")]
    harness.turn(0)
    deliveries.append(harness.send(b"b"))
    harness.run_until(lambda: deliveries[0].is_settled)
    assert not deliveries[1].is_settled
    harness.metadata.request_update()
    harness.settle()
    assert harness.values() == [b"a", b"b"]
    assert len(produce_attempts(harness)) == 2


def test_partition_of_an_unavailable_broker_is_skipped() -> None:
    """KIP-794, partitioner.availability.timeout.ms."""
    settings = {**AT_ONCE, "batch.size": "1", "partitioner.availability.timeout.ms": "500"}
    harness = warm(settings, node_count=2, topics={TOPIC: 2})
    harness.send(b"anywhere")
    harness.settle()
    harness.network.stalled.add(1)
    for _ in range(8):
        harness.send(b"stuck", partition=1)
    harness.run_for(2_000)
    harness.turn(0)
    deliveries = [harness.send(b"free") for _ in range(30)]
    harness.run_for(100)
    assert all(delivery.is_settled for delivery in deliveries)
    assert {delivery.metadata.partition for delivery in deliveries if delivery.metadata is not None} == {0}
    harness.network.stalled.clear()
    harness.settle()
    used = set()
    for _ in range(40):
        delivery = harness.send(b"again")
        harness.settle()
        assert delivery.metadata is not None
        used.add(delivery.metadata.partition)
    assert used == {0, 1}


def test_topic_without_queued_records_skips_an_unavailable_broker_too() -> None:
    settings = {**AT_ONCE, "batch.size": "1", "partitioner.availability.timeout.ms": "500"}
    harness = warm(settings, node_count=2, topics={TOPIC: 2, "others": 2})

    def partition_of_next() -> int:
        delivery = harness.send(b"v", topic="others")
        harness.run_until(lambda: delivery.is_settled)
        assert delivery.metadata is not None
        return delivery.metadata.partition

    assert {partition_of_next() for _ in range(20)} == {0, 1}
    while partition_of_next() != 0:  # so that the other one is next
        pass
    harness.network.stalled.add(1)
    for _ in range(8):
        harness.send(b"stuck", partition=1)
    harness.run_for(2_000)
    harness.turn(0)  # notes that the broker is away
    harness.turn(0)
    assert {partition_of_next() for _ in range(20)} == {0}
    harness.network.stalled.clear()
    harness.settle()
    assert {partition_of_next() for _ in range(20)} == {0, 1}


def test_broker_without_waiting_records_is_tried_again() -> None:
    """Otherwise the producer would avoid the node without end: no record without a key would go there."""
    harness = warm(
        {**SHORT, "batch.size": "1", "partitioner.availability.timeout.ms": "500"}, node_count=2, topics={TOPIC: 2}
    )
    harness.network.stop(1)
    harness.cluster.live_node_ids.add(1)  # it is still the leader
    stuck = [harness.send(b"stuck", partition=1) for _ in range(3)]
    harness.run_for(2_000)
    harness.send(b"anywhere")
    harness.settle()
    assert all(isinstance(delivery.error, KafkaTimeoutError) for delivery in stuck)
    harness.network.start(1)
    harness.run_for(2_000)
    used = set()
    for _ in range(40):
        delivery = harness.send(b"again")
        harness.settle()
        assert delivery.metadata is not None
        used.add(delivery.metadata.partition)
    assert used == {0, 1}


@pytest.mark.parametrize("is_idempotent", [True, False])
def test_records_fail_when_bootstrap_nodes_refuse_login(is_idempotent: bool) -> None:
    """As after revoked credentials: the session ends, and the nodes that could name the leader refuse this client."""
    harness = warm(AT_ONCE | {"enable.idempotence": str(is_idempotent).lower()})
    refusal = SaslAuthenticationError("revoked")
    delivery = harness.send(b"v")
    harness.metadata.rebootstrap()
    harness.client.authentication_error = lambda node: refusal if node.id < 0 else None
    harness.settle(1_000)
    assert delivery.error is refusal
    assert produce_attempts(harness) == []


@pytest.mark.parametrize("is_idempotent", [True, False])
def test_records_for_a_node_that_refuses_us_fail_at_once(is_idempotent: bool) -> None:
    harness = warm(AT_ONCE | {"enable.idempotence": str(is_idempotent).lower()})
    harness.send(b"v")
    harness.settle()
    refusal = SaslAuthenticationError("revoked")
    harness.client.ready = lambda node, now_ms: False
    delivery = harness.send(b"v")
    harness.turn(1)  # in which the send has woken the poll
    harness.turn(1)
    harness.client.authentication_error = lambda node: refusal
    start_ms = harness.now_ms
    harness.settle()
    assert delivery.error is refusal
    assert delivery.settled_ms == start_ms


@pytest.mark.parametrize("is_idempotent", [True, False])
@pytest.mark.parametrize("do_records_wait", [True, False])
def test_refused_producer_is_not_used_again(is_idempotent: bool, do_records_wait: bool) -> None:
    """Bug: a pooled producer kept its expired certificate, although the file had been renewed, and all tasks of its
    worker were refused. An idempotent producer was kept if a wait for metadata got the refusal, any other one always.
    """
    harness = warm(AT_ONCE | {"enable.idempotence": str(is_idempotent).lower()})
    assert not harness.producer.has_failed
    refusal = SslAuthenticationError("Node 0 refuses this client's certificate (certificate expired).")
    if do_records_wait:
        harness.network.refused_logins[0] = refusal
        harness.network.cut(0)
        delivery = harness.send(b"v")
        harness.settle(1_000)
        assert delivery.error is refusal
    else:
        harness.metadata.rebootstrap()
        harness.metadata.fatal_error(refusal)
        with pytest.raises(SslAuthenticationError, match="expired"):
            harness.producer.partitions_for(TOPIC)
    assert harness.producer.has_failed


def test_with_one_in_flight_an_expired_batch_holds_its_partition() -> None:
    """Kafka's SenderTest.testWhenFirstBatchExpireNoSendSecondBatchIfGuaranteeOrder. The leader changes, so that only
    the muted partition holds the second batch back.
    """
    ordered = {"enable.idempotence": "false", "max.in.flight.requests.per.connection": "1", "batch.size": "1"}
    times = {"delivery.timeout.ms": "3000", "request.timeout.ms": "2900", "linger.ms": "0", "retry.backoff.ms": "1000"}
    harness = warm({**ordered, **times}, node_count=2)
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(RequestTimedOutError))
    first = harness.send(b"first", partition=0)
    harness.run_for(500)
    harness.cluster.on(ApiKey.PRODUCE, faults.delay(2_800))
    harness.run_for(1_000)  # sent again: answered after it has expired
    assert len(produce_attempts(harness)) == 2
    harness.cluster.move_leader(TOPIC, 0, 1)
    harness.metadata.request_update()
    harness.run_for(1_000)
    second = harness.send(b"second", partition=0)
    harness.run_for(800)
    assert isinstance(first.error, KafkaTimeoutError)
    assert len(produce_attempts(harness)) == 2
    harness.deliveries.remove(first)
    harness.settle()
    assert second.error is None
    assert harness.values() == [b"first", b"second"]
