"""A driver to be killed: python -m support.exactly_once_job SERVERS TOPIC FOLDER FORM PARTITIONS."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession
from support.exactly_once_streams import Stream


def main() -> None:
    servers, topic, folder, form, partitions = sys.argv[1:]
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
