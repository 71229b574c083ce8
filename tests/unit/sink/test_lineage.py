"""Lineage as facts: the names of jobs and datasets, what a batch reads, its parent, and a run that another process of
the driver began.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.types import StringType, StructField, StructType
from support.fresh_process import run_strictly

from spark_kafka_sink.common.batch_report import BatchReport, WrittenPartition
from spark_kafka_sink.sink import lineage
from spark_kafka_sink.sink.batch_run import NO_QUERY, QueryIds
from spark_kafka_sink.sink.lineage import LineageRun, begin_write, file_dataset, kafka_inputs, run_of_format
from spark_kafka_sink.sink.lineage_facts import Dataset, LineageEvent, Parent, sums_by_topic
from spark_kafka_sink.sink.options import SinkConfig

SCHEMA = StructType([StructField("value", StringType()), StructField("other", StringType())])
OPTIONS = {"kafka.bootstrap.servers": "h:9092", "topic": "orders"}
RUN_ID = "7f4f5f0a-6d5c-4b31-8a43-1d2f4e9e5a01"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("OPENLINEAGE_NAMESPACE", "OPENLINEAGE_PARENT_ID", "OPENLINEAGE_ROOT_PARENT_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path},/elsewhere")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[LineageEvent]:
    sent: list[LineageEvent] = []
    sender = SimpleNamespace(put=sent.append, wait=lambda seconds: True)
    monkeypatch.setattr("spark_kafka_sink.sink.lineage_sender.process_sender", lambda: sender)
    return sent


class Leaf:
    """A leaf of Spark's plan, as py4j shows it: every attribute is a method."""

    def __init__(self, kind: str, **values: object) -> None:
        self.kind = kind
        for name, value in values.items():
            setattr(self, name, lambda value=value: value)

    def getClass(self) -> Any:  # noqa: N802 - Java's
        return SimpleNamespace(getSimpleName=lambda: self.kind)


class Scala(list[Any]):
    """A Seq."""

    def size(self) -> int:
        return len(self)

    def apply(self, place: int) -> Any:
        return self[place]


def option(value: str | None) -> Any:
    return SimpleNamespace(isDefined=lambda: value is not None, get=lambda: value)


def plan(*leaves: Leaf) -> Any:
    return SimpleNamespace(collectLeaves=lambda: Scala(leaves))


def frame(batch_plan: Any = None, **settings: str) -> Any:
    execution = SimpleNamespace(analyzed=lambda: batch_plan)
    session = SimpleNamespace(conf=settings)
    return SimpleNamespace(schema=SCHEMA, sparkSession=session, _jdf=SimpleNamespace(queryExecution=lambda: execution))


@pytest.fixture
def spark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What Spark says: the `plan` of a thread's query."""
    told = SimpleNamespace(plan=plan())
    monkeypatch.setattr(lineage, "context_of_thread", lambda session: SimpleNamespace(appName="nightly"))
    monkeypatch.setattr(lineage, "running_query", lambda df, context: SimpleNamespace(analyzedPlan=lambda: told.plan))
    return told


def begin(df: Any, batch_id: int | None = None, ids: QueryIds = NO_QUERY, **options: str) -> LineageRun:
    run = begin_write(SinkConfig.from_options(OPTIONS | options), df, batch_id, 1_000, ids)
    assert run is not None
    return run


def of_format(*, is_stream: bool = True, name: str | None = None, location: str | None = None) -> LineageRun:
    config = SinkConfig.from_options(OPTIONS)
    run = run_of_format(config, SCHEMA, is_stream=is_stream, query_name=name, location=location)
    assert run is not None
    return run


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "batch_id", "job"),
    [
        (QueryIds("q-id", "r", 3, "totals"), 3, "totals.kafka_sink.orders"),
        (QueryIds("q-id", "r", 3), 3, "q-id.kafka_sink.orders"),
        (QueryIds(batch_id=3), 3, "kafka_sink.orders"),  # on Spark Connect
        (QueryIds(), None, "nightly.kafka_sink.orders"),
    ],
)
@pytest.mark.usefixtures("spark", "events")
def test_job_is_named_by_query_or_application(ids: QueryIds, batch_id: int | None, job: str) -> None:
    run = begin(frame(), batch_id, ids)
    assert (run.job, run.is_stream, run.namespace) == (job, batch_id is not None, "default")
    assert [each.name for each in run.fields] == ["value"]


def test_job_of_format_stays_the_same_from_start_to_start() -> None:
    assert of_format(name="totals", location="/c").job == "totals.kafka_sink.orders"
    assert of_format(is_stream=False).job == "kafka_sink.orders"
    job = of_format(location="s3://u:secret@bucket/c").job
    assert job == of_format(location="s3://u:secret@bucket/c").job != of_format(location="/other").job
    assert job.endswith(".kafka_sink.orders")
    assert "secret" not in job


@pytest.mark.usefixtures("spark", "events")
def test_namespace_of_spark_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENLINEAGE_NAMESPACE", "of-the-environment")
    assert of_format().namespace == begin(frame()).namespace == "of-the-environment"
    assert begin(frame(**{"spark.openlineage.namespace": "of-spark"})).namespace == "of-spark"


@pytest.mark.usefixtures("spark", "events")
def test_parent_is_that_of_spark_else_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert (of_format().parent, of_format().root) == (None, None)
    monkeypatch.setenv("OPENLINEAGE_PARENT_ID", f"air/flow/dag.task/{RUN_ID}")
    monkeypatch.setenv("OPENLINEAGE_ROOT_PARENT_ID", f"air/dag/{RUN_ID}")
    assert of_format().parent == begin(frame()).parent == Parent("air/flow", "dag.task", RUN_ID)
    assert of_format().root == Parent("air", "dag", RUN_ID)
    settings = {"parentJobNamespace": "n", "parentJobName": "j", "parentRunId": RUN_ID.replace("7", "8")}
    run = begin(frame(**{f"spark.openlineage.{name}": value for name, value in settings.items()}))
    assert run.parent == Parent("n", "j", RUN_ID.replace("7", "8"))
    for wrong in ("a/b", "a/b/no-uuid", "secret"):
        caplog.clear()
        monkeypatch.setenv("OPENLINEAGE_PARENT_ID", wrong)
        assert of_format().parent is None
        assert "OPENLINEAGE_PARENT_ID of OpenLineage is ignored" in caplog.text
        assert "secret" not in caplog.text


@pytest.mark.parametrize(("servers", "cluster"), [("h1:1,h2:2", "kafka://h1:1"), ("[::1]:9092", "kafka://[::1]:9092")])
def test_cluster_is_named_by_its_first_server(servers: str, cluster: str) -> None:
    config = SinkConfig.from_options(OPTIONS | {"kafka.bootstrap.servers": servers})
    run = run_of_format(config, SCHEMA, is_stream=False)
    assert run is not None
    assert run.cluster == cluster


@pytest.mark.parametrize(
    ("location", "dataset"),
    [
        ("/data/in/", Dataset("file", "/data/in")),
        ("file:///data/with%20space", Dataset("file", "/data/with space")),
        ("file:/", Dataset("file", "/")),
        ("s3a://bucket/a/b", Dataset("s3://bucket", "a/b")),
        ("s3n://key:secret@bucket/a", Dataset("s3://bucket", "a")),
        ("hdfs://name:8020/a?token=secret", Dataset("hdfs://name:8020", "a")),
        ("gs://bucket", Dataset("gs://bucket", "/")),
        ("abfss://box@account.net/a", Dataset("abfss://box@account.net", "a")),
        ("abfss://box:secret@account/a", Dataset("abfss://account", "a")),
    ],
)  # fmt: skip
def test_files_are_named_without_their_login(location: str, dataset: Dataset) -> None:
    assert file_dataset(location) == dataset


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"kafka.bootstrap.servers": "a:1,b:2", "subscribe": "x, y"}, [("kafka://a:1", "x"), ("kafka://a:1", "y")]),
        ({"kafka.bootstrap.servers": "SASL_SSL://a:1", "subscribe": "x"}, [("kafka://a:1", "x")]),
        ({"kafka.bootstrap.servers": "[::1]:1", "subscribe": "x"}, [("kafka://[::1]:1", "x")]),
        ({"kafka.bootstrap.servers": "a", "subscribe": "x"}, [("kafka://a:9092", "x")]),
        ({"kafka.bootstrap.servers": "a:1", "subscribePattern": "x.*"}, []),
        ({"subscribe": "x"}, []),
    ],
)
def test_topics_that_a_query_reads_are_those_of_its_options(
    options: dict[str, str], names: list[tuple[str, str]]
) -> None:
    assert [*kafka_inputs(options)] == names


# ---- what a batch reads ----------------------------------------------------------------------------------------------


def test_query_reads_the_files_and_topics_of_its_plan(spark: Any, events: list[LineageEvent]) -> None:
    files = SimpleNamespace(options=lambda: SimpleNamespace(get=lambda name: option("/in")))
    nowhere = SimpleNamespace(options=lambda: SimpleNamespace(get=lambda name: option(None)))
    kafka = {"kafka.bootstrap.servers": "h:1", "subscribe": "a", "kafka.sasl.jaas.config": "secret"}
    spark.plan = plan(
        Leaf("StreamingRelation", dataSource=files),
        Leaf("StreamingRelation", dataSource=files),
        Leaf("StreamingRelation", dataSource=nowhere),
        Leaf("StreamingRelationV2", sourceName="kafka", extraOptions=kafka),
        Leaf("StreamingRelationV2", sourceName="rate", extraOptions={}),
        Leaf("LocalRelation"),
    )
    run = begin(frame(), 3, QueryIds("q", "r", 3))
    assert run.inputs == (Dataset("file", "/in"), Dataset("kafka://h:1", "a"))
    assert (events[0].run, events[0].report) == (run, None)
    assert "secret" not in repr(run)


@pytest.mark.usefixtures("spark", "events")
def test_batch_write_reads_the_folders_of_its_plan() -> None:
    root = SimpleNamespace(toString=lambda: "file:/in/a")
    location = SimpleNamespace(rootPaths=lambda: Scala([root, root]))
    files = Leaf("HadoopFsRelation", location=location)
    jdbc = Leaf("JDBCRelation")
    read = plan(Leaf("LogicalRelation", relation=files), Leaf("LogicalRelation", relation=jdbc))
    assert begin(frame(read)).inputs == (Dataset("file", "/in/a"),)


@pytest.mark.usefixtures("spark", "events")
def test_batch_that_reads_very_many_files_asks_spark_for_the_first_ones(caplog: pytest.LogCaptureFixture) -> None:
    """Bug: a batch waited for two answers of the JVM for each file that it reads, and its events had them all."""
    asked: list[int] = []

    class Paths(Scala):
        def apply(self, place: int) -> Any:
            asked.append(place)
            return SimpleNamespace(toString=lambda: f"file:/in/{place}")

    location = SimpleNamespace(rootPaths=lambda: Paths(range(100_000)))
    read = plan(Leaf("LogicalRelation", relation=Leaf("HadoopFsRelation", location=location)))
    with caplog.at_level(logging.INFO):
        inputs = begin(frame(read)).inputs
    assert inputs == tuple(Dataset("file", f"/in/{place}") for place in range(250))
    assert len(asked) == 251
    assert "reads more than 250 files" in caplog.text


@pytest.mark.usefixtures("spark")
def test_plan_of_another_spark_leaves_the_inputs_out(
    events: list[LineageEvent], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert begin(frame(SimpleNamespace())).inputs == ()  # without collectLeaves
    assert "Spark does not tell what this batch reads" in caplog.text
    assert len(events) == 1


# ---- from process to process -----------------------------------------------------------------------------------------


def test_other_process_finds_the_run_again() -> None:
    begun = of_format(location="/c")
    begun.remember()
    later = of_format(location="/c")
    assert later.run_id != begun.run_id
    assert later.found_again(None).run_id == begun.run_id  # no task has finished
    assert later.found_again(RUN_ID).run_id == RUN_ID  # as a task reports it
    assert of_format(location="/other").found_again(None).run_id != begun.run_id


def test_run_that_was_not_kept_has_its_own_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = of_format(name="totals")
    assert run.found_again(None) == run
    run.remember()
    (kept,) = tmp_path.iterdir()
    kept.write_text("half a")
    assert run.found_again(None) == run
    monkeypatch.delenv("SPARK_LOCAL_DIRS")
    run.remember()
    assert run.found_again(None) == run
    batch = of_format(is_stream=False)
    batch.remember()
    assert batch.found_again(None) == batch


def test_unwritable_directory_is_only_logged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path / "missing"))
    of_format(name="totals").remember()
    assert "Lineage of a batch is missing" in caplog.text


def test_end_has_the_ids_and_the_time_of_the_report(events: list[LineageEvent]) -> None:
    run = replace(of_format(), wait_s=0)
    report = BatchReport("complete", "at-least-once", 1_000, 2_000, query_id="q", run_id="r", batch_id=4)
    run.end(report)
    assert events == [LineageEvent(run, 2_000, QueryIds("q", "r", 4, None), report)]


def test_event_that_waits_has_no_entry_for_each_partition(events: list[LineageEvent]) -> None:
    """Bug: with a receiver that was down, hundreds of events waited, each with thousands of partitions."""
    places = [WrittenPartition(topic, each, 2, 30, 5, 6) for topic in ("a", "b") for each in range(1_000)]
    report = BatchReport("complete", "at-least-once", 1_000, 2_000, partitions=tuple(places))
    replace(of_format(), wait_s=0).end(replace(report, dead_letter_partitions=tuple(places[:3])))
    waiting = events[0].report
    assert waiting is not None
    assert sums_by_topic(waiting.partitions) == {"a": (2_000, 30_000), "b": (2_000, 30_000)}
    assert sums_by_topic(waiting.dead_letter_partitions) == {"a": (6, 90)}
    assert (len(waiting.partitions), len(waiting.dead_letter_partitions)) == (2, 1)
    assert (waiting.records, waiting.bytes) == (report.records, report.bytes)


def test_nothing_of_lineage_is_imported_unless_it_is_switched_on() -> None:
    done = run_strictly(
        "import sys, types\n"
        "from pyspark.sql.types import StringType, StructField, StructType\n"
        "from spark_kafka_sink import KafkaSink, KafkaSinkDataSource\n"
        "options = {'kafka.bootstrap.servers': 'h:1', 'topic': 't'}\n"
        "class Sink(KafkaSink):\n"
        "    def _run_tasks(self, *given): return []\n"
        "schema = StructType([StructField('value', StringType())])\n"
        "frame = types.SimpleNamespace(schema=schema, sparkSession=None)\n"
        "found = lambda: sorted(name for name in sys.modules if 'lineage' in name)\n"
        "Sink(options).write(frame)\n"
        "writer = KafkaSinkDataSource(options).streamWriter(schema, False)\n"
        "writer.__getstate__()\n"
        "writer.commit([], 1)\n"
        "print('off:', found())\n"
        "import spark_kafka_sink.sink.lineage\n"
        "print('on:', found())\n"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "off: []\n" in done.stdout
    assert "on: ['spark_kafka_sink.sink.lineage', 'spark_kafka_sink.sink.lineage_facts']\n" in done.stdout
