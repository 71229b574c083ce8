"""Single records into a transaction, on scripted nodes."""

from __future__ import annotations

from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from support.coordinator_bench import PLACE, CoordinatorBench
from support.scripted_broker import faults
from support.scripted_broker.cluster import NO_LEADER

from spark_kafka_sink.admin.transaction_values import EndTxnStatus
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import (
    KafkaTimeoutError,
    OffsetOutOfRangeError,
    ProducerFencedError,
    RequestTimedOutError,
    TopicAuthorizationError,
)
from spark_kafka_sink.common.open_transaction import OpenTransaction
from spark_kafka_sink.protocol.versions import ApiKey


@pytest.fixture(params=[2, 1], ids=["version 2", "version 1"])
def bench(request: pytest.FixtureRequest) -> CoordinatorBench:
    return CoordinatorBench(version=request.param)


def begin(bench: CoordinatorBench) -> OpenTransaction:
    bench.coordinator.creation.ensure("t", 1, 1, {}, bench.timer())
    return bench.raw.begin("driver")


def write(
    bench: CoordinatorBench, open_: OpenTransaction, value: str, sequence: int = 0, limit_ms: int = 60_000
) -> None:
    bench.coordinator.writer.write(open_, PLACE, b"k", value.encode(), sequence, bench.timer(limit_ms))


def committed(bench: CoordinatorBench) -> list[bytes | None]:
    return [record.value for record in bench.cluster.log("t", 0).committed_records()]


def test_record_counts_once_its_transaction_is_committed(bench: CoordinatorBench) -> None:
    open_ = begin(bench)
    write(bench, open_, "first")
    # From version 2 on the leader of the partition adds it to the transaction.
    assert len(bench.asked(ApiKey.ADD_PARTITIONS_TO_TXN)) == 2 - open_.transaction_version
    assert committed(bench) == []
    outcome = bench.commit(open_)
    assert committed(bench) == [b"first"]
    following = open_.with_producer(outcome.producer)
    write(bench, following, "second", 0 if open_.transaction_version == 2 else 1)
    assert bench.commit(following).status is EndTxnStatus.DONE
    assert committed(bench) == [b"first", b"second"]


def test_lost_answer_does_not_double_the_record(bench: CoordinatorBench) -> None:
    open_ = begin(bench)
    bench.cluster.on(ApiKey.PRODUCE, faults.lose_response())
    write(bench, open_, "once")
    bench.commit(open_)
    assert len(bench.asked(ApiKey.PRODUCE)) == 2
    assert committed(bench) == [b"once"]


def test_repetitive_record_is_compressed_and_read_whole(bench: CoordinatorBench) -> None:
    open_ = begin(bench)
    value = ",".join(f"spark-kafka-sink-{'0' * 24}/{number}" for number in range(40_000))
    write(bench, open_, value)
    bench.commit(open_)
    assert len(value) > 1 << 20
    assert len(bench.cluster.log("t", 0).batches[0].data) < 1 << 18
    assert newest(bench, b"k") == value.encode()


def test_leader_that_moved_is_found_again(bench: CoordinatorBench) -> None:
    open_ = begin(bench)
    bench.cluster.move_leader("t", 0, 1)
    write(bench, open_, "moved")
    bench.commit(open_)
    assert committed(bench) == [b"moved"]
    assert bench.asked(ApiKey.PRODUCE)[-1].node_id == 1


def test_record_without_a_transaction_waits_for_replicas_only_shortly(bench: CoordinatorBench) -> None:
    """A leader that is cut off from the cluster waits in vain, and the next one is asked only then."""
    bench.coordinator.creation.count("t", bench.timer())
    assert bench.coordinator.writer.write_alone(PLACE, b"mine", b"alone", bench.timer()) == 0
    write(bench, begin(bench), "in a transaction")
    assert [each.request.timeout.total_seconds() for each in bench.asked(ApiKey.PRODUCE)] == [5, 30]


def test_leader_whose_replicas_do_not_answer_is_looked_for_again(bench: CoordinatorBench) -> None:
    """It may be cut off from the cluster, which has another leader; its metadata was asked for again only by age."""
    open_ = begin(bench)
    bench.cluster.move_leader("t", 0, 1)
    bench.cluster.on(ApiKey.PRODUCE, faults.fail_with(RequestTimedOutError), node_id=0)
    write(bench, open_, "moved")
    assert [exchange.node_id for exchange in bench.asked(ApiKey.PRODUCE)] == [0, 1]


def test_fenced_writer_writes_nothing_and_raises(bench: CoordinatorBench) -> None:
    """Bug: under version 2 the error was the leader's InvalidProducerEpochError, without the id."""
    open_ = begin(bench)
    bench.raw.begin("driver")
    with pytest.raises(ProducerFencedError, match=r"'driver'.*newer producer with the same transactional id"):
        write(bench, open_, "late")
    assert bench.cluster.log("t", 0).batches == []


def test_silent_broker_ends_at_the_timer_with_the_partition(bench: CoordinatorBench) -> None:
    open_ = begin(bench)
    bench.cluster.on(ApiKey.PRODUCE, faults.lose_request(), times=None)
    with pytest.raises(KafkaTimeoutError, match=r"t-0: No record was written within 3000 ms"):
        write(bench, open_, "unanswered", limit_ms=3_000)


def test_request_not_sent_by_the_limit_is_never_sent(bench: CoordinatorBench) -> None:
    bench.cluster.coordinators["driver"] = 1
    open_ = begin(bench)
    bench.rig.network.cut(0)
    bench.rig.poll()
    bench.rig.clock.advance(1_000)  # the backoff after the loss
    bench.rig.network.latency_ms = lambda: 700  # the node is connected when the limit is over
    with pytest.raises(KafkaTimeoutError):
        write(bench, open_, "given up", limit_ms=500)
    bench.rig.network.latency_ms = lambda: 1
    bench.end([open_], committed=False)
    bench.poll_for(1_000)
    assert bench.asked(ApiKey.PRODUCE) == []


def test_partition_without_a_leader_is_waited_for(bench: CoordinatorBench) -> None:
    open_ = begin(bench)
    bench.cluster.move_leader("t", 0, NO_LEADER)
    bench.client.await_metadata_update(bench.timer())
    bench.rig.selector.at(bench.rig.now_ms + 500, lambda: bench.cluster.move_leader("t", 0, 0))
    write(bench, open_, "led again")
    bench.commit(open_)
    assert committed(bench) == [b"led again"]


def test_answer_without_the_partition_does_not_count(bench: CoordinatorBench) -> None:
    open_ = begin(bench)
    bench.cluster.on(ApiKey.PRODUCE, faults.change(lambda _: {"responses": []}))
    write(bench, open_, "once")
    assert len(bench.asked(ApiKey.PRODUCE)) == 2


def test_contradictory_answer_does_not_count(bench: CoordinatorBench) -> None:
    """Bug: the first outcome counted, so a record that the leader had also refused was taken as written."""
    open_ = begin(bench)

    def contradict(values: dict[str, Any]) -> dict[str, Any]:
        (topic,) = values["responses"]
        refused = [each | {"error_code": ErrorCode.not_leader_or_follower} for each in topic["partition_responses"]]
        return values | {"responses": [topic, topic | {"partition_responses": refused}]}

    bench.cluster.on(ApiKey.PRODUCE, faults.change(contradict))
    write(bench, open_, "once")
    bench.commit(open_)
    assert len(bench.asked(ApiKey.PRODUCE)) == 2
    assert committed(bench) == [b"once"]


def test_refusal_is_raised_with_the_partition(bench: CoordinatorBench) -> None:
    open_ = begin(bench)
    bench.cluster.on(ApiKey.PRODUCE, faults.fail_with(TopicAuthorizationError))
    with pytest.raises(TopicAuthorizationError, match="t-0"):
        write(bench, open_, "refused")


# ---- the newest record of a key --------------------------------------------------------------------------------------


def newest(bench: CoordinatorBench, key: bytes, limit_ms: int = 60_000) -> bytes | None:
    found = bench.coordinator.topics.last_of_keys(PLACE, [key], bench.timer(limit_ms))[key]
    return None if found is None else found.value


def test_newest_record_of_a_key_is_found_behind_many_others(bench: CoordinatorBench) -> None:
    assert newest(bench, b"mine") is None
    open_ = begin(bench)
    bench.coordinator.writer.write(open_, PLACE, b"mine", b"old", 0, bench.timer())
    bench.coordinator.writer.write(open_, PLACE, b"mine", b"new", 1, bench.timer())
    for sequence in range(2, 90):
        bench.coordinator.writer.write(open_, PLACE, b"other", b"x", sequence, bench.timer())
    assert bench.commit(open_).status is EndTxnStatus.DONE
    assert newest(bench, b"mine") == b"new"
    assert newest(bench, b"nobody's") is None


def test_record_committed_behind_an_open_transaction_is_awaited(bench: CoordinatorBench) -> None:
    blocking = bench.raw.begin("blocking")
    begin(bench)
    bench.raw.write(blocking, PLACE, "open")
    open_ = bench.raw.begin("driver")
    bench.coordinator.writer.write(open_, PLACE, b"mine", b"decided", 0, bench.timer())
    bench.commit(open_)
    with pytest.raises(KafkaTimeoutError, match="A transaction stayed open at offset 0"):
        newest(bench, b"mine", 2_000)
    assert len(bench.asked(ApiKey.LIST_OFFSETS)) < 150  # every 20 ms, not as fast as the broker answers
    bench.end([blocking], committed=False)
    assert newest(bench, b"mine") == b"decided"


def test_start_offset_moved_by_compaction_is_asked_for_again(bench: CoordinatorBench) -> None:
    open_ = begin(bench)
    for sequence in range(4):
        bench.coordinator.writer.write(open_, PLACE, b"mine", b"%d" % sequence, sequence, bench.timer())
    bench.commit(open_)
    bench.cluster.on(ApiKey.FETCH, faults.fail_with(OffsetOutOfRangeError))
    assert newest(bench, b"mine") == b"3"
    assert len(bench.asked(ApiKey.FETCH)) == 2


def test_record_of_another_partition_is_not_found(bench: CoordinatorBench) -> None:
    bench.cluster.create_topic("u", 2)
    open_ = bench.raw.begin("driver")
    bench.raw.write(open_, TopicPartition("u", 1), "elsewhere")
    bench.commit(open_)
    found = bench.coordinator.topics.last_of_keys(TopicPartition("u", 0), [b"k"], bench.timer())
    assert found == {b"k": None}
