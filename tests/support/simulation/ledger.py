"""The application's sends and their callbacks. The checker compares them with the logs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from support.fake_clock import FakeClock

from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.producer.futures import FutureRecordMetadata, RecordMetadata, RunMetadata


@dataclass(frozen=True, slots=True)
class SentRecord:
    """One record as it was sent; `value` begins with the record's number."""

    number: int
    key: bytes | None
    value: bytes
    partition: int | None
    timestamp_ms: int | None
    headers: tuple[tuple[str, bytes | None], ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a callback, for `count` records from `base_offset` on."""

    at_ms: int
    partition: int
    base_offset: int
    count: int
    error: KafkaError | None


@dataclass(slots=True, eq=False)
class Call:
    """One `send`, or one `send_columns` with a row per record."""

    number: int
    topic: str
    records: list[SentRecord]
    is_block: bool
    began_ms: int
    returned_ms: int = -1
    raised: BaseException | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    future: FutureRecordMetadata | None = None

    def __str__(self) -> str:
        first, last = self.records[0].number, self.records[-1].number
        return f"{'block' if self.is_block else 'row'} {first}" + (f"-{last}" if last > first else "")

    @property
    def settled(self) -> int:
        """The number of records in callbacks, with repetitions."""
        return sum(outcome.count for outcome in self.outcomes)

    @property
    def is_settled(self) -> bool:
        return self.raised is not None or self.settled >= len(self.records)


class Ledger:
    """Every call, in order. One appender."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self.calls: list[Call] = []
        self.record_count = 0

    def __iter__(self) -> Iterator[Call]:
        return iter(self.calls)

    def begin(self, topic: str, records: list[SentRecord], is_block: bool) -> Call:
        call = Call(len(self.calls), topic, records, is_block, self._clock.now_ms())
        self.calls.append(call)
        return call

    def next_number(self) -> int:
        self.record_count += 1
        return self.record_count - 1

    def note_record_outcome(self, call: Call, metadata: RecordMetadata, error: KafkaError | None) -> Outcome:
        return self._heard(call, Outcome(self._clock.now_ms(), metadata.partition, metadata.offset, 1, error))

    def note_run_outcome(self, call: Call, run: RunMetadata, error: KafkaError | None) -> Outcome:
        outcome = Outcome(self._clock.now_ms(), run.partition, run.base_offset, run.record_count, error)
        return self._heard(call, outcome)

    def _heard(self, call: Call, outcome: Outcome) -> Outcome:
        call.outcomes.append(outcome)
        return outcome
