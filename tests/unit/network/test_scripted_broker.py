"""The scripted broker keeps a real one's rules; what is tested against it stands on them."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from crc32c import crc32c
from kio.schema.errors import ErrorCode
from support.random_entities import varint
from support.scripted_broker import faults
from support.scripted_broker.batches import HEADER, read_records
from support.scripted_broker.cluster import NO_LEADER, ScriptedCluster
from support.scripted_broker.versions import KAFKA_2_1

from spark_kafka_sink.common.errors import RequestTimedOutError
from spark_kafka_sink.protocol.fetch import (
    EARLIEST_TIMESTAMP,
    LATEST_TIMESTAMP,
    FetchPartition,
    FetchRequest,
    ListOffsetsPartition,
    ListOffsetsRequest,
)
from spark_kafka_sink.protocol.framing import RecordChunks, encode_request, parse_response
from spark_kafka_sink.protocol.handshake import ApiVersionsRequest
from spark_kafka_sink.protocol.metadata import FindCoordinatorRequest, MetadataRequest, coordinator_of
from spark_kafka_sink.protocol.produce import ProduceRequest
from spark_kafka_sink.protocol.transactions import InitProducerIdRequest
from spark_kafka_sink.protocol.versions import ApiKey, Request


def zigzag(value: int) -> bytes:
    return varint((value << 1) ^ (value >> 63))


def batch(*values: bytes, producer: tuple[int, int, int] = (-1, -1, -1), timestamp_ms: int = 5) -> bytes:
    """An uncompressed batch, from the specification and by no code of the package."""
    records = b""
    for index, value in enumerate(values):
        header = zigzag(1) + b"h" + zigzag(-1)
        body = b"\0" + zigzag(index) + zigzag(index) + zigzag(-1) + zigzag(len(value)) + value + zigzag(1) + header
        records += zigzag(len(body)) + body
    count = len(values)
    tail = struct.pack(">hiqqqhii", 0, count - 1, timestamp_ms, timestamp_ms + count - 1, *producer, count) + records
    return struct.pack(">qiiBI", 0, len(tail) + 9, -1, 2, crc32c(tail)) + tail


def ask(
    cluster: ScriptedCluster, request: Request, *, node_id: int = 0, version: int | None = None, now_ms: int = 0
) -> Any:
    """The response, None where there is none, or "closed"."""
    entity = request.build(request.latest_version if version is None else version)
    payload = b"".join(encode_request(entity, 1, "test"))[4:]
    replies = cluster.handle_frame(node_id, payload, now_ms)
    if not replies:
        return None
    ((_, data, close),) = replies
    return "closed" if close else parse_response(type(entity), data[4:])[1]


def produce(cluster: ScriptedCluster, data: bytes, *, node_id: int = 0, partition: int = 0, acks: int = -1) -> Any:
    request = ProduceRequest(acks, 1000, {"t": [(partition, RecordChunks([memoryview(data)]))]})
    response = ask(cluster, request, node_id=node_id)
    return response if not hasattr(response, "responses") else response.responses[0].partition_responses[0]


@pytest.fixture
def cluster() -> ScriptedCluster:
    made = ScriptedCluster(2, seed=1)
    made.create_topic("t", 2)
    return made


def test_batches_are_appended_at_the_next_offset_and_read_back(cluster: ScriptedCluster) -> None:
    assert produce(cluster, batch(b"a", b"b")).base_offset == 0
    assert produce(cluster, batch(b"c", timestamp_ms=9)).base_offset == 2
    found = cluster.records("t")[0]
    assert [(record.offset, record.timestamp_ms, record.value) for record in found] == [
        (0, 5, b"a"),
        (1, 6, b"b"),
        (2, 9, b"c"),
    ]
    assert found[0].headers == ((b"h", None),)
    assert cluster.records("t")[1] == []


@pytest.mark.parametrize(
    ("spoil", "error_code"),
    [
        (lambda data: data[:-1] + b"?", ErrorCode.corrupt_message),
        (lambda data: data[:-1], ErrorCode.corrupt_message),
        (lambda data: data[:16] + b"\x01" + data[17:], ErrorCode.invalid_record),
        (lambda data: data[:40], ErrorCode.corrupt_message),
        (lambda data: b"", ErrorCode.corrupt_message),
        (lambda data: data + data, ErrorCode.corrupt_message),
    ],
    ids=["checksum", "length", "magic", "header", "empty", "two batches"],
)
def test_bad_batch_is_refused_without_effect(cluster: ScriptedCluster, spoil: Any, error_code: int) -> None:
    assert produce(cluster, spoil(batch(b"value"))).error_code == error_code
    assert cluster.log("t", 0).batches == []


def test_batch_sent_again_is_kept_once_at_its_offset(cluster: ScriptedCluster) -> None:
    batches = [batch(b"x", b"y", producer=(7, 0, sequence)) for sequence in range(0, 12, 2)]
    offsets = [produce(cluster, data).base_offset for data in batches]
    assert offsets == [0, 2, 4, 6, 8, 10]
    assert [produce(cluster, data).base_offset for data in batches[1:]] == offsets[1:]
    # Only the last five are remembered.
    assert produce(cluster, batches[0]).error_code == ErrorCode.out_of_order_sequence_number
    assert cluster.log("t", 0).next_offset == 12
    assert cluster.log("t", 0).duplicates == 5


@pytest.mark.parametrize(
    ("producer", "error_code"),
    [
        ((7, 3, 2), 0),
        ((7, 3, 3), ErrorCode.out_of_order_sequence_number),
        ((7, 3, 1), ErrorCode.out_of_order_sequence_number),
        ((7, 2, 2), ErrorCode.invalid_producer_epoch),
        ((7, 4, 0), 0),
        ((7, 4, 2), ErrorCode.out_of_order_sequence_number),
        ((8, 0, 99), 0),
    ],
)
def test_sequence_and_epoch_follow_the_last_batch(
    cluster: ScriptedCluster, producer: tuple[int, int, int], error_code: int
) -> None:
    assert produce(cluster, batch(b"a", b"b", producer=(7, 3, 0))).error_code == 0
    assert produce(cluster, batch(b"c", producer=producer)).error_code == error_code


def test_sequences_wrap_to_zero(cluster: ScriptedCluster) -> None:
    assert produce(cluster, batch(b"a", b"b", b"c", producer=(7, 0, 2**31 - 2))).error_code == 0
    assert produce(cluster, batch(b"d", producer=(7, 0, 0))).error_code == ErrorCode.out_of_order_sequence_number
    assert produce(cluster, batch(b"d", producer=(7, 0, 1))).error_code == 0


def test_forgotten_producer_may_begin_anywhere(cluster: ScriptedCluster) -> None:
    produce(cluster, batch(b"a", producer=(7, 0, 0)))
    cluster.log("t", 0).forget_producers()
    assert produce(cluster, batch(b"b", producer=(7, 0, 50))).error_code == 0


def test_only_the_leader_appends_and_names_the_right_one(cluster: ScriptedCluster) -> None:
    cluster.move_leader("t", 0, 1)
    refused = produce(cluster, batch(b"a"))
    assert (refused.error_code, refused.current_leader.leader_id, refused.current_leader.leader_epoch) == (
        ErrorCode.not_leader_or_follower,
        1,
        1,
    )
    assert produce(cluster, batch(b"a"), node_id=1).error_code == 0
    cluster.has_leader_hints = False
    assert produce(cluster, batch(b"a")).current_leader.leader_id == -1
    cluster.move_leader("t", 0, NO_LEADER)
    assert produce(cluster, batch(b"a"), node_id=1).error_code == ErrorCode.not_leader_or_follower
    assert produce(cluster, batch(b"a"), partition=9).error_code == ErrorCode.unknown_topic_or_partition


def test_topic_limits_are_checked(cluster: ScriptedCluster) -> None:
    cluster.topics["t"].max_message_bytes = 100
    assert produce(cluster, batch(b"x" * 100)).error_code == ErrorCode.message_too_large
    assert produce(cluster, batch(b"x"), acks=2).error_code == ErrorCode.invalid_required_acks


def test_without_acks_only_a_failure_closes_the_connection(cluster: ScriptedCluster) -> None:
    assert produce(cluster, batch(b"a"), acks=0) is None
    assert produce(cluster, batch(b"a"), acks=0, partition=1) == "closed"


def test_metadata_has_leaders_epochs_and_ids(cluster: ScriptedCluster) -> None:
    cluster.move_leader("t", 1, NO_LEADER)
    cluster.live_node_ids.discard(1)
    answer = ask(cluster, MetadataRequest(("t", "none", "a b")))
    assert [broker.node_id for broker in answer.brokers] == [0]
    known, unknown, invalid = answer.topics
    assert known.topic_id == cluster.topics["t"].id
    assert [(p.leader_id, p.leader_epoch, p.error_code, p.offline_replicas) for p in known.partitions] == [
        (0, 0, 0, (1,)),
        (-1, 1, 5, (1,)),
    ]
    assert (unknown.error_code, invalid.error_code) == (
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.invalid_topic_exception,
    )
    cluster.topics["t"].is_visible = False
    assert ask(cluster, MetadataRequest(None)).topics == ()


def test_topic_is_created_only_if_both_sides_allow_it(cluster: ScriptedCluster) -> None:
    ask(cluster, MetadataRequest(("new",)))
    assert "new" not in cluster.topics
    cluster.auto_create_topics, cluster.default_partitions, cluster.topic_creation_ms = True, 3, 50
    ask(cluster, MetadataRequest(("new",), allow_auto_topic_creation=False))
    assert "new" not in cluster.topics
    assert ask(cluster, MetadataRequest(("new",))).topics[0].error_code == ErrorCode.unknown_topic_or_partition
    assert (
        ask(cluster, MetadataRequest(("new",)), now_ms=49).topics[0].error_code == ErrorCode.unknown_topic_or_partition
    )
    assert len(ask(cluster, MetadataRequest(("new",)), now_ms=50).topics[0].partitions) == 3


def test_topic_created_again_has_another_id_and_an_empty_log(cluster: ScriptedCluster) -> None:
    produce(cluster, batch(b"a"))
    before = cluster.topics["t"].id
    cluster.delete_topic("t")
    cluster.create_topic("t", 1)
    assert cluster.topics["t"].id != before
    assert cluster.log("t", 0).next_offset == 0


def test_fetch_gives_whole_batches_from_the_offset_on(cluster: ScriptedCluster) -> None:
    for value in (b"a", b"b", b"c"):
        produce(cluster, batch(value, value))

    def fetch(offset: int, max_bytes: int = 10_000, epoch: int = -1) -> Any:
        request = FetchRequest({"t": [FetchPartition(0, offset, max_bytes, epoch)]}, 500)
        return ask(cluster, request).responses[0].partitions[0]

    def offsets(data: bytes) -> list[int]:
        found = []
        while data:
            size = 12 + HEADER.unpack_from(data)[1]
            found += [record.offset for record in read_records(data[:size])]
            data = data[size:]
        return found

    assert offsets(fetch(0).records) == [0, 1, 2, 3, 4, 5]
    assert offsets(fetch(3).records) == [2, 3, 4, 5]
    assert offsets(fetch(0, max_bytes=1).records) == [0, 1]
    assert (fetch(6).records, fetch(6).high_watermark) == (b"", 6)
    assert fetch(7).error_code == ErrorCode.offset_out_of_range
    cluster.move_leader("t", 0, 0)
    assert [fetch(0, epoch=epoch).error_code for epoch in (0, 1, 2)] == [
        ErrorCode.fenced_leader_epoch,
        0,
        ErrorCode.unknown_leader_epoch,
    ]
    cluster.log("t", 0).delete_records_before(2)
    assert fetch(0).error_code == ErrorCode.offset_out_of_range


def test_fetch_at_the_end_is_answered_after_its_wait(cluster: ScriptedCluster) -> None:
    request = FetchRequest({"t": [FetchPartition(0, 0, 1000)]}, 500).build(12)
    (reply,) = cluster.handle_frame(0, b"".join(encode_request(request, 1, "c"))[4:], 0)
    assert reply.delay_ms == 500


def test_list_offsets_finds_ends_and_times(cluster: ScriptedCluster) -> None:
    produce(cluster, batch(b"a", b"b", timestamp_ms=100))

    def offset(timestamp: int) -> int:
        request = ListOffsetsRequest({"t": [ListOffsetsPartition(0, timestamp)]})
        return int(ask(cluster, request).topics[0].partitions[0].offset)

    assert [offset(at) for at in (EARLIEST_TIMESTAMP, LATEST_TIMESTAMP, 0, 101, 102)] == [0, 2, 0, 1, -1]


def test_producer_ids_are_new_and_transactional_ones_bump(cluster: ScriptedCluster) -> None:
    first, second = (ask(cluster, InitProducerIdRequest()) for _ in range(2))
    assert first.producer_id != second.producer_id
    epochs = [ask(cluster, InitProducerIdRequest("txn", 1000)) for _ in range(2)]
    assert [(each.producer_id, each.producer_epoch) for each in epochs] == [
        (epochs[0].producer_id, 0),
        (epochs[0].producer_id, 1),
    ]
    stale = InitProducerIdRequest("txn", 1000, producer_id=epochs[0].producer_id, producer_epoch=0)
    assert ask(cluster, stale).error_code == ErrorCode.producer_fenced
    cluster.coordinators["txn"] = 1
    assert ask(cluster, InitProducerIdRequest("txn", 1000)).error_code == ErrorCode.not_coordinator
    coordinator = coordinator_of(ask(cluster, FindCoordinatorRequest("txn", 1)), "txn")
    assert coordinator is not None
    assert coordinator.node_id == 1


def test_unsupported_version_closes_the_connection_except_of_api_versions(cluster: ScriptedCluster) -> None:
    cluster.node_versions[0] = KAFKA_2_1
    assert ask(cluster, MetadataRequest(None), version=8) == "closed"
    answer = ask(cluster, ApiVersionsRequest("s", "1"), version=4)
    assert (answer.error_code, [each.api_key for each in answer.api_keys]) == (
        ErrorCode.unsupported_version,
        [ApiKey.API_VERSIONS],
    )
    cluster.node_versions.clear()
    cluster.finalized_features["transaction.version"] = 2
    assert ask(cluster, ApiVersionsRequest("s", "1")).finalized_features[0].max_version_level == 2


def test_malformed_request_raises(cluster: ScriptedCluster) -> None:
    payload = b"".join(encode_request(MetadataRequest(None).build(12), 1, "c"))[4:]
    with pytest.raises(ValueError, match="bytes too many"):
        cluster.handle_frame(0, payload + b"?", 0)


# ---- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "code_of"),
    [
        (
            ProduceRequest(-1, 1, {"t": [(0, RecordChunks([]))]}),
            lambda r: r.responses[0].partition_responses[0].error_code,
        ),
        (FetchRequest({"t": [FetchPartition(0, 0, 1)]}, 1), lambda r: r.responses[0].partitions[0].error_code),
        (ListOffsetsRequest({"t": [ListOffsetsPartition(0, -1)]}), lambda r: r.topics[0].partitions[0].error_code),
        (MetadataRequest(("t",)), lambda r: r.topics[0].error_code),
        (FindCoordinatorRequest("k", 0), lambda r: r.coordinators[0].error_code),
        (InitProducerIdRequest(), lambda r: r.error_code),
        (ApiVersionsRequest("s", "1"), lambda r: r.error_code),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_api_can_be_made_to_fail_once(cluster: ScriptedCluster, request_: Request, code_of: Any) -> None:
    cluster.on(request_.api_key, faults.fail_with(RequestTimedOutError))
    assert code_of(ask(cluster, request_)) == 7
    assert code_of(ask(cluster, request_)) != 7


def test_script_counts_its_node_its_skips_and_its_times(cluster: ScriptedCluster) -> None:
    cluster.on(ApiKey.METADATA, faults.lose_request(), times=2, node_id=0, skip=1)
    answered = [ask(cluster, MetadataRequest(()), node_id=node_id) is not None for node_id in (1, 0, 1, 0, 0, 0)]
    assert answered == [True, True, True, False, False, True]


@pytest.mark.parametrize(
    ("fault", "answer", "kept"),
    [
        (faults.lose_request(), None, 0),
        (faults.lose_response(), None, 1),
        (faults.close_before(), "closed", 0),
        (faults.close_after(), "closed", 1),
    ],
    ids=["lose_request", "lose_response", "close_before", "close_after"],
)
def test_lost_request_has_no_effect_but_a_lost_response_has(
    cluster: ScriptedCluster, fault: Any, answer: object, kept: int
) -> None:
    cluster.on(ApiKey.PRODUCE, fault)
    assert produce(cluster, batch(b"a")) == answer
    assert len(cluster.log("t", 0).batches) == kept


def test_frames_are_damaged_as_scripted(cluster: ScriptedCluster) -> None:
    payload = b"".join(encode_request(MetadataRequest(()).build(12), 40, "c"))[4:]

    def reply() -> bytes:
        return cluster.handle_frame(0, payload, 0)[0].data

    good = reply()
    for fault in (faults.frame_length(-1), faults.wrong_correlation_id(), faults.truncate(3)):
        cluster.on(ApiKey.METADATA, fault)
    assert reply() == struct.pack(">i", -1) + good[4:]
    assert reply() == good[:4] + struct.pack(">i", 41) + good[8:]
    assert reply() == struct.pack(">i", len(good) - 7) + good[4:-3]
    cluster.on(ApiKey.METADATA, faults.change(lambda values: values | {"throttle_time": 77}))
    assert ask(cluster, MetadataRequest(())).throttle_time.total_seconds() == 0.077
    cluster.on(ApiKey.METADATA, faults.delay(30))
    assert cluster.handle_frame(0, payload, 0)[0].delay_ms == 30
