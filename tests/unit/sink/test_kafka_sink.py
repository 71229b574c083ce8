from __future__ import annotations

import datetime
import os
import pickle
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import pandas as pd
import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.cloudpickle import dumps as cloudpickle_dumps
from pyspark.sql import Row
from pyspark.sql.types import BinaryType, StructField, StructType, TimestampNTZType
from support.own_telemetry import keep
from support.scripted_producer import ScriptedPool, ScriptedProducer, Sent

from spark_kafka_sink.common.batch_report import BatchReport
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import ConfigError, IllegalStateError, RecordTooLargeError, SchemaError
from spark_kafka_sink.common.open_transaction import OpenTransaction
from spark_kafka_sink.sink import kafka_sink as kafka_sink_module
from spark_kafka_sink.sink import running_query
from spark_kafka_sink.sink.delivery import REPORT_DDL, TaskDelivery
from spark_kafka_sink.sink.exactly_once.messages import BatchStart, TaskOutcome
from spark_kafka_sink.sink.exactly_once.protocol import Committed
from spark_kafka_sink.sink.exactly_once.session import StreamBatch
from spark_kafka_sink.sink.kafka_sink import KafkaSink
from spark_kafka_sink.sink.rows import BLOCK_ROWS, PartitionWriter
from spark_kafka_sink.sink.small_tasks import RanTasks, SmallTasks, Source

ROWS = [Row(value=str(n)) for n in range(BLOCK_ROWS + 200)]
OPTIONS = {"kafka.bootstrap.servers": "h1:9092", "topic": "orders"}


class BenchSink(KafkaSink):
    """A sink on a pool of one scripted producer."""

    def __init__(self, producer: ScriptedProducer | None = None) -> None:
        super().__init__(OPTIONS)
        self.producer = producer or ScriptedProducer()
        self.pool = ScriptedPool(self.producer)

    def _new_writer(self) -> PartitionWriter:
        return PartitionWriter(TaskDelivery(self._config, self.pool))

    def process_all(self) -> None:
        for row in ROWS:
            self.process(row)


def test_options_are_a_mapping_keywords_or_both() -> None:
    expected = repr(KafkaSink(OPTIONS))
    assert repr(KafkaSink(topic="orders", **{"kafka.bootstrap.servers": "h1:9092"})) == expected
    assert repr(KafkaSink({"kafka.bootstrap.servers": "h1:9092"}, topic="orders")) == expected


def test_an_option_given_both_ways_is_refused() -> None:
    with pytest.raises(ConfigError, match="topic is given twice"):
        KafkaSink(OPTIONS, topic="other")


def test_options_of_another_type_are_refused() -> None:
    with pytest.raises(ConfigError, match="takes a mapping of options, not str"):
        KafkaSink("h1:9092")  # type: ignore[arg-type]


def test_a_bad_option_is_refused_at_construction() -> None:
    with pytest.raises(ConfigError, match="There is no option topik"):
        KafkaSink(OPTIONS, topik="orders")


def test_a_sink_is_a_plain_value_that_opens_nothing() -> None:
    threads = threading.active_count()
    sink = KafkaSink(OPTIONS)
    for copy in (pickle.loads(pickle.dumps(sink)), pickle.loads(cloudpickle_dumps(sink))):  # type: ignore[no-untyped-call]
        assert repr(copy) == repr(sink)
    assert threading.active_count() == threads


def test_its_bound_method_travels_to_the_tasks() -> None:
    write_partition = pickle.loads(cloudpickle_dumps(KafkaSink(OPTIONS).write_partition))  # type: ignore[no-untyped-call]
    write_partition(iter([]))


def test_the_writer_of_an_open_sink_does_not_travel() -> None:
    sink = KafkaSink(OPTIONS)
    assert sink.open(0, 0) is True
    copy = pickle.loads(pickle.dumps(sink))
    with pytest.raises(IllegalStateError, match="before open"):
        copy.process(Row(value="v"))


def test_process_as_a_function_of_rows_names_the_right_calls() -> None:
    """Bug: `df.foreach(sink.process)` only said that process was called before open."""
    with pytest.raises(
        IllegalStateError, match=r"writeStream\.foreach\(sink\).*df\.foreachPartition\(sink\.write_part"
    ):
        KafkaSink(OPTIONS).process(Row(value="v"))


def test_spark_takes_the_sink_as_a_writer() -> None:
    assert not callable(KafkaSink(OPTIONS))


def test_the_repr_shows_the_options_on_one_line() -> None:
    assert repr(KafkaSink(OPTIONS)) == "KafkaSink(topic='orders', kafka.bootstrap.servers='h1:9092')"


def test_an_empty_partition_opens_and_closes_without_a_broker() -> None:
    sink = KafkaSink(OPTIONS)
    sink.open(0, 7)
    sink.close(None)
    sink.write_partition(iter([]))


def test_rows_are_acknowledged_before_close_returns() -> None:
    sink = BenchSink()
    sink.open(0, 7)
    sink.process_all()
    sink.close(None)
    assert sum(sent.columns.num_rows for sent in sink.producer.sent) == len(ROWS)
    assert sink.producer.flushes == 1
    assert sink.pool.lent == 0


def test_rows_are_acknowledged_before_write_partition_returns() -> None:
    sink = BenchSink()
    sink.write_partition(iter(ROWS))
    assert sum(sent.columns.num_rows for sent in sink.producer.sent) == len(ROWS)
    assert sink.producer.flushes == 1
    assert sink.pool.lent == 0


def in_task(monkeypatch: pytest.MonkeyPatch, **properties: str) -> None:
    """Be in a task with these local properties, where clocks go back at 3 o'clock on 26 October 2025."""
    context = SimpleNamespace(getLocalProperty={"spark.job.tags": None, **properties}.get)
    monkeypatch.setattr(TaskContext, "get", lambda: context)
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()


@pytest.fixture
def own_zone() -> Iterator[None]:
    before = os.environ.get("TZ")
    yield
    os.environ.pop("TZ", None)
    os.environ.update({} if before is None else {"TZ": before})
    time.tzset()


TWICE = datetime.datetime(2025, 10, 26, 2, 30, fold=1)


@pytest.mark.usefixtures("own_zone")
def test_a_time_that_comes_twice_is_refused_by_partition_on_spark_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the rows of Spark Connect do not say which of the two it is, and the first one was written."""
    in_task(monkeypatch, **{"spark.job.tags": "SparkConnect_OperationTag_User_u_Session_s_Operation_o"})
    with pytest.raises(SchemaError, match="Spark Connect does not tell foreachPartition which of the two"):
        BenchSink().write_partition([Row(value="v", timestamp=TWICE.replace(fold=0))])


@pytest.mark.usefixtures("own_zone")
def test_rows_of_classic_spark_say_which_of_two_times_they_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    in_task(monkeypatch)
    sink = BenchSink()
    sink.write_partition([Row(value="v", timestamp=TWICE), Row(value="v", timestamp=TWICE.replace(fold=0))])
    (sent,) = sink.producer.sent
    assert sent.columns.timestamp_ms.to_pylist() == [1_761_442_200_000, 1_761_438_600_000]


def test_row_after_close_is_refused() -> None:
    sink = BenchSink()
    sink.open(0, 7)
    sink.process(ROWS[0])
    sink.close(None)
    with pytest.raises(IllegalStateError, match="before open"):
        sink.process(ROWS[1])
    sink.close(None)
    assert sink.producer.flushes == 1


def test_close_after_an_error_neither_waits_nor_raises() -> None:
    def refuse(sent: Sent) -> None:
        sent.report(RecordTooLargeError("too large"))

    sink = BenchSink(ScriptedProducer(on_send=refuse))
    sink.open(0, 7)
    with pytest.raises(RecordTooLargeError) as caught:
        sink.process_all()
    sink.close(caught.value)
    assert sink.producer.flushes == 0
    assert sink.pool.lent == 0


def test_close_without_an_error_raises_the_deliverys() -> None:
    sink = BenchSink(ScriptedProducer(on_flush=lambda sent: sent[0].report(RecordTooLargeError("too large"))))
    sink.open(0, 7)
    sink.process(ROWS[0])
    for _ in range(2):  # Bug: the second one returned, as if the rows had been written
        with pytest.raises(RecordTooLargeError):
            sink.close(None)
        assert sink.pool.lent == 0
    sink.open(0, 8)
    sink.process(ROWS[0])
    sink.close(RuntimeError("mine"))
    sink.close(None)


def test_row_of_another_thread_is_refused() -> None:
    """Bug: `process` in several threads at once lost rows, doubled some, and gave some the keys of others."""
    sink = BenchSink()
    sink.open(0, 7)
    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(IllegalStateError, match=r"in another thread than open.*call write_partition"),
    ):
        pool.submit(sink.process, ROWS[0]).result()
    sink.process_all()
    sink.close(None)
    assert sum(sent.columns.num_rows for sent in sink.producer.sent) == len(ROWS)


def test_second_open_in_a_task_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: two generators in a task that used one sink lost the rows of the first one, and the task succeeded."""
    attempt_ids = iter([1, 2, 2, 2])
    context = SimpleNamespace(taskAttemptId=lambda: next(attempt_ids), getLocalProperty=lambda _: None)
    monkeypatch.setattr(TaskContext, "get", lambda: context)
    sink = BenchSink()
    for _ in range(2):  # the first task has failed, and its sink, in a broadcast, was not closed
        sink.open(0, 7)
        sink.process_all()
    with pytest.raises(IllegalStateError, match="open was called twice in one task"):
        sink.open(1, 7)
    assert sink.pool.lent == 0
    sink.open(1, 7)
    sink.process_all()
    sink.close(None)


def test_second_open_returns_the_first_producer() -> None:
    sink = BenchSink()
    sink.open(0, 7)
    sink.process_all()
    assert sink.pool.lent == 1
    sink.open(0, 7)
    assert sink.pool.lent == 0


def test_close_without_open_does_nothing() -> None:
    KafkaSink(OPTIONS).close(None)


def test_an_error_of_the_rows_themselves_passes_through_without_waiting() -> None:
    def rows() -> Iterator[Row]:
        yield from ROWS
        raise ZeroDivisionError("upstream")

    sink = BenchSink()
    with pytest.raises(ZeroDivisionError, match="upstream"):
        sink.write_partition(rows())
    assert sink.producer.sent
    assert sink.producer.flushes == 0
    assert sink.pool.lent == 0


def test_write_after_one_that_failed_has_all_its_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a write that failed because its fewer tasks had too little memory was tried again with as few."""
    source, known = Source("orders", None, slots=2), SmallTasks()
    known.learn(source, RanTasks(200, 10_000, busy_ms=1_600, duration_ms=1_100, are_fewer=False))
    asked: list[bool] = []

    def fail(df: object, write_task: object, report_ddl: str) -> Any:
        asked.append(known.has(source))
        raise MemoryError("a task")

    monkeypatch.setattr(kafka_sink_module, "_small_tasks", known)
    monkeypatch.setattr(kafka_sink_module, "source_of", lambda df, topic: source)
    monkeypatch.setattr(kafka_sink_module, "with_fewer_tasks", lambda df, *_: df)
    monkeypatch.setattr(kafka_sink_module, "batch_limits", lambda df, *given: nullcontext(df))
    monkeypatch.setattr(kafka_sink_module, "map_in_arrow", fail)
    rows: Any = SimpleNamespace(sparkSession=None)
    for _ in range(2):
        with pytest.raises(MemoryError):
            KafkaSink(OPTIONS)._run_tasks(rows, iter, REPORT_DDL)
    assert asked == [True, False]


# ---- exactly once ----------------------------------------------------------------------------------------------------


class Session:
    """Run the tasks as a driver's session does, and decide nothing."""

    made: ClassVar[list[Session]]

    def __init__(self, prefix: str | None) -> None:
        self.prefix = prefix
        self.is_closed = False
        self.made.append(self)

    def run(self, config: object, batch: StreamBatch | None, run_tasks: Any) -> Committed:
        self.batch = batch
        self.outcomes = run_tasks(BATCH_START, 3)
        return Committed(None, False, None)

    def close(self) -> None:
        self.is_closed = True


BATCH_START = BatchStart("p", OpenTransaction("p/driver", 1, 0, 2), TopicPartition("decisions", 0))
OUTCOME = TaskOutcome(BATCH_START, 3, "q1", 0, 5, None)
NO_LETTERS = {"dead_letters": 0, "first_dead_letter": None}
COUNTS = NO_LETTERS | {
    "topic": None,
    "records": 0,
    "bytes": 0,
    "batches": 1,
    "retries": 0,
    "outcome": OUTCOME.to_json(),
    "task": '{"durations_ms":{"read":3},"kinds":{}}',
}
WRITTEN = NO_LETTERS | {
    "topic": "orders",
    "partition": 0,
    "records": 5,
    "bytes": 50,
    "first_offset": 0,
    "last_offset": 4,
    "without_offset": 0,
    "batches": 0,
    "retries": 0,
}


class ExactlyOnceSink(KafkaSink):
    """A sink whose tasks wrote five rows, or failed."""

    is_failing = False

    def _run_tasks(self, df: Any, write_task: Any, report_ddl: str) -> list[Any]:
        self.given = write_task(iter(["batch"]))
        if self.is_failing:
            raise ZeroDivisionError("a task")
        return [COUNTS, WRITTEN | {"outcome": None}]


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[Session]:
    Session.made = []
    monkeypatch.setattr(kafka_sink_module, "DriverSession", Session)
    monkeypatch.setattr(kafka_sink_module, "session", Session)
    monkeypatch.setattr(kafka_sink_module, "without_padding", lambda batch: f"{batch} without padding")
    monkeypatch.setattr(kafka_sink_module, "write_arrow", lambda config, pool, records: [*records])
    monkeypatch.setattr(
        kafka_sink_module, "write_in_transaction", lambda config, pool, *given: [*given[:-1], *given[-1]]
    )
    monkeypatch.setattr(kafka_sink_module, "stream_batch", lambda df, batch_id: StreamBatch("q1", "r1", batch_id))
    monkeypatch.setattr(
        kafka_sink_module, "batch_prefix", lambda config, _: config.transactional_id_prefix or "of-the-checkpoint"
    )
    return Session.made


EXACTLY_ONCE = OPTIONS | {"delivery.guarantee": "exactly-once"}
FRAME: Any = SimpleNamespace(schema=StructType([StructField("value", BinaryType())]), sparkSession=None)


@pytest.mark.parametrize("options", [OPTIONS, EXACTLY_ONCE])
@pytest.mark.parametrize(
    ("table", "kind"),
    [(pd.DataFrame({"value": ["a"]}), "pandas.DataFrame"), (pa.table({"value": ["a"]}), "pyarrow.Table")],
)
def test_table_of_another_library_is_refused_by_its_name(table: Any, kind: str, options: dict[str, object]) -> None:
    """Bug: a DataFrame of pandas ended in "'DataFrame' object has no attribute 'schema'"."""
    with pytest.raises(SchemaError, match=rf"a DataFrame of Spark, not {kind}\. Make one by spark\.createDataFrame"):
        KafkaSink(options).write(table)


@pytest.mark.parametrize("is_failing", [False, True])
def test_write_without_prefix_closes_its_own_session(sessions: list[Session], is_failing: bool) -> None:
    sink = ExactlyOnceSink(EXACTLY_ONCE)
    sink.is_failing = is_failing
    with pytest.raises(ZeroDivisionError) if is_failing else nullcontext():
        assert sink.write(FRAME).records == 5
    (session,) = sessions
    assert session.prefix is None
    assert session.batch is None
    assert session.is_closed


def test_micro_batch_goes_to_session_of_its_query(
    sessions: list[Session],
) -> None:
    sink = ExactlyOnceSink(EXACTLY_ONCE)
    assert sink.write_batch(FRAME, 3).records == 5
    assert sink.given == [BATCH_START, 3, "q1", "batch without padding"]
    ExactlyOnceSink(EXACTLY_ONCE, **{"transactional.id.prefix": "orders"}).write_batch(FRAME, 4)
    ExactlyOnceSink(EXACTLY_ONCE, **{"transactional.id.prefix": "orders"}).write(FRAME)
    assert [session.prefix for session in sessions] == ["of-the-checkpoint", "orders", "orders"]
    assert [session.batch for session in sessions] == [StreamBatch("q1", "r1", 3), StreamBatch("q1", "r1", 4), None]
    assert [session.outcomes for session in sessions] == [[OUTCOME]] * 3
    assert not any(session.is_closed for session in sessions)


def test_exactly_once_write_inside_foreach_batch_is_refused(
    sessions: list[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: Spark ran the batch again, and its rows were written twice, because each write is a new one."""
    properties = {"sql.streaming.queryId": "q1"}
    context = SimpleNamespace(getLocalProperty=properties.get)
    monkeypatch.setattr(running_query, "context_of_thread", lambda session: context)
    with pytest.raises(ConfigError, match=r"write was called inside foreachBatch.*sink\.write_batch"):
        ExactlyOnceSink(EXACTLY_ONCE).write(FRAME, is_outside_queries=True)
    assert not sessions
    assert ExactlyOnceSink(EXACTLY_ONCE).write_batch(FRAME, 3).records == 5
    assert ExactlyOnceSink(OPTIONS).write(FRAME).records == 5
    properties.clear()
    assert ExactlyOnceSink(EXACTLY_ONCE).write(FRAME).records == 5


@pytest.mark.usefixtures("sessions")
def test_tasks_get_their_rows_without_padding() -> None:
    sink = ExactlyOnceSink(OPTIONS)
    assert sink.write(FRAME).records == 5
    assert sink.given == ["batch without padding"]


class Enriching(KafkaSink):
    def __init__(self, tenant: str) -> None:
        super().__init__(OPTIONS)
        self.tenant = tenant


def test_a_subclass_keeps_its_attributes_without_the_writer() -> None:
    sink = Enriching("acme")
    sink.open(0, 0)
    copy = pickle.loads(cloudpickle_dumps(sink))  # type: ignore[no-untyped-call]
    assert (copy.tenant, repr(copy), copy._writer) == ("acme", repr(sink), None)


# ---- reports ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("sessions")
@pytest.mark.parametrize("options", [OPTIONS, EXACTLY_ONCE], ids=["at least once", "exactly once"])
def test_each_write_is_reported_once_also_when_it_fails(options: dict[str, str]) -> None:
    got: list[BatchReport] = []
    sink = ExactlyOnceSink(options, on_report=got.append)
    sink.write(FRAME)
    sink.write_batch(FRAME, 3)
    sink.is_failing = True
    with pytest.raises(ZeroDivisionError):
        sink.write_batch(FRAME, 4)
    assert [(each.batch_id, each.outcome, each.error, each.records) for each in got] == [
        (None, "complete", None, 5),
        (3, "complete", None, 5),
        (4, "failed", "builtins.ZeroDivisionError", 0),
    ]
    assert (got[0].partitions[0].first_offset, got[0].partitions[0].last_offset) == (0, 4)
    assert got[0].task_durations_ms == {"read": 3}
    phases = ["plan", "tasks"] if options is OPTIONS else ["plan", "tasks", "commit"]
    assert list(got[0].durations_ms) == phases
    assert sum(got[0].durations_ms.values()) == got[0].ended_ms - got[0].began_ms


def test_rows_of_the_tasks_are_not_searched_for_each_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: for 200 tasks and 1,000 partitions the driver looked through the names of 200,000 Rows for seconds."""

    class Watched(Row):
        def __getitem__(self, name: Any) -> Any:
            pytest.fail(f"a Row is searched for {name}")

    names: dict[str, Any] = dict.fromkeys(COUNTS | WRITTEN)
    rows = [Watched(**(names | row)) for row in (COUNTS, WRITTEN)]
    frame: Any = SimpleNamespace(schema=FRAME.schema, sparkSession=None, collect=lambda: rows)
    monkeypatch.setattr(kafka_sink_module, "batch_limits", lambda *given: nullcontext(frame))
    monkeypatch.setattr(kafka_sink_module, "map_in_arrow", lambda df, *given: df)
    report = KafkaSink(OPTIONS).write(frame)
    assert (report.records, report.batches, report.last_offsets) == (5, 1, {TopicPartition("orders", 0): 4})


@pytest.mark.usefixtures("sessions")
def test_batch_that_failed_because_spark_is_gone_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: Spark was asked for the query when the batch had failed, and nobody got a report."""
    events: list[Any] = []
    sender = SimpleNamespace(put=events.append)
    monkeypatch.setattr("spark_kafka_sink.sink.lineage_sender.process_sender", lambda: sender)
    monkeypatch.setattr("spark_kafka_sink.sink.reports.context_of_thread", lambda session: session)
    monkeypatch.setattr("spark_kafka_sink.sink.reports.running_query", lambda df, context: None)
    asked: list[str] = []

    def ask(name: str) -> str:
        if asked:
            raise ConnectionRefusedError
        asked.append(name)
        return "q"

    got: list[BatchReport] = []
    frame: Any = SimpleNamespace(schema=FRAME.schema, sparkSession=SimpleNamespace(getLocalProperty=ask))
    sink = ExactlyOnceSink(OPTIONS | {"lineage.openlineage": "true"}, on_report=got.append)
    sink.is_failing = True
    with pytest.raises(ZeroDivisionError):
        sink.write_batch(frame, 4)
    assert [(each.outcome, each.query_id, each.batch_id) for each in got] == [("failed", "q", 4)]
    assert [each.report and each.report.outcome for each in events] == [None, "failed"]


@pytest.mark.usefixtures("sessions")
def test_lineage_has_the_begin_and_the_end_of_each_write(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []
    sender = SimpleNamespace(put=events.append, wait=lambda seconds: pytest.fail("a write waits"))
    monkeypatch.setattr("spark_kafka_sink.sink.lineage_sender.process_sender", lambda: sender)
    sink = ExactlyOnceSink(OPTIONS | {"lineage.openlineage": "true"})
    sink.write(FRAME)
    sink.is_failing = True
    with pytest.raises(ZeroDivisionError):
        sink.write_batch(FRAME, 4)
    assert [(each.report and each.report.outcome, each.run.is_stream, each.ids.batch_id) for each in events] == [
        (None, False, None),
        ("complete", False, None),
        (None, True, 4),
        ("failed", True, 4),
    ]
    assert events[1].report.records == 5
    assert events[3].report.error == "builtins.ZeroDivisionError"
    assert events[0].run is events[1].run
    assert events[2].run is events[3].run
    assert events[0].run.run_id != events[2].run.run_id
    assert events[0].time_ms == events[1].report.began_ms


@pytest.mark.usefixtures("sessions")
def test_lineage_that_fails_does_not_fail_the_write(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_thread() -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("spark_kafka_sink.sink.lineage_sender.process_sender", no_thread)
    assert ExactlyOnceSink(OPTIONS | {"lineage.openlineage": "true"}).write(FRAME).records == 5
    assert "Lineage of a batch is missing; the batch itself does not change" in caplog.text


@pytest.mark.usefixtures("sessions")
@pytest.mark.parametrize("options", [OPTIONS, EXACTLY_ONCE], ids=["at least once", "exactly once"])
def test_each_write_has_a_span_that_its_tasks_know(options: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    kept = keep(monkeypatch)
    known: list[str | None] = []
    for name in ("write_arrow", "write_in_transaction"):
        monkeypatch.setattr(kafka_sink_module, name, lambda config, *given: known.append(config.batch_trace) or [])
    sink = ExactlyOnceSink(options | {"telemetry.opentelemetry": "true"})
    sink.write(FRAME)
    sink.is_failing = True
    with pytest.raises(ZeroDivisionError):
        sink.write_batch(FRAME, 4)
    spans = [span for span in kept.spans if span.parent is None]
    assert known == [f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-03" for span in spans]
    written, failed = [span.attributes or {} for span in spans]
    assert (written["kafka_sink.outcome"], written["messaging.batch.message_count"]) == ("complete", 5)
    assert (failed["error.type"], failed["kafka_sink.batch.id"]) == ("builtins.ZeroDivisionError", 4)


@pytest.mark.usefixtures("sessions")
def test_telemetry_that_fails_does_not_fail_the_write(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_memory() -> Any:
        raise MemoryError

    monkeypatch.setattr("spark_kafka_sink.sink.telemetry.batches.process_telemetry", no_memory)
    assert ExactlyOnceSink(OPTIONS | {"telemetry.opentelemetry": "true"}).write(FRAME).records == 5
    assert "OpenTelemetry: a span or metric is missing; the batch itself does not change" in caplog.text


@pytest.mark.usefixtures("sessions")
def test_function_that_raises_does_not_fail_the_write(caplog: pytest.LogCaptureFixture) -> None:
    def raises(report: BatchReport) -> None:
        raise ZeroDivisionError("of the user")

    assert ExactlyOnceSink(OPTIONS, on_report=raises).write(FRAME).records == 5
    assert "ZeroDivisionError: of the user" in caplog.text


@pytest.mark.parametrize(
    ("options", "on_report", "text"),
    [
        (OPTIONS, print, "on_report has no effect on foreach"),
        (OPTIONS | {"report.log": "true"}, None, "report.log=true"),
        (OPTIONS | {"lineage.openlineage": "true"}, None, "lineage.openlineage=true has no effect on foreach"),
    ],
)
def test_rows_without_a_driver_have_no_report(options: dict[str, str], on_report: object, text: str) -> None:
    copy = pickle.loads(cloudpickle_dumps(KafkaSink(options, on_report=on_report)))  # type: ignore[no-untyped-call]
    with pytest.raises(ConfigError, match=text):
        copy.open(0, 0)
    with pytest.raises(ConfigError, match=text):
        copy.write_partition(iter([]))


def test_on_report_must_be_a_function() -> None:
    with pytest.raises(ConfigError, match="on_report takes a function of one report, not str"):
        KafkaSink(OPTIONS, on_report="print")


# ---- columns with formats --------------------------------------------------------------------------------------------

NESTED = StructType([StructField("value", StructType([StructField("a", BinaryType())]))])
WITH_FORMAT = {**OPTIONS, "value.format": "json"}
WITHOUT_ZONE = StructType([StructField("value", BinaryType()), StructField("timestamp", TimestampNTZType())])


def test_rows_need_the_schema_for_their_format() -> None:
    sink = KafkaSink(WITH_FORMAT)
    with pytest.raises(
        ConfigError, match=r"value\.format is set, and foreach .*KafkaSink\(options, schema=df\.schema\)"
    ):
        sink.open(0, 0)
    with pytest.raises(ConfigError, match=r"KafkaSink\(options, schema=df\.schema\)"):
        sink.write_partition(iter([]))


def test_the_schema_of_rows_travels_to_the_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    producer = ScriptedProducer()
    monkeypatch.setattr(kafka_sink_module, "process_pool", lambda: ScriptedPool(producer))
    copy = pickle.loads(cloudpickle_dumps(KafkaSink(WITH_FORMAT, schema=NESTED)))  # type: ignore[no-untyped-call]
    copy.open(0, 0)
    copy.process(Row(value=Row(a=bytearray(b"abc"))))
    copy.process(Row(value=None))
    copy.close(None)
    copy.write_partition(iter([Row(value=Row(a=None))]))
    assert [row for sent in producer.sent for row in sent.rows("value")] == [(b'{"a":"YWJj"}',), (None,), (b"{}",)]


def test_rows_take_their_types_from_a_given_avro_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    producer = ScriptedProducer()
    monkeypatch.setattr(kafka_sink_module, "process_pool", lambda: ScriptedPool(producer))
    schema = '{"type":"record","name":"r","fields":[{"name":"a","type":"long"},{"name":"b","type":["null","string"]}]}'
    sink = KafkaSink({**OPTIONS, "value.format": "avro", "value.schema": schema})
    rows: list[Any] = [Row(value=Row(a=1, b="x")), {"value": {"a": 2}}]
    sink.write_partition(rows)
    assert producer.sent[0].rows("value") == [(b"\2\2\2x",), (b"\4\0",)]


@pytest.mark.parametrize(
    ("options", "schema", "error", "text"),
    [
        (
            WITH_FORMAT,
            "value STRUCT<a: INT>",
            ConfigError,
            r"schema takes the schema of a DataFrame, df\.schema, not str",
        ),
        (OPTIONS, NESTED, SchemaError, r"value attribute unsupported type struct.* value\.format"),
        (
            WITH_FORMAT,
            StructType([StructField("v", BinaryType())]),
            SchemaError,
            "Required attribute 'value' not found",
        ),
        (OPTIONS, WITHOUT_ZONE, SchemaError, "^timestamp attribute unsupported type timestamp_ntz"),
        (WITH_FORMAT, WITHOUT_ZONE, SchemaError, "^timestamp attribute unsupported type timestamp_ntz"),
    ],
)
def test_a_schema_is_checked_at_construction(
    options: dict[str, str], schema: object, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        KafkaSink(options, schema=schema)


def test_the_repr_shows_the_format_and_no_address_of_the_registry() -> None:
    options = {**OPTIONS, "value.format": "avro", "schema.registry.url": "http://anna:hunter2@registry:8081"}
    assert repr(KafkaSink(options)) == (
        "KafkaSink(topic='orders', value.format='avro', kafka.bootstrap.servers='h1:9092')"
    )
