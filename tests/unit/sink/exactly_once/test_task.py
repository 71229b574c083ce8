"""A task's producer in exactly-once delivery: which producer it borrows, and under which transactional id it writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyspark import TaskContext
from support.scripted_producer import ScriptedPool, ScriptedProducer, Sent

from spark_kafka_sink.admin.transaction_values import TransactionDescription, TransactionState
from spark_kafka_sink.common.cluster import Node, TopicPartition
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import ConfigError, IllegalStateError, KafkaError, ProducerFencedError
from spark_kafka_sink.common.open_transaction import OpenTransaction
from spark_kafka_sink.producer.futures import RunMetadata
from spark_kafka_sink.producer.transactions import PreparedTransaction
from spark_kafka_sink.protocol.metadata import TRANSACTION
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.fingerprint import fingerprint
from spark_kafka_sink.sink.delivery import TaskDelivery
from spark_kafka_sink.sink.exactly_once import task as task_module
from spark_kafka_sink.sink.exactly_once.messages import BatchStart, TaskOutcome, TaskTransaction
from spark_kafka_sink.sink.exactly_once.task import (
    ExactlyOnceTask,
    TaskIdentity,
    batch_task,
    streaming_task,
    write_in_transaction,
)
from spark_kafka_sink.sink.exactly_once.write_names import pool_name
from spark_kafka_sink.sink.options import SinkConfig

CONFIG = SinkConfig.from_options(
    {"kafka.bootstrap.servers": "broker-0:9092", "topic": "t", "delivery.guarantee": "exactly-once"}
)


class NamedProducer(ScriptedProducer):
    """A transactional producer that remembers the transactional ids it was given."""

    def __init__(self, config: ProducerConfig) -> None:
        super().__init__()
        assert config.transactional_id is not None
        self.names: list[str] = []
        self.coordinators: Mapping[tuple[int, str], Node] | None = None
        self.begun = 0
        self.epoch = 0
        self.offsets: list[Mapping[TopicPartition, tuple[int, str | None]]] = []

    def init_transactions(
        self, transactional_id: str | None = None, coordinators: Mapping[tuple[int, str], Node] | None = None
    ) -> None:
        assert transactional_id is not None
        self.names.append(transactional_id)
        self.coordinators = coordinators

    def begin_transaction(self) -> None:
        self.begun += 1

    def send_offsets_to_transaction(self, offsets: Mapping[TopicPartition, tuple[int, str | None]], group: str) -> None:
        assert group == self.names[-1]
        self.offsets.append(offsets)

    @property
    def current_transaction(self) -> OpenTransaction:
        return OpenTransaction(self.names[-1], 1, self.epoch, 2)

    def prepare_transaction(self) -> PreparedTransaction:
        return PreparedTransaction(self.current_transaction, is_empty=False)


class Bench:
    """A task's delivery of a begun batch. `found` is the cluster's description of the driver."""

    def __init__(self, last_batch_id: int | None = None, partition: int = 0, attempt: int = 0) -> None:
        self.made: list[NamedProducer] = []
        self.found: TransactionDescription | None = TransactionDescription(
            "P/driver", TransactionState.EMPTY, 1, 0, 1, None, frozenset()
        )
        driver = OpenTransaction("P/driver", 1, 0, 2)
        batch_start = BatchStart("P", driver, TopicPartition("decisions", 0), last_batch_id)
        pool = ScriptedPool(self.create)
        task = TaskIdentity(4, "", partition, attempt)
        self.open: set[str] = set()
        self.calls: list[Sequence[str]] = []
        self.describe_driver: Callable[[], TransactionDescription | None] = lambda: self.found
        self.located: list[tuple[str, int, str]] = []
        self.transaction = ExactlyOnceTask(batch_start, task, self.describe, self.locate)
        self.delivery = TaskDelivery(CONFIG, pool, self.transaction)

    def describe(self, names: Sequence[str]) -> Mapping[str, TransactionDescription | None]:
        self.calls.append(names)
        return {name: self.describe_driver() if name == "P/driver" else self.describe_task(name) for name in names}

    def locate(self, prefix: str, partition: int, name: str) -> Mapping[tuple[int, str], Node]:
        self.located.append((prefix, partition, name))
        return {(TRANSACTION, name): Node(partition, "h", 1)}

    def describe_task(self, name: str) -> TransactionDescription:
        state = TransactionState.ONGOING if name in self.open else TransactionState.COMPLETE_COMMIT
        return TransactionDescription(name, state, 1, 0, 1, None, frozenset())

    def create(self, config: ProducerConfig) -> NamedProducer:
        self.made.append(NamedProducer(config))
        return self.made[-1]


def test_a_task_without_rows_begins_no_transaction() -> None:
    bench = Bench()
    bench.delivery.finish()
    assert (bench.transaction.outcome.rows, bench.transaction.outcome.written) == (0, None)
    assert bench.made == []


def test_rows_of_a_written_batch_are_counted_and_dropped() -> None:
    bench = Bench(last_batch_id=4)
    bench.delivery.send("t", RecordColumns.from_rows([b"x", b"y"]))
    bench.delivery.finish()
    outcome = bench.transaction.outcome
    assert (outcome.rows, outcome.written, outcome.was_skipped) == (2, None, True)
    assert bench.made == []


def test_task_of_a_forgotten_driver_names_the_setting() -> None:
    """Bug: with an expiration shorter than a batch, each run failed as if another driver had taken over."""
    bench = Bench()
    bench.found = None
    with pytest.raises(IllegalStateError, match=r"forgotten P/driver\. Raise their transactional\.id\.exp"):
        bench.delivery.send("t", RecordColumns.from_rows([b"x"]))
    assert bench.made == []


def test_another_attempt_writes_under_its_own_id() -> None:
    bench = Bench(partition=3, attempt=2)
    bench.delivery.send("t", RecordColumns.from_rows([b"x"]))
    assert bench.made[0].names == ["P/3.2"]


def test_attempt_takes_no_id_with_an_open_transaction() -> None:
    bench = Bench(partition=3)
    bench.open = {"P/3", "P/3.1"}
    bench.delivery.send("t", RecordColumns.from_rows([b"x"]))
    assert bench.made[0].names == ["P/3.2"]
    assert bench.located == [("P", 3, "P/3"), ("P", 3, "P/3.1"), ("P", 3, "P/3.2")]
    assert bench.made[0].coordinators == {(TRANSACTION, "P/3.2"): Node(3, "h", 1)}


def test_task_looks_at_its_driver_twice_and_at_its_own_id_once() -> None:
    """The driver is current when the task takes its id, and again when all rows are acknowledged."""
    bench = Bench()
    bench.delivery.send("t", RecordColumns.from_rows([b"x"]))
    assert bench.calls == [["P/0", "P/driver"]]
    bench.delivery.finish()
    assert bench.calls[1:] == [["P/driver"]]


def test_driver_that_is_replaced_between_two_names_is_noticed() -> None:
    bench = Bench()
    bench.open = {"P/0"}
    states = iter([TransactionState.EMPTY, TransactionState.ONGOING])
    bench.describe_driver = lambda: TransactionDescription("P/driver", next(states), 1, 0, 1, None, frozenset())
    with pytest.raises(
        ProducerFencedError,
        match=r"Attempt 0 of partition 0 comes too late for batch 4.*may have transactional\.id\.prefix='",
    ):
        bench.delivery.send("t", RecordColumns.from_rows([b"x"]))
    assert bench.made == []


def test_attempt_that_ends_after_the_decision_leaves_nothing_open() -> None:
    """Bug: after the last batch, and after a batch write without a prefix, readers waited for the attempt's timeout."""
    bench = Bench()
    bench.delivery.send("t", RecordColumns.from_rows([b"x"]))
    bench.found = TransactionDescription("P/driver", TransactionState.COMPLETE_COMMIT, 1, 1, 1, None, frozenset())
    with pytest.raises(
        ProducerFencedError,
        match=r"Attempt 0 of partition 0 comes too late for batch 4.*may have transactional\.id\.prefix='",
    ):
        bench.delivery.finish()
    assert len(bench.made[0].closed_with) == 1


@pytest.mark.parametrize("error", [KafkaError, KeyboardInterrupt])
@pytest.mark.parametrize("step", ["init_transactions", "begin_transaction"])
def test_a_producer_whose_transaction_does_not_begin_is_closed(
    step: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(NamedProducer, step, refuse)
    bench = Bench()
    with pytest.raises(error):
        bench.delivery.send("t", RecordColumns.from_rows([b"x"]))
    assert len(bench.made[0].closed_with) == 1


def test_marker_has_next_batch_producer_and_rows() -> None:
    bench = Bench()
    bench.delivery.send("t", RecordColumns.from_rows([b"x", b"y"]))
    bench.delivery.finish()
    (producer,) = bench.made
    assert producer.offsets == [{TopicPartition("decisions", 0): (5, "producer_id=1 epoch=0 rows=2")}]
    written = bench.transaction.outcome.written
    assert written is not None
    assert (written.rows, written.marker_text) == (2, "producer_id=1 epoch=0 rows=2")
    assert bench.transaction.outcome.rows == 2


def test_unacknowledged_row_aborts_the_transaction() -> None:
    bench = Bench()
    bench.delivery.send("t", RecordColumns.from_rows([b"x"]))
    (producer,) = bench.made
    producer.on_flush = lambda unreported: None
    with pytest.raises(KafkaError, match="1 of 1 rows were sent and neither acknowledged nor refused"):
        bench.delivery.finish()
    assert len(producer.closed_with) == 1


def test_transaction_with_another_epoch_fails_the_task() -> None:
    bench = Bench()
    bench.delivery.send("t", RecordColumns.from_rows([b"x"]))
    (producer,) = bench.made

    def bump(unreported: Sequence[Sent]) -> None:
        unreported[0].report()
        producer.epoch += 1

    producer.on_flush = bump
    with pytest.raises(IllegalStateError, match=r"The transaction of partition 0 was .*epoch 0.*, and now .*epoch 1"):
        bench.delivery.finish()
    assert len(producer.closed_with) == 1


def test_writes_without_prefix_share_one_producer() -> None:
    made: list[NamedProducer] = []

    def create(config: ProducerConfig) -> NamedProducer:
        made.append(NamedProducer(config))
        return made[-1]

    def describe(names: Sequence[str]) -> Mapping[str, TransactionDescription]:
        return {
            name: TransactionDescription(name, TransactionState.EMPTY, 1, 0, 1, None, frozenset()) for name in names
        }

    pool = ScriptedPool(create)
    prefixes = [pool_name(number) for number in range(3)]
    for prefix in prefixes:
        batch_start = BatchStart(prefix, OpenTransaction(f"{prefix}/driver", 1, 0, 2), TopicPartition("decisions", 0))
        transaction = ExactlyOnceTask(batch_start, TaskIdentity(0, "", 0, 0), describe)
        delivery = TaskDelivery(CONFIG, pool, transaction)
        delivery.send("t", RecordColumns.from_rows([b"x"]))
        delivery.finish()
        written = transaction.outcome.written
        assert written is not None
        assert written.transaction.transactional_id == f"{prefix}/0"
    (producer,) = made
    assert producer.names == [f"{prefix}/0" for prefix in prefixes]
    assert producer.begun == len(prefixes)
    assert producer.closed_with == []


@pytest.mark.parametrize("last_batch_id", [None, 4])
def test_task_reports_the_fingerprint_of_rows_it_writes_or_drops(last_batch_id: int | None) -> None:
    columns = RecordColumns.from_rows(["a", "b", "c"], keys=["k", None, ""])
    bench = Bench(last_batch_id)
    bench.delivery.send("t", columns.slice(2, 1))
    bench.delivery.send("t", columns.slice(0, 2))
    bench.delivery.finish()
    outcome = bench.transaction.outcome
    assert (outcome.fingerprint, outcome.was_skipped) == (fingerprint("t", columns), last_batch_id is not None)


BATCH_START = BatchStart("p", OpenTransaction("p/driver", 1, 0, 2), TopicPartition("decisions", 0), last_batch_id=6)
BATCH, QUERY = "streaming.sql.batchId", "sql.streaming.queryId"


@pytest.fixture
def properties(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The local properties of a task that runs partition 5 for the third time."""
    given = {BATCH: "7", QUERY: "q1"}
    context = SimpleNamespace(partitionId=lambda: 5, attemptNumber=lambda: 2, getLocalProperty=given.get)
    monkeypatch.setattr(TaskContext, "get", lambda: context)
    return given


@pytest.mark.usefixtures("properties")
def test_stream_task_has_batch_query_partition_and_attempt() -> None:
    assert streaming_task() == TaskIdentity(7, "q1", 5, 2)


@pytest.mark.parametrize("missing", [BATCH, QUERY])
def test_stream_task_without_batch_or_query_is_refused(properties: dict[str, str], missing: str) -> None:
    del properties[missing]
    with pytest.raises(IllegalStateError, match="gives this task no batch id or no query id"):
        streaming_task()


@pytest.mark.parametrize(("last", "batch_id"), [(None, 0), (0, 1), (6, 7)])
def test_batch_task_has_the_next_batch_id(properties: dict[str, str], last: int | None, batch_id: int) -> None:
    properties.clear()
    assert batch_task(replace(BATCH_START, last_batch_id=last)) == TaskIdentity(batch_id, "", 5, 2)


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
    """Bug: Spark ran a batch again, and a batch write inside foreachBatch wrote its rows twice."""
    properties.clear()
    properties.update(given)
    with pytest.raises(ConfigError, match=text):
        batch_task(BATCH_START)


@pytest.mark.usefixtures("properties")
def test_foreach_batch_task_reports_the_drivers_batch() -> None:
    batch_start = replace(BATCH_START, last_query_id="q1")
    (report,) = write_in_transaction(CONFIG, ScriptedPool(NamedProducer), batch_start, 7, "q1", [])
    assert TaskOutcome.from_json(report.column("outcome")[0].as_py()) == TaskOutcome(batch_start, 7, "q1", 5, 0, None)


@pytest.mark.usefixtures("properties")
def test_rows_of_a_foreach_batch_task_go_into_its_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    monkeypatch.setattr(task_module, "describe_in_process", lambda config, driver, names: bench.describe(names))
    monkeypatch.setattr(task_module, "coordinators_in_process", lambda config, *task: bench.locate(*task))
    pool = ScriptedPool(bench.create)
    batch_start = BatchStart("P", OpenTransaction("P/driver", 1, 0, 2), TopicPartition("decisions", 0), 3)
    rows = pa.RecordBatch.from_pydict({"value": ["a", "b"]})
    (report,) = write_in_transaction(CONFIG, pool, batch_start, 4, "", [rows])
    outcome = TaskOutcome.from_json(report.column("outcome")[report.num_rows - 1].as_py())
    assert outcome.written == TaskTransaction(OpenTransaction("P/5.2", 1, 0, 2), 5, 2)
    assert (bench.made[0].begun, bench.made[0].closed_with) == (1, [])


def test_transaction_that_is_not_prepared_has_no_outcome() -> None:
    bench = Bench()
    bench.delivery.send("t", RecordColumns.from_rows([b"x"]))
    bench.delivery.abandon()
    with pytest.raises(IllegalStateError, match="The transaction of partition 0 is not prepared"):
        _ = bench.transaction.outcome


def test_outside_a_task_there_is_no_task_context() -> None:
    with pytest.raises(IllegalStateError, match="only in a Spark task"):
        streaming_task()


def test_task_reports_the_offsets_of_its_rows() -> None:
    """Where a broker does not tell an offset, the rows may begin earlier, and nothing is said of their end."""
    bench = Bench()
    bench.delivery.send("t", RecordColumns(pa.array(["a"])))
    counts = bench.delivery.counts
    counts.delivered.clear()
    for run in [("t", 0, 7, 2), ("t", 0, 12, 1), ("t", 1, 5, 1), ("t", 1, -1, 4), ("u", 3, -1, 1)]:
        counts(RunMetadata(*run, -1, 0), None)
    bench.transaction.add_marker(bench.made[0], 9)
    bench.transaction.prepare(bench.made[0], counts.delivered.items())
    assert bench.transaction.outcome.offsets == {"t": [[0, 7, 13, 3], [1, 0, 6, 1]]}
