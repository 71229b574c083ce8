"""Which numbers can be a record's timestamp, and which unit a number that cannot be one is likely in.

Holds no state; any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_kafka_sink.record.arrow_arrays import index_array
from spark_kafka_sink.record.row_arrays import int_text

NO_TIMESTAMP: Final = -1
"""Kafka's own number for a record without a timestamp (RecordBatch.NO_TIMESTAMP)."""
FIRST_USUAL_MS: Final = 315_532_800_000
"""1980-01-01. As ms, seconds up to the year 11968 lie before it."""
LAST_MS: Final = 253_402_300_799_999
"""The end of the year 9999. As ms, microseconds from 1979 on lie after it."""

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


def likely_unit(number: int) -> str | None:
    """The unit in which `number` is a time between 1980 and 2100; None where it is that as ms, or in no unit."""
    if FIRST_USUAL_MS <= number < _YEAR_2100_MS:
        return None
    return next((unit for unit, in_ms in _IN_MS.items() if FIRST_USUAL_MS <= in_ms(number) < _YEAR_2100_MS), None)


def bounds(timestamps_ms: pa.Array) -> tuple[int, int] | None:
    """The earliest and the latest of an int64 column; None where all are null."""
    found = pc.min_max(timestamps_ms)
    earliest, latest = found["min"].as_py(), found["max"].as_py()
    return None if earliest is None else (earliest, latest)


def latest_before(timestamps_ms: pa.Array, limit: int) -> int:
    """The latest of an int64 column that lies before `limit`; there must be one."""
    early = timestamps_ms.filter(pc.less(timestamps_ms, index_array(np.array([limit]))[0]))
    return int(pc.max(early).as_py())


def early_text(whose: str, ms: int) -> str:
    """What becomes of a timestamp of 0 to FIRST_USUAL_MS, which `whose` names, and what to change."""
    date = (_EPOCH + timedelta(milliseconds=ms)).strftime("%Y-%m-%dT%H:%M:%SZ")
    return (
        f"{whose} is {ms}. As milliseconds since 1970 that is {date}, and brokers delete records that are older than"
        f" the topic's retention.ms. {_unit_text(ms)}"
    )


def late_text(whose: str, number: int) -> str:
    """As `early_text`, for a number above LAST_MS."""
    return (
        f"{whose} is {int_text(number)}. As milliseconds since 1970 that lies after the year 9999, and brokers refuse"
        f" it. {_unit_text(number)}"
    )


def _unit_text(number: int) -> str:
    unit = likely_unit(number)
    if unit is None:
        return "Give milliseconds since 1970."
    return f"It looks like {unit}: {_REMEDIES[unit]}."
