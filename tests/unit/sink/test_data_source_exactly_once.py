"""The data source's exactly-once writers, on scripted nodes: a batch begins, commits or fails."""

from __future__ import annotations

import io
import logging
import pickle
import traceback
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import TaskContext
from pyspark.serializers import CloudPickleSerializer
from pyspark.sql.types import StringType, StructField, StructType
from support.coordinator_bench import CoordinatorBench
from support.driver_steps import marked_task
from support.scripted_broker import faults
from support.writer_tasks import batch_start_of

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import (
    ClusterAuthorizationError,
    ConfigError,
    IllegalStateError,
    TransactionalIdAuthorizationError,
)
from spark_kafka_sink.protocol.versions import ApiKey
from spark_kafka_sink.sink import data_source
from spark_kafka_sink.sink.batch_run import QueryIds
from spark_kafka_sink.sink.data_source import KafkaBatchWriter, KafkaSinkDataSource, KafkaStreamWriter, TaskWritten
from spark_kafka_sink.sink.exactly_once import cluster as cluster_module
from spark_kafka_sink.sink.exactly_once.messages import (
    BatchChangedError,
    TaskOutcome,
    task_id,
)
from spark_kafka_sink.sink.exactly_once.operator import Operator
from spark_kafka_sink.sink.exactly_once.session import stream_prefix
from spark_kafka_sink.sink.exactly_once.task import TaskIdentity
from spark_kafka_sink.sink.exactly_once.write_names import is_one_off
from spark_kafka_sink.sink.options import SinkConfig

PREFIX = "orders"
CONFIG = SinkConfig.from_options(
    {"kafka.bootstrap.servers": "broker-0:9092", "topic": "t", "delivery.guarantee": "exactly-once"}
)


@pytest.fixture(params=[2, 1], ids=["version 2", "version 1"])
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CoordinatorBench:
    made = CoordinatorBench(version=request.param)
    monkeypatch.setattr(cluster_module, "_CLIENTS", {})
    monkeypatch.setattr(data_source, "_CHECKED", {})
    monkeypatch.setattr(cluster_module, "connect", lambda _: made.coordinator)
    monkeypatch.setattr(made.coordinator, "close", lambda: None)
    monkeypatch.setattr(data_source, "has_query_thread", lambda: False)
    return made


@pytest.fixture(autouse=True)
def _own_level(caplog: pytest.LogCaptureFixture) -> None:
    """Restore the log level, which the writers set if there is none."""
    caplog.set_level(logging.INFO, "spark_kafka_sink")


def travelled(writer: Any) -> Any:
    """Pickle and restore a writer, as Spark does on the way to the tasks; Spark calls `commit` or `abort` on the
    result.
    """
    return pickle.loads(pickle.dumps(writer))


def leave_open(bench: CoordinatorBench, prefix: str = PREFIX) -> None:
    """Leave the open transaction of a task whose worker was killed before it sent a message."""
    open_ = bench.raw.begin(task_id(prefix, 0, 0))
    bench.raw.write(open_, TopicPartition("t", 0), "row")


def written(bench: CoordinatorBench, writer: KafkaBatchWriter | KafkaStreamWriter) -> TaskWritten:
    """The message of a task of partition 0 that wrote a row."""
    return TaskWritten((), 0, 0, marked_task(bench, batch_start_of(writer)))


@pytest.mark.usefixtures("bench")
def test_the_source_makes_writers_with_a_prefix() -> None:
    schema = StructType([StructField("value", StringType())])
    options = {"kafka.bootstrap.servers": "h:1", "topic": "t", "delivery.guarantee": "exactly-once"}
    one_off = KafkaSinkDataSource(options).writer(schema, overwrite=False)
    named = KafkaSinkDataSource({**options, "transactional.id.prefix": PREFIX}).writer(schema, overwrite=False)
    stream = KafkaSinkDataSource({**options, "checkpointLocation": "/c"}).streamWriter(schema, overwrite=False)
    prefixes = [batch_start_of(travelled(writer)).prefix for writer in (one_off, named, stream)]
    assert is_one_off(prefixes[0])
    assert prefixes[1:] == [PREFIX, stream_prefix(CONFIG, {"checkpointLocation": "/c"})]


@pytest.mark.usefixtures("bench")
def test_named_query_needs_a_default_checkpoint_location(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = StructType([StructField("value", StringType())])
    options = {"kafka.bootstrap.servers": "h:1", "topic": "t", "delivery.guarantee": "exactly-once", "queryName": "q"}
    stream = travelled(KafkaSinkDataSource(options).streamWriter(schema, overwrite=False))
    given = {"streaming.sql.batchId": "0", "sql.streaming.queryId": "q1"}
    context = SimpleNamespace(partitionId=lambda: 5, attemptNumber=lambda: 2, getLocalProperty=given.get)
    monkeypatch.setattr(TaskContext, "get", lambda: context)
    with pytest.raises(IllegalStateError, match=r"Set spark\.sql\.streaming\.checkpointLocation"):
        stream.write(iter(()))
    given["spark.sql.streaming.checkpointLocation"] = "/checkpoints"
    outcome = stream.write(iter(())).outcome
    assert (outcome.batch_start.prefix, outcome.query_id) == (stream_prefix(CONFIG, {"queryName": "q"}), "q1")


def test_error_of_the_begin_is_shown_once(bench: CoordinatorBench, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: PySpark printed the traceback, and then raised a PicklingError with the text of the error in it."""
    bench.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.fail_with(TransactionalIdAuthorizationError), times=None)
    with pytest.raises(TransactionalIdAuthorizationError, match="orders/driver") as raised:
        CloudPickleSerializer().dumps((KafkaBatchWriter(CONFIG, PREFIX), 1))  # type: ignore[no-untyped-call]
    shown = "".join(traceback.format_exception(raised.value))
    assert shown.count("spark_kafka_sink.common.errors.TransactionalIdAuthorizationError: ") == 1
    assert "During handling" not in shown
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("has_query", [True, None])
def test_batch_write_beside_a_query_is_refused_before_it_begins(
    bench: CoordinatorBench, monkeypatch: pytest.MonkeyPatch, has_query: bool | None
) -> None:
    """Bug: a thread of foreachBatch that used another session could write, and its rows came twice."""
    monkeypatch.setattr(data_source, "has_query_thread", lambda: has_query)
    with pytest.raises(ConfigError, match=r"write\.outside\.queries=true"):
        travelled(KafkaBatchWriter(CONFIG, PREFIX))
    assert bench.cluster.transactions.transactions == {}
    batch_start_of(travelled(KafkaBatchWriter(replace(CONFIG, is_outside_queries=True), PREFIX)))
    batch_start_of(travelled(KafkaStreamWriter(CONFIG, PREFIX)))


def test_batch_begins_once_although_its_writer_is_pickled_twice(bench: CoordinatorBench) -> None:
    writer = KafkaBatchWriter(CONFIG, PREFIX)
    first, second = travelled(writer), travelled(writer)
    assert batch_start_of(first) == batch_start_of(second)


@pytest.mark.parametrize("prefix", [None, PREFIX])
def test_a_batch_write_counts_when_it_is_committed(bench: CoordinatorBench, prefix: str | None) -> None:
    writer = travelled(KafkaBatchWriter(CONFIG, prefix))
    message = written(bench, writer)
    task = task_id(batch_start_of(writer).prefix, 0, 0)
    assert bench.state(task) == "Ongoing"
    writer.commit([message])
    assert bench.state(task) == "CompleteCommit"
    last = cluster_module.KafkaDriverCluster(bench.coordinator, CONFIG, batch_start_of(writer).prefix).last_decision()
    assert (last is None) == (prefix is None)


@pytest.mark.parametrize("prefix", [None, PREFIX])
def test_write_without_prefix_reads_no_decision(bench: CoordinatorBench, prefix: str | None) -> None:
    """Bug: it read all decisions of other prefixes in its partition, which took seconds beside a stream of some
    hours.
    """
    place = cluster_module.KafkaDriverCluster(bench.coordinator, CONFIG, PREFIX).place
    others = bench.raw.begin("others/driver")
    bench.raw.write(others, place, "a decision of others")
    bench.commit(others)
    writer = travelled(KafkaBatchWriter(CONFIG, prefix))
    writer.commit([written(bench, writer)])
    assert (bench.asked(ApiKey.FETCH) == []) is (prefix is None)


def test_a_streams_batch_counts_when_another_writer_commits_it(bench: CoordinatorBench) -> None:
    message = written(bench, travelled(KafkaStreamWriter(CONFIG, PREFIX)))
    KafkaStreamWriter(CONFIG, PREFIX).commit([message], 0)
    assert bench.state("orders/0") == "CompleteCommit"


def test_batch_committed_before_is_logged_as_skipped(bench: CoordinatorBench, caplog: pytest.LogCaptureFixture) -> None:
    message = written(bench, travelled(KafkaStreamWriter(CONFIG, PREFIX)))
    KafkaStreamWriter(CONFIG, PREFIX).commit([message], 0)
    assert "is skipped" not in caplog.text
    again = batch_start_of(travelled(KafkaStreamWriter(CONFIG, PREFIX)))
    reported = TaskWritten((), 0, 0, TaskOutcome(again, 0, "", 0, 1, None, was_skipped=True))
    KafkaStreamWriter(CONFIG, PREFIX).commit([reported], 0)
    assert f"{PREFIX}: the batch was committed before, and is skipped" in caplog.text


def test_repeated_batch_for_another_topic_is_refused(bench: CoordinatorBench) -> None:
    message = written(bench, travelled(KafkaStreamWriter(CONFIG, PREFIX)))
    KafkaStreamWriter(CONFIG, PREFIX).commit([message], 0)
    other = replace(CONFIG, topic="u")
    again = batch_start_of(travelled(KafkaStreamWriter(other, PREFIX)))
    reported = TaskWritten((), 0, 0, TaskOutcome(again, 0, "", 0, 1, None, was_skipped=True))
    with pytest.raises(BatchChangedError, match=r"for topic='t', and now it comes for topic='u'"):
        KafkaStreamWriter(other, PREFIX).commit([reported], 0)


def test_stream_that_comes_back_to_a_prefix_does_not_write_a_batch_twice(bench: CoordinatorBench) -> None:
    """Bug: the batch that it wrote under the other prefix, and that Spark had not logged, came again."""

    def run(prefix: str, batch_id: int, run_id: str) -> None:
        start = travelled(KafkaStreamWriter(CONFIG, prefix))._batch_start
        outcome = marked_task(bench, start, batch_id=batch_id, query_id="q")
        ids = QueryIds("q", run_id, batch_id)
        KafkaStreamWriter(CONFIG, prefix).commit([TaskWritten((), 0, 0, outcome, ids=ids)], batch_id)

    run("P", 0, "run 1")
    Operator(bench.coordinator, CONFIG, io.StringIO(), lambda: 0).adopt("Q")
    run("Q", 1, "run 2")
    reads = len(bench.asked(ApiKey.FETCH))
    run("Q", 2, "run 2")
    of_a_batch = len(bench.asked(ApiKey.FETCH)) - reads
    with pytest.raises(IllegalStateError, match="Batch 2 of query q was written under"):
        run("P", 2, "run 3")
    reads = len(bench.asked(ApiKey.FETCH))
    run("P", 3, "run 4")
    assert len(bench.asked(ApiKey.FETCH)) - reads > of_a_batch
    with pytest.raises(IllegalStateError, match="Batch 3 of query q was written under"):
        run("Q", 3, "run 5")


def test_missing_commit_message_prevents_the_decision(bench: CoordinatorBench) -> None:
    writer = travelled(KafkaBatchWriter(CONFIG, PREFIX))
    with pytest.raises(IllegalStateError, match="1 of 2 tasks returned no commit message"):
        writer.commit([written(bench, writer), None])
    assert bench.state("orders/0") == "Ongoing"


def test_task_reports_the_start_of_its_writer(bench: CoordinatorBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        data_source, "batch_task", lambda batch_start: TaskIdentity(batch_start.next_batch_id, "", 2, 0)
    )
    monkeypatch.setattr(data_source, "streaming_task", lambda: TaskIdentity(0, "q", 3, 1))
    writers = [travelled(made(CONFIG, PREFIX)) for made in (KafkaBatchWriter, KafkaStreamWriter)]
    assert [writer.write(iter(())).outcome for writer in writers] == [
        TaskOutcome(batch_start_of(writers[0]), 0, "", 2, 0, None),
        TaskOutcome(batch_start_of(writers[1]), 0, "q", 3, 0, None),
    ]


@pytest.mark.parametrize("prefix", [None, PREFIX])
def test_write_failed_before_any_message_leaves_nothing_open(
    bench: CoordinatorBench, prefix: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    writer = travelled(KafkaBatchWriter(CONFIG, prefix))
    leave_open(bench, batch_start_of(writer).prefix)
    writer.abort([None])
    assert bench.state(task_id(batch_start_of(writer).prefix, 0, 0)) == "CompleteAbort"
    assert "0 of 1 tasks had finished; their transactions were aborted." in caplog.text


def test_failed_write_is_aborted_beside_an_open_decision(bench: CoordinatorBench) -> None:
    """Under version 1 the abort reads the decision, because a commit may run beside it. Version 2 can distinguish the
    two.
    """
    writer = travelled(KafkaBatchWriter(CONFIG))
    prefix = batch_start_of(writer).prefix
    leave_open(bench, prefix)
    place = cluster_module.KafkaDriverCluster(bench.coordinator, CONFIG, prefix).place
    bench.raw.write(bench.raw.begin("others/driver"), place, "half a decision")
    started_ms = bench.rig.now_ms
    writer.abort([None])
    assert bench.state(task_id(prefix, 0, 0)) == "CompleteAbort"
    is_distinguished = bench.coordinator.transaction_version(bench.timer()) == 2
    assert (bench.asked(ApiKey.FETCH) == []) is is_distinguished
    assert bench.rig.now_ms - started_ms < (1_000 if is_distinguished else 120_000)


def test_failed_stream_batch_is_aborted_by_task_messages(
    bench: CoordinatorBench, caplog: pytest.LogCaptureFixture
) -> None:
    message = written(bench, travelled(KafkaStreamWriter(CONFIG, PREFIX)))
    KafkaStreamWriter(CONFIG, PREFIX).abort([None, message], 0)
    assert bench.state("orders/0") == "CompleteAbort"
    assert "1 of 2 tasks had finished; their transactions were aborted." in caplog.text


def test_failed_abort_log_says_what_ends_transactions(
    bench: CoordinatorBench, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: for a batch write under a prefix the log said that a start ends them, but that start writes all rows
    again.
    """
    writers = [travelled(KafkaBatchWriter(CONFIG, prefix)) for prefix in (PREFIX, None)]
    for each in writers:
        leave_open(bench, batch_start_of(each).prefix)
    bench.cluster.on(ApiKey.END_TXN, faults.fail_with(TransactionalIdAuthorizationError), times=None)
    for writer in writers:
        writer.abort([None])
    KafkaStreamWriter(CONFIG, PREFIX).abort([None], 7)
    prefixed, one_off, stream = (record.getMessage() for record in caplog.records if "failed" in record.getMessage())
    for text, writer in ((prefixed, writers[0]), (one_off, writers[1])):
        assert "their transactions end with their timeout, or before by python -m" in text
        command = f"finish --prefix={batch_start_of(writer).prefix} --bootstrap-servers HOST:PORT"
        assert f"{command}. If that says that batch 0 is committed, do" in text
        assert "started again" not in text, "to write it again is another write"
    assert "are finished or aborted when this is started again. If" in stream


def test_command_in_failure_names_another_decision_topic(
    bench: CoordinatorBench, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: the printed command found no decision in the default topic, and aborted a decided batch."""
    writer = travelled(KafkaBatchWriter(replace(CONFIG, decision_topic="mine")))
    leave_open(bench, batch_start_of(writer).prefix)
    bench.cluster.on(ApiKey.END_TXN, faults.fail_with(TransactionalIdAuthorizationError), times=None)
    writer.abort([None])
    prefix = batch_start_of(writer).prefix
    assert f"finish --prefix={prefix} --decision-topic=mine --bootstrap-servers HOST:PORT" in caplog.text


@pytest.mark.parametrize("is_reported", [True, False])
def test_transaction_with_a_refused_abort_is_not_called_aborted(
    bench: CoordinatorBench, is_reported: bool, caplog: pytest.LogCaptureFixture
) -> None:
    writer = travelled(KafkaBatchWriter(CONFIG, PREFIX))
    if is_reported:
        messages: list[TaskWritten | None] = [written(bench, writer)]
    else:
        leave_open(bench)
        messages = [None]
    # The driver's own transaction ends.
    bench.cluster.on(ApiKey.END_TXN, faults.fail_with(TransactionalIdAuthorizationError), times=None, skip=1)
    writer.abort(messages)
    assert bench.state("orders/0") == "Ongoing"
    assert "their transactions end with their timeout, or before by python" in caplog.text


def test_failure_is_logged_if_cluster_cannot_be_reached(
    bench: CoordinatorBench, caplog: pytest.LogCaptureFixture
) -> None:
    writer = travelled(KafkaBatchWriter(CONFIG))
    leave_open(bench, batch_start_of(writer).prefix)
    bench.cluster.on(ApiKey.LIST_TRANSACTIONS, faults.fail_with(ClusterAuthorizationError), times=None)
    writer.abort([None])
    assert f"--prefix={batch_start_of(writer).prefix} --bootstrap-servers HOST:PORT (" in caplog.text


def test_stopped_stream_without_finished_task_leaves_nothing_open(
    bench: CoordinatorBench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bug: readers of the topic, also of other producers' rows, waited until the transactions timed out."""
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    travelled(KafkaStreamWriter(CONFIG, PREFIX))
    leave_open(bench)
    KafkaStreamWriter(CONFIG, PREFIX).abort([None], 0)
    assert bench.state("orders/0") == "CompleteAbort"


def test_stopped_stream_does_not_fence_a_later_driver(
    bench: CoordinatorBench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    travelled(KafkaStreamWriter(CONFIG, PREFIX))
    monkeypatch.delenv("SPARK_LOCAL_DIRS")  # the later driver belongs to another application
    later = travelled(KafkaStreamWriter(CONFIG, PREFIX))
    message = written(bench, later)
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    KafkaStreamWriter(CONFIG, PREFIX).abort([None], 0)
    assert bench.state("orders/0") == "Ongoing"
    KafkaStreamWriter(CONFIG, PREFIX).commit([message], 0)
    assert bench.state("orders/0") == "CompleteCommit"


def test_abort_after_a_committed_batch_ends_nothing(
    bench: CoordinatorBench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    writer = travelled(KafkaStreamWriter(CONFIG, PREFIX))
    KafkaStreamWriter(CONFIG, PREFIX).commit([written(bench, writer)], 0)
    KafkaStreamWriter(CONFIG, PREFIX).abort([None], 1)
    assert bench.state("orders/0") == "CompleteCommit"
    last = cluster_module.KafkaDriverCluster(bench.coordinator, CONFIG, PREFIX).last_decision()
    assert last is not None
    assert last.is_finished
