"""Write 300 rows to a topic by each requested interface, and print a line of JSON for each. This is a user's job, which
the tests of this folder run; it does not know where it runs. "places" prints where the tasks ran, "register" registers
the format. "limitedWrite" and "limitedFormat" write 100 rows a second to a topic of their own, TOPIC-limitedWrite.
"repeatedHour" writes rows with the two times that are 02:30 in Berlin on 26 October 2025, by foreachPartition.

write_job.py SERVERS TOPIC INTERFACE ...
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from spark_kafka_sink import KafkaSink

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame


def where_it_runs(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import os
    import sys

    import pyarrow as pa

    import spark_kafka_sink

    for _ in batches:
        pass
    found = {"python": sys.executable, "package": spark_kafka_sink.__file__, "folder": os.getcwd()}
    yield pa.RecordBatch.from_pylist([found])


def places(frame: DataFrame) -> list[dict[str, Any]]:
    """The Python, package and folder of each task."""
    found = frame.mapInArrow(where_it_runs, "python STRING, package STRING, folder STRING").distinct().collect()
    return [row.asDict() for row in found]


def stream_of(spark: SparkSession, frame: DataFrame) -> DataFrame:
    folder = tempfile.mkdtemp()
    frame.write.mode("overwrite").json(folder)
    return spark.readStream.schema(frame.schema).json(folder)


def run(writer: Any) -> None:
    with tempfile.TemporaryDirectory() as checkpoint:
        query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        assert query.awaitTermination(300), "the query did not end"
        if query.exception() is not None:
            raise query.exception()


def register(spark: SparkSession) -> None:
    from spark_kafka_sink import KafkaSinkDataSource  # PySpark 3.5 has none

    try:
        spark.dataSource.register(KafkaSinkDataSource)
    except AnalysisException as error:
        if "DATA_SOURCE_ALREADY_EXISTS" not in str(error):  # Spark 4.0 has found it by itself
            raise


def interfaces(spark: SparkSession, frame: DataFrame, options: dict[str, str]) -> dict[str, Callable[[], object]]:
    sink = KafkaSink(options)

    def limited(name: str) -> dict[str, str]:
        return {**options, "topic": f"{options['topic']}-{name}", "write.max.records.per.second": "100"}

    return {
        "register": lambda: register(spark),
        "places": lambda: print(json.dumps({"places": places(frame)}), flush=True),
        "write": lambda: sink.write(frame),
        "foreachPartition": lambda: frame.foreachPartition(sink.write_partition),
        "format": lambda: frame.write.format("kafka_sink").options(**options).mode("append").save(),
        "foreach": lambda: run(stream_of(spark, frame).writeStream.foreach(sink)),
        "foreachBatch": lambda: run(stream_of(spark, frame).writeStream.foreachBatch(sink.write_batch)),  # type: ignore[arg-type]
        "stream": lambda: run(stream_of(spark, frame).writeStream.format("kafka_sink").options(**options)),
        "repeatedHour": lambda: (
            spark.range(2)
            .selectExpr("'v' AS value", "timestamp_seconds(1761438600 + 3600 * id) AS timestamp")
            .foreachPartition(sink.write_partition)
        ),
        "limitedWrite": lambda: KafkaSink(limited("limitedWrite")).write(frame),
        "limitedFormat": lambda: (
            frame.write.format("kafka_sink").options(**limited("limitedFormat")).mode("append").save()
        ),
    }


def main(servers: str, topic: str, *names: str) -> None:
    spark = SparkSession.builder.appName("write_job").getOrCreate()
    frame = spark.range(0, 300, 1, 3).selectExpr("CAST(id AS STRING) AS key", "CAST(id AS STRING) AS value")
    by_name = interfaces(spark, frame, {"kafka.bootstrap.servers": servers, "topic": topic})
    for name in names:
        by_name[name]()
        print(json.dumps({"done": name}), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
