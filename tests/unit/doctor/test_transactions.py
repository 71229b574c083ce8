"""What the doctor decides from the answers of coordinators."""

from __future__ import annotations

from dataclasses import replace

from spark_kafka_sink.admin.transaction_values import TransactionDescription, TransactionState
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import KafkaTimeoutError, UnknownServerError
from spark_kafka_sink.doctor.findings import Finding, Status
from spark_kafka_sink.doctor.transactions import Answer, Transactions, judge

NOW_MS = 1_800_000_000_000
TIMEOUT_MS = 900_000
PLACE = TopicPartition("orders", 3)
ASKED = Answer(True)
GOOD = Transactions("query", TIMEOUT_MS, 3, False, ASKED, ASKED, ASKED)


def open_for(ms: int, *places: TopicPartition) -> TransactionDescription:
    ongoing = TransactionState.ONGOING
    return TransactionDescription("query/0", ongoing, 7, 1, TIMEOUT_MS, NOW_MS - ms, frozenset(places or (PLACE,)))


def names(findings: list[Finding]) -> list[str]:
    return [each.name for each in findings if each.name]


def test_good_answers_are_good() -> None:
    assert {each.status for each in judge(GOOD, NOW_MS)} == {Status.OK}


def test_transaction_within_its_timeout_is_good() -> None:
    found = replace(GOOD, behind=frozenset({PLACE}), open=(open_for(TIMEOUT_MS),))
    assert {each.status for each in judge(found, NOW_MS)} == {Status.OK}


def test_oldest_transaction_within_its_timeout_is_named_once_for_a_topic() -> None:
    """Readers may wait for a dead query for as long as the timeout."""
    places = [TopicPartition("orders", index) for index in range(3)]
    first, second = open_for(20_000, *places[:2]), open_for(340_000, *places[1:])._replace(transactional_id="other/1")
    found = judge(replace(GOOD, behind=frozenset(places), open=(first, second)), NOW_MS)
    (line,) = [each.seen for each in found if each.what == "open transactions"]
    assert line.startswith(
        "readers of orders-0, orders-1, orders-2 wait for other/1 and 1 more, open for 340 s, which is within its"
        " timeout of 900 s. If its query"
    )
    assert {each.status for each in found} == {Status.OK}


def test_transaction_far_beyond_its_timeout_hangs_and_is_named() -> None:
    found = judge(replace(GOOD, behind=frozenset({PLACE}), open=(open_for(TIMEOUT_MS + 60_001),)), NOW_MS)
    assert names(found) == ["transaction-hangs"]
    assert "orders-3 wait for query/0" in found[-1].seen


def test_transaction_that_no_coordinator_shows_is_a_warning() -> None:
    other = open_for(1, TopicPartition("orders", 4))
    found = judge(replace(GOOD, behind=frozenset({PLACE}), open=(other,)), NOW_MS)
    assert names(found) == ["open-transaction-unknown"]
    assert found[-1].status is Status.WARNING


def test_partitions_of_one_topic_and_reason_share_a_line() -> None:
    behind = frozenset(TopicPartition(topic, index) for topic in ("orders", "others") for index in range(12))
    found = [each for each in judge(replace(GOOD, behind=behind), NOW_MS) if each.name]
    assert [each.name for each in found] == ["open-transaction-unknown"] * 2
    assert "orders-0, orders-1" in found[0].seen
    assert "orders-9 and 2 more wait" in found[0].seen


def test_coordinator_that_does_not_answer_is_unavailable() -> None:
    error = KafkaTimeoutError("no outcome within 10000 ms.")
    found = judge(replace(GOOD, transactional_id=Answer(True, error), group=Answer(True, error)), NOW_MS)
    assert names(found) == ["coordinator-unavailable"] * 2
    assert "brokers (3)" in found[0].change


def test_unexpected_refusal_is_shown_as_not_checked() -> None:
    found = judge(replace(GOOD, transactional_id=Answer(True, UnknownServerError("odd"))), NOW_MS)
    assert names(found) == []
    assert (found[0].status, found[0].seen) == (Status.NOT_CHECKED, "odd")


def test_unknown_prefix_says_how_to_give_it() -> None:
    found = judge(Transactions(None, TIMEOUT_MS, listing=ASKED), NOW_MS)
    assert found[0].status is Status.NOT_CHECKED
    assert "--checkpoint" in found[0].seen
