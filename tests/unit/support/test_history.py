"""The checker finds each anomaly that a test puts into a correct history, and no other one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.history import Anomaly, History, Kind, Outcome, Read, Sent, summary


def plain() -> tuple[list[Sent], list[Read]]:
    """Twelve records of two streams to two partitions, all acknowledged."""
    sent, reads, ends = [], [], [0, 0]
    for number in range(12):
        partition = number % 2
        stream = "ab"[number % 3 == 0]
        sent.append(Sent(str(number), "t", partition, Outcome.YES, ends[partition], stream))
        reads.append(Read("t", partition, ends[partition], str(number)))
        ends[partition] += 1
    return sent, sorted(reads)


def kinds(history: History, **promise: bool) -> set[Kind]:
    return {anomaly.kind for anomaly in history.anomalies(**promise)}


def test_a_good_history_has_no_anomaly() -> None:
    sent, reads = plain()
    assert History(sent, reads, reads).anomalies() == []
    assert summary([]) == "no anomaly"


def test_a_failed_or_unknown_record_may_be_there_or_not() -> None:
    sent, reads = plain()
    sent[3].outcome, sent[4].outcome = Outcome.NO, Outcome.UNKNOWN
    assert History(sent, reads, reads).anomalies() == []
    left = [read for read in reads if read.value not in ("3", "4")]
    assert History(sent, left).anomalies() == []


def test_a_record_that_is_missing_is_lost() -> None:
    sent, reads = plain()
    assert kinds(History(sent, reads[1:])) == {Kind.LOST}


def test_record_read_twice_is_duplicated_unless_allowed() -> None:
    sent, reads = plain()
    more = [*reads, reads[0]._replace(offset=99)]
    assert kinds(History(sent, more)) == {Kind.DUPLICATED}
    assert kinds(History(sent, more), exactly_once=False) == set()


def test_a_failed_record_is_duplicated_too() -> None:
    sent, reads = plain()
    sent[0].outcome, sent[0].offset = Outcome.NO, None
    assert kinds(History(sent, [*reads, Read("t", 0, 99, "0")])) == {Kind.DUPLICATED}


def test_record_that_only_uncommitted_readers_see_twice_is_duplicated() -> None:
    sent, reads = plain()
    assert kinds(History(sent, reads, [*reads, reads[0]._replace(offset=99)])) == {Kind.DUPLICATED}


def test_records_of_a_stream_that_changed_places_are_reordered() -> None:
    sent, reads = plain()
    for record in sent:
        record.offset = None
    # 2 and 4 are of one stream and partition; 0 is of the other stream.
    two, four = next(r for r in reads if r.value == "2"), next(r for r in reads if r.value == "4")
    swapped = [r for r in reads if r not in (two, four)]
    swapped += [two._replace(offset=four.offset), four._replace(offset=two.offset)]
    assert kinds(History(sent, swapped)) == {Kind.REORDERED}
    assert kinds(History(sent, swapped), in_order=False) == set()


def test_streams_need_no_order_among_themselves() -> None:
    sent, reads = plain()
    for record in sent:
        record.offset = None
    order = sorted(reads, key=lambda read: (sent[int(read.value)].stream, int(read.value)))
    assert History(sent, [read._replace(offset=place) for place, read in enumerate(order)]).anomalies() == []


def test_another_partition_or_topic_is_a_wrong_place() -> None:
    sent, reads = plain()
    for wrong in (reads[-1]._replace(partition=0, offset=50), reads[-1]._replace(topic="u")):
        assert kinds(History(sent, [*reads[:-1], wrong])) == {Kind.WRONG_PLACE, Kind.OFFSET_MISMATCH}


def test_wrong_reported_offset_is_a_mismatch() -> None:
    sent, reads = plain()
    sent[5].offset = 77
    assert kinds(History(sent, reads)) == {Kind.OFFSET_MISMATCH}


def test_offset_may_be_missing() -> None:
    sent, reads = plain()
    sent[5].offset, sent[6].offset = -1, None
    assert kinds(History(sent, reads)) == set()


def test_record_never_sent_is_a_phantom() -> None:
    sent, reads = plain()
    assert kinds(History(sent, [*reads, Read("t", 0, 60, "forged")])) == {Kind.PHANTOM}


def test_record_seen_by_one_kind_of_reader_is_unstable() -> None:
    sent, reads = plain()
    assert kinds(History(sent, reads, reads[:-1])) == {Kind.UNSTABLE}


def transactional(ended: Outcome) -> tuple[list[Sent], list[Read], dict[str, Outcome]]:
    """The same records, in two transactions: the first committed, the second ended as given."""
    sent, reads = plain()
    sent = [replace(record, transaction=f"tx{number // 6}") for number, record in enumerate(sent)]
    return sent, reads, {"tx0": Outcome.YES, "tx1": ended}


def first_six(reads: list[Read]) -> list[Read]:
    return [read for read in reads if int(read.value) < 6]


@pytest.mark.parametrize("ended", [Outcome.NO, Outcome.UNKNOWN])
def test_a_transaction_that_was_not_committed_need_not_be_seen(ended: Outcome) -> None:
    sent, reads, transactions = transactional(ended)
    assert History(sent, first_six(reads), reads, transactions).anomalies() == []


def test_an_aborted_transaction_that_is_seen_is_an_aborted_read() -> None:
    sent, reads, transactions = transactional(Outcome.NO)
    assert kinds(History(sent, reads, reads, transactions)) == {Kind.ABORTED_READ}


def test_transaction_that_never_ended_is_too() -> None:
    sent, reads, _ = transactional(Outcome.NO)
    assert kinds(History(sent, reads, reads, {"tx0": Outcome.YES})) == {Kind.ABORTED_READ}


def test_transaction_of_unknown_end_is_seen_wholly_or_not() -> None:
    sent, reads, transactions = transactional(Outcome.UNKNOWN)
    assert kinds(History(sent, reads, reads, transactions)) == set()
    half = [read for read in reads if int(read.value) < 9]
    assert kinds(History(sent, half, reads, transactions)) == {Kind.TORN}


def test_committed_transaction_with_missing_record_is_torn() -> None:
    sent, reads, transactions = transactional(Outcome.YES)
    found = History(sent, reads[:-1], reads, transactions).anomalies()
    assert {anomaly.kind for anomaly in found} == {Kind.TORN, Kind.LOST}
    assert "1 torn batch\n  5 of 6 records of tx1 are read" in summary(found)


def test_values_that_are_not_unique_are_refused() -> None:
    with pytest.raises(AssertionError, match="not unique"):
        History([Sent("a", "t"), Sent("a", "t")], []).anomalies()


def test_anomaly_is_printed_in_words() -> None:
    assert str(Anomaly(Kind.LOST, "it")) == "lost: it"
