"""librdkafka reads exactly the sent records, and checks every checksum."""

from __future__ import annotations

import time
from collections.abc import Callable

import pyarrow as pa
import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME, Message
from support.librdkafka import read_topic
from support.raw_batches import read_batches

from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.local import Admin
from spark_kafka_sink.producer.futures import RunMetadata
from spark_kafka_sink.producer.kafka_producer import KafkaProducer
from spark_kafka_sink.record.columns import RecordColumns

MakeTopic = Callable[..., str]
StartProducer = Callable[..., KafkaProducer]
Sent = tuple[bytes | None, bytes | None, int, list[tuple[str, bytes | None]]]

TIME_MS = 1_700_000_000_000
HEADERS: list[list[tuple[str, bytes | None]]] = [
    [],
    [("trace", b"\x00\xff")],
    [("twice", b"1"), ("twice", b""), ("gone", None)],
    [("schlüssel ✓", "größe".encode())],
]
KEYS = [None, b"", b"k", b"\xf0\x9f\x94\x91" * 20]
VALUES = [b"", b"plain", None, bytes(range(256)), b"again and again " * 400]
ROWS: list[Sent] = [
    (KEYS[n % len(KEYS)], VALUES[n % len(VALUES)], TIME_MS + 1000 * n - (n % 7) * 5000, HEADERS[n % len(HEADERS)])
    for n in range(2_000)
]


def as_sent(message: Message) -> Sent:
    assert message.timestamp()[0] == TIMESTAMP_CREATE_TIME
    return message.key(), message.value(), message.timestamp()[1], message.headers() or []  # type: ignore[return-value]


def keyed(rows: list[Sent]) -> list[Sent]:
    return [row for row in rows if row[0] is not None]


def unkeyed(rows: list[Sent]) -> list[Sent]:
    """The rows of a block for any partition; their order against rows with a partition is open."""
    return [row for row in rows if row[0] is None]


def send_rows(producer: KafkaProducer, topic: str) -> None:
    futures = [producer.send(topic, value, key, None, stamp, headers) for key, value, stamp, headers in ROWS]
    producer.flush(30)
    reported = [future.result(0) for future in futures]
    assert [(each.topic, each.partition, each.offset) for each in reported] == [(topic, 0, n) for n in range(len(ROWS))]
    assert [each.timestamp_ms for each in reported] == [stamp for _, _, stamp, _ in ROWS]
    sizes = [(-1 if key is None else len(key), -1 if value is None else len(value)) for key, value, _, _ in ROWS]
    assert [(each.serialized_key_size, each.serialized_value_size) for each in reported] == sizes


def send_columns(producer: KafkaProducer, topic: str) -> None:
    keys, values, stamps, headers = zip(*ROWS, strict=True)
    runs: list[RunMetadata] = []
    errors: list[KafkaError] = []

    def note(run: RunMetadata, error: KafkaError | None) -> None:
        runs.append(run)
        if error is not None:
            errors.append(error)

    producer.send_columns(topic, RecordColumns.from_rows(values, keys, headers, stamps), note)
    producer.flush(30)
    assert errors == []
    ends = 0
    for run in runs:  # callbacks follow a partition's offsets without a gap
        assert (run.topic, run.partition, run.base_offset, run.timestamp_ms) == (topic, 0, ends, -1)
        ends += run.record_count
    assert ends == len(ROWS)


@pytest.mark.parametrize("send", [send_rows, send_columns])
@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_every_field_arrives_unchanged(
    broker: Admin,
    make_topic: MakeTopic,
    start_producer: StartProducer,
    codec: str,
    send: Callable[[KafkaProducer, str], None],
) -> None:
    topic = make_topic()
    settings = {"compression.type": codec, "batch.size": 65_536}
    send(start_producer(broker.bootstrap_servers, **settings), topic)
    got = [as_sent(message) for message in read_topic(broker.bootstrap_servers, topic)]
    assert keyed(got) == keyed(ROWS)
    assert unkeyed(got) == unkeyed(ROWS)
    if send is send_rows:
        assert got == ROWS
    batches = read_batches(broker.bootstrap_servers, topic)
    assert len(batches) > 1
    assert {batch.codec.name for batch in batches} == {codec}


def test_log_append_time_is_in_the_records_and_the_futures(
    broker: Admin, make_topic: MakeTopic, start_producer: StartProducer
) -> None:
    topic = make_topic(config={"message.timestamp.type": "LogAppendTime"})
    producer = start_producer(broker.bootstrap_servers)
    before_ms = int(time.time() * 1000)
    reported = producer.send(topic, b"one", timestamp_ms=TIME_MS).result(30)
    runs: list[RunMetadata] = []
    producer.send_columns(
        topic,
        RecordColumns(pa.array([b"two", b"three"]), timestamp_ms=pa.array([TIME_MS, None])),
        lambda r, _: runs.append(r),
    )
    producer.flush(30)
    after_ms = int(time.time() * 1000)
    messages = read_topic(broker.bootstrap_servers, topic)
    assert {message.timestamp()[0] for message in messages} == {TIMESTAMP_LOG_APPEND_TIME}
    assert [reported.timestamp_ms, *[run.timestamp_ms for run in runs for _ in range(run.record_count)]] == [
        message.timestamp()[1] for message in messages
    ]
    assert all(before_ms <= message.timestamp()[1] <= after_ms for message in messages)


def test_record_without_timestamp_has_its_send_time(
    broker: Admin, make_topic: MakeTopic, start_producer: StartProducer
) -> None:
    topic = make_topic()
    producer = start_producer(broker.bootstrap_servers)
    before_ms = int(time.time() * 1000)
    reported = producer.send(topic, b"one").result(30)
    producer.send_columns(topic, RecordColumns(pa.array([b"two"])))
    producer.flush(30)
    after_ms = int(time.time() * 1000)
    messages = read_topic(broker.bootstrap_servers, topic)
    assert messages[0].timestamp() == (TIMESTAMP_CREATE_TIME, reported.timestamp_ms)
    assert len(messages) == 2
    assert all(before_ms <= message.timestamp()[1] <= after_ms for message in messages)


@pytest.mark.parametrize("acks", ["all", "1", "0"])
def test_acks_determine_known_offsets_and_sequence_numbers(
    broker: Admin, make_topic: MakeTopic, start_producer: StartProducer, acks: str
) -> None:
    topic = make_topic()
    producer = start_producer(broker.bootstrap_servers, **{"acks": acks, "linger.ms": 0})
    rounds, size = 3, 4
    offsets: list[int] = []
    for number in range(rounds):
        futures = [producer.send(topic, f"{number}-{n}") for n in range(size)]
        producer.flush(30)
        offsets += [future.result(0).offset for future in futures]
    values = [message.value() for message in read_until(broker, topic, rounds * size)]
    assert values == [f"{number}-{n}".encode() for number in range(rounds) for n in range(size)]
    assert offsets == ([-1] * rounds * size if acks == "0" else list(range(rounds * size)))
    batches = read_batches(broker.bootstrap_servers, topic)
    if acks == "all":
        assert len({(batch.producer_id, batch.producer_epoch) for batch in batches}) == 1
        assert batches[0].producer_id >= 0
        assert [batch.base_sequence for batch in batches] == [batch.base_offset for batch in batches]
    else:
        assert {(batch.producer_id, batch.producer_epoch, batch.base_sequence) for batch in batches} == {(-1, -1, -1)}


def read_until(broker: Admin, topic: str, count: int) -> list[Message]:
    """Read until the records are there: with acks=0 a flush returns as soon as they are sent."""
    deadline = time.monotonic() + 30
    while len(messages := read_topic(broker.bootstrap_servers, topic)) < count:
        assert time.monotonic() < deadline, f"{len(messages)} of {count} records"
    return messages
