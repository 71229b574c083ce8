"""Read a topic, from its beginning to its end, into a table.

    python jobs/read_topic.py --bootstrap-servers h1:9092 --topic orders             shows the first records
    python jobs/read_topic.py --bootstrap-servers h1:9092 --topic orders --output orders.parquet

A summary of every partition comes last. `read_topic` returns the table to Python code.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spark_kafka_sink.admin.request_client import RequestClient
from spark_kafka_sink.admin.topic_reader import TopicReader
from spark_kafka_sink.admin.topics import TopicsMetadata
from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.common.texts import exit_code_of
from spark_kafka_sink.protocol.fetch import READ_COMMITTED, READ_UNCOMMITTED
from spark_kafka_sink.record.decoder import DecodedRecord

try:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as error:
    raise SystemExit("read_topic: the package rich is missing: pip install 'spark-kafka-sink[local]'") from error

SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("ms", tz="UTC")),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    ]
)
WIDEST_CELL = 60
EPOCH = datetime.fromtimestamp(0, UTC)


class PipedConsole(Console):
    """Leaves a lost reader of stdout to `exit_code_of`. By itself rich ends the command with 1."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError


@contextmanager
def topic_reader(bootstrap_servers: str, topic: str, client_id: str) -> Iterator[TopicReader]:
    """Yield a reader of one topic. Its client is closed at the end."""
    config = ProducerConfig.from_mapping({"bootstrap.servers": bootstrap_servers, "client.id": client_id})
    clock, rng = SystemClock(), random.Random()
    backoff_ms, backoff_max_ms = config.retry_backoff_ms, config.retry_backoff_max_ms
    metadata = TopicsMetadata([topic], backoff_ms, backoff_max_ms, config.metadata_max_age_ms, rng)
    client = RequestClient.connect(config, metadata, clock, rng)
    try:
        yield TopicReader(client, metadata, clock, backoff_ms)
    finally:
        client.close()


def read_topic(bootstrap_servers: str, topic: str, is_committed: bool = False) -> pa.Table:
    """Return every record of `topic` that is there now, as a table of SCHEMA, by partition and offset. `is_committed`
    leaves out records of open and aborted transactions. Raises KafkaError.
    """
    with topic_reader(bootstrap_servers, topic, "read_topic") as reader:
        return read_all(reader, topic, is_committed)


def read_all(reader: TopicReader, topic: str, is_committed: bool) -> pa.Table:
    """Read as `read_topic` does, by a reader that exists."""
    isolation_level = READ_COMMITTED if is_committed else READ_UNCOMMITTED
    found = [_to_table(*records) for records in reader.read([topic], isolation_level)]
    return pa.concat_tables([SCHEMA.empty_table(), *found]).sort_by(
        [("partition", "ascending"), ("offset", "ascending")]
    )


def _to_table(topic_partition: TopicPartition, records: Sequence[DecodedRecord]) -> pa.Table:
    offsets, timestamps, keys, values, headers = zip(*records, strict=True)
    places = ([topic_partition.topic] * len(records), [topic_partition.partition] * len(records))
    return pa.table([*places, offsets, timestamps, keys, values, headers], schema=SCHEMA)


def as_text(data: bytes | None) -> str:
    """Return bytes as text for a table: as UTF-8 if possible, cut to the width of a cell."""
    return "null" if data is None else shown(data[: WIDEST_CELL * 4 + 1].decode("utf-8", errors="backslashreplace"))


def shown(text: str) -> str:
    """Escape characters that end a line or control a terminal: a record may contain them on purpose."""
    letters = (each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
    text = "".join(letters)
    return text if len(text) <= WIDEST_CELL else text[: WIDEST_CELL - 1] + "…"


def show_records(records: pa.Table, limit: int, console: Console) -> None:
    table = Table()
    for column in ("partition", "offset"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("timestamp (UTC)", no_wrap=True)
    for column in (
        "key",
        "value",
        "headers",
    ):  # on a narrow screen only the widest of these shrinks
        table.add_column(column)
    for row in _rows(records.slice(0, limit)):
        headers = ", ".join(f"{shown(header['key'])}={as_text(header['value'])}" for header in row["headers"] or ())
        time = row["timestamp"]
        moment = f"{time:%Y-%m-%d %H:%M:%S.%f}"[:-3] if isinstance(time, datetime) else f"{time} ms"
        texts = (as_text(row["key"]), as_text(row["value"]), headers)
        cells = (Text(text, no_wrap=True, overflow="ellipsis") for text in texts)
        table.add_row(str(row["partition"]), str(row["offset"]), moment, *cells)
    console.print(table)
    if records.num_rows > limit:
        console.print(f"{limit:,} of {records.num_rows:,} records; --limit shows more")


def show_summary(records: pa.Table, console: Console) -> None:
    table = Table(title="By partition")
    for column in ("partition", "records", "first offset", "last offset", "keys", "bytes of keys and values"):
        table.add_column(column, justify="right")
    sized = records.append_column("bytes", _sizes(records))
    found = sized.group_by("partition").aggregate(
        [("offset", "count"), ("offset", "min"), ("offset", "max"), ("key", "count_distinct"), ("bytes", "sum")]
    )
    for row in found.sort_by("partition").to_pylist():
        counts = ("offset_count", "offset_min", "offset_max", "key_count_distinct", "bytes_sum")
        table.add_row(str(row["partition"]), *(f"{row[name]:,}" for name in counts))
    console.print(table)
    console.print(f"{records.num_rows:,} records")


def _sizes(records: pa.Table) -> pa.ChunkedArray:
    lengths = (pc.fill_null(pc.binary_length(records[name]), 0) for name in ("key", "value"))
    return pc.add(*(pc.cast(length, pa.int64()) for length in lengths))


def write(records: pa.Table, output: Path) -> None:
    """Write Parquet, or JSON lines with text for bytes (bytes that are not UTF-8 as backslash escapes). The file gets
    its name when it is whole. Raises OSError.
    """
    target = os.path.realpath(output)  # a link stays a link
    part = Path(f"{target}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            if output.suffix == ".parquet":
                pq.write_table(records, file)
            else:
                lines = (json.dumps(row, default=_json, ensure_ascii=False) for row in _rows(records))
                file.writelines(f"{line}\n".encode() for line in lines)
        part.replace(target)
    finally:
        with suppress(OSError):  # it has its name, or it was not made
            part.unlink()


def _rows(records: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield the records as Python values. A timestamp after the year 9999 stays a number of milliseconds, because
    Python has no such datetime. Microseconds that were written as milliseconds give such timestamps.
    """
    at = records.schema.get_field_index("timestamp")
    for batch in records.set_column(at, "timestamp", records["timestamp"].cast(pa.int64())).to_batches():
        for row in batch.to_pylist():
            with suppress(OverflowError):
                row["timestamp"] = EPOCH + timedelta(milliseconds=row["timestamp"])
            yield row


def _json(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="backslashreplace")
    return str(value)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap-servers", required=True, metavar="HOST:PORT,...")
    parser.add_argument("--topic", required=True)
    parser.add_argument("--limit", type=int, default=20, help="records to show [20]")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write all records to FILE.parquet or FILE.json")
    parser.add_argument("--committed", action="store_true", help="leave out records of open and aborted transactions")
    given = parser.parse_args(arguments)
    if given.output is not None and given.output.suffix not in (".parquet", ".json"):
        parser.error(f"--output {given.output} must end in .parquet or .json")
    if given.limit < 0:
        parser.error(f"--limit {given.limit} must be 0 or more")
    console = PipedConsole()
    try:
        records = read_topic(given.bootstrap_servers, given.topic, given.committed)
    except KafkaError as error:
        print(f"read_topic: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if given.output is not None:
        try:
            write(records, given.output)
        except OSError as error:
            print(f"read_topic: {given.output} cannot be written: {error.strerror or error}.", file=sys.stderr)
            return 1
        console.print(f"{given.output}: {records.num_rows:,} records", highlight=False)
    else:
        show_records(records, given.limit, console)
    show_summary(records, console)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(exit_code_of(lambda: main(sys.argv[1:])))
    except KeyboardInterrupt:
        sys.exit(130)
