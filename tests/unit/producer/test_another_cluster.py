"""A producer whose addresses lead to another cluster, as after a disaster (KIP-899).

Each cluster counts its producer ids from the same numbers. So the producer's own id may be that of another producer in
the other cluster.
"""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace

import pytest
from support.producer_harness import AT_ONCE, TOPIC, ProducerHarness
from support.scripted_broker.cluster import ScriptedCluster
from support.transaction_harness import TransactionHarness

from spark_kafka_sink.client.backoff import ExponentialBackoff
from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.producer.idempotence import ProducerIdentity


def another_cluster() -> ScriptedCluster:
    """Return one with the same topic, whose first producer has written a record to each partition."""
    other = ScriptedCluster(seed=7)
    other.cluster_id = "another-cluster"
    rival = ProducerHarness(AT_ONCE, topics={TOPIC: 2}, cluster=other)
    for partition in range(2):
        rival.send(b"theirs", partition=partition)
    rival.settle()
    return other


def fail_over(harness: ProducerHarness, other: ScriptedCluster) -> None:
    """The broker goes away. Later its address leads to `other`."""
    harness.network.stop(0)
    harness.run_for(5_000)
    assert harness.metadata.fetch().is_bootstrap_configured
    harness.cluster = harness.network.cluster = other
    harness.network.start(0)


@pytest.fixture
def harness() -> ProducerHarness:
    """A producer that has written to partition 0 only."""
    made = ProducerHarness(AT_ONCE, topics={TOPIC: 2})
    made.send(b"before", partition=0)
    made.settle()
    return made


def test_cluster_that_was_made_again_under_its_id_takes_no_record_for_anothers(harness: ProducerHarness) -> None:
    """Bug: a cluster that was made again from nothing, with its old cluster id, was taken for the same. A record was
    acknowledged as a duplicate of another producer's, and was in no log.
    """
    other = another_cluster()
    other.cluster_id = harness.cluster.cluster_id
    fail_over(harness, other)
    sent = harness.send(b"ours", partition=1)
    harness.settle()
    assert sent.error is None
    assert harness.values(partition=1) == [b"theirs", b"ours"]


def test_record_is_not_taken_for_that_of_another_producer(harness: ProducerHarness) -> None:
    """Bug: the producer kept its id. It was the id of a producer of the other cluster, and the leader there took the
    record, the first one in its partition as well, for a duplicate: it was acknowledged, and in no log.
    """
    fail_over(harness, another_cluster())
    sent = harness.send(b"ours", partition=1)
    harness.settle()
    assert sent.error is None
    assert harness.values(partition=1) == [b"theirs", b"ours"]


@pytest.mark.parametrize("strategy", ["rebootstrap", "none"])
def test_record_does_not_go_ahead_of_the_metadata_that_shows_another_cluster(strategy: str) -> None:
    """Bug: metadata was fresh when the connection was lost, so the next one waited for its pause. The address led to
    another cluster at once, as behind a proxy, and the record went there under the old id. It was acknowledged as a
    duplicate, and in no log.
    """
    harness = ProducerHarness({**AT_ONCE, "metadata.recovery.strategy": strategy}, topics={TOPIC: 2})
    harness.send(b"before", partition=0)
    harness.settle()
    harness.cluster = harness.network.cluster = another_cluster()
    harness.network.cut(0)
    sent = harness.send(b"ours", partition=1)
    harness.settle()
    assert sent.error is None
    assert harness.values(partition=1) == [b"theirs", b"ours"]


def test_batch_without_an_answer_goes_to_the_other_cluster_under_a_new_id(harness: ProducerHarness) -> None:
    harness.network.held.add(0)
    lost = harness.send(b"lost", partition=0)
    harness.run_for(100)
    other = another_cluster()
    fail_over(harness, other)
    harness.network.held.clear()
    later = harness.send(b"later", partition=0)
    harness.settle()
    assert (lost.error, later.error) == (None, None)
    assert harness.values() == [b"theirs", b"lost", b"later"]
    headers = [batch.header for batch in other.log(TOPIC, 0).batches]
    assert headers[0].producer_id != headers[1].producer_id
    assert [header.base_sequence for header in headers] == [0, 0, 1]


def test_new_producer_id_is_explained_in_the_log(harness: ProducerHarness, caplog: pytest.LogCaptureFixture) -> None:
    fail_over(harness, another_cluster())
    with caplog.at_level(logging.WARNING):
        harness.send(b"ours", partition=1)
        harness.settle()
    (line,) = [text for text in caplog.messages if "another cluster" in text]
    assert "scripted-cluster" in line


def test_same_cluster_gets_the_same_producer(harness: ProducerHarness) -> None:
    before = harness.identity.producer
    fail_over(harness, harness.cluster)
    harness.send(b"after", partition=0)
    harness.settle()
    assert harness.identity.producer == before
    assert harness.values() == [b"before", b"after"]


@pytest.mark.parametrize("cluster_id", [None, "scripted-cluster"])
def test_cluster_that_does_not_give_its_id_is_not_another_one(harness: ProducerHarness, cluster_id: str | None) -> None:
    before = harness.identity.producer
    for each in (None, cluster_id):
        harness.cluster.cluster_id = each
        fail_over(harness, harness.cluster)
        harness.send(b"after", partition=0)
        harness.settle()
    assert harness.identity.producer == before


def test_producer_id_from_the_cluster_before_is_not_taken() -> None:
    """Its answer was under way when metadata showed the other cluster."""
    identity = ProducerIdentity(ExponentialBackoff(100, 2, 1_000, 0, random.Random(1)))
    for given, taken in ((7, -1), (9, 9)):
        identity.bump_epoch_if_needed(lambda: False)
        asked = identity.next_request(1_000, lambda: False)
        assert asked is not None
        asked.take()
        if given == 7:
            identity.give_up_id()
        asked.answered(SimpleNamespace(error_code=0, producer_id=given, producer_epoch=0), "0", 0)
        assert identity.producer.producer_id == taken


@pytest.mark.parametrize("version", [1, 2])
def test_transaction_does_not_go_on_in_another_cluster(version: int) -> None:
    """Its records there would belong to no transaction that a coordinator knows, and hold up all readers."""
    harness = TransactionHarness(version, {"max.block.ms": "60000"}).started()
    harness.send(b"before", partition=0)
    harness.settle()
    fail_over(harness, another_cluster())
    lost = harness.send(b"lost", partition=0)
    harness.settle()
    assert lost.error is not None
    with pytest.raises(KafkaError, match="another cluster") as caught:
        harness.producer.commit_transaction()
    assert caught.value.fatal
    assert harness.producer.has_failed
    assert harness.values() == [b"theirs"]
