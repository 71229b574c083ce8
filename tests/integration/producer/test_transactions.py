"""Transactions on real brokers of transaction versions 2 and 1 and of the oldest release, read by librdkafka."""

from __future__ import annotations

import json
import os
import subprocess
import time
import uuid
from collections.abc import Callable
from typing import NamedTuple

import pyarrow as pa
import pytest
from support.fresh_process import run_strictly
from support.lateness import Stopwatch
from support.librdkafka import committed_offset, read_values

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import (
    IllegalStateError,
    InvalidTransactionTimeoutError,
    InvalidTxnStateError,
    KafkaError,
    ProducerFencedError,
    RecordTooLargeError,
)
from spark_kafka_sink.local import Admin, EmbeddedKafka
from spark_kafka_sink.producer.kafka_producer import KafkaProducer
from spark_kafka_sink.producer.transactions import PreparedTransaction
from spark_kafka_sink.record.columns import RecordColumns

PROPERTIES = {
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": 500,
    "transaction.state.log.num.partitions": 4,
    "offsets.topic.num.partitions": 4,
}
StartProducer = Callable[..., KafkaProducer]


class Cluster(NamedTuple):
    """A broker, its transaction version, and a way to stop it if the test may do so."""

    admin: Admin
    version: int
    kafka: EmbeddedKafka | None

    @property
    def servers(self) -> str:
        return self.admin.bootstrap_servers


@pytest.fixture(scope="module", params=["version 2", "version 1", "old"])
def cluster(request: pytest.FixtureRequest, module_kafka: Callable[..., EmbeddedKafka]) -> Cluster:
    if request.param == "old":
        return Cluster(request.getfixturevalue("old_kafka_broker"), 1, None)
    version = int(request.param[-1])
    kafka = module_kafka(properties=PROPERTIES, features={"transaction.version": version})
    admin = Admin(kafka.bootstrap_servers)
    assert admin.finalized_features()["transaction.version"] == version
    return Cluster(admin, version, kafka)


own_clusters = pytest.mark.parametrize("cluster", ["version 2", "version 1"], indirect=True)
"""The brokers that a test may stop; they check often for transactions past their timeout."""


class Stage:
    """A new topic and a new transactional id."""

    def __init__(self, cluster: Cluster, start_producer: StartProducer) -> None:
        self.cluster = cluster
        self._start = start_producer
        self.id = f"transactions-{uuid.uuid4().hex[:8]}"
        self.topic = self.id
        cluster.admin.create_topic(self.topic, 2)

    def producer(self, **settings: object) -> KafkaProducer:
        fast = {"transactional.id": self.id, "linger.ms": 0, "retry.backoff.ms": 20, "reconnect.backoff.max.ms": 100}
        return self._start(self.cluster.servers, **fast | settings)

    def started(self, **settings: object) -> KafkaProducer:
        producer = self.producer(**settings)
        producer.init_transactions()
        producer.begin_transaction()
        return producer

    def prepared(self, *values: str) -> tuple[KafkaProducer, PreparedTransaction]:
        producer = self.started()
        for value in values:
            producer.send(self.topic, value, partition=0)
        return producer, producer.prepare_transaction()

    def commit(self, producer: KafkaProducer, value: str) -> None:
        producer.begin_transaction()
        producer.send(self.topic, value, partition=0)
        producer.commit_transaction()

    def committed(self) -> list[str]:
        return read_values(self.cluster.servers, self.topic, 2)

    def written(self) -> list[str]:
        return read_values(self.cluster.servers, self.topic, 2, isolation_level="read_uncommitted")

    def becomes(self, *values: str, within_s: float = 10.0) -> None:
        """Wait until readers under read_committed see these values, which is after the end markers."""
        deadline = time.monotonic() + within_s
        while (seen := self.committed()) != list(values) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert seen == list(values)


@pytest.fixture
def stage(cluster: Cluster, start_producer: StartProducer) -> Stage:
    return Stage(cluster, start_producer)


def test_readers_see_only_committed_records(stage: Stage) -> None:
    producer = stage.started()
    acknowledged = producer.send(stage.topic, "a", partition=0).result(30)
    assert acknowledged.offset == 0
    assert stage.committed() == []
    assert stage.written() == ["a"]
    producer.commit_transaction()
    stage.becomes("a")
    producer.begin_transaction()
    producer.send(stage.topic, "aborted", partition=0).result(30)
    producer.send(stage.topic, "aborted", partition=1)
    producer.abort_transaction()
    for value in ("b", "c"):
        stage.commit(producer, value)
    stage.becomes("a", "b", "c")
    assert "aborted" in stage.written()


def test_many_transactions_in_a_row_are_quick(stage: Stage) -> None:
    producer = stage.producer()
    producer.init_transactions()
    with Stopwatch() as watch:
        for number in range(30):
            stage.commit(producer, str(number))
    assert watch.own_s < 6
    stage.becomes(*map(str, range(30)))


def test_columns_are_committed_and_aborted_with_the_transaction(stage: Stage) -> None:
    producer = stage.started()
    rows = [f"{number:05}" for number in range(20_000)]
    partitions = pa.array([0] * 10_000 + [1] * 10_000, pa.int32())
    columns = RecordColumns(pa.array(rows), partition=partitions)
    taken: list[int] = []
    producer.send_columns(stage.topic, columns, lambda run, error: taken.append(run.record_count if not error else -1))
    producer.abort_transaction()
    producer.begin_transaction()
    taken.clear()
    producer.send_columns(stage.topic, columns, lambda run, error: taken.append(run.record_count if not error else -1))
    producer.send(stage.topic, "last", partition=1)
    producer.commit_transaction()
    assert sum(taken) == 20_000
    stage.becomes(*rows, "last")


def test_offsets_are_committed_and_aborted_with_the_transaction(stage: Stage) -> None:
    producer, servers = stage.started(), stage.cluster.servers
    group, offsets = f"{stage.id}-group", {TopicPartition(stage.topic, 0): (5, "rows=10")}
    producer.send_offsets_to_transaction(offsets, group)
    producer.abort_transaction()
    assert committed_offset(servers, group, stage.topic)[0] < 0
    producer.begin_transaction()
    producer.send(stage.topic, "a", partition=0)
    producer.send_offsets_to_transaction(offsets, group)
    producer.commit_transaction()
    stage.becomes("a")
    assert committed_offset(servers, group, stage.topic) == (5, "rows=10")


def test_empty_transactions_end_without_error(stage: Stage) -> None:
    producer = stage.started()
    producer.commit_transaction()
    producer.begin_transaction()
    producer.abort_transaction()
    producer.begin_transaction()
    producer.send_offsets_to_transaction({}, "nobody")
    assert producer.prepare_transaction().is_empty
    producer.commit_transaction()
    stage.commit(producer, "a")
    stage.becomes("a")


def test_a_newer_producer_fences_an_older_one(stage: Stage) -> None:
    old = stage.started()
    old.send(stage.topic, "old", partition=0).result(30)
    new = stage.producer()
    new.init_transactions()
    with pytest.raises(ProducerFencedError, match=stage.id):
        old.commit_transaction()
    assert old.has_failed
    stage.commit(new, "new")
    stage.becomes("new")


def test_fenced_producer_cannot_send_more(stage: Stage) -> None:
    old = stage.started()
    old.send(stage.topic, "old", partition=0).result(30)
    stage.producer().init_transactions()
    with pytest.raises(KafkaError):
        old.send(stage.topic, "more", partition=0).result(30)
    with pytest.raises(ProducerFencedError):
        old.abort_transaction()
    stage.becomes()


def test_refused_record_aborts_only_its_transaction(stage: Stage) -> None:
    small = f"{stage.topic}-small"
    stage.cluster.admin.create_topic(small, 1, 1, {"max.message.bytes": 1_000})
    producer = stage.producer()
    producer.init_transactions()
    stage.commit(producer, "a")
    producer.begin_transaction()
    producer.send(stage.topic, "lost", partition=0)
    refused = producer.send(small, os.urandom(2_000))
    with pytest.raises(RecordTooLargeError, match=small):
        producer.commit_transaction()
    with pytest.raises(RecordTooLargeError, match=small):
        refused.result(30)
    with Stopwatch() as watch:
        producer.flush()
        producer.abort_transaction()
    assert watch.own_s < 3
    for value in ("b", "c"):
        stage.commit(producer, value)
    stage.becomes("a", "b", "c")


def test_close_aborts_an_open_transaction_and_keeps_a_prepared_one(stage: Stage) -> None:
    producer = stage.started()
    producer.send(stage.topic, "open", partition=0).result(30)
    producer.close()
    producer, prepared = stage.prepared("prepared")
    producer.close()
    driver = stage.producer()
    driver.resume_transaction(prepared)
    driver.commit_transaction()
    stage.becomes("prepared")


def test_timeout_above_the_brokers_maximum_is_refused(stage: Stage) -> None:
    producer = stage.producer(**{"transaction.timeout.ms": 16 * 60_000})
    with pytest.raises(InvalidTransactionTimeoutError, match=r"transaction\.max\.timeout\.ms"):
        producer.init_transactions()


@own_clusters
def test_transaction_after_its_timeout_is_never_committed(stage: Stage) -> None:
    late = stage.started(**{"transaction.timeout.ms": 1_000})
    late.send(stage.topic, "late", partition=0).result(30)
    other = stage.producer(**{"transactional.id": f"{stage.id}-other"})
    other.init_transactions()
    stage.commit(other, "other")
    assert stage.committed() == []  # readers wait for the open transaction
    stage.becomes("other", within_s=5)
    with pytest.raises((ProducerFencedError, InvalidTxnStateError), match=stage.id):
        late.commit_transaction()
    assert stage.committed() == ["other"]


# ---- another process -------------------------------------------------------------------------------------------------

DRIVER = """
import json, sys
from spark_kafka_sink.common.open_transaction import OpenTransaction
from spark_kafka_sink.producer.kafka_producer import KafkaProducer
from spark_kafka_sink.producer.transactions import PreparedTransaction

servers, work = sys.argv[1], json.loads(sys.argv[2])
for (values, is_empty), committed in work:
    transaction = OpenTransaction(*values)
    with KafkaProducer({"bootstrap.servers": servers, "transactional.id": transaction.transactional_id}) as producer:
        producer.resume_transaction(PreparedTransaction(transaction, is_empty))
        if committed:
            producer.commit_transaction()
        else:
            producer.abort_transaction()
"""


def end_elsewhere(servers: str, *work: tuple[PreparedTransaction, bool]) -> subprocess.CompletedProcess[str]:
    """End prepared transactions in a new process, where True means commit."""
    return run_strictly(DRIVER, servers, json.dumps(work))


def test_another_process_ends_prepared_transactions(cluster: Cluster, start_producer: StartProducer) -> None:
    kept, dropped = Stage(cluster, start_producer), Stage(cluster, start_producer)
    task, to_keep = kept.prepared("a", "b")
    other, to_drop = dropped.prepared("c")
    transaction = to_keep.transaction
    assert (transaction.transactional_id, transaction.transaction_version) == (kept.id, cluster.version)
    assert not to_keep.is_empty
    assert kept.committed() == []
    driver = end_elsewhere(cluster.servers, (to_keep, True), (to_drop, False), (to_keep, True), (to_drop, False))
    assert (driver.returncode, driver.stderr) == (0, "")
    kept.becomes("a", "b")
    dropped.becomes()
    for stage, producer in ((kept, task), (dropped, other)):
        producer.init_transactions()
        stage.commit(producer, "next")
    kept.becomes("a", "b", "next")
    dropped.becomes("next")


def test_transaction_committed_elsewhere_cannot_be_aborted(stage: Stage) -> None:
    _, prepared = stage.prepared("a")
    driver = end_elsewhere(stage.cluster.servers, (prepared, True), (prepared, False))
    assert driver.returncode == 1
    assert "InvalidTxnStateError" in driver.stderr
    stage.becomes("a")


def test_a_prepared_transaction_is_lost_to_a_newer_producer(stage: Stage) -> None:
    task, prepared = stage.prepared("a")
    task.init_transactions()
    driver = stage.producer()
    driver.resume_transaction(prepared)
    with pytest.raises(ProducerFencedError, match=stage.id):
        driver.commit_transaction()
    stage.commit(task, "b")
    stage.becomes("b")


def test_resuming_producer_begins_transactions_only_after_init(stage: Stage) -> None:
    _, prepared = stage.prepared("a")
    driver = stage.producer()
    driver.resume_transaction(prepared)
    driver.commit_transaction()
    with pytest.raises(IllegalStateError):
        driver.begin_transaction()
    driver.init_transactions()
    for value in ("b", "c"):
        stage.commit(driver, value)
    stage.becomes("a", "b", "c")


# ---- a restart of the coordinator -----------------------------------------------------------------------------------


@own_clusters
def test_coordinator_restart_during_a_transaction_loses_nothing(stage: Stage) -> None:
    kafka = stage.cluster.kafka
    assert kafka is not None
    producer = stage.started()
    for value in ("a", "b"):
        producer.send(stage.topic, value, partition=0).result(30)
    kafka.kill_node(1)
    kafka.start_node(1)
    late = producer.send(stage.topic, "c", partition=1)
    producer.commit_transaction()
    assert late.result(0).partition == 1
    stage.becomes("a", "b", "c")
    producer.begin_transaction()
    producer.send(stage.topic, "aborted", partition=0)
    producer.abort_transaction()
    stage.commit(producer, "d")
    stage.becomes("a", "b", "d", "c")
