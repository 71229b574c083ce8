"""Compares sent records and their reported outcomes with the records that consumers read. Plain data in, anomalies out:
no producer, no broker and no thread.

The rules for an acknowledged record (its transaction, if it has one, was committed):

- Readers under read_committed see it (else LOST), once with exactly-once delivery (else DUPLICATED), in its topic and
  partition (else WRONG_PLACE), at its reported offset (else OFFSET_MISMATCH).
- Records of one stream are in a partition in the order in which they were sent (else REORDERED).

A record that failed, or has no reported outcome, may be there or not, once with exactly-once delivery, and in any
order. Readers see all of a transaction or nothing (else TORN), also without a reported end. They do not see a
transaction that was aborted or never ended (else ABORTED_READ), or a record that was never sent (else PHANTOM). Both
kinds of reader see the same record at the same place (else UNSTABLE).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    LOST = "lost"
    DUPLICATED = "duplicated"
    REORDERED = "reordered"
    ABORTED_READ = "aborted read"
    TORN = "torn batch"
    WRONG_PLACE = "wrong topic or partition"
    OFFSET_MISMATCH = "offset mismatch"
    PHANTOM = "phantom"
    UNSTABLE = "unstable"


class Anomaly(NamedTuple):
    kind: Kind
    text: str

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.text}"


class Outcome(Enum):
    """The result that the sender got for a record or for a transaction's end."""

    YES = "acknowledged or committed"
    NO = "failed or aborted"
    UNKNOWN = "nothing"


@dataclass(slots=True)
class Sent:
    """A record. `value` is unique in the history.

    `stream`: the source of an order; records of one stream are listed in the order of sending. `partition`: None for
    any partition. `offset`: None if no offset was reported.
    """

    value: str
    topic: str
    partition: int | None = None
    outcome: Outcome = Outcome.UNKNOWN
    offset: int | None = None
    stream: str = ""
    transaction: str | None = None


class Read(NamedTuple):
    """A record as a consumer returns it."""

    topic: str
    partition: int
    offset: int
    value: str


@dataclass(frozen=True)
class History:
    """`transactions`: the outcome of each, by the name that its records have; one that is missing never ended.

    `committed` and `uncommitted`: the records that readers under read_committed and read_uncommitted saw at the end;
    `uncommitted` may be left out.
    """

    sent: Sequence[Sent]
    committed: Sequence[Read]
    uncommitted: Sequence[Read] | None = None
    transactions: Mapping[str, Outcome] | None = None

    def anomalies(self, *, exactly_once: bool = True, in_order: bool = True) -> list[Anomaly]:
        """Yield the anomalies. `exactly_once=False` allows duplicates. `in_order=False` allows another order, as after
        a task that runs again.
        """
        found = [*self._places(self.committed), *self._losses(), *self._transactions_seen(), *self._same_view()]
        if self.uncommitted is not None:
            found += self._places(self.uncommitted)
        if exactly_once:
            found += self._doubles(self.committed)
            if self.uncommitted is not None:
                found += self._doubles(self.uncommitted)
        if in_order:
            found += self._orders()
        return list(dict.fromkeys(found))

    def ending(self, record: Sent) -> Outcome:
        """Return whether readers under read_committed must see the record."""
        if record.transaction is None:
            return record.outcome
        ended = (self.transactions or {}).get(record.transaction, Outcome.NO)
        return record.outcome if ended is Outcome.YES else ended

    def _by_value(self) -> dict[str, Sent]:
        found = {record.value: record for record in self.sent}
        assert len(found) == len(self.sent), "values are not unique"
        return found

    def _losses(self) -> Iterator[Anomaly]:
        seen = {read.value for read in self.committed}
        for record in self.sent:
            if self.ending(record) is Outcome.YES and record.value not in seen:
                yield Anomaly(Kind.LOST, f"{record} was acknowledged, and readers do not see it")

    def _doubles(self, reads: Iterable[Read]) -> Iterator[Anomaly]:
        places: dict[str, list[Read]] = defaultdict(list)
        for read in reads:
            places[read.value].append(read)
        for value, found in places.items():
            if len(found) > 1:
                where = ", ".join(f"{read.topic}-{read.partition}@{read.offset}" for read in found)
                yield Anomaly(Kind.DUPLICATED, f"{value!r} is at {where}")

    def _places(self, reads: Iterable[Read]) -> Iterator[Anomaly]:
        sent = self._by_value()
        at: dict[str, set[tuple[str, int, int]]] = defaultdict(set)
        for read in reads:
            at[read.value].add(read[:3])
            record = sent.get(read.value)
            if record is None:
                yield Anomaly(Kind.PHANTOM, f"{read} was never sent")
            elif read.topic != record.topic or record.partition not in (None, read.partition):
                yield Anomaly(Kind.WRONG_PLACE, f"{record} is at {read}")
        for value, places in at.items():
            record = sent.get(value)
            if record is None or record.outcome is not Outcome.YES or record.offset is None or record.offset < 0:
                continue
            reported = (record.topic, record.partition, record.offset)
            if record.partition is not None and reported not in places:
                yield Anomaly(Kind.OFFSET_MISMATCH, f"{record} is at {sorted(places)}")

    def _orders(self) -> Iterator[Anomaly]:
        first: dict[str, Read] = {}
        for each in self.committed:
            first.setdefault(each.value, each)
        last: dict[tuple[str, str, int], tuple[Sent, Read]] = {}
        for record in self.sent:
            read = first.get(record.value)
            if read is None or self.ending(record) is not Outcome.YES:
                continue
            key = (record.stream, read.topic, read.partition)
            before = last.get(key)
            if before is not None and before[1].offset > read.offset:
                yield Anomaly(Kind.REORDERED, f"{record} at {read.offset} was sent after {before[0]} at {before[1]}")
            last[key] = (record, read)

    def _transactions_seen(self) -> Iterator[Anomaly]:
        seen = {read.value for read in self.committed}
        counts: dict[str, Counter[bool]] = defaultdict(Counter)
        for record in self.sent:
            if record.transaction is not None:
                counts[record.transaction][record.value in seen] += 1
        for name, count in counts.items():
            ended = (self.transactions or {}).get(name, Outcome.NO)
            if ended is Outcome.NO and count[True]:
                yield Anomaly(Kind.ABORTED_READ, f"{count[True]} records of {name}, which was not committed, are read")
            elif count[True] and count[False]:
                yield Anomaly(Kind.TORN, f"{count[True]} of {count.total()} records of {name} are read")

    def _same_view(self) -> Iterator[Anomaly]:
        if self.uncommitted is None:
            return
        everything = set(self.uncommitted)
        for read in self.committed:
            if read not in everything:
                yield Anomaly(Kind.UNSTABLE, f"{read} is read under read_committed only")


def summary(anomalies: Sequence[Anomaly], most: int = 5) -> str:
    """Return counts by kind, and the first few of each in full."""
    lines = []
    for kind, count in Counter(anomaly.kind for anomaly in anomalies).items():
        lines.append(f"{count} {kind.value}")
        lines += [f"  {anomaly.text}" for anomaly in [each for each in anomalies if each.kind is kind][:most]]
    return "\n".join(lines) or "no anomaly"
