"""The producer's interface: refusals of a send, the partition of a record, and the guarantees of flush and close."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import re
import socket
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
from kio.schema.errors import ErrorCode
from support.fake_clock import FakeClock
from support.producer_harness import AT_ONCE, TOPIC, ProducerHarness, warm
from support.scripted_broker import faults
from support.scripted_broker.exchange import Answer
from support.threaded_producer import EXPIRES_AT_ONCE, producer_threads, sender_thread, threaded, threaded_with_topic

from spark_kafka_sink.client.metadata_view import MetadataResponse, TopicMetadata
from spark_kafka_sink.common.cluster import Node
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import (
    BufferExhaustedError,
    ConfigError,
    IllegalStateError,
    InvalidRecordError,
    InvalidTopicError,
    KafkaError,
    KafkaTimeoutError,
    LeaderNotAvailableError,
    ProducerClosedError,
    RecordTooLargeError,
    SerializationError,
    TopicAuthorizationError,
    UnknownTopicOrPartitionError,
)
from spark_kafka_sink.producer import kafka_producer
from spark_kafka_sink.producer.buffer_pool import Grant
from spark_kafka_sink.producer.futures import RecordMetadata
from spark_kafka_sink.producer.kafka_producer import MAX_BLOCK_ROWS, KafkaProducer
from spark_kafka_sink.producer.producer_metadata import ProducerMetadata
from spark_kafka_sink.protocol.versions import ApiKey
from spark_kafka_sink.record.batch import HEADER_SIZE
from spark_kafka_sink.record.block import Block
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.encoder import record_size_upper_bound
from spark_kafka_sink.record.partitioning import partition_for_key

JOIN_S = 5


# ---- send ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"value": 5}, "value of a record is a int"),
        ({"key": 1.5}, "key of a record is a float"),
        ({"value": "\ud800"}, "value of a record is a str that is not valid Unicode"),
        ({"headers": [(None, b"v")]}, "A header key of a record is a NoneType"),
        ({"headers": [("\ud800", b"v")]}, "header name of a record is a str that is not valid Unicode"),
        ({"headers": [("name", 7)]}, "header 'name' in a record is a int"),
        ({"partition": -1}, "partition=-1"),
        ({"timestamp_ms": -5}, "timestamp_ms is -5"),
        ({"timestamp_ms": 2**63}, "timestamp_ms is 9223372036854775808"),
    ],
)
def test_invalid_record_is_refused_before_the_append(arguments: dict[str, Any], text: str) -> None:
    harness = warm()
    with pytest.raises(SerializationError, match=text):
        harness.producer.send(TOPIC, **arguments)
    assert harness.memory_in_use == 0
    assert not harness.accumulator.has_incomplete


def test_keys_values_and_headers_arrive_unchanged() -> None:
    harness = warm()
    harness.send("text", key=bytearray(b"k"), headers=[("a", b"1"), ("b", None), ("c", "3")], timestamp_ms=17)
    view: Any = memoryview(b"view")
    harness.send(view)
    harness.settle()
    _, first, second = harness.cluster.records(TOPIC)[0]
    assert (first.key, first.value, first.timestamp_ms) == (b"k", b"text", 17)
    assert first.headers == ((b"a", b"1"), (b"b", None), (b"c", b"3"))
    assert (second.key, second.value) == (None, b"view")
    assert second.timestamp_ms == harness.clock.wall_ms() - (harness.now_ms - harness.deliveries[1].sent_ms)


def test_too_large_record_fails_its_future_with_the_limit() -> None:
    harness = warm({**AT_ONCE, "max.request.size": "1000"})
    error = harness.send(bytes(990)).error
    assert isinstance(error, RecordTooLargeError)
    assert "max.request.size=1000" in str(error)
    assert TOPIC in str(error)
    harness = warm({**AT_ONCE, "buffer.memory": "1000"})
    assert "buffer.memory=1000" in str(harness.send(bytes(990)).error)


def test_a_failed_send_calls_back_and_its_future_raises() -> None:
    harness = warm({**AT_ONCE, "max.request.size": "1000"})
    delivery = harness.send(bytes(2_000))
    assert delivery.place == RecordMetadata(TOPIC, -1, -1, -1, -1, -1)
    assert delivery.future is not None
    assert delivery.future.done()
    with pytest.raises(RecordTooLargeError):
        delivery.future.result(0)


def test_a_callback_names_the_chosen_partition_when_memory_stays_full() -> None:
    harness = warm({"linger.ms": "1000", "buffer.memory": "1000", "max.block.ms": "10"}, topics={TOPIC: 4})
    harness.accumulator.pool.allocate(900, 0, Grant())
    delivery = harness.send(bytes(200), key=b"k")
    assert isinstance(delivery.error, BufferExhaustedError)
    assert delivery.place == RecordMetadata(TOPIC, partition_for_key(b"k", 4), -1, -1, -1, -1)


@pytest.mark.parametrize("settings", [{}, {"delivery.timeout.ms": "1000", "request.timeout.ms": "900"}])
def test_callback_of_refused_or_late_record_names_its_place(settings: dict[str, str]) -> None:
    harness = warm({**AT_ONCE, **settings}, topics={TOPIC: 3})
    harness.cluster.on(
        ApiKey.PRODUCE, faults.lose_request() if settings else faults.fail_with(TopicAuthorizationError), times=9
    )
    delivery = harness.send(b"v", partition=2, timestamp_ms=1_600_000_000_000)
    harness.settle()
    assert isinstance(delivery.error, KafkaTimeoutError if settings else TopicAuthorizationError)
    assert delivery.place == RecordMetadata(TOPIC, 2, -1, -1, -1, -1)


def test_callback_of_record_for_missing_partition_names_it() -> None:
    harness = warm({**AT_ONCE, "max.block.ms": "100"}, topics={TOPIC: 3})
    delivery = harness.send(b"v", partition=7)
    assert isinstance(delivery.error, KafkaTimeoutError)
    assert delivery.place == RecordMetadata(TOPIC, 7, -1, -1, -1, -1)


def test_send_wakes_the_sender_only_for_new_and_full_batches() -> None:
    harness = warm({"linger.ms": "1000", "batch.size": "200"})
    woken: list[int] = []
    harness.client.wakeup = lambda: woken.append(1)
    counts = []
    for _ in range(5):
        harness.send(bytes(60))
        counts.append(len(woken))
    assert counts == [1, 1, 2, 3, 4]


# ---- the partition -------------------------------------------------------------------------------------------------


def test_key_decides_the_partition_unless_it_is_ignored() -> None:
    harness = warm(topics={TOPIC: 5})
    keys = [b"%d" % index for index in range(20)]
    deliveries = [harness.send(b"v", key=key) for key in keys]
    harness.settle()
    assert [d.metadata.partition for d in deliveries if d.metadata] == [partition_for_key(key, 5) for key in keys]
    harness = warm({**AT_ONCE, "partitioner.ignore.keys": "true"}, topics={TOPIC: 5})
    deliveries = [harness.send(b"v", key=key) for key in keys]
    harness.settle()
    assert len({d.metadata.partition for d in deliveries if d.metadata}) == 1


@pytest.mark.parametrize("shown", [[0, 2, 3, 4], [0, 4], [1], [-1, 0, 1, 2, 3]])
def test_metadata_with_missing_partitions_moves_no_key(shown: list[int], caplog: pytest.LogCaptureFixture) -> None:
    """Bug: an answer that left a partition out made the topic smaller, and keys went to other partitions."""

    def show(values: dict[str, Any]) -> dict[str, Any]:
        for topic in values["topics"]:
            numbered = {each["partition_index"]: each for each in topic["partitions"]}
            some = next(iter(numbered.values()))
            topic["partitions"] = [numbered.get(index, {**some, "partition_index": index}) for index in shown]
        return values

    harness = ProducerHarness(AT_ONCE, topics={TOPIC: 5})
    harness.cluster.on(ApiKey.METADATA, faults.change(show), times=2)
    keys = [b"%d" % index for index in range(20)]
    deliveries = [harness.send(b"v", key=key) for key in keys]
    harness.settle()
    assert [d.metadata.partition for d in deliveries if d.metadata] == [partition_for_key(key, 5) for key in keys]
    assert f"topic {TOPIC}: The answer leaves out some of its partitions" in caplog.text


def test_given_partition_wins_over_the_key() -> None:
    harness = warm(topics={TOPIC: 5})
    other = (partition_for_key(b"k", 5) + 1) % 5
    delivery = harness.send(b"v", key=b"k", partition=other)
    harness.settle()
    assert delivery.metadata is not None
    assert delivery.metadata.partition == other


def test_records_without_key_stay_for_batch_size_bytes() -> None:
    harness = warm({"linger.ms": "10", "batch.size": "1000"}, topics={TOPIC: 4})
    deliveries = [harness.send(bytes(70)) for _ in range(100)]
    harness.settle()
    partitions = [d.metadata.partition for d in deliveries if d.metadata]
    switches = sum(one != two for one, two in itertools.pairwise(partitions))
    assert 5 <= switches <= 15
    assert set(partitions) == {0, 1, 2, 3}


# ---- columns ---------------------------------------------------------------------------------------------------------


def test_rows_of_columns_go_to_their_partitions_in_order() -> None:
    harness = warm(topics={TOPIC: 3})
    values = [b"%03d" % index for index in range(300)]
    delivery = harness.send_columns(RecordColumns.from_rows(values, partitions=[index % 3 for index in range(300)]))
    harness.settle()
    assert [harness.values(partition=index) for index in range(3)] == [values[index::3] for index in range(3)]
    assert delivery.settled_rows == 300
    assert all(error is None for _, error in delivery.runs)
    assert harness.memory_in_use == 0


def test_rows_with_keys_and_rows_without_share_a_call() -> None:
    harness = warm(topics={TOPIC: 3})
    keys = [None if index % 2 else b"key%d" % index for index in range(100)]
    delivery = harness.send_columns(RecordColumns.from_rows([b"%d" % i for i in range(100)], keys=keys))
    harness.settle()
    assert delivery.settled_rows == 100
    seen = {record.value: index for index in range(3) for record in harness.cluster.records(TOPIC)[index]}
    for index, key in enumerate(keys):
        if key is not None:
            assert seen[b"%d" % index] == partition_for_key(key, 3)
    free = [index for index, key in enumerate(keys) if key is None]
    assert len({seen[b"%d" % index] for index in free}) == 1  # few bytes, so they stay together


def test_rows_that_may_go_anywhere_are_spread_by_batch_size() -> None:
    harness = warm({"linger.ms": "0", "batch.size": "1000"}, topics={TOPIC: 4})
    values = [b"%04d" % index + bytes(60) for index in range(200)]
    delivery = harness.send_columns(RecordColumns.from_rows(values))
    harness.settle()
    assert delivery.settled_rows == 200
    arrived = [harness.values(partition=index) for index in range(4)]
    assert sorted(value for log in arrived for value in log if value) == values
    assert all(log == sorted(value or b"" for value in log) for log in arrived)
    assert all(arrived)


def test_a_block_larger_than_a_share_of_memory_is_cut() -> None:
    harness = warm({**AT_ONCE, "buffer.memory": "4000", "batch.size": "500"})
    values = [b"%03d" % index + bytes(50) for index in range(200)]
    delivery = harness.send_columns(RecordColumns.from_rows(values, partitions=[0] * 200))
    harness.settle()
    assert harness.values() == values
    assert delivery.settled_rows == 200
    assert harness.memory_in_use == 0
    free = harness.send_columns(RecordColumns.from_rows(values))
    harness.settle()
    assert free.settled_rows == 200
    assert harness.values() == values * 2


def test_many_rows_go_in_blocks() -> None:
    harness = warm()
    rows = MAX_BLOCK_ROWS + 10
    columns = RecordColumns(value=pa.array([b"v"] * rows, pa.binary()), partition=pa.array([0] * rows, pa.int32()))
    delivery = harness.send_columns(columns)
    harness.settle()
    assert delivery.settled_rows == rows
    assert len(harness.values()) == rows


def test_partition_below_0_is_refused_with_topic_and_column() -> None:
    harness = warm(topics={TOPIC: 3})
    text = f"Row 1 asks for partition -1; topic {TOPIC} has 0 to 2: change the column partition"
    with pytest.raises(SerializationError, match=text):
        harness.send_columns(RecordColumns.from_rows([b"a", b"b"], partitions=[0, -1]))
    assert not harness.accumulator.has_incomplete


def test_oversized_rows_are_cut_into_blocks_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []

    def made(columns: RecordColumns, *rest: Any) -> Block:
        sizes.append(columns.num_rows)
        return Block(columns, *rest)

    monkeypatch.setattr(kafka_producer, "Block", made)
    harness = warm({**AT_ONCE, "buffer.memory": "600000"})
    values = [b"%04d" % row + bytes(96) for row in range(1_500)]
    delivery = harness.send_columns(RecordColumns.from_rows(values, partitions=[0] * 1_500))
    harness.run_until(lambda: delivery.settled_rows == 1_500)
    assert harness.values() == values
    assert sizes == [375] * 4


@pytest.mark.parametrize("batch_size", ["200", "16384"], ids=["many batches", "one batch"])
def test_rows_with_and_without_a_partition_keep_their_order(batch_size: str) -> None:
    """Bug: in one call rows with a key or a partition were sent before those without, so that a partition of both had
    another order than the rows.
    """
    harness = warm({**AT_ONCE, "batch.size": batch_size}, topics={TOPIC: 3})
    rows = 1_000
    keys = [None if row % 3 == 0 else b"%d" % (row % 7) for row in range(rows)]
    partitions = [row % 2 if row % 5 == 0 else None for row in range(rows)]
    harness.send_columns(RecordColumns.from_rows([b"%d" % row for row in range(rows)], keys, partitions=partitions))
    harness.settle()
    written = [[int(value or b"") for value in harness.values(partition=partition)] for partition in range(3)]
    assert sorted(itertools.chain(*written)) == list(range(rows))
    assert [sorted(found) for found in written] == written
    free = {row for row in range(rows) if keys[row] is None and partitions[row] is None}
    assert sum(bool(free & set(found)) for found in written) == (3 if batch_size == "200" else 1)
    assert harness.memory_in_use == 0


def test_no_rows_send_nothing() -> None:
    harness = warm()
    harness.send_columns(RecordColumns.from_rows([]))
    assert not harness.accumulator.has_incomplete


def test_too_large_row_is_refused_without_memory() -> None:
    harness = warm({**AT_ONCE, "max.request.size": "1000"})
    with pytest.raises(RecordTooLargeError, match=r"max\.request\.size=1000"):
        harness.producer.send_columns(TOPIC, RecordColumns.from_rows([b"a", bytes(2_000)]))
    assert harness.memory_in_use == 0


@pytest.mark.parametrize("setting", ["max.request.size", "buffer.memory"])
@pytest.mark.parametrize("headers", [None, [("trace", b"1")]])
def test_columns_and_send_have_the_same_size_limit(
    setting: str, headers: list[tuple[str, bytes | None]] | None
) -> None:
    value = b"v" * 1_000
    limit = record_size_upper_bound(None, value, headers or ()) + HEADER_SIZE
    harness = warm({**AT_ONCE, setting: str(limit)})
    rows = [b"a", value]
    assert harness.send(value, headers=headers).error is None
    harness.settle()
    harness.send_columns(RecordColumns.from_rows(rows, headers=[None, headers]))
    harness.settle()
    assert sorted(each or b"" for each in harness.values()) == sorted([value, *rows])
    assert harness.memory_in_use == 0
    too_large = f"takes {limit + 1} bytes, more than {re.escape(setting)}={limit}"
    with pytest.raises(RecordTooLargeError, match=too_large):
        harness.producer.send_columns(TOPIC, RecordColumns.from_rows([b"a", value + b"v"], headers=[None, headers]))
    assert isinstance(harness.send(value + b"v", headers=headers).error, RecordTooLargeError)


def test_refused_row_is_named_by_its_place_in_the_call() -> None:
    harness = warm()
    partitions = [0] * 70_001
    partitions[70_000] = -5
    with pytest.raises(SerializationError, match="Row 70000 asks for partition -5"):
        harness.producer.send_columns(TOPIC, RecordColumns.from_rows([b"v"] * 70_001, partitions=partitions))


def test_columns_without_a_callback_are_sent() -> None:
    harness = warm()
    harness.producer.send_columns(TOPIC, RecordColumns.from_rows([b"a", b"b"]))
    harness.run_until(lambda: not harness.accumulator.has_incomplete)
    assert harness.values() == [b"a", b"b"]
    assert harness.memory_in_use == 0


def test_single_failed_rows_are_reported_in_stretches() -> None:
    harness = warm()
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_records(InvalidRecordError, {2: "bad"}))
    delivery = harness.send_columns(RecordColumns.from_rows([b"%d" % index for index in range(5)]))
    harness.settle()
    assert [(run.record_count, run.base_offset) for run, _ in delivery.runs] == [(2, -1), (1, -1), (2, -1)]
    assert ["Other records" in str(error) for _, error in delivery.runs] == [True, False, True]
    assert all("bad" in str(error) for _, error in delivery.runs)


# ---- metadata --------------------------------------------------------------------------------------------------------


def test_only_the_first_send_requests_its_topic() -> None:
    harness = ProducerHarness(AT_ONCE)
    harness.run_for(1)
    assert harness.cluster.requests_of(ApiKey.METADATA) == []  # no request before the first use
    harness.send()
    harness.settle()
    (exchange,) = harness.cluster.requests_of(ApiKey.METADATA)
    assert [topic.name for topic in exchange.request.topics] == [TOPIC]
    harness.send()
    harness.settle()
    assert len(harness.cluster.requests_of(ApiKey.METADATA)) == 1


def test_request_for_a_new_topic_names_only_that_topic() -> None:
    harness = warm(topics={TOPIC: 1, "other": 1, "third": 1})
    harness.cluster.create_topic("new", 1)
    harness.send(topic="new")
    (exchange,) = harness.cluster.requests_of(ApiKey.METADATA)
    assert [topic.name for topic in exchange.request.topics] == ["new"]
    assert harness.metadata.fetch().partition_count_for_topic("third") == 1


def test_topics_looked_up_together_take_one_request() -> None:
    harness = warm(topics={TOPIC: 1} | {f"t{number}": 1 for number in range(5)})
    names = [f"new-{number}" for number in range(50)]
    for name in names:
        harness.cluster.create_topic(name, 1)
    harness.producer.look_up([*names, "not text: \ud800", TOPIC])
    for name in names:
        harness.send(topic=name)
    (exchange,) = harness.cluster.requests_of(ApiKey.METADATA)
    assert [topic.name for topic in exchange.request.topics] == sorted(names)
    harness.settle()
    assert all(delivery.error is None for delivery in harness.deliveries)


def test_refused_topic_fails_only_its_own_send() -> None:
    harness = warm()
    harness.cluster.create_topic("new", 1)
    harness.producer.look_up(["new", "missing"])
    new = harness.send(topic="new")
    missing = harness.send(topic="missing")
    harness.settle()
    assert new.error is None
    assert isinstance(missing.error, KafkaTimeoutError)


def test_missing_topic_fails_at_max_block_ms() -> None:
    """Row 18."""
    harness = warm({**AT_ONCE, "max.block.ms": "2000"})
    delivery = harness.send(topic="missing")
    assert isinstance(delivery.error, KafkaTimeoutError)
    assert "Topic missing" in str(delivery.error)
    assert "max.block.ms=2000" in str(delivery.error)
    assert 2_000 <= harness.now_ms - delivery.sent_ms <= 2_100


@pytest.mark.parametrize("is_first", [True, False])
def test_topic_missing_in_each_answer_is_asked_for_with_pauses(is_first: bool) -> None:
    """Bug: a send asked again as soon as an answer had come without its topic, thousands of times in max.block.ms."""
    settings = {**AT_ONCE, "max.block.ms": "10000"}
    harness = ProducerHarness(settings) if is_first else warm(settings)
    leave_out = faults.change(lambda values: {**values, "topics": [t for t in values["topics"] if t["name"] == TOPIC]})
    harness.cluster.on(ApiKey.METADATA, leave_out, times=None)
    assert isinstance(harness.send(topic="left-out").error, KafkaTimeoutError)
    assert len(harness.cluster.requests_of(ApiKey.METADATA)) < 25
    harness.cluster.scripts.clear()
    harness.cluster.create_topic("left-out", 1)
    delivery = harness.send(topic="left-out")
    harness.settle()
    assert delivery.error is None


@pytest.mark.parametrize(
    ("error_code", "cause"),
    [
        (ErrorCode.unknown_topic_or_partition, UnknownTopicOrPartitionError),
        (ErrorCode.leader_not_available, LeaderNotAvailableError),
    ],
)
def test_a_metadata_timeout_has_the_brokers_answer_as_cause(error_code: int, cause: type[KafkaError]) -> None:
    harness = warm({**AT_ONCE, "max.block.ms": "2000"})
    harness.cluster.on(ApiKey.METADATA, faults.refuse_topic("missing", error_code), times=None)
    error = harness.send(topic="missing").error
    assert isinstance(error, KafkaTimeoutError)
    assert isinstance(error.__cause__, cause)
    assert str(error.__cause__).startswith("Topic missing: ")
    with pytest.raises(KafkaTimeoutError) as raised:
        harness.producer.partitions_for("missing")
    assert isinstance(raised.value.__cause__, cause)


def test_refusal_at_the_time_limit_is_the_timeouts_cause() -> None:
    harness = warm({**AT_ONCE, "max.block.ms": "2000"})
    refuse = faults.refuse_topic("missing", UnknownTopicOrPartitionError)

    def at_the_limit(*about: Any) -> Answer:
        return dataclasses.replace(refuse(*about), delay_ms=1_998)  # and 1 ms in each direction

    harness.cluster.on(ApiKey.METADATA, at_the_limit)
    delivery = harness.send(topic="missing")
    assert harness.now_ms - delivery.sent_ms == 2_000
    assert isinstance(delivery.error, KafkaTimeoutError)
    assert isinstance(delivery.error.__cause__, UnknownTopicOrPartitionError)


def test_wait_for_metadata_wakes_the_sender() -> None:
    harness = ProducerHarness(AT_ONCE)
    woken: list[int] = []
    harness.client.wakeup = lambda: woken.append(1)
    harness.producer.partitions_for(TOPIC)
    assert woken


def test_topic_that_appears_meanwhile_gets_the_record() -> None:
    harness = warm()
    harness.selector.at(harness.now_ms + 700, lambda: harness.cluster.create_topic("late", 1))
    delivery = harness.send(topic="late")
    assert 700 <= harness.now_ms - delivery.sent_ms <= 2_500
    harness.settle()
    assert delivery.error is None


def test_unknown_partition_requests_metadata_and_fails_with_count() -> None:
    harness = warm({**AT_ONCE, "max.block.ms": "2000"}, topics={TOPIC: 3})
    delivery = harness.send(partition=3)
    assert "Partition 3 of topic flights with 3 partitions" in str(delivery.error)
    assert "use 0 to 2" in str(delivery.error)
    harness.cluster.add_partitions(TOPIC, 1)
    delivery = harness.send(partition=3)
    harness.settle()
    assert delivery.error is None


@pytest.mark.parametrize("stamp", [-1, -2, 1_764_000_000_000_000])
def test_columns_with_impossible_timestamp_are_refused(stamp: int) -> None:
    """Bug: they went to the broker, which refused the whole batch."""
    harness = warm()
    columns = RecordColumns.from_rows([b"a", b"b"], timestamps_ms=[1_764_000_000_000, stamp])
    with pytest.raises(SerializationError, match=rf"A timestamp_ms for topic {TOPIC} is {stamp}"):
        harness.producer.send_columns(TOPIC, columns)
    harness.settle()
    assert harness.values() == []
    assert harness.memory_in_use == 0


def test_timestamps_probably_in_seconds_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    for is_columns_first in (True, False):
        harness = warm()
        caplog.clear()
        for by_columns in (is_columns_first, not is_columns_first):
            if by_columns:
                harness.send_columns(RecordColumns.from_rows([b"a"], timestamps_ms=[1_764_000_000]))
            else:
                harness.send(b"a", timestamp_ms=1_764_000_000)
            assert ["looks like seconds" in line for line in caplog.messages].count(True) == 1


def test_columns_for_unknown_partition_wait_for_it() -> None:
    harness = warm(topics={TOPIC: 1})
    harness.selector.at(harness.now_ms + 300, lambda: harness.cluster.add_partitions(TOPIC, 1))
    delivery = harness.send_columns(RecordColumns.from_rows([b"a"], partitions=[1]))
    harness.settle()
    assert harness.values(partition=1) == [b"a"]
    assert delivery.settled_rows == 1


@pytest.mark.parametrize(
    ("name", "wrong"), [("partition", 0.0), ("partition", "0"), ("timestamp_ms", 1.5), ("timestamp_ms", "1")]
)
def test_fraction_is_refused_without_harm_to_other_records(name: str, wrong: Any) -> None:
    """Bug: partition 0.0 failed later records for partition 0, and a fractional timestamp failed its whole batch."""
    harness = ProducerHarness({"linger.ms": "50"})
    first = harness.send(b"first", partition=0)
    with pytest.raises(SerializationError, match=f"{name}=.* int"):
        harness.send(b"wrong", **{name: wrong})
    numbers: dict[str, Any] = {"partition": np.int64(0), "timestamp_ms": np.int64(5)}
    second = harness.send(b"second", **numbers)
    harness.settle()
    assert (first.error, second.error) == (None, None)
    assert harness.values() == [b"first", b"second"]


@pytest.mark.parametrize("topic", ["a b", "orders ", "..", "x" * 250, ""])
def test_an_invalid_topic_fails_at_once_and_others_flow(topic: str) -> None:
    """Row 51."""
    harness = warm()
    for limit_ms in (50, 0):  # the second time without a request
        delivery = harness.send(topic=topic)
        assert isinstance(delivery.error, InvalidTopicError)
        assert f"Topic '{topic}': " in str(delivery.error)
        assert harness.now_ms - delivery.sent_ms <= limit_ms
    good = harness.send(b"good")
    harness.settle()
    assert good.error is None


def test_send_does_not_keep_invalid_topic_in_metadata() -> None:
    harness = warm()
    first = harness.send(topic="not valid")
    harness.run_for(1_000)
    assert isinstance(harness.send(topic="not valid").error, InvalidTopicError)
    assert first.settled_ms is not None
    assert not harness.metadata.retain_topic("not valid", first.settled_ms + harness.config.metadata_max_idle_ms)


def test_a_send_renews_the_idle_time_of_its_topic() -> None:
    harness = warm({**AT_ONCE, "metadata.max.idle.ms": "5000"})
    harness.run_for(4_000)
    delivery = harness.send(b"x")
    assert harness.metadata.retain_topic(TOPIC, delivery.sent_ms + 4_999)
    assert not harness.metadata.retain_topic(TOPIC, delivery.sent_ms + 5_000)


def test_metadata_keeps_topic_while_send_waits() -> None:
    """The wait may last longer than metadata.max.idle.ms."""
    harness = warm({**AT_ONCE, "metadata.max.idle.ms": "5000", "max.block.ms": "20000"}, topics={TOPIC: 1})
    harness.selector.at(harness.now_ms + 8_000, lambda: harness.cluster.add_partitions(TOPIC, 1))
    delivery = harness.send(b"x", partition=1)
    harness.settle()
    assert delivery.error is None
    asked = [exchange.request.topics for exchange in harness.cluster.requests_of(ApiKey.METADATA)]
    assert all([str(topic.name) for topic in topics] == [TOPIC] for topics in asked)


@pytest.mark.parametrize("topic", ["x" * 32_768, "é" * 16_384])
def test_topic_too_long_for_a_request_fails_at_once(topic: str) -> None:
    """A broker closes the connection after such a request, and the next request would ask for the same topic."""
    harness = warm()
    harness.producer.look_up([topic])
    delivery = harness.send(topic=topic)
    assert isinstance(delivery.error, InvalidTopicError)
    assert len(str(delivery.error)) < 1_000
    assert harness.now_ms == delivery.sent_ms
    assert topic not in harness.known_topics


@pytest.mark.parametrize("topic", [b"flights", None, 7, ["flights"], "half a pair \ud800"])
def test_topic_that_is_no_text_fails_without_harm_to_others(topic: Any) -> None:
    harness = ProducerHarness()
    assert isinstance(harness.send(topic=topic).error, InvalidTopicError)
    with pytest.raises(InvalidTopicError):
        harness.send_columns(RecordColumns.from_rows([b"1"]), topic)
    with pytest.raises(InvalidTopicError):
        harness.producer.partitions_for(topic)
    assert harness.turns == 0
    harness.deliveries.clear()
    harness.warm_up()
    harness.run_for(harness.config.metadata_max_age_ms + 1_000)
    harness.warm_up()


def test_an_unauthorized_topic_fails_at_once() -> None:
    harness = warm()
    harness.cluster.create_topic("secret", 1)
    harness.cluster.on(ApiKey.METADATA, faults.refuse_topic("secret", TopicAuthorizationError), times=None)
    delivery = harness.send(topic="secret")
    assert isinstance(delivery.error, TopicAuthorizationError)
    assert "secret" in str(delivery.error)
    assert harness.now_ms - delivery.sent_ms <= 50


def test_error_without_any_broker_names_the_addresses() -> None:
    harness = ProducerHarness({**AT_ONCE, "max.block.ms": "1500"})
    harness.network.stop(0)
    delivery = harness.send()
    assert isinstance(delivery.error, KafkaTimeoutError)
    assert "bootstrap.servers=broker-0:9092" in str(delivery.error)
    assert harness.now_ms - delivery.sent_ms <= 1_700


def test_partitions_for_asks_for_the_topic() -> None:
    harness = ProducerHarness(AT_ONCE, topics={TOPIC: 4}, node_count=2)
    infos = harness.producer.partitions_for(TOPIC)
    assert [(info.partition, info.leader.id) for info in infos if info.leader] == [(0, 0), (1, 1), (2, 0), (3, 1)]


# ---- row 45: memory full ---------------------------------------------------------------------------------------------


def test_full_buffer_fails_after_max_block_ms_and_recovers() -> None:
    harness = warm({**AT_ONCE, "buffer.memory": "5000", "max.block.ms": "2000", "batch.size": "500"})
    harness.network.stalled.add(0)
    sent = [harness.send(bytes(400)) for _ in range(13)]
    blocked = [delivery for delivery in sent if isinstance(delivery.error, BufferExhaustedError)]
    assert blocked == sent[11:]
    assert [delivery.took_ms for delivery in blocked] == [2_000, 2_000]
    assert harness.memory_in_use <= 5_000
    harness.network.stalled.clear()
    harness.settle()
    assert [delivery.error for delivery in sent[:11]] == [None] * 11
    assert harness.memory_in_use == 0
    after = harness.send(bytes(400))
    harness.settle()
    assert after.error is None


ONE_ROW = [bytes(200)]


@pytest.mark.parametrize(
    "columns",
    [None, RecordColumns.from_rows(ONE_ROW), RecordColumns.from_rows(ONE_ROW, partitions=[0])],
    ids=["send", "columns", "columns with partitions"],
)
def test_one_max_block_ms_covers_metadata_and_memory(columns: RecordColumns | None) -> None:
    harness = warm({"buffer.memory": "1000", "max.block.ms": "2000"})
    harness.cluster.create_topic("late", 1)
    harness.accumulator.pool.allocate(900, 0, Grant())
    harness.cluster.on(ApiKey.METADATA, faults.delay(1_500))
    began_ms = harness.now_ms
    if columns is None:
        assert isinstance(harness.send(bytes(200), "late").error, BufferExhaustedError)
    else:
        with pytest.raises(BufferExhaustedError):
            harness.send_columns(columns, "late")
    assert 2_000 <= harness.now_ms - began_ms <= 2_010


def test_max_block_ms_limits_each_block_of_a_call() -> None:
    settings = {"buffer.memory": "60000", "batch.size": "9000", "max.request.size": "20000", "linger.ms": "0"}
    harness = warm({**settings, "max.block.ms": "5000", "enable.idempotence": "false"})
    harness.cluster.on(ApiKey.PRODUCE, faults.delay(1500), times=None)
    columns = RecordColumns.from_rows([bytes(500)] * 600)
    began_ms = harness.now_ms
    delivery = harness.send_columns(columns)
    assert harness.now_ms - began_ms > 5_000
    harness.settle()
    assert all(error is None for _, error in delivery.runs)
    harness.network.stalled.add(0)
    began_ms, blocked_ms = harness.now_ms, []
    allocate = harness.accumulator.pool.allocate

    def timed(size: int, max_block_ms: int, grant: Grant) -> int:
        started_ms = harness.now_ms
        try:
            return allocate(size, max_block_ms, grant)
        finally:
            blocked_ms.append(harness.now_ms - started_ms)

    harness.accumulator.pool.allocate = timed
    with pytest.raises(BufferExhaustedError, match=r"max\.block\.ms=5000"):
        harness.send_columns(columns)
    assert (blocked_ms[-1], max(blocked_ms)) == (5_000, 5_000)


def test_wait_for_memory_ends_the_linger() -> None:
    harness = warm({"linger.ms": "30000", "delivery.timeout.ms": "90000", "buffer.memory": "2000"})
    deliveries = [harness.send(bytes(400)) for _ in range(12)]
    assert all(delivery.error is None for delivery in deliveries)
    assert harness.now_ms - deliveries[0].sent_ms < 1_000


def test_wait_for_memory_wakes_a_lingering_sender() -> None:
    settings = {"linger.ms": "8000", "buffer.memory": "2000", "batch.size": "100000", "max.request.size": "1900"}
    harness = warm({**settings, "max.block.ms": "5000"})
    deliveries = [harness.send(bytes(900), partition=0) for _ in range(2)]
    harness.turn(0)  # nothing must be sent
    woken: list[int] = []
    harness.client.wakeup = lambda: woken.append(1)

    def wait(timeout_ms: int) -> None:
        if woken:
            harness.turn(1)
        else:
            harness.clock.advance(timeout_ms)

    harness.clock.on_wait = wait
    deliveries.append(harness.send(bytes(900), partition=0))
    harness.settle()
    assert [delivery.error for delivery in deliveries] == [None] * 3


# ---- flush -----------------------------------------------------------------------------------------------------------


def test_flush_sends_lingering_batches_and_returns_after_callbacks() -> None:
    harness = warm({"linger.ms": "60000"})
    deliveries = [harness.send(b"%d" % index) for index in range(5)]
    start_ms = harness.now_ms
    seen: list[bool] = []

    def flush() -> None:
        harness.producer.flush()
        seen.append(all(delivery.is_settled for delivery in deliveries))

    thread = threading.Thread(target=flush, daemon=True)
    begun = threading.Event()
    harness.client.wakeup = begun.set
    thread.start()
    assert begun.wait(JOIN_S)
    harness.settle()
    thread.join(JOIN_S)
    assert seen == [True]
    assert harness.now_ms - start_ms < 100


def test_flush_that_takes_too_long_raises_a_timeout() -> None:
    harness = warm({"linger.ms": "1000"})
    harness.send()
    with pytest.raises(KafkaTimeoutError, match="flush of 0 ms"):
        harness.producer.flush(timeout=0)
    harness.settle()
    harness.producer.flush(timeout=0)


@pytest.mark.parametrize("number", [np.uint64, np.int64, int])
def test_batch_takes_timestamps_of_any_whole_type(number: Callable[[int], Any]) -> None:
    """Bug: more than 32 of numpy's unsigned timestamps made their batch fail, because their differences were floats."""
    harness = ProducerHarness({"linger.ms": "100"})
    stamps = [1_700_000_000_000 + index for index in range(40)]
    deliveries = [harness.send(timestamp_ms=number(stamp)) for stamp in stamps]
    harness.settle()
    assert [each.error for each in deliveries] == [None] * 40
    assert [record.timestamp_ms for record in harness.cluster.records(TOPIC)[0]] == stamps
    assert harness.sent_batches() == 1


# ---- close, fork, failure --------------------------------------------------------------------------------------------


def test_a_closed_producer_refuses_everything_and_closes_twice() -> None:
    harness = warm()
    harness.close()
    harness.producer.close()
    for call in (
        lambda: harness.producer.send(TOPIC, b"v"),
        lambda: harness.producer.send_columns(TOPIC, RecordColumns.from_rows([b"v"])),
        lambda: harness.producer.partitions_for(TOPIC),
    ):
        with pytest.raises(ProducerClosedError):
            call()
    assert repr(harness.producer).startswith("KafkaProducer(closed")


@pytest.mark.parametrize("timeout", [-100, -0.1, float("-inf")])
def test_close_refuses_negative_timeout_and_closes_nothing(timeout: float) -> None:
    harness = warm()
    with pytest.raises(IllegalStateError, match=rf"close\(timeout={timeout}\): give seconds"):
        harness.producer.close(timeout)
    harness.send(b"after")
    harness.settle()
    assert harness.values() == [b"after"]


def test_send_waiting_for_metadata_ends_with_the_close() -> None:
    harness = ProducerHarness(AT_ONCE)
    harness.clock.on_wait = lambda timeout_ms: harness.close()
    with pytest.raises(ProducerClosedError):
        harness.producer.send("nowhere", b"v")


def test_send_waiting_for_memory_ends_with_the_close() -> None:
    harness = warm({**AT_ONCE, "buffer.memory": "1000"})
    harness.network.stalled.add(0)
    harness.send(bytes(700))
    harness.clock.on_wait = lambda timeout_ms: harness.producer.close()
    with pytest.raises(ProducerClosedError):
        harness.producer.send(TOPIC, bytes(700))


def test_forked_child_cannot_use_the_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 43. Bug: repr and metrics waited without end for a lock that another thread held at the fork."""
    harness = warm()
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for call in (
        lambda: harness.producer.send(TOPIC, b"v"),
        lambda: harness.producer.send_columns(TOPIC, RecordColumns.from_rows([b"v"])),
        lambda: harness.producer.partitions_for(TOPIC),
        harness.producer.flush,
        harness.producer.metrics,
        harness.producer.topic_metrics,
        harness.producer.node_metrics,
        harness.producer.connection_metrics,
    ):
        with pytest.raises(IllegalStateError, match="after a fork"):
            call()
    harness.producer.close()
    with harness.accumulator._lock:  # as another thread of the parent could at the fork
        assert repr(harness.producer) == f"KafkaProducer(of process {parent})"
    monkeypatch.undo()
    harness.send()  # the parent's producer is unchanged
    harness.settle()


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError):
        KafkaProducer({"bootstrap.servers": "localhost:1", "no.such.key": "1"})


# ---- with its own thread ---------------------------------------------------------------------------------------------


def test_generated_client_ids_are_numbered() -> None:
    first, second = (ProducerHarness().producer for _ in range(2))
    assert re.fullmatch(r"producer-[1-9]\d*", first.client_id)
    assert second.client_id == f"producer-{int(first.client_id.removeprefix('producer-')) + 1}"
    assert first.client_id in repr(first)


@pytest.mark.parametrize(
    ("settings", "client_id"),
    [
        ({"transactional.id": "orders-7"}, "producer-orders-7"),
        ({"transactional.id": "orders-7", "client.id": "mine"}, "mine"),
        ({"client.id": "mine"}, "mine"),
    ],
)
def test_client_id_is_set_or_from_transactional_id(settings: dict[str, str], client_id: str) -> None:
    with threaded(**settings) as producer:
        assert producer.client_id == producer.config.client_id == client_id
        assert [thread.name for thread in producer_threads()] == [f"kafka-producer-network-thread-{client_id}"]


def test_close_leaves_no_thread() -> None:
    """Row 52."""
    with threaded(**{"client.id": "here"}) as producer:
        assert [thread.name for thread in producer_threads()] == ["kafka-producer-network-thread-here"]
        assert isinstance(producer.send(TOPIC, b"v").exception(), KafkaTimeoutError)
        assert not producer.has_failed
    assert producer_threads() == []
    assert not producer.has_failed


def test_close_with_a_limit_fails_the_remaining_records() -> None:
    producer = threaded_with_topic(TOPIC)
    future = producer.send(TOPIC, b"v")
    producer.close(timeout=0.02)
    assert producer_threads() == []
    assert isinstance(future.exception(), ProducerClosedError)


def test_close_with_limit_does_not_wait_for_dns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: it waited for the lookup of the Sender's thread, which takes tens of seconds if the DNS does not answer."""
    look_up, is_asked, answer = socket.getaddrinfo, threading.Event(), threading.Event()

    def silent(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread() in producer_threads():
            is_asked.set()
            answer.wait(2 * JOIN_S)
        return look_up(*arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    producer = threaded_with_topic(TOPIC)
    future = producer.send(TOPIC, b"v")
    assert is_asked.wait(JOIN_S)
    began = time.monotonic()
    producer.close(timeout=0.2)
    assert time.monotonic() - began < JOIN_S
    assert "is delayed" in caplog.text
    producer.close(timeout=0)
    (thread,) = producer_threads()
    answer.set()
    thread.join(JOIN_S)
    assert producer_threads() == []
    assert isinstance(future.exception(), ProducerClosedError)
    producer.close()


def test_leaving_after_an_error_does_not_wait() -> None:
    producer = threaded_with_topic(TOPIC)
    future = producer.send(TOPIC, b"v")
    producer.__exit__(RuntimeError, RuntimeError("mine"), None)
    assert producer_threads() == []
    assert isinstance(future.exception(), ProducerClosedError)


@pytest.mark.parametrize(
    ("end", "is_error"),
    [
        (SystemExit(0), False),
        (SystemExit(), False),
        (GeneratorExit(), False),
        (SystemExit(1), True),
        (KeyboardInterrupt(), True),
    ],
    ids=repr,
)
def test_end_of_a_program_or_a_generator_is_no_error(
    end: BaseException, is_error: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: `sys.exit(0)` in the with block dropped all records that were not acknowledged, and no line said so."""
    producer = threaded_with_topic(TOPIC, **EXPIRES_AT_ONCE)
    future = producer.send(TOPIC, b"v")
    producer.__exit__(type(end), end, None)
    assert isinstance(future.exception(), ProducerClosedError) is is_error
    dropped = f"{type(end).__name__} ended the with block: records without an acknowledgement are dropped"
    assert (dropped in caplog.messages) is is_error


def test_producer_without_its_thread_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    producer = threaded()
    thread = sender_thread(producer)
    assert not producer.has_failed
    producer.sender.run_once = Mock(side_effect=SystemExit)
    producer.sender.wakeup()
    thread.join(JOIN_S)
    assert producer.has_failed
    producer.close()


def test_a_callback_may_close_and_may_not_flush() -> None:
    producer = threaded_with_topic(TOPIC, **EXPIRES_AT_ONCE)
    thread = sender_thread(producer)
    outcomes: list[object] = []
    done = threading.Event()

    def on_completion(metadata: object, error: object) -> None:
        try:
            producer.flush()
        except IllegalStateError as refusal:
            outcomes.append(refusal)
        producer.close()
        done.set()

    producer.send(TOPIC, b"v", on_completion=on_completion)
    assert done.wait(JOIN_S)
    thread.join(JOIN_S)
    assert not thread.is_alive()
    assert "would wait for its own thread" in str(outcomes[0])


def test_callback_may_not_wait_for_a_record_of_its_producer() -> None:
    """Bug: the Sender's thread waited for itself, past delivery.timeout.ms, and so did flush and close."""
    producer = threaded_with_topic(TOPIC, **EXPIRES_AT_ONCE)
    outcomes: list[BaseException] = []
    done = threading.Event()

    def on_completion(metadata: object, error: object) -> None:
        try:
            producer.send(TOPIC, b"next").result()
        except IllegalStateError as refusal:
            outcomes.append(refusal)
        done.set()

    future = producer.send(TOPIC, b"v", on_completion=on_completion)
    assert done.wait(JOIN_S)
    assert "Give that record a callback, or wait for its future in another thread." in str(outcomes[0])
    with pytest.raises(KafkaError):
        future.result(JOIN_S)
    producer.close(0)


@pytest.mark.parametrize("missing", ["the metadata of topic unknown", "buffer.memory"])
def test_send_in_callback_does_not_wait_for_itself(missing: str) -> None:
    producer = threaded_with_topic(TOPIC, **EXPIRES_AT_ONCE, **{"max.block.ms": "8000", "buffer.memory": "1000"})
    outcomes: list[BaseException | None] = []
    done = threading.Event()

    def on_completion(metadata: object, error: object) -> None:
        topic = TOPIC if missing == "buffer.memory" else "unknown"
        outcomes.append(producer.send(topic, bytes(700)).exception())
        done.set()

    producer.send(TOPIC, bytes(700), on_completion=on_completion)
    is_done = done.wait(JOIN_S)
    producer.close(0)
    assert is_done
    assert isinstance(outcomes[0], KafkaTimeoutError)
    assert f"own thread, cannot wait for {missing}" in str(outcomes[0])


def test_metadata_uses_the_configured_backoff_and_ages() -> None:
    ages = {"retry.backoff.ms": "70", "metadata.max.age.ms": "7000", "metadata.max.idle.ms": "9000"}
    config = ProducerConfig.from_mapping({"bootstrap.servers": "127.0.0.1:1", **ages})
    clock = FakeClock()
    metadata = ProducerMetadata.of(config, clock, random.Random(1))
    metadata.add(TOPIC, clock.now_ms())
    described = TopicMetadata(TOPIC, 0, None, ())
    _, version, _ = metadata.new_metadata_request_and_version(clock.now_ms())
    metadata.update(version, MetadataResponse({0: Node(0, "a", 1)}, (described,), "c", 0), False, clock.now_ms())
    assert metadata.time_to_next_update(clock.now_ms()) == 7_000
    metadata.request_update()
    assert 56 <= metadata.time_to_next_update(clock.now_ms()) <= 84  # a jitter of 20 % in both directions
    assert metadata.retain_topic(TOPIC, clock.now_ms() + 8_999)
    assert not metadata.retain_topic(TOPIC, clock.now_ms() + 9_000)


def test_block_is_halved_below_the_limit_of_its_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: from buffer.memory=12 GiB on, rows of more than 2 GiB together were refused, which less memory takes."""
    for module in ("spark_kafka_sink.record.block", "spark_kafka_sink.producer.kafka_producer"):
        monkeypatch.setattr(f"{module}.MAX_COLUMN_BYTES", 1 << 20)  # stands for 2 GiB, and 12 MiB for 24 GiB of memory
    harness = warm({**AT_ONCE, "buffer.memory": 12 << 20})
    harness.send_columns(RecordColumns.from_rows([b"x" * 1_000] * 1_500))
    harness.settle()
    assert len(harness.values()) == 1_500
