"""Publish the change feed of a Delta table to a compacted topic. A deleted row becomes a tombstone: a null value.

    pip install deltalake    # reads Delta tables without Spark and without a JVM
    python examples/delta_change_feed.py --bootstrap-servers 127.0.0.1:9092 --topic customers --table /data/customers

The key of a record is the column --key of the row, and the value is the row as JSON. The program prints the version to
start from the next time. If it fails and you start it again from the same version, it publishes the same changes again.
Readers of a compacted topic then still have the right last value of each key.

The table needs the property delta.enableChangeDataFeed=true. Without --table the program makes a small one.
"""

import argparse
import json
import tempfile

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from spark_kafka_sink import KafkaError, KafkaProducer, RecordColumns

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--bootstrap-servers", required=True, help="host:port of the brokers, comma-separated")
parser.add_argument("--topic", default="customers", help="the topic to write to; cleanup.policy=compact [customers]")
parser.add_argument("--table", help="path or URL of the Delta table [a new one, with example rows]")
parser.add_argument("--key", default="id", help="the column with the key of a row [id]")
parser.add_argument("--from-version", type=int, default=0, help="the first version to publish [0]")
arguments = parser.parse_args()

OF_THE_FEED = {"_change_type", "_commit_version", "_commit_timestamp"}


def example_table(path: str) -> None:
    """Make a table of three customers, change one of them, and delete one."""
    customers = pa.table({"id": [1, 2, 3], "name": ["Ada", "Ben", "Cem"], "city": ["Ulm", "Bonn", "Kiel"]})
    write_deltalake(path, customers, configuration={"delta.enableChangeDataFeed": "true"})
    table = DeltaTable(path)
    table.update(predicate="id = 2", new_values={"city": "Berlin"})
    table.delete("id = 3")


def changes(table: DeltaTable, key: str, first_version: int) -> list[tuple[str, str | None]]:
    """Return (key, value) of each changed row, in the order of versions. A row that is gone has no value."""
    rows = pa.table(table.load_cdf(first_version, table.version())).to_pylist()
    if any(row[key] is None for row in rows):
        raise SystemExit(f"Some changed rows have no value in the column {key}: choose another one by --key.")
    new = [row for row in rows if row["_change_type"] in ("insert", "update_postimage")]
    kept = {(row["_commit_version"], row[key]) for row in new}
    old = [row for row in rows if row["_change_type"] in ("delete", "update_preimage")]
    gone = [row for row in old if (row["_commit_version"], row[key]) not in kept]
    found = [(row["_commit_version"], str(row[key]), None) for row in gone]
    found += [(row["_commit_version"], str(row[key]), as_json(row)) for row in new]
    return [(name, value) for _, name, value in sorted(found, key=lambda change: change[0])]


def as_json(row: dict[str, object]) -> str:
    """Return the table's own columns as JSON."""
    own = {name: value for name, value in row.items() if name not in OF_THE_FEED}
    return json.dumps(own, default=str, allow_nan=False)


path = arguments.table or tempfile.mkdtemp()
if arguments.table is None:
    example_table(path)
table = DeltaTable(path)

if arguments.from_version > table.version():
    print(f"Nothing is new: the table's version is {table.version()}")
else:
    found = changes(table, arguments.key, arguments.from_version)
    columns = RecordColumns.from_rows(keys=[key for key, _ in found], values=[value for _, value in found])
    errors: list[KafkaError] = []
    with KafkaProducer({"bootstrap.servers": arguments.bootstrap_servers}) as producer:
        producer.send_columns(arguments.topic, columns, lambda _, error: errors.append(error) if error else None)
        producer.flush()
    if errors:
        raise errors[0]
    tombstones = sum(value is None for _, value in found)
    print(f"{len(found)} changes, {tombstones} of them tombstones. Next time: --from-version {table.version() + 1}")
