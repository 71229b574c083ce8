"""A Spark application that writes with secrets in its options, then reads everything that Spark's own UI shows. All
loggers are at their most verbose level. Its argument is a JSON object, in which `kind` selects what it does:

classic: writes in every way, and is refused with a wrong password.
view: writes into a TEMPORARY VIEW whose OPTIONS hold the secrets.
connect-sink: writes by `KafkaSink` from a Spark Connect client.
connect-format: writes by `format`, and into such a view, from a Spark Connect client.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import pickle
import sys
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from spark_kafka_sink import KafkaSink

HAS_FORMAT = importlib.util.find_spec("pyspark.sql.datasource") is not None  # not in PySpark 3.5


def main(arguments: dict[str, str]) -> None:
    logging.basicConfig(level=logging.DEBUG)
    logging.getLogger("py4j").setLevel(logging.INFO)  # it logs every call to the JVM with its arguments
    folder, kind, options = Path(arguments["folder"]), arguments["kind"], json.loads(arguments["options"])
    builder = SparkSession.builder
    builder = builder.remote("local[1]") if kind.startswith("connect") else builder.master("local[1]")
    settings = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": (folder / "events").as_uri(),
        "spark.log.level": "INFO",
        "spark.ui.port": arguments["ui_port"],
        "spark.sql.shuffle.partitions": "1",
        "spark.task.maxFailures": "1",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        **json.loads(arguments["settings"]),
    }
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    frame = spark.range(10).selectExpr("CAST(id AS STRING) AS value")
    if kind == "classic":
        if HAS_FORMAT:
            from spark_kafka_sink import KafkaSinkDataSource

            spark.dataSource.register(KafkaSinkDataSource)
        write_in_every_way(spark, frame, options, folder)
        be_refused(frame, options, json.loads(arguments["wrong"]))
    elif kind == "connect-sink":
        print(KafkaSink(options).write(frame))
        stream(spark, frame, folder, {"foreachBatch": KafkaSink(options).write_batch})
    else:
        if kind == "connect-format":
            frame.write.format("kafka_sink").options(**options).mode("append").save()
            stream(spark, frame, folder, {"format": options})
        write_into_a_view(spark, options)
    show_ui(arguments["ui_port"])
    spark.stop()
    print("DONE")


def write_in_every_way(spark: SparkSession, frame: DataFrame, options: dict[str, str], folder: Path) -> None:
    sink = KafkaSink(options)
    print(repr(sink), str(sink), sink.write(frame))
    print(repr(pickle.loads(pickle.dumps(sink))))
    frame.foreachPartition(sink.write_partition)
    ways: dict[str, object] = {"foreachBatch": sink.write_batch, "foreach": sink}
    if HAS_FORMAT:
        frame.write.format("kafka_sink").options(**options).mode("append").save()
        ways["format"] = options
    frame.explain(extended=True)
    stream(spark, frame, folder, ways)


def stream(spark: SparkSession, frame: DataFrame, folder: Path, ways: dict[str, object]) -> None:
    """Run a stream; `ways` has the options of a format, or the argument for the method of that name."""
    frame.write.parquet(str(folder / "rows"))
    rows = spark.readStream.schema(frame.schema).parquet(str(folder / "rows"))
    for name, given in ways.items():
        if isinstance(given, dict):
            writer = rows.writeStream.format("kafka_sink").options(**given)
        else:
            writer = getattr(rows.writeStream, name)(given)
        checkpoint = str(folder / "checkpoints" / name)
        query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        query.awaitTermination()
        query.explain(extended=True)
        print(query.lastProgress, query.recentProgress)


def write_into_a_view(spark: SparkSession, options: dict[str, str]) -> None:
    quoted = ", ".join(f"{literal(key)} {literal(value)}" for key, value in options.items())
    spark.sql(f"CREATE TEMPORARY VIEW kafka (value STRING) USING kafka_sink OPTIONS ({quoted})").collect()
    spark.sql("INSERT INTO kafka SELECT CAST(id AS STRING) FROM range(10)").collect()


def literal(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"


def be_refused(frame: DataFrame, options: dict[str, str], wrong: dict[str, str]) -> None:
    attempts: list[Callable[[], object]] = [
        lambda: KafkaSink(wrong).write(frame),
        lambda: frame.foreachPartition(KafkaSink(wrong).write_partition),
        lambda: KafkaSink({**options, "kafka.sasl.jaas.config": options["kafka.sasl.jaas.config"].replace(";", "")}),
        lambda: KafkaSink({**options, "kafka.sasl.mechanism": "PLAIN"}),
        lambda: KafkaSink({**options, "kafka.sasl.jaas.confg": options["kafka.sasl.jaas.config"]}),
    ]
    if HAS_FORMAT:
        attempts.append(lambda: frame.write.format("kafka_sink").options(**wrong).mode("append").save())
    for attempt in attempts:
        try:
            attempt()
        except Exception:
            print("REFUSED", traceback.format_exc())
        else:
            raise SystemExit("it was not refused")


def show_ui(port: str) -> None:
    """Print everything that the UI shows. Only a Connect server has the page of Connect."""
    ui = f"http://127.0.0.1:{port}"
    (application,) = json.loads(read(f"{ui}/api/v1/applications"))
    rest = f"{ui}/api/v1/applications/{application['id']}"
    pages = [*(f"{rest}/{part}" for part in ("environment", "jobs", "stages", "sql?details=true"))]
    pages += [f"{ui}/{part}/" for part in ("environment", "SQL", "StreamingQuery", "jobs", "connect")]
    pages += [f"{ui}/SQL/execution/?id={query['id']}" for query in json.loads(read(f"{rest}/sql"))]
    show(pages)


def show(pages: Iterable[str]) -> None:
    for page in pages:
        try:
            print(page, read(page))
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            print(page, "NOT FOUND")


def read(page: str) -> str:
    with urllib.request.urlopen(page, timeout=60) as answer:
        return str(answer.read().decode())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
