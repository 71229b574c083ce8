"""Spark keeps `format("kafka")`: no Python data source gets that name, with or without Spark's own Kafka jars."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.fresh_process import run_script
from support.spark_fixture import SPARK_SINK_LOCK

from spark_kafka_sink.local import fetch_jars

pytestmark = pytest.mark.slow

MODULE = """
from pathlib import Path
from spark_kafka_sink import KafkaSinkDataSource

Path(__file__).with_suffix(".seen").touch()

class DefaultSource(KafkaSinkDataSource):
    @classmethod
    def name(cls):
        return "{name}"
"""

JOB = """
import json
import sys
from pyspark.sql import SparkSession

how, jars, folder = sys.argv[1:]
settings = {"ui.enabled": "false", "ui.showConsoleProgress": "false", "log.level": "FATAL", "jars": jars}
builder = SparkSession.builder.master("local[1]")
for name, value in settings.items():
    builder = builder.config(f"spark.{name}", value)
spark = builder.getOrCreate()

# kafka.lingerms: Spark's sink ignores an unknown option, this one refuses it.
options = {"kafka.bootstrap.servers": "127.0.0.1:1", "topic": "t", "kafka.max.block.ms": "1000", "kafka.lingerms": "5"}
rows = spark.range(1).selectExpr("'v' AS value")
rows.write.parquet(folder + "/rows")
stream = spark.readStream.schema(rows.schema).parquet(folder + "/rows")

def tell(what, do):
    try:
        do()
    except Exception as error:
        print(json.dumps([what, str(error)]))
    else:
        print(json.dumps([what, "done"]))

def write(name):
    rows.write.format(name).options(**options).mode("append").save()

def write_stream(name, checkpoint):
    writer = stream.writeStream.format(name).options(**options)
    writer.option("checkpointLocation", folder + checkpoint).trigger(availableNow=True).start().awaitTermination()

if how == "module":
    tell("another name", lambda: write("kafka_otherwise"))
else:
    sys.path.append(folder + "/modules")
    from pyspark_named_kafka import DefaultSource
    tell("register", lambda: spark.dataSource.register(DefaultSource))
tell("batch", lambda: write("kafka"))
tell("stream", lambda: write_stream("kafka", "/checkpoint"))
spark.stop()
"""

NOT_FOUND = "Failed to find data source: kafka. Please deploy the application as per"
SPARKS_OWN = "org.apache.kafka.common.errors.TimeoutException: Topic t not present in metadata after 1000 ms"


@pytest.mark.parametrize("how", ["register", "module"])
@pytest.mark.parametrize("has_jars", [False, True])
def test_python_source_does_not_get_the_name_kafka(tmp_path: Path, has_jars: bool, how: str) -> None:
    """Spark loads the module, does not use it for this name, and uses it for another one."""
    modules = tmp_path / "modules"
    modules.mkdir()
    for module, name in (("pyspark_named_kafka", "kafka"), ("pyspark_named_otherwise", "kafka_otherwise")):
        (modules / f"{module}.py").write_text(MODULE.format(name=name))
    jars = ",".join(map(str, fetch_jars(SPARK_SINK_LOCK))) if has_jars else ""
    found = {"PYTHONPATH": str(modules)} if how == "module" else {}
    done = run_script(JOB, tmp_path, how, jars, str(tmp_path), **found)
    reported = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))

    if how == "module":
        assert (modules / "pyspark_named_kafka.seen").exists(), "Spark has not looked at the module"
        assert "ConfigError: kafka.lingerms" in reported["another name"]
    else:
        assert "[DATA_SOURCE_ALREADY_EXISTS] Data source 'kafka' already exists." in reported["register"]
    for way in ("batch", "stream"):
        assert (SPARKS_OWN if has_jars else NOT_FOUND) in reported[way]
