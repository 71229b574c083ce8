"""`format("kafka_sink")`: Spark writes to a real broker, and the test reads the records back."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from chispa import assert_df_equality
from pyspark.errors import AnalysisException, IllegalArgumentException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from support.fresh_process import run_script
from support.spark_leftovers import Look, await_none
from support.topic_frames import topic_frame

from spark_kafka_sink import KafkaSink
from spark_kafka_sink.local import Admin, EmbeddedKafka

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

Write = Callable[[DataFrame, dict[str, str]], None]


def options_of(kafka: Admin | EmbeddedKafka, **options: str) -> dict[str, str]:
    return {"kafka.bootstrap.servers": kafka.bootstrap_servers, **options}


@pytest.fixture
def conf(spark: SparkSession) -> Iterator[Callable[[str, str], None]]:
    """Change a setting of the session for this test. A setting without a value is unset afterwards, not set to its
    default, because `KafkaSink.write` does not change settings of the user.
    """
    was: dict[str, str | None] = {}

    def set_(key: str, value: str) -> None:
        was[key] = spark.conf.get(key, None)
        spark.conf.set(key, value)

    yield set_
    for key, value in was.items():
        if value is None:
            spark.conf.unset(key)
        else:
            spark.conf.set(key, value)


@pytest.fixture
def sink_stream(tmp_path: Path) -> Callable[[DataFrame, dict[str, str]], DataStreamWriter]:
    def make(frame: DataFrame, options: dict[str, str]) -> DataStreamWriter:
        writer = frame.writeStream.format("kafka_sink").options(**options)
        return writer.option("checkpointLocation", str(tmp_path / "checkpoint"))

    return make


@pytest.fixture(params=["batch", "stream"])
def write(request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path, sink_stream: Any) -> Write:
    def as_batch(frame: DataFrame, options: dict[str, str]) -> None:
        frame.write.format("kafka_sink").options(**options).mode("append").save()

    def as_stream(frame: DataFrame, options: dict[str, str]) -> None:
        frame.write.parquet(str(tmp_path / "rows"))
        stream = spark.readStream.schema(frame.schema).parquet(str(tmp_path / "rows"))
        sink_stream(stream, options).trigger(availableNow=True).start().awaitTermination()

    return {"batch": as_batch, "stream": as_stream}[request.param]


# ---- rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uses_large_types", ["false", "true"])
def test_every_column_arrives_unchanged(
    spark: SparkSession,
    kafka_broker: Admin,
    new_topic: Callable[..., str],
    write: Write,
    conf: Callable[[str, str], None],
    uses_large_types: str,
) -> None:
    conf("spark.sql.execution.arrow.useLargeVarTypes", uses_large_types)
    conf("spark.sql.session.timeZone", "Asia/Tokyo")
    topic = new_topic(partitions=4)
    frame = spark.range(5_000).selectExpr(
        "id AS ignored",
        "if(id % 7 = 0, null, concat('ключ-', id % 50)) AS key",
        "if(id % 11 = 0, null, encode(concat('värde ', id), 'utf-8')) AS value",
        f"'{topic}' AS topic",
        "CAST(id % 4 AS INT) AS partition",
        "CASE id % 3 WHEN 0 THEN null WHEN 1 THEN array()"
        " ELSE array(named_struct('key', 'n', 'value', encode(CAST(id AS STRING), 'utf-8')),"
        " named_struct('key', 'ü', 'value', CAST(null AS BINARY))) END AS headers",
        "timestamp_micros(1356998400000000 + id * 7919333) AS timestamp",
        "named_struct('a', id) AS ignored_too",
    )
    write(frame, options_of(kafka_broker))
    columns = ("key", "value", "topic", "partition", "headers", "timestamp_ms")
    no_headers = F.array().cast("array<struct<key:string,value:binary>>")
    sent = frame.withColumns(
        {
            "key": F.encode("key", "utf-8"),
            "timestamp_ms": F.unix_millis("timestamp"),
            "headers": F.coalesce("headers", F.expr("filter(headers, h -> false)"), no_headers),
        }
    ).select(*columns)
    got = topic_frame(spark, kafka_broker.bootstrap_servers, topic, *columns)
    assert_df_equality(sent, got, ignore_row_order=True, ignore_nullable=True)


def test_topic_option_wins_over_topic_column(
    spark: SparkSession, kafka_broker: Admin, topic: str, write: Write
) -> None:
    frame = spark.range(1_000).selectExpr("encode(CAST(id AS STRING), 'utf-8') AS value", "'missing-topic' AS topic")
    options = {"KAFKA.Bootstrap.Servers": kafka_broker.bootstrap_servers, "TOPIC": f" {topic} "}
    write(frame, {**options, "Kafka.Compression.TYPE": "zstd"})
    got = topic_frame(spark, kafka_broker.bootstrap_servers, topic, "value")
    assert_df_equality(frame.select("value"), got, ignore_row_order=True, ignore_nullable=True)


def test_a_null_topic_fails_the_write_in_sparks_words(spark: SparkSession, kafka_broker: Admin, write: Write) -> None:
    frame = spark.range(1).selectExpr("'v' AS value", "CAST(null AS STRING) AS topic")
    with pytest.raises(Exception, match=r"SchemaError: \[KAFKA_NULL_TOPIC_IN_DATA\]"):
        write(frame, options_of(kafka_broker))


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "options", "text"),
    [
        (["'k' AS key"], {"topic": "t"}, "SchemaError: Required attribute 'value' not found"),
        (["'v' AS VALUE"], {"topic": "t"}, "SchemaError: Required attribute 'value' not found"),
        (["'v' AS value"], {}, "SchemaError: topic option required when no 'topic' attribute is present"),
        (["'v' AS value", "1 AS key"], {"topic": "t"}, "SchemaError: key attribute unsupported type int"),
        (["'v' AS value"], {"topic": "t", "kafka.key.serializer": "x"}, "ConfigError: kafka.key.serializer"),
        (["'v' AS value"], {"topic": "t", "kafka.lingerms": "5"}, "ConfigError: kafka.lingerms"),
    ],
)
def test_wrong_options_are_refused_before_any_task(
    spark: SparkSession, columns: list[str], options: dict[str, str], text: str, write: Write, tmp_path: Path
) -> None:
    frame = spark.range(10).selectExpr(*columns)
    (tmp_path / "tasks").mkdir()

    def leaves_a_trace(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        (tmp_path / "tasks" / str(os.getpid())).touch()
        return batches

    if write.__name__ == "as_batch":
        frame = frame.mapInArrow(leaves_a_trace, frame.schema)
    with pytest.raises((AnalysisException, StreamingQueryException), match=re.escape(text)) as caught:
        write(frame, {"kafka.bootstrap.servers": "127.0.0.1:1", **options})
    assert "PYTHON_DATA_SOURCE_ERROR" in str(caught.value)
    assert list((tmp_path / "tasks").iterdir()) == []


@pytest.mark.parametrize("mode", ["error", "errorifexists", "ignore", "overwrite"])
def test_only_append_is_a_save_mode(spark: SparkSession, mode: str) -> None:
    """Spark itself refuses all but two modes for any Python source, also errorIfExists, which its own sink accepts."""
    writer = spark.range(1).selectExpr("'v' AS value").write.format("kafka_sink").mode(mode)
    text = "Save mode Overwrite not allowed" if mode == "overwrite" else "UNSUPPORTED_DATA_SOURCE_SAVE_MODE"
    with pytest.raises(AnalysisException, match=text):
        writer.options(**{"kafka.bootstrap.servers": "127.0.0.1:1", "topic": "t"}).save()


def test_path_is_accepted_and_partition_columns_are_refused(
    spark: SparkSession, kafka_broker: Admin, topic: str
) -> None:
    frame = spark.range(10).selectExpr("CAST(id AS STRING) AS value")
    writer = frame.write.format("kafka_sink").options(**options_of(kafka_broker, topic=topic)).mode("append")
    writer.save("/nowhere")
    assert topic_frame(spark, kafka_broker.bootstrap_servers, topic).count() == 10
    with pytest.raises(IllegalArgumentException, match="partitioning or clustering columns do not match"):
        writer.partitionBy("value").save()


def test_read_is_refused(spark: SparkSession) -> None:
    with pytest.raises(AnalysisException, match="kafka_sink writes only"):
        spark.read.format("kafka_sink").load()


def test_thread_without_session_does_not_find_the_format(spark: SparkSession, kafka_broker: Admin, topic: str) -> None:
    frame = spark.range(1).selectExpr("'v' AS value")
    options = options_of(kafka_broker, topic=topic)

    def write() -> None:
        frame.write.format("kafka_sink").options(**options).mode("append").save()

    def write_with_a_session() -> None:
        spark.createDataFrame([], "value STRING")
        write()

    write()
    with ThreadPoolExecutor(1) as thread, pytest.raises(Exception, match="DATA_SOURCE_NOT_FOUND"):
        thread.submit(write).result()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(write_with_a_session).result()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(KafkaSink(options).write, frame).result()
    assert values_of(spark, kafka_broker, topic) == ["v"] * 3


# ---- output modes and triggers -------------------------------------------------------------------------------------


class Files:
    """A stream of JSON files, one for each micro-batch, with `value` numbered from `first` on."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self._spark = spark
        self._folder = folder
        folder.mkdir()

    def add(self, first: int, count: int = 1_000) -> None:
        rows = "".join(json.dumps({"value": str(number)}) + "\n" for number in range(first, first + count))
        (self._folder / f"{first:09}.json").write_text(rows)

    def stream(self) -> DataFrame:
        source = self._spark.readStream.schema("value STRING").option("maxFilesPerTrigger", 1)
        return source.json(str(self._folder))


@pytest.fixture
def files(spark: SparkSession, tmp_path: Path) -> Files:
    return Files(spark, tmp_path / "files")


def values_of(spark: SparkSession, kafka: Admin | EmbeddedKafka, topic: str) -> list[str]:
    return [bytes(row.value).decode() for row in topic_frame(spark, kafka.bootstrap_servers, topic, "value").collect()]


def last_line_of(error: StreamingQueryException) -> str:
    return str(error).partition("=== Streaming Query ===")[0]


def counts(stream: DataFrame) -> DataFrame:
    total = stream.groupBy((F.col("value").cast("int") % 2).cast("string").alias("key")).count()
    return total.selectExpr("key", "CAST(count AS STRING) AS value")


def test_output_mode_complete_appends_the_whole_result(
    spark: SparkSession, kafka_broker: Admin, topic: str, files: Files, sink_stream: Any
) -> None:
    files.add(0)
    files.add(1_000)
    stream = sink_stream(counts(files.stream()), options_of(kafka_broker, topic=topic)).outputMode("complete")
    stream.trigger(availableNow=True).start().awaitTermination()
    assert sorted(values_of(spark, kafka_broker, topic)) == ["1000", "1000", "500", "500"]


def test_update_mode_works_only_by_foreach_batch(
    spark: SparkSession, kafka_broker: Admin, topic: str, files: Files, sink_stream: Any, tmp_path: Path
) -> None:
    files.add(0)
    files.add(1_000)
    options = options_of(kafka_broker, topic=topic)
    refused = sink_stream(counts(files.stream()), options).outputMode("update").trigger(availableNow=True).start()
    with pytest.raises(StreamingQueryException, match="kafka_sink does not support Update mode"):
        refused.awaitTermination()

    stream = counts(files.stream()).writeStream.outputMode("update").foreachBatch(KafkaSink(options).write_batch)  # type: ignore[arg-type]
    stream = stream.option("checkpointLocation", str(tmp_path / "update"))
    stream.trigger(availableNow=True).start().awaitTermination()
    assert sorted(values_of(spark, kafka_broker, topic)) == ["1000", "1000", "500", "500"]


@pytest.mark.parametrize("trigger", [{"availableNow": True}, {"once": True}, {"processingTime": "0 seconds"}])
def test_a_query_goes_on_from_its_checkpoint(
    spark: SparkSession, kafka_broker: Admin, topic: str, files: Files, sink_stream: Any, trigger: dict[str, Any]
) -> None:
    def run() -> None:
        stream = sink_stream(files.stream(), options_of(kafka_broker, topic=topic))
        query = stream.trigger(**trigger).start()
        if "processingTime" in trigger:
            query.processAllAvailable()
            query.stop()
        assert query.awaitTermination(60)

    files.add(0)
    run()
    files.add(1_000)
    run()
    run()
    assert sorted(map(int, values_of(spark, kafka_broker, topic))) == list(range(2_000))


def test_query_progress_has_rows_and_observed_metrics(
    spark: SparkSession, kafka_broker: Admin, topic: str, files: Files, sink_stream: Any
) -> None:
    files.add(0)
    stream = files.stream().observe("kafka", F.count(F.lit(1)).alias("rows"), F.sum(F.length("value")).alias("bytes"))
    query = sink_stream(stream, options_of(kafka_broker, topic=topic)).trigger(availableNow=True).start()
    query.awaitTermination()
    progress = query.lastProgress
    assert progress["observedMetrics"]["kafka"].asDict() == {"rows": 1_000, "bytes": 2_890}
    assert progress["sink"]["numOutputRows"] == 1_000


# ---- failures ------------------------------------------------------------------------------------------------------


def test_failure_upstream_inside_a_partition_is_no_success(
    spark: SparkSession, kafka_broker: Admin, topic: str, files: Files, sink_stream: Any, tmp_path: Path
) -> None:
    files.add(0, count=30_000)  # three Arrow batches: the failure comes after the sink has the first
    options = options_of(kafka_broker, topic=topic)
    broken = files.stream().selectExpr("if(value = '15000', raise_error('upstream broke'), value) AS value")
    query = sink_stream(broken, options).trigger(availableNow=True).start()
    with pytest.raises(StreamingQueryException, match="upstream broke"):
        query.awaitTermination()
    commits = tmp_path / "checkpoint" / "commits"
    assert not commits.exists() or not [path for path in commits.iterdir() if path.name.isdigit()]

    sink_stream(files.stream(), options).trigger(availableNow=True).start().awaitTermination()
    got = values_of(spark, kafka_broker, topic)
    assert set(map(int, got)) == set(range(30_000))


def test_refused_row_fails_the_query_with_the_sinks_error(
    spark: SparkSession, kafka_broker: Admin, topic: str, files: Files, sink_stream: Any
) -> None:
    files.add(0)
    stream = files.stream().selectExpr("if(value = '700', repeat('x', 2000000), value) AS value")
    query = sink_stream(stream, options_of(kafka_broker, topic=topic)).trigger(availableNow=True).start()
    with pytest.raises(StreamingQueryException, match=rf"RecordTooLargeError: .*{topic}.*raise max\.request\.size"):
        query.awaitTermination()


def test_a_stream_may_have_a_name(
    spark: SparkSession, kafka_broker: Admin, topic: str, files: Files, sink_stream: Any
) -> None:
    """Spark adds the name to the writer's options."""
    files.add(0)
    writer = sink_stream(files.stream(), options_of(kafka_broker, topic=topic)).queryName("orders to kafka")
    writer.trigger(availableNow=True).start().awaitTermination()
    assert len(values_of(spark, kafka_broker, topic)) == 1_000


def test_query_stopped_during_a_batch_loses_no_row(
    spark: SparkSession,
    own_kafka: Callable[..., EmbeddedKafka],
    files: Files,
    sink_stream: Any,
    conf: Callable[[str, str], None],
    tmp_path: Path,
) -> None:
    """Only the pools of idle workers remain: each has one producer, with its thread and connections."""
    kafka = own_kafka()
    kafka.create_topic("orders")
    port = int(kafka.bootstrap_servers.rpartition(":")[2])
    conf("spark.sql.execution.arrow.maxRecordsPerBatch", "500")
    (tmp_path / "busy").mkdir()

    def slow_from_3000_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(batches):
            if int(batch.column(0)[0].as_py()) >= 3_000:
                if number == 2:  # the sink has the earlier rows
                    (tmp_path / "busy" / str(os.getpid())).touch()
                time.sleep(1)
            yield batch

    options = options_of(kafka, topic="orders")
    stream = files.stream().repartition(2).mapInArrow(slow_from_3000_on, "value STRING")
    query: StreamingQuery = sink_stream(stream, options).start()
    looks = []
    for first in (0, 1_000, 2_000):
        files.add(first)
        query.processAllAvailable()
        looks.append(Look.at(port))
    before = looks[-1]
    assert before.fullest[1] > 0, "no worker keeps its producer"
    (first_threads, first), (second_threads, second), (third_threads, third) = (look.fullest for look in looks)
    assert (first, second) == (third, third), "every batch leaves connections in a worker"
    assert not first_threads < second_threads < third_threads, "every batch leaves threads in a worker"

    files.add(3_000, count=17_000)
    while len(busy := {int(path.name) for path in (tmp_path / "busy").iterdir()}) < 2:
        assert query.isActive, query.exception()
        time.sleep(0.05)
    stopped = [each for each in Look.at(port).pythons if each.connections]
    assert len(stopped) >= 2, f"no task writes: {stopped}"
    query.stop()

    def left() -> list[str]:
        now = Look.at(port)
        connected = [str(each) for each in now.pythons if each.connections]
        too_many = connected if len(connected) > len(stopped) - 2 else []  # two tasks wrote at that time
        return now.more_than(before) + too_many + [f"stopped {each}" for each in now.pythons if each.pid in busy]

    await_none(left)
    assert len(set(values_of(spark, kafka, "orders"))) < 20_000, "the batch was not stopped in its middle"

    sink_stream(files.stream(), options).trigger(availableNow=True).start().awaitTermination()
    assert len(set(values_of(spark, kafka, "orders"))) == 20_000


SOON_IDLE = """
from spark_kafka_sink.sink import producer_pool

producer_pool.IDLE_MS = 2_000
"""


@pytest.mark.slow
def test_pooled_producers_close_when_idle_and_with_the_session(kafka_broker: Admin, topic: str, tmp_path: Path) -> None:
    """leftovers_job.py fails by itself if more remains; this test checks its output in between."""
    source = Path(__file__).with_name("leftovers_job.py").read_text()
    (tmp_path / "sitecustomize.py").write_text(SOON_IDLE)
    path = os.pathsep.join((str(tmp_path), str(Path(__file__).parents[2])))
    done = run_script(source, tmp_path, kafka_broker.bootstrap_servers, topic, str(tmp_path), PYTHONPATH=path)
    seen = {when: len(what) for when, what in map(json.loads, done.stdout.splitlines())}
    assert seen["idle"] == 1
    assert seen["stopped"] <= 1, "the stream's own worker may have been the one"
    assert seen["expired"] == 1
    assert seen["ended"] == 0


FRESH_PROCESS = """
import http.client
import sys
import urllib.request
from pyspark import TaskContext
from pyspark.sql import SparkSession

settings = {"ui.enabled": "false", "ui.showConsoleProgress": "false", "log.level": "ERROR"}
builder = SparkSession.builder.master("local[2,3]")
for name, value in settings.items():
    builder = builder.config(f"spark.{name}", value)
spark = builder.getOrCreate()

def fails_once(batches):
    for number, batch in enumerate(batches):
        if number == 2 and TaskContext.get().attemptNumber() == 0:
            raise OSError("the first attempt breaks")
        yield batch

frame = spark.range(0, 60_000, 1, 2).selectExpr("CAST(id AS STRING) AS value").mapInArrow(fails_once, "value STRING")
options = dict(pair.split("=", 1) for pair in sys.argv[1:])
frame.write.format("kafka_sink").options(**options).mode("append").save()
for port in range(*map(int, options["metrics.port"].split("-"))):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            print("SCRAPED", answer.read().decode())
    except (OSError, http.client.HTTPException):  # the port is free, or another server's
        continue
spark.conf.set("spark.sql.pyspark.worker.logging.enabled", "true")
frame.write.format("kafka_sink").options(**options).mode("append").save()
for row in spark.tvf.python_worker_logs().collect():
    print("CAPTURED", row.level, row.msg)
spark.stop()
"""


@pytest.mark.slow
def test_fresh_process_finds_format_and_shows_reports(
    spark: SparkSession, kafka_broker: Admin, topic: str, tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = min(taken.getsockname()[1], 65_000)
    options = [f"{key}={value}" for key, value in options_of(kafka_broker, topic=topic).items()]
    done = run_script(FRESH_PROCESS, tmp_path, *options, f"metrics.port={port}-{port + 50}")
    assert set(map(int, values_of(spark, kafka_broker, topic))) == set(range(60_000))
    report = rf"60,000 records, .* batches to 1 partitions of {topic}, 0 retries, .* records/s"
    assert re.search(rf"^\S+ \S+ INFO kafka_sink: Write: {report}$", done.stderr, re.MULTILINE), done.stderr
    assert re.search(
        r'^kafka_producer_record_send_total\{client_id="producer-1",producer="0"\} [1-9]', done.stdout, re.MULTILINE
    )
    assert re.search(rf"^CAPTURED INFO Write: {report}$", done.stdout, re.MULTILINE), done.stdout
