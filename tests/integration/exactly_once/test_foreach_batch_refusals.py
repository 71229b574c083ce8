"""Batch writes that are exactly once inside foreachBatch, in every kind of driver: refused, and nothing is written.

A batch that Spark runs again would be another write there, and its rows would be doubled.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.exactly_once_streams import visible_values
from support.fresh_process import run_script

from spark_kafka_sink.local import EmbeddedKafka

pytestmark = pytest.mark.slow

JOB = """
import json, sys, threading
from pyspark.sql import SparkSession

mode, form, options, folder = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]


def main():
    builder = SparkSession.builder
    builder = builder.remote("local[2]") if mode == "connect" else builder.master("local[2]")
    spark = builder.config("spark.task.maxFailures", "1").getOrCreate()
    rows = spark.range(20).selectExpr("'k' AS key", "CAST(id AS STRING) AS value")
    rows.write.parquet(folder + "/rows")
    given = dict(options)  # functions of foreachBatch are pickled on Spark Connect

    def batch_write(df):
        from spark_kafka_sink import KafkaSink

        if form == "write":
            KafkaSink(given).write(df)
        else:
            df.write.format("kafka_sink").options(**given).mode("append").save()

    def write(df, batch_id):
        if mode != "thread":
            return batch_write(df)
        errors = []

        def run():
            try:
                batch_write(df)
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]

    stream = spark.readStream.schema(rows.schema).parquet(folder + "/rows").writeStream.foreachBatch(write)
    query = stream.option("checkpointLocation", folder + "/checkpoint").trigger(availableNow=True).start()
    try:
        query.awaitTermination()
    except Exception as error:
        print("REFUSED", str(error).replace(chr(10), " "))
    else:
        print("WRITTEN")
    if form == "write":
        batch_write(rows)
    spark.stop()


if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("mode", "form", "says"),
    [
        ("connect", "write", "inside foreachBatch"),
        ("connect", "format", "cannot be used on Spark Connect"),
        ("thread", "write", "this thread does not say"),
        ("unpinned", "write", "this thread does not say"),
    ],
)
def test_exactly_once_batch_write_in_foreach_batch_is_refused(
    mode: str, form: str, says: str, module_kafka: Callable[..., EmbeddedKafka], tmp_path: Path
) -> None:
    kafka = module_kafka()
    topic = f"refusals-{mode}-{form}"
    kafka.create_topic(topic, 2)
    options = {
        "kafka.bootstrap.servers": kafka.bootstrap_servers,
        "topic": topic,
        "delivery.guarantee": "exactly-once",
    }
    variables = {"PYSPARK_PIN_THREAD": "false"} if mode == "unpinned" else {}
    done = run_script(JOB, tmp_path, mode, form, json.dumps(options), str(tmp_path), **variables)
    (refused,) = [line for line in done.stdout.splitlines() if line.startswith(("REFUSED", "WRITTEN"))]
    assert refused.startswith("REFUSED"), done.stdout
    assert says in refused
    written = 20 if form == "write" else 0  # once, by the write outside foreachBatch
    assert len(visible_values(kafka.bootstrap_servers, topic)) == written
