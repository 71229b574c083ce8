"""A Spark application that writes 20,000 rows, 500 a second, until Ctrl-C. It then prints what it got, and waits for
the end of its jobs. Its arguments are JSON: the options of the sink, and who handles the signal.
"""

from __future__ import annotations

import json
import signal
import sys
import time

from pyspark.sql import SparkSession

from spark_kafka_sink import KafkaSink

ROWS = 20_000
MOST_S = 20


def main(options: dict[str, str], handler: str) -> None:
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    if handler == "notebook":
        signal.signal(signal.SIGINT, signal.default_int_handler)
    frame = spark.range(ROWS).selectExpr("CAST(id AS STRING) AS value")
    try:
        KafkaSink({**options, "write.max.records.per.second": "500"}).write(frame)
    except BaseException as error:
        print("ENDED BY", type(error).__name__, flush=True)
    running = spark.sparkContext.statusTracker().getActiveJobsIds
    end = time.monotonic() + MOST_S
    while running() and time.monotonic() < end:
        time.sleep(0.1)
    print("RUNNING", len(running()), "ROWS", spark.range(7).count(), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*map(json.loads, sys.argv[1:]))
