"""The partition of a record: by key as in the Java client, by number, or any; also when the topic changes meanwhile."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

import pyarrow as pa
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewPartitions  # type: ignore[attr-defined]
from support.librdkafka import read_topic

from spark_kafka_sink.local import Admin
from spark_kafka_sink.producer.futures import FutureRecordMetadata
from spark_kafka_sink.producer.kafka_producer import KafkaProducer
from spark_kafka_sink.record.columns import RecordColumns

MakeTopic = Callable[..., str]
StartProducer = Callable[..., KafkaProducer]
KEYS = [b"", b"\x00", b"a", "schlüssel".encode(), *(f"key {n}".encode() * (n % 5 + 1) for n in range(300))]


def places(broker: Admin, topic: str, partitions: int) -> dict[bytes | None, int]:
    """The partition of each key."""
    return {message.key(): message.partition() for message in read_topic(broker.bootstrap_servers, topic, partitions)}


def test_keys_go_to_the_java_clients_partitions(
    broker: Admin, make_topic: MakeTopic, start_producer: StartProducer
) -> None:
    ours, by_block, theirs = (make_topic(partitions=7) for _ in range(3))
    producer = start_producer(broker.bootstrap_servers)
    futures = [producer.send(ours, b"v", key) for key in KEYS]
    producer.send_columns(by_block, RecordColumns(pa.array([b"v"] * len(KEYS)), pa.array(KEYS)))
    producer.flush(30)
    foreign = Producer({"bootstrap.servers": broker.bootstrap_servers, "partitioner": "murmur2_random"})
    for key in KEYS:
        foreign.produce(theirs, b"v", key)
    assert foreign.flush(30) == 0
    expected = places(broker, theirs, 7)
    assert set(expected.values()) == set(range(7))
    assert places(broker, ours, 7) == places(broker, by_block, 7) == expected
    assert {key: future.result(0).partition for key, future in zip(KEYS, futures, strict=True)} == expected


def test_explicit_partition_wins_over_the_key(
    broker: Admin, make_topic: MakeTopic, start_producer: StartProducer
) -> None:
    topic = make_topic(partitions=3)
    producer = start_producer(broker.bootstrap_servers)
    for partition in (2, 0, 1):
        assert producer.send(topic, f"row {partition}", b"same key", partition).result(30).partition == partition
    columns = RecordColumns.from_rows(["c2", "c0", "key's own"], ["same key"] * 3, partitions=[2, 0, None])
    producer.send_columns(topic, columns)
    producer.flush(30)
    own = producer.send(topic, b"key's own", b"same key").result(30).partition
    got = Counter((message.partition(), message.value()) for message in read_topic(broker.bootstrap_servers, topic, 3))
    expected = Counter((partition, f"row {partition}".encode()) for partition in range(3))
    assert got == expected + Counter([(2, b"c2"), (0, b"c0"), (own, b"key's own"), (own, b"key's own")])


def test_records_without_a_key_use_every_partition_and_lose_none(
    broker: Admin, make_topic: MakeTopic, start_producer: StartProducer
) -> None:
    topic = make_topic(partitions=4)
    producer = start_producer(broker.bootstrap_servers, **{"batch.size": 4096})
    values = [f"{number:0100d}" for number in range(4_000)]
    for value in values[:2_000]:
        producer.send(topic, value)
    producer.send_columns(topic, RecordColumns(pa.array(values[2_000:])))
    producer.flush(30)
    messages = read_topic(broker.bootstrap_servers, topic, 4)
    assert sorted(message.value().decode() for message in messages) == values
    assert {message.partition() for message in messages} == {0, 1, 2, 3}


def test_partitions_added_live_are_used_within_metadata_max_age(
    broker: Admin, make_topic: MakeTopic, start_producer: StartProducer
) -> None:
    topic = make_topic()
    aged = start_producer(broker.bootstrap_servers, **{"metadata.max.age.ms": 500, "batch.size": 200})
    waiting = start_producer(broker.bootstrap_servers)
    sent = [aged.send(topic, f"before {n:050}") for n in range(50)]
    assert waiting.send(topic, b"waits").result(30).partition == 0
    aged.flush(30)
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    admin.create_partitions([NewPartitions(topic, 4)])[topic].result(30)
    # A record for an unknown partition requests the metadata at once.
    assert waiting.send(topic, b"by number", partition=3).result(30).partition == 3
    used: set[int] = set()
    deadline = time.monotonic() + 5
    while used != {0, 1, 2, 3}:
        assert time.monotonic() < deadline, f"only partitions {used} are used"
        batch = [aged.send(topic, f"after {len(sent) + n:050}") for n in range(20)]
        sent += batch
        aged.flush(30)
        used |= {future.result(0).partition for future in batch}
    reported = {(future.result(0).partition, future.result(0).offset) for future in sent}
    got = read_topic(broker.bootstrap_servers, topic, 4)
    assert len(got) == len(sent) + 2
    assert reported <= {(message.partition(), message.offset()) for message in got}


def test_threads_sharing_a_producer_keep_their_own_order(
    broker: Admin, make_topic: MakeTopic, start_producer: StartProducer
) -> None:
    topic = make_topic(partitions=2)
    producer = start_producer(broker.bootstrap_servers, **{"batch.size": 8192, "compression.type": "lz4"})
    count, failures = 1_000, []
    reported: list[list[FutureRecordMetadata]] = [[] for _ in range(8)]

    def rows(name: int) -> None:
        for number in range(count):
            reported[name].append(producer.send(topic, str(number), str(name)))
            if number % 300 == 0:
                producer.flush(30)

    def columns(name: int) -> None:
        for first in range(0, count, 100):
            values = pa.array([str(number) for number in range(first, first + 100)])
            producer.send_columns(
                topic,
                RecordColumns(values, pa.array([str(name)] * 100)),
                lambda _, error: failures.append(error) if error else None,
            )

    threads = [threading.Thread(target=(rows, columns)[name % 2], args=[name]) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    producer.flush(30)
    assert failures == []
    got: dict[str, list[int]] = {}
    place_of: dict[tuple[int, int], tuple[bytes, bytes]] = {}
    for message in read_topic(broker.bootstrap_servers, topic, 2):
        got.setdefault(message.key().decode(), []).append(int(message.value()))
        place_of[message.partition(), message.offset()] = (message.key(), message.value())
    assert got == {str(name): list(range(count)) for name in range(8)}
    for name in range(0, 8, 2):
        found = [place_of[each.partition, each.offset] for each in (future.result(0) for future in reported[name])]
        assert found == [(str(name).encode(), str(number).encode()) for number in range(count)]
