from __future__ import annotations

import logging
import shlex
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException

from jobs import stream_to_kafka
from jobs.stream_to_kafka import (
    ProgressTable,
    StopWish,
    UsageError,
    follow,
    parse_arguments,
    readable,
    source_options,
    source_schema,
)
from spark_kafka_sink import KafkaSink, KafkaSinkDataSource
from spark_kafka_sink.common.errors import ConfigError
from spark_kafka_sink.sink.options import _OPTIONS, OUTSIDE_OPTION, SinkConfig, _warn_once

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

CONF = Path(__file__).resolve().parents[3] / "conf"


def test_example_with_the_rate_source_writes_rows() -> None:
    """Bug: with the default trigger, availableNow, there were no rows yet when the query began: it wrote 0 rows and
    ended.
    """
    text = (stream_to_kafka.__doc__ or "").replace("\\\n", " ")
    (line,) = (line for line in text.splitlines() if "--source rate" in line)
    assert parse_arguments(shlex.split(line)[2:]).get("trigger") == "1 second"


def test_flags_win_over_properties_and_properties_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "job.properties"
    file.write_text("source.format=json\nrecord.key=a\nkafka.acks=1\nsource.option.x=1\nspark.a=b\n")
    settings = parse_arguments(
        ["--properties", str(file), "--key", "b", "--option", "kafka.acks=all", "--source-option", "y=2"]
    )
    assert settings.get("source.format") == "json"
    assert settings.get("record.key") == "b"
    assert settings.get("trigger") == "availableNow"
    assert settings.sink_options() == {"kafka.acks": "all"}
    assert settings.below("source.option.") == {"x": "1", "y": "2"}
    assert settings.below("spark.") == {"a": "b"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["--interface", "forEach"],
            "interface=forEach must be one of format, foreachBatch, foreach, foreachPartition.",
        ),
        (["--order-by", "n", "--key", "k", "--interface", "format"], "order.by cannot be used with interface=format"),
        (
            ["--order-by", "n", "--key", "k", "--interface", "foreach"],
            "Set interface to foreachBatch or foreachPartition",
        ),
        (["--order-by", "n"], "order.by needs record.key"),
        (["--option", "kafka.acks"], "must be NAME=VALUE"),
        (["--delivery-guarantee", "exactly-once", "--interface", "foreach"], "cannot deliver exactly-once"),
        (
            ["--option", "delivery.guarantee= Exactly-Once", "--interface", "foreachPartition"],
            "Set interface to format or foreachBatch, or leave it out.",
        ),
        (["--option", "recordkey=x"], "There is no setting recordkey. The nearest one is record.key."),
        (["--option", "truncate=x"], "There is no setting truncate. No setting has a similar name: leave it out."),
    ],
)
def test_settings_that_cannot_work_are_refused(arguments: list[str], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_arguments(arguments)
    assert text in str(caught.value)


@pytest.mark.parametrize("flags", [[], ["--delivery-guarantee", "exactly-once"]])
@pytest.mark.parametrize(
    ("given", "has_format", "expected"),
    [
        ([], True, "format"),
        ([], False, "foreachBatch"),
        (["--order-by", "n", "--key", "k"], True, "foreachBatch"),
        (["--interface", "format"], False, "format"),
        (["--interface", "foreachBatch"], True, "foreachBatch"),
    ],
)
def test_job_writes_by_columns_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: list[str], has_format: bool, expected: str, flags: list[str]
) -> None:
    monkeypatch.setattr(stream_to_kafka, "data_source", lambda: KafkaSinkDataSource if has_format else None)
    assert parse_arguments([*given, *flags]).interface() == expected


@pytest.mark.parametrize("name", ["foreach", "foreachPartition"])
def test_rows_can_be_chosen(name: str) -> None:
    settings = parse_arguments(["--interface", name, "--delivery-guarantee", "at-least-once"])
    assert settings.interface() == name


def test_pyspark_with_data_sources_that_write_has_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stream_to_kafka.data_source() is KafkaSinkDataSource
    monkeypatch.setitem(sys.modules, "spark_kafka_sink.sink.data_source", None)
    assert stream_to_kafka.data_source() is None
    with pytest.raises(UsageError, match=r"interface=format needs data sources that can write, and PySpark \d"):
        stream_to_kafka.writing_format()


def session_that_refuses(text: str) -> Any:
    def refuse(_: type) -> None:
        raise AnalysisException(text)

    return SimpleNamespace(dataSource=SimpleNamespace(register=refuse))


def test_format_that_spark_4_0_has_found_by_itself_is_not_registered_again() -> None:
    session = session_that_refuses("[DATA_SOURCE_ALREADY_EXISTS] Data source 'kafka_sink' already exists.")
    stream_to_kafka.register(session, KafkaSinkDataSource)
    with pytest.raises(AnalysisException, match="another reason"):
        stream_to_kafka.register(session_that_refuses("another reason"), KafkaSinkDataSource)


def test_every_option_of_a_stream_can_be_set() -> None:
    only_of_batch_writes = {OUTSIDE_OPTION}
    assert set(stream_to_kafka.SINK_OPTIONS) == set(_OPTIONS) - only_of_batch_writes


def test_options_of_formats_are_taken(tmp_path: Path) -> None:
    """Bug: the job refused value.format, although docs/options.md says that it takes every option of the sink."""
    options = {
        "value.format": "avro",
        "value.avro.nullable": "null-first",
        "key.format": "json",
        "key.json.timeZone": "UTC",
        "schema.registry.url": "http://registry:8081",
        "schema.registry.basic.auth.user.info": "anna:hunter2",
        "schema.id.location": "header",
    }
    file = tmp_path / "job.properties"
    file.write_text("".join(f"{name} = {value}\n" for name, value in options.items()))
    settings = parse_arguments(["--properties", str(file), "--bootstrap-servers", "h:1"])
    assert options.items() <= settings.sink_options().items()
    assert repr(KafkaSink(settings.sink_options())).startswith("KafkaSink(value.format='avro', key.format='json'")
    assert settings.get("record.value") == "struct(*)"
    assert parse_arguments(["--option", "value.format=json", "--value", "a"]).get("record.value") == "a"
    assert parse_arguments(["--option", "key.format=json"]).get("record.value") == "to_json(struct(*))"
    with pytest.raises(UsageError, match=r"There is no setting value\.formt\. The nearest one is value\.format\."):
        parse_arguments(["--option", "value.formt=json"])


def test_no_login_of_an_address_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: a key that stands in the address of the files was in the job's output."""
    path = "s3a://AKIA:hunter2@bucket/in"
    refused = AnalysisException(f"[PATH_NOT_FOUND] Path does not exist: {path}. SQLSTATE: 42K03")

    def refuse(_: object) -> None:
        raise refused

    monkeypatch.setattr(stream_to_kafka, "open_session", refuse)
    assert stream_to_kafka.main(["--bootstrap-servers", "h:1", "--topic", "t", "--path", path]) == 1
    shown = capsys.readouterr()
    assert shown.out.startswith("s3a://***@bucket/in -> KafkaSink(")
    assert "Path does not exist: s3a://***@bucket/in." in shown.err
    assert "hunter2" not in shown.out + shown.err


def test_error_of_a_setting_in_the_file_names_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.properties"
    place = f"({file}, line 2)"

    def error_of(text: str, *flags: str) -> str:
        file.write_text(text)
        assert stream_to_kafka.main(["--properties", str(file), *flags]) > 0
        return capsys.readouterr().err

    assert f"There is no setting recordkey {place}. The nearest one is record.key." in error_of(
        "# c\nrecordkey = hunter2\n"
    )
    assert f"interface=hunter2 {place} must be one of" in error_of("# c\ninterface = hunter2\n")
    servers = ["--bootstrap-servers", "h:1"]
    assert error_of("# c\nkafka.Acks = 5\n", *servers).endswith(f"{place}\n")
    assert error_of("# c\nkafka.acsk = hunter2\n", *servers).endswith(f"{place}\n")
    assert "line 2" not in error_of("# c\nkafka.acks = all\n", *servers, "--option", "kafka.acks=5")


def test_options_of_sparks_source_give_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    _warn_once.cache_clear()
    given = ["--option", "minpartitions=2", "--option", "kafka.check.crcs=true", "--bootstrap-servers", "h:9092"]
    options = parse_arguments(given).sink_options()
    KafkaSink(options)
    KafkaSink(options)
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["kafka.check.crcs, minPartitions"]


@pytest.mark.parametrize(
    ("source", "given", "expected"),
    [
        ("csv", {}, {"mode": "FAILFAST", "maxFileAge": "3650d"}),
        (
            "csv",
            {"Header": "TRUE"},
            {"mode": "FAILFAST", "enforceSchema": "false", "maxFileAge": "3650d", "Header": "TRUE"},
        ),
        ("JSON", {"Mode": "PERMISSIVE", "maxfileage": "7d"}, {"Mode": "PERMISSIVE", "maxfileage": "7d"}),
        ("parquet", {}, {"maxFileAge": "3650d"}),
        ("rate", {"rowsPerSecond": "5"}, {"rowsPerSecond": "5"}),
    ],
)
def test_source_loses_no_row_without_an_error(source: str, given: dict[str, str], expected: dict[str, str]) -> None:
    """Bug: by Spark's defaults the job left out malformed rows and old files, and read columns in the wrong order."""
    flags = [word for name, value in given.items() for word in ("--source-option", f"{name}={value}")]
    assert source_options(parse_arguments(["--source", source, *flags])) == expected


def test_option_without_equals_does_not_show_its_value() -> None:
    with pytest.raises(UsageError, match=r"--option kafka\.sasl\.jaas\.config … must be NAME=VALUE") as caught:
        parse_arguments(["--option", "kafka.sasl.jaas.config hunter2"])
    assert "hunter2" not in str(caught.value)


def test_missing_setting_names_its_property_and_its_flag() -> None:
    with pytest.raises(UsageError, match=r"source\.path is missing: .* give --path\."):
        parse_arguments([]).need("source.path")


@pytest.mark.parametrize("file", sorted(CONF.glob("*.properties")), ids=lambda path: path.name)
def test_files_of_conf_are_accepted(file: Path) -> None:
    settings = parse_arguments(["--properties", str(file), "--bootstrap-servers", "h:9092"])
    assert SinkConfig.from_options(settings.sink_options()).topic is not None
    settings.need("record.value")


def test_schema_is_ddl_or_a_file_of_ddl_or_json(tmp_path: Path) -> None:
    ddl, as_json = tmp_path / "a.ddl", tmp_path / "a.json"
    ddl.write_text("a INT, b STRING")
    as_json.write_text(
        '{"type":"struct","fields":[{"name":"a","type":"integer","nullable":true,"metadata":{}}]}', encoding="utf-8"
    )
    assert source_schema("a INT") == "a INT"
    assert source_schema(str(ddl)) == "a INT, b STRING"
    assert source_schema(str(as_json)).simpleString() == "struct<a:int>"


def test_file_of_a_schema_that_is_missing_is_named() -> None:
    """Bug: Spark called the path a syntax error near '/'."""
    with pytest.raises(UsageError, match=r"source\.schema=/nowhere/orders\.json is no file that exists, and no DDL"):
        source_schema("/nowhere/orders.json")


@pytest.mark.parametrize(
    "text", ['{"type":"struct","fields":[}', '{"columns":[]}', '{"fields":[1]}', '{"fields":null}']
)
def test_json_that_is_not_a_schema_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="is not a schema in Spark's JSON"):
        source_schema(text)


def test_byte_order_mark_of_a_schema_file_is_no_part_of_a_column(tmp_path: Path) -> None:
    """Bug: the first column had it in its name."""
    (tmp_path / "schema").write_text("a INT", encoding="utf-8-sig")
    assert source_schema(str(tmp_path / "schema")) == "a INT"


def test_schema_file_that_is_not_utf_8_is_a_usage_error(tmp_path: Path) -> None:
    """Bug: it was a traceback."""
    (tmp_path / "schema").write_text("größe INT", encoding="latin-1")
    with pytest.raises(UsageError, match=r"source\.schema names .*schema, which is not UTF-8"):
        source_schema(str(tmp_path / "schema"))


def progress(batch_id: int, rows: int, ms: int) -> Any:
    """Return a dict, as PySpark 3.5 does. From 4.0 on it is a subclass of dict, which also has attributes.

    Bug: the job read the attributes. With PySpark 3.5 it ended with an AttributeError after its first batch.
    """
    durations = {"triggerExecution": ms}  # 3.5 has no batchDuration
    return {"batchId": batch_id, "numInputRows": rows, "durationMs": durations, "timestamp": f"of {batch_id}"}


def test_each_batch_with_rows_gets_one_aligned_line(capsys: pytest.CaptureFixture[str]) -> None:
    table = ProgressTable()
    table.show([progress(0, 1_000_000, 2_000), progress(1, 0, 3)])
    table.show([progress(0, 1_000_000, 2_000), progress(1, 0, 3), progress(2, 5, 1)])
    assert capsys.readouterr().out.splitlines() == [
        "   batch         rows   seconds    records/s",
        "       0    1,000,000      2.00      500,000",
        "       2            5      0.00        5,000",
    ]
    assert table.total().startswith("1,000,005 rows in 2 batches, ")


def test_failure_shows_the_error_of_the_sink() -> None:
    text = (
        "[STREAM_FAILED] Query terminated with exception: Job aborted due to stage failure: Task 0 failed\n"
        "  File worker.py, line 1\n"
        "spark_kafka_sink.common.errors.RecordTooLargeError: orders-0: 2,000,061 bytes; raise max.request.size.\n"
        "\tat org.apache.spark.api.python.BasePythonRunner\n"
    )
    assert readable(RuntimeError(text)) == "RecordTooLargeError: orders-0: 2,000,061 bytes; raise max.request.size."
    assert readable(ConfigError("no")) == "ConfigError: no"


def test_other_failure_shows_the_first_line_of_spark() -> None:
    text = "\n[PATH_NOT_FOUND] Path does not exist: /nowhere. SQLSTATE: 42K03\n\tat java.lang\n"
    assert readable(RuntimeError(text)) == (
        "RuntimeError: [PATH_NOT_FOUND] Path does not exist: /nowhere. (--verbose shows more)"
    )


PYTHON_FAILURE = """\
[STREAM_FAILED] Query terminated with exception: org.apache.spark.api.python.PythonException: Traceback (most recent \
call last):
  File "worker.py", line 1, in main
    process()
KeyError: 'first'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "worker.py", line 2, in main
    raise ValueError(
{error}
\tat org.apache.spark.api.python.BasePythonRunner
Caused by: java.io.IOException: not this one
"""


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ("ValueError: no file s3a://me:hunter2@b/x\nsecond line\n", "ValueError: no file s3a://***@b/x"),
        ("some.package.OddError: why", "some.package.OddError: why"),
        ("AssertionError\n", "AssertionError"),
    ],
)
def test_failure_in_python_shows_its_error(error: str, shown: str) -> None:
    """Bug: the line of the job ended in a colon, without the cause."""
    text = readable(RuntimeError(PYTHON_FAILURE.format(error=error)))
    assert text.endswith(f"PythonException: Traceback (most recent call last): {shown} (--verbose shows more)")


def test_line_that_ends_in_a_colon_without_a_traceback_is_kept() -> None:
    assert readable(RuntimeError("failed:\n\tat java.lang")) == "RuntimeError: failed: (--verbose shows more)"


def test_java_error_without_a_class_of_pyspark_shows_its_own_line() -> None:
    """Bug: a misspelt source.format was "An error occurred while calling o295.load."."""
    text = (
        "An error occurred while calling o295.load.\n"
        ": org.apache.spark.SparkClassNotFoundException: [DATA_SOURCE_NOT_FOUND] Failed to find the data source: csvv."
        " Make sure that it is there. SQLSTATE: 42K02\n\tat org.apache.spark\n"
    )
    assert readable(RuntimeError(text)) == (
        "RuntimeError: [DATA_SOURCE_NOT_FOUND] Failed to find the data source: csvv. Make sure that it is there."
        " (--verbose shows more)"
    )


def test_setting_that_spark_refuses_is_named_with_its_line(tmp_path: Path) -> None:
    """Bug: neither a wrong column nor a wrong trigger named the setting."""
    file = tmp_path / "job.properties"
    file.write_text("topic = t\nrecord.value = struct(*\nkafka.bootstrap.servers = h1:9092\n")
    settings = parse_arguments(["--properties", str(file)])
    with pytest.raises(UsageError) as refused, stream_to_kafka.named(settings, "record.value"):
        raise AnalysisException("[PARSE_SYNTAX_ERROR] Syntax error at or near end of input.")
    text = "[PARSE_SYNTAX_ERROR] Syntax error at or near end of input. (--verbose shows more)"
    assert str(refused.value) == f"record.value ({file}, line 2): {text}"


def test_wrong_column_is_not_logged_as_json_as_well(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Bug: 6 KB of JSON with a Java stack trace came before the line of the job."""
    logger = pytest.importorskip("pyspark.logger").PySparkLogger.getLogger("SQLQueryContextLogger")
    request.addfinalizer(partial(logger.setLevel, logger.level))
    with monkeypatch.context() as patched:  # pytest gives a logger that does not propagate its own handler
        patched.setattr(logger, "handlers", [logging.StreamHandler()])
        patched.setattr(logger, "propagate", False)
        logger.exception("before", errorClass="UNRESOLVED_COLUMN")
        stream_to_kafka.quieten_errors()
        logger.exception("after", errorClass="UNRESOLVED_COLUMN")
    shown = capsys.readouterr().err
    assert "before" in shown
    assert "after" not in shown


def test_wrong_setting_ends_with_code_2_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert stream_to_kafka.main(["--properties", "/does/not/exist"]) == 2
    assert capsys.readouterr().err == (
        "stream_to_kafka: UsageError: --properties /does/not/exist cannot be read: No such file or directory.\n"
    )


@pytest.mark.parametrize("grace", ["nan", "inf", "-1", "soon"])
def test_grace_that_is_no_time_is_refused(grace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: with nan a stop waited for the current batch without a limit."""
    with pytest.raises(SystemExit):
        parse_arguments([f"--grace={grace}"])
    assert f"argument --grace: {grace!r} must be a number of seconds, 0 or more" in capsys.readouterr().err
    assert parse_arguments(["--grace=0"]).grace_s == 0


def test_wrong_sink_option_ends_before_spark_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert stream_to_kafka.main(["--option", "kafka.lingr.ms=5"]) == 1
    assert "kafka.lingr.ms is not a producer setting" in capsys.readouterr().err


class FakeQuery:
    """Runs one batch after the other, each for `looks` looks of `follow`. It ends after `ends_after` looks."""

    def __init__(self, looks: int, ends_after: int = 99, *, is_active: bool = True) -> None:
        self.looks = looks
        self.ends_after = ends_after
        self.status = {"isTriggerActive": is_active}
        self.waits = 0
        self.asked = 0
        self.stopped_after: int | None = None
        self.error: Exception | None = None

    def awaitTermination(self, _: float) -> bool:  # noqa: N802 - PySpark's name
        self.waits += 1
        return self.waits > self.ends_after

    @property
    def _progress(self) -> list[Any]:
        done = range(self.waits // self.looks)
        return [progress(number, 10, 100) for number in done]

    @property
    def lastProgress(self) -> Any:  # noqa: N802 - PySpark's name
        return (self._progress or [None])[-1]

    @property
    def recentProgress(self) -> list[Any]:  # noqa: N802 - PySpark's name
        self.asked += 1
        return self._progress

    def stop(self) -> None:
        self.stopped_after = self.waits

    def exception(self) -> Exception | None:
        return self.error


def followed(query: FakeQuery, *, is_asked: bool, grace_s: float = 60.0) -> ProgressTable:
    table, stop = ProgressTable(), StopWish()
    stop.is_there = is_asked
    follow(cast("StreamingQuery", query), table, stop, grace_s)
    return table


def test_query_is_followed_to_its_end() -> None:
    query = FakeQuery(looks=2, ends_after=7)
    assert followed(query, is_asked=False).batches == 4, "including the batch that ended with the query"
    assert query.asked == 4, "an idle query is not asked for all its batches five times a second"
    assert query.stopped_after is None


def test_query_asked_to_stop_ends_after_its_running_batch(capsys: pytest.CaptureFixture[str]) -> None:
    query = FakeQuery(looks=5)
    assert followed(query, is_asked=True).batches == 1
    assert query.stopped_after == 5
    assert capsys.readouterr().out.count("Stopping after the current batch") == 1


def test_query_without_a_running_batch_stops_at_once() -> None:
    query = FakeQuery(looks=5, is_active=False)
    followed(query, is_asked=True)
    assert query.stopped_after == 1


def test_query_that_failed_while_stopping_raises() -> None:
    """Bug: after a failure no batch runs either, and the job ended with code 0."""
    query = FakeQuery(looks=5, is_active=False)
    query.error = StreamingQueryException("no more")
    with pytest.raises(StreamingQueryException, match="no more"):
        followed(query, is_asked=True)


def test_batch_longer_than_the_grace_period_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(1_000))
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    query = FakeQuery(looks=500)
    query.error = StreamingQueryException("interrupted")
    followed(query, is_asked=True, grace_s=20)
    assert query.stopped_after is not None
    assert 15 <= query.stopped_after <= 25
