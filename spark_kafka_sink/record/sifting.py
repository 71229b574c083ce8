"""Rows that Kafka can never take, found by masks over the columns of a batch before these become records.

Only faults that no retry mends: a topic without a valid name, a partition that the topic does not have, a timestamp or
header that no record can have, and a record above a limit. Python code runs for the rows that are found, and not for
the others. The rules and their texts are those of the code that would refuse the row. Holds no state; any thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pat

from spark_kafka_sink.common.errors import (
    InvalidTopicError,
    KafkaError,
    RecordTooLargeError,
    SchemaError,
    SerializationError,
)
from spark_kafka_sink.record.arrow import BoolArray, Int64Array, as_binary, index_array, int_values, null_mask
from spark_kafka_sink.record.batch import HEADER_SIZE, seal
from spark_kafka_sink.record.codecs import Codec
from spark_kafka_sink.record.columns import (
    FIRST_USUAL_MS,
    LAST_MS,
    NO_TIMESTAMP,
    PER_SECOND,
    RecordColumns,
    before_1970_text,
    early_text,
    late_text,
)
from spark_kafka_sink.record.encoder import (
    encode_rows,
    lone_record_sizes,
    record_size_upper_bound,
    record_size_upper_bounds,
    tight_record_size_upper_bounds,
)
from spark_kafka_sink.record.headers import Header, header_lists, misnamed_rows
from spark_kafka_sink.record.tables import HEADERS, KEY, PARTITION, TIMESTAMP, TOPIC, VALUE

Columns: TypeAlias = Mapping[str, pa.Array]
"""The columns of a batch by the name of the field of a record. `value` is always there."""

NO_TOPIC_NAME: Final = "the topic is null: give the row a topic, or set the option topic"
OF_DECISIONS: Final = "the topic is that of the decisions of exactly-once delivery, to which only its drivers write"
_OF_BROKERS: Final = "the topic is one of Kafka's own, to which only brokers write"
_TOPIC_NAME: Final = re.compile(r"(?!\.{1,2}$)[a-zA-Z0-9._-]{1,249}")
_INTERNAL: Final = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state"})
"""Brokers refuse the records of clients for these (org.apache.kafka.common.internals.Topic)."""
_MOST_SECONDS: Final = 2**63 // 1000 - 1


@dataclass(frozen=True, slots=True)
class SiftRules:
    """What the sink's own options say about a row.

    `topic`: of every row; None takes it from the column. `early_advice`: as for `epoch_ms`, None allows numbers before
    1980. `max_bytes`: the most bytes of a record with the header of a batch, by the option `size_setting`. `codec`:
    that of the producer. `header`: what each record gets that has no header of this name; it is not in the columns.
    `decision_topic`: to which no row may go.
    """

    topic: str | None
    early_advice: str | None
    max_bytes: int
    size_setting: str
    codec: Codec
    header: Header | None = None
    decision_topic: str | None = None


class TopicLimits(NamedTuple):
    """What the brokers say about a topic. None: they do not say it, and no row is refused because of it."""

    partitions: int | None = None
    max_message_bytes: int | None = None
    """The most bytes of a batch, compressed and with its header."""
    is_invalid: bool = False
    """Whether the brokers say that no topic can have this name. It is a fault of rows that name it in a column."""


class LimitsOf(Protocol):
    """Tells the limits of a topic, at least as new as a row needs that they refuse."""

    def __call__(self, topic: str, highest: int | None, largest: int | None = None) -> TopicLimits:
        """Return the limits. `highest`: the highest partition that rows name, None if they name none. `largest`: the
        bytes of the largest batch with one of the rows alone, None if it is not known or small.
        """
        ...


class Unwritable(NamedTuple):
    """A row that can never be written. `row` counts from 0 in the batch. `reason` has nothing of the row's contents but
    numbers and names.
    """

    row: int
    error: type[KafkaError]
    reason: str
    texts: Mapping[str, bytes] = MappingProxyType({})
    """JSON text in place of cells that have no bytes in their format: `value`, `key`."""
    lost: frozenset[str] = frozenset()
    """What the columns lack of the row, because neither bytes nor text can hold it: `value`, `key`, `headers`."""

    def joined(self, other: Unwritable) -> Unwritable:
        """Return what both know of one row. The reason is that of the first."""
        return self._replace(texts={**other.texts, **self.texts}, lost=self.lost | other.lost)


class RowContent(NamedTuple):
    """What an unwritable row has. `timestamp_ms` is None if it was not given, and may be a time that no record can
    have: then `has_valid_time` is false. A header without a name has the name "".
    """

    fault: Unwritable
    topic: str | None
    partition: int | None
    timestamp_ms: int | None
    has_valid_time: bool
    key: bytes | None
    value: bytes | None
    headers: list[Header]
    as_json: tuple[str, ...] = ()
    """Which of `value` and `key` are JSON text, because they have no bytes in their format."""


def topic_fault(name: str) -> str | None:
    """Return why no client can write to a topic of this name; None if it can
    (org.apache.kafka.common.internals.Topic).
    """
    if _TOPIC_NAME.fullmatch(name) is None:
        return InvalidTopicError.sentence
    return _OF_BROKERS if name in _INTERNAL else None


def unwritable_rows(
    columns: Columns, rules: SiftRules, limits_of: LimitsOf | None, known: Iterable[Unwritable] = ()
) -> list[Unwritable]:
    """Return the rows of a batch that can never be written, in their order, each with its first fault. `limits_of` None
    leaves out what only brokers know. `known`: rows of which it is known already; they are not checked.

    Columns as `epoch_ms` and `RecordColumns` take them, and `topic` as string or binary. Raises their errors for wrong
    types, and those of `limits_of`.
    """
    search = _Search(len(columns[VALUE]), known)
    topics = _topics(columns.get(TOPIC), rules.topic)
    partitions = _optional_ints(columns.get(PARTITION), NO_PARTITION)
    if rules.topic is None:
        _check_topics(search, topics, rules.decision_topic)
    if partitions is not None:
        negative = (partitions < 0) & (partitions != NO_PARTITION)
        search.note(negative, SerializationError, lambda row: f"partition {partitions[row]} is negative")
    _check_times(search, columns.get(TIMESTAMP), rules.early_advice)
    _check_headers(search, columns.get(HEADERS))
    sizes = _check_sizes(search, columns, rules)
    if limits_of is not None:
        _check_limits(search, _Rows(columns, topics, partitions, sizes), rules, limits_of)
    return sorted(search.found)


def without_rows(columns: Columns, rows: Sequence[Unwritable]) -> Columns:
    """Return the columns without `rows`, in the order of the others. No copy if there are none."""
    if not rows:
        return columns
    keep = np.ones(len(columns[VALUE]), np.bool_)
    keep[[each.row for each in rows]] = False
    kept = index_array(np.flatnonzero(keep))
    return {name: column.take(kept) for name, column in columns.items()}


def contents(columns: Columns, rows: Sequence[Unwritable], rules: SiftRules) -> list[RowContent]:
    """Return the contents of `rows`, one Python object for each cell."""
    at = index_array(np.array([each.row for each in rows], np.int64))
    chosen = {name: column.take(at) for name, column in columns.items()}
    nothing: list[None] = [None] * len(rows)
    binary = {name: as_binary(chosen[name], name).to_pylist() for name in (VALUE, KEY, TOPIC) if name in chosen}
    topics = [rules.topic] * len(rows) if rules.topic is not None else [_text(name) for name in binary[TOPIC]]
    partitions = chosen[PARTITION].to_pylist() if PARTITION in chosen else nothing
    headers = header_lists(chosen[HEADERS]) if HEADERS in chosen else nothing
    times = _times(chosen.get(TIMESTAMP), rules.early_advice)
    found = []
    for index, fault in enumerate(rows):
        stamp = None if times is None or times.is_absent[index] else int(times.ms[index])
        found.append(
            RowContent(
                fault,
                topics[index],
                partitions[index],
                stamp,
                times is None or not times.is_faulty[index],
                fault.texts.get(KEY, binary[KEY][index] if KEY in binary else None),
                fault.texts.get(VALUE, binary[VALUE][index]),
                [_header(each) for each in headers[index] or ()],
                tuple(fault.texts),
            )
        )
    return found


def lone_batch_size(key: bytes | None, value: bytes | None, headers: Sequence[Header], codec: Codec) -> int:
    """Return the bytes of a batch with this record alone, compressed."""
    run = encode_rows([key], [value], [headers], [0], 0, 0)
    return seal([run.chunk], 1, 0, 0, codec).size


def sendable_size(content: RowContent, headers: Sequence[Header], rules: SiftRules) -> int | None:
    """Return the bytes of a batch with a record of the key and value of `content`, and `headers`, alone. None if the
    producer refuses it.
    """
    if record_size_upper_bound(content.key, content.value, headers) + HEADER_SIZE > rules.max_bytes:
        return None
    return lone_batch_size(content.key, content.value, headers, rules.codec)


def _header(entry: Mapping[str, bytes | str | None] | None) -> Header:
    name, value = (None, None) if entry is None else entry.values()
    content = value.encode() if isinstance(value, str) else value
    return _text(name) or "", content


def _text(name: bytes | str | None) -> str | None:
    return name.decode(errors="replace") if isinstance(name, bytes) else name


# ---- the search ------------------------------------------------------------------------------------------------------

NO_PARTITION: Final = np.iinfo(np.int64).min
"""In place of a null: no int32 has this value."""


class _Search:
    """The rows that were found so far. `is_bad` has one bool for each row."""

    def __init__(self, rows: int, known: Iterable[Unwritable]) -> None:
        self.found = list(known)
        self.is_bad: BoolArray = np.zeros(rows, np.bool_)
        self.is_bad[[each.row for each in self.found]] = True

    def note(self, mask: BoolArray, error: type[KafkaError], reason: Callable[[int], str]) -> None:
        """Note the rows of `mask` that were not found before."""
        new = np.flatnonzero(mask & ~self.is_bad).tolist()
        self.is_bad[new] = True
        self.found += [Unwritable(row, error, reason(row)) for row in new]


class _Topics(NamedTuple):
    """The topics of a batch, and for each row the index of its topic: -1 for null, None if all rows have the one."""

    names: list[str]
    of_row: npt.NDArray[np.int32] | None


class _Rows(NamedTuple):
    """A batch in the checks of limits. `sizes`: upper bounds of the records, without the header of a batch; 0 for rows
    that were found before.
    """

    columns: Columns
    topics: _Topics
    partitions: Int64Array | None
    sizes: Int64Array


def _topics(column: pa.Array | None, option: str | None) -> _Topics:
    if option is not None:
        return _Topics([option], None)
    encoded = as_binary(column, TOPIC).dictionary_encode()
    return _Topics([_text(name) or "" for name in encoded.dictionary.to_pylist()], int_values(encoded.indices, -1))


def _optional_ints(column: pa.Array | None, null: int) -> Int64Array | None:
    if column is None or column.null_count == len(column):
        return None
    nulls = null_mask(column)
    values = int_values(column).astype(np.int64)
    return values if nulls is None else np.where(nulls, null, values)


def _check_topics(search: _Search, topics: _Topics, decision_topic: str | None) -> None:
    assert topics.of_row is not None
    search.note(topics.of_row < 0, SchemaError, lambda _: NO_TOPIC_NAME)
    for index, name in enumerate(topics.names):
        fault = OF_DECISIONS if name == decision_topic else topic_fault(name)
        if fault is not None:
            search.note(topics.of_row == index, InvalidTopicError, partial(_same, fault))


def _same(fault: str, _row: int) -> str:
    return fault


_Sizes = TypeVar("_Sizes", int, Int64Array)


class _Times(NamedTuple):
    """Timestamps: as counts of `unit` (None: numbers of ms), as ms, and what is wrong with them, for each row."""

    unit: str | None
    counts: Int64Array
    ms: Int64Array
    is_absent: BoolArray
    is_before_1970: BoolArray
    is_late: BoolArray
    is_early: BoolArray

    @property
    def is_faulty(self) -> BoolArray:
        return self.is_before_1970 | self.is_late | self.is_early


def _times(column: pa.Array | None, early_advice: str | None) -> _Times | None:
    """Judge timestamps as `epoch_ms` does."""
    if column is None or column.null_count == len(column):
        return None
    unit = column.type.unit if pat.is_timestamp(column.type) else None
    a_second = PER_SECOND[unit]
    counts = int_values(column.cast(pa.int64()))
    nulls = null_mask(column)
    is_absent = np.zeros(len(column), np.bool_) if nulls is None else nulls
    if a_second >= 1000:
        is_absent = is_absent | (counts == NO_TIMESTAMP * a_second // 1000)
        ms = counts // (a_second // 1000)
    else:
        ms = np.clip(counts, -_MOST_SECONDS, _MOST_SECONDS) * (1000 // a_second)
    is_early = (ms >= 0) & (ms < FIRST_USUAL_MS) & (unit is None and early_advice is not None)
    given = ~is_absent
    return _Times(unit, counts, ms, is_absent, (counts < 0) & given, (ms > LAST_MS) & given, is_early & given)


def _check_times(search: _Search, column: pa.Array | None, early_advice: str | None) -> None:
    times = _times(column, early_advice)
    if times is None:
        return
    unit = times.unit or "ms"
    counts, ms, whose = times.counts, times.ms, "The timestamp"
    search.note(times.is_before_1970, SchemaError, lambda row: before_1970_text(whose, f"{counts[row]} {unit}"))
    search.note(times.is_late, SchemaError, lambda row: late_text(whose, int(ms[row])))
    search.note(times.is_early, SchemaError, lambda row: early_text(whose, int(ms[row])) + (early_advice or ""))


def _check_headers(search: _Search, column: pa.Array | None) -> None:
    if column is None:
        return
    unnamed, not_utf_8 = misnamed_rows(column)
    search.note(unnamed, SerializationError, lambda _: "a header has no name")
    search.note(not_utf_8, SerializationError, lambda _: "the name of a header is not UTF-8")


def _check_sizes(search: _Search, columns: Columns, rules: SiftRules) -> Int64Array:
    """Note the records that the producer refuses. Return the sizes as in `_Rows`."""
    good = np.flatnonzero(~search.is_bad)
    sizes = np.zeros(len(search.is_bad), np.int64)
    if not len(good):
        return sizes
    records = _records(columns, good, rules.header)
    bounds = record_size_upper_bounds(records)
    if int(bounds.max()) + HEADER_SIZE > rules.max_bytes:
        bounds = tight_record_size_upper_bounds(records)
    sizes[good] = bounds
    search.note(
        sizes + HEADER_SIZE > rules.max_bytes,
        RecordTooLargeError,
        lambda row: (
            f"the record takes {sizes[row] + HEADER_SIZE} bytes, more than {rules.size_setting}={rules.max_bytes}"
        ),
    )
    return sizes


def _records(columns: Columns, rows: npt.NDArray[np.intp], header: Header | None) -> RecordColumns:
    """Return the contents of `rows` (ascending) as records with the `header`, without timestamps and partitions."""
    chosen = {name: columns[name] for name in (VALUE, KEY, HEADERS) if name in columns}
    if len(rows) < len(columns[VALUE]):
        at = index_array(rows)
        chosen = {name: column.take(at) for name, column in chosen.items()}
    records = RecordColumns(chosen[VALUE], chosen.get(KEY), chosen.get(HEADERS))
    return records if header is None else records.with_header(header)


def _check_limits(search: _Search, rows: _Rows, rules: SiftRules, limits_of: LimitsOf) -> None:
    """Note the rows that the brokers would refuse."""
    names, of_row = rows.topics
    good = np.flatnonzero(~search.is_bad)
    of_good = np.zeros(len(good), np.int32) if of_row is None else of_row[good]
    largest = np.full(len(names), -1, np.int64)
    np.maximum.at(largest, of_good, rows.sizes[good])
    highest = np.full(len(names), NO_PARTITION)
    if rows.partitions is not None:
        np.maximum.at(highest, of_good, rows.partitions[good])
    for index, name in enumerate(names):
        if largest[index] < 0:  # no good row
            continue
        named = None if highest[index] == NO_PARTITION else int(highest[index])
        limits = limits_of(name, named)
        is_own = np.ones(len(search.is_bad), np.bool_) if of_row is None else of_row == index
        if limits.is_invalid and rules.topic is None:  # a wrong option topic is no row's fault: the send fails
            search.note(is_own, InvalidTopicError, lambda _: InvalidTopicError.sentence)
        if rows.partitions is not None and named is not None:
            _check_partitions(search, rows.partitions, is_own, limits.partitions)
        most = limits.max_message_bytes
        if most is not None and _most_of_batch(int(largest[index]), rules.codec) > most:
            _check_message_sizes(search, rows, is_own, rules, most, partial(limits_of, name, None))


def _check_partitions(search: _Search, partitions: Int64Array, is_own: BoolArray, count: int | None) -> None:
    if count is not None:
        is_wrong = is_own & (partitions >= count)
        search.note(
            is_wrong, SerializationError, lambda row: f"partition {partitions[row]}: the topic has 0 to {count - 1}"
        )


def _most_of_batch(size: _Sizes, codec: Codec) -> _Sizes:
    """Return the most bytes of a batch with one record of `size` bytes. Codecs make some records larger: snappy by at
    most a sixth and 32 bytes, the others by less; its framing adds 16 bytes, and 4 for each 64 KiB.
    """
    return size + HEADER_SIZE if codec.id == 0 else size + size // 5 + HEADER_SIZE + 64


def _check_message_sizes(
    search: _Search,
    rows: _Rows,
    is_own: BoolArray,
    rules: SiftRules,
    most: int,
    limits_for: Callable[[int], TopicLimits],
) -> None:
    """Note the records that are larger than max.message.bytes alone in a batch. The compressed size is found by
    compressing the records that may be too large. `limits_for`: the limits for a batch of so many bytes.
    """
    codec = rules.codec
    suspects = np.flatnonzero(is_own & ~search.is_bad & (_most_of_batch(rows.sizes, codec) > most))
    if not len(suspects):
        return
    records = _records(rows.columns, suspects, rules.header)
    sizes = np.zeros(len(search.is_bad), np.int64)
    sizes[suspects] = lone_record_sizes(records) + HEADER_SIZE
    if codec.id:
        for index, row in enumerate(suspects.tolist()):
            key = None if records.key is None else records.key[index].as_py()
            own = () if records.headers is None else map(_header, records.headers[index].as_py())
            sizes[row] = lone_batch_size(key, records.value[index].as_py(), list(own), codec)
    newest = limits_for(int(sizes.max())).max_message_bytes
    if newest is not None:
        search.note(
            sizes > newest,
            RecordTooLargeError,
            lambda row: f"the record takes {sizes[row]} bytes, more than max.message.bytes={newest} of the topic",
        )
