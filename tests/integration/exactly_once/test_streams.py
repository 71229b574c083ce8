"""Exactly-once delivery from Spark: both streaming forms and both batch forms, on real brokers, read by
librdkafka.

EXACTLY_ONCE_KILLS=100 kills 25 Python workers in each form and version (3 by default), and the broker 13 times in
each form (2).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from support.exactly_once_streams import (
    KEYS,
    Stream,
    check_nothing_open,
    kill_a_python_worker,
    known_ids,
    ongoing_ids,
    register_format,
    visible_values,
)
from support.fresh_process import run_script
from support.pyspark_capabilities import FAILURES, FORMAT, NEW_CHECKPOINT_CHECK, each_form

from spark_kafka_sink.local import EmbeddedKafka
from spark_kafka_sink.sink.exactly_once.write_names import is_one_off
from spark_kafka_sink.sink.kafka_sink import KafkaSink

KILLS = max(3, int(os.environ.get("EXACTLY_ONCE_KILLS", "12")) // 4)
BROKER_KILLS = KILLS // 2 + 1
FILES_AHEAD = 20


@pytest.fixture
def stream(servers: str, three_partitions: str, tmp_path: Path, request: pytest.FixtureRequest) -> Stream:
    form = request.node.callspec.params.get("form", "format")
    return Stream(servers, three_partitions, tmp_path, form)


@each_form
def test_restart_with_other_partitions_writes_no_row_twice(spark: SparkSession, stream: Stream, form: str) -> None:
    stream.write_files(0, 3)
    stream.run(spark, 2)
    stream.check(3)
    for partitions in (3, 1):  # 1: no task uses the ids of the earlier tasks
        stream.forget_commit(stream.last_batch())
        stream.run(spark, partitions)
        stream.check(3)
    stream.write_files(3, 2)
    stream.run(spark, 4)
    stream.check(5)


@FORMAT.needed
def test_checkpoint_in_another_spelling_writes_no_row_twice(
    spark: SparkSession, stream: Stream, servers: str, three_partitions: str
) -> None:
    stream.write_files(0, 1)
    register_format(spark)

    def run(location: str) -> None:
        read = spark.readStream.schema("key STRING, value STRING").json(str(stream.source))
        writer = read.writeStream.format("kafka_sink").option("kafka.bootstrap.servers", servers)
        writer = writer.option("topic", three_partitions).option("delivery.guarantee", "exactly-once")
        writer.option("checkpointLocation", location).trigger(availableNow=True).start().awaitTermination()

    run(f"file://{stream.checkpoint}")
    stream.forget_commit(0)
    run(f"file:{stream.folder}/./{stream.checkpoint.name}/")
    assert stream.last_batch() == 0
    assert visible_values(servers, three_partitions) == list(range(stream.rows))


@FORMAT.needed
def test_default_checkpoint_location_with_query_name_gives_the_prefix(
    spark: SparkSession, stream: Stream, servers: str, three_partitions: str
) -> None:
    stream.write_files(0, 1)
    register_format(spark)
    spark.conf.set("spark.sql.streaming.checkpointLocation", str(stream.folder / "default"))
    name = three_partitions.replace("-", "_")
    try:
        for _ in range(2):
            read = spark.readStream.schema("key STRING, value STRING").json(str(stream.source))
            writer = read.writeStream.queryName(name).format("kafka_sink").option("kafka.bootstrap.servers", servers)
            writer = writer.option("topic", three_partitions).option("delivery.guarantee", "exactly-once")
            writer.trigger(availableNow=True).start().awaitTermination()
            for entry in (stream.folder / "default" / name / "commits").glob("*0*"):
                entry.unlink()  # as after a driver that died before it logged the batch
    finally:
        spark.conf.unset("spark.sql.streaming.checkpointLocation")
    assert visible_values(servers, three_partitions) == list(range(stream.rows))


@each_form
def test_older_checkpoint_is_refused_before_any_write(spark: SparkSession, stream: Stream, form: str) -> None:
    stream.write_files(0, 3)
    stream.run(spark, 2)
    for batch in (2, 1):
        stream.forget_commit(batch)
        (stream.checkpoint / "offsets" / str(batch)).unlink()
        (stream.checkpoint / "offsets" / f".{batch}.crc").unlink(missing_ok=True)
    with pytest.raises(StreamingQueryException, match=r"Batch 1 comes after batch 2 was written"):
        stream.run(spark, 2)
    stream.check(3)


@each_form
def test_another_querys_prefix_is_refused(spark: SparkSession, stream: Stream, form: str, tmp_path: Path) -> None:
    stream.write_files(0, 1)
    stream.run(spark, 2)
    other = stream._replace(folder=tmp_path / "other")
    other.folder.mkdir()
    other.write_files(0, 2)
    with pytest.raises(StreamingQueryException, match=r"transactional\.id\.prefix='prefix-of-.*belongs to query"):
        other.run(spark, 2)
    stream.check(1)


@each_form
def test_python_workers_killed_at_any_time_lose_and_duplicate_nothing(
    spark: SparkSession, stream: Stream, form: str
) -> None:
    seed = int(os.environ.get("EXACTLY_ONCE_SEED", "0")) or random.randrange(1, 2**31)
    rng = random.Random(seed)
    kills, files, runs = 0, 0, 0
    while kills < KILLS:
        if files < stream.last_batch() + 4:
            stream.write_files(files, 6)
            files += 6
        runs += 1
        query = stream.start(spark, rng.randint(1, 3))
        time.sleep(rng.random() * 1.2)
        while query.isActive and not kill_a_python_worker(spark, rng):
            time.sleep(0.01)
        kills += query.isActive
        try:
            query.awaitTermination()
        except StreamingQueryException:
            assert runs < 10 * KILLS, f"seed {seed}: {query.exception()}"
    stream.run(spark, 2)
    try:
        stream.check(files)
    except AssertionError as error:
        raise AssertionError(f"EXACTLY_ONCE_SEED={seed}: {error}") from error


@each_form
def test_broker_killed_at_any_time_loses_and_duplicates_nothing(
    spark: SparkSession, own_kafka: Callable[..., EmbeddedKafka], tmp_path: Path, form: str
) -> None:
    seed = int(os.environ.get("EXACTLY_ONCE_SEED", "0")) or random.randrange(1, 2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    kafka = own_kafka()
    kafka.create_topic("t", 3)
    stream = Stream(kafka.bootstrap_servers, "t", tmp_path, form)
    files = 0
    for _ in range(BROKER_KILLS):
        before, ahead = stream.last_batch(), stream.last_batch() + 1 + FILES_AHEAD - files
        stream.write_files(files, ahead)
        files += ahead
        query = stream.start(spark, rng.randint(1, 3))
        while query.isActive and stream.last_batch() == before:
            time.sleep(0.01)
        time.sleep(rng.random())
        assert query.isActive, f"seed {seed}: the query ended before the kill: {query.exception()}"
        kafka.kill_node(1)
        time.sleep(rng.random() * 2)
        kafka.start_node(1)
        with suppress(StreamingQueryException):  # a batch whose fence or commit meets the kill fails, and comes again
            query.awaitTermination()
    stream.run(spark, 2)
    try:
        stream.check(files)
    except AssertionError as error:
        raise AssertionError(f"EXACTLY_ONCE_SEED={seed}: {error}") from error


def test_two_sinks_of_one_foreach_batch_need_a_name_each(
    spark: SparkSession, stream: Stream, servers: str, three_partitions: str
) -> None:
    stream.write_files(0, 1)
    options = {"kafka.bootstrap.servers": servers, "topic": three_partitions, "delivery.guarantee": "exactly-once"}

    def both(*sinks: KafkaSink) -> None:
        read = spark.readStream.schema("key STRING, value STRING").json(str(stream.source))
        query = (
            read.writeStream.foreachBatch(lambda batch, id_: [sink.write_batch(batch, id_) for sink in sinks])  # type: ignore[arg-type]
            .option("checkpointLocation", str(stream.checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    with pytest.raises(StreamingQueryException, match="need a name each"):
        both(KafkaSink(options), KafkaSink(options))
    prefixed = KafkaSink(options, **{"transactional.id.prefix": f"second-{three_partitions}"})
    both(KafkaSink(options), prefixed)  # the first sink has already written its batch
    assert visible_values(servers, three_partitions) == sorted([*range(stream.rows)] * 2)


@pytest.mark.parametrize(
    "form",
    [
        "write",
        "write in a thread",
        pytest.param("format", marks=FORMAT.needed),
        pytest.param("format in a thread and session", marks=FORMAT.needed),
    ],
)
def test_a_batch_write_inside_foreach_batch_is_refused(
    spark: SparkSession, stream: Stream, servers: str, three_partitions: str, form: str
) -> None:
    """Bug: Spark ran the batch again, and its rows came twice."""
    stream.write_files(0, 1)
    register_format(spark)
    options = {"kafka.bootstrap.servers": servers, "topic": three_partitions, "delivery.guarantee": "exactly-once"}

    def by_another_session(rows: list[Row]) -> None:
        other = spark.newSession()
        register_format(other)
        frame = other.createDataFrame(rows, "key STRING, value STRING")
        frame.write.format("kafka_sink").options(**options).mode("append").save()

    def write(batch: DataFrame, batch_id: int) -> None:
        if form == "write":
            KafkaSink(options).write(batch)
        elif form == "write in a thread":
            with ThreadPoolExecutor(1) as threads:  # it does not inherit the query's local properties
                threads.submit(KafkaSink(options).write, batch).result()
        elif form == "format in a thread and session":
            with ThreadPoolExecutor(1) as threads:
                threads.submit(by_another_session, batch.collect()).result()
        else:
            batch.write.format("kafka_sink").options(**options).mode("append").save()

    read = spark.readStream.schema("key STRING, value STRING").json(str(stream.source))
    query = read.writeStream.foreachBatch(write).option("checkpointLocation", str(stream.checkpoint))
    with pytest.raises(StreamingQueryException, match=r"inside foreachBatch.*sink\.write_batch"):
        query.trigger(availableNow=True).start().awaitTermination()
    assert visible_values(servers, three_partitions) == []


@FORMAT.needed
def test_batch_write_by_format_beside_a_query_needs_the_option(
    spark: SparkSession, stream: Stream, servers: str, three_partitions: str
) -> None:
    register_format(spark)
    options = {"kafka.bootstrap.servers": servers, "topic": three_partitions, "delivery.guarantee": "exactly-once"}
    rows = spark.range(0, 30, 1, 3).selectExpr("CAST(id AS STRING) AS key", "CAST(id AS STRING) AS value")
    ticks = spark.readStream.format("rate").load()
    query = ticks.writeStream.format("noop").option("checkpointLocation", str(stream.checkpoint)).start()
    try:
        write = rows.write.format("kafka_sink").options(**options).mode("append")
        with pytest.raises(FAILURES, match=r"write\.outside\.queries=true"):
            write.save()
        assert visible_values(servers, three_partitions) == []
        write.option("write.outside.queries", "true").save()
    finally:
        query.stop()
    assert visible_values(servers, three_partitions) == list(range(30))


WITHOUT_PINNED_THREADS = """
import json
import sys
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from spark_kafka_sink import KafkaSink

source, checkpoint, options = *sys.argv[1:3], json.loads(sys.argv[3])
builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
spark = builder.config("spark.log.level", "FATAL").getOrCreate()
sink = KafkaSink(options)
forms = {"write": lambda batch, batch_id: sink.write(batch), "write_batch": sink.write_batch}
for form, write in forms.items():
    read = spark.readStream.schema("key STRING, value STRING").json(source)
    query = read.writeStream.foreachBatch(write).option("checkpointLocation", f"{checkpoint}-{form}")
    try:
        query.trigger(availableNow=True).start().awaitTermination()
        print("WRITTEN", form)
    except StreamingQueryException as error:
        print("REFUSED", form, " ".join(str(error).split()))
print("IN MAIN", sink.write(spark.read.schema("key STRING, value STRING").json(source)).records)
spark.stop()
"""


@pytest.mark.slow
def test_writes_inside_foreach_batch_are_refused_without_pinned_threads(
    stream: Stream, servers: str, three_partitions: str, tmp_path: Path
) -> None:
    stream.write_files(0, 1)
    options = {name: value for name, value in stream.options.items() if name != "transactional.id.prefix"}
    arguments = str(stream.source), str(stream.checkpoint), json.dumps(options)
    environment = {"PYSPARK_PIN_THREAD": "false", "PYTHONPATH": str(Path(__file__).parents[3])}
    done = run_script(WITHOUT_PINNED_THREADS, tmp_path, *arguments, **environment)
    said = [line for line in done.stdout.splitlines() if line.startswith(("WRITTEN", "REFUSED", "IN MAIN"))]
    texts = {"write": "may be inside foreachBatch", "write_batch": "PYSPARK_PIN_THREAD"}
    assert len(said) == 3, said
    for line, (form, text) in zip(said, texts.items(), strict=False):
        assert line.startswith(f"REFUSED {form} "), line
        assert text in line, line
    assert said[2] == f"IN MAIN {stream.rows}"
    assert visible_values(servers, three_partitions) == list(range(stream.rows))  # from the write in the main thread


@NEW_CHECKPOINT_CHECK.needed
def test_query_killed_at_first_offsets_goes_on_with_empty_checkpoint(spark: SparkSession, stream: Stream) -> None:
    stream.write_files(0, 1)
    half = stream.checkpoint / "offsets" / ".0.5f0e1c1a-7a6e-4c3d-9d55-2d7ab3f9f0c1.tmp"
    half.parent.mkdir(parents=True)
    half.write_text("v1")
    with pytest.raises(StreamingQueryException, match="STATE_STORE_CHECKPOINT_LOCATION_NOT_EMPTY"):
        stream.run(spark, 1)
    half.unlink()
    stream.run(spark, 1)
    stream.check(1)


@each_form
def test_deleted_checkpoint_is_refused_without_a_prefix(
    spark: SparkSession, stream: Stream, servers: str, three_partitions: str, form: str
) -> None:
    """Bug: foreachBatch used the query's id as the name. A deleted checkpoint changed it, and every row was written
    twice.
    """
    stream.write_files(0, 1)
    register_format(spark)
    options = {name: value for name, value in stream.options.items() if name != "transactional.id.prefix"}

    def run() -> None:
        writer = spark.readStream.schema("key STRING, value STRING").json(str(stream.source)).writeStream
        if form == "format":
            writer = writer.format("kafka_sink").options(**options)
        else:
            writer = writer.foreachBatch(KafkaSink(options).write_batch)  # type: ignore[arg-type]
        writer.option("checkpointLocation", str(stream.checkpoint)).trigger(
            availableNow=True
        ).start().awaitTermination()

    run()
    stream.forget_commit(0)
    run()
    shutil.rmtree(stream.checkpoint)
    with pytest.raises(StreamingQueryException, match=r"belongs to query"):
        run()
    assert visible_values(servers, three_partitions) == list(range(stream.rows))


def test_job_group_of_the_user_is_not_a_run(
    spark: SparkSession, stream: Stream, servers: str, three_partitions: str
) -> None:
    stream.write_files(0, 1)
    options = {"kafka.bootstrap.servers": servers, "topic": three_partitions, "delivery.guarantee": "exactly-once"}

    def run(*groups: str) -> None:
        def write(batch: DataFrame, batch_id: int) -> None:
            for group in groups:
                spark.sparkContext.setJobGroup(group, group)
                KafkaSink(options).write_batch(batch, batch_id)

        read = spark.readStream.schema("key STRING, value STRING").json(str(stream.source))
        query = read.writeStream.foreachBatch(write).option("checkpointLocation", str(stream.checkpoint))
        query.trigger(availableNow=True).start().awaitTermination()

    with pytest.raises(StreamingQueryException, match="need a name each"):
        run("one", "two")  # a second sink, whose rows would be lost
    for _ in range(2):
        run("mine")  # another run, of the same batch
        stream.forget_commit(0)
    assert visible_values(servers, three_partitions) == list(range(stream.rows))


def test_batch_write_counts_as_a_whole_or_not(spark: SparkSession, servers: str, three_partitions: str) -> None:
    options = {"kafka.bootstrap.servers": servers, "topic": three_partitions, "delivery.guarantee": "exactly-once"}
    rows = spark.range(0, 300, 1, 3).selectExpr(f"CAST(id % {KEYS} AS STRING) AS key", "CAST(id AS STRING) AS value")
    broken = rows.selectExpr("key", "IF(value = '299', CAST(raise_error('no more') AS STRING), value) AS value")
    with pytest.raises(FAILURES, match="no more"):
        KafkaSink(options).write(broken)
    assert visible_values(servers, three_partitions) == []
    report = KafkaSink(options).write(rows)
    assert report.records == 300
    assert visible_values(servers, three_partitions) == list(range(300))
    if FORMAT.is_there:
        rows.write.format("kafka_sink").options(**options).mode("append").save()
    named = {"transactional.id.prefix": f"batches-{three_partitions}"}
    for _ in range(2):  # each write is a new one
        KafkaSink(options, **named).write(rows)
    assert len(visible_values(servers, three_partitions)) == (1200 if FORMAT.is_there else 900)
    check_nothing_open(servers, named["transactional.id.prefix"])
    # those of writes without a prefix, including the failed one
    assert [each for each in ongoing_ids(servers) if is_one_off(each.rpartition("/")[0])] == []


@FORMAT.needed
def test_writes_of_any_form_and_process_share_their_names(
    spark: SparkSession, servers: str, three_partitions: str
) -> None:
    """Each write here claims a free name from the brokers, as in a new application: no name is kept in the process."""
    options = {"kafka.bootstrap.servers": servers, "topic": three_partitions, "delivery.guarantee": "exactly-once"}
    rows = spark.range(0, 30, 1, 3).selectExpr("CAST(id AS STRING) AS key", "CAST(id AS STRING) AS value")
    register_format(spark)
    KafkaSink(options).write(rows)
    before = {each for each in known_ids(servers) if is_one_off(each.rpartition("/")[0])}
    for _ in range(3):
        KafkaSink(options).write(rows)
        rows.write.format("kafka_sink").options(**options).mode("append").save()
    assert len(visible_values(servers, three_partitions)) == 7 * 30
    assert {each for each in known_ids(servers) if is_one_off(each.rpartition("/")[0])} == before
    assert not [each for each in ongoing_ids(servers) if each.endswith("/claim")]


def test_empty_batches_and_partitions_leave_nothing_open(
    spark: SparkSession, servers: str, three_partitions: str
) -> None:
    prefix = f"empty-{three_partitions}"
    options = {"kafka.bootstrap.servers": servers, "topic": three_partitions, "delivery.guarantee": "exactly-once"}
    sink = KafkaSink(options, **{"transactional.id.prefix": prefix})
    frame = spark.range(0, 40, 1, 4).selectExpr(f"CAST(id % {KEYS} AS STRING) AS key", "CAST(id AS STRING) AS value")
    assert sink.write(frame.where("1 = 0")).records == 0
    assert sink.write(frame.where("value < 0")).records == 0
    assert sink.write(frame.where("CAST(value AS INT) < 10")).records == 10  # three of four partitions are empty
    assert sink.write(frame.where("CAST(value AS INT) >= 10")).records == 30
    assert visible_values(servers, three_partitions) == list(range(40))
    check_nothing_open(servers, prefix)


@pytest.mark.parametrize("form", ["foreach", "foreachPartition"])
def test_forms_without_a_driver_are_refused(spark: SparkSession, servers: str, form: str) -> None:
    sink = KafkaSink(
        {"kafka.bootstrap.servers": servers, "topic": "missing-topic", "delivery.guarantee": "exactly-once"}
    )
    frame = spark.range(1).selectExpr("'v' AS value")
    with pytest.raises(FAILURES, match=r'nothing on the driver.*format\("kafka_sink"\).*foreachBatch'):
        frame.foreachPartition(sink.write_partition if form == "foreachPartition" else lambda _: sink.open(0, 0))  # type: ignore[arg-type]


def test_several_topics_of_one_batch_commit_together(spark: SparkSession, servers: str, three_partitions: str) -> None:
    from spark_kafka_sink.local import Admin

    other = f"{three_partitions}-b"
    Admin(servers).create_topic(other, 3)
    rows = spark.range(0, 200, 1, 2).selectExpr(
        f"CAST(id % {KEYS} AS STRING) AS key",
        "CAST(id DIV 2 AS STRING) AS value",
        f"IF(id % 2 = 0, '{three_partitions}', '{other}') AS topic",
    )
    KafkaSink({"kafka.bootstrap.servers": servers, "delivery.guarantee": "exactly-once"}).write(rows)
    for topic in (three_partitions, other):
        assert visible_values(servers, topic) == list(range(100))
