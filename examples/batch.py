"""Write a batch with keys, headers and timestamps to Kafka, and print the report.

    python examples/batch.py --bootstrap-servers 127.0.0.1:9092 --topic orders

Needs spark-kafka-sink and PySpark. Delivery is at least once: a task that Spark runs again writes its rows again.
"""

import argparse

from pyspark.sql import SparkSession

from spark_kafka_sink import KafkaSink

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--bootstrap-servers", required=True, help="host:port of the brokers, comma-separated")
parser.add_argument("--topic", default="orders", help="the topic to write to [orders]")
parser.add_argument("--rows", type=int, default=10_000, help="how many rows to write [10000]")
arguments = parser.parse_args()

spark = SparkSession.builder.appName("batch").getOrCreate()

orders = spark.range(arguments.rows).selectExpr(
    "CAST(id % 100 AS STRING) AS key",  # rows of one customer go to one partition
    "to_json(named_struct('order', id, 'amount', id * 1.5)) AS value",
    "array(named_struct('key', 'source', 'value', CAST('batch.py' AS BINARY))) AS headers",
    "current_timestamp() AS timestamp",
)

sink = KafkaSink({"kafka.bootstrap.servers": arguments.bootstrap_servers, "topic": arguments.topic})
report = sink.write(orders)

print(report)
for place, offset in report.last_offsets.items():
    print(f"{place}: the last offset is {offset}")

spark.stop()
