"""A decision topic with cleanup.policy=delete, and one that is deleted or created again, on real brokers and in
separate processes.
"""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from support.exactly_once_streams import Stream, check_content, check_nothing_open, visible_values
from support.killed_query import KEYS, Query
from support.pyspark_capabilities import each_form

from spark_kafka_sink.common.errors import IllegalStateError, UnknownTopicOrPartitionError
from spark_kafka_sink.local import Admin
from spark_kafka_sink.sink.exactly_once import session as session_module
from spark_kafka_sink.sink.exactly_once.operator import main

ROOT = Path(__file__).resolve().parents[3]
COMPACTED = {"cleanup.policy": "compact"}
LIMIT_S = 240.0


@pytest.fixture
def query(servers: str, three_partitions: str, tmp_path: Path) -> Query:
    """A query whose decision topic does not exist yet."""
    return Query(servers, three_partitions, tmp_path / "checkpoint", decisions=f"decisions-{three_partitions}")


def run(query: Query, batches: int) -> str:
    """Run that many batches in a new process; return its error, empty if there is none."""
    flags = {"servers": query.servers, "topic": query.topic, "checkpoint": str(query.checkpoint)}
    flags |= {"decisions": query.decisions, "batches": str(batches)}
    done = subprocess.run(
        [sys.executable, "-m", "support.killed_query", *(f"--{name}={value}" for name, value in flags.items())],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode != 0) == ("Error: " in done.stderr), done.stderr
    return done.stderr if done.returncode else ""


def check(query: Query, batches: int) -> None:
    check_content(query.servers, query.topic, batches * query.rows, KEYS)
    check_nothing_open(query.servers, query.topic)


def type_command(error: str, servers: str) -> str:
    """Type the operator's command from an error, and return its output."""
    typed = shlex.split(error.rpartition("python -m spark_kafka_sink.transactions ")[2].splitlines()[0])
    said = io.StringIO()
    arguments = [servers if argument == "HOST:PORT" else argument for argument in typed]
    assert main([*arguments, "--yes"], said) == 0, said.getvalue()
    return said.getvalue()


@pytest.mark.parametrize("policy", ["delete", "compact,delete"])
def test_decision_topic_with_cleanup_policy_delete_is_refused(query: Query, policy: str) -> None:
    Admin(query.servers).create_topic(query.decisions, 16, config={"cleanup.policy": policy})
    error = run(query, 1)
    assert f"decision.topic={query.decisions} has cleanup.policy={policy}" in error
    assert f"--entity-name {query.decisions} --add-config cleanup.policy=compact" in error
    assert visible_values(query.servers, query.topic) == []


def test_decision_topic_deleted_between_two_processes_is_an_error(query: Query) -> None:
    assert run(query, 3) == ""
    query.log_commit(1)  # the process died before Spark logged the last batch
    Admin(query.servers).delete_topic(query.decisions)
    for _ in range(2):
        assert f"decision.topic={query.decisions} is not in the cluster" in run(query, 1)
    with pytest.raises(UnknownTopicOrPartitionError):
        Admin(query.servers).describe_topic(query.decisions)
    check(query, 3)


@pytest.mark.parametrize("is_made_again", [True, False])
def test_lost_decision_topic_is_an_error_until_adopted(query: Query, is_made_again: bool) -> None:
    assert run(query, 3) == ""
    query.log_commit(1)
    broker = Admin(query.servers)
    broker.delete_topic(query.decisions)
    if is_made_again:
        broker.create_topic(query.decisions, 16, config=COMPACTED)
    error = run(query, 1)
    assert ("knows nothing of" if is_made_again else "is not in the cluster") in error
    check(query, 3)
    assert "is adopted: its query begins at the next batch" in type_command(error, query.servers)
    query.log_commit(2)  # the operator has seen that its rows are there
    assert run(query, 2) == ""
    check(query, 5)


def test_query_moves_to_another_decision_topic_and_back(query: Query) -> None:
    """Each time Spark has not logged the last batch. Bug: the way back wrote it twice, without an error."""
    assert run(query, 3) == ""
    query.log_commit(1)
    moved = query._replace(decisions=f"{query.decisions}-2")
    error = run(moved, 1)
    assert f"decision.topic={moved.decisions} is not in the cluster" in error
    assert "goes on after batch 2, the last one decided in decision.topic=" in type_command(error, query.servers)
    assert run(moved, 4) == ""
    check(query, 6)
    query.log_commit(4)
    error = run(query, 1)
    assert f"adopt has moved them to decision.topic={moved.decisions}." in error
    assert "goes on after batch 5, the last one decided in decision.topic=" in type_command(error, query.servers)
    assert run(query, 2) == ""
    check(query, 7)


def test_decision_topic_deleted_during_the_query_is_an_error_soon(
    query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "_SESSIONS", {})
    query.run(1, 0)
    Admin(query.servers).delete_topic(query.decisions)
    started = time.monotonic()
    with pytest.raises(IllegalStateError, match=f"decision.topic={query.decisions} is not in the cluster"):
        query.run(2, 0)
    assert time.monotonic() - started < 30
    session_module.session(query.topic).close()
    with pytest.raises(UnknownTopicOrPartitionError):
        Admin(query.servers).describe_topic(query.decisions)
    check(query, 2)


@pytest.fixture
def stream(servers: str, three_partitions: str, tmp_path: Path, form: str) -> Stream:
    return Stream(servers, three_partitions, tmp_path, form, decisions=f"decisions-{three_partitions}")


@each_form
def test_spark_query_notices_that_its_decision_topic_is_gone(spark: SparkSession, stream: Stream, form: str) -> None:
    """The worker that plans its batches keeps running, and knows the topic."""
    stream.write_files(0, 2)
    stream.run(spark, 2)
    Admin(stream.servers).delete_topic(stream.decisions)
    stream.write_files(2, 1)
    started = time.monotonic()
    with pytest.raises(StreamingQueryException, match=f"decision.topic={stream.decisions} is not in the cluster"):
        stream.run(spark, 2)
    assert time.monotonic() - started < 40
    stream.check(2)


@each_form
def test_at_least_once_query_continues_exactly_once_after_adopt(spark: SparkSession, stream: Stream, form: str) -> None:
    stream.write_files(0, 2)
    stream._replace(decisions="").run(spark, 2)
    stream.write_files(2, 1)
    with pytest.raises(StreamingQueryException, match=r"Batch 2 of query .* is the first one under") as refused:
        stream.run(spark, 2)
    type_command(str(refused.value).partition("HOST:PORT")[0] + "HOST:PORT", stream.servers)
    stream.run(spark, 3)
    stream.check(3)
    stream.forget_commit(2)
    stream.run(spark, 1)
    stream.check(3)
