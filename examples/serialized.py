"""Write structs as JSON or Avro, without a schema registry, and read the first record back.

    pip install confluent-kafka
    python examples/serialized.py --bootstrap-servers 127.0.0.1:9092 --topic trips --format avro

The struct column goes to the topic as it is: the sink makes JSON or Avro of it, and no row becomes a Python object.
"""

import argparse

from confluent_kafka import Consumer
from pyspark.sql import SparkSession

from spark_kafka_sink import KafkaSink

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--bootstrap-servers", required=True, help="host:port of the brokers, comma-separated")
parser.add_argument("--topic", default="trips", help="the topic to write to [trips]")
parser.add_argument("--format", default="json", choices=["json", "avro"], help="what the values become [json]")
parser.add_argument("--rows", type=int, default=1000, help="how many rows to write [1000]")
arguments = parser.parse_args()

options = {
    "kafka.bootstrap.servers": arguments.bootstrap_servers,
    "topic": arguments.topic,
    "value.format": arguments.format,
}
spark = SparkSession.builder.getOrCreate()
trips = spark.range(arguments.rows).selectExpr("struct(id, id * 0.5D AS km, concat('trip ', id) AS name) AS value")
print(KafkaSink(options).write(trips))
spark.stop()

consumer = Consumer(
    {"bootstrap.servers": arguments.bootstrap_servers, "group.id": "example", "auto.offset.reset": "earliest"}
)
consumer.subscribe([arguments.topic])
record = None
while record is None or record.error() is not None:
    record = consumer.poll(1)
consumer.close()
print(f"The first record: {record.value()!r}")
