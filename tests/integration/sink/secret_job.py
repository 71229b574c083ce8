"""A Spark application that writes with a password in its options, in every way, and once with a wrong one; then asks
Spark's own UI for all that it shows. Everything is as loud as it can be. Arguments: a JSON object.
"""

from __future__ import annotations

import json
import logging
import pickle
import sys
import traceback
import urllib.request
from pathlib import Path

from pyspark.sql import SparkSession

from spark_kafka_sink import KafkaSink, KafkaSinkDataSource


def main(arguments: dict[str, str]) -> None:
    logging.basicConfig(level=logging.DEBUG)
    logging.getLogger("py4j").setLevel(logging.INFO)  # it logs every call to the JVM with its arguments
    folder = Path(arguments["folder"])
    spark = (
        SparkSession.builder.master("local[1]")
        .config("spark.eventLog.enabled", "true")
        .config("spark.eventLog.compress", "false")
        .config("spark.eventLog.dir", (folder / "events").as_uri())
        .config("spark.log.level", "INFO")
        .config("spark.ui.port", "0")
        .config("spark.sql.shuffle.partitions", "1")
        .config("spark.task.maxFailures", "1")
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .getOrCreate()
    )
    spark.dataSource.register(KafkaSinkDataSource)
    options = json.loads(arguments["options"])
    wrong = json.loads(arguments["wrong"])
    frame = spark.range(10).selectExpr("CAST(id AS STRING) AS value")

    sink = KafkaSink(options)
    print(repr(sink), str(sink), sink.write(frame))
    print(repr(pickle.loads(pickle.dumps(sink))))
    frame.foreachPartition(sink.write_partition)
    frame.write.format("kafka_sink").options(**options).mode("append").save()
    frame.explain(extended=True)

    frame.write.parquet(str(folder / "rows"))
    stream = spark.readStream.schema(frame.schema).parquet(str(folder / "rows"))
    for name, writer in (
        ("format", stream.writeStream.format("kafka_sink").options(**options)),
        ("foreachBatch", stream.writeStream.foreachBatch(sink.write_batch)),
        ("foreach", stream.writeStream.foreach(sink)),
    ):
        checkpoint = str(folder / "checkpoints" / name)
        query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        query.awaitTermination()
        query.explain(extended=True)
        print(query.lastProgress, query.recentProgress)

    for attempt in (
        lambda: KafkaSink(wrong).write(frame),
        lambda: frame.foreachPartition(KafkaSink(wrong).write_partition),
        lambda: frame.write.format("kafka_sink").options(**wrong).mode("append").save(),
        lambda: KafkaSink({**options, "kafka.sasl.jaas.config": options["kafka.sasl.jaas.config"].replace(";", "")}),
        lambda: KafkaSink({**options, "kafka.sasl.mechanism": "PLAIN"}),
        lambda: KafkaSink({**options, "kafka.sasl.jaas.confg": options["kafka.sasl.jaas.config"]}),
    ):
        try:
            attempt()
        except Exception:
            print("REFUSED", traceback.format_exc())
        else:
            raise SystemExit("it was not refused")

    application = f"{spark.sparkContext.uiWebUrl}/api/v1/applications/{spark.sparkContext.applicationId}"
    for page in (f"{application}/{part}" for part in ("environment", "jobs", "stages", "sql?details=true")):
        with urllib.request.urlopen(page) as answer:
            print(answer.read().decode())
    for page in ("environment/", "SQL/", "StreamingQuery/", "jobs/"):
        with urllib.request.urlopen(f"{spark.sparkContext.uiWebUrl}/{page}") as answer:
            print(answer.read().decode())
    spark.stop()
    print("DONE")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
