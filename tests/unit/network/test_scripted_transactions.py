"""The scripted broker's transactions beyond the cases of tests/support/transaction_table.py."""

from __future__ import annotations

import pytest
from kio.schema.errors import ErrorCode
from support.coordinator_bench import PLACE, CoordinatorBench

from spark_kafka_sink.admin.transaction_values import EndTxnStatus
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import InvalidTxnStateError, ProducerFencedError, error_for_code
from spark_kafka_sink.common.open_transaction import OpenTransaction
from spark_kafka_sink.protocol.transactions import AddPartitionsToTxnRequest
from spark_kafka_sink.record.decoder import decode_batches

MAX_EPOCH = 2**15 - 2


def values(bench: CoordinatorBench) -> list[bytes | None]:
    return [record.value for record in bench.cluster.log("t", 0).committed_records()]


@pytest.mark.parametrize(("committed", "kept"), [(True, [b"id"]), (False, [])])
def test_control_batch_is_checked_and_not_visible(committed: bool, kept: list[bytes]) -> None:
    bench = CoordinatorBench()
    (open_,) = bench.open("id")
    log = bench.cluster.log("t", 0)
    assert (log.last_stable_offset, log.next_offset) == (0, 1)
    bench.end([open_], committed=committed)
    _, marker = decode_batches(b"".join(batch.data for batch in log.batches))
    assert (marker.is_control, marker.is_transactional) == (True, True)
    assert (marker.producer_id, marker.producer_epoch) == (open_.producer_id, open_.producer_epoch + 1)
    assert marker.records[0].key == bytes([0, 0, 0, int(committed)])
    assert (log.last_stable_offset, log.next_offset) == (2, 2)
    assert values(bench) == kept
    assert [record.value for record in log.records()] == [b"id"]


def test_version_1_needs_a_partition_added_before_a_write() -> None:
    bench = CoordinatorBench(version=1)
    open_ = bench.raw.begin("id")
    with pytest.raises(InvalidTxnStateError):
        bench.raw.produce(open_, PLACE, ("early",))
    bench.raw.write(open_, PLACE, "in time")
    assert bench.commit(open_).status is EndTxnStatus.DONE
    assert values(bench) == [b"in time"]


def test_all_partitions_are_added_or_none() -> None:
    bench = CoordinatorBench(version=1)
    open_ = bench.raw.begin("id")
    node = bench.raw.coordinator_of(1, "id")
    request = AddPartitionsToTxnRequest("id", open_.producer_id, open_.producer_epoch, {"t": [0], "nope": [2]})
    future = bench.client.send(node, request)
    assert bench.client.poll_until(future, bench.timer())
    codes = {
        (topic.name, each.partition_index): int(each.partition_error_code)
        for topic in future.value().body.results_by_topic_v3_and_below
        for each in topic.results_by_partition
    }
    assert codes == {("t", 0): ErrorCode.operation_not_attempted, ("nope", 2): ErrorCode.unknown_topic_or_partition}
    assert bench.state("id") == "Empty"


@pytest.mark.parametrize("version", [1, 2])
def test_fenced_producer_cannot_write_mark_or_add(version: int) -> None:
    bench = CoordinatorBench(version=version)
    (open_,) = bench.open("id")
    bench.raw.begin("id")
    fenced = (ProducerFencedError, type(error_for_code(ErrorCode.invalid_producer_epoch)))
    with pytest.raises(fenced):
        bench.raw.write(open_, PLACE, "late")
    with pytest.raises(fenced):
        bench.raw.mark(open_, "g", PLACE, 1, "")
    assert values(bench) == []
    assert bench.cluster.transactions.offsets == {}


def test_delayed_marker_leaves_the_transaction_prepared() -> None:
    bench = CoordinatorBench()
    bench.cluster.transactions.marker_delay_ms = 100
    (open_,) = bench.open("id")
    assert bench.commit(open_).status is EndTxnStatus.DONE
    assert bench.state("id") == "PrepareCommit"
    assert values(bench) == []
    bench.cluster.transactions.advance(bench.rig.now_ms + 100)
    assert bench.state("id") == "CompleteCommit"
    assert values(bench) == [b"id"]


@pytest.mark.parametrize("version", [1, 2])
def test_end_before_the_markers_is_answered_as_in_kafka(version: int) -> None:
    """As Kafka 4.3 answers while the leader of a partition is frozen. Version 1 checks ids and epochs first."""
    bench = CoordinatorBench(version=version)
    coordinator = bench.cluster.transactions
    coordinator.marker_delay_ms = 10_000
    (open_,) = bench.open("id")
    assert bench.commit(open_).status is EndTxnStatus.DONE
    held = coordinator.transactions["id"]

    def code(producer_id: int, epoch: int, *, committed: bool) -> int:
        return coordinator.end("id", producer_id, epoch, committed, version, bench.rig.now_ms)

    concurrent = ErrorCode.concurrent_transactions
    for epoch in {open_.producer_epoch, held.epoch}:  # the same request again, and a request of the next transaction
        assert [code(open_.producer_id, epoch, committed=committed) for committed in (True, False)] == [concurrent] * 2
    fenced, unknown = (concurrent, concurrent)
    if version == 1:
        fenced, unknown = ErrorCode.producer_fenced, ErrorCode.invalid_producer_id_mapping
    assert code(open_.producer_id, held.epoch + 5, committed=False) == fenced
    assert code(open_.producer_id + 77, held.epoch, committed=False) == unknown
    assert bench.state("id") == "PrepareCommit"


def test_id_without_epochs_left_gets_another_producer_id() -> None:
    bench = CoordinatorBench(version=1)
    bench.raw.begin("id")
    bench.cluster.transactions.transactions["id"].epoch = MAX_EPOCH
    assert bench.raw.begin("id").producer == (1001, 0)


def test_fence_in_the_last_epoch_does_not_overflow() -> None:
    bench = CoordinatorBench()
    bench.open("id")
    held = bench.cluster.transactions.transactions["id"]
    held.epoch = MAX_EPOCH
    assert bench.raw.begin("id").producer == (1001, 1)
    assert bench.commit(OpenTransaction("id", 1000, MAX_EPOCH, 2)).status is EndTxnStatus.INVALID_PID_MAPPING


def test_readers_wait_for_the_first_open_transaction() -> None:
    bench = CoordinatorBench()
    first, second = bench.open("a", "b")
    log = bench.cluster.log("t", 0)
    bench.commit(second)
    assert log.last_stable_offset == 0
    assert values(bench) == []
    bench.end([first], committed=False)
    assert log.last_stable_offset == log.next_offset
    assert values(bench) == [b"b"]
    seen = bench.coordinator.topics.read_from(TopicPartition("t", 0), 0, bench.timer())
    assert [record.value for record in seen] == [b"b"]
