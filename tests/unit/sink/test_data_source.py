"""The data source without Spark: its refusals, its writer's Arrow batches, and its reports."""

from __future__ import annotations

import configparser
import datetime
import logging
import pickle
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import CaseInsensitiveDict, DataSourceArrowWriter, DataSourceStreamArrowWriter
from pyspark.sql.types import (
    ArrayType,
    CalendarIntervalType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)
from support.fake_clock import FakeClock
from support.own_telemetry import KeptTelemetry, keep
from support.scripted_producer import ScriptedPool, ScriptedProducer

from spark_kafka_sink import KafkaSinkDataSource
from spark_kafka_sink.common.batch_report import BatchReport
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import ConfigError, RecordTooLargeError, SchemaError
from spark_kafka_sink.producer.writes import Delivered
from spark_kafka_sink.serialization import schemas
from spark_kafka_sink.serialization.column_format import ColumnFormat
from spark_kafka_sink.sink import column_formats, data_source, worker
from spark_kafka_sink.sink.column_formats import arrow_type
from spark_kafka_sink.sink.data_source import KafkaBatchWriter, KafkaStreamWriter, TaskWritten, report_of
from spark_kafka_sink.sink.delivery import report_columns
from spark_kafka_sink.sink.options import _warn_once

OPTIONS = {"kafka.bootstrap.servers": "127.0.0.1:9092", "topic": " orders "}
TEXT = StringType()
UTC_MICROS = pa.timestamp("us", "UTC")


def schema(**columns: DataType) -> StructType:
    return StructType([StructField(name, data_type) for name, data_type in columns.items()])


def source(**options: str) -> KafkaSinkDataSource:
    """A data source as Spark makes it, with option keys in lower case."""
    return KafkaSinkDataSource(CaseInsensitiveDict({**OPTIONS, **options}))


def batch(**columns: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


@pytest.fixture
def producer(monkeypatch: pytest.MonkeyPatch) -> ScriptedProducer:
    """The producer of this test's writers."""
    producer = ScriptedProducer()
    pool = ScriptedPool(producer)
    monkeypatch.setattr(data_source, "process_pool", lambda: pool)
    return producer


def write(*batches: pa.RecordBatch, options: dict[str, str] | None = None) -> TaskWritten:
    writer = source(**(options or {})).streamWriter(schema(value=TEXT, topic=TEXT), False)
    received: KafkaStreamWriter = pickle.loads(pickle.dumps(writer))  # as a task receives it
    return received.write(iter(batches))


# ---- on the driver -------------------------------------------------------------------------------------------------


def test_spark_gets_arrow_writers() -> None:
    assert KafkaSinkDataSource.name() == "kafka_sink"
    assert isinstance(source().writer(schema(value=TEXT), False), DataSourceArrowWriter)
    assert isinstance(source().streamWriter(schema(value=TEXT), False), DataSourceStreamArrowWriter)


def test_front_module_is_installed_with_the_package() -> None:
    import pyspark_kafka_sink

    front = pyspark_kafka_sink.DefaultSource({"kafka.bootstrap.servers": "b:1", "topic": "orders"})
    assert front.name() == KafkaSinkDataSource.name()
    assert isinstance(front.writer(schema(value=TEXT), False), KafkaBatchWriter)
    assert isinstance(front.streamWriter(schema(value=TEXT), False), KafkaStreamWriter)
    with pytest.raises(ConfigError, match="kafka_sink writes only"):
        front.schema()
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).resolve().parents[3] / "setup.cfg")
    assert setup["options"]["py_modules"].split() == ["pyspark_kafka_sink"]


def test_options_added_by_spark_are_accepted() -> None:
    assert source(checkpointLocation="/tmp/c", path="/tmp/p", queryName="q").streamWriter(schema(value=TEXT), False)


def test_options_of_sparks_source_cause_one_warning_for_all_batches(caplog: pytest.LogCaptureFixture) -> None:
    _warn_once.cache_clear()
    given = {"failOnDataLoss": "false", "kafka.group.id": "g"}
    writers = [source(**given).streamWriter(schema(value=TEXT), False) for _ in range(3)]
    pickle.loads(pickle.dumps(writers))
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["failOnDataLoss, kafka.group.id"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"topics": "a"}, "There is no option topics. The nearest one is topic."),
        ({"kafka.key.serializer": "x"}, "kafka.key.serializer"),
        ({"kafka.value.serializer": "x"}, "kafka.value.serializer"),
        ({"topic": ""}, "The option topic is empty"),
    ],
)
def test_options_are_refused_before_any_task(options: dict[str, str], text: str) -> None:
    for make in (source(**options).writer, source(**options).streamWriter):
        with pytest.raises(ConfigError, match=text):
            make(schema(value=TEXT), False)


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"Value": TEXT}, r"^Required attribute 'value' not found\. The columns are: Value\."),
        ({"value": LongType()}, r"^value attribute unsupported type bigint\. value must be a\(n\) string or binary"),
        ({"value": TEXT, "partition": LongType()}, "^partition attribute unsupported type bigint"),
        ({"value": TEXT, "timestamp": TimestampNTZType()}, "^timestamp attribute unsupported type timestamp_ntz"),
    ],
)
def test_a_wrong_schema_is_refused_before_any_task(columns: dict[str, DataType], text: str) -> None:
    for make in (source().writer, source().streamWriter):
        with pytest.raises(SchemaError, match=text):
            make(schema(**columns), False)


def test_without_the_topic_option_there_must_be_a_topic_column() -> None:
    bare = KafkaSinkDataSource({"kafka.bootstrap.servers": "h:1"})
    with pytest.raises(SchemaError, match="topic option required when no 'topic' attribute is present"):
        bare.streamWriter(schema(value=TEXT), False)
    assert bare.streamWriter(schema(value=TEXT, topic=TEXT, other=IntegerType()), False)


def test_missing_options_error_explains_table_options() -> None:
    """Bug: for a table made with OPTIONS the error said that kafka.bootstrap.servers is missing, although the user had
    set it.
    """
    with pytest.raises(
        ConfigError, match=r"OPTIONS of a table.*INSERT INTO t WITH \('kafka\.bootstrap\.servers' "
    ) as error:
        KafkaSinkDataSource({}).writer(schema(value=TEXT), False)
    assert "TEMPORARY VIEW. Do not put private keys into a view's OPTIONS, because Spark records" in str(error.value)


def test_columns_that_are_not_written_may_be_anything() -> None:
    given = schema(value=TEXT, timestamp=TimestampType(), Partition=LongType(), headerS=TEXT)
    assert source().writer(given, False)


def test_overwrite_is_refused_only_for_a_batch() -> None:
    with pytest.raises(ConfigError, match=r"Save mode Overwrite not allowed for Kafka.*mode\(\"append\"\)"):
        source().writer(schema(value=TEXT), True)
    assert source().streamWriter(schema(value=TEXT), True)


def test_a_read_is_refused() -> None:
    with pytest.raises(ConfigError, match="kafka_sink writes only"):
        source().schema()


# ---- in a task -----------------------------------------------------------------------------------------------------


def test_task_writes_columns_and_ignores_others(producer: ScriptedProducer) -> None:
    first = batch(more=pa.array([[1], [2]]), value=pa.array(["a", "b"], pa.large_string()), key=pa.array([b"k", None]))
    written = write(first, batch(more=pa.array([[3]]), value=pa.array(["c"]), key=pa.array([b"l"])))
    assert [sent.rows("value", "key") for sent in producer.sent] == [[(b"a", b"k"), (b"b", None)], [(b"c", b"l")]]
    assert {sent.topic for sent in producer.sent} == {"orders"}
    assert report_of([written]).records == 3


@pytest.mark.parametrize("text", [pa.string(), pa.large_string(), pa.string_view()])
def test_text_in_any_layout_of_arrow(producer: ScriptedProducer, text: pa.DataType) -> None:
    headers = pa.large_list(pa.struct([("key", text), ("value", pa.large_binary())]))
    rows = batch(
        topic=pa.array(["t2", "t1", "t2"]).cast(text),
        value=pa.array(["ä", None, "c"]).cast(text),
        headers=pa.array([[("h", b"1")], [], None], headers),
    )
    writer = KafkaSinkDataSource({"kafka.bootstrap.servers": "h:1"}).streamWriter(schema(value=TEXT, topic=TEXT), False)
    writer.write(iter([rows]))
    assert {sent.topic: sent.rows("value") for sent in producer.sent} == {
        "t2": [("ä".encode(),), (b"c",)],
        "t1": [(None,)],
    }


@pytest.mark.parametrize(
    ("times", "ms"),
    [
        (pa.array([0, 1_999, None, 1_356_998_400_123_999], UTC_MICROS), [0, 1, None, 1_356_998_400_123]),
        (pa.array([1_500_000_000], pa.timestamp("ns", "Asia/Tokyo")), [1_500]),
        (pa.array([1_700_000_000_007, None], pa.int64()), [1_700_000_000_007, None]),
        (pa.array([datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)], UTC_MICROS), [253_402_214_400_000]),
        (pa.array([], UTC_MICROS), []),
        (pa.array([None], UTC_MICROS), [None]),
    ],
)
def test_timestamps_become_milliseconds(producer: ScriptedProducer, times: pa.Array, ms: list[int | None]) -> None:
    padded = batch(value=pa.array(["v"] * len(times), pa.string()), timestamp=times)
    write(padded.slice(0, 0), padded)
    assert [row for sent in producer.sent for (row,) in sent.rows("timestamp_ms")] == ms


@pytest.mark.parametrize(
    ("times", "text"),
    [
        (pa.array([5, -1], UTC_MICROS), "A timestamp is -1 us, which lies before 1970"),
        (pa.array([-2], pa.int64()), "A timestamp is -2 ms, which lies before 1970"),
    ],
)
def test_a_time_before_1970_is_refused(producer: ScriptedProducer, times: pa.Array, text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        write(batch(value=pa.array(["v"] * len(times)), timestamp=times))
    assert not producer.sent


def test_first_of_two_columns_with_one_name_counts(producer: ScriptedProducer) -> None:
    rows = pa.RecordBatch.from_arrays([pa.array(["first"]), pa.array(["second"])], names=["value", "value"])
    write(rows)
    assert producer.sent[0].rows("value") == [(b"first",)]


def test_a_row_that_fails_fails_the_task(producer: ScriptedProducer) -> None:
    producer.on_flush = lambda sent: sent[0].report(RecordTooLargeError("too large"))
    with pytest.raises(RecordTooLargeError, match="orders-0: too large"):
        write(batch(value=pa.array(["a"])))


def test_an_error_upstream_is_passed_on_and_nothing_is_reported(producer: ScriptedProducer) -> None:
    def rows() -> Iterator[pa.RecordBatch]:
        yield batch(value=pa.array(["a"]))
        raise OSError("upstream")

    with pytest.raises(OSError, match="upstream"):
        source().streamWriter(schema(value=TEXT), False).write(rows())
    assert producer.flushes == 0


# ---- back on the driver --------------------------------------------------------------------------------------------


def message(partition: int, records: int, started_ms: int, ended_ms: int) -> TaskWritten:
    delivered = {TopicPartition("orders", partition): Delivered(records, 10 * records, records - 1, 0)}
    columns = report_columns(delivered, 1, partition)
    written = TaskWritten(columns, started_ms, ended_ms, began_ms=started_ms - 100)
    received: TaskWritten = pickle.loads(pickle.dumps(written))
    return received


def test_duration_is_from_first_start_to_last_end() -> None:
    report = report_of([message(0, 10, 1_000, 1_400), None, message(1, 30, 1_200, 3_000)])
    assert (report.records, report.bytes, report.batches, report.retries, report.duration) == (40, 400, 2, 1, 2.0)
    assert report.last_offsets == {TopicPartition("orders", 0): 9, TopicPartition("orders", 1): 29}


@pytest.mark.usefixtures("producer")
def test_tasks_of_other_machines_compare_time_of_day(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = []
    for booted_for_ms in (1_000, 900_000_000):
        clock = FakeClock(now_ms=booted_for_ms)
        monkeypatch.setattr(data_source, "SystemClock", lambda clock=clock: clock)

        def rows(clock: FakeClock = clock) -> Iterator[pa.RecordBatch]:
            yield batch(value=pa.array(["a"]))
            clock.advance(2_000)

        written.append(source().streamWriter(schema(value=TEXT), False).write(rows()))
    assert report_of(written).duration == 2.0


def test_clock_set_back_makes_no_negative_duration() -> None:
    assert report_of([message(0, 10, 3_000, 1_000)]).duration == 0


@pytest.mark.usefixtures("producer")
def test_clock_set_back_in_a_task_changes_none_of_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a task whose clock was set back ended before it began, and the batch took no time."""
    clock = FakeClock(wall_ms=5_000_000)
    monkeypatch.setattr(data_source, "SystemClock", lambda: clock)

    def rows() -> Iterator[pa.RecordBatch]:
        yield batch(value=pa.array(["a"]))
        clock.advance(2_000)
        clock.set_wall(1_000_000)

    written = source().streamWriter(schema(value=TEXT), False).write(rows())
    assert (written.started_ms, written.ended_ms) == (5_000_000, 5_002_000)


BEGAN_MS = 1_700_000_000_000
"""When the driver of these batches begins, by its own clock. It commits them three seconds later."""


@pytest.mark.parametrize(
    ("ahead_ms", "plan_ms", "tasks_ms"),
    [(0, 500, 2_000), (3_600_000, 1_000, 2_000), (1_500, 1_000, 2_000), (-3_600_000, 0, 2_000), (-1_000, 0, 2_000)],
    ids=["right", "an hour ahead", "a little ahead", "an hour behind", "a little behind"],
)
def test_wrong_clock_of_an_executor_makes_no_batch_longer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ahead_ms: int, plan_ms: int, tasks_ms: int
) -> None:
    """Bug: a batch of three seconds took an hour in the report, in the log and in OpenTelemetry, and ended tomorrow."""
    monkeypatch.setattr(data_source, "SystemClock", lambda: FakeClock(wall_ms=BEGAN_MS + 3_000))
    caplog.set_level(logging.INFO, "spark_kafka_sink")
    first = BEGAN_MS + 500 + ahead_ms
    columns = report_columns({TopicPartition("orders", 0): Delivered(6_000, 60_000, 5_999, 0)}, 1, 0)
    written = TaskWritten(columns, first, first + 2_000, began_ms=BEGAN_MS)
    source(**{"report.log": "true"}).streamWriter(schema(value=TEXT), False).commit([written], 7)
    report = BatchReport.from_json(caplog.records[-1].getMessage())
    assert report.durations_ms == {"plan": plan_ms, "tasks": tasks_ms}
    assert report.ended_ms == BEGAN_MS + plan_ms + tasks_ms
    assert f"{tasks_ms / 1000:.2f} s" in caplog.records[0].getMessage()


def test_batch_of_executors_with_clocks_an_hour_apart_takes_at_most_its_own_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(data_source, "SystemClock", lambda: FakeClock(wall_ms=BEGAN_MS + 3_000))
    caplog.set_level(logging.INFO, "spark_kafka_sink.report")
    for apart_ms in (3_600_000, -3_600_000):
        times = ((BEGAN_MS + begin_ms, BEGAN_MS + begin_ms + 1_000) for begin_ms in (500, 500 + apart_ms))
        written = [TaskWritten(report_columns({}, 1, 0), *each, began_ms=BEGAN_MS) for each in times]
        source(**{"report.log": "true"}).streamWriter(schema(value=TEXT), False).commit(written, 7)
        report = BatchReport.from_json(caplog.records[-1].getMessage())
        assert (report.durations_ms, report.ended_ms) == ({"plan": 0, "tasks": 3_000}, BEGAN_MS + 3_000)


def test_clock_set_back_in_a_batch_that_fails_makes_no_negative_duration(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: the batch ended before it began, and OpenTelemetry dropped its duration."""
    monkeypatch.setattr(data_source, "SystemClock", lambda: FakeClock(wall_ms=BEGAN_MS - 60_000))
    caplog.set_level(logging.INFO, "spark_kafka_sink.report")
    columns = report_columns({}, 1, 0)
    written = TaskWritten(columns, BEGAN_MS, BEGAN_MS + 10, began_ms=BEGAN_MS)
    source(**{"report.log": "true"}).streamWriter(schema(value=TEXT), False).abort([written, None], 7)
    reports = [each.getMessage() for each in caplog.records if each.name == "spark_kafka_sink.report"]
    assert [BatchReport.from_json(each).ended_ms for each in reports] == [BEGAN_MS]


def test_commit_messages_take_under_200_bytes_a_partition() -> None:
    """The driver holds all messages at once: with 2,000 tasks and 200 partitions that is 400,000 times the size."""
    delivered = {TopicPartition("orders", each): Delivered(5_000, 500_000, 10**9 + each) for each in range(200)}
    pickled = pickle.dumps(TaskWritten(report_columns(delivered, 200, 0), 1, 2))
    pickle.loads(pickled)
    tracemalloc.start()
    try:
        messages = [pickle.loads(pickled) for _ in range(10)]
        report = report_of(messages)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (report.records, len(report.last_offsets)) == (10_000_000, 200)
    assert peak < 10 * 200 * 200


def test_batch_without_a_task_makes_a_report() -> None:
    assert report_of([]).records == 0


def test_commit_logs_written_rows_and_abort_logs_remaining_ones(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "spark_kafka_sink")
    stream, write_ = source().streamWriter(schema(value=TEXT), False), source().writer(schema(value=TEXT), False)
    sent = [message(0, 1_000, 1_000, 1_500)]
    stream.commit(sent, 7)
    write_.commit(sent)
    stream.abort([*sent, None], 8)
    write_.abort([None])
    written = "1,000 records, 0.0 MB in 1 batches to 1 partitions of orders, 0 retries, 0.50 s, 2,000 records/s"
    stays = f"their rows stay in Kafka ({written})"
    advice = "Nothing is lost: every row is written again when this is run again."
    texts = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert texts[:2] == [("INFO", f"Batch 7: {written}"), ("INFO", f"Write: {written}")]
    assert [level for level, _ in texts[2:]] == ["WARNING", "WARNING"]
    failed = "Batch 8 for topic orders failed or was stopped"
    assert texts[2][1].startswith(f"{failed}: 1 of 2 tasks had finished; {stays}. {advice}")
    assert texts[3][1].startswith(f"Write failed: 0 of 1 tasks had finished. {advice}")


@pytest.mark.parametrize(
    ("options", "owner"),
    [
        pytest.param({}, " for topic orders", id="topic"),
        pytest.param({"topic": ""}, "", id="column topic"),
        pytest.param({"queryName": "shop"}, " of query 'shop'", id="query name"),
        pytest.param(
            {"delivery.guarantee": "exactly-once", "transactional.id.prefix": "nightly"}, " of nightly", id="prefix"
        ),
    ],
)
def test_line_of_failed_batch_names_its_query(
    options: dict[str, str], owner: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = {key: value for key, value in {**OPTIONS, **options}.items() if value}
    columns = schema(value=TEXT) if "topic" in given else schema(topic=TEXT, value=TEXT)
    KafkaSinkDataSource(CaseInsensitiveDict(given)).streamWriter(columns, False).abort([None], 8)
    assert [record.getMessage().partition(" failed")[0] for record in caplog.records] == [f"Batch 8{owner}"]


@pytest.fixture
def bare_logging(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """The package's logger as in Spark's Python worker, where no logging is configured."""
    package = logging.Logger("spark_kafka_sink")
    monkeypatch.setattr(worker, "_package_log", package)
    return package


@pytest.mark.parametrize(
    "end",
    [
        lambda: source().streamWriter(schema(value=TEXT), False).commit([message(0, 1, 0, 1)], 7),
        lambda: source().streamWriter(schema(value=TEXT), False).abort([None], 7),
        lambda: source().writer(schema(value=TEXT), False).commit([message(0, 1, 0, 1)]),
        lambda: source().writer(schema(value=TEXT), False).abort([None]),
    ],
    ids=["a stream's commit", "a stream's abort", "a write's commit", "a write's abort"],
)
def test_each_end_of_a_batch_is_shown(bare_logging: logging.Logger, end: Callable[[], None]) -> None:
    end()
    assert (bare_logging.level, len(bare_logging.handlers)) == (logging.INFO, 1)


# ---- columns with formats --------------------------------------------------------------------------------------------

STRUCT = schema(a=LongType())
ARROW_STRUCT = pa.struct([("a", pa.int64())])
AVRO = {"value.format": "avro"}
REGISTRY = {"schema.registry.url": "http://127.0.0.1:9"}


def test_a_struct_becomes_avro_in_the_task(producer: ScriptedProducer) -> None:
    for writer in (
        source(**AVRO).writer(schema(value=STRUCT), False),
        source(**AVRO).streamWriter(schema(value=STRUCT), False),
    ):
        received = pickle.loads(pickle.dumps(writer))
        received.write(iter([batch(value=pa.array([{"a": 1}, None], ARROW_STRUCT))]))
    assert [sent.rows("value") for sent in producer.sent] == [[(b"\0\2",), (None,)]] * 2


def strict(nullable: bool) -> StructType:
    """A struct with fields, elements and values of a map that may be null, or may not."""
    inner = StructType([StructField("x", LongType(), nullable)])
    items, prices = ArrayType(inner, nullable), MapType(StringType(), LongType(), nullable)
    fields = {"n": LongType(), "items": items, "by": prices}
    return StructType([StructField(name, data_type, nullable) for name, data_type in fields.items()])


@pytest.mark.parametrize("given", [AVRO, {"value.format": "protobuf"}], ids=["avro", "protobuf"])
def test_stream_keeps_its_schema_where_spark_finds_that_a_field_is_never_null(
    producer: ScriptedProducer, given: dict[str, str]
) -> None:
    """Bug: Spark leaves a part of a union without new rows out of the plan of a micro-batch, and a field that is null
    in that part only is not nullable then. The made schema changed from batch to batch, without an error.
    """
    value = {"n": 0, "items": [{"x": 1}], "by": {"a": 2}}
    for nullable in (True, False):
        data_type = strict(nullable)
        writer = source(**given).streamWriter(schema(value=data_type), False)
        received = pickle.loads(pickle.dumps(writer))
        received.write(iter([batch(value=pa.array([value], arrow_type(data_type, "value")))]))
    first, second = (sent.rows("value") for sent in producer.sent)
    assert first == second


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"value": schema(**{"a b": LongType()})}, "value: Avro does not allow the name 'a b'"),
        ({"value": schema(a=CalendarIntervalType())}, r"value\.a has the type interval"),
        ({"value": STRUCT, "key": STRUCT}, "key attribute unsupported type struct<a:bigint>"),
    ],
)
def test_a_type_without_a_format_is_refused_before_any_task(columns: dict[str, DataType], text: str) -> None:
    for make in (source(**AVRO).writer, source(**AVRO).streamWriter):
        with pytest.raises(SchemaError, match=text):
            make(schema(**columns), False)


@pytest.mark.parametrize("named", [{"checkpointLocation": "/c"}, {"queryName": "orders"}, {}], ids=str)
def test_the_registry_is_asked_once_when_tasks_begin_and_not_at_commit(
    named: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug to avoid: a writer that only commits must not fail because the registry cannot be reached. And a query
    without the option checkpointLocation asked in each batch, so that its schema could change meanwhile.
    """
    monkeypatch.setattr(column_formats, "_of_streams", {})
    asked = []

    def registered(column_format: ColumnFormat, *_: object) -> ColumnFormat:
        asked.append(column_format.field)
        return column_format

    monkeypatch.setattr(schemas, "registered", registered)
    for number in range(3):
        writer = source(**AVRO, **REGISTRY, **named).streamWriter(schema(value=STRUCT), False)
        assert len(asked) == min(number, 1)
        received = pickle.loads(pickle.dumps([writer, writer]))[0]
        assert b"127.0.0.1:9/" not in pickle.dumps(received)
        source(**AVRO, **REGISTRY, **named).streamWriter(schema(value=STRUCT), False).commit([], number)
    assert asked == ["value"]


# ---- lineage ---------------------------------------------------------------------------------------------------------

LINEAGE = {"lineage.openlineage": "true", "checkpointLocation": "/c"}


@pytest.fixture
def lineage_events(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The events of the driver's processes, whose sender is another one each time."""
    events: list[Any] = []
    sender = SimpleNamespace(put=events.append, wait=lambda seconds: True)
    monkeypatch.setattr("spark_kafka_sink.sink.lineage_sender.process_sender", lambda: sender)
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    return events


def outcomes(events: list[Any]) -> list[str | None]:
    return [each.report and each.report.outcome for each in events]


@pytest.mark.usefixtures("producer")
def test_batch_of_a_stream_begins_and_ends_the_same_run(lineage_events: list[Any]) -> None:
    planned = source(**LINEAGE).streamWriter(schema(value=TEXT), False)
    pickle.dumps(planned)
    received: KafkaStreamWriter = pickle.loads(pickle.dumps(planned))  # Spark pickles it twice
    messages = [received.write(iter([batch(value=pa.array(["a", "b"]))])), received.write(iter([]))]
    source(**LINEAGE).streamWriter(schema(value=TEXT), False).commit(messages, 7)
    begin, end = lineage_events
    assert outcomes(lineage_events) == [None, "complete"]
    assert end.run == begin.run
    assert (end.report.records, end.ids.batch_id) == (2, 7)
    assert (begin.time_ms, end.run.is_stream) == (end.report.began_ms, True)


@pytest.mark.usefixtures("producer")
@pytest.mark.parametrize("has_finished_task", [False, True])
def test_batch_that_is_aborted_ends_its_run_as_failed(lineage_events: list[Any], has_finished_task: bool) -> None:
    received: KafkaStreamWriter = pickle.loads(pickle.dumps(source(**LINEAGE).streamWriter(schema(value=TEXT), False)))
    written = received.write(iter([batch(value=pa.array(["a"]))]))
    later = source(**LINEAGE).streamWriter(schema(value=TEXT), False)
    later.abort([written if has_finished_task else None, None], 7)
    assert outcomes(lineage_events) == [None, "failed"]
    assert lineage_events[1].run == lineage_events[0].run


def test_batch_that_cannot_begin_ends_its_run_as_failed(
    lineage_events: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(config: object) -> None:
        raise RecordTooLargeError("no topic")

    monkeypatch.setattr(data_source, "create_missing_topic", refused)
    given = LINEAGE | {"topic.create": "if-missing", "topic.partitions": "1"}
    with pytest.raises(RecordTooLargeError):
        pickle.dumps(source(**given).streamWriter(schema(value=TEXT), False))
    assert outcomes(lineage_events) == [None, "failed"]
    assert lineage_events[1].report.error.endswith(".RecordTooLargeError")


@pytest.mark.usefixtures("producer")
def test_batch_write_begins_and_ends_the_same_run(lineage_events: list[Any]) -> None:
    given = {"lineage.openlineage": "true"}
    received: KafkaBatchWriter = pickle.loads(pickle.dumps(source(**given).writer(schema(value=TEXT), False)))
    received.commit([received.write(iter([batch(value=pa.array(["a"]))]))])
    assert outcomes(lineage_events) == [None, "complete"]
    assert (lineage_events[1].run, lineage_events[1].run.is_stream) == (lineage_events[0].run, False)


# ---- telemetry -------------------------------------------------------------------------------------------------------

TELEMETRY = {"telemetry.opentelemetry": "true", "checkpointLocation": "s3://u:secret@bucket/c"}


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> KeptTelemetry:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    return keep(monkeypatch)


@pytest.mark.usefixtures("producer")
def test_span_of_a_batch_that_two_processes_share_is_the_parent_of_its_tasks(kept: KeptTelemetry) -> None:
    planned = source(**TELEMETRY).streamWriter(schema(value=TEXT), False)
    pickle.dumps(planned)
    received: KafkaStreamWriter = pickle.loads(pickle.dumps(planned))  # Spark pickles it twice
    messages = [received.write(iter([batch(value=pa.array(["a", "b"]))])), received.write(iter([]))]
    source(**TELEMETRY).streamWriter(schema(value=TEXT), False).commit(messages, 7)
    task, *_, whole = kept.spans
    assert (task.name, whole.name) == ("send orders", "write orders")
    assert task.parent is not None
    assert (task.parent.trace_id, task.parent.span_id) == (whole.context.trace_id, whole.context.span_id)
    assert (whole.attributes or {})["kafka_sink.batch.id"] == 7
    assert (whole.attributes or {})["messaging.batch.message_count"] == 2
    assert kept.waits_s == [1.0, 1.0]  # the task and the end of the batch
    assert "secret" not in repr(vars(received))


@pytest.mark.usefixtures("producer")
@pytest.mark.parametrize("has_finished_task", [False, True])
def test_span_of_an_aborted_batch_is_the_parent_of_its_tasks(kept: KeptTelemetry, has_finished_task: bool) -> None:
    received: KafkaStreamWriter = pickle.loads(
        pickle.dumps(source(**TELEMETRY).streamWriter(schema(value=TEXT), False))
    )
    written = received.write(iter([batch(value=pa.array(["a"]))]))
    later = source(**TELEMETRY).streamWriter(schema(value=TEXT), False)
    later.abort([written if has_finished_task else None, None], 7)
    task, *_, whole = kept.spans
    assert task.parent is not None
    assert (task.parent.trace_id, task.parent.span_id) == (whole.context.trace_id, whole.context.span_id)
    assert (whole.attributes or {})["kafka_sink.outcome"] == "failed"


def test_batch_that_cannot_begin_has_a_span(kept: KeptTelemetry, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(config: object) -> None:
        raise RecordTooLargeError("no topic")

    monkeypatch.setattr(data_source, "create_missing_topic", refused)
    given = TELEMETRY | {"topic.create": "if-missing", "topic.partitions": "1"}
    with pytest.raises(RecordTooLargeError):
        pickle.dumps(source(**given).streamWriter(schema(value=TEXT), False))
    (span,) = kept.spans
    assert (span.attributes or {})["error.type"] == "spark_kafka_sink.common.errors.RecordTooLargeError"


@pytest.mark.usefixtures("producer")
def test_batch_write_is_one_trace(kept: KeptTelemetry) -> None:
    given = {"telemetry.opentelemetry": "true"}
    received: KafkaBatchWriter = pickle.loads(pickle.dumps(source(**given).writer(schema(value=TEXT), False)))
    received.commit([received.write(iter([batch(value=pa.array(["a"]))]))])
    assert len({span.context.trace_id for span in kept.spans}) == 1
    assert kept.spans[-1].name == "write orders"


@pytest.mark.usefixtures("kept", "producer")
def test_batch_without_a_place_for_its_ids_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path / "missing"))
    received: KafkaStreamWriter = pickle.loads(
        pickle.dumps(source(**TELEMETRY).streamWriter(schema(value=TEXT), False))
    )
    assert received.write(iter([batch(value=pa.array(["a"]))])).traceparent
    assert "The span of a batch that fails at once will not be in one trace with its tasks" in caplog.text
