"""Names of batch writes without a prefix. The cluster has a pool of them; a name is used again after a write that ended
well, and never by two writes at once.
"""

from __future__ import annotations

import logging
import pickle
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.types import BinaryType, StructField, StructType
from support.coordinator_bench import CoordinatorBench
from support.driver_steps import marked_task
from support.scripted_broker import faults
from support.writer_tasks import batch_start_of

from spark_kafka_sink.admin.cluster_client import ClusterClient
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import TransactionalIdAuthorizationError
from spark_kafka_sink.protocol.versions import ApiKey
from spark_kafka_sink.sink import data_source, kafka_sink
from spark_kafka_sink.sink.data_source import KafkaBatchWriter, TaskWritten
from spark_kafka_sink.sink.exactly_once import cluster as cluster_module
from spark_kafka_sink.sink.exactly_once import session as session_module
from spark_kafka_sink.sink.exactly_once.cluster import KafkaDriverCluster
from spark_kafka_sink.sink.exactly_once.messages import BatchStart, TaskOutcome
from spark_kafka_sink.sink.exactly_once.protocol import ExactlyOnceDriver
from spark_kafka_sink.sink.exactly_once.write_names import Claim, claim_name, is_one_off, pool_name, release_name
from spark_kafka_sink.sink.kafka_sink import KafkaSink
from spark_kafka_sink.sink.options import SinkConfig

OPTIONS = {"kafka.bootstrap.servers": "broker-0:9092", "topic": "t", "delivery.guarantee": "exactly-once"}
CONFIG = SinkConfig.from_options(OPTIONS)
FRAME: Any = SimpleNamespace(schema=StructType([StructField("value", BinaryType())]), sparkSession=None)
TASKS = 2
WINDOW = 16
Step = Callable[[], None]


class WriteBench(CoordinatorBench):
    """Writes without a prefix, whose tasks write a row each."""

    def outcomes(self, batch_start: BatchStart) -> list[TaskOutcome]:
        """The outcomes of a write's tasks."""
        return [marked_task(self, batch_start, partition=partition) for partition in range(TASKS)]

    def rows(self) -> int:
        return len(self.values())

    def prefixes(self) -> set[str]:
        return {each.partition("/")[0] for each in self.cluster.transactions.transactions}

    def start_driver(self) -> None:
        """Go on as another driver, without the state of earlier writes."""
        self.coordinator = self.raw.coordinator = self.another_client()
        self.coordinator.close = lambda: None
        cluster_module._CLIENTS.clear()

    def claim(self, client: ClusterClient | None = None) -> Claim:
        return claim_name(client or self.coordinator, CONFIG, random.Random(7))

    def release(self, claim: Claim) -> None:
        release_name(self.coordinator, CONFIG, claim)

    def claim_state(self, claim: Claim) -> str:
        return self.state(f"{claim.prefix}/claim")


@pytest.fixture(params=[2, 1], ids=["version 2", "version 1"])
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> WriteBench:
    made = WriteBench(version=request.param)
    monkeypatch.setattr(cluster_module, "_CLIENTS", {})
    monkeypatch.setattr(cluster_module, "connect", lambda _: made.coordinator)
    monkeypatch.setattr(session_module, "connect", lambda _: made.coordinator)
    monkeypatch.setattr(made.coordinator, "close", lambda: None)
    monkeypatch.setattr(kafka_sink, "refuse_in_query", lambda *_, **__: None)
    monkeypatch.setattr(data_source, "has_query_thread", lambda: False)
    monkeypatch.setattr(
        kafka_sink, "write_in_transaction", lambda config, pool, batch_start, *_: made.outcomes(batch_start)
    )
    return made


@pytest.fixture(autouse=True)
def _own_level(caplog: pytest.LogCaptureFixture) -> None:
    """Restore the log level, which the writers set if there is none."""
    caplog.set_level(logging.INFO, "spark_kafka_sink")


class Sink(KafkaSink):
    """A sink that runs its tasks in this process. It calls `before` when the write has begun."""

    before: Step = staticmethod(lambda: None)

    def _run_tasks(self, df: Any, write_task: Any, report_ddl: str) -> list[Any]:
        type(self).before()
        counts = {"topic": None, "records": TASKS, "bytes": 0, "batches": 1, "retries": 0, "dead_letters": 0}
        counts["first_dead_letter"] = None
        return [counts | {"outcome": each.to_json()} for each in write_task(iter(()))]


def by_sink(bench: WriteBench, before: Step = lambda: None) -> None:
    type("BenchSink", (Sink,), {"before": staticmethod(before)})(OPTIONS).write(FRAME)


def by_format(bench: WriteBench, before: Step = lambda: None) -> None:
    writer = pickle.loads(pickle.dumps(KafkaBatchWriter(CONFIG)))
    try:
        before()
        messages = [TaskWritten((), 0, 0, outcome) for outcome in bench.outcomes(batch_start_of(writer))]
        writer.commit(messages)
    except BaseException:
        writer.abort([None])
        raise


WRITES = pytest.mark.parametrize("write", [by_sink, by_format])


@WRITES
def test_many_applications_share_the_transactional_ids_of_one(bench: WriteBench, write: Any) -> None:
    """Bug: each application made its own names, so that a job that starts each minute left 2 million ids a week."""
    count = 40
    for _ in range(count):
        bench.start_driver()
        write(bench)
    transactions = bench.cluster.transactions
    assert bench.rows() == count * TASKS
    assert len(transactions.transactions) == TASKS + 2  # the driver's and the claim
    assert len({each.producer_id for each in transactions.transactions.values()}) == TASKS + 2
    assert len(transactions.offsets) == TASKS


@WRITES
def test_concurrent_writes_have_different_names(bench: WriteBench, write: Any) -> None:
    for _ in range(10):
        write(bench, lambda: write(bench, lambda: write(bench)))
    assert bench.rows() == 30 * TASKS
    assert len(bench.prefixes()) == 3


@WRITES
@pytest.mark.parametrize("step", ["commit", "note"])
def test_name_of_undecided_write_is_not_used_again(
    bench: WriteBench, write: Any, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    write(bench)
    with monkeypatch.context() as patch:
        patch.setattr(ExactlyOnceDriver, {"note": "_note_finished"}.get(step, step), fail)
        patch.setattr(ExactlyOnceDriver, "abort", lambda *_: False)
        with pytest.raises(ZeroDivisionError):
            write(bench)
    (burnt,) = bench.prefixes()
    for _ in range(2):
        write(bench)
    assert len(bench.prefixes() - {burnt}) == 1
    bench.rig.clock.advance(CONFIG.producer.transaction_timeout_ms + 1)  # the claim times out
    bench.cluster.transactions.advance(bench.rig.now_ms)
    assert bench.state(f"{burnt}/claim") == "CompleteAbort"
    write(bench)
    assert len(bench.prefixes()) == 2


@WRITES
@pytest.mark.parametrize("step", ["begin", "tasks"])
def test_name_of_ended_write_is_used_again(
    bench: WriteBench, write: Any, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise TransactionalIdAuthorizationError("no right")

    for _ in range(3):
        with monkeypatch.context() as patch:
            if step == "begin":
                patch.setattr(ExactlyOnceDriver, step, fail)
            with pytest.raises(TransactionalIdAuthorizationError):
                write(bench, fail if step == "tasks" else lambda: None)
    write(bench)
    assert bench.rows() == TASKS
    assert len(bench.prefixes()) == 1


@WRITES
def test_write_creates_a_deleted_decision_topic_again(bench: WriteBench, write: Any) -> None:
    write(bench)
    del bench.cluster.topics[CONFIG.decision_topic]
    bench.start_driver()
    write(bench)
    assert bench.rows() == 2 * TASKS
    assert len(bench.prefixes()) == 1


# ---- the claim ------------------------------------------------------------------------------------------------------


def test_claim_leaves_nothing_for_readers_to_wait_for(bench: WriteBench) -> None:
    claim = bench.claim()
    assert bench.claim_state(claim) == "Ongoing"
    places = [TopicPartition(CONFIG.decision_topic, each) for each in range(16)]
    assert [bench.cluster.log(*place).records() for place in places] == [[]] * 16
    bench.release(claim)
    assert bench.claim_state(claim) == "CompleteCommit"


def test_returned_name_is_used_before_new_ones(bench: WriteBench) -> None:
    claims = [bench.claim() for _ in range(5)]
    assert len({each.prefix for each in claims}) == 5
    bench.release(claims[3])
    assert [bench.claim(bench.another_client()).prefix for _ in range(1)] == [claims[3].prefix]


def test_write_tries_more_names_when_all_are_taken(bench: WriteBench) -> None:
    numbers = [int(bench.claim().prefix.rpartition("-")[2]) for _ in range(WINDOW + 3)]
    assert sorted(numbers[:WINDOW]) == list(range(WINDOW))
    assert all(WINDOW <= each < 3 * WINDOW for each in numbers[WINDOW:])


def test_concurrent_claims_of_one_name_end_with_different_names(
    bench: WriteBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second write fences the first between its InitProducerId and its AddPartitionsToTxn."""

    def raced(*given: Any) -> None:
        if not rivals:
            rivals.extend(given[0])
            bench.raw.begin(rivals[0].transactional_id)
        add(*given)

    rivals: list[Any] = []
    add = bench.coordinator.writer.add_partitions
    monkeypatch.setattr(bench.coordinator.writer, "add_partitions", raced)
    claim = bench.claim()
    assert claim.transaction.transactional_id != rivals[0].transactional_id
    assert bench.claim_state(claim) == "Ongoing"
    assert "Another write took the name spark-kafka-sink-write-" in caplog.text


@pytest.mark.parametrize("is_first", [True, False], ids=["first name", "next name"])
def test_name_that_another_write_has_meanwhile_is_left_alone(
    bench: WriteBench, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: between the look at the names and the claim came other requests. So of eight writes at one time every sixth
    lost its claim to a later one: the name was not used again for days, and a warning said so.
    """

    def rivals_come() -> None:
        if not rivals:
            rivals.append(None)  # a rival comes here, too
            rivals[:] = [bench.claim(bench.another_client()) for _ in range(1 if is_first else 2)]

    def version(cluster: KafkaDriverCluster) -> int:
        if is_first:
            rivals_come()
        return asked(cluster)

    def init_producer_id(*given: Any) -> Any:
        if not is_first:
            rivals_come()
        return init(*given)

    rivals: list[Any] = []
    asked, init = KafkaDriverCluster.transaction_version, bench.coordinator.transactions.init_producer_id
    monkeypatch.setattr(random.Random, "shuffle", lambda _, names: names.sort(key=len))
    monkeypatch.setattr(KafkaDriverCluster, "transaction_version", version)
    monkeypatch.setattr(bench.coordinator.transactions, "init_producer_id", init_producer_id)
    claim = bench.claim()
    assert claim.prefix not in {each.prefix for each in rivals}
    assert bench.claim_state(rivals[-1]) == "Ongoing"


@pytest.mark.parametrize("is_used", [False, True])
@WRITES
def test_stalled_write_leaves_its_name_to_new_owner(
    bench: WriteBench, write: Any, is_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write stops between its read and its InitProducerId. If it began under the name, it would abort the owner's
    decision.

    Bug: it took the name, and the owner's write could end with TransactionLostError and a part of its rows.
    """

    def stands_still(*given: Any) -> Any:
        if given[0].endswith("/claim") and not owners:
            owners.append(bench.claim(bench.another_client()).prefix)
            drivers.append(bench.raw.begin(f"{owners[0]}/driver").producer)
            assert given[0] == f"{owners[0]}/claim"
        return init(*given)

    if is_used:
        write(bench)
    owners: list[str] = []
    drivers: list[Any] = []
    monkeypatch.setattr(random.Random, "shuffle", lambda _, names: names.sort(key=len))
    init = bench.coordinator.transactions.init_producer_id
    monkeypatch.setattr(bench.coordinator.transactions, "init_producer_id", stands_still)
    write(bench)
    write(bench)
    assert bench.rows() == (2 + is_used) * TASKS
    assert len(bench.prefixes()) == 2
    tasks = [f"{owners[0]}/{number}" for number in range(TASKS)]
    driver = bench.cluster.transactions.transactions[f"{owners[0]}/driver"]
    assert (driver.producer_id, driver.epoch) == drivers[0]
    assert is_used or not set(tasks) & set(bench.cluster.transactions.transactions)


def test_claim_that_cannot_be_ended_costs_only_its_name(bench: WriteBench, caplog: pytest.LogCaptureFixture) -> None:
    claim = bench.claim()
    bench.cluster.on(ApiKey.END_TXN, faults.fail_with(TransactionalIdAuthorizationError), times=None)
    bench.release(claim)
    assert f"its name {claim.prefix} is not used again for some days: " in caplog.text


def test_names_of_writes_differ_from_those_of_streams() -> None:
    assert is_one_off(pool_name(0))
    assert is_one_off(pool_name(12345))
    assert is_one_off("spark-kafka-sink-" + "0123456789abcdef" * 2), "of earlier releases"
    assert not is_one_off("spark-kafka-sink-" + "0123456789abcdef01234567")
    assert not is_one_off("spark-kafka-sink-write-")
