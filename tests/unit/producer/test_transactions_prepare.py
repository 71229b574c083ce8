"""Transactions that one producer prepares and another one ends."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
from support.producer_harness import TOPIC, Delivery
from support.scripted_broker import faults
from support.transaction_harness import GROUP, ID, PLACE, TransactionHarness

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import (
    IllegalStateError,
    InvalidTxnStateError,
    KafkaError,
    KafkaTimeoutError,
    ProducerFencedError,
    TopicAuthorizationError,
    TransactionAbortableError,
)
from spark_kafka_sink.common.open_transaction import OpenTransaction
from spark_kafka_sink.producer.futures import FutureRecordMetadata, RecordThunk
from spark_kafka_sink.producer.transactions import PreparedTransaction, State
from spark_kafka_sink.protocol.versions import ApiKey

both_versions = pytest.mark.parametrize("version", [1, 2])
both_ends = pytest.mark.parametrize("committed", [True, False])


def prepared_by_another(version: int, *values: bytes) -> tuple[TransactionHarness, PreparedTransaction]:
    harness = TransactionHarness(version).started()
    for value in values:
        harness.send(value, partition=0)
    harness.settle()
    return harness, harness.producer.prepare_transaction()


def end(harness: TransactionHarness, committed: bool) -> None:
    (harness.producer.commit_transaction if committed else harness.producer.abort_transaction)()


@both_versions
def test_prepared_transaction_has_all_that_another_producer_needs(version: int) -> None:
    harness, prepared = prepared_by_another(version, b"a")
    assert prepared == PreparedTransaction(OpenTransaction(ID, 1000, 0, version), is_empty=False)
    assert pickle.loads(pickle.dumps(prepared)) == prepared
    assert harness.state is State.PREPARED
    assert harness.coordinated.state == "Ongoing"
    assert harness.committed() == []


@both_versions
@both_ends
def test_another_producer_ends_a_prepared_transaction(version: int, committed: bool) -> None:
    task, prepared = prepared_by_another(version, b"a", b"b")
    driver = TransactionHarness(version, beside=task)
    driver.producer.resume_transaction(prepared)
    driver.cluster.requests.clear()
    end(driver, committed)
    assert driver.calls()[-1] == ApiKey.END_TXN
    assert driver.cluster.requests_of(ApiKey.INIT_PRODUCER_ID) == []
    assert driver.committed() == ([b"a", b"b"] if committed else [])
    assert driver.coordinated.state == ("CompleteCommit" if committed else "CompleteAbort")


@both_versions
@both_ends
def test_producer_ends_its_prepared_transaction_and_continues(version: int, committed: bool) -> None:
    harness, _ = prepared_by_another(version, b"a")
    end(harness, committed)
    harness.commit(b"b")
    assert harness.committed() == ([b"a"] if committed else []) + [b"b"]


@both_versions
@both_ends
def test_end_may_be_repeated_but_not_reversed(version: int, committed: bool) -> None:
    task, prepared = prepared_by_another(version, b"a")
    for _ in range(2):
        driver = TransactionHarness(version, beside=task)
        driver.producer.resume_transaction(prepared)
        end(driver, committed)
    other = TransactionHarness(version, beside=task)
    other.producer.resume_transaction(prepared)
    with pytest.raises(InvalidTxnStateError, match=ID):
        end(other, not committed)
    assert task.committed() == ([b"a"] if committed else [])


@both_versions
def test_prepared_transaction_commits_its_offsets(version: int) -> None:
    task = TransactionHarness(version).started()
    task.producer.send_offsets_to_transaction({PLACE: (12, "rows=3")}, GROUP)
    prepared = task.producer.prepare_transaction()
    assert not prepared.is_empty
    driver = TransactionHarness(version, beside=task)
    driver.producer.resume_transaction(prepared)
    driver.producer.commit_transaction()
    assert driver.offsets() == {(TOPIC, 0): (12, "rows=3", -1)}


@both_versions
@both_ends
def test_empty_prepared_transaction_sends_no_request(version: int, committed: bool) -> None:
    task, prepared = prepared_by_another(version)
    assert prepared.is_empty
    driver = TransactionHarness(version, beside=task)
    driver.producer.resume_transaction(prepared)
    driver.cluster.requests.clear()
    end(driver, committed)
    assert driver.calls() == []
    end(task, committed)
    assert task.calls() == []


@both_versions
def test_resuming_producer_may_resume_the_next_or_get_an_id(version: int) -> None:
    task, first = prepared_by_another(version, b"a")
    driver = TransactionHarness(version, beside=task)
    driver.producer.resume_transaction(first)
    driver.producer.commit_transaction()
    with pytest.raises(IllegalStateError, match="has no producer id"):
        driver.producer.begin_transaction()
    task.producer.init_transactions()
    task.producer.begin_transaction()
    task.send(b"b", partition=0)
    task.settle()
    driver.producer.resume_transaction(task.producer.prepare_transaction())
    driver.producer.commit_transaction()
    driver.producer.init_transactions()
    driver.commit(b"c")
    assert driver.committed() == [b"a", b"b", b"c"]


@both_versions
def test_init_after_prepare_continues_when_transaction_has_ended(version: int) -> None:
    task, prepared = prepared_by_another(version, b"a")
    driver = TransactionHarness(version, beside=task)
    driver.producer.resume_transaction(prepared)
    driver.producer.commit_transaction()
    task.producer.init_transactions()
    task.commit(b"b")
    assert task.committed() == [b"a", b"b"]


@both_versions
def test_new_init_aborts_an_unended_transaction_and_fences_others(version: int) -> None:
    task, prepared = prepared_by_another(version, b"a")
    task.producer.init_transactions()
    driver = TransactionHarness(version, beside=task)
    driver.producer.resume_transaction(prepared)
    with pytest.raises(ProducerFencedError, match=ID):
        driver.producer.commit_transaction()
    task.commit(b"b")
    assert task.committed() == [b"b"]


@both_versions
def test_prepared_transaction_accepts_no_more_records(version: int) -> None:
    harness, _ = prepared_by_another(version, b"a")
    with pytest.raises(IllegalStateError, match="has a prepared transaction"):
        harness.send(b"more")
    with pytest.raises(IllegalStateError, match="has a prepared transaction"):
        harness.producer.send_offsets_to_transaction({PLACE: (1, None)}, GROUP)
    for call in (harness.producer.prepare_transaction, harness.producer.begin_transaction):
        with pytest.raises(IllegalStateError, match="has a prepared transaction"):
            call()
    harness.producer.commit_transaction()
    assert harness.committed() == [b"a"]


@both_versions
def test_failed_transaction_cannot_be_prepared(version: int) -> None:
    harness = TransactionHarness(version).started()
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(TopicAuthorizationError))
    harness.send(b"a", partition=0)
    harness.settle()
    with pytest.raises(TopicAuthorizationError, match=TOPIC):
        harness.producer.prepare_transaction()
    harness.producer.abort_transaction()


def test_transaction_with_unanswered_offsets_cannot_be_prepared() -> None:
    harness = TransactionHarness(2, {"max.block.ms": "100"}).started()
    harness.cluster.on(ApiKey.TXN_OFFSET_COMMIT, faults.delay(2_000))
    with pytest.raises(KafkaTimeoutError):
        harness.producer.send_offsets_to_transaction({PLACE: (1, None)}, GROUP)
    with pytest.raises(IllegalStateError, match="outcome of send_offsets_to_transaction is open"):
        harness.producer.prepare_transaction()


@both_versions
def test_closing_leaves_a_prepared_transaction_open(version: int) -> None:
    task, prepared = prepared_by_another(version, b"a")
    task.close()
    assert task.coordinated.state == "Ongoing"
    driver = TransactionHarness(version, beside=task)
    driver.producer.resume_transaction(prepared)
    driver.close()
    assert task.coordinated.state == "Ongoing"
    last = TransactionHarness(version, beside=task)
    last.producer.resume_transaction(prepared)
    last.producer.commit_transaction()
    assert last.committed() == [b"a"]


@both_versions
def test_only_an_idle_producer_of_the_same_id_resumes(version: int) -> None:
    task, prepared = prepared_by_another(version, b"a")
    stranger = TransactionHarness(version, {"transactional.id": "other"}, beside=task)
    with pytest.raises(IllegalStateError, match=f"{ID} cannot be resumed by other"):
        stranger.producer.resume_transaction(prepared)
    busy = TransactionHarness(version, {"transactional.id": "other"}, beside=task)
    busy.producer.init_transactions()
    own = prepared._replace(transaction=prepared.transaction._replace(transactional_id="other"))
    with pytest.raises(IllegalStateError, match="has a producer id"):
        busy.producer.resume_transaction(own)
    busy.producer.begin_transaction()
    with pytest.raises(IllegalStateError, match="is in a transaction"):
        busy.producer.resume_transaction(own)
    busy.send(b"own", partition=1)
    busy.producer.commit_transaction()
    assert busy.committed(1) == [b"own"]


@both_versions
def test_prepared_transaction_ends_in_its_own_version(version: int) -> None:
    task, prepared = prepared_by_another(version, b"a")
    task.cluster.finalized_features["transaction.version"] = 3 - version
    driver = TransactionHarness(3 - version, beside=task)
    driver.producer.resume_transaction(prepared)
    driver.cluster.requests.clear()
    driver.producer.commit_transaction()
    (asked,) = driver.cluster.requests_of(ApiKey.END_TXN)
    assert (asked.version >= 5) is (version == 2)
    assert driver.committed() == [b"a"]


@both_versions
def test_a_refused_end_of_a_resumed_transaction_can_be_aborted(version: int) -> None:
    task, prepared = prepared_by_another(version, b"a")
    driver = TransactionHarness(version, beside=task)
    driver.cluster.on(ApiKey.END_TXN, faults.fail_with(TransactionAbortableError))
    driver.producer.resume_transaction(prepared)
    with pytest.raises(Exception, match=ID):
        driver.producer.commit_transaction()
    driver.producer.abort_transaction()
    assert driver.coordinated.state == "CompleteAbort"
    assert driver.state is State.UNINITIALIZED


def test_end_of_resumed_transaction_requests_no_epoch() -> None:
    task, prepared = prepared_by_another(1, b"a")
    driver = TransactionHarness(1, beside=task)
    driver.cluster.on(ApiKey.END_TXN, faults.close_after())
    driver.producer.resume_transaction(prepared)
    driver.cluster.requests.clear()
    driver.producer.commit_transaction()
    assert driver.cluster.requests_of(ApiKey.INIT_PRODUCER_ID) == []
    assert driver.state is State.UNINITIALIZED
    assert driver.committed() == [b"a"]


@both_versions
def test_next_transaction_is_not_resumed_before_the_last_outcome(version: int) -> None:
    task, prepared = prepared_by_another(version, b"a")
    driver = TransactionHarness(version, {"max.block.ms": "100"}, beside=task)
    driver.cluster.on(ApiKey.END_TXN, faults.delay(500))
    driver.producer.resume_transaction(prepared)
    with pytest.raises(KafkaTimeoutError):
        driver.producer.commit_transaction()
    driver.run_until(lambda: driver.state is State.UNINITIALIZED)
    with pytest.raises(IllegalStateError, match="outcome of commit_transaction is open"):
        driver.producer.resume_transaction(prepared)
    driver.producer.commit_transaction()
    driver.producer.resume_transaction(prepared)


@both_versions
def test_preparing_waits_until_every_record_is_acknowledged(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = TransactionHarness(version).started()
    delivery = harness.send(b"a", partition=0)
    monkeypatch.setattr(harness.producer, "flush", harness.settle)  # the test runs its turns
    harness.producer.prepare_transaction()
    assert delivery.error is None
    assert delivery.is_settled


@both_versions
def test_close_aborts_a_transaction_interrupted_while_preparing(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: it counted as prepared, which a close leaves open, and blocked readers until its timeout."""
    harness = TransactionHarness(version).started()
    harness.send(b"a", partition=0)
    harness.settle()

    def interrupted_once_it_is_prepared() -> None:
        if harness.state is State.PREPARED:
            raise KeyboardInterrupt

    monkeypatch.setattr(harness.producer, "flush", interrupted_once_it_is_prepared)
    with pytest.raises(KeyboardInterrupt):
        harness.producer.prepare_transaction()
    with pytest.raises(KafkaError, match="prepare_transaction was interrupted by KeyboardInterrupt"):
        harness.producer.commit_transaction()
    harness.close()
    assert harness.coordinated.state == "CompleteAbort"


def test_preparing_again_keeps_the_prepared_transaction() -> None:
    harness, prepared = prepared_by_another(2, b"a")
    with pytest.raises(IllegalStateError):
        harness.producer.prepare_transaction()
    harness.close()
    driver = TransactionHarness(2, beside=harness)
    driver.producer.resume_transaction(prepared)
    driver.producer.commit_transaction()
    assert driver.committed() == [b"a"]


@both_versions
def test_producer_with_another_id_leaves_its_prepared_transaction(version: int) -> None:
    harness, prepared = prepared_by_another(version, b"first id")
    harness.cluster.requests.clear()
    harness.producer.init_transactions("another-id")
    (asked,) = harness.cluster.requests_of(ApiKey.INIT_PRODUCER_ID)
    assert asked.request.transactional_id == "another-id"
    harness.producer.begin_transaction()
    harness.send(b"second id", partition=0)
    harness.settle()
    other, first = harness.producer.prepare_transaction().transaction, prepared.transaction
    assert (other.transactional_id, first.transactional_id) == ("another-id", ID)
    assert other.producer_id != first.producer_id
    states = {name: held.state for name, held in harness.cluster.transactions.transactions.items()}
    assert states == {ID: "Ongoing", "another-id": "Ongoing"}
    harness.producer.commit_transaction()
    assert harness.cluster.transactions.transactions[ID].state == "Ongoing"
    driver = TransactionHarness(version, beside=harness)
    driver.producer.resume_transaction(prepared)
    driver.producer.commit_transaction()
    assert driver.committed() == [b"first id", b"second id"]


@both_versions
def test_current_transaction_is_known_before_its_records_are_written(version: int) -> None:
    harness = TransactionHarness(version).started()
    harness.send(b"a", partition=0)
    current = harness.producer.current_transaction
    harness.settle()
    assert current == harness.producer.prepare_transaction().transaction == (ID, 1000, 0, version)


@both_versions
def test_another_id_is_refused_within_a_transaction(version: int) -> None:
    harness = TransactionHarness(version).started()
    with pytest.raises(IllegalStateError):
        harness.producer.init_transactions("another-id")
    harness.send(b"a", partition=0)
    harness.producer.commit_transaction()
    assert harness.committed() == [b"a"]


def flush_by_turns(task: TransactionHarness, then: Callable[[], object] = lambda: None) -> None:
    """Let `flush` run turns of the Sender until all records have ended. After the first turn, run `then`."""
    flushes: list[str] = []

    def flush(timeout: float | None = None) -> None:
        task.run_until(lambda: not task.accumulator.has_incomplete)
        if not flushes:
            then()
        flushes.append("one")

    task.producer.flush = flush


@both_versions
@pytest.mark.parametrize("partition", [0, 1])
def test_preparing_waits_for_sends_of_other_threads(version: int, partition: int) -> None:
    task = TransactionHarness(version).started()
    task.send(b"first", partition=0)
    late: list[Delivery] = []
    flush_by_turns(task, lambda: late.append(task.send(b"late", partition=partition)))
    prepared = task.producer.prepare_transaction()
    assert late[0].is_settled
    assert late[0].error is None
    driver = TransactionHarness(version, beside=task)
    driver.producer.resume_transaction(prepared)
    driver.producer.commit_transaction()
    assert driver.committed(partition)[-1] == b"late"


@both_versions
def test_prepare_waits_for_joined_send_and_refuses_later(version: int) -> None:
    task = TransactionHarness(version).started()
    flush_by_turns(task)
    task.manager.add_partition(PLACE, "a send")
    late = FutureRecordMetadata(0, -1, -1)

    def passes(duration_ms: int) -> None:
        task.run_for(duration_ms)
        with pytest.raises(IllegalStateError, match="prepared transaction"):
            task.producer.send(TOPIC, b"too late", partition=0)
        task.accumulator.append_row(PLACE, None, b"late", (), 0, 50, RecordThunk(late, None), 0, task.now_ms)
        task.manager.sends.leave("a send")

    task.clock.sleep_ms = passes
    prepared = task.producer.prepare_transaction()
    assert late.done()
    assert not prepared.is_empty


@both_versions
def test_joined_send_columns_has_all_rows_in_the_prepared_transaction(version: int) -> None:
    """Its later blocks may have other partitions."""
    task = TransactionHarness(version).started()
    flush_by_turns(task)
    task.manager.add_partition(PLACE, "a send")
    late = [FutureRecordMetadata(0, -1, -1) for _ in range(2)]

    def passes(duration_ms: int) -> None:
        for partition, future in enumerate(late):
            place = TopicPartition(TOPIC, partition)
            task.manager.add_partition(place, "a send")
            task.accumulator.append_row(place, None, b"late", (), 0, 50, RecordThunk(future, None), 0, task.now_ms)
        task.manager.sends.leave("a send")

    task.clock.sleep_ms = passes
    prepared = task.producer.prepare_transaction()
    assert [future.done() for future in late] == [True, True]
    driver = TransactionHarness(version, beside=task)
    driver.producer.resume_transaction(prepared)
    driver.producer.commit_transaction()
    assert [driver.committed(partition) for partition in range(2)] == [[b"late"], [b"late"]]


@both_versions
def test_prepare_fails_with_a_joined_send_that_failed(version: int) -> None:
    task = TransactionHarness(version).started()
    flush_by_turns(task)
    task.send(b"first", partition=0)
    task.manager.add_partition(PLACE, "a send")
    task.clock.sleep_ms = lambda duration_ms: task.manager.handle_refused_record(
        KafkaTimeoutError("no memory"), "a send"
    )
    with pytest.raises(TransactionAbortableError, match="no memory"):
        task.producer.prepare_transaction()
    task.producer.abort_transaction()
    assert task.committed() == []
