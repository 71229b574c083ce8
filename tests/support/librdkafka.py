"""Topics written and read by librdkafka, an independent client that checks every checksum."""

from __future__ import annotations

import time
from collections.abc import Iterable

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition


def produce(
    bootstrap_servers: str,
    topic: str,
    values: Iterable[str],
    *,
    timestamp_ms: int | None = None,
    timeout_s: float = 30.0,
) -> None:
    """Send values with acks=all and wait until all are acknowledged. `timestamp_ms`: of each record; default: now."""
    producer = Producer({"bootstrap.servers": bootstrap_servers, "acks": "all"})
    failures: list[KafkaError] = []

    def delivered(error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            failures.append(error)

    for value in values:
        producer.produce(topic, value.encode(), timestamp=timestamp_ms or 0, on_delivery=delivered)
    left = producer.flush(timeout_s)
    assert not left, f"{left} records were not acknowledged within {timeout_s} s"
    assert not failures, failures


def read_topic(
    bootstrap_servers: str,
    topic: str,
    partitions: int = 1,
    *,
    timeout_s: float = 30.0,
    isolation_level: str = "read_committed",
) -> list[Message]:
    """Return every record of a topic, by partition and offset. Under read_committed it has no records of an aborted or
    open transaction, or after the first open one.
    """
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "isolation.level": isolation_level,
            "group.id": "unused",
            "check.crcs": True,
            "enable.partition.eof": True,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 10,  # at the end it waits that long for more records
        }
    )
    try:
        # Offset 0 instead of "the beginning", because that lookup takes half a second.
        consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
        records: list[Message] = []
        ended: set[int] = set()
        deadline = time.monotonic() + timeout_s
        while len(ended) < partitions:
            message = consumer.poll(max(0.0, deadline - time.monotonic()))
            assert message is not None, f"{topic} was not read to its end within {timeout_s} s"
            error = message.error()
            if error is None:
                records.append(message)
            elif error.code() == KafkaError._PARTITION_EOF:
                ended.add(place_of(message)[0])
            else:
                raise KafkaException(error)
    finally:
        consumer.close()
    return sorted(records, key=place_of)


def place_of(message: Message) -> tuple[int, int]:
    """Return the partition and the offset of a message that a consumer returned."""
    partition, offset = message.partition(), message.offset()
    assert partition is not None
    assert offset is not None
    return partition, offset


def text_of(message: Message) -> str:
    """Return the value of a message that has one."""
    value = message.value()
    assert value is not None
    return value.decode()


def read_values(
    bootstrap_servers: str,
    topic: str,
    partitions: int = 1,
    *,
    timeout_s: float = 30.0,
    isolation_level: str = "read_committed",
) -> list[str]:
    """Return the values of `read_topic`, as text."""
    records = read_topic(bootstrap_servers, topic, partitions, timeout_s=timeout_s, isolation_level=isolation_level)
    return [text_of(record) for record in records]


def committed_offset(
    bootstrap_servers: str, group: str, topic: str, partition: int = 0, *, timeout_s: float = 30.0
) -> tuple[int, str | None]:
    """Return a group's offset and its metadata text; (-1001, None) if the group has no offset."""
    consumer = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": group})
    try:
        (found,) = consumer.committed([TopicPartition(topic, partition)], timeout=timeout_s)
    finally:
        consumer.close()
    return found.offset, found.metadata
