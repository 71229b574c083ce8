"""Reads of whole topics and of the newest records of a partition, and which batches a reader sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from support.client_rig import ClientRig
from support.coordinator_bench import PLACE, CoordinatorBench
from support.scripted_broker import faults
from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_broker.exchange import Answer, Exchange
from support.scripted_broker.versions import KAFKA_4_1

from spark_kafka_sink.admin.topic_reader import (
    AbortedTransaction,
    PartitionRecords,
    TopicReader,
    TopicTail,
    is_abort_marker,
    visible_batches,
)
from spark_kafka_sink.admin.transaction_values import PartitionEnds
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import (
    ClusterAuthorizationError,
    CorruptBatchError,
    KafkaTimeoutError,
    NotLeaderOrFollowerError,
    OffsetNotAvailableError,
    OffsetOutOfRangeError,
    TopicAuthorizationError,
    UnknownTopicOrPartitionError,
    UnsupportedVersionError,
)
from spark_kafka_sink.protocol.fetch import EARLIEST_TIMESTAMP, LATEST_TIMESTAMP, READ_COMMITTED, READ_UNCOMMITTED
from spark_kafka_sink.protocol.versions import ApiKey
from spark_kafka_sink.record.batch import seal
from spark_kafka_sink.record.codecs import codec_for
from spark_kafka_sink.record.decoder import DecodedBatch, DecodedRecord
from spark_kafka_sink.record.encoder import encode_rows

TIMEOUT_MS = 10_000


def batch_bytes(values: Sequence[str], codec: str = "none", **state: Any) -> bytes:
    run = encode_rows(None, list(values), None, [1_000 + index for index in range(len(values))], 0, 1_000)
    sealed = seal([run.chunk], run.count, 1_000, run.max_timestamp_ms, codec_for(codec), **state)
    return b"".join(sealed.buffers)


class Bench:
    """A reader of topic `t`, one partition a node, over a scripted cluster."""

    def __init__(self, node_count: int = 1, max_partition_bytes: int = 1 << 20, timeout_ms: int = TIMEOUT_MS) -> None:
        self.rig = ClientRig(node_count)
        self.rig.cluster.create_topic("t", partitions=node_count)
        self.client = self.rig.consumer()
        self.reader = TopicReader(self.client, self.rig.metadata, self.rig.clock, 100, timeout_ms, max_partition_bytes)

    def append(self, partition: int, *values: str, codec: str = "none", **state: Any) -> None:
        epoch = self.rig.cluster.topics["t"].partitions[partition].leader_epoch
        result = self.rig.cluster.log("t", partition).append(batch_bytes(values, codec, **state), epoch)
        assert result.error_code == 0

    def read(self, **arguments: Any) -> dict[int, list[str]]:
        return by_partition(self.reader.read(["t"], **arguments))

    def fetches(self) -> list[Exchange]:
        return self.rig.cluster.requests_of(ApiKey.FETCH)


def by_partition(found: Any) -> dict[int, list[str]]:
    values: dict[int, list[str]] = {}
    for each in found:
        assert isinstance(each, PartitionRecords)
        offsets = [record.offset for record in each.records]
        assert offsets == sorted(offsets)
        texts = [(record.value or b"").decode() for record in each.records]
        values.setdefault(each.topic_partition.partition, []).extend(texts)
    return values


def test_every_partition_is_read_from_its_beginning_to_its_end() -> None:
    bench = Bench(3)
    for partition in range(3):
        for index in range(5):
            bench.append(partition, f"{partition}-{index}a", f"{partition}-{index}b")
    expected = {
        partition: [f"{partition}-{index}{letter}" for index in range(5) for letter in "ab"] for partition in range(3)
    }
    assert bench.read() == expected


def test_empty_topic_gives_no_records_without_a_fetch() -> None:
    bench = Bench(2)
    assert bench.read() == {}
    assert bench.fetches() == []


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_compressed_batches_are_read(codec: str) -> None:
    bench = Bench()
    bench.append(0, *["same"] * 100, codec=codec)
    assert bench.read() == {0: ["same"] * 100}


def test_records_written_after_the_read_began_are_not_read() -> None:
    bench = Bench(max_partition_bytes=1)
    bench.append(0, "a")
    bench.append(0, "b")
    found = bench.reader.read(["t"])
    first = next(found)
    bench.append(0, "late")
    assert by_partition([first, *found]) == {0: ["a", "b"]}


def test_given_start_may_lie_in_the_middle_of_a_batch() -> None:
    bench = Bench(2)
    for partition in (0, 1):
        bench.append(partition, "a", "b", "c")
    assert bench.read(start={TopicPartition("t", 1): 2}) == {0: ["a", "b", "c"], 1: ["c"]}
    assert bench.read(start={TopicPartition("t", 0): 3, TopicPartition("t", 1): 7}) == {}
    assert bench.read(start={TopicPartition("t", 0): 2, TopicPartition("other", 0): 1})[0] == ["c"]


def test_end_in_the_middle_of_a_batch_cuts_it() -> None:
    bench = Bench()
    bench.append(0, "a", "b", "c")

    def earlier(values: dict[str, Any]) -> dict[str, Any]:
        partition = values["topics"][0]["partitions"][0] | {"offset": 2}
        return values | {"topics": [{"name": "t", "partitions": [partition]}]}

    bench.rig.cluster.on(ApiKey.LIST_OFFSETS, faults.change(earlier))
    assert bench.read() == {0: ["a", "b"]}


def test_batch_larger_than_the_limit_is_read_too() -> None:
    bench = Bench(max_partition_bytes=10)
    bench.append(0, "x" * 1_000)
    bench.append(0, "y" * 1_000)
    assert bench.read() == {0: ["x" * 1_000, "y" * 1_000]}
    assert len(bench.fetches()) == 2


def test_offsets_are_found_by_time() -> None:
    bench = Bench(2)
    bench.append(0, "a", "b")
    bench.append(0, "c")
    bench.rig.cluster.log("t", 0).delete_records_before(2)
    partitions = bench.reader.partitions("t")
    assert partitions == [TopicPartition("t", 0), TopicPartition("t", 1)]
    assert bench.reader.offsets(partitions, EARLIEST_TIMESTAMP) == {partitions[0]: 2, partitions[1]: 0}
    assert bench.reader.offsets(partitions, LATEST_TIMESTAMP) == {partitions[0]: 3, partitions[1]: 0}
    assert bench.reader.offsets(partitions, 5_000) == {partitions[0]: -1, partitions[1]: -1}


def test_both_ends_take_one_round_trip() -> None:
    bench = Bench()
    bench.append(0, "plain")
    bench.append(0, "open", producer_id=5, producer_epoch=0, base_sequence=0, is_transactional=True)
    (place,) = bench.reader.partitions("t")
    bench.reader.offsets([place], LATEST_TIMESTAMP)  # connects
    began_ms = bench.rig.now_ms
    bench.rig.cluster.on(ApiKey.LIST_OFFSETS, faults.delay(1_000), times=None)
    assert bench.reader.ends([place]) == {place: PartitionEnds(stable=1, log=2)}
    assert 1_000 <= bench.rig.now_ms - began_ms < 2_000


def test_only_the_end_that_was_refused_is_asked_for_again() -> None:
    bench = Bench()
    bench.append(0, "a")
    (place,) = bench.reader.partitions("t")
    bench.rig.cluster.on(ApiKey.LIST_OFFSETS, faults.fail_with(NotLeaderOrFollowerError))
    assert bench.reader.ends([place]) == {place: PartitionEnds(1, 1)}
    levels = [each.request.isolation_level for each in bench.rig.cluster.requests_of(ApiKey.LIST_OFFSETS)]
    assert levels == [READ_COMMITTED, READ_UNCOMMITTED, READ_COMMITTED]


# ---- transactions --------------------------------------------------------------------------------------------------


def write_transactions(bench: Bench) -> None:
    bench.append(0, "kept", producer_id=5, producer_epoch=0, base_sequence=0, is_transactional=True)
    bench.append(0, "dropped", producer_id=6, producer_epoch=0, base_sequence=0, is_transactional=True)
    bench.append(0, "plain")
    log = bench.rig.cluster.log("t", 0)
    log.end_transaction(6, 0, committed=False, leader_epoch=0)
    log.end_transaction(5, 0, committed=True, leader_epoch=0)


def test_read_committed_leaves_out_aborted_transactions() -> None:
    bench = Bench()
    write_transactions(bench)
    assert bench.read(isolation_level=READ_COMMITTED) == {0: ["kept", "plain"]}
    assert {exchange.request.isolation_level for exchange in bench.fetches()} == {1}
    assert bench.rig.cluster.requests_of(ApiKey.LIST_OFFSETS)[0].request.isolation_level == 1


def test_read_uncommitted_has_aborted_transactions() -> None:
    bench = Bench()
    write_transactions(bench)
    assert bench.read() == {0: ["kept", "dropped", "plain"]}


@pytest.mark.parametrize("isolation_level", [READ_COMMITTED, READ_UNCOMMITTED])
def test_aborted_transactions_are_known_after_a_read(isolation_level: int) -> None:
    bench = Bench()
    write_transactions(bench)
    assert bench.reader.aborted == set()
    bench.read(isolation_level=isolation_level)
    assert bench.reader.aborted == {(6, 0)}


# ---- failures -------------------------------------------------------------------------------------------------------


def test_missing_topic_is_reported_and_not_created() -> None:
    bench = Bench()
    bench.rig.cluster.auto_create_topics = True
    started_ms = bench.rig.now_ms
    with pytest.raises(UnknownTopicOrPartitionError, match="'nope'"):
        list(bench.reader.read(["nope"]))
    assert TIMEOUT_MS <= bench.rig.now_ms - started_ms <= TIMEOUT_MS * 1.1
    assert "nope" not in bench.rig.cluster.topics


def test_timeout_without_any_broker_gives_the_reason_and_calls_no_topic_missing() -> None:
    bench = Bench()
    bench.rig.network.refusing.add(0)
    with pytest.raises(KafkaTimeoutError, match=r"Topic 't' was not looked up.*Connection refused"):
        bench.reader.partitions("t")


def test_topic_that_appears_in_time_is_read() -> None:
    bench = Bench()
    bench.append(0, "a")
    bench.rig.cluster.topics["t"].visible_from_ms = bench.rig.now_ms + 3_000
    assert bench.read() == {0: ["a"]}


def test_topic_that_may_not_be_read_is_named() -> None:
    bench = Bench()
    bench.rig.cluster.on(ApiKey.METADATA, faults.fail_with(TopicAuthorizationError), times=None)
    with pytest.raises(TopicAuthorizationError, match="t"):
        bench.read()


def test_partition_that_may_not_be_read_is_named() -> None:
    bench = Bench()
    bench.append(0, "a")
    bench.rig.cluster.on(ApiKey.FETCH, faults.fail_with(TopicAuthorizationError))
    with pytest.raises(TopicAuthorizationError, match="t-0"):
        bench.read()


def test_leader_that_moves_during_a_read_is_followed() -> None:
    bench = Bench(2, max_partition_bytes=1)
    for index in range(6):
        bench.append(0, f"a{index}")
    found = bench.reader.read(["t"])
    first = next(found)
    bench.rig.cluster.move_leader("t", 0, 1)
    assert by_partition([first, *found]) == {0: [f"a{index}" for index in range(6)]}
    assert {exchange.node_id for exchange in bench.fetches()} == {0, 1}


def test_leaders_epoch_goes_with_the_request() -> None:
    bench = Bench(2)
    bench.append(0, "a")
    bench.rig.cluster.move_leader("t", 0, 0)
    assert bench.read() == {0: ["a"]}
    (fetch,) = bench.fetches()
    assert fetch.request.topics[0].partitions[0].current_leader_epoch == 1
    (asked, *_) = bench.rig.cluster.requests_of(ApiKey.LIST_OFFSETS)
    assert asked.request.topics[0].partitions[0].current_leader_epoch in (0, 1)


@pytest.mark.parametrize("api", [ApiKey.FETCH, ApiKey.LIST_OFFSETS])
@pytest.mark.parametrize(
    "code",
    [
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.leader_not_available,
        ErrorCode.not_leader_or_follower,
        ErrorCode.replica_not_available,
        ErrorCode.kafka_storage_error,
        ErrorCode.fenced_leader_epoch,
        ErrorCode.unknown_leader_epoch,
    ],
)
def test_passing_error_is_retried_after_a_pause(api: int, code: int) -> None:
    bench = Bench()
    bench.append(0, "a")
    bench.rig.cluster.on(api, faults.fail_with(code), times=5)
    started_ms = bench.rig.now_ms
    assert bench.read() == {0: ["a"]}
    assert bench.rig.now_ms - started_ms >= 400, "a pause before each of the five further requests"


def test_read_waits_for_an_end_unknown_to_the_new_leader() -> None:
    bench = Bench()
    bench.append(0, "a")
    bench.rig.cluster.on(ApiKey.LIST_OFFSETS, faults.fail_with(OffsetNotAvailableError), times=2)
    assert bench.read() == {0: ["a"]}


@pytest.mark.parametrize("fault", [faults.close_before(), faults.lose_request(), faults.wrong_correlation_id()])
@pytest.mark.parametrize("api", [ApiKey.FETCH, ApiKey.LIST_OFFSETS])
def test_lost_request_is_sent_again(fault: faults.Hook, api: int, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(timeout_ms=60_000)
    bench.append(0, "a")
    bench.rig.cluster.on(api, fault)
    with caplog.at_level("CRITICAL"):
        assert bench.read() == {0: ["a"]}


@pytest.mark.parametrize("api", [ApiKey.FETCH, ApiKey.LIST_OFFSETS])
def test_lasting_error_ends_at_the_limit_with_its_cause(api: int) -> None:
    bench = Bench()
    bench.append(0, "a")
    bench.rig.cluster.on(api, faults.fail_with(NotLeaderOrFollowerError), times=None)
    started_ms = bench.rig.now_ms
    with pytest.raises(KafkaTimeoutError, match=r"t-0.*not the leader"):
        bench.read()
    assert TIMEOUT_MS <= bench.rig.now_ms - started_ms <= TIMEOUT_MS * 1.2


def test_timeout_counts_from_the_last_progress() -> None:
    bench = Bench(max_partition_bytes=1)
    for index in range(6):
        bench.append(0, f"a{index}")
    bench.rig.cluster.on(ApiKey.FETCH, faults.delay(TIMEOUT_MS // 2), times=None)
    assert len(bench.read()[0]) == 6


def test_time_that_the_caller_takes_does_not_count() -> None:
    bench = Bench(max_partition_bytes=1)
    for index in range(4):
        bench.append(0, f"a{index}")
    count = 0
    for found in bench.reader.read(["t"]):
        count += len(found.records)
        bench.rig.clock.advance(TIMEOUT_MS * 2)
    assert count == 4


def test_records_deleted_during_a_read_raise_with_the_partition() -> None:
    bench = Bench(max_partition_bytes=1)
    for index in range(6):
        bench.append(0, f"a{index}")
    found = bench.reader.read(["t"])
    next(found)
    bench.rig.cluster.log("t", 0).delete_records_before(5)
    with pytest.raises(OffsetOutOfRangeError, match="t-0"):
        list(found)


def test_corrupt_batch_is_an_error() -> None:
    bench = Bench()
    bench.append(0, "abcdefgh")
    bench.rig.cluster.on(ApiKey.FETCH, faults.corrupt(lambda frame: frame.replace(b"abcdefgh", b"abcdefgX")))
    with pytest.raises(CorruptBatchError):
        bench.read()


def test_partition_missing_from_an_answer_is_asked_for_again() -> None:
    bench = Bench()
    bench.append(0, "a")
    bench.rig.cluster.on(ApiKey.FETCH, faults.change(lambda values: values | {"responses": ()}), times=2)
    bench.rig.cluster.on(ApiKey.LIST_OFFSETS, faults.change(lambda values: values | {"topics": ()}))
    assert bench.read() == {0: ["a"]}


def test_error_of_the_whole_answer_is_retried() -> None:
    bench = Bench()
    bench.append(0, "a")
    bench.rig.cluster.on(
        ApiKey.FETCH,
        faults.change(lambda values: values | {"responses": (), "error_code": ErrorCode.not_leader_or_follower}),
    )
    assert bench.read() == {0: ["a"]}


def test_error_of_the_whole_response_ends_the_read() -> None:
    bench = Bench()
    bench.append(0, "a")
    refusal = faults.change(
        lambda values: values | {"responses": (), "error_code": ErrorCode.cluster_authorization_failed}
    )
    bench.rig.cluster.on(ApiKey.FETCH, refusal, times=None)
    with pytest.raises(ClusterAuthorizationError):
        bench.read()


@pytest.mark.parametrize("api", [ApiKey.FETCH, ApiKey.LIST_OFFSETS])
def test_too_old_broker_ends_the_read_at_once(api: int) -> None:
    bench = Bench()
    bench.append(0, "a")
    bench.rig.cluster.versions = {key: value for key, value in KAFKA_4_1.items() if key != api}
    with pytest.raises(UnsupportedVersionError):
        bench.read()


def test_fetch_response_without_records_is_empty() -> None:
    bench = Bench()
    write_transactions(bench)

    def without(values: dict[str, Any]) -> dict[str, Any]:
        (topic,) = values["responses"]
        nothing = [each | {"records": None, "aborted_transactions": None} for each in topic["partitions"]]
        return values | {"responses": [topic | {"partitions": nothing}]}

    bench.rig.cluster.on(ApiKey.FETCH, faults.change(without))
    assert bench.read(isolation_level=READ_COMMITTED) == {0: ["kept", "plain"]}


def test_contradictory_offsets_are_asked_for_again() -> None:
    """Bug: the last offset of a partition counted, so a read could end before records that were there."""
    bench = Bench()
    bench.append(0, "a")

    def contradict(values: dict[str, Any]) -> dict[str, Any]:
        (topic,) = values["topics"]
        return values | {"topics": [topic, topic | {"partitions": [p | {"offset": 0} for p in topic["partitions"]]}]}

    bench.rig.cluster.on(ApiKey.LIST_OFFSETS, faults.change(contradict))
    assert bench.read() == {0: ["a"]}


def without_offsets(values: dict[str, Any]) -> dict[str, Any]:
    (topic,) = values["topics"]
    return values | {"topics": [topic | {"partitions": [each | {"offset": -1} for each in topic["partitions"]]}]}


@pytest.mark.parametrize("skip", [0, 1], ids=["end", "beginning"])
def test_answer_without_an_offset_is_asked_for_again(skip: int) -> None:
    """Bug: with -1 as its end a partition was read as empty. A batch that was decided would have been written again."""
    bench = Bench()
    bench.append(0, "a")
    bench.rig.cluster.on(ApiKey.LIST_OFFSETS, faults.change(without_offsets), skip=skip)
    assert bench.read() == {0: ["a"]}


def test_answers_without_an_offset_end_the_read_with_an_error() -> None:
    bench = Bench()
    bench.append(0, "a")
    bench.rig.cluster.on(ApiKey.LIST_OFFSETS, faults.change(without_offsets), times=None)
    with pytest.raises(KafkaTimeoutError, match="neither an offset nor an error"):
        bench.read()


def test_unrequested_partitions_are_ignored() -> None:
    bench = Bench()
    bench.append(0, "a")

    def add(values: dict[str, Any]) -> dict[str, Any]:
        (topic,) = values["responses"]
        other = {"topic": "t", "partitions": [each | {"partition_index": 9} for each in topic["partitions"]]}
        return values | {"responses": [other, topic, topic, topic | {"topic": "x"}]}

    bench.rig.cluster.on(ApiKey.FETCH, faults.change(add))
    assert bench.read() == {0: ["a"]}


def test_node_is_asked_again_only_when_it_has_answered() -> None:
    bench = Bench(max_partition_bytes=1)
    bench.rig.cluster.add_partitions("t", 1)
    for index in range(4):
        bench.append(1, f"b{index}")
    bench.append(0, "a")

    def refuse_first(values: dict[str, Any]) -> dict[str, Any]:
        (topic,) = values["responses"]
        first, second = topic["partitions"]
        return values | {
            "responses": [
                topic | {"partitions": [first | {"error_code": ErrorCode.leader_not_available, "records": b""}, second]}
            ]
        }

    bench.rig.cluster.on(ApiKey.FETCH, faults.change(refuse_first))
    bench.rig.cluster.on(ApiKey.FETCH, faults.delay(6_000), times=None)
    assert bench.read() == {0: ["a"], 1: ["b0", "b1", "b2", "b3"]}
    asked = [each.partition for fetch in bench.fetches() for each in fetch.request.topics[0].partitions]
    assert asked.count(1) == 4


@pytest.fixture
def bench() -> CoordinatorBench:
    made = CoordinatorBench()
    append(made, *[f"value {number}" for number in range(40)])
    return made


def append(bench: CoordinatorBench, *values: str, key: bytes | None = None) -> None:
    for value in values:
        run = encode_rows([key], [value], None, [1_000], 0, 1_000)
        sealed = seal([run.chunk], 1, 1_000, 1_000, codec_for("none"))
        assert bench.cluster.log("t", 0).append(b"".join(sealed.buffers), 0).error_code == 0


def newest(bench: CoordinatorBench, timeout_ms: int = 60_000) -> bytes | None:
    """Return the value of the newest record with the key b"mine"."""
    found = bench.coordinator.topics.last_of_keys(PLACE, [b"mine"], bench.timer(timeout_ms))[b"mine"]
    return None if found is None else found.value


def fetched_from(bench: CoordinatorBench) -> list[int]:
    return [exchange.request.topics[0].partitions[0].fetch_offset for exchange in bench.asked(ApiKey.FETCH)]


def test_search_fetches_only_the_tail(bench: CoordinatorBench) -> None:
    append(bench, "decided", key=b"mine")
    assert newest(bench) == b"decided"
    assert fetched_from(bench) == [41 - 32]


def test_partition_without_records_has_an_empty_tail() -> None:
    bench = CoordinatorBench()
    assert newest(bench) is None
    assert bench.asked(ApiKey.FETCH) == []


def test_search_goes_back_over_records_that_readers_do_not_see(bench: CoordinatorBench) -> None:
    append(bench, "decided", key=b"mine")
    for _ in range(20):
        open_ = bench.raw.begin("id")
        bench.raw.write(open_, PLACE, "dropped")
        bench.end([open_], committed=False)
    assert newest(bench) == b"decided"
    assert fetched_from(bench) == [81 - 32, 0]


def test_batch_of_more_records_than_any_decision_is_refused(bench: CoordinatorBench) -> None:
    rows = [b""] * 100_001
    run = encode_rows(None, rows, None, [1_000] * len(rows), 0, 1_000)
    sealed = seal([run.chunk], len(rows), 1_000, 1_000, codec_for("gzip"))
    assert bench.cluster.log("t", 0).append(b"".join(sealed.buffers), 0).error_code == 0
    with pytest.raises(CorruptBatchError, match=r"^t-0: .* has 100001 records, more than the 100000 that are read"):
        newest(bench)


def test_older_leader_is_replaced_before_an_end_counts_as_unreadable(bench: CoordinatorBench) -> None:
    """Bug: after the leader was cut off, rows that all readers saw were called unreadable (KAFKA-20734)."""
    topics, end = bench.coordinator.topics, bench.cluster.log("t", 0).next_offset
    assert topics.list_offsets([PLACE], LATEST_TIMESTAMP, bench.timer()) == {PLACE: end}
    asked: list[int] = []

    def cut_off(cluster: ScriptedCluster, exchange: Exchange, proceed: faults.Proceed) -> Answer:
        asked.append(exchange.node_id)
        answer = proceed()
        assert answer.values is not None
        (topic,) = answer.values["topics"]
        partition = topic["partitions"][0] | {"error_code": 0, "offset": end - 1}
        topics = [topic | {"partitions": [partition]}]
        return dataclasses.replace(answer, values={**answer.values, "topics": topics})

    bench.cluster.on(ApiKey.LIST_OFFSETS, cut_off, times=None, node_id=0)
    bench.cluster.move_leader("t", 0, 1)
    assert topics.await_stable({PLACE: end}, bench.timer(), lambda: True) == []
    assert asked == [0] * 3


def test_reading_from_an_offset_goes_to_the_end(bench: CoordinatorBench) -> None:
    records = bench.coordinator.topics.read_from(PLACE, 37, bench.timer())
    assert [record.offset for record in records] == [37, 38, 39]
    assert bench.coordinator.topics.read_from(PLACE, 40, bench.timer()) == []


def test_reading_from_before_the_beginning_is_refused(bench: CoordinatorBench) -> None:
    bench.cluster.log("t", 0).delete_records_before(10)
    with pytest.raises(OffsetOutOfRangeError, match="t-0"):
        bench.coordinator.topics.read_from(PLACE, 9, bench.timer())


def test_offsets_are_asked_for_by_time(bench: CoordinatorBench) -> None:
    topics = bench.coordinator.topics
    assert topics.list_offsets([PLACE], EARLIEST_TIMESTAMP, bench.timer()) == {PLACE: 0}
    assert topics.list_offsets([PLACE], LATEST_TIMESTAMP, bench.timer()) == {PLACE: 40}
    assert topics.list_offsets([PLACE], 999, bench.timer()) == {PLACE: 0}
    assert topics.list_offsets([PLACE], 1_001, bench.timer()) == {PLACE: -1}


def test_unknown_partition_is_reported_at_once(bench: CoordinatorBench) -> None:
    started_ms = bench.rig.now_ms
    with pytest.raises(UnknownTopicOrPartitionError, match=r"t-1: The topic has 1 partition"):
        bench.coordinator.topics.read_from(TopicPartition("t", 1), 0, bench.timer())
    assert bench.rig.now_ms - started_ms < 1_000


def test_missing_topic_is_named_at_the_limit(bench: CoordinatorBench) -> None:
    started_ms = bench.rig.now_ms
    with pytest.raises(UnknownTopicOrPartitionError, match="'nope'"):
        bench.coordinator.topics.read_from(TopicPartition("nope", 0), 0, bench.timer(2_000))
    assert 2_000 <= bench.rig.now_ms - started_ms <= 2_200


@pytest.mark.parametrize(
    ("api_key", "permission"),
    [(ApiKey.LIST_OFFSETS, "DESCRIBE on it, which READ includes"), (ApiKey.FETCH, "READ on it")],
)
def test_unauthorized_topic_read_names_only_the_missing_permission(
    bench: CoordinatorBench, api_key: int, permission: str
) -> None:
    """Bug: "grant WRITE and DESCRIBE on it. To read, READ is enough.", also for a user with WRITE."""
    bench.cluster.on(api_key, faults.fail_with(TopicAuthorizationError))
    with pytest.raises(TopicAuthorizationError) as caught:
        newest(bench)
    assert str(caught.value) == f"t-0: Not authorized for the topic: grant {permission}."


def test_unauthorized_topic_that_metadata_hides_names_the_permission_for_reading(bench: CoordinatorBench) -> None:
    bench.cluster.on(ApiKey.METADATA, faults.refuse_topic("t", TopicAuthorizationError), times=None)
    with pytest.raises(TopicAuthorizationError, match=r"\bt\b.*To read, READ is enough"):
        bench.coordinator.topics.read_from(PLACE, 0, bench.timer())


def test_silent_leader_fails_the_read_at_the_limit(bench: CoordinatorBench) -> None:
    bench.cluster.on(ApiKey.FETCH, faults.lose_response(), times=None)
    started_ms = bench.rig.now_ms
    with pytest.raises(KafkaTimeoutError, match="t-0"):
        newest(bench, 3_000)
    assert 3_000 <= bench.rig.now_ms - started_ms <= 3_300


def test_slow_tail_fails_at_the_timer(bench: CoordinatorBench) -> None:
    bench.coordinator.topics = TopicTail(bench.client, bench.rig.metadata, bench.rig.clock, retry_backoff_ms=1)
    append(bench, *["x" * 400_000] * 40)
    bench.cluster.on(ApiKey.FETCH, faults.delay(400), times=None)
    started_ms = bench.rig.now_ms
    with pytest.raises(KafkaTimeoutError, match=r"t-0.*2000 ms"):
        newest(bench, 2_000)
    assert bench.rig.now_ms - started_ms <= 2_500


def test_partition_that_keeps_shrinking_fails_at_the_limit(bench: CoordinatorBench) -> None:
    bench.cluster.on(ApiKey.FETCH, faults.fail_with(OffsetOutOfRangeError), times=None)
    with pytest.raises(KafkaTimeoutError, match="t-0"):
        newest(bench, 500)
    assert bench.rig.now_ms == pytest.approx(1_000_500, abs=50)


def test_expired_timer_reads_nothing(bench: CoordinatorBench) -> None:
    with pytest.raises(KafkaTimeoutError, match=r"t-0 was not read within 0 ms"):
        newest(bench, 0)
    assert bench.cluster.requests == []


TRANSACTIONAL, CONTROL = 0x10, 0x20
ABORT, COMMIT = 0, 1


def batch(base: int, producer_id: int = -1, attributes: int = 0, key: bytes | None = None) -> DecodedBatch:
    records = [DecodedRecord(base, 0, key, b"v", ())]
    return DecodedBatch(base, 0, 0, attributes, 0, 0, producer_id, 0, 0, 0, records)


def data(base: int, producer_id: int) -> DecodedBatch:
    return batch(base, producer_id, TRANSACTIONAL)


def marker(base: int, producer_id: int, kind: int) -> DecodedBatch:
    return batch(base, producer_id, TRANSACTIONAL | CONTROL, bytes([0, 0, 0, kind]))


def seen(batches: list[DecodedBatch], *aborted: tuple[int, int]) -> list[int]:
    transactions = [AbortedTransaction(*each) for each in aborted]
    return [each.base_offset for each, is_visible in visible_batches(batches, transactions) if is_visible]


def test_control_batches_are_never_seen() -> None:
    assert seen([batch(0), marker(1, 7, COMMIT), marker(2, 7, ABORT), batch(3)]) == [0, 3]


def test_records_of_an_aborted_transaction_are_skipped_to_its_end() -> None:
    log = [data(0, 7), marker(1, 7, COMMIT), data(2, 7), data(3, 7), marker(4, 7, ABORT), data(5, 7)]
    assert seen(log, (7, 2)) == [0, 5]


def test_aborted_transactions_of_several_producers_are_distinguished() -> None:
    log = [data(0, 7), data(1, 8), batch(2), data(3, 7), marker(4, 7, ABORT), data(5, 8), data(6, 7)]
    assert seen(log, (7, 0)) == [1, 2, 5, 6]


def test_producer_may_abort_several_transactions() -> None:
    log = [data(0, 7), marker(1, 7, ABORT), data(2, 7), marker(3, 7, COMMIT), data(4, 7), marker(5, 7, ABORT)]
    assert seen(log, (7, 4), (7, 0)) == [2]


def test_aborted_transaction_from_before_the_fetch_is_skipped_too() -> None:
    assert seen([data(10, 7), marker(11, 7, ABORT), data(12, 7)], (7, 3)) == [12]


def test_transactions_aborted_before_the_fetch_are_left_out() -> None:
    assert seen([data(10, 9), data(11, 8), data(12, 7), data(13, 6)], (7, 3), (8, 4), (9, 5)) == [13]


def test_records_outside_transactions_are_visible_for_any_producer() -> None:
    assert seen([batch(0, 7), data(1, 7)], (7, 0)) == [0]


def test_commit_marker_or_empty_batch_is_not_an_abort() -> None:
    assert is_abort_marker(marker(0, 7, ABORT))
    assert not is_abort_marker(marker(0, 7, COMMIT))
    assert not is_abort_marker(batch(0, 7, TRANSACTIONAL, bytes(4)))
    assert not is_abort_marker(batch(0, 7, TRANSACTIONAL | CONTROL, None))
    empty = DecodedBatch(0, 0, 0, CONTROL, 0, 0, 7, 0, 0, 0, [])
    assert not is_abort_marker(empty)
