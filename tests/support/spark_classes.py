"""Makes an archive of the classes of Spark (JDK's AppCDS): `python tests/support/spark_classes.py FILE`.

A JVM that maps its classes instead of parsing them needs 12 instead of 20 seconds of processor time for a small job.
The program runs a job of batches and streams, and its JVM writes the archive at its end. A Java that cannot write one
leaves an empty file. `QUICK_JVM` uses the archive. A JVM with other jars ignores it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# A JVM that lives for seconds needs one compiler tier and a simple collector. It says nothing of classes that an
# archive cannot take, or of an archive of other jars.
_QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable -Xlog:all=error:stderr"
_ARCHIVE = Path(__file__).resolve().parents[2] / "build" / "spark-classes.jsa"
QUICK_JVM: Final = _QUICK + (
    f" -XX:SharedArchiveFile={_ARCHIVE}" if _ARCHIVE.exists() and _ARCHIVE.stat().st_size else ""
)
"""Options of Java for the Spark of a test."""


def run_job(spark: SparkSession, folder: Path) -> None:
    """Load the classes that most tests need."""
    rows = spark.range(100).selectExpr("string(id) AS value", "named_struct('a', id, 'b', array(id)) AS row")
    rows.repartition(2).write.parquet(str(folder / "in"))
    stored = spark.read.parquet(str(folder / "in"))
    stored.selectExpr("to_json(row) AS value").mapInArrow(lambda batches: batches, "value STRING").collect()
    stored.groupBy("value").count().orderBy("value").foreachPartition(lambda part: list(part).clear())
    stream = spark.readStream.schema(stored.schema).parquet(str(folder / "in"))

    def write_batch(batch: DataFrame, _batch_id: int) -> None:
        batch.mapInArrow(lambda batches: batches, batch.schema).count()

    writer = stream.writeStream.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True)
    writer.foreachBatch(write_batch).start().awaitTermination()


def main() -> None:
    from pyspark.sql import SparkSession

    print("Preparing Spark's classes for fast starts of the tests (once, half a minute)", flush=True)
    archive = Path(sys.argv[1])
    archive.parent.mkdir(exist_ok=True)
    fresh = archive.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    os.environ["SPARK_SUBMIT_OPTS"] = f"{_QUICK} -XX:ArchiveClassesAtExit={fresh}"
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    spark = builder.config("spark.log.level", "ERROR").getOrCreate()
    with tempfile.TemporaryDirectory() as folder:
        run_job(spark, Path(folder))
    jvm = spark.sparkContext._gateway.proc  # type: ignore[union-attr]
    spark.stop()
    jvm.stdin.close()
    jvm.wait()
    fresh.touch()
    fresh.replace(archive)


if __name__ == "__main__":
    main()
