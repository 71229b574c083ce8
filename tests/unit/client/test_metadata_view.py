from __future__ import annotations

import uuid
from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from support.scripted_broker.responses import encode_response

from spark_kafka_sink.client.metadata_view import MetadataResponse
from spark_kafka_sink.common.cluster import Node, PartitionMetadata, TopicPartition
from spark_kafka_sink.protocol.framing import parse_response
from spark_kafka_sink.protocol.versions import SUPPORTED_VERSIONS, ApiKey, request_type

TOPIC_ID = uuid.UUID(int=77)
VERSIONS = SUPPORTED_VERSIONS[ApiKey.METADATA]


def parse(version: int, **changes: Any) -> MetadataResponse:
    partition = {
        "error_code": ErrorCode.leader_not_available,
        "partition_index": 0, "leader_id": -1, "leader_epoch": -1, "replica_nodes": (1, 2),
        "isr_nodes": (1,), "offline_replicas": (2,),
    }  # fmt: skip
    values = {
        "throttle_time": 0,
        "brokers": [{"node_id": 1, "host": "b", "port": 9092, "rack": "r"}],
        "cluster_id": "c",
        "controller_id": 1,
        "topics": [
            {
                "error_code": 0, "name": "t", "topic_id": TOPIC_ID, "is_internal": True,
                "partitions": [partition, {**partition, "error_code": 0, "leader_id": 1, "leader_epoch": 4}],
            }
        ],
        "error_code": ErrorCode.rebootstrap_required,
    }  # fmt: skip
    frame = encode_response(ApiKey.METADATA, version, 0, values | changes)
    return MetadataResponse.from_entity(parse_response(request_type(ApiKey.METADATA, version), frame[4:])[1])


@pytest.mark.parametrize("version", range(VERSIONS.oldest, VERSIONS.latest + 1))
def test_every_version_gives_the_same_values_that_it_has(version: int) -> None:
    answer = parse(version)
    has_epoch, has_offline = version >= 7, version >= 5
    offline = (2,) if has_offline else ()
    assert answer.brokers == {1: Node(1, "b", 9092, "r")}
    assert answer.controller == Node(1, "b", 9092, "r")
    assert answer.cluster_id == "c"
    assert answer.has_reliable_leader_epochs == (version >= 9)
    assert answer.error_code == (ErrorCode.rebootstrap_required if version >= 13 else 0)
    (topic,) = answer.topics
    assert (topic.name, topic.error_code) == ("t", 0)
    assert topic.topic_id == (TOPIC_ID if version >= 10 else None)
    where = TopicPartition("t", 0)
    assert topic.partitions == (
        PartitionMetadata(where, None, None, (1, 2), (1,), offline, 5),
        PartitionMetadata(where, 1, 4 if has_epoch else None, (1, 2), (1,), offline, 0),
    )


def test_unknown_values_are_none() -> None:
    answer = parse(
        12,
        cluster_id=None,
        controller_id=-1,
        topics=[{"error_code": ErrorCode.unknown_topic_or_partition, "name": "t"}],
    )
    assert answer.cluster_id is None
    assert answer.controller is None
    assert answer.topics[0].topic_id is None
    assert list(answer.error_codes()) == [("t", 3)]


@pytest.mark.parametrize(
    ("numbers", "has_gaps"),
    [((), False), ((0,), False), ((1, 0), False), ((0, 0, 1), False), ((1,), True), ((0, 2), True), ((-1, 0), True)],
)
def test_topic_with_a_missing_partition_counts_as_one_without_leader(numbers: tuple[int, ...], has_gaps: bool) -> None:
    partitions = [{"error_code": 0, "partition_index": number, "leader_id": 1} for number in numbers]
    (topic,) = parse(12, topics=[{"error_code": 0, "name": "t", "partitions": partitions}]).topics
    assert (topic.has_gaps, topic.error_code) == (has_gaps, 5 if has_gaps else 0)


def test_refused_topic_keeps_its_error() -> None:
    partitions = [{"error_code": 0, "partition_index": 7, "leader_id": 1}]
    (topic,) = parse(12, topics=[{"error_code": 29, "name": "t", "partitions": partitions}]).topics
    assert (topic.has_gaps, topic.error_code) == (False, 29)


def test_zero_topic_id_means_no_id() -> None:
    answer = parse(
        12, topics=[{"error_code": ErrorCode.unknown_topic_or_partition, "name": "t", "topic_id": uuid.UUID(int=0)}]
    )
    assert answer.topics[0].topic_id is None


def test_topic_without_a_name_is_left_out() -> None:
    assert (
        parse(12, topics=[{"error_code": ErrorCode.unknown_topic_id, "name": None, "topic_id": TOPIC_ID}]).topics == ()
    )


def test_unlisted_controller_is_none() -> None:
    assert parse(12, controller_id=9).controller is None
