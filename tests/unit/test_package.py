"""What the package says of itself, and what a process that only produces does not load."""

from __future__ import annotations

import importlib.metadata

from support.fresh_process import run_strictly

import spark_kafka_sink

PRODUCER = """
from spark_kafka_sink import KafkaProducer

KafkaProducer({"bootstrap.servers": "127.0.0.1:1"}).close(0)
print({"http.client", "urllib.request", "pyspark", "pandas"} & sys.modules.keys() or "nothing")
"""


def test_its_version_is_the_installed_ones() -> None:
    assert spark_kafka_sink.__version__ == importlib.metadata.version("spark-kafka-sink")


def test_producer_does_not_import_http() -> None:
    done = run_strictly(PRODUCER)
    assert (done.stdout.splitlines()[-1:], done.stderr) == (["nothing"], "")


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
    """Where the package was installed without its dependencies, as for clusters that bring PySpark."""
    done = run_strictly(OLDER_SPARK)
    assert "needs PySpark 4.1 or newer, and this is 4.0.1: " in done.stdout
