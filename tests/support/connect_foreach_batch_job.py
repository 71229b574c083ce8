"""Run on Spark Connect: a batch write inside foreachBatch, exactly once. Print how the query ended, as JSON.

Arguments: the brokers, the topic, "write" or "format", a folder for the checkpoint.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from spark_kafka_sink import KafkaSink
from spark_kafka_sink.sink.data_source import KafkaSinkDataSource


def main(servers: str, topic: str, form: str, folder: Path) -> None:
    spark = SparkSession.builder.getOrCreate()
    spark.dataSource.register(KafkaSinkDataSource)
    options = {"kafka.bootstrap.servers": servers, "topic": topic, "delivery.guarantee": "exactly-once"}

    def write(batch: Any, batch_id: int) -> None:
        if form == "write":
            KafkaSink(options).write(batch)
        else:
            batch.write.format("kafka_sink").options(**options).mode("append").save()

    (folder / "rows").mkdir()
    (folder / "rows" / "0.json").write_text('{"value":"1"}')
    read = spark.readStream.schema("value STRING").json(str(folder / "rows"))
    query = read.writeStream.foreachBatch(write).option("checkpointLocation", str(folder / "checkpoint"))
    text = ""
    try:
        query.trigger(availableNow=True).start().awaitTermination()
    except Exception as error:  # each Spark Connect release has another class for it
        text = str(error)
    KafkaSink(options).write(spark.sql("SELECT '2' AS value"))  # a batch write outside works
    print(json.dumps({"error": text}))
    spark.stop()


if __name__ == "__main__":
    servers, topic, form, folder = sys.argv[1:]
    main(servers, topic, form, Path(folder))
