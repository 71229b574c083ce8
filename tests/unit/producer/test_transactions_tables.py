"""Tables that are written part by part while another thread ends their transaction.

Between two parts a table is read. What another thread does then is done by the table's reader here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa
import pytest
from support.transaction_harness import TransactionHarness

from spark_kafka_sink.common.errors import (
    IllegalStateError,
    KafkaError,
    KafkaTimeoutError,
    ProducerClosedError,
    TransactionAbortableError,
    TransactionAbortedError,
)
from spark_kafka_sink.producer.transactions import State
from spark_kafka_sink.producer.writes import WriteReport
from spark_kafka_sink.protocol.versions import ApiKey

both_versions = pytest.mark.parametrize("version", [1, 2])
TWO_TOPICS = pa.schema([("value", pa.string()), ("topic", pa.string()), ("partition", pa.int32())])
WHOLE = [b"a1", b"a2", b"b1", b"b2"]


def write(harness: TransactionHarness, between: Callable[[], object]) -> WriteReport:
    """Write four rows in two parts, with `between` between them."""

    def parts() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"value": ["a1", "a2"], "partition": [0, 0]})
        between()
        yield pa.record_batch({"value": ["b1", "b2"], "partition": [0, 0]})

    schema = pa.schema([("value", pa.string()), ("partition", pa.int64())])
    return harness.write(pa.RecordBatchReader.from_batches(schema, parts()))


def goes_on(harness: TransactionHarness, *before: bytes) -> None:
    """Check that the next transaction has its own record only, after those that were committed `before`."""
    assert not harness.manager.sends
    harness.commit(b"next")
    assert harness.committed() == [*before, b"next"]


# ---- the end waits, or the write fails -------------------------------------------------------------------------------


@both_versions
def test_commit_waits_for_a_whole_table(version: int) -> None:
    """Bug: it ended the transaction between two parts. The others joined the next one, and `write` raised no error."""
    harness = TransactionHarness(version).started()

    def another_thread_commits() -> None:
        harness.manager.begin_commit()
        harness.run_for(500)
        assert harness.state is State.COMMITTING
        assert ApiKey.END_TXN not in harness.calls()

    assert write(harness, another_thread_commits).records == 4
    harness.producer.commit_transaction()
    assert harness.committed() == WHOLE
    goes_on(harness, *WHOLE)


@both_versions
def test_prepare_waits_for_a_whole_table(version: int) -> None:
    task = TransactionHarness(version).started()
    sends = task.manager.sends

    def another_thread_prepares() -> None:
        task.manager.prepare()
        assert not sends.wait_until_left(task.clock, 50)

    write(task, another_thread_prepares)
    assert sends.wait_until_left(task.clock, 0)
    driver = TransactionHarness(version, beside=task)
    driver.producer.resume_transaction(task.manager.current())
    driver.producer.commit_transaction()
    assert driver.committed() == WHOLE


@both_versions
@pytest.mark.parametrize("begins_next", [True, False])
def test_part_of_a_table_joins_no_transaction_after_an_abort(version: int, begins_next: bool) -> None:
    """The abort does not wait for the table, which may never end."""
    harness = TransactionHarness(version).started()

    def another_thread_aborts() -> None:
        harness.flush()
        harness.producer.abort_transaction()
        if begins_next:
            harness.producer.begin_transaction()

    with pytest.raises(TransactionAbortedError, match="while this table was being written") as failed:
        write(harness, another_thread_aborts)
    assert failed.value.report.records == 2
    if begins_next:  # it is not spoiled by the table of another transaction
        harness.send(b"of the next", partition=0)
        harness.producer.commit_transaction()
    goes_on(harness, *([b"of the next"] if begins_next else []))


@both_versions
@pytest.mark.parametrize("end", ["commit", "abort"])
def test_end_within_a_part_has_the_whole_table_or_nothing(
    version: int, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = TransactionHarness(version).started()
    append = harness.accumulator.append_block

    def ends_during(*arguments: object) -> None:
        monkeypatch.undo()
        getattr(harness.manager, f"begin_{end}")()
        harness.run_for(500)
        assert ApiKey.END_TXN not in harness.calls()
        append(*arguments)  # type: ignore[arg-type]

    def next_part() -> None:
        monkeypatch.setattr(harness.accumulator, "append_block", ends_during)

    failed = contextlib.nullcontext() if end == "commit" else pytest.raises(TransactionAbortedError)
    with failed:
        write(harness, next_part)
    getattr(harness.producer, f"{end}_transaction")()
    goes_on(harness, *(WHOLE if end == "commit" else []))


@both_versions
def test_commit_waits_for_the_rows_of_every_topic(version: int) -> None:
    harness = TransactionHarness(version, {"linger.ms": "50"}).started()
    harness.cluster.create_topic("orders", 1)
    look_up = harness.producer.look_up

    def another_thread_commits(topics: Iterable[str]) -> None:
        harness.manager.begin_commit()
        harness.run_for(500)
        look_up(topics)

    harness.producer.look_up = another_thread_commits  # between the rows of two topics
    rows = [{"value": "f", "topic": "flights", "partition": 0}, {"value": "o", "topic": "orders", "partition": 0}]
    harness.write(pa.Table.from_pylist(rows, TWO_TOPICS), None)
    harness.producer.commit_transaction()
    assert harness.committed() == [b"f"]
    assert [record.value for record in harness.cluster.log("orders", 0).committed_records()] == [b"o"]


# ---- a reader that fails ---------------------------------------------------------------------------------------------


@both_versions
@pytest.mark.parametrize("error", [OSError("the file ends early"), IllegalStateError("misuse"), KeyboardInterrupt()])
@pytest.mark.parametrize("end", ["begin_commit", "prepare"])
def test_closed_transaction_is_lost_with_a_table_that_fails(version: int, error: BaseException, end: str) -> None:
    harness = TransactionHarness(version).started()

    def fails() -> None:
        getattr(harness.manager, end)()
        harness.run_for(500)
        raise error

    with pytest.raises(type(error)):
        write(harness, fails)
    with pytest.raises(KafkaError, match="was interrupted by"):
        harness.producer.commit_transaction()
    assert harness.committed() == []
    harness.producer.abort_transaction()
    goes_on(harness)


@both_versions
def test_open_transaction_is_lost_with_a_table_whose_reader_misuses_the_producer(version: int) -> None:
    """Bug: an IllegalStateError of the reader let the first rows of the table be committed."""
    harness = TransactionHarness(version).started()
    with pytest.raises(IllegalStateError):
        write(harness, harness.producer.begin_transaction)
    with pytest.raises(KafkaError, match="A write was interrupted by IllegalStateError"):
        harness.producer.commit_transaction()
    harness.producer.abort_transaction()
    goes_on(harness)


# ---- no deadlock -----------------------------------------------------------------------------------------------------


@both_versions
@pytest.mark.parametrize("end", ["commit", "prepare"])
def test_end_in_the_reader_of_a_table_raises_after_max_block_ms(version: int, end: str) -> None:
    harness = TransactionHarness(version, {"max.block.ms": "700"}).started()
    harness.producer.on_flush = harness.flush
    before_ms = harness.now_ms
    with pytest.raises(KafkaTimeoutError, match=rf"{end}_transaction .* max.block.ms=700.*waits for a call of write"):
        write(harness, getattr(harness.producer, f"{end}_transaction"))
    assert harness.now_ms - before_ms < 1_000
    if end == "commit":  # its outcome was open
        with pytest.raises(KafkaTimeoutError):
            harness.producer.commit_transaction()
    with pytest.raises(TransactionAbortableError, match="Only abort_transaction is left"):
        harness.producer.commit_transaction()
    harness.producer.abort_transaction()
    goes_on(harness)


@both_versions
def test_commit_that_timed_out_goes_on_waiting_for_the_table(version: int) -> None:
    harness = TransactionHarness(version, {"max.block.ms": "700"}).started()

    def is_slow() -> None:
        with pytest.raises(KafkaTimeoutError):
            harness.producer.commit_transaction()

    write(harness, is_slow)
    harness.producer.commit_transaction()
    assert harness.committed() == WHOLE


@both_versions
@pytest.mark.parametrize("before", ["nothing", "begin_commit", "prepare"])
def test_close_does_not_wait_for_a_table(version: int, before: str) -> None:
    """Its reader may never end. A part of it is not committed."""
    harness = TransactionHarness(version).started()

    def another_thread_closes() -> None:
        if before != "nothing":
            getattr(harness.manager, before)()
        harness.run_for(500)
        harness.close()
        assert harness.coordinated.state == "CompleteAbort"

    with pytest.raises(ProducerClosedError):
        write(harness, another_thread_closes)
    assert harness.committed() == []


# ---- what a table joins ----------------------------------------------------------------------------------------------


@both_versions
def test_table_is_not_read_outside_a_transaction(version: int) -> None:
    harness = TransactionHarness(version).started()
    harness.manager.begin_commit()

    def parts() -> Iterator[pa.RecordBatch]:
        raise AssertionError("the table was read")
        yield

    reader = pa.RecordBatchReader.from_batches(pa.schema([("value", pa.string())]), parts())
    with pytest.raises(IllegalStateError, match="is committing a transaction"):
        harness.write(reader)
    harness.producer.commit_transaction()
    goes_on(harness)


@both_versions
@pytest.mark.parametrize("end", ["commit", "abort"])
def test_prepare_that_another_thread_overtakes_returns_nothing(version: int, end: str) -> None:
    """Its result could end the next transaction, which has the same producer id and epoch in version 1."""
    task = TransactionHarness(version).started()
    task.producer.on_flush = task.flush
    task.send(b"a", partition=0)
    task.manager.sends.begin_table("a table")

    def passes(duration_ms: int) -> None:
        task.manager.sends.end_table("a table")
        getattr(task.producer, f"{end}_transaction")()

    task.clock.sleep_ms = passes
    with pytest.raises(IllegalStateError, match="Another thread has ended this transaction"):
        task.producer.prepare_transaction()
    goes_on(task, *([b"a"] if end == "commit" else []))
