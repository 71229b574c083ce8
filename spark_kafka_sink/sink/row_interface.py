"""Rows whose times PySpark may have made without saying which of two they are: clocks go back, and an hour comes twice.
Only the task's thread.

A data source of PySpark 4.0 gets rows in a stream, and Arrow batches from 4.1 on.

PySpark's worker gets Arrow batches in 4.0 too, and makes rows of them in a generator
(pyspark.sql.worker.write_into_data_source). A generator that has not started shows its variables, so the batches are
taken from there: no Python object for a row, no copy, and the times as they are. The generator would lose one: it makes
local times, of which an hour comes twice when clocks go back, and does not say which of the two it means.

A vendor's PySpark may make its rows in another way. These are written as rows, and times in such an hour are refused.

The rows of `foreachPartition` on Spark Connect lose it too (pyspark.sql.conversion.ArrowTableToRowsConversion): such
times are refused as well. The rows of classic PySpark do not: their datetimes have `fold`.
"""

from __future__ import annotations

import datetime
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import GeneratorType
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.types as pat

from spark_kafka_sink.common.errors import SchemaError
from spark_kafka_sink.record.headers import field_names
from spark_kafka_sink.sink.delivery import TaskDelivery
from spark_kafka_sink.sink.rows import is_ambiguous
from spark_kafka_sink.sink.schema import TIMESTAMP

if TYPE_CHECKING:
    from pyspark.sql import Row

    from spark_kafka_sink.sink.options import SinkConfig

_SPARKS_FILE: Final = "pyspark/sql/worker/write_into_data_source.py"
_SPARKS_GENERATOR: Final = "batch_to_rows"
_SPARKS_VARIABLE: Final = "iterator"
_MOMENT: Final = pa.timestamp("us", "UTC")
_OF_4_0: Final = "PySpark 4.0 does not tell a data source which of the two it is. Use foreachBatch(sink.write_batch)"
_OF_CONNECT: Final = "Spark Connect does not tell foreachPartition which of the two it is. Use sink.write(df)"


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
        writer.write(map(_checked(delivery.config, _OF_4_0), rows))
        writer.finish()
    finally:
        writer.abandon()


def rows_of_connect(rows: Iterable[Any], config: SinkConfig) -> Iterator[Any]:
    """Yield the rows of a task of `foreachPartition` on Spark Connect. Raises SchemaError for a time that may be one of
    two: the timestamp, or one in a column that has a format.
    """
    return map(_checked(config, _OF_CONNECT), rows)


def _checked(config: SinkConfig, why: str) -> Callable[[Any], Any]:
    """Return a function that returns its row, and raises SchemaError if a time of the row may be one of two: its
    timestamp, or one in a column that has a format. `why`: for the error.
    """
    numbers = iter(range(1 << 62))
    formats = config.column_formats
    types = {} if formats is None else {each.column_format.field: each.data_type for each in formats.columns()}
    types = {name: data_type for name, data_type in types.items() if "tz=" in str(data_type)}
    types[TIMESTAMP] = _MOMENT
    forms = _stored_forms(config)

    def check(row: Any) -> Any:
        number = next(numbers)
        for name, data_type in types.items():
            cell = _cell(row, name)
            if name in forms:
                cell = forms[name](cell, number)
            if moment := next(filter(is_ambiguous, _local_times(cell, data_type)), None):
                has = "is" if name == TIMESTAMP else "has the time"
                raise SchemaError(
                    f"The {name} of row {number} {has} {moment} in the time zone of the Python worker, where this hour"
                    f" comes twice: clocks go back. {why}, or milliseconds since 1970: unix_millis(timestamp)."
                )
        return row

    return check


def _stored_forms(config: SinkConfig) -> Mapping[str, Callable[[Any, int], Any]]:
    """Return, for the columns with user-defined types, what makes a cell of a row what Spark stores it as."""
    if not config.user_types:
        return {}
    from spark_kafka_sink.sink.formatted_rows import stored_forms  # imports the encoders

    return stored_forms(config)


def _cell(row: Any, name: str) -> Any:
    """Return the cell of a column; None if the row has none. A row that is none is left to the writer."""
    names = field_names(row)
    if names is None or name not in names:
        return None
    at = list(names).index(name)
    return row[name] if isinstance(row, Mapping) else row[at] if at < len(row) else None


def _local_times(value: Any, data_type: pa.DataType) -> Iterator[datetime.datetime]:
    """Yield the times in a value whose type has a zone, and which have none in Python: they are local."""
    parts: Iterable[tuple[Any, pa.DataType]] = ()
    if pat.is_timestamp(data_type):
        if data_type.tz and isinstance(value, datetime.datetime) and value.tzinfo is None:
            yield value
    elif pat.is_struct(data_type) and isinstance(value, tuple):  # not a variant
        own = field_names(value) or [of.name for of in data_type]  # an Avro schema may have the fields in another order
        types = {of.name: of.type for of in data_type}
        parts = ((cell, types[name]) for name, cell in zip(own, value, strict=False) if name in types)
    elif pat.is_map(data_type) and isinstance(value, Mapping):
        entry = data_type.key_type, data_type.item_type
        parts = (part for pair in value.items() for part in zip(pair, entry, strict=True))
    elif pat.is_list(data_type) and isinstance(value, list):
        parts = ((each, data_type.value_type) for each in value)
    for part, of in parts:
        yield from _local_times(part, of)
