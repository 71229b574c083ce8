"""The options of one column's format, as the user gave them: checked one by one, but not yet against the column's type
and without the registry.

Plain values that pickle. `format_options` makes them, `schemas.column_format` makes a `ColumnFormat` of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from spark_kafka_sink.serialization.column_format import JsonOptions

NULL_LAST: Final = "null-last"
NULL_FIRST: Final = "null-first"
STRATEGIES: Final = ("topic", "record", "topic-record")
"""Those of subjects.py."""
_BY_DEFAULT: Final = JsonOptions()


@dataclass(frozen=True, slots=True)
class FormatSettings:
    """What one column shall become."""

    field: str
    """`value` or `key`."""
    name: str
    """The name of the format, such as `avro`."""
    schema: str | None = None
    """The text of the given schema; None: it is made of the column's type."""
    message: str | None = None
    """Protobuf: the name of the message in the schema."""
    nullable: str = NULL_LAST
    """Avro, without a given schema: where null stands in the union of a field that may be null."""
    json: JsonOptions = _BY_DEFAULT
    strategy: str = STRATEGIES[0]
    """How the subject in the registry is named."""
