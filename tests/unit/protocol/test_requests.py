"""Every request in every version that it supports, read back by kio."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from kio.serial import entity_reader
from support.scripted_broker.responses import encode_response

from spark_kafka_sink.common.errors import ClusterAuthorizationError, UnsupportedVersionError
from spark_kafka_sink.protocol.fetch import (
    LATEST_TIMESTAMP,
    READ_COMMITTED,
    FetchPartition,
    FetchRequest,
    ListOffsetsPartition,
    ListOffsetsRequest,
    OffsetFetchRequest,
    group_offsets_of,
)
from spark_kafka_sink.protocol.framing import RecordChunks, encode_request, parse_response
from spark_kafka_sink.protocol.handshake import ApiVersionsRequest, SaslAuthenticateRequest, SaslHandshakeRequest
from spark_kafka_sink.protocol.metadata import (
    GROUP,
    TRANSACTION,
    CreateTopicRequest,
    DescribeBrokerConfigsRequest,
    DescribeQuorumRequest,
    DescribeTopicConfigsRequest,
    FindCoordinatorRequest,
    FindCoordinatorsRequest,
    MetadataRequest,
    PermissionsRequest,
    coordinator_of,
    time_of_quorum,
)
from spark_kafka_sink.protocol.produce import ProduceRequest
from spark_kafka_sink.protocol.telemetry import GetTelemetrySubscriptionsRequest, PushTelemetryRequest
from spark_kafka_sink.protocol.transactions import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    DescribeProducersRequest,
    DescribeTransactionsRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    ListTransactionsRequest,
    OffsetToCommit,
    TxnOffsetCommitRequest,
)
from spark_kafka_sink.protocol.versions import SUPPORTED_VERSIONS, ApiKey, Request, request_type, to_ms

REQUESTS: list[Request] = [
    ApiVersionsRequest("spark-kafka-sink", "0.1"),
    MetadataRequest(("a", "b"), allow_auto_topic_creation=False),
    MetadataRequest(None),
    InitProducerIdRequest("txn", 60_000),
    FetchRequest({"t": [FetchPartition(1, 2, 3, current_leader_epoch=4)]}, 500, isolation_level=READ_COMMITTED),
    ListOffsetsRequest({"t": [ListOffsetsPartition(0, LATEST_TIMESTAMP, current_leader_epoch=9)]}),
    FindCoordinatorRequest("txn", TRANSACTION),
    OffsetFetchRequest("group", {"t": [0, 1]}),
    OffsetFetchRequest("group", None),
    AddPartitionsToTxnRequest("txn", 7, 1, {"t": [0, 3]}),
    AddOffsetsToTxnRequest("txn", 7, 1, "group"),
    EndTxnRequest("txn", 7, 1, committed=True),
    TxnOffsetCommitRequest("txn", 7, 1, "group", {"t": [OffsetToCommit(0, 55, "m", leader_epoch=3)]}),
    TxnOffsetCommitRequest("txn", 7, 1, "group", {"t": [OffsetToCommit(0, 55)]}, transaction_version=1),
    SaslHandshakeRequest("SCRAM-SHA-512"),
    SaslAuthenticateRequest(b"secret"),
    DescribeProducersRequest({"t": [0, 1]}),
    DescribeTransactionsRequest(("txn",)),
    PermissionsRequest(("t",)),
    CreateTopicRequest("t", 3, -1, {"cleanup.policy": "compact"}, validate_only=True),
    DescribeBrokerConfigsRequest(3, ("auto.create.topics.enable",)),
    DescribeQuorumRequest(),
    DescribeTopicConfigsRequest("t", ("cleanup.policy",)),
    ListTransactionsRequest(("Ongoing",), (7,)),
    GetTelemetrySubscriptionsRequest(),
    PushTelemetryRequest(uuid.uuid4(), 7, True, 4, b"metrics"),
]


def written_and_read(request: Request, version: int) -> Any:
    entity = request.build(version)
    frame = b"".join(encode_request(entity, 1, "c"))
    _, at = entity_reader(type(entity).__header_schema__)(frame, 4)
    body, size = entity_reader(type(entity))(frame, 4 + at)
    assert 4 + at + size == len(frame)
    assert body == entity
    return body


def versions_of(request: Request) -> range:
    return range(request.oldest_version, request.latest_version + 1)


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: type(request).__name__)
def test_request_can_be_written_in_every_version_it_claims(request_: Request) -> None:
    for version in versions_of(request_):
        if isinstance(request_, ListOffsetsRequest) and version == 1:
            continue  # no isolation level: refused below
        body = written_and_read(request_, version)
        assert (body.__api_key__, body.__version__) == (request_.api_key, version)


def test_every_api_key_has_a_request() -> None:
    assert {request.api_key for request in REQUESTS} | {ApiKey.PRODUCE} == set(ApiKey) == set(SUPPORTED_VERSIONS)


def test_metadata_request_distinguishes_all_topics_from_no_topics() -> None:
    assert written_and_read(MetadataRequest(None), 12).topics is None
    assert written_and_read(MetadataRequest(()), 12).topics == ()
    assert [topic.name for topic in written_and_read(MetadataRequest(("a",)), 4).topics] == ["a"]


@pytest.mark.parametrize("version", versions_of(MetadataRequest(None)))
def test_auto_creation_is_declined_in_every_version(version: int) -> None:
    assert written_and_read(MetadataRequest(("a",), False), version).allow_auto_topic_creation is False


@pytest.mark.parametrize("version", versions_of(PermissionsRequest(())))
def test_permissions_are_asked_for_where_the_version_has_them(version: int) -> None:
    body = written_and_read(PermissionsRequest(("t",)), version)
    assert body.allow_auto_topic_creation is False
    if version >= 8:
        assert body.include_topic_authorized_operations is True


def test_topic_is_created_unless_the_request_only_validates() -> None:
    assert written_and_read(CreateTopicRequest("t", 1, 1), 7).validate_only is False
    assert written_and_read(CreateTopicRequest("t", 1, 1, validate_only=True), 7).validate_only is True


def quorum(leader: int, *voters: tuple[int, int], error_code: int = 0) -> Any:
    partition = {
        "leader_id": leader,
        "current_voters": [{"replica_id": node, "last_caught_up_timestamp": time} for node, time in voters],
    }
    values = {"error_code": error_code, "topics": [{"topic_name": "__cluster_metadata", "partitions": [partition]}]}
    frame = encode_response(int(ApiKey.DESCRIBE_QUORUM), 2, 1, values)
    return parse_response(request_type(int(ApiKey.DESCRIBE_QUORUM), 2), frame[4:])[1]


def test_time_of_the_quorum_is_that_of_its_leader() -> None:
    assert time_of_quorum(quorum(2, (1, 500), (2, 1_700_000_000_000))) == 1_700_000_000_000


def test_quorum_without_a_leader_has_no_time() -> None:
    assert time_of_quorum(quorum(-1, (1, 500), (2, 600))) is None
    assert time_of_quorum(quorum(2, (1, 500), (2, -1))) is None


def test_refused_quorum_request_is_an_error() -> None:
    with pytest.raises(ClusterAuthorizationError):
        time_of_quorum(quorum(-1, error_code=31))


def test_durations_are_ms() -> None:
    assert to_ms(written_and_read(InitProducerIdRequest("t", 61_001), 5).transaction_timeout) == 61_001
    assert to_ms(written_and_read(FetchRequest({}, 501), 12).max_wait) == 501
    assert to_ms(ProduceRequest(1, 12_345, {}).build(12).timeout) == 12_345


@pytest.mark.parametrize("version", [3, 7, 9, 12])
def test_produce_request_carries_each_partition_of_each_topic(version: int) -> None:
    batches = {
        "a": [(0, RecordChunks([memoryview(b"one"), memoryview(b"two")])), (7, RecordChunks([memoryview(b"three")]))],
        "b": [(1, RecordChunks([memoryview(b"")]))],
    }
    entity = ProduceRequest(-1, 30_000, batches, "txn").build(version)
    frame = b"".join(encode_request(entity, 1, "c"))
    _, at = entity_reader(type(entity).__header_schema__)(frame, 4)
    body, _ = entity_reader(type(entity))(frame, 4 + at)
    found = {t.name: [(p.index, bytes(p.records)) for p in t.partition_data] for t in body.topic_data}
    assert found == {"a": [(0, b"onetwo"), (7, b"three")], "b": [(1, b"")]}
    assert (body.acks, body.transactional_id) == (-1, "txn")


def test_zstd_needs_a_broker_that_can_read_it() -> None:
    assert ProduceRequest(-1, 1, {}).oldest_version == 3
    assert ProduceRequest(-1, 1, {}, has_zstd=True).oldest_version == 7


@pytest.mark.parametrize(
    ("member", "oldest"),
    [({}, 0), ({"generation_id": 3}, 3), ({"member_id": "m"}, 3), ({"group_instance_id": "i"}, 3)],
)
def test_offsets_of_a_member_need_a_broker_that_fences(member: dict[str, Any], oldest: int) -> None:
    request = TxnOffsetCommitRequest("txn", 7, 1, "group", {}, **member, transaction_version=1)
    assert request.oldest_version == oldest
    assert bool(request.purpose) == bool(member)


@pytest.mark.parametrize(
    ("of_version", "under_1", "under_2"),
    [
        (lambda v: ProduceRequest(-1, 1, {}, "txn", transaction_version=v), 11, 12),
        (lambda v: EndTxnRequest("txn", 1, 1, True, transaction_version=v), 4, 5),
        (lambda v: TxnOffsetCommitRequest("txn", 1, 1, "g", {}, transaction_version=v), 4, 5),
    ],
)
def test_transaction_version_1_avoids_request_versions_of_version_2(
    of_version: Any, under_1: int, under_2: int
) -> None:
    assert of_version(1).latest_version == under_1
    assert of_version(2).latest_version == under_2


@pytest.mark.parametrize(
    "of_version",
    [
        lambda v: ProduceRequest(-1, 1, {}, "txn", transaction_version=v, has_zstd=True),
        lambda v: TxnOffsetCommitRequest("txn", 1, 1, "g", {}, member_id="m", transaction_version=v),
    ],
)
def test_requests_that_add_to_a_transaction_of_version_2_have_no_older_version(of_version: Any) -> None:
    """A broker adds nothing to the transaction for an older one. EndTxn has no such limit: it must always be possible
    to end what is open.
    """
    assert of_version(2).oldest_version == of_version(2).latest_version == of_version(1).latest_version + 1
    assert "transaction.version=2" in of_version(2).purpose
    assert of_version(1).oldest_version < of_version(1).latest_version
    assert "transaction.version" not in of_version(1).purpose
    assert EndTxnRequest("txn", 1, 1, True).oldest_version == 0


def test_without_transactional_id_the_transaction_version_does_not_matter() -> None:
    assert ProduceRequest(-1, 1, {}, transaction_version=1).latest_version == 12


@pytest.mark.parametrize(
    ("request_", "version", "field"),
    [
        (InitProducerIdRequest("t", 1, producer_id=7, producer_epoch=1), 2, "producer_id"),
        (ListOffsetsRequest({}, isolation_level=READ_COMMITTED), 1, "isolation_level"),
        (TxnOffsetCommitRequest("t", 1, 1, "g", {}, member_id="m"), 2, "member_id"),
        (ListTransactionsRequest(pattern="x.*"), 1, "transactional_id_pattern"),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "build") else str(value),
)
def test_field_missing_in_an_old_version_is_refused_not_dropped(request_: Request, version: int, field: str) -> None:
    with pytest.raises(UnsupportedVersionError, match=field):
        request_.build(version)
    request_.build(request_.latest_version)


def test_hints_unknown_to_old_brokers_are_dropped() -> None:
    fetch = FetchRequest({"t": [FetchPartition(0, 1, 2, current_leader_epoch=9)]}, 1)
    assert not hasattr(fetch.build(8).topics[0].partitions[0], "current_leader_epoch")
    assert fetch.build(9).topics[0].partitions[0].current_leader_epoch == 9
    commit = TxnOffsetCommitRequest("t", 1, 1, "g", {"t": [OffsetToCommit(0, 1, leader_epoch=5)]})
    assert commit.build(2).topics[0].partitions[0].committed_leader_epoch == 5
    assert not hasattr(commit.build(1).topics[0].partitions[0], "committed_leader_epoch")


def test_secrets_stay_out_of_the_repr() -> None:
    assert "secret" not in repr(SaslAuthenticateRequest(b"secret"))


def parsed(api_key: int, version: int, values: dict[str, Any]) -> Any:
    return parse_response(request_type(api_key, version), encode_response(api_key, version, 1, values)[4:])[1]


@pytest.mark.parametrize("version", [1, 3, 4, 6])
def test_coordinator_is_found_in_every_shape_of_the_answer(version: int) -> None:
    node = {"node_id": 3, "host": "h", "port": 9, "error_code": 0, "error_message": None}
    values = node if version < 4 else {"coordinators": [{**node, "key": "other", "port": 1}, {**node, "key": "k"}]}
    found = coordinator_of(parsed(10, version, values), "k")
    assert found == (3, "h", 9, 0, None)


def test_answer_about_other_keys_gives_no_coordinator() -> None:
    assert coordinator_of(parsed(10, 4, {"coordinators": []}), "k") is None


@pytest.mark.parametrize("version", [1, 5, 8, 9])
def test_groups_offsets_are_found_in_every_shape_of_the_answer(version: int) -> None:
    topics = [
        {"name": "t", "partitions": [{"partition_index": 0, "committed_offset": 5, "metadata": "", "error_code": 0}]}
    ]
    values: dict[str, Any] = {"topics": topics} if version < 8 else {"groups": [{"group_id": "g", "topics": topics}]}
    found = group_offsets_of(parsed(9, version, values), "g")
    assert found is not None
    assert found.topics[0].partitions[0].committed_offset == 5
    if version >= 8:
        assert group_offsets_of(parsed(9, version, values), "other") is None


def test_find_coordinator_sends_the_type_of_its_key() -> None:
    assert written_and_read(FindCoordinatorRequest("g", GROUP), 1).key_type == 0
    assert written_and_read(FindCoordinatorRequest("t", TRANSACTION), 6).coordinator_keys == ("t",)


@pytest.mark.parametrize("version", [4, 6])
def test_several_coordinators_are_asked_for_at_once_from_version_4(version: int) -> None:
    request = FindCoordinatorsRequest(("a", "b"), TRANSACTION)
    found = written_and_read(request, version)
    assert (found.coordinator_keys, found.key_type) == (("a", "b"), TRANSACTION)
    assert (request.oldest_version, request.latest_version) == (4, 6)
