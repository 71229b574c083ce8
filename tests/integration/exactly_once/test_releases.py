"""Exactly-once delivery on the oldest embedded release (test_old_releases.py has older ones), and while all brokers are
upgraded from it to the newest one.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

from support.cluster_admin import set_feature
from support.exactly_once_batches import check_batches
from support.exactly_once_streams import check_content, check_nothing_open
from support.killed_query import KEYS, Query, started
from support.librdkafka import read_values

from spark_kafka_sink import KafkaProducer
from spark_kafka_sink.local import Admin, EmbeddedKafka
from spark_kafka_sink.local.jvm import CURRENT, OLD
from spark_kafka_sink.producer.futures import FutureRecordMetadata

NEWEST_METADATA_VERSION = 30
"""Of Kafka 4.3."""


def test_batches_count_once_on_the_old_release(old_kafka_broker: Admin) -> None:
    topic = f"batches-{uuid.uuid4().hex[:8]}"
    old_kafka_broker.create_topic(topic)
    check_batches(old_kafka_broker.bootstrap_servers, topic, transaction_version=1)


@contextmanager
def sending(servers: str, topic: str) -> Iterator[list[FutureRecordMetadata]]:
    """A thread sends numbers one by one, and waits for all answers at the end."""
    sent: list[FutureRecordMetadata] = []
    is_over = Event()

    def send() -> None:
        while not is_over.wait(0.002):
            sent.append(producer.send(topic, str(len(sent)).encode()))

    with KafkaProducer({"bootstrap.servers": servers}) as producer:
        thread = Thread(target=send)
        thread.start()
        try:
            yield sent
        finally:
            is_over.set()
            thread.join()
        producer.flush()


def test_an_upgrade_of_all_brokers_loses_and_duplicates_nothing(
    own_kafka: Callable[..., EmbeddedKafka], tmp_path: Path
) -> None:
    """One driver and one producer keep their connections and go on, without an error."""
    kafka = own_kafka(nodes=3, version=OLD.version)
    servers = kafka.bootstrap_servers
    for topic in ("t", "plain"):
        kafka.create_topic(topic, 3, 3)
    query = Query(servers, "t", tmp_path / "c")

    def await_batches() -> None:
        """Wait for batches that began after now."""
        expected, deadline = query.finished() + 3, time.monotonic() + 120
        while query.finished() < expected:
            assert process.poll() is None, "a batch has failed"
            assert time.monotonic() < deadline, f"no batch {expected} in 120 s"
            time.sleep(0.05)

    with (
        started(servers, "t", query.checkpoint, "--batches", "1000000") as process,
        sending(servers, "plain") as sent,
    ):
        for node_id in kafka.node_ids:
            await_batches()
            kafka.restart_node(node_id, version=CURRENT.version)
        await_batches()
        assert Admin(servers).finalized_features().get("transaction.version", 0) == 0
        set_feature(servers, "metadata.version", NEWEST_METADATA_VERSION)
        for level in (2, 1, 2):
            set_feature(servers, "transaction.version", level)
            await_batches()
    Query(servers, "t", query.checkpoint).run(query.finished() + 1, seed=1)
    assert Admin(servers).finalized_features()["transaction.version"] == 2
    check_content(servers, "t", query.finished() * query.rows, KEYS)
    check_nothing_open(servers, "t")
    assert all(each.exception() is None for each in sent)
    assert sorted(map(int, read_values(servers, "plain", 3))) == list(range(len(sent)))
