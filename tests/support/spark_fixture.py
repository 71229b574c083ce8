"""`spark`: one SparkSession with two cores for the whole test session.

It has the jars of Spark's own Kafka sink only if a test of the session uses `spark_sink`, and the jar of `to_avro` only
if one uses `spark_avro`. `own_spark_home`: for a Spark that leaves files in its folder.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.spark_classes import QUICK_JVM

from spark_kafka_sink.local import fetch_jars
from spark_kafka_sink.local.jars import KAFKA_LOCK

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPARK_SINK_LOCK = KAFKA_LOCK.with_name("spark-sql-kafka.lock.json")
SPARK_AVRO_LOCK = Path(__file__).resolve().parents[2] / "benchmarks" / "spark-avro.lock.json"


def pytest_configure() -> None:
    """Every Spark that a test starts, in this process or in another one, has the options of a quick JVM."""
    os.environ.setdefault("SPARK_SUBMIT_OPTS", QUICK_JVM)


@pytest.fixture
def own_spark_home(tmp_path: Path) -> Path:
    """Return a folder with links to PySpark: executors of local-cluster work below it, and leave their logs there."""
    import pyspark

    home = tmp_path / "spark"
    home.mkdir()
    for entry in Path(pyspark.__file__).parent.iterdir():
        if entry.name != "work":
            (home / entry.name).symlink_to(entry)
    return home


@pytest.fixture(scope="session")
def spark_sink() -> str:
    """Return the format name of Spark's own sink for `spark`."""
    return "kafka"


@pytest.fixture(scope="session")
def spark_avro() -> None:
    """Give `spark` the functions of `pyspark.sql.avro`."""


@pytest.fixture(scope="session")
def spark(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    # A running JVM loads no more jars. The selected tests show whether one needs them.
    needed = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    locks = [
        lock for name, lock in (("spark_sink", SPARK_SINK_LOCK), ("spark_avro", SPARK_AVRO_LOCK)) if name in needed
    ]
    jars = [str(jar) for lock in locks for jar in fetch_jars(lock)]
    session = (
        SparkSession.builder.master("local[2]")
        .appName("spark_kafka_sink tests")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "FATAL")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
        .config("spark.task.maxFailures", "1")
        .config("spark.jars", ",".join(jars))
        .getOrCreate()
    )
    yield session
    session.stop()
