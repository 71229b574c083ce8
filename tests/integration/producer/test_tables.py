"""Tables of four libraries, written to a real broker and read by librdkafka."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from support.librdkafka import read_topic

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.local import Admin
from spark_kafka_sink.producer.kafka_producer import KafkaProducer

ROWS = 5_000
START = datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.UTC)
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
NAMES: dict[str, Any] = {"key": "customer", "value": "payload", "timestamp": "at"}


def table() -> pa.Table:
    """Return texts that are longer and shorter than the 12 bytes that a view holds, with nulls, under other names."""
    return pa.table(
        {
            "payload": [None if n % 11 == 0 else f"größe {n} " + "x" * (n % 40) for n in range(ROWS)],
            "customer": [None if n % 7 == 0 else f"customer-{n % 97}" for n in range(ROWS)],
            "headers": pa.array([[("n", b"%d" % n), ("none", None)] if n % 3 else [] for n in range(ROWS)], HEADERS),
            "at": pa.array([START + datetime.timedelta(seconds=n) for n in range(ROWS)], pa.timestamp("us", "UTC")),
            "unused": list(range(ROWS)),
        }
    )


def duckdb_relation() -> Any:
    given = table()
    connection = duckdb.connect()
    connection.register("given", given)
    return connection.sql("SELECT * FROM given ORDER BY unused")


SOURCES: dict[str, Callable[[], Any]] = {
    "pyarrow table": table,
    "pyarrow slices": lambda: pa.concat_tables([table().slice(0, 1_000), table().slice(1_000)]),
    "pyarrow batch": lambda: table().combine_chunks().to_batches()[0],
    "pyarrow reader": lambda: table().to_reader(max_chunksize=700),
    "polars": lambda: pl.DataFrame(table()),
    "polars categories": lambda: pl.DataFrame(table()).with_columns(pl.col("customer").cast(pl.Categorical)),
    "duckdb": duckdb_relation,
    "pandas": lambda: table().to_pandas(),
    "pandas categories": lambda: table().to_pandas().astype({"customer": "category"}),
}


@pytest.mark.parametrize("source", SOURCES)
def test_every_row_of_a_table_arrives(
    kafka_broker: Admin, fresh_name: str, start_producer: Callable[..., KafkaProducer], source: str
) -> None:
    kafka_broker.create_topic(fresh_name)
    producer = start_producer(kafka_broker.bootstrap_servers, **{"compression.type": "lz4"})
    report = producer.write(SOURCES[source](), fresh_name, **NAMES)
    assert (report.records, report.failed) == (ROWS, 0)
    assert report.last_offsets == {TopicPartition(fresh_name, 0): ROWS - 1}
    start_ms = int(START.timestamp() * 1000)
    expected = [
        (
            None if n % 11 == 0 else (f"größe {n} " + "x" * (n % 40)).encode(),
            None if n % 7 == 0 else f"customer-{n % 97}".encode(),
            [("n", b"%d" % n), ("none", None)] if n % 3 else None,
            start_ms + 1000 * n,
        )
        for n in range(ROWS)
    ]
    messages = read_topic(kafka_broker.bootstrap_servers, fresh_name)
    assert [(each.value(), each.key(), each.headers(), each.timestamp()[1]) for each in messages] == expected


def test_table_written_in_a_transaction_is_visible_after_its_commit(
    kafka_broker: Admin, fresh_name: str, start_producer: Callable[..., KafkaProducer]
) -> None:
    kafka_broker.create_topic(fresh_name, 2)
    producer = start_producer(kafka_broker.bootstrap_servers, **{"transactional.id": fresh_name})
    producer.init_transactions()
    frame = pl.DataFrame({"value": ["a", "b"], "partition": [0, 1], "topic": [fresh_name] * 2})
    producer.begin_transaction()
    producer.write(frame.with_columns(value=pl.lit("aborted")))
    producer.abort_transaction()
    producer.begin_transaction()
    assert producer.write(frame).records == 2
    assert read_topic(kafka_broker.bootstrap_servers, fresh_name, 2) == []
    producer.commit_transaction()
    assert [each.value() for each in read_topic(kafka_broker.bootstrap_servers, fresh_name, 2)] == [b"a", b"b"]
