"""The version of the package, and the modules that a process with only a producer does not import."""

from __future__ import annotations

import importlib.metadata

from support.fresh_process import run_strictly

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


OLDER_SPARK = """
import pyspark.sql.datasource

del pyspark.sql.datasource.DataSourceStreamArrowWriter
pyspark.__version__ = "4.0.1"
try:
    from spark_kafka_sink import KafkaSinkDataSource
except ImportError as error:
    print(error)
"""


def test_pyspark_too_old_for_the_data_source_is_named() -> None:
    """The package may be installed without its dependencies, for clusters that have PySpark."""
    done = run_strictly(OLDER_SPARK)
    assert "needs PySpark 4.1 or newer, and this is 4.0.1: " in done.stdout
