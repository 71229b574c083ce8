"""Stream rows into Kafka until you press Ctrl-C.

    python examples/stream.py --bootstrap-servers 127.0.0.1:9092 --topic ticks --checkpoint /tmp/ticks

Needs spark-kafka-sink and PySpark 4.0 or newer (3.5 has no `format`). Delivery is at least once. If you start the
program again with the same checkpoint, it goes on where it stopped. The batch in which it stopped may be written twice:
`exactly_once.py` shows how to avoid that.
"""

import argparse

from pyspark.sql import SparkSession

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--bootstrap-servers", required=True, help="host:port of the brokers, comma-separated")
parser.add_argument("--topic", default="ticks", help="the topic to write to [ticks]")
parser.add_argument("--checkpoint", required=True, help="folder in which Spark keeps the position of the stream")
parser.add_argument("--rows-per-second", type=int, default=100, help="rows that the source makes [100]")
arguments = parser.parse_args()

spark = SparkSession.builder.appName("stream").getOrCreate()

ticks = spark.readStream.format("rate").option("rowsPerSecond", arguments.rows_per_second).load()

query = (
    ticks.selectExpr("CAST(value AS STRING) AS key", "CAST(value AS STRING) AS value", "timestamp")
    .writeStream.format("kafka_sink")
    .option("kafka.bootstrap.servers", arguments.bootstrap_servers)
    .option("topic", arguments.topic)
    .option("checkpointLocation", arguments.checkpoint)
    .trigger(processingTime="1 second")
    .start()
)

try:
    query.awaitTermination()  # raises an error if the query fails
except KeyboardInterrupt:
    print("Stopping")
finally:
    query.stop()

for progress in query.recentProgress:
    print(f"batch {progress['batchId']}: {progress['numInputRows']} rows")
spark.stop()
