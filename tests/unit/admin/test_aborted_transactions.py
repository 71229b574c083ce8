from __future__ import annotations

from spark_kafka_sink.admin.aborted_transactions import AbortedTransaction, is_abort_marker, visible_batches
from spark_kafka_sink.record.decoder import DecodedBatch, DecodedRecord

TRANSACTIONAL, CONTROL = 0x10, 0x20
ABORT, COMMIT = 0, 1


def batch(base: int, producer_id: int = -1, attributes: int = 0, key: bytes | None = None) -> DecodedBatch:
    records = [DecodedRecord(base, 0, key, b"v", ())]
    return DecodedBatch(base, 0, 0, attributes, 0, 0, producer_id, 0, 0, 0, records)


def data(base: int, producer_id: int) -> DecodedBatch:
    return batch(base, producer_id, TRANSACTIONAL)


def marker(base: int, producer_id: int, kind: int) -> DecodedBatch:
    return batch(base, producer_id, TRANSACTIONAL | CONTROL, bytes([0, 0, 0, kind]))


def seen(batches: list[DecodedBatch], *aborted: tuple[int, int]) -> list[int]:
    transactions = [AbortedTransaction(*each) for each in aborted]
    return [each.base_offset for each, is_visible in visible_batches(batches, transactions) if is_visible]


def test_control_batches_are_never_seen() -> None:
    assert seen([batch(0), marker(1, 7, COMMIT), marker(2, 7, ABORT), batch(3)]) == [0, 3]


def test_records_of_an_aborted_transaction_are_left_out_up_to_its_end() -> None:
    log = [data(0, 7), marker(1, 7, COMMIT), data(2, 7), data(3, 7), marker(4, 7, ABORT), data(5, 7)]
    assert seen(log, (7, 2)) == [0, 5]


def test_transactions_of_several_producers_are_told_apart() -> None:
    log = [data(0, 7), data(1, 8), batch(2), data(3, 7), marker(4, 7, ABORT), data(5, 8), data(6, 7)]
    assert seen(log, (7, 0)) == [1, 2, 5, 6]


def test_one_producer_may_abort_more_than_once_in_whatever_order_that_is_told() -> None:
    log = [data(0, 7), marker(1, 7, ABORT), data(2, 7), marker(3, 7, COMMIT), data(4, 7), marker(5, 7, ABORT)]
    assert seen(log, (7, 4), (7, 0)) == [2]


def test_a_transaction_that_began_before_the_fetch_is_left_out_too() -> None:
    assert seen([data(10, 7), marker(11, 7, ABORT), data(12, 7)], (7, 3)) == [12]


def test_several_that_began_before_the_fetch_are_left_out_from_its_first_batch_on() -> None:
    assert seen([data(10, 9), data(11, 8), data(12, 7), data(13, 6)], (7, 3), (8, 4), (9, 5)) == [13]


def test_records_outside_transactions_are_seen_whatever_their_producer() -> None:
    assert seen([batch(0, 7), data(1, 7)], (7, 0)) == [0]


def test_a_commit_marker_or_an_empty_batch_is_no_abort() -> None:
    assert is_abort_marker(marker(0, 7, ABORT))
    assert not is_abort_marker(marker(0, 7, COMMIT))
    assert not is_abort_marker(batch(0, 7, TRANSACTIONAL, bytes(4)))
    assert not is_abort_marker(batch(0, 7, TRANSACTIONAL | CONTROL, None))
    empty = DecodedBatch(0, 0, 0, CONTROL, 0, 0, 7, 0, 0, 0, [])
    assert not is_abort_marker(empty)
