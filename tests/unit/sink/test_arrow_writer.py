"""Arrow batches of a task, written to a scripted producer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType
from support.scripted_producer import ScriptedPool, ScriptedProducer, Sent

from spark_kafka_sink.common.errors import KafkaError, RecordTooLargeError, SchemaError, SerializationError
from spark_kafka_sink.sink.arrow_writer import write_all, write_arrow
from spark_kafka_sink.sink.column_formats import with_column_formats
from spark_kafka_sink.sink.delivery import TaskDelivery
from spark_kafka_sink.sink.options import SinkConfig

OPTIONS = {"kafka.bootstrap.servers": "127.0.0.1:9092"}


def config(topic: str | None = "orders", **more: str) -> SinkConfig:
    return SinkConfig.from_options({**OPTIONS, "topic": topic, **more})


def batch(**columns: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def test_batches_are_reported_after_all_acknowledgements() -> None:
    producer = ScriptedProducer()
    batches = [
        batch(value=pa.array(["a", "b"]), key=pa.array(["x", None])),
        batch(value=pa.array(["c"]), key=pa.array(["y"])),
    ]
    (report,) = write_arrow(config(), ScriptedPool(producer), batches)
    assert [sent.rows("value", "key") for sent in producer.sent] == [[(b"a", b"x"), (b"b", None), (b"c", b"y")]]
    assert producer.flushes == 1
    assert report.to_pylist()[0]["records"] == 3


def test_each_column_goes_with_its_row() -> None:
    producer = ScriptedProducer()
    headers = [[{"key": "h", "value": b"1"}], None]
    header_type = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    rows = batch(
        value=pa.array(["a", "b"]),
        partition=pa.array([3, None], pa.int32()),
        headers=pa.array(headers, header_type),
        timestamp=pa.array([1_700_000_000_005, None]),
        key=pa.array(["x", "y"]),
    )
    list(write_arrow(config(), ScriptedPool(producer), [rows]))
    assert [row for sent in producer.sent for row in sent.rows("value", "key", "partition", "timestamp_ms")] == [
        (b"a", b"x", 3, 1_700_000_000_005),
        (b"b", b"y", None, None),
    ]
    assert producer.sent[0].columns.headers.to_pylist() == [[{"key": b"h", "value": b"1"}], []]


@pytest.mark.parametrize(
    ("topic", "partitions", "sizes"),
    [("orders", 31, [3, 1, 1, 1]), ("orders", 32, [3, 3]), (None, 31, [3, 1, 1, 1]), (None, 32, [3, 3])],
)
def test_small_batches_are_joined_for_a_topic_of_many_partitions(
    topic: str | None, partitions: int, sizes: list[int]
) -> None:
    producer = ScriptedProducer(partitions=partitions)
    rows = 10_000
    batches = [batch(value=pa.array([text] * rows), topic=pa.array(["orders"] * rows)) for text in "abcdef"]
    list(write_arrow(config(topic), ScriptedPool(producer), batches))
    assert [sent.columns.num_rows // rows for sent in producer.sent] == sizes
    assert [row for sent in producer.sent for (row,) in sent.rows("value")[::rows]] == [
        each.encode() for each in "abcdef"
    ]


@pytest.mark.parametrize(("topics", "sizes"), [(31, [3, 1, 1, 1]), (40, [3, 3])])
def test_small_batches_are_joined_for_many_topics(topics: int, sizes: list[int]) -> None:
    producer = ScriptedProducer(partitions=1)
    names = [f"t{row % topics}" for row in range(10_000)]
    batches = [batch(value=pa.array(["v"] * 10_000), topic=pa.array(names))] * 6
    list(write_arrow(config(None), ScriptedPool(producer), batches))
    assert len(producer.sent) == topics * len(sizes)
    rows = [sum(sent.columns.num_rows for sent in producer.sent[n * topics :][:topics]) for n in range(len(sizes))]
    assert rows == [10_000 * size for size in sizes]


def test_a_topic_column_spreads_a_batch_over_its_topics() -> None:
    producer = ScriptedProducer()
    rows = batch(value=pa.array(["a", "b", "c"]), topic=pa.array(["t2", "t1", "t2"]))
    list(write_arrow(config(None), ScriptedPool(producer), [rows]))
    assert {sent.topic: sent.rows("value") for sent in producer.sent} == {"t2": [(b"a",), (b"c",)], "t1": [(b"b",)]}


def test_topics_of_a_column_are_looked_up_together() -> None:
    looked_up: list[list[str]] = []
    producer = ScriptedProducer(on_send=lambda _: looked_up.append(list(producer.looked_up)))
    names = [f"t{number}" for number in range(4)]
    list(write_arrow(config(None), ScriptedPool(producer), [batch(value=pa.array(names), topic=pa.array(names))]))
    assert looked_up == [[], names[1:], names[1:], names[1:]]


def test_a_null_topic_is_refused() -> None:
    rows = batch(value=pa.array(["a"]), topic=pa.array([None], pa.string()))
    with pytest.raises(SchemaError, match="KAFKA_NULL_TOPIC_IN_DATA"):
        list(write_arrow(config(None), ScriptedPool(ScriptedProducer()), [rows]))


def test_a_time_before_1970_is_refused() -> None:
    rows = batch(value=pa.array(["a", "b"]), timestamp=pa.array([1_700_000_000_005, -2]))
    with pytest.raises(SchemaError, match="-2 ms, which lies before 1970"):
        list(write_arrow(config(), ScriptedPool(ScriptedProducer()), [rows]))


def test_a_row_that_fails_fails_the_task_with_its_place() -> None:
    def refuse(unreported: Sequence[Sent]) -> None:
        for sent in unreported:
            sent.report(RecordTooLargeError("too large"), partition=3)

    producer = ScriptedProducer(on_flush=refuse)
    with pytest.raises(RecordTooLargeError, match="orders-3: too large"):
        list(write_arrow(config(), ScriptedPool(producer), [batch(value=pa.array(["a"]))]))


def test_row_without_an_outcome_fails_the_task() -> None:
    producer = ScriptedProducer(on_flush=lambda _: None)
    with pytest.raises(KafkaError, match="1 of 1 rows were sent and neither acknowledged nor refused"):
        list(write_arrow(config(), ScriptedPool(producer), [batch(value=pa.array(["a"]))]))


def test_error_of_the_rows_is_raised_without_flush() -> None:
    producer = ScriptedProducer()

    def rows() -> Iterator[pa.RecordBatch]:
        yield batch(value=pa.array(["a"]))
        raise OSError("upstream")

    with pytest.raises(OSError, match="upstream"):
        list(write_arrow(config(), ScriptedPool(producer), rows()))
    assert producer.flushes == 0


def test_rows_go_through_the_given_delivery() -> None:
    producer = ScriptedProducer()
    write_all(TaskDelivery(config(), ScriptedPool(producer)), [batch(value=pa.array(["a"]))])
    assert [sent.rows("value") for sent in producer.sent] == [[(b"a",)]]
    assert producer.flushes == 1


def test_failed_task_returns_its_producer() -> None:
    pool = ScriptedPool(ScriptedProducer())
    batches = [batch(value=pa.array(["a"])), batch(value=pa.array(["b"]), timestamp=pa.array([-2]))]
    with pytest.raises(SchemaError):
        write_all(TaskDelivery(config(), pool), batches)
    assert pool.lent == 0


def test_a_partition_without_rows_makes_no_producer() -> None:
    def no_producer(_: object) -> ScriptedProducer:
        raise AssertionError("a producer was made")

    (report,) = write_arrow(config(), ScriptedPool(no_producer), [batch(value=pa.array([], pa.string()))])
    assert report.to_pylist()[0]["records"] == 0


def test_the_option_lets_early_numbers_pass_by_columns() -> None:
    producer = ScriptedProducer()
    early = batch(value=pa.array(["a"]), timestamp=pa.array([1_764_000_000]))
    with pytest.raises(SchemaError, match=r"set timestamp\.allow\.before\.1980=true"):
        list(write_arrow(config(), ScriptedPool(producer), [early]))
    assert producer.sent == []
    list(write_arrow(config(**{"timestamp.allow.before.1980": "true"}), ScriptedPool(producer), [early]))
    assert [sent.rows("timestamp_ms") for sent in producer.sent] == [[(1_764_000_000,)]]


# ---- columns with formats --------------------------------------------------------------------------------------------

NAMES = StructType([StructField("a", LongType()), StructField("b", StringType())])
STRUCT = pa.struct([("a", pa.int64()), ("b", pa.string())])
NO_NULL = '{"type":"record","name":"r","fields":[{"name":"a","type":"long"},{"name":"b","type":"string"}]}'


def formatted(topic: str | None = "orders", **options: str) -> SinkConfig:
    given = {key.replace("_", "."): text for key, text in options.items()}
    schema = StructType([StructField("value", NAMES), StructField("topic", StringType())])
    return with_column_formats(config(topic, **given), schema)


def test_a_struct_becomes_bytes_and_null_stays_null() -> None:
    producer = ScriptedProducer()
    rows = batch(
        value=pa.array([{"a": 1, "b": "x"}, None, {"a": 3, "b": None}], STRUCT),
        key=pa.array(["k1", "k2", None]),
        other=pa.array([1, 2, 3]),
    )
    list(write_arrow(formatted(value_format="avro"), ScriptedPool(producer), [rows, rows.slice(1, 1)]))
    assert [row for sent in producer.sent for row in sent.rows("value", "key")] == [
        (b"\0\2\0\2x", b"k1"),
        (None, b"k2"),
        (b"\0\6\2", None),
        (None, b"k2"),
    ]


def test_a_topic_column_spreads_formatted_rows() -> None:
    producer = ScriptedProducer()
    rows = batch(value=pa.array([{"a": 1}, {"a": 2}, {"a": 3}], STRUCT), topic=pa.array(["t2", "t1", "t2"]))
    list(write_arrow(formatted(None, value_format="json"), ScriptedPool(producer), [rows]))
    assert {sent.topic: sent.rows("value") for sent in producer.sent} == {
        "t2": [(b'{"a":1}',), (b'{"a":3}',)],
        "t1": [(b'{"a":2}',)],
    }


def test_a_row_that_does_not_fit_fails_the_task_with_its_number_in_the_task() -> None:
    pool = ScriptedPool(ScriptedProducer(partitions=1))
    good = batch(value=pa.array([{"a": 1, "b": "x"}] * 30_000, STRUCT))
    bad = batch(value=pa.array([{"a": 1, "b": "x"}] * 7 + [{"a": 1, "b": None}], STRUCT))
    with pytest.raises(SerializationError, match=r"value\.b of row 60007: it is null"):
        list(write_arrow(formatted(value_format="avro", value_schema=NO_NULL), pool, [good, good, bad]))
    assert pool.lent == 0


def test_a_partition_of_structs_without_rows_makes_no_producer() -> None:
    def no_producer(_: object) -> ScriptedProducer:
        raise AssertionError("a producer was made")

    (report,) = write_arrow(
        formatted(value_format="json"), ScriptedPool(no_producer), [batch(value=pa.array([], STRUCT))]
    )
    assert report.to_pylist()[0]["records"] == 0
