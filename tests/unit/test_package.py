"""The version of the package, and the modules that a process with only a producer does not import."""

from __future__ import annotations

import importlib.metadata

from support.fresh_process import run_strictly, without

import spark_kafka_sink

PRODUCER = """
from spark_kafka_sink import KafkaProducer

KafkaProducer({"bootstrap.servers": "127.0.0.1:1"}).close(0)
print({"http.client", "urllib.request", "pyspark", "pandas"} & sys.modules.keys() or "nothing")
"""


def test_version_is_that_of_the_installed_package() -> None:
    assert spark_kafka_sink.__version__ == importlib.metadata.version("spark-kafka-sink")


def test_producer_does_not_import_http() -> None:
    done = run_strictly(PRODUCER)
    assert (done.stdout.splitlines()[-1:], done.stderr) == (["nothing"], "")


TABLE = """
sys.path.insert(0, "tests")
import pyarrow
from support.producer_harness import ProducerHarness

print(ProducerHarness().write(pyarrow.table({"value": ["1", "2"]})).records)
print({"pyspark", "py4j"} & sys.modules.keys() or "nothing")
"""


def test_table_is_written_without_spark() -> None:
    done = run_strictly(TABLE)
    assert (done.stdout.splitlines()[-2:], done.stderr) == (["2", "nothing"], "")


WITHOUT_SPARK = """
import spark_kafka_sink
from spark_kafka_sink import ConfigError, KafkaError, KafkaProducer, RecordColumns, RecordMetadata, SchemaError
from spark_kafka_sink.transactions import main

for name in ("KafkaSink", "KafkaSinkDataSource"):
    try:
        getattr(spark_kafka_sink, name)
    except ImportError as error:
        print(error)
"""


def test_only_names_of_spark_need_pyspark() -> None:
    done = run_strictly(without("pyspark") + WITHOUT_SPARK)
    assert (done.returncode, done.stderr) == (0, "")
    told = done.stdout.splitlines()
    assert len(told) == 2
    for line in told:
        assert line.startswith('KafkaSink and format("kafka_sink") need PySpark 3.5 or newer, and this Python (')
        assert "No module named pyspark" in line
        assert "-m pip install 'spark-kafka-sink[spark]'" in line


IMPORTS = """
import pyspark

pyspark.__version__ = {version!r}
for module in {modules!r}:
    try:
        __import__(module)
        print(module, "works")
    except ImportError as error:
        print(error)
"""
SINK, SOURCE = "spark_kafka_sink.sink.kafka_sink", "spark_kafka_sink.sink.data_source"


def imports(version: str, *modules: str, begin: str = "") -> list[str]:
    """Return the line that the import of each module prints with this version of PySpark."""
    done = run_strictly(begin + IMPORTS.format(version=version, modules=modules))
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_pyspark_too_old_is_named() -> None:
    for line in imports("3.4.4", SINK, SOURCE):
        assert "need PySpark 3.5 or newer, and this is 3.4.4 (" in line


def test_pyspark_3_5_has_no_format_and_the_error_names_the_calls_that_work() -> None:
    sink, source = imports("3.5.7", SINK, SOURCE, begin=without("pyspark.sql.datasource"))
    assert sink == f"{SINK} works"
    assert source.startswith('format("kafka_sink") needs PySpark 4.0 or newer, and this is 3.5.7')
    assert "writeStream.foreachBatch(sink.write_batch)" in source
