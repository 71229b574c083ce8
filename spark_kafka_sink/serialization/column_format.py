"""How one column becomes bytes: the user's settings, the format that tasks get, and an encoder's results. Plain values
that pickle; any thread.

`format_options` makes `FormatSettings`. The driver makes a `ColumnFormat` of them once (schemas.py, and registry.py if
there is a registry). Each task makes a `ColumnEncoder` of it, which returns an `EncodedColumn` for each Arrow array.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import pyarrow as pa

from spark_kafka_sink.serialization.protobuf_schema import ProtoSchema

AVRO: Final = "avro"
JSON: Final = "json"
PROTOBUF: Final = "protobuf"
JSON_SCHEMA: Final = "json-schema"
FORMATS: Final = (AVRO, PROTOBUF, JSON, JSON_SCHEMA)
NULL_LAST: Final = "null-last"
NULL_FIRST: Final = "null-first"
STRATEGIES: Final = ("topic", "record", "topic-record")
"""Those of subjects.py."""


@dataclass(frozen=True, slots=True)
class JsonOptions:
    """The options of Spark's `to_json` that have an effect on what is written."""

    ignore_null_fields: bool = True
    """Whether a struct's null fields are left out. Nulls in arrays and maps are always written."""
    time_zone: str | None = None
    """The zone in which timestamps are printed, such as `Europe/Berlin` or `+05:30`. None: the zone of the column's
    type, which is the session's zone for a column from Spark.
    """
    zone_of_variants: str | None = None
    """The session's zone, for timestamps in a variant if `time_zone` is None. A variant's type has no zone of its own.
    None: the session's zone is not known.
    """
    timestamp_format: str | None = None
    """`timestampFormat`. Only to_json's default is supported; another pattern is a ConfigError."""
    timestamp_ntz_format: str | None = None
    """`timestampNTZFormat`, likewise."""
    date_format: str | None = None
    """`dateFormat`, likewise."""
    takes_any_type: bool = False
    """Whether the column may be of any type that a field may have. to_json takes a struct, a map, an array or a
    variant.
    """


@dataclass(frozen=True, slots=True)
class FormatSettings:
    """What one column shall become, as the user said: not yet checked against the column's type."""

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
    json: JsonOptions = JsonOptions()
    strategy: str = STRATEGIES[0]
    """How the subject in the registry is named."""


@dataclass(frozen=True, slots=True)
class ColumnFormat:
    """How one column becomes bytes. Made once on the driver, used in tasks."""

    field: str
    """`value` or `key`."""
    name: str
    """`avro`, `json`, `protobuf` or `json-schema`."""
    schema: str | None
    """The schema as text: Avro's JSON, a .proto file, a JSON Schema. None for `json`."""
    message: str | None = None
    """Protobuf: the name of the message in the schema."""
    protobuf: ProtoSchema | None = None
    """Protobuf: the schema as it was parsed on the driver."""
    prefix: bytes = b""
    """What stands before each value that is not null: the schema's id in the registry, Protobuf's message indexes."""
    header: tuple[str, bytes] | None = None
    """The header of each record whose value is not null (schema.id.location=header), or None."""
    json: JsonOptions = JsonOptions()
    """For `json` and `json-schema`."""

    @property
    def schema_id_header(self) -> str:
        """The name of the header in which readers look for the id of the schema, before they look at the bytes."""
        return f"__{self.field}_schema_id"


class BadRow(NamedTuple):
    """A row that does not fit the schema."""

    row: int
    """From 0 in the array that was given to the encoder."""
    path: str
    """The column and the field in it, such as `value.address.zip`. Lists have `element`, maps `key` and `value`."""
    reason: str
    """Plain words, without the path and without the value."""


class EncodedColumn(NamedTuple):
    """The bytes of a column, or of its first rows."""

    values: pa.Array
    """`binary`, null where the row is null and where it is bad. At least one entry if the column has one. If it is
    shorter than the column, the rest did not fit into `most_bytes`: encode `column.slice(len(values))` next.
    """
    bad_rows: tuple[BadRow, ...]
    """In the order of rows, of those in `values`."""
