"""Write a Polars DataFrame to Kafka, without Spark.

    pip install spark-kafka-sink polars
    python examples/columns_from_polars.py --bootstrap-servers 127.0.0.1:9092 --topic readings

The program prints what it wrote, and the last offset in each partition.
"""

from __future__ import annotations

import argparse
from datetime import datetime

import polars as pl

from spark_kafka_sink import KafkaProducer


def records() -> pl.DataFrame:
    """Return a row for each record: its key, its value as JSON, its headers, and the time of the reading."""
    readings = pl.DataFrame(
        {
            "sensor": ["north", "south", "north"],
            "celsius": [20.5, None, 21.25],
            "at": [datetime(2026, 11, 25, 8, minute) for minute in (0, 1, 2)],
        }
    )
    origin = pl.struct(key=pl.lit("origin"), value=pl.lit(b"example"))
    return readings.select(
        key="sensor",
        value=pl.struct("sensor", "celsius").struct.json_encode(),
        headers=pl.concat_list(origin),
        timestamp=pl.col("at").dt.replace_time_zone("UTC"),  # Kafka needs the zone of a time
    )


def main(servers: str, topic: str) -> None:
    with KafkaProducer({"bootstrap.servers": servers, "compression.type": "lz4"}) as producer:
        report = producer.write(records(), topic)  # returns when every record is acknowledged
    print(report)
    for place, offset in report.last_offsets.items():
        print(f"{place}: the last offset is {offset}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap-servers", required=True, help="host:port of the brokers, comma-separated")
    parser.add_argument("--topic", default="readings", help="the topic to write to [readings]")
    arguments = parser.parse_args()
    main(arguments.bootstrap_servers, arguments.topic)
