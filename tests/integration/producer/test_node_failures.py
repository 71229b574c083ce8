"""Nodes are killed, suspended and restarted, topics are deleted: every acknowledged record arrives once and in
order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from support.lateness import Stopwatch
from support.leftovers import file_descriptors
from support.librdkafka import read_topic, read_values

from spark_kafka_sink.common.errors import KafkaTimeoutError, ProducerClosedError
from spark_kafka_sink.local import EmbeddedKafka
from spark_kafka_sink.producer.futures import FutureRecordMetadata
from spark_kafka_sink.producer.kafka_producer import KafkaProducer
from spark_kafka_sink.record.columns import RecordColumns

StartProducer = Callable[..., KafkaProducer]


@pytest.fixture(scope="module", params=["4.3.1", "3.9.1"])
def lone_node(request: pytest.FixtureRequest, module_kafka: Callable[..., EmbeddedKafka]) -> EmbeddedKafka:
    """A single node that creates no topic by itself; it runs again after each test."""
    properties = {"auto.create.topics.enable": False, "broker.session.timeout.ms": 1500}
    return module_kafka(version=request.param, properties=properties)


class Stream:
    """Send numbers to a partition from a separate thread, a few at a time, until `stop`."""

    def __init__(self, producer: KafkaProducer, topic: str, partition: int = 0) -> None:
        self._place = (producer, topic, partition)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.futures: list[FutureRecordMetadata] = []

    def __enter__(self) -> Stream:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(60)

    def _run(self) -> None:
        producer, topic, partition = self._place
        while not self._ended.is_set():
            for _ in range(3):
                self.futures.append(producer.send(topic, str(len(self.futures)), partition=partition))
            time.sleep(0.002)

    def await_acknowledged(self, count: int, timeout_s: float = 30) -> None:
        """Wait until `count` more records are acknowledged than now."""
        expected = len(self.futures) + count
        deadline = time.monotonic() + timeout_s
        while len(self.futures) < expected or not self.futures[expected - 1].done():
            assert time.monotonic() < deadline, f"record {expected} of {len(self.futures)} is not acknowledged"
            time.sleep(0.01)

    def assert_all_arrived(self, kafka: EmbeddedKafka, topic: str) -> None:
        """Check that each record arrived once, in order, at the offset of its future. The offset is -1 if the response
        was lost and the retry reported only that the broker has the record.
        """
        self._place[0].flush(60)
        reported = [future.result(0).offset for future in self.futures]
        assert read_values(kafka.bootstrap_servers, topic) == [str(number) for number in range(len(reported))]
        assert all(offset in (-1, number) for number, offset in enumerate(reported))


def test_killed_and_restarted_node_loses_and_duplicates_nothing(
    lone_node: EmbeddedKafka, start_producer: StartProducer
) -> None:
    lone_node.create_topic("killed")
    producer = start_producer(lone_node.bootstrap_servers, **{"compression.type": "lz4"})
    with Stream(producer, "killed") as stream:
        stream.await_acknowledged(200)
        lone_node.kill_node(1)
        try:
            time.sleep(0.3)
        finally:
            lone_node.start_node(1)
        stream.await_acknowledged(200)
    stream.assert_all_arrived(lone_node, "killed")


def test_suspended_node_is_disconnected_at_request_timeout_without_duplicates(
    lone_node: EmbeddedKafka, start_producer: StartProducer
) -> None:
    lone_node.create_topic("frozen")
    settings = {"request.timeout.ms": 500, "delivery.timeout.ms": 30_000}
    producer = start_producer(lone_node.bootstrap_servers, **settings)
    with Stream(producer, "frozen") as stream:
        stream.await_acknowledged(200)
        lone_node.suspend_node(1)
        try:
            time.sleep(1.3)
            assert not stream.futures[-1].done()
        finally:
            lone_node.resume_node(1)
        stream.await_acknowledged(200)
    stream.assert_all_arrived(lone_node, "frozen")


def still_fails(producer: KafkaProducer, topic: str) -> bool:
    """Whether a record still fails, because the broker has not recovered yet."""
    try:
        producer.send(topic, b"later").result(30)
    except KafkaTimeoutError:
        return True
    return False


def test_records_fail_at_delivery_timeout_and_later_ones_arrive(
    lone_node: EmbeddedKafka, start_producer: StartProducer
) -> None:
    lone_node.create_topic("late")
    settings = {"request.timeout.ms": 300, "delivery.timeout.ms": 1_000, "linger.ms": 0}
    producer = start_producer(lone_node.bootstrap_servers, **settings)
    assert producer.send("late", b"first").result(30).offset == 0
    lone_node.suspend_node(1)
    try:
        with Stopwatch() as watch:
            doomed = [producer.send("late", f"doomed {number}") for number in range(10)]
            producer.flush(10)
        assert watch.took_s >= 0.9
        assert watch.own_s < 1.6
        for future in doomed:
            with pytest.raises(
                KafkaTimeoutError, match=r"late-0 were not acknowledged within delivery\.timeout\.ms=1000"
            ):
                future.result(0)
    finally:
        lone_node.resume_node(1)
    deadline = time.monotonic() + 30
    while still_fails(producer, "late"):
        assert time.monotonic() < deadline
    producer.send("late", b"last").result(30)
    values = read_values(lone_node.bootstrap_servers, "late")
    # A failed record may still have reached the broker: at most once, in order.
    doomed_there = [value for value in values if value.startswith("doomed")]
    assert doomed_there == sorted(set(doomed_there))
    assert values[0] == "first"
    assert values[-1] == "last"
    assert values.count("last") == 1


@pytest.mark.parametrize("timeout", [0, 0.7])
def test_close_in_an_outage_fails_every_future_in_time(
    lone_node: EmbeddedKafka, fresh_name: str, timeout: float
) -> None:
    lone_node.create_topic(fresh_name, partitions=3)
    threads, descriptors = threading.active_count(), sorted(file_descriptors())
    producer = KafkaProducer({"bootstrap.servers": lone_node.bootstrap_servers})
    producer.send(fresh_name, b"taken", partition=0).result(30)
    assert sorted(file_descriptors()) != descriptors
    lone_node.suspend_node(1)
    try:
        futures = [producer.send(fresh_name, b"lost" * 50, partition=number % 3) for number in range(3_000)]
        errors: list[object] = []
        producer.send_columns(fresh_name, RecordColumns.from_rows(["lost"] * 50), lambda _, error: errors.append(error))
        with Stopwatch() as watch:
            producer.close(timeout)
        assert watch.took_s >= timeout
        assert watch.own_s < timeout + 0.5
    finally:
        lone_node.resume_node(1)
    assert {type(future.exception()) for future in futures} == {ProducerClosedError}
    assert {type(error) for error in errors} == {ProducerClosedError}
    assert (threading.active_count(), sorted(file_descriptors())) == (threads, descriptors)
    with pytest.raises(ProducerClosedError):
        producer.send(fresh_name, b"more")


def test_missing_topic_is_named_within_max_block_ms(lone_node: EmbeddedKafka, start_producer: StartProducer) -> None:
    producer = start_producer(lone_node.bootstrap_servers, **{"max.block.ms": 600})
    text = r"Topic missing-topic is not in the metadata within max\.block\.ms=600.*create it"
    for send in (
        lambda: producer.send("missing-topic", b"v").result(0),
        lambda: producer.send_columns("missing-topic", RecordColumns.from_rows(["v"])),
        lambda: producer.partitions_for("missing-topic"),
    ):
        with Stopwatch() as watch, pytest.raises(KafkaTimeoutError, match=text):
            send()
        assert watch.took_s >= 0.5
        assert watch.own_s < 1.2
    lone_node.create_topic("created-topic")
    assert producer.send("created-topic", b"v").result(30).offset == 0


def test_writes_continue_after_a_topic_is_deleted_and_recreated(
    lone_node: EmbeddedKafka, start_producer: StartProducer
) -> None:
    lone_node.create_topic("phoenix", partitions=3)
    lone_node.create_topic("bystander")
    settings = {"max.block.ms": 10_000, "linger.ms": 0, "metadata.max.age.ms": 1000}
    producer = start_producer(lone_node.bootstrap_servers, **settings)
    for partition in (1, 2):
        producer.send("phoenix", b"old", partition=partition).result(30)
    with Stream(producer, "phoenix") as stream:
        stream.await_acknowledged(100)
        lone_node.delete_topic("phoenix")
        assert producer.send("bystander", b"goes on").result(30).offset == 0
        time.sleep(0.3)
        lone_node.create_topic("phoenix", partitions=2)
        stream.await_acknowledged(100)
    producer.flush(30)
    assert producer.send("phoenix", b"new", partition=1).result(30).offset == 0
    arrived = [
        int(message.value())
        for message in read_topic(lone_node.bootstrap_servers, "phoenix", 2)
        if message.partition() == 0
    ]
    # Records before the deletion are gone with it; from some record on all are there, in order.
    assert arrived == list(range(arrived[0], len(stream.futures)))
    reported = [future.result(0).offset for future in stream.futures]
    assert all(offset in (-1, number) for number, offset in enumerate(reported[arrived[0] :]))


def test_leader_loss_among_three_nodes_loses_and_duplicates_nothing(
    own_kafka: Callable[..., EmbeddedKafka], start_producer: StartProducer
) -> None:
    kafka = own_kafka(3, properties={"broker.session.timeout.ms": 2000})
    kafka.create_topic("numbers", replication_factor=3, config={"min.insync.replicas": 2})
    (before,) = kafka.describe_topic("numbers").partitions
    producer = start_producer(kafka.bootstrap_servers)
    with Stream(producer, "numbers") as stream:
        stream.await_acknowledged(200)
        kafka.kill_node(before.leader)
        stream.await_acknowledged(200)
    (after,) = kafka.describe_topic("numbers").partitions
    assert after.leader not in (before.leader, -1)
    stream.assert_all_arrived(kafka, "numbers")
