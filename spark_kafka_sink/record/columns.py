"""The columns of a block of records: checked, in the layout that the encoder reads, and grouped by topic.

`RecordColumns` is a value: any thread may read it, and it does not change. The functions hold no state. Those for
timestamps say which numbers can be a timestamp, and in which unit another number probably is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_kafka_sink.common.errors import SchemaError
from spark_kafka_sink.record.arrow import (
    as_binary,
    binary_array,
    checked,
    combine,
    index_array,
    int_array,
    int_text,
    int_values,
    without,
)
from spark_kafka_sink.record.headers import (
    Header,
    decoded_chunks,
    headers_from_rows,
    normalise_headers,
    with_missing_header,
)


@dataclass(frozen=True, eq=False)
class RecordColumns:
    """Records as Arrow arrays of one length.

    - `value`, `key`: string or binary in any layout (large, view, fixed size, dictionary), kept as `binary`. A null is
      a null in Kafka. `key` None means no keys.
    - `headers`: `list<struct<key: string, value: binary>>`. A null or empty list means no headers, and a null value
      stays null.
    - `timestamp_ms`: int64, milliseconds since 1970. None or a null entry means the time of the append.
    - `partition`: int32. None or a null entry means not set.

    Chunked arrays are combined; slices are used as they are.

    Raises SchemaError for a wrong type or length. Raises SerializationError for contents that cannot be written, such
    as a header without a name or more than 2 GiB in a column. Both name the column.
    """

    value: pa.Array
    key: pa.Array | None = None
    headers: pa.Array | None = None
    timestamp_ms: pa.Array | None = None
    partition: pa.Array | None = None

    def __post_init__(self) -> None:
        value = as_binary(combine(self.value, "value"), "value")
        self._set("value", value)
        if self.key is not None:
            self._set("key", as_binary(combine(self.key, "key"), "key"))
        if self.headers is not None:
            self._set("headers", normalise_headers(combine(decoded_chunks(self.headers), "headers")))
        if self.timestamp_ms is not None:
            self._set("timestamp_ms", _of_type(self.timestamp_ms, "timestamp_ms", pa.int64()))
        if self.partition is not None:
            self._set("partition", _of_type(self.partition, "partition", pa.int32()))
        for name in ("key", "headers", "timestamp_ms", "partition"):
            column = getattr(self, name)
            if column is not None and len(column) != len(value):
                raise SchemaError(f"The column '{name}' has {len(column)} rows, the column 'value' has {len(value)}.")

    @property
    def num_rows(self) -> int:
        return len(self.value)

    def slice(self, offset: int, length: int) -> RecordColumns:
        """Return rows offset..offset+length-1. No copy."""
        return self._map(lambda column: column.slice(offset, length))

    def take(self, order: Any) -> RecordColumns:
        """Return the rows at `order` (a numpy or Arrow array of integers), in that order. One copy of each column.
        Raises SerializationError for a damaged one.
        """
        indices = order if isinstance(order, pa.Array) else index_array(order.astype(np.int64, copy=False))
        for name in ("value", "key"):
            column = getattr(self, name)
            if column is not None:
                checked(column, name)
        return self._map(lambda column: column.take(indices))

    def with_header(self, header: Header) -> RecordColumns:
        """Return the rows with this header at the end of those that have none of its name. Its value is not None. No
        copy of the other columns. Raises SerializationError above 2 GiB.
        """
        name, value = header
        assert value is not None
        changed = self._map(lambda column: column)
        changed._set("headers", with_missing_header(self.headers, name, value, self.num_rows))
        return changed

    def _map(self, change: Callable[[pa.Array], pa.Array]) -> RecordColumns:
        changed = object.__new__(RecordColumns)  # without the checks, which these columns have passed
        for name in ("value", "key", "headers", "timestamp_ms", "partition"):
            column = getattr(self, name)
            changed._set(name, None if column is None else change(column))
        return changed

    @classmethod
    def from_rows(
        cls,
        values: Sequence[bytes | str | None],
        keys: Sequence[bytes | str | None] | None = None,
        headers: Sequence[Sequence[Header] | None] | None = None,
        timestamps_ms: Sequence[int | None] | None = None,
        partitions: Sequence[int | None] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> RecordColumns:
        """Return columns of Python values, one entry per row.

        `numbers`: the number of each row for errors, its index if None. Raises SerializationError with the column and
        the first row that does not fit.
        """
        times = None if timestamps_ms is None else int_array(timestamps_ms, pa.int64(), "timestamp_ms", numbers)
        return cls(
            value=binary_array(values, "value", numbers),
            key=None if keys is None else binary_array(keys, "key", numbers),
            headers=None if headers is None else headers_from_rows(headers, numbers),
            timestamp_ms=times,
            partition=None if partitions is None else int_array(partitions, pa.int32(), "partition", numbers),
        )

    def _set(self, name: str, column: pa.Array) -> None:
        object.__setattr__(self, name, column)


def _of_type(column: pa.Array | pa.ChunkedArray, name: str, data_type: pa.DataType) -> pa.Array:
    array = combine(column, name)
    if array.type != data_type:
        raise SchemaError(f"The column '{name}' has the Arrow type {array.type}; it must be {data_type}.")
    return array


def by_topic(columns: RecordColumns, topics: pa.Array, null_text: str) -> Iterator[tuple[str, RecordColumns]]:
    """Yield (topic, its rows in their order) for each topic in `topics`, a string array with one entry per row.

    For any number of topics there is one sort and one copy of the rows; for one topic there is none. Raises SchemaError
    with `null_text` if an entry is null.
    """
    if topics.null_count:
        raise SchemaError(null_text)
    encoded = topics if pa.types.is_dictionary(topics.type) else topics.dictionary_encode()
    counts = {entry["values"]: entry["counts"] for entry in pc.value_counts(encoded.indices).to_pylist()}
    if len(counts) <= 1:
        if counts:
            yield _name(encoded.dictionary[next(iter(counts))]), columns
        return
    order = pc.sort_indices(encoded.indices)  # stable: the rows of a topic keep their order
    sorted_columns = columns.take(order)
    first = 0
    for index in sorted(counts):
        yield _name(encoded.dictionary[index]), sorted_columns.slice(first, counts[index])
        first += counts[index]


def _name(entry: pa.StringScalar) -> str:
    """Return the text of a topic. Spark's strings may hold any bytes; no topic's name has a replacement character."""
    return bytes(entry.as_buffer()).decode(errors="replace")


NO_TIMESTAMP: Final = -1
"""Kafka's number for a record without a timestamp (RecordBatch.NO_TIMESTAMP)."""
FIRST_USUAL_MS: Final = 315_532_800_000
"""1980-01-01. Seconds up to the year 11968, read as ms, lie before it."""
LAST_MS: Final = 253_402_300_799_999
"""The end of the year 9999. Microseconds from 1979 on, read as ms, lie after it."""

_YEAR_2100_MS: Final = 4_102_444_800_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_IN_MS: Final[Mapping[str, Callable[[int], int]]] = {
    "days": lambda number: number * 86_400_000,
    "seconds": lambda number: number * 1_000,
    "microseconds": lambda number: number // 1_000,
    "nanoseconds": lambda number: number // 1_000_000,
}
_REMEDIES: Final[Mapping[str, str]] = {
    "days": "multiply it by 86400000",
    "seconds": "multiply it by 1000",
    "microseconds": "divide it by 1000",
    "nanoseconds": "divide it by 1000000",
}


PER_SECOND: Final = {None: 1_000, "s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
"""By the unit of an Arrow timestamp; None: a number of ms."""


def epoch_ms(times: pa.Array, early_advice: str | None, whose: str = "A timestamp") -> pa.Array:
    """Return times as int64 milliseconds, rounded down; a null for -1 ms, which is Kafka's sign for no timestamp.

    `times`: int64 ms, or an Arrow timestamp of any unit that counts from 1970 in UTC. Raises SchemaError before 1970
    and after 9999. For a number (not a date) before 1980 too, with `early_advice` at the end of the text; None allows
    such numbers. `whose` begins each text.
    """
    if times.null_count == len(times):
        return pa.nulls(len(times), pa.int64())
    unit = times.type.unit if pa.types.is_timestamp(times.type) else None
    counts = times if unit is None else times.cast(pa.int64())
    a_second = PER_SECOND[unit]
    none = NO_TIMESTAMP * a_second // 1000 if a_second >= 1000 else None
    earliest, latest = _usual_bounds(counts)
    if earliest < 0 and none is not None and none in int_values(counts):
        counts = without(counts, none)
        earliest, latest = _usual_bounds(counts)
    if earliest < 0:
        raise SchemaError(before_1970_text(whose, f"{earliest} {unit or 'ms'}"))
    if latest * 1000 // a_second > LAST_MS:
        raise SchemaError(late_text(whose, latest * 1000 // a_second))
    if unit is not None:
        return counts.cast(times.type).cast(pa.timestamp("ms", times.type.tz), safe=False).cast(pa.int64())
    if earliest < FIRST_USUAL_MS and early_advice is not None:
        raise SchemaError(early_text(whose, earliest) + early_advice)
    return counts


def _usual_bounds(times: pa.Array) -> tuple[int, int]:
    """Return the earliest and the latest time; usual ones if all are null."""
    return timestamp_bounds(times) or (FIRST_USUAL_MS, FIRST_USUAL_MS)


def likely_unit(number: int) -> str | None:
    """Return the unit in which `number` is a time between 1980 and 2100.

    None if it is such a time in ms, or in no unit.
    """
    if FIRST_USUAL_MS <= number < _YEAR_2100_MS:
        return None
    return next((unit for unit, in_ms in _IN_MS.items() if FIRST_USUAL_MS <= in_ms(number) < _YEAR_2100_MS), None)


def timestamp_bounds(timestamps_ms: pa.Array) -> tuple[int, int] | None:
    """Return the earliest and the latest of an int64 column, or None if all are null."""
    found = pc.min_max(timestamps_ms)
    earliest, latest = found["min"].as_py(), found["max"].as_py()
    return None if earliest is None else (earliest, latest)


def latest_before(timestamps_ms: pa.Array, limit: int) -> int:
    """Return the latest of an int64 column that lies before `limit`. There must be one."""
    early = timestamps_ms.filter(pc.less(timestamps_ms, index_array(np.array([limit]))[0]))
    return int(pc.max(early).as_py())


def before_1970_text(whose: str, moment: object) -> str:
    """Return the error text for a time before 1970, which Kafka cannot store."""
    return (
        f"{whose} is {moment}, which lies before 1970, and Kafka has no such timestamps: correct it, or make it null"
        " for the time of writing."
    )


def early_text(whose: str, ms: int) -> str:
    """Return the error text for a timestamp of 0 to FIRST_USUAL_MS: what brokers do, and what to change."""
    return (
        f"{whose} is {ms}. As milliseconds since 1970 that is {date_text(ms)}, and brokers delete records that are"
        f" older than the topic's retention.ms. {_unit_text(ms)}"
    )


def date_text(ms: int) -> str:
    """Return milliseconds since 1970, up to the year 9999, as a date and a time."""
    return (_EPOCH + timedelta(milliseconds=ms)).strftime("%Y-%m-%dT%H:%M:%SZ")


def late_text(whose: str, number: int) -> str:
    """Return the error text for a number above LAST_MS."""
    return (
        f"{whose} is {int_text(number)}. As milliseconds since 1970 that lies after the year 9999, and brokers refuse"
        f" it. {_unit_text(number)}"
    )


def _unit_text(number: int) -> str:
    unit = likely_unit(number)
    if unit is None:
        return "Give milliseconds since 1970."
    return f"It looks like {unit}: {_REMEDIES[unit]}."
