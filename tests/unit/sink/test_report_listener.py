"""The listener's folder: reports that the driver's worker leaves there reach the user's function."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from py4j.protocol import Py4JError
from pyspark import SparkContext, TaskContext
from pyspark.sql.types import StringType, StructField, StructType
from support.scripted_producer import ScriptedPool, ScriptedProducer

from spark_kafka_sink import BatchReport, KafkaSinkDataSource, ReportListener
from spark_kafka_sink.common.errors import ConfigError, KafkaError
from spark_kafka_sink.sink import data_source, report_listener
from spark_kafka_sink.sink.worker import REPORTS, report_folder

EVENT: Any = None


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The application's local directory, for the listener and for the workers."""
    monkeypatch.setattr(report_listener, "_local_directory", lambda: tmp_path)
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path},/another")
    return tmp_path


@pytest.fixture
def run_batch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`run_batch(7)`: a micro-batch of two rows, as Spark runs it."""
    monkeypatch.setattr(data_source, "process_pool", lambda: ScriptedPool(ScriptedProducer()))
    properties = {"sql.streaming.queryId": "q", "streaming.sql.batchId": "7", "spark.jobGroup.id": "r"}
    monkeypatch.setattr(TaskContext, "get", lambda: SimpleNamespace(getLocalProperty=properties.get))
    options = {"kafka.bootstrap.servers": "h:1", "topic": "orders", "queryname": "name"}

    def run(batch_id: int, *, finishes: bool = True) -> None:
        writer = KafkaSinkDataSource(options).streamWriter(StructType([StructField("value", StringType())]), False)
        message = writer.write(iter([pa.record_batch({"value": ["a", "b"]})]))
        if finishes:
            writer.commit([message], batch_id)
        else:
            writer.abort([message, None], batch_id)

    return run


def test_report_of_a_batch_comes_with_its_event(local: Path, run_batch: Callable[..., None]) -> None:
    got: list[BatchReport] = []
    listener = ReportListener(got.append)
    run_batch(7)
    assert got == []
    listener.onQueryProgress(EVENT)
    listener.onQueryIdle(EVENT)
    (report,) = got
    assert (report.query_id, report.run_id, report.query_name, report.batch_id) == ("q", "r", "name", 7)
    assert (report.outcome, report.records, report.tasks) == ("complete", 2, 1)
    assert [(each.first_offset, each.last_offset) for each in report.partitions] == [(0, 1)]
    assert report.durations_ms.keys() == {"plan", "tasks"}
    assert report.task_durations_ms.keys() == {"read", "encode", "metadata", "memory", "acknowledge", "producer"}
    run_batch(8, finishes=False)
    listener.onQueryTerminated(EVENT)
    assert [(each.batch_id, each.outcome, each.error, each.records) for each in got[1:]] == [(8, "failed", None, 2)]


@pytest.mark.usefixtures("local")
def test_without_a_listener_nothing_is_written(run_batch: Callable[..., None], tmp_path: Path) -> None:
    run_batch(7)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("local")
def test_error_of_the_function_loses_no_other_report(
    run_batch: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    got: list[int | None] = []

    def fails_first(report: BatchReport) -> None:
        got.append(report.batch_id)
        if report.batch_id == 7:
            raise ZeroDivisionError("of the user")

    listener = ReportListener(fails_first)
    run_batch(7)
    run_batch(8)
    assert listener.deliver() == 2
    assert got == [7, 8]
    assert "ZeroDivisionError: of the user" in caplog.text


@pytest.mark.usefixtures("local")
def test_interrupted_function_loses_no_other_report(run_batch: Callable[..., None]) -> None:
    """Bug: all reports that waited were deleted before the first one was handed over."""
    got: list[int | None] = []

    def interrupted_first(report: BatchReport) -> None:
        got.append(report.batch_id)
        if report.batch_id == 7:
            raise KeyboardInterrupt

    listener = ReportListener(interrupted_first)
    for batch_id in (7, 8, 9):
        run_batch(batch_id)
    with pytest.raises(KeyboardInterrupt):
        listener.deliver()
    assert listener.deliver() == 2
    assert got == [7, 8, 9]


@pytest.mark.usefixtures("local")
def test_function_that_delivers_gets_each_report_once(run_batch: Callable[..., None]) -> None:
    """As two threads do that deliver at one time: what one has got, the other passes over."""
    got: list[int | None] = []

    def delivers(report: BatchReport) -> None:
        got.append(report.batch_id)
        listener.deliver()

    listener = ReportListener(delivers)
    for batch_id in (7, 8, 9):
        run_batch(batch_id)
    assert listener.deliver() == 1
    assert got == [7, 8, 9]


def test_closed_listener_leaves_no_folder_and_gets_nothing_more(local: Path, run_batch: Callable[..., None]) -> None:
    got: list[BatchReport] = []
    listener, other = ReportListener(got.append), ReportListener(lambda report: None)
    run_batch(7)
    listener.close()
    assert len(got) == 1
    run_batch(8)
    listener.close()
    assert (listener.deliver(), len(got), other.deliver()) == (0, 1, 2)
    assert len(list((local / REPORTS).iterdir())) == 1


def test_folder_is_the_owners_alone(local: Path) -> None:
    ReportListener(print)
    paths = [local / REPORTS, *(local / REPORTS).iterdir()]
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o700, 0o700]


def test_commit_that_failed_is_reported_once(
    local: Path, run_batch: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark calls `abort` after a `commit` that raised, with the same messages."""
    got: list[BatchReport] = []
    listener = ReportListener(got.append)

    def refuse(*_: object) -> None:
        raise KafkaError("no")

    monkeypatch.setattr(data_source, "check_limit", refuse)
    writer = KafkaSinkDataSource({"kafka.bootstrap.servers": "h:1", "topic": "orders"}).streamWriter(
        StructType([StructField("value", StringType())]), False
    )
    message = writer.write(iter([pa.record_batch({"value": ["a", "b"]})]))
    with pytest.raises(KafkaError):
        writer.commit([message], 7)
    writer.abort([message], 7)
    listener.deliver()
    assert [(each.outcome, each.error) for each in got] == [("failed", "spark_kafka_sink.common.errors.KafkaError")]


def test_end_of_the_application_is_no_error(local: Path) -> None:
    listener = ReportListener(print)
    for box in (local / REPORTS).iterdir():
        box.rmdir()
    (local / REPORTS).rmdir()
    listener.onQueryTerminated(EVENT)
    listener.close()


def test_worker_without_local_directory_has_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", "")
    assert report_folder() is None
    monkeypatch.delenv("SPARK_LOCAL_DIRS")
    assert report_folder() is None


def test_listener_without_spark_context_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    with pytest.raises(ConfigError, match=r"make the SparkSession first.*report\.log=true"):
        ReportListener(print)


def test_spark_that_does_not_tell_its_local_directory_is_an_error_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(name: str) -> object:
        raise Py4JError(f"{name} does not exist in the JVM")

    classes = SimpleNamespace(forName=refuse)
    java = SimpleNamespace(lang=SimpleNamespace(Class=classes))
    monkeypatch.setattr(SparkContext, "_active_spark_context", SimpleNamespace(_jvm=SimpleNamespace(java=java)))
    with pytest.raises(ConfigError, match=r"this release of Spark.*report\.log=true"):
        ReportListener(print)


def test_spark_without_data_sources_needs_no_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_listener, "PYSPARK", "3.5.7")
    with pytest.raises(ConfigError, match=r"PySpark 3\.5\.7 does not have. Use KafkaSink\(options, on_report="):
        ReportListener(print)
