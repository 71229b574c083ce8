"""Names of batch writes without a prefix: used again after a committed write, and never by two writes at once."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.types import BinaryType, StructField, StructType
from support.coordinator_bench import CoordinatorBench

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.sink import driver_cluster, driver_session, foreach, write_names
from spark_kafka_sink.sink.data_source import KafkaBatchWriter, TaskWritten
from spark_kafka_sink.sink.decision import TaskTransaction
from spark_kafka_sink.sink.exactly_once import ExactlyOnceDriver
from spark_kafka_sink.sink.foreach import KafkaSink
from spark_kafka_sink.sink.mandate import Mandate, TaskOutcome, task_id
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.write_names import (
    give_back,
    is_one_off,
    one_off_prefix,
    share_name,
    take_name,
    take_shared_name,
)

OPTIONS = {"kafka.bootstrap.servers": "broker-0:9092", "topic": "t", "delivery.guarantee": "exactly-once"}
CONFIG = SinkConfig.from_options(OPTIONS)
FRAME: Any = SimpleNamespace(schema=StructType([StructField("value", BinaryType())]), sparkSession=None)
TASKS = 2
Write = Callable[[], None]


class WriteBench(CoordinatorBench):
    """Writes without a prefix, whose tasks write a row each."""

    def outcomes(self, mandate: Mandate) -> list[TaskOutcome]:
        """Of a write's tasks."""
        made = []
        for partition in range(TASKS):
            open_ = self.raw.begin(task_id(mandate.prefix, partition, 0))
            self.raw.write(open_, TopicPartition("t", 0), "row")
            task = TaskTransaction(open_, partition, 1)
            self.raw.mark(open_, open_.transactional_id, mandate.place, 1, task.marker_text)
            made.append(TaskOutcome(mandate, 0, "", partition, 1, task))
        return made

    def rows(self) -> int:
        return len(self.cluster.log("t", 0).committed_records())

    def prefixes(self) -> set[str]:
        return {each.partition("/")[0] for each in self.cluster.transactions.transactions}


@pytest.fixture(params=[2, 1], ids=["version 2", "version 1"])
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> WriteBench:
    made = WriteBench(version=request.param)
    monkeypatch.setattr(driver_cluster, "process_coordinator", lambda _: made.coordinator)
    monkeypatch.setattr(driver_session, "connect", lambda _: made.coordinator)
    monkeypatch.setattr(made.coordinator, "close", lambda: None)
    monkeypatch.setattr(foreach, "refuse_in_query", lambda *_, **__: None)
    monkeypatch.setattr(foreach, "write_in_transaction", lambda config, pool, mandate, *_: made.outcomes(mandate))
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    return made


@pytest.fixture(autouse=True)
def _own_level(caplog: pytest.LogCaptureFixture) -> None:
    """The writers set a level where there is none; this one is taken back."""
    caplog.set_level(logging.INFO, "spark_kafka_sink")


@pytest.fixture(autouse=True)
def _no_free_names() -> Iterator[None]:
    write_names._FREE.clear()
    yield
    write_names._FREE.clear()


class Sink(KafkaSink):
    """Runs its tasks in this process; `before` runs when the write has begun."""

    before: Write = staticmethod(lambda: None)

    def _run_tasks(self, df: Any, write_task: Any, report_ddl: str) -> list[Any]:
        type(self).before()
        counts = {"topic": None, "records": TASKS, "bytes": 0, "batches": 1, "retries": 0}
        return [counts | {"outcome": each.to_json()} for each in write_task(iter(()))]


def by_sink(bench: WriteBench, before: Write = lambda: None) -> None:
    type("BenchSink", (Sink,), {"before": staticmethod(before)})(OPTIONS).write(FRAME)


def by_format(bench: WriteBench, before: Write = lambda: None) -> None:
    writer = pickle.loads(pickle.dumps(KafkaBatchWriter(CONFIG, one_off_prefix(), is_one_off=True)))
    try:
        before()
        messages = [TaskWritten((), 0, 0, outcome) for outcome in bench.outcomes(writer._mandate)]
        writer.commit(messages)
    except BaseException:
        writer.abort([None])
        raise


WRITES = pytest.mark.parametrize("write", [by_sink, by_format])


@WRITES
def test_many_writes_use_the_ids_of_one(bench: WriteBench, write: Callable[[WriteBench], None]) -> None:
    count = 200 if bench.coordinator.transaction_version(bench.timer()) == 2 else 40
    for _ in range(count):
        write(bench)
    transactions = bench.cluster.transactions
    assert bench.rows() == count * TASKS
    assert len(transactions.transactions) == TASKS + 1
    assert len({each.producer_id for each in transactions.transactions.values()}) == TASKS + 1
    assert len(transactions.offsets) == TASKS


@WRITES
def test_writes_at_one_time_have_names_of_their_own(bench: WriteBench, write: Any) -> None:
    for _ in range(10):
        write(bench, lambda: write(bench, lambda: write(bench)))
    assert bench.rows() == 30 * TASKS
    assert len(bench.prefixes()) == 3


@WRITES
@pytest.mark.parametrize("step", ["begin", "tasks", "commit", "note"])
def test_name_of_failed_write_is_not_used_again(
    bench: WriteBench, write: Any, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    write(bench)
    with monkeypatch.context() as patch:
        if step != "tasks":
            patch.setattr(ExactlyOnceDriver, {"note": "_note_finished"}.get(step, step), fail)
        with pytest.raises(ZeroDivisionError):
            write(bench, fail if step == "tasks" else lambda: None)
    burnt = bench.prefixes()
    write(bench)
    assert len(bench.prefixes() - burnt) == 1
    write(bench)
    assert len(bench.prefixes()) == 2


@WRITES
def test_write_after_the_decision_topic_was_deleted_makes_it_again(bench: WriteBench, write: Any) -> None:
    write(bench)
    del bench.cluster.topics[CONFIG.decision_topic]
    bench.coordinator = bench.another_client()
    bench.coordinator.close = lambda: None  # type: ignore[method-assign]
    write(bench)
    assert bench.rows() == 2 * TASKS
    assert len(bench.prefixes()) == 1


def test_names_are_new_ones_where_none_is_free() -> None:
    names = {take_name() for _ in range(10)}
    assert len(names) == 10
    assert all(is_one_off(each) for each in names)
    give_back(name := one_off_prefix())
    assert take_name() == name
    assert take_name() != name


def test_forked_process_has_none_of_its_parents_free_names() -> None:
    give_back(name := one_off_prefix())
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, take_name().encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 100).decode() != name
    assert take_name() == name


def test_shared_name_is_one_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path},/nowhere")
    assert take_shared_name() is None
    name = one_off_prefix()
    share_name(name)
    (tmp_path / "spark-kafka-sink-other.free").touch()
    assert [take_shared_name() for _ in range(2)] == [name, None]


def test_name_that_another_worker_took_first_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def raced(self: Path, *given: object) -> Iterator[Path]:
        found = sorted(glob(self, *given))  # type: ignore[arg-type]
        found[0].unlink()
        return iter(found)

    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    names = sorted(one_off_prefix() for _ in range(2))
    for name in names:
        share_name(name)
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", raced)
    assert take_shared_name() == names[1]


def test_without_a_usable_directory_no_name_is_shared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("SPARK_LOCAL_DIRS", raising=False)
    share_name(one_off_prefix())
    assert take_shared_name() is None
    assert caplog.text == ""
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path / "gone"))
    share_name(one_off_prefix())
    assert take_shared_name() is None
    assert "cannot be kept for a later write" in caplog.text
