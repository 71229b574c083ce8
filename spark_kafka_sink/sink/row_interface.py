"""Writes a task of a stream in PySpark 4.0, whose data sources get rows, and Arrow batches from 4.1 on. Only the task's
thread.

PySpark's worker gets Arrow batches in 4.0 too, and makes rows of them in a generator
(pyspark.sql.worker.write_into_data_source). A generator that has not started shows its variables, so the batches are
taken from there: no Python object for a row, no copy, and the times as they are. The generator would lose one: it makes
local times, of which an hour comes twice when clocks go back, and does not say which of the two it means.

A vendor's PySpark may make its rows in another way. These are written as rows, and times in such an hour are refused.
"""

from __future__ import annotations

import datetime
import inspect
from collections.abc import Callable, Iterable, Iterator
from types import GeneratorType
from typing import TYPE_CHECKING, Final

from spark_kafka_sink.common.errors import SchemaError
from spark_kafka_sink.sink.delivery import TaskDelivery
from spark_kafka_sink.sink.rows import is_ambiguous
from spark_kafka_sink.sink.schema import TIMESTAMP

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Row

_SPARKS_FILE: Final = "pyspark/sql/worker/write_into_data_source.py"
_SPARKS_GENERATOR: Final = "batch_to_rows"
_SPARKS_VARIABLE: Final = "iterator"


def arrow_batches(rows: Iterable[Row]) -> Iterator[pa.RecordBatch] | None:
    """Return the Arrow batches from which PySpark's generator would make `rows`.

    None if it is another generator, or has started.
    """
    if not isinstance(rows, GeneratorType) or inspect.getgeneratorstate(rows) != inspect.GEN_CREATED:
        return None
    code = rows.gi_code
    if code.co_name != _SPARKS_GENERATOR or not code.co_filename.replace("\\", "/").endswith(_SPARKS_FILE):
        return None
    found = inspect.getgeneratorlocals(rows).get(_SPARKS_VARIABLE)
    return iter(found) if isinstance(found, Iterable) else None


def write_rows(delivery: TaskDelivery, rows: Iterable[Row]) -> None:
    """Write every row, and finish the delivery. Raises KafkaError if a row is not acknowledged, SchemaError for a row
    that cannot be written.
    """
    from spark_kafka_sink.sink.formatted_rows import row_writer  # imports the encoders

    writer = row_writer(delivery)
    try:
        writer.write(map(_checked(), rows))
        writer.finish()
    finally:
        writer.abandon()


def _checked() -> Callable[[Row], Row]:
    """Return a function that returns its row, and raises SchemaError if the row's timestamp is one of two times."""
    numbers = iter(range(1 << 62))

    def check(row: Row) -> Row:
        number = next(numbers)
        moment = row[TIMESTAMP] if TIMESTAMP in row.__fields__ else None
        if isinstance(moment, datetime.datetime) and moment.tzinfo is None and is_ambiguous(moment):
            raise SchemaError(
                f"The timestamp of row {number} is {moment} in the time zone of the Python worker, where this hour"
                " comes twice: clocks go back. PySpark 4.0 does not tell a data source which of the two it is. Use"
                " foreachBatch(sink.write_batch), or milliseconds since 1970: unix_millis(timestamp)."
            )
        return row

    return check
