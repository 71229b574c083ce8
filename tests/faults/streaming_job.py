"""A streaming query into Kafka from parquet files, one for each batch, for rows that kill and restart Spark.

python streaming_job.py SERVERS TOPIC FOLDER PARALLELISM GUARANTEE
"""

from __future__ import annotations

import os
import sys

from pyspark.sql import SparkSession

from spark_kafka_sink import KafkaSinkDataSource

servers, topic, folder, parallelism, guarantee = sys.argv[1:]
os.environ["PYSPARK_PYTHON"] = sys.executable
spark = (
    SparkSession.builder.master("local[2,8]")
    .config("spark.ui.enabled", "false")
    .config("spark.log.level", "FATAL")
    .config("spark.sql.shuffle.partitions", parallelism)
    .getOrCreate()
)
spark.dataSource.register(KafkaSinkDataSource)
rows = spark.readStream.schema("partition INT, value STRING").option("maxFilesPerTrigger", 1).parquet(f"{folder}/rows")
query = (
    rows.repartition(int(parallelism), "partition")  # a partition's rows stay together, and in order
    .writeStream.format("kafka_sink")
    .option("kafka.bootstrap.servers", servers)
    .option("topic", topic)
    .option("delivery.guarantee", guarantee)
    .option("checkpointLocation", f"{folder}/checkpoint")
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
