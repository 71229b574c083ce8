"""Check the arguments of `send` and `send_offsets_to_transaction`, and encode them, before other code uses them.

Otherwise the Sender thread would find the error, for a whole batch. Holds no state; any thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import RecordTooLargeError, SerializationError
from spark_kafka_sink.producer.futures import Headers
from spark_kafka_sink.producer.transaction_requests import GroupMetadata
from spark_kafka_sink.record.arrow import exact_int, int_text, not_unicode
from spark_kafka_sink.record.batch import HEADER_SIZE
from spark_kafka_sink.record.columns import (
    FIRST_USUAL_MS,
    LAST_MS,
    NO_TIMESTAMP,
    RecordColumns,
    date_text,
    early_text,
    late_text,
    latest_before,
    likely_unit,
    timestamp_bounds,
)
from spark_kafka_sink.record.headers import header_pairs

log = logging.getLogger(__name__)

_LAST_OFFSET: Final = 2**63 - 1
_LAST_INT32: Final = 2**31 - 1
_USUAL_RETENTION_MS: Final = 7 * 24 * 3_600_000
"""The default of log.retention.hours. That of a topic is known only with a permission that few producers have."""
_LONGEST_TEXT: Final = 2**15 - 1
"""The most bytes of a text in a request. A broker closes the connection after a longer one."""
_TEXT: Final = f"a str that UTF-8 can hold in {_LONGEST_TEXT} bytes"


def to_bytes(part: bytes | bytearray | memoryview | str | None, name: str) -> bytes | None:
    """Return `part`, named `name` in errors, as bytes; text as UTF-8. Raises SerializationError."""
    if part is None or isinstance(part, bytes):
        return part
    if isinstance(part, str):
        try:
            return part.encode()
        except UnicodeEncodeError as cause:
            raise SerializationError(not_unicode(f"The {name} of a record", cause)) from None
    if isinstance(part, (bytearray, memoryview)):
        return bytes(part)
    raise SerializationError(f"The {name} of a record is a {type(part).__name__}; give str, bytes or None.")


def checked_headers(headers: Headers | None) -> Headers:
    """Return the headers with values in bytes.

    Raises SerializationError for headers in a form that `header_pairs` does not take, for a header without a name, and
    for a value of a wrong type.
    """
    if headers is None or (type(headers) is list and not headers):
        return ()
    checked = []
    for pair in header_pairs(headers, "a record"):
        name, value = pair
        if not (type(name) is str and name.isascii()):  # not the usual case
            if not isinstance(name, str):
                raise SerializationError(f"A header of a record has the name {name!r}; give every header a str.")
            to_bytes(name, "header name")
        if type(value) is bytes:
            checked.append(pair)
        elif type(value) is str and value.isascii():
            checked.append((name, value.encode()))
        else:
            checked.append((name, to_bytes(value, f"header {name!r}")))
    return checked


def checked_place(partition: int | None, timestamp_ms: int | None) -> tuple[int | None, int | None]:
    """Return partition and timestamp as ints. Raises SerializationError for one that no record can have."""
    if partition is not None:
        place = partition if type(partition) is int else _as_int(partition)
        if place is None or not 0 <= place <= _LAST_INT32:
            raise SerializationError(
                f"partition={_shown(partition)}: give an int from 0 to {_LAST_INT32}, or leave it out to have one"
                " chosen."
            )
        partition = place
    if timestamp_ms is not None:
        stamp = timestamp_ms if type(timestamp_ms) is int else _as_int(timestamp_ms)
        if stamp is None:
            raise SerializationError(
                f"timestamp_ms={_shown(timestamp_ms)}: give milliseconds since 1970 as an int, or leave it out for now."
            )
        if not 0 <= stamp <= LAST_MS:
            raise SerializationError(_out_of_range("timestamp_ms", stamp))
        timestamp_ms = stamp
    return partition, timestamp_ms


class SizeLimit:
    """The limit of a record: `max_bytes` with the header of a batch, by the option `setting`."""

    def __init__(self, config: ProducerConfig) -> None:
        self.max_bytes, self.setting = min(
            (config.max_request_size, "max.request.size"), (config.buffer_memory, "buffer.memory")
        )

    def check(self, topic: str, size: int) -> None:
        """Raise RecordTooLargeError for a record of `size` bytes above the limit."""
        if size + HEADER_SIZE > self.max_bytes:
            raise RecordTooLargeError(
                f"A record for topic {topic} takes {size + HEADER_SIZE} bytes, more than"
                f" {self.setting}={self.max_bytes}: raise {self.setting} (and max.message.bytes of the topic), or make"
                " the record smaller.",
                topic=topic,
                setting=self.setting,
            )


class TimestampWatch:
    """Check the timestamps of one producer. Any thread. `wall_ms` returns the time of day.

    Refuses timestamps that no record can have. Warns once of those that are probably in seconds, and once of records
    that brokers may delete at once. The caller may choose any other time.
    """

    def __init__(self, wall_ms: Callable[[], int]) -> None:
        self._wall_ms = wall_ms
        self._has_warned = self._has_warned_of_age = False

    def of_record(self, topic: str, timestamp_ms: int | None) -> None:
        """Check a timestamp that has passed `checked_place`."""
        if timestamp_ms is None:
            return
        if timestamp_ms < FIRST_USUAL_MS and not self._has_warned:
            self._warn(topic, timestamp_ms)
        self._warn_of_age(topic, timestamp_ms)

    def of_columns(self, topic: str, columns: RecordColumns) -> None:
        """Check the column of timestamps. Raises SerializationError for a timestamp that no record can have."""
        found = None if columns.timestamp_ms is None else timestamp_bounds(columns.timestamp_ms)
        if found is None:
            return
        earliest, latest = found
        if earliest < 0 or latest > LAST_MS:
            wrong = earliest if earliest < 0 else latest
            raise SerializationError(_out_of_range(f"A timestamp_ms for topic {topic}", wrong), topic=topic)
        if earliest < FIRST_USUAL_MS and not self._has_warned:
            self._warn(topic, latest_before(columns.timestamp_ms, FIRST_USUAL_MS))
        self._warn_of_age(topic, earliest)

    def _warn_of_age(self, topic: str, earliest_ms: int) -> None:
        """Brokers delete a segment by its latest timestamp, acknowledged or not (LogCleanupPolicy `delete`)."""
        if not self._has_warned_of_age and earliest_ms < self._wall_ms() - _USUAL_RETENTION_MS:
            self._has_warned_of_age = True
            log.warning(
                "Records for topic %s have timestamps as old as %s. Brokers delete records whose timestamps are older"
                " than the topic's retention.ms (7 days by default), also those that were just written. Look whether"
                " the topic keeps them, or leave out the timestamps.",
                topic,
                date_text(earliest_ms),
            )

    def _warn(self, topic: str, timestamp_ms: int) -> None:
        if likely_unit(timestamp_ms) == "seconds":
            self._has_warned = True
            log.warning("%s", early_text(f"A timestamp_ms for topic {topic}", timestamp_ms))


def _out_of_range(whose: str, timestamp_ms: int) -> str:
    if timestamp_ms > LAST_MS:
        return late_text(whose, timestamp_ms)
    none = " -1 is what consumers show for a record without a timestamp." if timestamp_ms == NO_TIMESTAMP else ""
    return (
        f"{whose} is {int_text(timestamp_ms)}, which lies before 1970: give None or null to have the time of the"
        f" send.{none}"
    )


def checked_offsets(
    offsets: Mapping[TopicPartition, tuple[int, str | None]],
) -> dict[TopicPartition, tuple[int, str | None]]:
    """Return a copy of the offsets, because the caller may change them.

    Raises SerializationError for one that cannot be sent.
    """
    checked: dict[TopicPartition, tuple[int, str | None]] = {}
    for place, value in offsets.items():
        if not (isinstance(place, tuple) and len(place) == 2 and is_sendable_text(place[0]) and _is_int32(place[1])):
            raise SerializationError(f"{place!r:.300} is not a key of offsets: give TopicPartition(topic, partition).")
        name = f"The offset of {place[0]}-{place[1]}"
        if not (isinstance(value, (tuple, list)) and len(value) == 2):
            raise SerializationError(f"{name} is {value!r}: give (next offset, text), or (next offset, None).")
        offset, text = value
        position = _as_int(offset)
        if position is None or not 0 <= position <= _LAST_OFFSET:
            raise SerializationError(f"{name} is {_shown(offset)}: give an int of 0 or more.")
        if text is not None and not is_sendable_text(text):
            raise SerializationError(f"{name} has the text {text!r:.100}: give {_TEXT}, or None.")
        checked[TopicPartition(*place)] = position, text
    return checked


def checked_group(group: GroupMetadata | str) -> GroupMetadata:
    """Return the group of the offsets. Raises SerializationError for a group that no request can name."""
    found = GroupMetadata(group) if isinstance(group, str) else group
    if not isinstance(found, GroupMetadata):
        raise SerializationError(f"The group of the offsets is {group!r:.300}: give its name, or a GroupMetadata.")
    texts = {"group_id": found.group_id, "member_id": found.member_id, "group_instance_id": found.group_instance_id}
    for name, text in texts.items():
        if not (is_sendable_text(text) or (text is None and name == "group_instance_id")):
            raise SerializationError(f"The group of the offsets has {name}={text!r:.100}: give {_TEXT}.")
    if not found.group_id:
        raise SerializationError("The group of the offsets has an empty group_id: give its name.")
    if not (found.generation_id == -1 or _is_int32(found.generation_id)):
        raise SerializationError(
            f"The group of the offsets has generation_id={found.generation_id!r:.100}: give an int, -1 for none."
        )
    if found.generation_id > 0 and not found.member_id:  # as KafkaProducer.throwIfInvalidGroupMetadata
        raise SerializationError(
            f"The group of the offsets has generation_id={found.generation_id} and an empty member_id: give the"
            " member's member_id, or the generation -1 for a group without members."
        )
    return found


def is_sendable_text(text: object) -> bool:
    """Return whether it is a text that a request can contain."""
    if not isinstance(text, str):
        return False
    if text.isascii():
        return len(text) <= _LONGEST_TEXT
    try:
        return len(text.encode()) <= _LONGEST_TEXT
    except UnicodeEncodeError:
        return False


def _is_int32(number: object) -> bool:
    found = _as_int(number)
    return found is not None and 0 <= found <= _LAST_INT32


def _as_int(number: object) -> int | None:
    """Return an int of Python or numpy as Python's int, or None for a bool or any other type.

    A float, such as from time.time(), would break the batch that it is in. An array of one item cannot be a key of a
    dict.
    """
    try:
        return exact_int(number)
    except TypeError:
        return None


def _shown(value: object) -> str:
    return int_text(value) if isinstance(value, int) else f"{value!r:.100}"
