"""A broker leaves out the end marker for a partition without a leader (KAFKA-20734): rows are read once all the same.

Topics of one replica lose their leader with its node. Real brokers of both transaction versions.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from support.exactly_once_batches import Query, own_pool
from support.exactly_once_streams import check_nothing_open

from spark_kafka_sink.common.errors import IllegalStateError
from spark_kafka_sink.common.open_transaction import OpenTransaction
from spark_kafka_sink.local import EmbeddedKafka
from spark_kafka_sink.sink.exactly_once.cluster import KafkaDriverCluster

NO_LEADER = -1
LIMIT_S = 60.0


class DriverDiedError(Exception):
    """Raised where the driver is to end."""


class Stage:
    """A query on three nodes. Its topic has one replica."""

    def __init__(self, kafka: EmbeddedKafka, version: int, query: Query) -> None:
        self.kafka = kafka
        self.version = version
        self.query = query

    def run(self, *tasks: Sequence[str]) -> Any:
        return self.query.run(0, *tasks, transaction_version=self.version)

    def without_leader(self, topic: str, partition: int, action: Callable[[], Any]) -> Any:
        """Do something while the partition has no leader."""
        leader = self._leader(topic, partition)
        self.kafka.kill_node(leader)
        try:
            deadline = time.monotonic() + LIMIT_S
            while self._leader(topic, partition) != NO_LEADER:
                assert time.monotonic() < deadline, "the partition keeps its leader"
                time.sleep(0.1)
            return action()
        finally:
            self.kafka.start_node(leader)

    def _leader(self, topic: str, partition: int) -> int:
        return self.kafka.describe_topic(topic).partitions[partition].leader


@pytest.fixture(scope="module", params=[2, 1], ids=["version 2", "version 1"])
def nodes(request: pytest.FixtureRequest, module_kafka: Callable[..., EmbeddedKafka]) -> tuple[EmbeddedKafka, int]:
    properties = {"broker.session.timeout.ms": 2_000, "transaction.state.log.num.partitions": 4}
    kafka = module_kafka(3, properties=properties, features={"transaction.version": request.param})
    return kafka, request.param


@pytest.fixture
def stage(request: pytest.FixtureRequest, nodes: tuple[EmbeddedKafka, int]) -> Iterator[Stage]:
    """The parameter is the number of replicas of the decision topic."""
    kafka, version = nodes
    topic = f"end-markers-{uuid.uuid4().hex[:8]}"
    kafka.create_topic(topic, 1, 1)
    kafka.create_topic(f"decisions-of-{topic}", 1, getattr(request, "param", 3), {"cleanup.policy": "compact"})
    with own_pool() as pool:
        query = Query(kafka.bootstrap_servers, topic, pool, decisions=f"decisions-of-{topic}")
        yield Stage(kafka, version, query)
        check_nothing_open(kafka.bootstrap_servers, query.prefix)


def ending(monkeypatch: pytest.MonkeyPatch, is_meant: Callable[[str], bool], around: Callable[..., Any]) -> None:
    """Call `around` instead of the first commit of a transactional id that `is_meant`, with the call that does it."""
    real = KafkaDriverCluster.end
    done: list[str] = []

    def end(self: KafkaDriverCluster, transactions: Sequence[OpenTransaction], *, committed: bool) -> Any:
        names = [each.transactional_id for each in transactions if is_meant(each.transactional_id)]
        if not committed or not names or done:
            return real(self, transactions, committed=committed)
        done.extend(names)
        return around(lambda: real(self, transactions, committed=committed))

    monkeypatch.setattr(KafkaDriverCluster, "end", end)


def test_committed_rows_can_be_read(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: readers could not read the rows, nor any after them, and the sink said that the batch was committed."""
    query = stage.query
    ending(
        monkeypatch,
        lambda name: not name.endswith("/driver"),
        lambda commit: stage.without_leader(query.topic, 0, commit),
    )
    stage.run(["a"], ["b"])
    assert query.visible() == ["a", "b"]


def test_aborted_rows_are_not_committed_with_the_next_batch(stage: Stage) -> None:
    """Bug: the end marker of the batch that was written again committed the rows of the first run, too."""
    query = stage.query
    stage.without_leader(query.topic, 0, query.begun(0, ["a"], ["b"]).abort)
    with pytest.raises(IllegalStateError, match=rf"Batch 0 is not decided: .* earlier transaction of {query.prefix}/"):
        stage.run(["a"], ["b"])
    stage.run(["a"], ["b"])
    assert query.visible() == ["a", "b"]


@pytest.mark.parametrize("stage", [1], indirect=True)
def test_decision_without_its_marker_counts(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: no query with decisions in that partition could start any more."""
    query = stage.query

    def die(commit: Callable[[], Any]) -> None:
        stage.without_leader(f"decisions-of-{query.topic}", 0, commit)
        raise DriverDiedError

    ending(monkeypatch, lambda name: name.endswith("/driver"), die)
    with pytest.raises(DriverDiedError):
        stage.run(["a"], ["b"])
    assert stage.run(["a"], ["b"]).was_skipped
    assert query.visible() == ["a", "b"]


def test_batch_whose_topic_was_created_again_is_refused_and_written_again(stage: Stage) -> None:
    """Bug: such a batch was committed without its rows, and without an error."""
    query = stage.query
    stage.run([str(number) for number in range(10)])
    begun = query.begun(1, ["a"], ["b"])
    stage.kafka.delete_topic(query.topic)
    stage.kafka.create_topic(query.topic, 1, 1)
    with pytest.raises(IllegalStateError, match=f"{query.topic}-0 has lost rows of {query.prefix}/0"):
        begun.commit()
    begun.abort()
    query.run(1, ["a"], ["b"], transaction_version=stage.version)
    assert query.visible() == ["a", "b"]
