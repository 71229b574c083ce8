from __future__ import annotations

import pytest
from support.coordinator_bench import PLACE, CoordinatorBench
from support.scripted_broker import faults
from support.scripted_broker.exchange import Answer, Exchange

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import (
    CorruptBatchError,
    KafkaTimeoutError,
    OffsetOutOfRangeError,
    TopicAuthorizationError,
    UnknownTopicOrPartitionError,
)
from spark_kafka_sink.protocol.messages import ApiKey
from spark_kafka_sink.protocol.requests import EARLIEST_TIMESTAMP, LATEST_TIMESTAMP
from spark_kafka_sink.record.batch import seal
from spark_kafka_sink.record.codecs import codec_for
from spark_kafka_sink.record.encoder import encode_rows

FETCH, LIST_OFFSETS = int(ApiKey.FETCH), int(ApiKey.LIST_OFFSETS)


@pytest.fixture
def bench() -> CoordinatorBench:
    made = CoordinatorBench()
    append(made, *[f"value {number}" for number in range(40)])
    return made


def append(bench: CoordinatorBench, *values: str) -> None:
    for value in values:
        run = encode_rows(None, [value], None, [1_000], 0, 1_000)
        sealed = seal([run.chunk], 1, 1_000, 1_000, codec_for("none"))
        assert bench.cluster.log("t", 0).append(b"".join(sealed.buffers), 0).error_code == 0


def last(bench: CoordinatorBench, count: int, timeout_ms: int = 60_000) -> list[str]:
    records = bench.coordinator.topics.read_last(PLACE, count, bench.timer(timeout_ms))
    return [(record.value or b"").decode() for record in records]


@pytest.mark.parametrize("count", [0, 1, 3, 40, 41])
def test_the_last_records_come_in_order(bench: CoordinatorBench, count: int) -> None:
    expected = [f"value {number}" for number in range(40)]
    assert last(bench, count) == (expected[-count:] if count else [])


def test_no_more_is_fetched_than_the_tail(bench: CoordinatorBench) -> None:
    last(bench, 1)
    assert [exchange.request.topics[0].partitions[0].fetch_offset for exchange in bench.asked(FETCH)] == [36]


def test_a_partition_without_records_has_an_empty_tail() -> None:
    bench = CoordinatorBench()
    assert last(bench, 5) == []
    assert bench.asked(FETCH) == []


def test_the_search_goes_back_over_what_readers_do_not_see(bench: CoordinatorBench) -> None:
    for _ in range(12):
        open_ = bench.raw.begin("id")
        bench.raw.write(open_, PLACE, "dropped")
        bench.end([open_], committed=False)
    assert last(bench, 2) == ["value 38", "value 39"]
    assert len(bench.asked(FETCH)) == 3


def test_batch_of_more_records_than_any_decision_is_refused(bench: CoordinatorBench) -> None:
    rows = [b""] * 100_001
    run = encode_rows(None, rows, None, [1_000] * len(rows), 0, 1_000)
    sealed = seal([run.chunk], len(rows), 1_000, 1_000, codec_for("gzip"))
    assert bench.cluster.log("t", 0).append(b"".join(sealed.buffers), 0).error_code == 0
    with pytest.raises(CorruptBatchError, match=r"^t-0: .* has 100001 records, more than the 100000 that are read"):
        last(bench, 1)


def test_a_beginning_that_retention_moves_meanwhile_is_asked_for_again(bench: CoordinatorBench) -> None:
    def trim(cluster: object, exchange: Exchange, proceed: faults.Proceed) -> Answer:
        answer = proceed()
        bench.cluster.log("t", 0).delete_records_before(39)
        return answer

    bench.cluster.on(LIST_OFFSETS, trim, skip=1)
    assert last(bench, 3) == ["value 39"]


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


def test_a_partition_that_the_topic_does_not_have_is_named_at_once(bench: CoordinatorBench) -> None:
    started_ms = bench.rig.now_ms
    with pytest.raises(UnknownTopicOrPartitionError, match=r"t-1: the topic has 1 partitions"):
        bench.coordinator.topics.read_from(TopicPartition("t", 1), 0, bench.timer())
    assert bench.rig.now_ms - started_ms < 1_000


def test_a_missing_topic_is_named_at_the_limit(bench: CoordinatorBench) -> None:
    started_ms = bench.rig.now_ms
    with pytest.raises(UnknownTopicOrPartitionError, match="'nope'"):
        bench.coordinator.topics.read_last(TopicPartition("nope", 0), 1, bench.timer(2_000))
    assert 2_000 <= bench.rig.now_ms - started_ms <= 2_200


@pytest.mark.parametrize(("api_key", "operation"), [(LIST_OFFSETS, "DESCRIBE"), (FETCH, "READ")])
def test_who_may_not_read_the_topic_is_told_what_to_grant(
    bench: CoordinatorBench, api_key: int, operation: str
) -> None:
    bench.cluster.on(api_key, faults.fail_with(29))
    with pytest.raises(TopicAuthorizationError, match=rf"t-0.*To read, {operation} is enough"):
        last(bench, 1)


def test_a_leader_that_does_not_answer_is_given_up_at_the_limit(bench: CoordinatorBench) -> None:
    bench.cluster.on(FETCH, faults.lose_response(), times=None)
    started_ms = bench.rig.now_ms
    with pytest.raises(KafkaTimeoutError, match="t-0"):
        last(bench, 1, timeout_ms=3_000)
    assert 3_000 <= bench.rig.now_ms - started_ms <= 3_300


def test_a_tail_that_takes_too_long_is_given_up_though_it_comes(bench: CoordinatorBench) -> None:
    bench.coordinator.topics._retry_backoff_ms = 1
    append(bench, *["x" * 400_000] * 40)
    bench.cluster.on(FETCH, faults.delay(400), times=None)
    started_ms = bench.rig.now_ms
    with pytest.raises(KafkaTimeoutError, match=r"t-0.*2000 ms"):
        last(bench, 40, timeout_ms=2_000)
    assert bench.rig.now_ms - started_ms <= 2_500


def test_a_partition_that_shrinks_again_and_again_is_given_up_at_the_limit(bench: CoordinatorBench) -> None:
    bench.cluster.on(FETCH, faults.fail_with(1), times=None)
    with pytest.raises(KafkaTimeoutError, match="t-0"):
        last(bench, 1, timeout_ms=500)
    assert bench.rig.now_ms == pytest.approx(1_000_500, abs=50)


def test_a_limit_that_is_over_already_reads_nothing(bench: CoordinatorBench) -> None:
    with pytest.raises(KafkaTimeoutError, match=r"t was not read within 0 ms"):
        last(bench, 1, timeout_ms=0)
    assert bench.cluster.requests == []
