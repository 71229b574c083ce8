"""Exactly-once delivery: transactional ids, groups, the brokers' limits, and transactions that hang.

`gather` asks coordinators; `judge` decides. It asks for an epoch of `<prefix>/doctor`, which no query uses, because
only that shows whether a transactional id may be written: its coordinator remembers the id for some days. It never
touches the ids of the query, because that would stop its driver.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

from spark_kafka_sink.admin.cluster_client import ClusterClient
from spark_kafka_sink.admin.transaction_values import TransactionDescription, TransactionState
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import (
    GroupAuthorizationError,
    InvalidTransactionTimeoutError,
    KafkaError,
    KafkaTimeoutError,
    TransactionalIdAuthorizationError,
)
from spark_kafka_sink.common.texts import one_line
from spark_kafka_sink.doctor.findings import Area, Finding, not_checked, ok, problem
from spark_kafka_sink.protocol.fetch import LATEST_TIMESTAMP, READ_COMMITTED, READ_UNCOMMITTED

_AREA: Final = Area.EXACTLY_ONCE
_OPEN: Final = (TransactionState.ONGOING, TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT)
_MOST_NAMED: Final = 10
_GRACE_MS: Final = 60_000
"""A coordinator looks for transactions that timed out every 10 s, and the clocks may differ."""
OWN_ID: Final = "doctor"

T = TypeVar("T")


class Answer(NamedTuple):
    """The error of a call; None if it went well. `was_asked` False: there was nothing to ask with."""

    was_asked: bool = False
    error: KafkaError | None = None


NOT_ASKED: Final = Answer()


@dataclass(frozen=True, slots=True)
class Transactions:
    """What coordinators and leaders say."""

    prefix: str | None
    timeout_ms: int
    brokers: int = 0
    is_prefix_known: bool | None = None
    transactional_id: Answer = NOT_ASKED
    group: Answer = NOT_ASKED
    listing: Answer = NOT_ASKED
    open: tuple[TransactionDescription, ...] = ()
    """Transactions of all producers that this user may see."""
    behind: frozenset[TopicPartition] = frozenset()
    """Partitions whose readers wait for the end of a transaction, before and after `open` was asked for."""


# ---- facts -----------------------------------------------------------------------------------------------------------


def gather(
    client: ClusterClient,
    prefix: str | None,
    driver: str | None,
    timeout_ms: int,
    partitions: Mapping[str, int],
    decision_topic: str,
    brokers: int,
    limit_ms: int,
) -> Transactions:
    """Ask. `driver`: the transactional id of the prefix's driver. `partitions`: topic → its number of partitions, for
    topics that exist and may be described. Each of at most six calls takes at most `limit_ms`.
    """
    own = None if prefix is None else f"{prefix}/{OWN_ID}"
    known, transactional_id, group = None, NOT_ASKED, NOT_ASKED
    if own is not None and driver is not None:
        described = _tried(lambda: client.transactions.describe_transactions([driver], client.timer(limit_ms)))
        known = None if isinstance(described, KafkaError) else described[driver] is not None
        given = _tried(lambda: client.transactions.init_producer_id(own, timeout_ms, client.timer(limit_ms)))
        transactional_id = Answer(True, given if isinstance(given, KafkaError) else None)
    if own is not None and partitions.get(decision_topic):
        wanted = {own: [TopicPartition(decision_topic, 0)]}
        offsets = _tried(lambda: client.groups.fetch_offsets(wanted, client.timer(limit_ms)))
        group = Answer(True, offsets if isinstance(offsets, KafkaError) else None)
    places = [TopicPartition(topic, index) for topic, count in partitions.items() for index in range(count)]
    behind, listing, open_ = _open_transactions(client, places, limit_ms)
    return Transactions(prefix, timeout_ms, brokers, known, transactional_id, group, listing, open_, behind)


def _open_transactions(
    client: ClusterClient, places: Sequence[TopicPartition], limit_ms: int
) -> tuple[frozenset[TopicPartition], Answer, tuple[TransactionDescription, ...]]:
    before = _tried(lambda: _stable_ends(client, places, limit_ms))
    if isinstance(before, KafkaError):
        return frozenset(), Answer(True, before), ()
    if not before:
        return frozenset(), Answer(bool(places)), ()
    found = _tried(lambda: _listed(client, limit_ms))
    if isinstance(found, KafkaError):
        return frozenset(), Answer(True, found), ()
    after = _tried(lambda: _stable_ends(client, list(before), limit_ms))
    if isinstance(after, KafkaError):
        return frozenset(), Answer(True, after), ()
    # a transaction that has ended meanwhile was not in the list, and does not hang
    same = frozenset(place for place in before if after.get(place) == before[place])
    return same, Answer(True), tuple(found)


def _stable_ends(client: ClusterClient, places: Sequence[TopicPartition], limit_ms: int) -> dict[TopicPartition, int]:
    """Return the last stable offset of each partition where it is before the end."""
    if not places:
        return {}
    timer = client.timer(limit_ms)
    stable = client.topics.list_offsets(places, LATEST_TIMESTAMP, timer, READ_COMMITTED)
    ends = client.topics.list_offsets(places, LATEST_TIMESTAMP, timer, READ_UNCOMMITTED)
    return {place: stable[place] for place in places if stable[place] < ends[place]}


def _listed(client: ClusterClient, limit_ms: int) -> list[TransactionDescription]:
    timer = client.timer(limit_ms)
    names = [each.transactional_id for each in client.transactions.list_transactions(timer, states=_OPEN)]
    described = client.transactions.describe_transactions(names, timer) if names else {}
    return [each for each in described.values() if each is not None and each.state in _OPEN]


def _tried(call: Callable[[], T]) -> T | KafkaError:
    try:
        return call()
    except KafkaError as error:
        return error


# ---- decisions -------------------------------------------------------------------------------------------------------


def judge(found: Transactions, now_ms: int) -> list[Finding]:
    """`now_ms`: the time of day by the brokers, by whose clocks transactions begin. That of this machine if they do not
    say it.
    """
    if found.prefix is None:
        why = (
            "not known here: give --checkpoint LOCATION as the query has it, or the option transactional.id.prefix."
            " Permissions on transactional ids and groups, and the limit of transaction.timeout.ms, were not checked"
        )
        first = [not_checked(_AREA, "transactional.id.prefix", why)]
    else:
        first = [_of_id(found, found.prefix), _of_group(found, found.prefix)]
    return [*first, *_of_readers(found, now_ms)]


def _of_id(found: Transactions, prefix: str) -> Finding:
    what = "transactional ids"
    error = found.transactional_id.error
    text = one_line(str(error))
    if error is None:
        shown = one_line(prefix)
        seen = (
            f"{shown}/*: WRITE, and transaction.timeout.ms={found.timeout_ms}. Tried as {shown}/{OWN_ID}; the ids of"
            " the query were not touched"
        )
        return ok(_AREA, what, seen)
    if isinstance(error, TransactionalIdAuthorizationError):
        return problem("transactional-id-denied", Area.PERMISSIONS, what, text, prefix=shlex.quote(prefix))
    if isinstance(error, InvalidTransactionTimeoutError):
        return problem("transaction-timeout-too-long", _AREA, what, text, wanted=found.timeout_ms)
    return _of_coordinator(error, what, found.brokers)


def _of_group(found: Transactions, prefix: str) -> Finding:
    what = "groups"
    if not found.group.was_asked:
        return not_checked(_AREA, what, "there is no decision topic yet to ask with")
    error = found.group.error
    if error is None:
        return ok(_AREA, what, f"{one_line(prefix)}/*: DESCRIBE. READ can only be tried by a write, and was not")
    if isinstance(error, GroupAuthorizationError):
        return problem("group-denied", Area.PERMISSIONS, what, one_line(str(error)), prefix=shlex.quote(prefix))
    return _of_coordinator(error, what, found.brokers)


def _of_coordinator(error: KafkaError, what: str, brokers: int) -> Finding:
    text = one_line(str(error))
    if isinstance(error, KafkaTimeoutError) or error.retriable:
        return problem("coordinator-unavailable", _AREA, what, text, brokers=brokers)
    return not_checked(_AREA, what, text)


def _of_readers(found: Transactions, now_ms: int) -> Iterable[Finding]:
    what = "open transactions"
    if found.listing.error is not None:
        return [not_checked(_AREA, what, one_line(str(found.listing.error)))]
    if not found.listing.was_asked:
        return [not_checked(_AREA, what, "no topic that could have some")]
    if not found.behind:
        return [ok(_AREA, what, "no reader waits for one")]
    places: dict[tuple[str, str, str], list[TopicPartition]] = {}
    in_time: dict[str, list[TransactionDescription]] = {}
    for place in sorted(found.behind):
        owners = [each for each in found.open if place in each.topic_partitions]
        name, reason = _waiting(owners, now_ms)
        places.setdefault((name, reason, place.topic), []).append(place)
        if not name:
            in_time.setdefault(place.topic, []).extend(owners)
    return [
        _of_places(name, reason or _oldest(in_time[topic], now_ms), behind)
        for (name, reason, topic), behind in places.items()
    ]


def _waiting(owners: Sequence[TransactionDescription], now_ms: int) -> tuple[str, str]:
    """Return the name of the problem of a partition whose readers wait for a transaction of `owners`, and the reason.
    Both are empty if there is no problem.
    """
    late = next((each for each in owners if _is_late(each, now_ms)), None)
    if late is not None:
        return "transaction-hangs", _late(late)
    if owners:
        return "", ""
    return "open-transaction-unknown", "a transaction that no coordinator shows to this user"


def _of_places(name: str, reason: str, places: Sequence[TopicPartition]) -> Finding:
    what, more = "open transactions", len(places) - _MOST_NAMED
    shown = ", ".join(map(str, places[:_MOST_NAMED])) + (f" and {more} more" if more > 0 else "")
    seen = f"readers of {shown} wait for {reason}"
    return problem(name, _AREA, what, seen, topic=shlex.quote(places[0].topic)) if name else ok(_AREA, what, seen)


def _oldest(open_: Sequence[TransactionDescription], now_ms: int) -> str:
    """Return what readers wait for that is no problem, unless its producer is dead. That cannot be seen from here."""
    oldest = min(open_, key=lambda each: each.start_time_ms or now_ms)
    age_s = max(0, now_ms - (oldest.start_time_ms or now_ms)) / 1000
    more = len({each.transactional_id for each in open_}) - 1
    others = f" and {more} more" if more else ""
    return (
        f"{one_line(oldest.transactional_id)}{others}, open for {age_s:,.0f} s, which is within its timeout of"
        f" {oldest.timeout_ms / 1000:,.0f} s. If its query or application is dead, the brokers abort it when the"
        " timeout is over, or the query's next start does"
    )


def _late(transaction: TransactionDescription) -> str:
    timeout_s = transaction.timeout_ms / 1000
    return f"{one_line(transaction.transactional_id)}, open for longer than its timeout of {timeout_s:,.0f} s"


def _is_late(transaction: TransactionDescription, now_ms: int) -> bool:
    start_ms = transaction.start_time_ms
    return start_ms is not None and now_ms - start_ms > transaction.timeout_ms + _GRACE_MS
