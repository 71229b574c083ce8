"""Transactions of a whole producer under both protocol versions: what goes over the wire, and what readers see.

The other files on `producer/transactions.py` have one subject each:

- `test_transactions_states.py`: the table of states.
- `test_transactions_content.py`: `CurrentTransaction` and `JoinedSends`.
- `test_transactions_records.py`, `test_transactions_batches.py`: records and batches that fail.
- `test_transactions_coordinator.py`, `test_transactions_refusals.py`: coordinators that move, and their errors.
- `test_transactions_prepare.py`: transactions that another producer ends.
- `test_transactions_tables.py`: tables whose transaction another thread ends.
- `test_transactions_races.py`, `test_transactions_timeouts.py`: threads that come in between, calls that are repeated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pyarrow as pa
import pytest
from support.producer_harness import TOPIC
from support.scripted_broker import faults
from support.scripted_broker.batches import check_batch
from support.transaction_harness import GROUP, ID, PLACE, TransactionHarness

from spark_kafka_sink.client.api_versions import ApiVersions
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import (
    CoordinatorLoadInProgressError,
    IllegalStateError,
    InvalidRecordError,
    InvalidTopicError,
    KafkaError,
    KafkaTimeoutError,
)
from spark_kafka_sink.producer.transaction_requests import GroupMetadata
from spark_kafka_sink.producer.transactions import State
from spark_kafka_sink.protocol.versions import ApiKey
from spark_kafka_sink.record.columns import RecordColumns

both_versions = pytest.mark.parametrize("version", [1, 2])
SMALL = {"batch.size": "1"}


# ---- the calls of a transaction --------------------------------------------------------------------------------------


def test_version_1_adds_partitions_before_records_and_groups_before_offsets() -> None:
    harness = TransactionHarness(1).started()
    harness.send(b"a", partition=0)
    harness.settle()
    harness.producer.send_offsets_to_transaction({PLACE: (7, "rows=1")}, GROUP)
    harness.producer.commit_transaction()
    calls = [
        ApiKey.ADD_PARTITIONS_TO_TXN,
        ApiKey.PRODUCE,
        ApiKey.ADD_OFFSETS_TO_TXN,
        ApiKey.FIND_COORDINATOR,
        ApiKey.TXN_OFFSET_COMMIT,
        ApiKey.END_TXN,
    ]
    assert harness.calls() == calls
    versions = {exchange.api_key: exchange.version for exchange in harness.cluster.requests}
    assert versions[ApiKey.PRODUCE] <= 11
    assert versions[ApiKey.TXN_OFFSET_COMMIT] <= 4
    assert versions[ApiKey.END_TXN] <= 4
    assert harness.committed() == [b"a"]
    assert harness.offsets() == {(TOPIC, 0): (7, "rows=1", -1)}


def test_version_2_leaves_adding_to_the_brokers() -> None:
    harness = TransactionHarness(2).started()
    harness.send(b"a", partition=0)
    harness.settle()
    harness.producer.send_offsets_to_transaction({PLACE: (7, None)}, GroupMetadata(GROUP))
    harness.producer.commit_transaction()
    assert harness.calls() == [ApiKey.PRODUCE, ApiKey.FIND_COORDINATOR, ApiKey.TXN_OFFSET_COMMIT, ApiKey.END_TXN]
    versions = {exchange.api_key: exchange.version for exchange in harness.cluster.requests}
    assert versions[ApiKey.PRODUCE] >= 12
    assert versions[ApiKey.TXN_OFFSET_COMMIT] == versions[ApiKey.END_TXN] == 5
    assert harness.committed() == [b"a"]
    assert harness.offsets() == {(TOPIC, 0): (7, None, -1)}


def test_under_version_1_epoch_and_sequences_go_on() -> None:
    harness = TransactionHarness(1)
    harness.producer.init_transactions()
    for value in (b"a", b"b", b"c"):
        harness.commit(value)
    assert harness.stored() == [(0, 0), (0, 1), (0, 2)]
    assert harness.committed() == [b"a", b"b", b"c"]


def test_version_2_begins_each_transaction_with_new_epoch() -> None:
    harness = TransactionHarness(2, SMALL)
    harness.producer.init_transactions()
    harness.commit(b"a", b"b")
    harness.commit(b"c", b"d")
    harness.producer.begin_transaction()
    harness.send(b"lost", partition=0)
    harness.producer.abort_transaction()
    harness.commit(b"e")
    assert harness.committed() == [b"a", b"b", b"c", b"d", b"e"]
    assert [each for each in harness.stored() if each[0] != 2] == [(0, 0), (0, 1), (1, 0), (1, 1), (3, 0)]
    assert len(harness.cluster.requests_of(ApiKey.INIT_PRODUCER_ID)) == 1


@both_versions
def test_every_request_carries_one_producer_id_and_its_transactional_id(version: int) -> None:
    harness = TransactionHarness(version)
    harness.producer.init_transactions()
    for number in range(3):
        harness.producer.begin_transaction()
        for partition in (0, 1):
            harness.send(b"%d" % number, partition=partition)
        harness.producer.commit_transaction()
    produced = [exchange.request for exchange in harness.cluster.requests_of(ApiKey.PRODUCE)]
    headers = [
        [check_batch(bytes(data.records)) for topic in request.topic_data for data in topic.partition_data]
        for request in produced
    ]
    assert {request.transactional_id for request in produced} == {ID}
    assert all(len({(each.producer_id, each.producer_epoch) for each in one}) == 1 for one in headers)
    assert all(each.is_transactional for one in headers for each in one)
    assert harness.committed(0) == harness.committed(1) == [b"0", b"1", b"2"]


@both_versions
def test_partitions_of_a_transaction_are_added_once(version: int) -> None:
    harness = TransactionHarness(version).started()
    for partition in (0, 1, 0, 1):
        harness.send(b"v", partition=partition)
        harness.settle()
    harness.producer.commit_transaction()
    asked = harness.cluster.requests_of(ApiKey.ADD_PARTITIONS_TO_TXN)
    assert len(asked) == (2 if version == 1 else 0)
    assert harness.committed(0) == harness.committed(1) == [b"v", b"v"]


@both_versions
def test_columns_belong_to_the_transaction_too(version: int) -> None:
    harness = TransactionHarness(version).started()
    columns = RecordColumns(
        pa.array([b"%d" % index for index in range(40)]), partition=pa.array([0, 1] * 20, pa.int32())
    )
    sent = harness.send_columns(columns)
    assert harness.committed(0) == []
    harness.producer.commit_transaction()
    assert sent.settled_rows == 40
    assert harness.committed(0) == [b"%d" % index for index in range(0, 40, 2)]
    assert harness.committed(1) == [b"%d" % index for index in range(1, 40, 2)]


@both_versions
def test_commit_sends_lingering_records_and_waits(version: int) -> None:
    harness = TransactionHarness(version, {"linger.ms": "60000", "delivery.timeout.ms": "120000"}).started()
    harness.cluster.on(ApiKey.PRODUCE, faults.delay(700))
    delivery = harness.send(b"a", partition=0)
    began_ms = harness.now_ms
    harness.producer.commit_transaction()
    assert delivery.error is None
    assert 700 <= harness.now_ms - began_ms < 1_500
    assert harness.calls()[-2:] == [ApiKey.PRODUCE, ApiKey.END_TXN]
    assert harness.committed() == [b"a"]


@both_versions
def test_abort_drops_unsent_and_hides_sent_records(version: int) -> None:
    harness = TransactionHarness(version, {"linger.ms": "60000", "delivery.timeout.ms": "120000"}).started()
    sent = harness.send(b"sent", partition=0)
    harness.accumulator.flush(harness.settle, lambda batch: True)
    lingering = harness.send(b"lingering", partition=1)
    harness.producer.abort_transaction()
    assert sent.error is None
    assert isinstance(lingering.error, KafkaError)
    assert ID in str(lingering.error)
    assert harness.committed(0) == harness.committed(1) == []
    assert harness.values(partition=1) == []
    assert harness.memory_in_use == 0
    harness.commit(b"next")
    assert harness.committed() == [b"next"]


@both_versions
@pytest.mark.parametrize("end", ["commit_transaction", "abort_transaction"])
def test_empty_transaction_sends_no_request(version: int, end: str) -> None:
    harness = TransactionHarness(version).started()
    getattr(harness.producer, end)()
    assert harness.calls() == []
    harness.commit(b"next")
    assert harness.committed() == [b"next"]


@both_versions
def test_sending_no_offsets_does_nothing(version: int) -> None:
    harness = TransactionHarness(version).started()
    harness.producer.send_offsets_to_transaction({}, GROUP)
    harness.producer.commit_transaction()
    assert harness.calls() == []


@both_versions
def test_transaction_of_offsets_only_is_committed(version: int) -> None:
    harness = TransactionHarness(version).started()
    harness.producer.send_offsets_to_transaction({PLACE: (1, None)}, GROUP)
    harness.producer.abort_transaction()
    assert harness.offsets() == {}
    harness.producer.begin_transaction()
    harness.producer.send_offsets_to_transaction({PLACE: (2, None), TopicPartition(TOPIC, 1): (3, "x")}, GROUP)
    assert harness.offsets() == {}
    harness.producer.commit_transaction()
    assert {place: commit.offset for place, commit in harness.offsets().items()} == {(TOPIC, 0): 2, (TOPIC, 1): 3}


@pytest.mark.parametrize("is_known_at_the_end", [True, False])
@pytest.mark.parametrize("is_committed", [True, False])
def test_no_epoch_has_transactions_of_both_versions(
    is_known_at_the_end: bool, is_committed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug (KAFKA-18227): version 2 began in the epoch of version 1. Until the end marker of the transaction before was
    written, leaders took the new records for those of that one: committed ones were lost, aborted ones were read.
    """
    levels = {"transaction.version": 1}
    monkeypatch.setattr(ApiVersions, "finalized_feature", lambda _, name: levels[name])
    harness = TransactionHarness(1)
    harness.cluster.transactions.marker_delay_ms = 50
    harness.producer.init_transactions()
    harness.commit(b"a")
    harness.producer.begin_transaction()
    harness.send(b"b", partition=0)
    harness.settle()
    levels["transaction.version"] = 2 if is_known_at_the_end else 1
    harness.cluster.requests.clear()
    if is_committed:
        harness.producer.commit_transaction()
    else:
        harness.producer.abort_transaction()
    assert [exchange.version for exchange in harness.cluster.requests_of(ApiKey.END_TXN)] == [4]
    assert bool(harness.cluster.requests_of(ApiKey.INIT_PRODUCER_ID)) == is_known_at_the_end
    levels["transaction.version"] = 2
    harness.commit(b"c")
    harness.cluster.transactions.marker_delay_ms = 0
    harness.commit(b"d")
    assert harness.committed() == ([b"a", b"b", b"c", b"d"] if is_committed else [b"a", b"c", b"d"])
    used: dict[tuple[int, int], set[int]] = {}
    for exchange in harness.cluster.requests_of(ApiKey.END_TXN):
        epoch = int(exchange.request.producer_id), int(exchange.request.producer_epoch)
        used.setdefault(epoch, set()).add(exchange.version)
    assert sorted(map(tuple, used.values())) == ([(4,), (5,), (5,)] if is_known_at_the_end else [(4,), (5,)])


# ---- the states in which it may be called ----------------------------------------------------------------------------


@both_versions
def test_a_record_outside_a_transaction_is_misuse(version: int) -> None:
    harness = TransactionHarness(version)
    with pytest.raises(IllegalStateError, match="has no producer id"):
        harness.send(b"v")
    harness.producer.init_transactions()
    with pytest.raises(IllegalStateError, match="begin_transaction"):
        harness.send(b"v")
    with pytest.raises(IllegalStateError, match="begin_transaction"):
        harness.producer.send_columns(TOPIC, RecordColumns(pa.array([b"v"])))
    with pytest.raises(IllegalStateError, match="Offsets"):
        harness.producer.send_offsets_to_transaction({PLACE: (1, None)}, GROUP)
    harness.run_for(500)
    assert harness.values() == []
    harness.commit(b"next")
    assert harness.committed() == [b"next"]


@both_versions
def test_calls_out_of_order_are_refused_with_the_state(version: int) -> None:
    harness = TransactionHarness(version)
    producer = harness.producer
    for call in (producer.begin_transaction, producer.commit_transaction, producer.abort_transaction):
        with pytest.raises(IllegalStateError, match="has no producer id"):
            call()
    producer.init_transactions()
    for call in (producer.commit_transaction, producer.abort_transaction):
        with pytest.raises(IllegalStateError, match="A producer that has a producer id cannot"):
            call()
    producer.begin_transaction()
    for call in (producer.begin_transaction, producer.init_transactions):
        with pytest.raises(IllegalStateError, match="is in a transaction"):
            call()
    producer.commit_transaction()


def test_a_producer_without_an_id_has_no_transactions() -> None:
    harness = TransactionHarness(2, {"transactional.id": None})
    producer = harness.producer
    calls: list[Callable[[], object]] = [
        producer.init_transactions,
        producer.begin_transaction,
        producer.prepare_transaction,
        producer.commit_transaction,
        producer.abort_transaction,
        lambda: producer.send_offsets_to_transaction({}, GROUP),
    ]
    for call in calls:
        with pytest.raises(IllegalStateError, match=r"set transactional\.id"):
            call()


@both_versions
def test_a_callback_cannot_end_a_transaction(version: int) -> None:
    harness = TransactionHarness(version).started()
    reported: list[IllegalStateError] = []

    def end(*_: object) -> None:
        try:
            harness.producer.commit_transaction()
        except IllegalStateError as error:
            reported.append(error)

    harness.producer._thread = threading.current_thread()  # the thread of the callback, here
    harness.producer.send(TOPIC, b"v", partition=0, on_completion=end)
    harness.run_until(lambda: reported)
    assert "callback" in str(reported[0])
    harness.producer._thread = None
    harness.producer.commit_transaction()


# ---- timeouts and repeated calls -------------------------------------------------------------------------------------


@both_versions
@pytest.mark.parametrize("has_ended", [True, False])
def test_repeated_commit_after_a_timeout_gets_the_outcome(version: int, has_ended: bool) -> None:
    harness = TransactionHarness(version).started()
    harness.cluster.on(ApiKey.END_TXN, faults.delay(7_000))
    harness.send(b"a", partition=0)
    began_ms = harness.now_ms
    with pytest.raises(KafkaTimeoutError, match=rf"commit_transaction of transactional\.id {ID} .*max\.block\.ms=5000"):
        harness.producer.commit_transaction()
    assert harness.now_ms - began_ms == pytest.approx(5_000, abs=10)
    if has_ended:
        harness.run_for(4_000)
        assert harness.state is State.READY
    for call in (harness.producer.begin_transaction, harness.producer.abort_transaction):
        with pytest.raises(IllegalStateError, match="outcome of commit_transaction is open"):
            call()
    harness.producer.commit_transaction()
    assert len(harness.cluster.requests_of(ApiKey.END_TXN)) == 1
    with pytest.raises(IllegalStateError):
        harness.producer.commit_transaction()
    harness.commit(b"b")
    assert harness.committed() == [b"a", b"b"]


@both_versions
def test_timeout_has_the_last_answer(version: int) -> None:
    harness = TransactionHarness(version)
    harness.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.fail_with(CoordinatorLoadInProgressError), times=None)
    with pytest.raises(KafkaTimeoutError, match=rf"init_transactions of .* last answer was: transactional\.id {ID}: "):
        harness.producer.init_transactions()
    harness.cluster.scripts.clear()
    harness.producer.init_transactions()
    harness.commit(b"a")
    assert harness.committed() == [b"a"]


@both_versions
def test_offsets_for_missing_topic_time_out_until_abort(version: int) -> None:
    harness = TransactionHarness(version).started()
    harness.send(b"a", partition=0)
    offsets = {TopicPartition("nowhere", 4): (1, None)}
    with pytest.raises(KafkaTimeoutError, match=f"group {GROUP}, nowhere-4"):
        harness.producer.send_offsets_to_transaction(offsets, GROUP)
    with pytest.raises(IllegalStateError, match="outcome of send_offsets_to_transaction is open"):
        harness.producer.commit_transaction()
    harness.producer.abort_transaction()
    harness.commit(b"b")
    assert harness.committed() == [b"b"]
    assert harness.offsets() == {}


# ---- closing ---------------------------------------------------------------------------------------------------------


@both_versions
def test_close_aborts_the_open_transaction(version: int) -> None:
    harness = TransactionHarness(version).started()
    delivery = harness.send(b"a", partition=0)
    harness.settle()
    harness.close()
    assert delivery.error is None
    assert harness.coordinated.state == "CompleteAbort"
    assert harness.committed() == []


@both_versions
@pytest.mark.parametrize("topic", [None, "not/valid"])
def test_close_does_not_wait_after_an_empty_transaction(version: int, topic: str | None) -> None:
    """Bug: its end needs no request, and then the Sender waited for an answer until the close was forced."""
    harness = TransactionHarness(version).started()
    if topic is not None:
        assert isinstance(harness.producer.send(topic, b"a").exception(), InvalidTopicError)
    start_ms = harness.now_ms
    harness.close()
    assert harness.now_ms == start_ms
    assert harness.calls() == []


@both_versions
def test_close_completes_a_commit_in_progress(version: int) -> None:
    harness = TransactionHarness(version).started()
    harness.send(b"a", partition=0)
    result = harness.manager.begin_commit()
    harness.close()
    assert result.is_done
    assert result.error is None
    assert harness.committed() == [b"a"]


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("is_forced", [True, False])
def test_end_succeeds_if_the_producer_closes_before_the_next_epoch(committed: bool, is_forced: bool) -> None:
    """Bug: it raised ProducerClosedError. A caller would write the committed transaction a second time."""
    harness = TransactionHarness(1).started()
    harness.send(b"a", partition=0)
    harness.settle()
    harness.cluster.on(ApiKey.END_TXN, faults.close_after())
    result = harness.manager.begin_commit() if committed else harness.manager.begin_abort()
    if is_forced:
        harness.run_until(lambda: harness.state is State.INITIALIZING)
        harness.producer.sender.force_close()
    harness.close()
    assert result.is_done
    assert result.error is None
    assert harness.committed() == ([b"a"] if committed else [])


@both_versions
def test_close_aborts_a_transaction_with_a_failed_commit(version: int) -> None:
    harness = TransactionHarness(version).started()
    harness.send(b"a", partition=0)
    harness.settle()
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(InvalidRecordError))
    harness.send(b"refused", partition=0)
    harness.manager.begin_commit()
    harness.close()
    assert harness.coordinated.state == "CompleteAbort"


@both_versions
def test_forced_close_fails_waiting_calls(version: int) -> None:
    harness = TransactionHarness(version).started()
    harness.network.held.add(0)
    delivery = harness.send(b"a", partition=0)
    result = harness.manager.begin_commit()
    harness.run_for(100)
    harness.producer.sender.force_close()
    harness.producer.sender.run()
    assert delivery.error is not None
    assert result.is_done
    assert "closed" in str(result.error)
