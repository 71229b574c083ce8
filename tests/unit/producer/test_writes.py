"""Writes of many rows: their counts and reports, and tables written by a whole producer to scripted brokers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import polars
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_clock import FakeClock
from support.producer_harness import TOPIC, ProducerHarness, warm
from support.scripted_broker.faults import close_after, fail_with, lose_response
from support.scripted_producer import ScriptedProducer, Sent
from support.transaction_harness import TransactionHarness

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import (
    IllegalStateError,
    KafkaError,
    KafkaTimeoutError,
    NotEnoughReplicasError,
    ProducerClosedError,
    RecordTooLargeError,
    SchemaError,
    SerializationError,
    TopicAuthorizationError,
    TransactionAbortableError,
)
from spark_kafka_sink.producer import writes
from spark_kafka_sink.producer.futures import RunMetadata
from spark_kafka_sink.producer.transactions import State
from spark_kafka_sink.producer.writes import Delivered, RowCounts, WriteReport, table_and_formats, write_table
from spark_kafka_sink.protocol.versions import ApiKey
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.tables import BY_NAME, Table

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
VALUES = pa.schema([("value", pa.string())])


def run(partition: int, base_offset: int, records: int, size: int = 0) -> RunMetadata:
    return RunMetadata("t", partition, base_offset, records, -1, size)


def test_partition_sums_its_runs_and_keeps_first_and_last_offset() -> None:
    counts = RowCounts()
    for reported in (
        run(0, 10, 5, 500),
        run(1, 0, 1, 70),
        run(0, 3, 2, 30),
    ):  # the outcome of a retry comes after that of later runs
        counts(reported, None)
    assert counts.delivered == {
        TopicPartition("t", 0): Delivered(7, 530, 14, 3),
        TopicPartition("t", 1): Delivered(1, 70, 0, 0),
    }
    assert counts.acknowledged == 8


def test_unknown_offset_stays_unknown() -> None:
    counts = RowCounts()
    counts(run(0, -1, 5, 50), None)
    assert counts.delivered == {TopicPartition("t", 0): Delivered(5, 50, -1, -1, 5)}


def test_known_offsets_count_beside_unknown_ones() -> None:
    counts = RowCounts()
    for base_offset in (-1, 20, -1, 0, 10):
        counts(run(0, base_offset, 2, 10), None)
    assert counts.delivered == {TopicPartition("t", 0): Delivered(10, 50, 21, 0, 4)}


# ---- offsets, by a whole producer to scripted brokers ----------------------------------------------------------------


def offsets_of(harness: ProducerHarness, partition: int) -> list[int]:
    return [record.offset for record in harness.cluster.records(TOPIC)[partition] if record.value == b"mine"]


def sent_through(harness: ProducerHarness, rows: int) -> RowCounts:
    counts = RowCounts()
    columns = RecordColumns(pa.array([b"mine"] * rows), partition=pa.array([0] * rows, pa.int32()))
    harness.producer.send_columns(TOPIC, columns, counts)
    harness.run_until(lambda: counts.acknowledged + counts.failed == rows)
    counts.check()
    return counts


@pytest.mark.parametrize("fault", [lose_response(), close_after(), fail_with(NotEnoughReplicasError)])
def test_offsets_are_those_of_the_log_after_a_retry(fault: Any) -> None:
    """An answer that is lost comes again for the duplicate, with the offsets of the records that are in the log."""
    harness = warm()
    sent_through(harness, 3)
    harness.cluster.on(ApiKey.PRODUCE, fault, times=1)
    counts = sent_through(harness, 5)
    assert counts.delivered[TopicPartition(TOPIC, 0)].records == 5
    found = counts.delivered[TopicPartition(TOPIC, 0)]
    assert [*range(found.first_offset, found.last_offset + 1)] == offsets_of(harness, 0)[-5:] == [4, 5, 6, 7, 8]


def test_offsets_are_those_of_the_log_after_a_split() -> None:
    harness = warm()
    sent_through(harness, 3)
    harness.cluster.topics[TOPIC].max_message_bytes = 150
    counts = sent_through(harness, 40)
    found = counts.delivered[TopicPartition(TOPIC, 0)]
    assert (found.records, found.first_offset, found.last_offset) == (40, 4, 43)
    assert offsets_of(harness, 0) == [*range(1, 44)]
    assert harness.producer.metrics()["batch-split-total"] > 0


def test_first_of_several_errors_is_raised() -> None:
    counts = RowCounts()
    counts(run(3, -1, 1), RecordTooLargeError("one"))
    counts(run(4, -1, 1), NotEnoughReplicasError("two"))
    counts.fail(KafkaError("three"))
    with pytest.raises(RecordTooLargeError, match=r"^t-3: one$"):
        counts.check()
    assert (counts.acknowledged, counts.delivered) == (0, {})


def test_failed_rows_are_counted() -> None:
    counts = RowCounts()
    counts(run(0, -1, 3), RecordTooLargeError("one"))
    counts(run(0, 0, 2), None)
    counts(run(1, -1, 4), RecordTooLargeError("two"))
    assert (counts.failed, counts.acknowledged) == (7, 2)


def test_report_of_an_error_names_the_failed_rows() -> None:
    assert ", 0 retries, 7 records failed, 1.00 s" in str(WriteReport(1, 10, 1, 0, 1.0, failed=7))


# ---- tables, to a scripted producer ----------------------------------------------------------------------------------


def table_of(data: object, topic: str | None = TOPIC) -> Table:
    fields = ("value", "key", "headers", "partition", "timestamp", "topic")
    return Table(data, topic, dict.fromkeys(fields, BY_NAME))


def stream(batches: Iterator[pa.RecordBatch]) -> pa.RecordBatchReader:
    return pa.RecordBatchReader.from_batches(VALUES, batches)


def test_replaced_timestamps_are_said_once_in_a_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: a topic with LogAppendTime changed the column timestamp, and nothing said so."""

    def stamp(unreported: Sequence[Sent]) -> None:
        for sent in unreported:
            assert sent.on_completion is not None
            sent.on_completion(RunMetadata(sent.topic, 1, 0, sent.columns.num_rows, 1_700_000_000_123, 100), None)

    monkeypatch.setattr(writes, "_warned", set())
    untimed = pa.table({"value": ["1"]})
    write_table(ScriptedProducer(on_flush=stamp), table_of(untimed), FakeClock())
    empty = untimed.append_column("timestamp", pa.array([None], pa.int64()))
    write_table(ScriptedProducer(on_flush=stamp), table_of(empty), FakeClock())
    timed = untimed.append_column("timestamp", pa.array([1_700_000_000_000]))
    write_table(ScriptedProducer(), table_of(timed), FakeClock())
    assert caplog.messages == []
    for _ in range(2):
        write_table(ScriptedProducer(on_flush=stamp), table_of(timed), FakeClock())
    assert [text[:60] for text in caplog.messages] == [
        f"Topic {TOPIC} has message.timestamp.type=LogAppendTime: broke"[:60]
    ]


def test_report_counts_what_was_acknowledged() -> None:
    def acknowledge(unreported: Sequence[Sent]) -> None:
        for sent, offset in zip(unreported, (7, 3), strict=True):
            assert sent.on_completion is not None
            sent.on_completion(RunMetadata(sent.topic, 1, offset, sent.columns.num_rows, -1, 100), None)

    clock = FakeClock()
    producer = ScriptedProducer(on_flush=acknowledge, on_send=lambda _: clock.advance(250))
    data = pa.table({"value": ["1", "2", "3"], "topic": ["b", "a", "b"]})
    report = write_table(producer, table_of(data, None), clock)
    assert report == WriteReport(
        records=3,
        bytes=200,
        batches=2,
        retries=0,
        duration=0.5,
        last_offsets={TopicPartition("a", 1): 3, TopicPartition("b", 1): 8},
    )
    assert list(report.last_offsets) == sorted(report.last_offsets)


def test_topics_of_a_table_are_looked_up_together() -> None:
    producer = ScriptedProducer()
    data = pa.table({"value": ["1", "2", "3"], "topic": ["a", "b", "c"]})
    write_table(producer, table_of(data, None), FakeClock())
    assert producer.looked_up == ["b", "c"]


def test_stream_is_not_read_on_behind_a_row_that_failed() -> None:
    pulled = []

    def batches() -> Iterator[pa.RecordBatch]:
        for number in range(9):
            pulled.append(number)
            yield pa.record_batch({"value": [str(number)]})

    def refuse_second(sent: Sent) -> None:
        if len(pulled) == 2:
            sent.report(RecordTooLargeError("too large"))

    producer = ScriptedProducer(on_send=refuse_second)
    with pytest.raises(RecordTooLargeError, match=r"^flights-0: too large"):
        write_table(producer, table_of(stream(batches())), FakeClock())
    assert pulled == [0, 1, 2]  # the error of the second is seen before the third is sent


def test_error_waits_for_sent_rows_and_has_their_report() -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"value": ["1", "2"]})
        raise OSError("the file ends early")

    producer = ScriptedProducer()
    with pytest.raises(OSError, match="the file ends early") as failed:
        write_table(producer, table_of(stream(batches())), FakeClock())
    assert producer.flushes == 1
    (note,) = failed.value.__notes__
    assert note.startswith("Before this error KafkaProducer.write had delivered 2 records, ")


def test_kafka_error_has_the_report_as_a_value() -> None:
    data = pa.table({"value": ["1", "2", "3"], "topic": ["a", "a", None]}).to_batches(max_chunksize=2)
    producer = ScriptedProducer()
    with pytest.raises(SchemaError, match=r"In the rows of the data from 2 on.* is null") as failed:
        write_table(producer, table_of(pa.Table.from_batches(data), None), FakeClock())
    report = failed.value.report
    assert isinstance(report, WriteReport)
    assert (report.records, report.failed) == (2, 0)


def test_ctrl_c_is_raised_without_waiting() -> None:
    def interrupt(_: Sent) -> None:
        raise KeyboardInterrupt

    producer = ScriptedProducer(on_send=interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_table(producer, table_of(pa.table({"value": ["1"]})), FakeClock())
    assert producer.flushes == 0


def test_flush_that_fails_after_an_error_is_noted_on_it() -> None:
    def late(_: Sequence[Sent]) -> None:
        raise KafkaTimeoutError("still on their way")

    producer = ScriptedProducer(on_send=lambda sent: sent.report(RecordTooLargeError("large")), on_flush=late)
    with pytest.raises(RecordTooLargeError) as failed:
        write_table(producer, table_of(stream(iter([pa.record_batch({"value": ["1"]})] * 2))), FakeClock())
    assert failed.value.__notes__[0] == "still on their way"
    assert failed.value.report.failed == 1


def test_row_without_an_outcome_fails_the_write() -> None:
    producer = ScriptedProducer(on_flush=lambda _: None)
    with pytest.raises(KafkaError, match="1 of 1 rows were sent and neither acknowledged nor refused"):
        write_table(producer, table_of(pa.table({"value": ["1"]})), FakeClock())


# ---- tables, by a whole producer -------------------------------------------------------------------------------------


@pytest.fixture
def harness() -> ProducerHarness:
    return ProducerHarness(topics={TOPIC: 3})


def test_written_rows_are_in_the_log_with_their_report(harness: ProducerHarness) -> None:
    data = pa.table({"value": ["a", "b", "c"], "partition": [2, 0, 2], "timestamp": [1_764_000_000_000] * 3})
    report = harness.write(data)
    assert [harness.values(partition=number) for number in range(3)] == [[b"b"], [], [b"a", b"c"]]
    assert (report.records, report.batches, report.retries, report.failed) == (3, 2, 0, 0)
    assert report.last_offsets == {TopicPartition(TOPIC, 0): 0, TopicPartition(TOPIC, 2): 1}


def test_table_without_rows_needs_no_broker() -> None:
    harness = ProducerHarness(topics={})
    assert harness.write(VALUES.empty_table(), "no-such-topic") == WriteReport(0, 0, 0, 0, 0.0)
    assert harness.cluster.requests == []


def test_rows_refused_by_the_broker_are_in_the_report_of_the_error(harness: ProducerHarness) -> None:
    harness.cluster.on(ApiKey.PRODUCE, fail_with(TopicAuthorizationError), times=1)
    data = pa.table({"value": ["a", "b", "c"], "partition": [0, 0, 0]})
    with pytest.raises(TopicAuthorizationError) as failed:
        harness.write(data)
    assert (failed.value.report.records, failed.value.report.failed) == (0, 3)
    assert failed.value.topic_partition == TopicPartition(TOPIC, 0)


def test_retried_rows_are_in_the_report(harness: ProducerHarness) -> None:
    harness.cluster.on(ApiKey.PRODUCE, fail_with(NotEnoughReplicasError), times=1)
    report = harness.write(pa.table({"value": ["a", "b"], "partition": [0, 0]}))
    assert (report.records, report.retries) == (2, 2)
    assert harness.values() == [b"a", b"b"]


def test_stream_larger_than_memory_waits_for_brokers() -> None:
    harness = ProducerHarness({"buffer.memory": "65536", "batch.size": "8192", "max.request.size": "32768"})
    most = 0

    def watch() -> None:
        nonlocal most
        most = max(most, harness.memory_in_use)

    harness.on_turn = watch
    batches = (pa.record_batch({"value": [f"{number:04}" + "x" * 500] * 100}) for number in range(40))
    report = harness.write(stream(batches))
    assert report.records == len(harness.values()) == 4_000
    assert 0 < most <= 65_536
    assert [value[:4] for value in harness.values()[::100] if value] == [b"%04d" % number for number in range(40)]


def test_memory_that_stays_full_fails_the_write_after_max_block_ms() -> None:
    settings = {"buffer.memory": "65536", "batch.size": "8192", "max.request.size": "32768", "max.block.ms": "700"}
    harness = ProducerHarness({**settings, "delivery.timeout.ms": "130000"})
    harness.warm_up()
    harness.cluster.on(ApiKey.PRODUCE, fail_with(NotEnoughReplicasError), times=None)
    batches = (pa.record_batch({"value": ["x" * 500] * 100}) for _ in range(40))
    with pytest.raises(KafkaTimeoutError, match=r"buffer.memory=65536 stayed full for max.block.ms=700") as failed:
        harness.write(stream(batches))
    assert failed.value.report.failed > 0


def test_memory_that_fills_up_for_a_broker_that_is_away_names_it() -> None:
    """Bug: the error said only that brokers are slow, although the leader could not be connected to."""
    settings = {"buffer.memory": "65536", "batch.size": "8192", "max.request.size": "32768", "max.block.ms": "2000"}
    harness = ProducerHarness({**settings, "delivery.timeout.ms": "130000"}, node_count=2)
    harness.warm_up()
    harness.network.cut(0)
    harness.network.refusing.add(0)
    batches = (pa.record_batch({"value": ["x" * 500] * 100}) for _ in range(40))
    with pytest.raises(KafkaTimeoutError) as failed:
        harness.write(stream(batches))
    assert "buffer.memory=65536 stayed full for max.block.ms=2000" in str(failed.value)
    assert "broker-0:9092 (id 0) is not connected: Connection to node 0 lost" in str(failed.value)


def test_memory_that_fills_up_under_a_quota_names_it() -> None:
    """Bug: the error said only that brokers are slow, although one of them throttled this client."""
    settings = {"buffer.memory": "65536", "batch.size": "8192", "max.request.size": "32768", "max.block.ms": "2000"}
    harness = ProducerHarness({**settings, "delivery.timeout.ms": "130000"})
    harness.warm_up()
    harness.cluster.throttle_ms = 60_000
    batches = (pa.record_batch({"value": ["x" * 500] * 100}) for _ in range(40))
    with pytest.raises(KafkaTimeoutError, match=r"stayed full .* broker-0:9092 \(id 0\) throttles this client for \d+"):
        harness.write(stream(batches))


@pytest.mark.parametrize("topic", [TOPIC, None])
def test_max_block_ms_holds_for_an_unknown_topic(topic: str | None) -> None:
    harness = ProducerHarness({"max.block.ms": "700"}, topics={})
    started_ms = harness.now_ms
    with pytest.raises(KafkaTimeoutError, match=r"max\.block\.ms"):
        harness.write(pa.table({"value": ["1"], "topic": ["missing"]}), topic)
    assert harness.now_ms - started_ms < 1_000


def test_closed_producer_writes_nothing(harness: ProducerHarness) -> None:
    harness.close()
    with pytest.raises(ProducerClosedError):
        harness.write(pa.table({"value": ["1"]}))


def test_callback_cannot_write_a_table(harness: ProducerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness.producer, "_is_sender_thread", lambda: True)
    with pytest.raises(IllegalStateError, match="A callback cannot write a table"):
        harness.write(pa.table({"value": ["1"]}))


# ---- in a transaction ------------------------------------------------------------------------------------------------


def test_written_rows_belong_to_the_transaction() -> None:
    harness = TransactionHarness(2).started()
    harness.write(pa.table({"value": ["a", "b"], "partition": [0, 0]}))
    assert harness.committed() == []
    harness.producer.commit_transaction()
    assert harness.committed() == [b"a", b"b"]


def test_write_outside_a_transaction_is_refused() -> None:
    harness = TransactionHarness(2)
    harness.producer.init_transactions()
    with pytest.raises(IllegalStateError, match="between begin_transaction and its end"):
        harness.write(pa.table({"value": ["a"]}))


@pytest.mark.parametrize("error", [OSError("the file ends early"), KeyboardInterrupt()])
def test_transaction_is_not_committed_with_a_part_of_a_table(error: BaseException) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"value": ["a"]})
        raise error

    harness = TransactionHarness(2).started()
    with pytest.raises(type(error)):
        harness.write(stream(batches()))
    with pytest.raises(KafkaError, match="A send was interrupted by"):
        harness.producer.commit_transaction()
    harness.producer.abort_transaction()
    harness.commit(b"next")
    assert harness.committed() == [b"next"]


def test_row_that_cannot_be_written_ends_its_transaction() -> None:
    harness = TransactionHarness(2).started()
    with pytest.raises(SchemaError):
        harness.write(pa.table({"value": ["a", "b"], "topic": [TOPIC, None]}), None)
    with pytest.raises((SchemaError, TransactionAbortableError)):
        harness.producer.commit_transaction()


def test_table_with_a_wrong_column_leaves_the_transaction_open() -> None:
    """Nothing was sent, so the caller can give the right table and commit."""
    harness = TransactionHarness(2).started()
    with pytest.raises(SchemaError):
        harness.write(pa.table({"value": [1]}))
    assert harness.state is State.IN_TRANSACTION
    harness.write(pa.table({"value": ["1"], "partition": [0]}))
    harness.producer.commit_transaction()
    assert harness.committed() == [b"1"]


# ---- the same as send ------------------------------------------------------------------------------------------------

ROWS = st.lists(
    st.tuples(
        st.one_of(st.none(), st.binary(max_size=40)),
        st.one_of(st.none(), st.binary(max_size=12)),
        st.one_of(st.none(), st.integers(0, 2)),
        st.one_of(st.none(), st.integers(315_532_800_000, 253_402_300_799_999)),
        st.lists(st.tuples(st.text(max_size=5), st.one_of(st.none(), st.binary(max_size=5))), max_size=3),
    ),
    max_size=30,
)
MAKERS: list[Callable[[pa.Table], Any]] = [
    lambda table: table,
    lambda table: table.to_reader(max_chunksize=7),
    lambda table: pa.Table.from_batches(table.to_batches(max_chunksize=3), table.schema).slice(0),
]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(ROWS, st.sampled_from(MAKERS), st.sampled_from(["none", "lz4"]))
def test_write_sends_the_bytes_that_send_sends(rows: list[Any], make: Callable[[pa.Table], Any], codec: str) -> None:
    """A topic of one partition, because `send` and columns draw partitions of rows without a key differently."""
    rows = [(value, key, None if partition is None else 0, *rest) for value, key, partition, *rest in rows]
    by_send, by_write = (ProducerHarness({"linger.ms": "60000", "compression.type": codec}) for _ in range(2))
    by_send.warm_up(), by_write.warm_up()
    for value, key, partition, timestamp_ms, headers in rows:
        by_send.send(value, TOPIC, partition, key=key, timestamp_ms=timestamp_ms, headers=headers)
    by_send.flush()
    columns = list(zip(*rows, strict=True)) or [()] * 5
    types = (pa.binary(), pa.binary(), pa.int64(), pa.timestamp("ms", "UTC"), HEADERS)
    names = ("value", "key", "partition", "timestamp", "headers")
    arrays = [pa.array(column, data_type) for column, data_type in zip(columns, types, strict=True)]
    report = by_write.write(make(pa.table(arrays, names)))
    assert report.records == len(rows)
    assert by_write.cluster.records(TOPIC) == by_send.cluster.records(TOPIC)
    sent, written = (harness.cluster.log(TOPIC, 0).batches for harness in (by_send, by_write))
    assert [batch.data for batch in written] == [batch.data for batch in sent]


# ---- formats ---------------------------------------------------------------------------------------------------------

NAMES = pa.table({"id": [1, 2, 3], "name": ["one", None, "three"], "key": ["a", "b", "c"]})
NO_NULL = '{"type":"record","name":"r","fields":[{"name":"name","type":"string"}]}'


def test_several_columns_become_one_value_in_the_given_order(harness: ProducerHarness) -> None:
    report = harness.write(NAMES, value=["name", "id"], serialization={"value.format": "json"})
    assert report.records == 3
    values = [value for number in range(3) for value in harness.values(partition=number)]
    expected = [b'{"id":2}', b'{"name":"one","id":1}', b'{"name":"three","id":3}']
    assert sorted(value or b"" for value in values) == expected


def test_a_struct_of_polars_becomes_avro(harness: ProducerHarness) -> None:
    data = polars.DataFrame({"value": [{"id": 1, "tags": ["x", None]}, None], "partition": [0, 0]})
    harness.write(data, serialization={"value.format": "avro"})
    assert harness.values() == [b"\0\2\0\4\0\2x\2\0", None]


def test_rows_of_a_slice_and_of_several_batches_keep_their_order(harness: ProducerHarness) -> None:
    rows = [{"id": number, "partition": 0} for number in range(40)]
    table = pa.Table.from_pylist(rows)
    data = pa.concat_tables([table.slice(3, 11), table.slice(20, 20)])
    harness.write(data, value=["id"], serialization={"value.format": "json"})
    assert harness.values() == [b'{"id":%d}' % number for number in (*range(3, 14), *range(20, 40))]


def test_a_row_that_does_not_fit_is_named_by_its_place_in_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_kafka_sink.record.tables.PART_ROWS", 2)
    producer = ScriptedProducer()
    names = dict.fromkeys(("key", "headers", "partition", "timestamp", "topic"), None)
    options = {"value.format": "avro", "value.schema": NO_NULL}
    data = pa.table({"name": ["a", "b", "c", None]})
    table, formats = table_and_formats(data, TOPIC, {**names, "value": ["name"]}, options)
    with pytest.raises(SerializationError, match=r"rows of the data from 2 on.*value\.name of row 1: it is null"):
        write_table(producer, table, FakeClock(), formats)
    assert [row for sent in producer.sent for row in sent.rows("value")] == [(b"\2a",), (b"\2b",)]


@pytest.mark.parametrize(
    ("names", "options", "text"),
    [
        ({"value": ["id", "id"]}, {"value.format": "json"}, "has a column twice"),
        ({"value": ["id", "no"]}, {"value.format": "json"}, "value='no': the data has no such column"),
        ({"value": []}, {"value.format": "json"}, "value=\\[\\]: give at least one column"),
        (
            {"value": ["id"]},
            {"key.format": "json"},
            r"several columns become one value only in a format.*value\.format",
        ),
        ({"value": ["id"], "headers": ["id"]}, {"value.format": "json"}, "headers=.*give the name of one column"),
        ({}, {"value.format": "json"}, r"No column is the value.*or several by value=\["),
        ({"value": ["id"], "key": None}, {"key.format": "avro", "value.format": "json"}, "no column is the key"),
        ({"value": "id"}, {"value.format": "json"}, "value: the format json takes a struct"),
    ],
)
def test_columns_without_sense_are_refused_before_a_row_is_sent(
    harness: ProducerHarness, names: dict[str, Any], options: dict[str, str], text: str
) -> None:
    with pytest.raises(SchemaError, match=text):
        harness.write(NAMES, serialization=options, **names)
    assert harness.values() == []


def test_without_serialization_a_struct_is_refused(harness: ProducerHarness) -> None:
    with pytest.raises(SchemaError, match=r"value=\['id'\]: several columns become one value only in a format"):
        harness.write(NAMES, value=["id"])
