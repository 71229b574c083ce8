"""A driver that a test kills: python -m support.exactly_once_job SERVERS TOPIC FOLDER FORM PARTITIONS [...].

It runs `Stream`; the form may also be "write": a batch write of one file's rows. The environment variables of
killed_spark say when it ends and where its tasks stop. With --dies-after N it kills itself and all processes of its
group after N requests of its protocol. That works only for foreachBatch, because in the other form another process
makes the requests.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from support.exactly_once_streams import KEYS, Stream
from support.killed_query import DyingCluster
from support.killed_spark import KilledDriver, KilledSink, KilledSource

from spark_kafka_sink.sink.exactly_once import session as session_module
from spark_kafka_sink.sink.exactly_once.cluster import KafkaDriverCluster


def die_after(number: int) -> None:
    """Make the next session of this process die after that many requests."""
    made = KafkaDriverCluster

    def make(*arguments: Any, **options: Any) -> Any:
        return DyingCluster(made(*arguments, **options), number, True, lambda: os.killpg(0, signal.SIGKILL))

    vars(session_module)["KafkaDriverCluster"] = make


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, kind in {"servers": str, "topic": str, "folder": Path, "form": str, "partitions": int}.items():
        parser.add_argument(name, type=kind)
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--order", default="")
    parser.add_argument("--dies-after", type=int)
    options = parser.parse_args()
    vars(session_module)["ExactlyOnceDriver"] = KilledDriver
    if options.dies_after is not None:
        die_after(options.dies_after)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    spark = (
        SparkSession.builder.master(options.master)
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "FATAL")
        .config("spark.executor.memory", "512m")
        .config("spark.shuffle.io.retryWait", "200ms")  # a killed executor does not come back
        .config("spark.locality.wait", "0s")  # otherwise all tasks of a batch run where its file was read
        .config("spark.sql.warehouse.dir", f"{options.folder}/warehouse")
        .getOrCreate()
    )
    stream = Stream(
        options.servers, options.topic, options.folder, options.form, data_source=KilledSource, sink=KilledSink
    )
    if options.form == "write":
        keys = spark.range(0, KEYS, 1, options.partitions)  # without a shuffle
        numbered = keys.selectExpr("id", f"explode(sequence(id, {stream.rows - 1}, {KEYS})) AS row")
        rows = numbered.selectExpr("CAST(id AS STRING) AS key", "CAST(row AS STRING) AS value")
        KilledSink(stream.options).write(rows)
    else:
        stream.run(spark, options.partitions, options.order)
    spark.stop()


if __name__ == "__main__":
    main()
