"""A thread that sends numbered records, by rows and by columns, during faults; their outcomes are kept as a history.

The workload's thread sends, the producer's thread reports outcomes, and the test's thread waits and checks.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count, pairwise
from typing import Any, TypeAlias

from support.background import Background
from support.history import History, Outcome, Read, Sent, summary
from support.librdkafka import place_of, read_topic, text_of

from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.producer.futures import RecordMetadata, RunMetadata
from spark_kafka_sink.producer.kafka_producer import KafkaProducer
from spark_kafka_sink.record.columns import RecordColumns

Place: TypeAlias = tuple[str, int]
_names = count(1)


def draw_settings(rng: random.Random) -> dict[str, Any]:
    """Return random settings under which all guarantees must hold, with timeouts that make tests short."""
    return {
        "compression.type": rng.choice(("none", "none", "lz4", "zstd", "gzip", "snappy")),
        "batch.size": rng.choice((1_000, 16_384, 262_144)),
        "linger.ms": rng.choice((0, 5, 20)),
        "max.in.flight.requests.per.connection": rng.choice((1, 2, 5, 5)),
        "request.timeout.ms": 1_500,
        "delivery.timeout.ms": 60_000,
    }


class Ledger:
    """The records that were sent, and their outcomes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sent: list[Sent] = []
        self.errors: list[KafkaError] = []
        self.acknowledged_at: list[float] = []
        """Time of each record's acknowledgement, by time.monotonic."""
        self.failed_after_s: list[float] = []
        """From the return of the call that sent it, which may wait for metadata: then delivery.timeout.ms begins."""
        self.duplicated: list[str] = []
        """Outcomes after the first. An exception of a callback is only logged, and fails no test."""
        self.by_place: dict[Place, list[Sent]] = defaultdict(list)
        self._sent_at: dict[str, float] = {}

    def add(self, place: Place, padding: int = 0, transaction: str | None = None) -> Sent:
        value = f"{self.name}-{len(self.sent)}" + "." * padding
        record = Sent(value, *place, stream=self.name, transaction=transaction)
        self.sent.append(record)
        self._sent_at[value] = time.monotonic()
        self.by_place[place].append(record)
        return record

    def returned(self, records: Iterable[Sent]) -> None:
        """Note that the call that sent them has returned."""
        now = time.monotonic()
        for record in records:
            if record.value in self._sent_at:
                self._sent_at[record.value] = now

    def settle(self, record: Sent, offset: int, error: KafkaError | None) -> None:
        if record.outcome is not Outcome.UNKNOWN:
            self.duplicated.append(f"{record}: {error or offset}")
            return
        sent_at = self._sent_at.pop(record.value)
        if error is None:
            record.outcome, record.offset = Outcome.YES, offset
            self.acknowledged_at.append(time.monotonic())
        else:
            record.outcome = Outcome.NO
            self.errors.append(error)
            self.failed_after_s.append(time.monotonic() - sent_at)

    def check(self) -> None:
        """Check that no record has had more than one outcome."""
        assert not self.duplicated, f"{len(self.duplicated)} outcomes too many: {self.duplicated[:3]}"

    def of_row(self, record: Sent) -> Callable[[RecordMetadata, KafkaError | None], None]:
        """Return the callback of one row."""
        return lambda metadata, error: self.settle(record, metadata.offset, error)

    def of_columns(self, records: Sequence[Sent]) -> Callable[[RunMetadata, KafkaError | None], None]:
        """Return the callback of a block. Its runs come in the order of each partition's rows, except after an abort:
        then unsent rows fail first, while earlier ones are still in flight.
        """
        waiting: dict[int, deque[Sent]] = defaultdict(deque)
        for record in records:
            assert record.partition is not None
            waiting[record.partition].append(record)

        def note(run: RunMetadata, error: KafkaError | None) -> None:
            rows = waiting[run.partition]
            if run.record_count > len(rows):
                self.duplicated.append(f"{run} for {len(rows)} records: {error}")
                return
            fails_from_the_end = error is not None and rows[0].transaction is not None
            for index in range(run.record_count):
                offset = -1 if run.base_offset < 0 else run.base_offset + index
                self.settle(rows.pop() if fails_from_the_end else rows.popleft(), offset, error)

        return note


class Workload(Background):
    """A context manager: sends until the block ends.

    `places`: topic and partition of the records, in turn. `records_a_second`: an approximate rate. `rng` decides the
    share of records that go in blocks, and their sizes.
    """

    def __init__(
        self, producer: KafkaProducer, places: Sequence[Place], rng: random.Random, records_a_second: float = 2_000
    ) -> None:
        self.producer = producer
        self.ledger = Ledger(f"w{next(_names)}")
        self._places = list(places)
        self._rng = random.Random(rng.random())
        super().__init__(f"workload-{self.ledger.name}", 20 / records_a_second)

    def _step(self) -> None:
        send = self._send_rows if self._rng.random() < 0.5 else self._send_columns
        send(20)

    def _next(self, number: int) -> list[Sent]:
        padding = self._rng.choice((0, 10, 200))
        return [self.ledger.add(self._rng.choice(self._places), padding) for _ in range(number)]

    def _send_rows(self, number: int) -> None:
        for record in self._next(number):
            self.producer.send(
                record.topic, record.value, partition=record.partition, on_completion=self.ledger.of_row(record)
            )
            self.ledger.returned([record])

    def _send_columns(self, number: int) -> None:
        by_topic: dict[str, list[Sent]] = defaultdict(list)
        for record in self._next(number):
            by_topic[record.topic].append(record)
        for topic, records in by_topic.items():
            partitions = [record.partition for record in records]
            columns = RecordColumns.from_rows([record.value for record in records], partitions=partitions)
            try:
                self.producer.send_columns(topic, columns, self.ledger.of_columns(records))
                self.ledger.returned(records)
            except KafkaError as error:
                self.ledger.errors.append(error)

    # ---- the test's thread -------------------------------------------------------------------------------------------

    def await_acknowledged(self, number: int, places: Sequence[Place] | None = None, within_s: float = 40.0) -> None:
        """Wait until `number` records that are sent from now on are acknowledged in each of these places (default:
        all).
        """
        first = {place: len(self.ledger.by_place[place]) for place in places or self._places}
        deadline = time.monotonic() + within_s
        for place, index in first.items():
            records = self.ledger.by_place[place]
            while (seen := sum(each.outcome is Outcome.YES for each in records[index:])) < number:
                assert self._failure is None, self._failure
                late = f"{seen} of {number} records of {place} are acknowledged after {within_s} s"
                assert time.monotonic() < deadline, f"{late}; the last errors were {self.ledger.errors[-3:]}"
                time.sleep(0.01)

    def acknowledged(self, *places: Place) -> int:
        return sum(
            record.outcome is Outcome.YES
            for place in places or self._places
            for record in list(self.ledger.by_place[place])
        )

    def longest_silence_s(self) -> float:
        """Return the longest time without an acknowledgement."""
        moments = self.ledger.acknowledged_at
        return max((later - earlier for earlier, later in pairwise(moments)), default=0.0)


def read_all(bootstrap_servers: str, partitions: dict[str, int], isolation_level: str) -> list[Read]:
    """Return every record of these topics, read by librdkafka."""
    return [
        Read(topic, *place_of(message), text_of(message))
        for topic, number in partitions.items()
        for message in read_topic(bootstrap_servers, topic, number, isolation_level=isolation_level)
    ]


def history_of(
    bootstrap_servers: str,
    partitions: dict[str, int],
    sent: Sequence[Sent],
    transactions: dict[str, Outcome] | None = None,
) -> History:
    committed, uncommitted = (
        read_all(bootstrap_servers, partitions, level) for level in ("read_committed", "read_uncommitted")
    )
    return History(sent, committed, uncommitted, transactions)


def assert_kept(history: History, **promise: bool) -> None:
    found = history.anomalies(**promise)
    assert not found, summary(found)


def partitions_of(places: Iterable[Place]) -> dict[str, int]:
    """Return the number of partitions to read of each topic."""
    found: dict[str, int] = {}
    for topic, partition in places:
        found[topic] = max(found.get(topic, 0), partition + 1)
    return found


def finish(bootstrap_servers: str, work: Workload, *, may_fail: bool = False, sent_besides: Sequence[Sent] = ()) -> str:
    """Stop, wait for every outcome, and compare with the records that consumers read. Return a summary in one line."""
    work.stop()
    work.producer.flush(90)
    ledger = work.ledger
    ledger.check()
    assert may_fail or not ledger.errors, ledger.errors[:3]
    assert may_fail or all(record.outcome is Outcome.YES for record in ledger.sent)
    sent = [*ledger.sent, *sent_besides]
    assert_kept(history_of(bootstrap_servers, partitions_of(ledger.by_place), sent))
    failed = sum(record.outcome is not Outcome.YES for record in ledger.sent)
    return (
        f"{len(ledger.sent)} records, {failed} of them failed, no anomaly; nothing was acknowledged for"
        f" {work.longest_silence_s():.1f} s at most"
    )
