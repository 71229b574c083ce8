"""Rows 18, 20 to 22, 24, 25, 29, 31, 33 and 51: topics that come and go, limits, quotas and fencing. If a test of the
producer covers a row, the row calls that test.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from integration.producer import test_node_failures as node_failures
from integration.producer import test_partitions as partitions
from integration.producer import test_refusals as refusals
from integration.producer import test_transactions as transactions
from support.cluster_admin import set_producer_quota
from support.fault_stage import FaultStage
from support.lateness import Stopwatch
from support.librdkafka import committed_offset, read_values

from spark_kafka_sink.common.errors import InvalidTopicError
from spark_kafka_sink.local import Admin, EmbeddedKafka
from spark_kafka_sink.producer.kafka_producer import KafkaProducer

StartProducer = Callable[..., KafkaProducer]
MakeTopic = Callable[..., str]


def test_row_18_unknown_topic(one_node: FaultStage, start_producer: StartProducer) -> None:
    node_failures.test_missing_topic_is_named_within_max_block_ms(one_node.kafka, start_producer)


def test_row_18_topic_deleted_and_recreated(one_node: FaultStage, start_producer: StartProducer) -> None:
    node_failures.test_writes_continue_after_a_topic_is_deleted_and_recreated(one_node.kafka, start_producer)


def test_row_20_more_partitions(broker: Admin, make_topic: MakeTopic, start_producer: StartProducer) -> None:
    partitions.test_partitions_added_live_are_used_within_metadata_max_age(broker, make_topic, start_producer)


def test_row_21_message_too_large_of_many(broker: Admin, make_topic: MakeTopic, start_producer: StartProducer) -> None:
    refusals.test_too_large_batches_are_split_in_order(broker, make_topic, start_producer, 3_000, {})


def test_row_21_message_too_large_of_one(broker: Admin, make_topic: MakeTopic, start_producer: StartProducer) -> None:
    refusals.test_record_over_the_brokers_limit_fails_without_its_neighbours(broker, make_topic, start_producer)


def test_row_22_record_list_too_large(broker: Admin, make_topic: MakeTopic, start_producer: StartProducer) -> None:
    refusals.test_batch_over_segment_size_fails_and_others_arrive(broker, make_topic, start_producer)


def test_row_24_invalid_record(broker: Admin, make_topic: MakeTopic, start_producer: StartProducer) -> None:
    refusals.test_only_the_invalid_record_of_a_batch_gets_the_cause(broker, make_topic, start_producer)


def test_row_25_quota(one_node: FaultStage, start_producer: StartProducer) -> None:
    """The broker's throttle time is longer than request.timeout.ms, and no request is lost by it."""
    ((topic, _),) = one_node.new_topic()
    name = f"throttled-{topic}"
    set_producer_quota(one_node.direct, name, 10_000.0)  # averaged over ten seconds
    settings = {
        "client.id": name,
        "request.timeout.ms": 700,
        "linger.ms": 0,
        "max.in.flight.requests.per.connection": 2,
    }
    producer = start_producer(one_node.direct, **settings)
    values = [f"{number:05}" + "." * 10_000 for number in range(12)]
    began = time.monotonic()
    for value in values:
        producer.send(topic, value, partition=0)
        time.sleep(0.02)
    producer.flush(60)
    took, metrics = time.monotonic() - began, producer.metrics()
    set_producer_quota(one_node.direct, name, None)
    one_node.note(f"120 kB in {took:.1f} s; throttled {metrics['produce-throttle-time-max']:.0f} ms at most")
    assert metrics["produce-throttle-time-max"] > 700
    assert took > 1
    assert metrics["record-retry-total"] == metrics["record-error-total"] == 0
    assert read_values(one_node.direct, topic) == values


def test_row_29_producer_id_expires(
    own_kafka: Callable[..., EmbeddedKafka], start_producer: StartProducer, timeline: object
) -> None:
    """Brokers forget an idle producer id, without an effect for the user."""
    kafka = own_kafka(properties={"producer.id.expiration.ms": 300, "producer.id.expiration.check.interval.ms": 100})
    kafka.create_topic("t")
    producer = start_producer(kafka.bootstrap_servers, **{"linger.ms": 0, "batch.size": 1})
    for round_ in range(3):
        offsets = [producer.send("t", f"{round_}-{number}") for number in range(5)]
        assert [future.result(10).offset for future in offsets] == list(range(round_ * 5, round_ * 5 + 5))
        time.sleep(1)
    assert len(read_values(kafka.bootstrap_servers, "t")) == 15


@pytest.fixture(params=["version 2", "version 1"])
def stage(
    request: pytest.FixtureRequest, one_node: FaultStage, one_node_of_old: FaultStage, start_producer: StartProducer
) -> transactions.Stage:
    version = int(request.param[-1])
    node = one_node if version == 2 else one_node_of_old
    return transactions.Stage(transactions.Cluster(Admin(node.direct), version, node.kafka), start_producer)


def test_row_31_fenced_by_the_coordinator(stage: transactions.Stage) -> None:
    transactions.test_a_newer_producer_fences_an_older_one(stage)


def test_row_31_fenced_by_the_leader(stage: transactions.Stage) -> None:
    transactions.test_fenced_producer_cannot_send_more(stage)


def test_row_33_transaction_outlives_its_timeout(stage: transactions.Stage) -> None:
    with Stopwatch() as watch:
        transactions.test_transaction_after_its_timeout_is_never_committed(stage)
    assert watch.own_s < 1 + 10


def test_row_51_names_that_no_topic_can_have(
    broker: Admin, make_topic: MakeTopic, start_producer: StartProducer
) -> None:
    refusals.test_invalid_topic_names_are_refused_and_others_arrive(broker, make_topic, start_producer)


def test_row_51_internal_topic(one_node: FaultStage, start_producer: StartProducer) -> None:
    ((topic, _),) = one_node.new_topic()
    committed_offset(one_node.direct, "anybody", topic)  # creates the internal topic
    producer = start_producer(one_node.direct, **{"linger.ms": 0})
    with Stopwatch() as watch, pytest.raises(InvalidTopicError, match="__consumer_offsets"):
        producer.send("__consumer_offsets", b"forged").result(10)
    assert watch.own_s < 3
    assert producer.send(topic, b"others flow").result(10).offset == 0
