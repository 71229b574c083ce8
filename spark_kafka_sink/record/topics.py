"""Rows of many topics, brought together topic by topic. Vectorised; holds no state; any thread."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from spark_kafka_sink.common.errors import SchemaError
from spark_kafka_sink.record.columns import RecordColumns


def by_topic(columns: RecordColumns, topics: pa.Array, null_text: str) -> Iterator[tuple[str, RecordColumns]]:
    """(topic, its rows in their order) for each topic of `topics`, a string array with one entry per row.

    One sort and one copy of the rows, however many topics there are; none where there is one. Raises SchemaError with
    `null_text` where an entry is null.
    """
    if topics.null_count:
        raise SchemaError(null_text)
    encoded = topics if pa.types.is_dictionary(topics.type) else topics.dictionary_encode()
    counts = {entry["values"]: entry["counts"] for entry in pc.value_counts(encoded.indices).to_pylist()}
    if len(counts) <= 1:
        if counts:
            yield _name(encoded.dictionary[next(iter(counts))]), columns
        return
    order = pc.sort_indices(encoded.indices)  # stable, so that a topic's rows keep their order
    sorted_columns = columns.take(order)
    first = 0
    for index in sorted(counts):
        yield _name(encoded.dictionary[index]), sorted_columns.slice(first, counts[index])
        first += counts[index]


def _name(entry: pa.StringScalar) -> str:
    """Spark's strings hold whatever bytes were cast to one; a replacement character makes no name that a topic has."""
    return bytes(entry.as_buffer()).decode(errors="replace")
