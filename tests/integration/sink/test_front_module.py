"""Spark's search for data sources when the packages of `kafka_sink` are broken."""

from __future__ import annotations

from pathlib import Path

from support.fresh_process import run_script

NEIGHBOUR = """
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition


class Reader(DataSourceReader):
    def partitions(self):
        return [InputPartition(0)]

    def read(self, partition):
        yield (7,)


class DefaultSource(DataSource):
    @classmethod
    def name(cls):
        return "neighbour"

    def schema(self):
        return "n int"

    def reader(self, schema):
        return Reader()
"""

JOB = """
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
print("READ", spark.read.format("neighbour").load().collect()[0].n)
frame = spark.range(1).selectExpr("string(id) AS value")
options = {"kafka.bootstrap.servers": "127.0.0.1:1", "topic": "t"}
for write in (
    lambda: frame.write.format("kafka_sink").options(**options).mode("append").save(),
    lambda: spark.readStream.format("rate").load().selectExpr("string(value) AS value").writeStream
    .format("kafka_sink").options(**options).option("checkpointLocation", "checkpoint").start().awaitTermination(),
    lambda: spark.read.format("kafka_sink").load(),
):
    try:
        write()
    except Exception as error:
        lines = [line for line in str(error).splitlines() if 'format("kafka_sink") cannot be used:' in line]
        print("REFUSED", lines[-1])
spark.stop()
"""


def test_missing_package_disables_only_kafka_sink(tmp_path: Path) -> None:
    (tmp_path / "pyspark_aa_neighbour.py").write_text(NEIGHBOUR)
    (tmp_path / "kio.py").write_text("raise ModuleNotFoundError(\"No module named 'kio'\", name='kio')\n")
    done = run_script(JOB, tmp_path, PYTHONPATH=str(tmp_path))
    lines = [line for line in done.stdout.splitlines() if line.startswith(("READ", "REFUSED"))]
    assert lines[0] == "READ 7"
    assert len(lines) == 4
    assert all("the package kio is missing" in line and "pip install 'kio" in line for line in lines[1:])
