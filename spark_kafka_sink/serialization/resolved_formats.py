"""From the options of formats to what tasks need: the schema of each column, checked against its type.

Runs on the driver, once and before any task. Plain functions; any thread.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from spark_kafka_sink.serialization.format_options import Formats
from spark_kafka_sink.serialization.record_formats import ResolvedFormat, ResolvedFormats
from spark_kafka_sink.serialization.schemas import column_format


def resolved(formats: Formats, types: Mapping[str, pa.DataType]) -> ResolvedFormats:
    """Return the formats for columns of these Arrow types.

    `types`: `value` and `key`, as far as they have a format. Raises SchemaError for a type that does not fit.
    """
    found = {
        each.field: ResolvedFormat(column_format(each, types[each.field]), types[each.field])
        for each in formats.settings()
    }
    return ResolvedFormats(**found)
