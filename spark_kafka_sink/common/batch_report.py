"""`BatchReport`: what became of one batch of the sink, as a value without rows, and its JSON.

It belongs to no room above, so that it can be used without Spark: read from a log, or handed to another system.
docs/reports.md explains each field.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

VERSION: Final = 1
"""Of the JSON. A newer release may add fields under the same version; a reader passes over fields that it does not
know.
"""
COMPLETE: Final = "complete"
SKIPPED: Final = "skipped"
FAILED: Final = "failed"
OUTCOMES: Final = (COMPLETE, SKIPPED, FAILED)


@dataclass(frozen=True, slots=True)
class WrittenPartition:
    """The records of a batch that one partition of a topic has acknowledged.

    Between the two offsets there may be records of others: other writers, failed attempts of the same tasks, and the
    control records of transactions. So `records` is at most `last_offset - first_offset + 1`.
    """

    topic: str
    partition: int
    records: int
    bytes: int
    """Of encoded records, before compression."""
    first_offset: int
    """The lowest offset of the records; -1 if the broker gave none (acks=0, or a duplicate that it had forgotten)."""
    last_offset: int
    """The highest offset of the records, -1 as `first_offset`."""
    records_without_offset: int = 0
    """Those of `records` for which the broker gave no offset. The two offsets are those of the others."""


@dataclass(frozen=True, slots=True)
class BatchReport:
    """What became of one micro-batch or batch write of the sink. It has counts, names and times, and nothing of the
    rows.
    """

    outcome: str
    """`complete`; `skipped`: an earlier run of the query has committed the batch (exactly-once delivery); `failed`."""
    guarantee: str
    """`at-least-once` or `exactly-once`."""
    began_ms: int
    """Milliseconds since 1970, by the driver's clock, as `ended_ms`."""
    ended_ms: int
    error: str | None = None
    """The class of the error of a failed batch, with its module; None if Spark does not tell the sink."""
    query_id: str | None = None
    """Spark's id of the streaming query, which stays the same from start to start; None for a batch write."""
    query_name: str | None = None
    run_id: str | None = None
    """Spark's id of this start of the query."""
    batch_id: int | None = None
    """Spark's number of the micro-batch; None for a batch write."""
    tasks: int = 0
    """Tasks whose records are counted here. Of several attempts of a task, Spark counts one."""
    batches: int = 0
    """Record batches that were acknowledged."""
    retries: int = 0
    """Records that were sent again by a producer. Rows that Spark wrote again in another attempt are not counted."""
    skipped_records: int = 0
    """Rows of a skipped batch: the earlier run has written them."""
    partitions: tuple[WrittenPartition, ...] = ()
    """Sorted by topic and partition. Empty for a failed batch of exactly-once delivery, whose records do not count."""
    dead_letter_partitions: tuple[WrittenPartition, ...] = ()
    """The same for the topic of dead letters."""
    dead_letter_kinds: Mapping[str, int] = field(default_factory=dict)
    """Dead letters by the class of the error that names the reason."""
    durations_ms: Mapping[str, int] = field(default_factory=dict)
    """Times of the driver's phases, one after the other: `plan`, `tasks`, `decide`, `commit`."""
    task_durations_ms: Mapping[str, int] = field(default_factory=dict)
    """Times of the tasks' phases, each added up over all tasks: `read`, `encode`, `metadata`, `memory`, `acknowledge`,
    `producer`, and with a limit of the query `limit`.
    """

    @property
    def records(self) -> int:
        """Records that were acknowledged, without dead letters."""
        return sum(each.records for each in self.partitions)

    @property
    def bytes(self) -> int:
        """Bytes of these records as encoded, before compression."""
        return sum(each.bytes for each in self.partitions)

    @property
    def dead_letters(self) -> int:
        """Rows that can never be written, and went to the dead letters."""
        return sum(each.records for each in self.dead_letter_partitions)

    def to_json(self) -> str:
        """Return the report as one line of JSON in ASCII. docs/reports.md has its fields."""
        content = {"version": VERSION} | {name: _plain(getattr(self, name)) for name in (*_READERS, *_SUMS)}
        return json.dumps(content, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> BatchReport:
        """Return the report that `to_json` has written. Fields that a newer release has added are passed over.

        Raises ValueError for a text that is no report, or one of another version.
        """
        try:
            content = json.loads(text)
            if content["version"] != VERSION:
                raise ValueError(f"version {content['version']!r:.100}, and this release reads version {VERSION}")
            return cls(**{name: read(content[name]) for name, read in _READERS.items()})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"This is no report of a batch: {error!r:.300}.") from error


def _plain(value: Any) -> Any:
    """Return a value for JSON."""
    if isinstance(value, tuple):
        return [{name: getattr(place, name) for name in WrittenPartition.__slots__} for place in value]
    return dict(value) if isinstance(value, Mapping) else value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.100} is no text")
    return value


def _number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r:.100} is no whole number")
    return value


def _outcome(value: object) -> str:
    if value not in OUTCOMES:
        raise ValueError(f"outcome {value!r:.100}")
    return _text(value)


def _text_or_none(value: object) -> str | None:
    return None if value is None else _text(value)


def _number_or_none(value: object) -> int | None:
    return None if value is None else _number(value)


def _numbers(fields: Mapping[str, object]) -> dict[str, int]:
    return {name: _number(value) for name, value in fields.items()}


def _places(listed: Iterable[Mapping[str, object]]) -> tuple[WrittenPartition, ...]:
    rows = ([each[name] for name in WrittenPartition.__slots__] for each in listed)
    return tuple(WrittenPartition(_text(topic), *map(_number, numbers)) for topic, *numbers in rows)


_READERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "outcome": _outcome,
    "error": _text_or_none,
    "guarantee": _text,
    "query_id": _text_or_none,
    "query_name": _text_or_none,
    "run_id": _text_or_none,
    "batch_id": _number_or_none,
    "began_ms": _number,
    "ended_ms": _number,
    "tasks": _number,
    "batches": _number,
    "retries": _number,
    "skipped_records": _number,
    "dead_letter_kinds": _numbers,
    "durations_ms": _numbers,
    "task_durations_ms": _numbers,
    "partitions": _places,
    "dead_letter_partitions": _places,
}
"""Each field of the JSON that becomes one of the report, and what reads it."""
_SUMS: Final = ("records", "bytes", "dead_letters")
"""Fields of the JSON that follow from others."""
