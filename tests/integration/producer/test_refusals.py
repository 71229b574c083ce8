"""Undeliverable records: a clear error within the limit, and all other records arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyarrow as pa
import pytest
from kio.schema.errors import ErrorCode
from support.lateness import Stopwatch
from support.librdkafka import read_topic, read_values
from support.raw_batches import read_batches

from spark_kafka_sink.common.errors import (
    InvalidRecordError,
    InvalidTopicError,
    KafkaError,
    KafkaTimeoutError,
    RecordTooLargeError,
    SerializationError,
)
from spark_kafka_sink.local import Admin
from spark_kafka_sink.producer.futures import RunMetadata
from spark_kafka_sink.producer.kafka_producer import KafkaProducer
from spark_kafka_sink.record.columns import RecordColumns

MakeTopic = Callable[..., str]
StartProducer = Callable[..., KafkaProducer]
ONE_ROW = RecordColumns(pa.array([b"v"]))


@contextmanager
def within(least_s: float, most_s: float) -> Iterator[None]:
    with Stopwatch() as watch:
        yield
    assert watch.took_s >= least_s
    assert watch.own_s < most_s


def test_missing_topic_is_created_by_the_broker(broker: Admin, fresh_name: str, start_producer: StartProducer) -> None:
    producer = start_producer(broker.bootstrap_servers)
    assert producer.send(fresh_name, b"first").result(30).offset == 0
    producer.send_columns(f"{fresh_name}-2", ONE_ROW)
    producer.flush(30)
    assert read_values(broker.bootstrap_servers, fresh_name) == ["first"]
    assert read_values(broker.bootstrap_servers, f"{fresh_name}-2") == ["v"]


def test_unreachable_address_is_named_within_max_block_ms(start_producer: StartProducer) -> None:
    producer = start_producer("127.0.0.1:1", **{"max.block.ms": 600})
    text = r"bootstrap\.servers=127\.0\.0\.1:1 .*max\.block\.ms=600"
    with within(0.5, 1.5), pytest.raises(KafkaTimeoutError, match=text):
        producer.send("any", b"v").result(0)
    with within(0.5, 1.5), pytest.raises(KafkaTimeoutError, match=text):
        producer.send_columns("any", ONE_ROW)
    with within(0.5, 1.5), pytest.raises(KafkaTimeoutError, match=text):
        producer.partitions_for("any")


def test_invalid_topic_names_are_refused_and_others_arrive(
    broker: Admin, make_topic: MakeTopic, start_producer: StartProducer
) -> None:
    topic = make_topic()
    producer = start_producer(broker.bootstrap_servers)
    for name in ("a b", "..", "x" * 250):
        with within(0, 5), pytest.raises(InvalidTopicError) as caught:
            producer.send(name, b"v").result(0)
        assert name in str(caught.value)
    assert producer.send(topic, b"v").result(30).offset == 0


def test_missing_partition_is_named_within_max_block_ms(
    broker: Admin, make_topic: MakeTopic, start_producer: StartProducer
) -> None:
    topic = make_topic(partitions=2)
    producer = start_producer(broker.bootstrap_servers, **{"max.block.ms": 500})
    text = f"Partition 2 of topic {topic} with 2 partitions"
    with within(0.4, 1.5), pytest.raises(KafkaTimeoutError, match=text):
        producer.send(topic, b"v", partition=2).result(0)
    with within(0.4, 1.5), pytest.raises((KafkaTimeoutError, SerializationError), match=text):
        producer.send_columns(topic, RecordColumns.from_rows(["v"], partitions=[2]))


def test_record_over_the_clients_limit_fails_without_others(
    broker: Admin, make_topic: MakeTopic, start_producer: StartProducer
) -> None:
    topic = make_topic()
    producer = start_producer(broker.bootstrap_servers, **{"max.request.size": 10_000})
    futures = [producer.send(topic, b"x" * size) for size in (9_000, 10_001, 9_001)]
    with pytest.raises(RecordTooLargeError, match=rf"{topic}.*max\.request\.size=10000"):
        futures[1].result(0)
    with pytest.raises(RecordTooLargeError, match=rf"{topic}.*max\.request\.size=10000"):
        producer.send_columns(topic, RecordColumns(pa.array([b"x" * 10_001])))
    producer.flush(30)
    assert [futures[0].result(0).offset, futures[2].result(0).offset] == [0, 1]
    assert [len(value) for value in read_values(broker.bootstrap_servers, topic)] == [9_000, 9_001]


@pytest.mark.parametrize(
    ("limit", "settings"),
    [
        (3_000, {}),
        (300, {"compression.type": "zstd"}),
        (3_000, {"enable.idempotence": False, "max.in.flight.requests.per.connection": 1}),
    ],
    ids=["plain", "compressed", "unnumbered"],
)
def test_too_large_batches_are_split_in_order(
    broker: Admin, make_topic: MakeTopic, start_producer: StartProducer, limit: int, settings: dict[str, object]
) -> None:
    topic = make_topic(config={"max.message.bytes": limit})
    producer = start_producer(broker.bootstrap_servers, **{"linger.ms": 100, **settings})
    values = [f"{number:0500d}" for number in range(300)]
    futures = [producer.send(topic, value) for value in values[:100]]
    runs: list[tuple[int, int]] = []
    errors: list[KafkaError] = []

    def note(run: RunMetadata, error: KafkaError | None) -> None:
        runs.append((run.base_offset, run.record_count))
        if error is not None:
            errors.append(error)

    producer.send_columns(topic, RecordColumns(pa.array(values[100:])), note)
    producer.flush(30)
    assert [future.result(0).offset for future in futures] == list(range(100))
    assert errors == []
    ends = 100
    for base_offset, count in runs:
        assert base_offset == ends
        ends += count
    assert ends == 300
    assert read_values(broker.bootstrap_servers, topic) == values
    batches = read_batches(broker.bootstrap_servers, topic)
    assert len(batches) > 2
    assert max(batch.size for batch in batches) <= limit
    numbered = settings.get("enable.idempotence", True)
    assert [batch.base_sequence for batch in batches] == [batch.base_offset if numbered else -1 for batch in batches]


def test_record_over_the_brokers_limit_fails_without_its_neighbours(
    broker: Admin, make_topic: MakeTopic, start_producer: StartProducer
) -> None:
    topic = make_topic(config={"max.message.bytes": 2_000})
    producer = start_producer(broker.bootstrap_servers, **{"linger.ms": 100})
    values = [b"a" * 500, b"b" * 500, b"c" * 5_000, b"d" * 500, b"e" * 500]
    futures = [producer.send(topic, value) for value in values]
    producer.flush(30)
    with pytest.raises(RecordTooLargeError, match=rf"{topic}-0.*max\.message\.bytes"):
        futures[2].result(0)
    for number in (0, 1, 3, 4):
        futures[number].result(0)
    assert producer.send(topic, b"later").result(30).offset == 4
    assert read_values(broker.bootstrap_servers, topic) == ["a" * 500, "b" * 500, "d" * 500, "e" * 500, "later"]


def test_batch_over_segment_size_fails_and_others_arrive(
    broker: Admin, make_topic: MakeTopic, start_producer: StartProducer
) -> None:
    megabyte = 1024 * 1024
    topic = make_topic(config={"segment.bytes": megabyte, "max.message.bytes": 4 * megabyte})
    producer = start_producer(broker.bootstrap_servers, **{"max.request.size": 4 * megabyte})
    with within(0, 5), pytest.raises(KafkaError, match=rf"{topic}-0") as caught:
        producer.send(topic, b"x" * (2 * megabyte)).result(30)
    assert caught.value.error_code == ErrorCode.record_list_too_large
    assert not caught.value.retriable
    assert producer.send(topic, b"small").result(30).offset == 0


def test_only_the_invalid_record_of_a_batch_gets_the_cause(
    broker: Admin, make_topic: MakeTopic, start_producer: StartProducer
) -> None:
    topic = make_topic(config={"cleanup.policy": "compact"})
    producer = start_producer(broker.bootstrap_servers, **{"linger.ms": 100})
    futures = [producer.send(topic, b"v", key) for key in (b"a", None, b"c")]
    outcomes: list[tuple[int, KafkaError | None]] = []
    producer.flush(30)
    errors = [future.exception() for future in futures]
    assert isinstance(errors[1], InvalidRecordError)
    assert f"{topic}-0: record 1 of its batch" in str(errors[1])
    assert "Other records of the same batch" in str(errors[0]) == str(errors[2])
    producer.send_columns(
        topic,
        RecordColumns(pa.array(["v"] * 4)),
        lambda run, error: outcomes.append((run.record_count, error)),
    )
    producer.flush(30)
    assert sum(count for count, _ in outcomes) == 4
    assert {type(error) for _, error in outcomes} == {InvalidRecordError}
    assert producer.send(topic, b"v", b"good").result(30).offset == 0
    assert [message.key() for message in read_topic(broker.bootstrap_servers, topic)] == [b"good"]
