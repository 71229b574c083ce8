"""A user's job that writes, stops a stream during a batch and ends its session, and on the way looks for
leftovers.

`python leftovers_job.py SERVERS TOPIC FOLDER` prints them as JSON lines: [when, [what]].
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyspark.sql import SparkSession
from support.spark_leftovers import Look, await_none

from spark_kafka_sink.sink.producer_pool import IDLE_MS

IDLE_S: Final = IDLE_MS / 1000
"""The value that the test sets in every Python process of this job, in place of ten minutes."""


def session() -> SparkSession:
    builder = SparkSession.builder.master("local[1]").config("spark.log.level", "FATAL")
    builder = builder.config("spark.sql.execution.arrow.maxRecordsPerBatch", "100")
    return builder.config("spark.ui.enabled", "false").config("spark.ui.showConsoleProgress", "false").getOrCreate()


def connected(port: int) -> list[str]:
    """The Python workers with a connection to the broker."""
    return [str(each) for each in Look.at(port).pythons if each.connections]


def main(servers: str, topic: str, folder: Path) -> None:
    port = int(servers.rpartition(":")[2])
    session().stop()
    before = Look.at(port)  # with the JVM, which stays until this process ends

    spark = session()
    rows = spark.range(1_000).selectExpr("CAST(id AS STRING) AS value")
    options = {"kafka.bootstrap.servers": servers, "topic": topic}

    def write(client_id: str) -> None:
        writer = rows.write.format("kafka_sink").options(**options).option("kafka.client.id", client_id)
        writer.mode("append").save()

    def slowly(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(batches):
            if number == 2:
                (folder / "busy").touch()
            time.sleep(1)
            yield batch

    write("one")
    kept = Look.at(port)
    print(json.dumps(["idle", connected(port)]))

    rows.write.parquet(str(folder / "rows"))
    stream = spark.readStream.schema(rows.schema).parquet(str(folder / "rows")).mapInArrow(slowly, rows.schema)
    writer = stream.writeStream.format("kafka_sink").options(**options)
    query = writer.option("checkpointLocation", str(folder / "checkpoint")).start()
    while not (folder / "busy").exists():
        assert query.isActive, query.exception()
        time.sleep(0.05)
    query.stop()

    await_none(lambda: connected(port)[1:])
    print(json.dumps(["stopped", connected(port)]))

    write("one")
    write("two")
    time.sleep(IDLE_S + 0.5)
    write("three")
    await_none(lambda: [str(each) for each in Look.at(port).pythons if each.connections > kept.fullest[1]])
    print(json.dumps(["expired", connected(port)]))

    spark.stop()
    await_none(lambda: Look.at(port).more_than(before))
    print(json.dumps(["ended", connected(port)]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
