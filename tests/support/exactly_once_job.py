"""A driver to be killed: python -m support.exactly_once_job SERVERS TOPIC FOLDER FORM PARTITIONS [NUMBER].

With a number it kills itself, with all processes of its group, after so many requests of its protocol (foreachBatch
alone: in the other form another process makes them).
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from support.exactly_once_streams import Stream
from support.killed_query import DyingCluster

from spark_kafka_sink.sink import driver_session


def die_after(number: int) -> None:
    """Let the next session of this process end it."""
    made = driver_session.KafkaDriverCluster

    def make(*arguments: Any, **options: Any) -> Any:
        return DyingCluster(made(*arguments, **options), number, True, lambda: os.killpg(0, signal.SIGKILL))

    driver_session.KafkaDriverCluster = make  # type: ignore[misc,assignment]


def main() -> None:
    servers, topic, folder, form, partitions, *number = sys.argv[1:]
    if number:
        die_after(int(number[0]))
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "FATAL")
        .config("spark.sql.warehouse.dir", f"{folder}/warehouse")
        .getOrCreate()
    )
    Stream(servers, topic, Path(folder), form).run(spark, int(partitions))
    spark.stop()


if __name__ == "__main__":
    main()
