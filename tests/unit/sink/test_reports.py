"""A batch's report: made of the tasks' rows, and handed to those who want it."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.fresh_process import run_strictly

from spark_kafka_sink.common.batch_report import BatchReport, WrittenPartition
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import KafkaTimeoutError
from spark_kafka_sink.producer.futures import RunMetadata
from spark_kafka_sink.producer.writes import Delivered, RowCounts
from spark_kafka_sink.sink import reports
from spark_kafka_sink.sink.batch_run import BatchRun, QueryIds
from spark_kafka_sink.sink.dead_letters import LetterCounts
from spark_kafka_sink.sink.delivery import report_columns, report_rows, task_report
from spark_kafka_sink.sink.reports import hand_over, ids_of, left_reports, report_of

A0, A1 = TopicPartition("a", 0), TopicPartition("a", 1)
PHASES = {"read": 5, "encode": 4, "metadata": 3, "memory": 2, "acknowledge": 1, "producer": 0}


def letters(records: int, first_offset: int) -> LetterCounts:
    counts = RowCounts()
    counts(RunMetadata("dead", 0, first_offset, records, -1, 10 * records), None)
    return LetterCounts(counts, "row 3: a reason with the row's text", {"errors.SerializationError": records})


def run_of(*, is_exactly_once: bool = False) -> BatchRun:
    """A run of two tasks, of which the second wrote to the same partition before the first."""
    first = report_columns({A0: Delivered(5, 50, 29, 20), A1: Delivered(2, 20, 7, 6)}, 3, 1, letters(2, 8), PHASES)
    second = report_columns({A0: Delivered(4, 40, 12, 3, 1)}, 2, 0, letters(1, 2), PHASES)
    run = BatchRun(is_exactly_once, 1_000, QueryIds("q", "r", 7, "name"))
    run.rows = [row for columns in (first, second) for row in report_rows(columns)]
    run.end("plan", 1_010)
    run.end("tasks", 1_400)
    return run


WRITTEN = (WrittenPartition("a", 0, 9, 90, 3, 29, 1), WrittenPartition("a", 1, 2, 20, 6, 7))


def test_report_has_the_sums_of_all_tasks() -> None:
    assert report_of(run_of()) == BatchReport(
        "complete",
        "at-least-once",
        1_000,
        1_400,
        query_id="q",
        query_name="name",
        run_id="r",
        batch_id=7,
        tasks=2,
        batches=5,
        retries=1,
        partitions=WRITTEN,
        dead_letter_partitions=(WrittenPartition("dead", 0, 3, 30, 2, 9),),
        dead_letter_kinds={"errors.SerializationError": 3},
        durations_ms={"plan": 10, "tasks": 390},
        task_durations_ms={name: 2 * spent for name, spent in PHASES.items()},
    )


def test_rows_by_arrow_make_the_same_report() -> None:
    run = run_of()
    columns = report_columns({A0: Delivered(5, 50, 29, 20)}, 3, 1, letters(2, 8), PHASES)
    run.rows = [*report_rows(columns)]
    expected = report_of(run)
    run.rows = task_report(columns).to_pylist()
    assert report_of(run) == expected


def test_offset_that_no_task_knows_stays_unknown() -> None:
    run = run_of()
    run.rows = [*report_rows(report_columns({A0: Delivered(5, 50, -1, -1, 5)}, 1, 0))]
    assert report_of(run).partitions == (WrittenPartition("a", 0, 5, 50, -1, -1, 5),)


def test_report_has_nothing_of_the_rows() -> None:
    assert "a reason with" not in report_of(run_of()).to_json()


def test_failed_batch_names_the_class_of_its_error() -> None:
    report = report_of(run_of(), KafkaTimeoutError("secret text"))
    assert (report.outcome, report.error) == ("failed", "spark_kafka_sink.common.errors.KafkaTimeoutError")
    assert "secret" not in report.to_json()
    assert report.partitions == WRITTEN  # at least once: these rows stay in Kafka
    unknown = report_of(run_of(), has_failed=True)
    assert (unknown.outcome, unknown.error, unknown.partitions) == ("failed", None, WRITTEN)


def test_failed_batch_of_exactly_once_delivery_has_no_records() -> None:
    report = report_of(run_of(is_exactly_once=True), has_failed=True)
    assert (report.outcome, report.records, report.dead_letters, report.guarantee) == ("failed", 0, 0, "exactly-once")


def test_skipped_batch_says_how_many_rows_were_there_already() -> None:
    run = BatchRun(True, 1_000, QueryIds("q", "r", 7), skipped_records=12)
    run.rows = [*report_rows(report_columns({}, 0, 0))]
    report = report_of(run)
    assert (report.outcome, report.skipped_records, report.records, report.tasks) == ("skipped", 12, 0, 1)
    assert report_of(run, has_failed=True).skipped_records == 0


def test_phases_follow_one_another_and_none_is_negative() -> None:
    run = BatchRun(True, 1_000)
    run.end("plan", 1_100)
    run.end("tasks", 900)  # the clock of another machine is behind
    run.end_commit(1_250, 1_200)
    assert run.durations_ms == {"plan": 100, "tasks": 0, "decide": 100, "commit": 0}
    assert (run.ended_ms, run.duration) == (1_200, 0.2)
    run = BatchRun(True, 1_000)
    run.end_commit(None, 1_030)
    assert run.durations_ms == {"commit": 30}


# ---- to those who want it --------------------------------------------------------------------------------------------


def test_line_of_the_log_is_the_json(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "spark_kafka_sink")
    report = report_of(run_of())
    hand_over(lambda: report, is_logged=True)
    hand_over(lambda: report, is_logged=False)
    ((name, level, text),) = caplog.record_tuples
    assert (name, level) == ("spark_kafka_sink.report", logging.INFO)
    assert BatchReport.from_json(text) == report


def test_error_of_the_function_is_logged_and_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    def raises(report: BatchReport) -> None:
        raise ZeroDivisionError("of the user")

    hand_over(lambda: report_of(run_of()), is_logged=False, on_report=raises)
    assert "ZeroDivisionError: of the user" in caplog.text
    assert "what the batch wrote does not change" in caplog.text


def test_report_that_cannot_be_made_fails_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> BatchReport:
        raise KeyError("task")

    hand_over(broken, is_logged=True)
    assert "KeyError: 'task'" in caplog.text


def test_each_listener_gets_each_report_once(tmp_path: Path) -> None:
    boxes = [tmp_path / "a", tmp_path / "b"]
    for box in boxes:
        box.mkdir()
    sent = [report_of(run_of()), report_of(run_of(), has_failed=True)]
    for report in sent:
        hand_over(lambda report=report: report, is_logged=False, folder=tmp_path)  # type: ignore[misc]
    assert [list(left_reports(box)) for box in boxes] == [sent, sent]
    assert [list(box.iterdir()) for box in boxes] == [[], []]


def test_reports_of_a_listener_that_reads_nothing_do_not_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reports, "MOST_FILES", 3)
    (tmp_path / "idle").mkdir()
    for _ in range(5):
        hand_over(lambda: report_of(run_of()), is_logged=False, folder=tmp_path)
    assert len(list((tmp_path / "idle").iterdir())) == 3
    assert "3 reports wait for a listener" in caplog.text


def test_reports_that_a_full_disk_refused_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: half of each such report stayed, and after a thousand the listener got no report any more."""
    box = tmp_path / "box"
    box.mkdir()

    def refuse(path: Path, _: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", refuse)
        hand_over(lambda: report_of(run_of()), is_logged=False, folder=tmp_path)
    assert "No space left on device" in caplog.text
    assert [*box.iterdir()] == []
    hand_over(lambda: report_of(run_of()), is_logged=False, folder=tmp_path)
    assert len([*left_reports(box)]) == 1


def test_folder_that_is_gone_fails_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hand_over(lambda: report_of(run_of()), is_logged=False, folder=tmp_path / "gone")
    assert "FileNotFoundError" in caplog.text


def test_file_that_is_no_report_is_logged_and_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "0.json").write_bytes(b"\xff not UTF-8")
    (tmp_path / "1.json").write_text("nonsense")
    (tmp_path / "2.json").write_text(report_of(run_of()).to_json())
    (tmp_path / "3.json.new").write_text("half of")
    assert list(left_reports(tmp_path)) == [report_of(run_of())]
    assert "This is no report of a batch" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["3.json.new"]


# ---- the query of a batch --------------------------------------------------------------------------------------------


def frame(properties: dict[str, str], query: object) -> Any:
    return SimpleNamespace(
        sparkSession=SimpleNamespace(context=SimpleNamespace(getLocalProperty=properties.get), query=query)
    )


@pytest.fixture
def _classic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "context_of_thread", lambda session: session.context)
    monkeypatch.setattr(reports, "running_query", lambda df, context: df.sparkSession.query)


QUERY = SimpleNamespace(runId=lambda: SimpleNamespace(toString=lambda: "r"), name=lambda: "name")
IN_QUERY = {"sql.streaming.queryId": "q", "streaming.sql.batchId": "4"}


@pytest.mark.usefixtures("_classic")
def test_query_of_a_thread_is_named() -> None:
    assert ids_of(frame(IN_QUERY, QUERY), 7) == ("q", "r", 7, "name")
    assert ids_of(frame(IN_QUERY, QUERY), None) == ("q", "r", 4, "name")
    assert ids_of(frame(IN_QUERY, None), 7) == ("q", None, 7, None)  # it is being stopped
    assert ids_of(frame({}, QUERY), None) == (None, None, None, None)


def test_spark_that_cannot_be_asked_leaves_the_query_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a batch that failed because Spark was gone had no report."""

    def gone(session: Any) -> Any:
        raise ConnectionRefusedError

    monkeypatch.setattr(reports, "context_of_thread", gone)
    assert ids_of(frame(IN_QUERY, QUERY), 7) == (None, None, 7, None)


def test_query_of_spark_connect_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "context_of_thread", lambda session: None)
    assert ids_of(frame(IN_QUERY, QUERY), 7) == (None, None, 7, None)


# ---- switched off ----------------------------------------------------------------------------------------------------

SCRIPT = """
from pyspark.sql.types import StringType, StructField, StructType
from spark_kafka_sink import KafkaSink, KafkaSinkDataSource

def imported():
    return sorted(name for name in sys.modules if name.startswith("spark_kafka_sink") and "report" in name)

def run_two_batches(**options):
    options |= {"kafka.bootstrap.servers": "h:1", "topic": "t"}
    KafkaSink(options)
    writer = KafkaSinkDataSource(options).streamWriter(StructType([StructField("value", StringType())]), False)
    writer.commit([], 0)
    writer.abort([None], 1)

run_two_batches()
print("off:", imported())
run_two_batches(**{"report.log": "true"})
print("on:", imported())
"""


def test_without_a_reader_of_reports_nothing_is_imported() -> None:
    lines = run_strictly(SCRIPT).stdout.splitlines()
    assert "off: []" in lines
    assert "on: ['spark_kafka_sink.common.batch_report', 'spark_kafka_sink.sink.reports']" in lines
    logged = [line.partition("spark_kafka_sink.report:")[2] for line in lines if "spark_kafka_sink.report:" in line]
    assert [BatchReport.from_json(text).outcome for text in logged] == ["complete", "failed"]
