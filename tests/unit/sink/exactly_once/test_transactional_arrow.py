"""Who a task of an exactly-once batch is, by what Spark tells it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import TaskContext

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import ConfigError, IllegalStateError
from spark_kafka_sink.common.open_transaction import OpenTransaction
from spark_kafka_sink.sink.exactly_once import transactional_arrow
from spark_kafka_sink.sink.exactly_once.messages import Mandate, TaskOutcome
from spark_kafka_sink.sink.exactly_once.task import TaskIdentity
from spark_kafka_sink.sink.exactly_once.transactional_arrow import (
    batch_task,
    deliver_in_transaction,
    streaming_task,
    write_in_transaction,
)
from spark_kafka_sink.sink.options import SinkConfig

MANDATE = Mandate("p", OpenTransaction("p/driver", 1, 0, 2), TopicPartition("decisions", 0), last_batch_id=6)
OUTCOME = TaskOutcome(MANDATE, 7, "q1", 5, 0, None)
BATCH, QUERY = "streaming.sql.batchId", "sql.streaming.queryId"


@pytest.fixture
def properties(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The local properties of a task that runs partition 5 for the third time."""
    given = {BATCH: "7", QUERY: "q1"}
    context = SimpleNamespace(partitionId=lambda: 5, attemptNumber=lambda: 2, getLocalProperty=given.get)
    monkeypatch.setattr(TaskContext, "get", lambda: context)
    return given


@pytest.mark.usefixtures("properties")
def test_a_streams_task_is_named_by_batch_query_partition_and_attempt() -> None:
    assert streaming_task() == TaskIdentity(7, "q1", 5, 2)


@pytest.mark.parametrize("missing", [BATCH, QUERY])
def test_a_streams_task_that_is_not_told_all_of_it_is_refused(properties: dict[str, str], missing: str) -> None:
    del properties[missing]
    with pytest.raises(IllegalStateError, match="tells this task no batch id and no query id"):
        streaming_task()


@pytest.mark.parametrize(("last", "batch_id"), [(None, 0), (0, 1), (6, 7)])
def test_a_batch_writes_task_comes_after_the_last_batch_of_its_prefix(
    properties: dict[str, str], last: int | None, batch_id: int
) -> None:
    properties.clear()
    assert batch_task(replace(MANDATE, last_batch_id=last)) == TaskIdentity(batch_id, "", 5, 2)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({QUERY: "q1"}, r"inside foreachBatch.*sink\.write_batch"),
        ({"spark.sql.streaming.internal.stateStore.partitions": "2"}, r"inside foreachBatch.*sink\.write_batch"),
        ({"spark.job.tags": "a,SparkConnect_OperationTag_User_u"}, r"on Spark Connect.*sink\.write\(df\)"),
    ],
    ids=["thread of the query", "session of the query", "Spark Connect"],
)
def test_batch_writes_task_that_a_query_may_run_is_refused(
    properties: dict[str, str], given: dict[str, str], text: str
) -> None:
    """Bug: a batch write inside foreachBatch wrote the rows of a batch that Spark ran again once more."""
    properties.clear()
    properties.update(given)
    with pytest.raises(ConfigError, match=text):
        batch_task(MANDATE)


@pytest.mark.usefixtures("properties")
def test_a_foreach_batch_task_is_of_the_batch_that_the_driver_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def deliver(*given: Any) -> SimpleNamespace:
        tasks.append(given[3])
        return SimpleNamespace(tally=SimpleNamespace(delivered={}), batches=0, retries=0, outcome=OUTCOME)

    tasks: list[TaskIdentity] = []
    monkeypatch.setattr(transactional_arrow, "deliver_in_transaction", deliver)
    config: Any = None
    pool: Any = None
    (report,) = write_in_transaction(config, pool, MANDATE, 9, "q2", [])
    assert tasks == [TaskIdentity(9, "q2", 5, 2)]
    assert TaskOutcome.from_json(report.column("outcome")[0].as_py()) == OUTCOME


def test_rows_go_by_the_delivery_of_the_transaction_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(transactional_arrow, "deliver_arrow", lambda *each: given.extend(each))
    config = SinkConfig.from_options({"kafka.bootstrap.servers": "h:1", "delivery.guarantee": "exactly-once"})
    pool: Any = None
    assert deliver_in_transaction(config, pool, MANDATE, TaskIdentity(7, "", 5, 0), []) is given[3]


def test_outside_a_task_there_is_nobody() -> None:
    with pytest.raises(IllegalStateError, match="in a Spark task alone"):
        streaming_task()
