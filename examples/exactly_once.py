"""Stream files into Kafka exactly once, let the stream fail in the middle, and print what a consumer sees.

    pip install confluent-kafka    # the consumer of this example
    python examples/exactly_once.py --bootstrap-servers 127.0.0.1:9092 --topic payments

The first run of the query fails while it writes. A consumer with isolation.level=read_committed sees no row of the
failed batch. A consumer with read_uncommitted may see some. The second run writes the batch again, and read_committed
sees each row once. Needs Kafka 3.0 or newer, PySpark 4.0 or newer (3.5 has no `format`), and
a topic without other records.
"""

import argparse
import tempfile
from pathlib import Path

from confluent_kafka import Consumer, KafkaError, TopicPartition
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--bootstrap-servers", required=True, help="host:port of the brokers, comma-separated")
parser.add_argument("--topic", default="payments", help="the topic to write to [payments]")
parser.add_argument("--rows", type=int, default=200_000, help="how many rows to write [200000]")
arguments = parser.parse_args()


def values_seen(isolation_level: str) -> list[int]:
    """Return the values of the topic that a consumer with this isolation level sees."""
    consumer = Consumer(
        {
            "bootstrap.servers": arguments.bootstrap_servers,
            "group.id": "exactly-once-example",
            "isolation.level": isolation_level,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
    )
    partitions = consumer.list_topics(arguments.topic, timeout=30).topics[arguments.topic].partitions
    consumer.assign([TopicPartition(arguments.topic, partition, 0) for partition in partitions])
    values: list[int] = []
    ended = 0
    while ended < len(partitions):
        record = consumer.poll(30)
        if record is None:
            raise TimeoutError(f"{arguments.topic} was not read to its end within 30 s")
        if record.error() is None:
            values.append(int(record.value()))
        elif record.error().code() == KafkaError._PARTITION_EOF:
            ended += 1
        else:
            raise RuntimeError(record.error())
    consumer.close()
    return values


def show(moment: str) -> None:
    for isolation_level in ("read_committed", "read_uncommitted"):
        values = values_seen(isolation_level)
        print(f"{moment}: {isolation_level} sees {len(values)} rows, {len(set(values))} different ones", flush=True)


def run_query(value: str) -> None:
    """Write every file of the folder that no finished batch has. `value` is the SQL expression of the value."""
    query = (
        spark.readStream.schema("id BIGINT")
        .parquet(str(folder / "files"))
        .selectExpr(f"{value} AS value")
        .writeStream.format("kafka_sink")
        .option("kafka.bootstrap.servers", arguments.bootstrap_servers)
        .option("topic", arguments.topic)
        .option("delivery.guarantee", "exactly-once")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


spark = SparkSession.builder.appName("exactly_once").config("spark.log.level", "OFF").getOrCreate()
with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    spark.range(arguments.rows).coalesce(1).write.parquet(str(folder / "files"))
    try:
        run_query(f"IF(id = {arguments.rows - 1}, raise_error('the last row fails'), CAST(id AS STRING))")
    except StreamingQueryException:
        print("The first run failed, as planned", flush=True)
    show("After the failed run")
    run_query("CAST(id AS STRING)")
    show("After the second run")
spark.stop()
