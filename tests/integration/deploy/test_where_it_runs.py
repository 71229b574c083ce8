"""Every interface where users run it: on one machine, on executors in separate processes, on a standalone cluster that
gets the package with the job, and on Spark Connect. Each test runs a user's job without changes (write_job.py).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from integration.deploy.conftest import WRITE_JOB, Told, environment, run
from support.librdkafka import read_topic
from support.pyspark_capabilities import FORMAT, PARTITIONS_OF_CONNECT, RELEASE, SAME_NAME, without_format

from spark_kafka_sink.local import Admin
from spark_kafka_sink.local.jars import resolve_jars

pytestmark = pytest.mark.slow

CONNECT_OF_3_5 = "org.apache.spark:spark-connect_2.12:3.5.7"
"""The server for PySpark 3.5, which does not bring it. 3.5.7 is the last one that was published."""

Submit = Callable[..., Told]


LIMITED = ("limitedWrite", "limitedFormat")


@pytest.fixture
def limited(kafka_broker: Admin, topic: str) -> list[str]:
    """The interfaces with a limit, each with its own topic."""
    names = without_format(*LIMITED)
    for name in names:
        kafka_broker.create_topic(f"{topic}-{name}", partitions=2)
    return names


def assert_limit_held(broker: Admin, topic: str, reported: Told) -> None:
    """300 rows of three tasks take three seconds at 100 a second; the first quarter of a second goes at once."""
    names = [name for name in reported.done if name in LIMITED]
    assert names
    for name in names:
        records = read_topic(broker.bootstrap_servers, f"{topic}-{name}", 2)
        assert sorted(int(record.value() or b"-1") for record in records) == [*range(300)]
        times = [record.timestamp()[1] for record in records]
        assert 2_500 <= max(times) - min(times) < 6_000, name


def assert_each_wrote_every_row(broker: Admin, topic: str, reported: Told) -> None:
    written = [name for name in reported.done if name not in ("places", "register", *LIMITED)]
    records = Counter((record.key(), record.value()) for record in read_topic(broker.bootstrap_servers, topic))
    assert records == {(b"%d" % number, b"%d" % number): len(written) for number in range(300)}
    assert written


def test_every_interface_writes_on_one_machine(submit: Submit, kafka_broker: Admin, topic: str) -> None:
    reported = submit("local[3]", [kafka_broker.bootstrap_servers, topic, *without_format("write", "stream")])
    assert_each_wrote_every_row(kafka_broker, topic, reported)


def test_every_interface_writes_with_executors_in_separate_processes(
    submit: Submit, own_spark_home: Path, kafka_broker: Admin, topic: str, limited: list[str]
) -> None:
    reported = submit(
        "local-cluster[2,1,800]",
        [
            kafka_broker.bootstrap_servers,
            topic,
            *without_format("places", "write", "foreachPartition", "format", "stream"),
            *limited,
        ],
        variables={"PYSPARK_PYTHON": sys.executable, "SPARK_HOME": str(own_spark_home)},
    )
    assert_each_wrote_every_row(kafka_broker, topic, reported)
    assert {Path(place["folder"]).parent.parent for place in reported.places} == {own_spark_home / "work"}
    assert_limit_held(kafka_broker, topic, reported)


def test_packed_environment_runs_on_a_standalone_cluster(
    submit: Submit,
    standalone: str,
    packed_environment: Path,
    kafka_broker: Admin,
    topic: str,
    limited: list[str],
    tmp_path: Path,
) -> None:
    """The driver unpacks it too: the format's planning runs on the driver, in the executors' Python."""
    (tmp_path / "environment").mkdir()
    shutil.unpack_archive(packed_environment, tmp_path / "environment", filter="fully_trusted")
    reported = submit(
        standalone,
        [kafka_broker.bootstrap_servers, topic, *without_format("places", "write", "format", "stream"), *limited],
        ["--archives", f"{packed_environment}#environment"],
        {"PYSPARK_PYTHON": "./environment/bin/python"},
    )
    assert_each_wrote_every_row(kafka_broker, topic, reported)
    assert reported.places
    for place in reported.places:
        assert "/app-" in place["folder"]
        assert place["package"].startswith(f"{place['folder']}/environment/")
    assert_limit_held(kafka_broker, topic, reported)


def test_zipped_package_runs_on_a_standalone_cluster(
    submit: Submit, standalone: str, bare_python: Path, zipped_package: Path, kafka_broker: Admin, topic: str
) -> None:
    reported = submit(
        standalone,
        [kafka_broker.bootstrap_servers, topic, *without_format("places", "register", "write", "format", "foreach")],
        ["--py-files", zipped_package],
        {"PYSPARK_PYTHON": str(bare_python)},
    )
    assert_each_wrote_every_row(kafka_broker, topic, reported)
    assert reported.places
    for place in reported.places:
        assert "/app-" in place["folder"]
        assert "spark_kafka_sink.zip/" in place["package"]


def test_executors_without_the_package_name_it_in_the_error(
    submit: Submit, bare_python: Path, kafka_broker: Admin, topic: str
) -> None:
    arguments = [kafka_broker.bootstrap_servers, topic, "write"]
    variables = {"PYSPARK_DRIVER_PYTHON": sys.executable, "PYSPARK_PYTHON": str(bare_python)}
    with pytest.raises(AssertionError, match="No module named 'spark_kafka_sink'"):
        submit("local[1]", arguments, variables=variables)


@FORMAT.needed
def test_unregistered_format_runs_in_the_python_that_found_it(
    submit: Submit, bare_python: Path, kafka_broker: Admin, topic: str
) -> None:
    variables = {"PYSPARK_DRIVER_PYTHON": sys.executable, "PYSPARK_PYTHON": str(bare_python)}
    reported = submit("local[1]", [kafka_broker.bootstrap_servers, topic, "format"], variables=variables)
    assert_each_wrote_every_row(kafka_broker, topic, reported)


@FORMAT.needed
@SAME_NAME.needed
def test_registered_format_runs_in_the_python_of_the_tasks(
    submit: Submit, bare_python: Path, kafka_broker: Admin, topic: str
) -> None:
    variables = {"PYSPARK_DRIVER_PYTHON": sys.executable, "PYSPARK_PYTHON": str(bare_python)}
    with pytest.raises(AssertionError, match="No module named 'spark_kafka_sink'"):
        submit("local[1]", [kafka_broker.bootstrap_servers, topic, "register", "format"], variables=variables)


@FORMAT.needed
@pytest.mark.parametrize("named_by", ["spark.pyspark.python", "a path with a blank"])
def test_format_must_be_registered_outside_sparks_search_path(
    named_by: str, submit: Submit, kafka_broker: Admin, topic: str, tmp_path: Path
) -> None:
    flags: list[str] = []
    own = Path(sys.executable).parent  # if it is first on the PATH, Spark finds the format with its python3
    path = os.environ["PATH"].split(os.pathsep)
    variables = {"PATH": os.pathsep.join(folder for folder in path if Path(folder) != own)}
    if named_by == "spark.pyspark.python":
        flags = ["--conf", f"spark.pyspark.python={sys.executable}"]
    else:
        (tmp_path / "a blank").symlink_to(sys.prefix)
        variables["PYSPARK_PYTHON"] = str(tmp_path / "a blank" / "bin" / "python")
    with pytest.raises(AssertionError, match=r"ClassNotFoundException: kafka_sink\.DefaultSource"):
        submit("local[1]", [kafka_broker.bootstrap_servers, topic, "format"], flags, variables)
    reported = submit("local[1]", [kafka_broker.bootstrap_servers, topic, "register", "format"], flags, variables)
    assert_each_wrote_every_row(kafka_broker, topic, reported)


def test_every_interface_writes_on_spark_connect(
    kafka_broker: Admin, topic: str, limited: list[str], tmp_path: Path
) -> None:
    interfaces = without_format("write", "foreachPartition", "format", "foreach", "foreachBatch", "stream")
    variables = environment(SPARK_REMOTE="local[2]", PYSPARK_PYTHON=sys.executable)
    if not PARTITIONS_OF_CONNECT.is_there:
        interfaces.remove("foreachPartition")
    if RELEASE < (4, 0):
        ((_, jar),) = resolve_jars([CONNECT_OF_3_5], with_dependencies=False, folder=tmp_path / "jars")
        variables["PYSPARK_SUBMIT_ARGS"] = f"--jars {jar} pyspark-shell"
    arguments = [kafka_broker.bootstrap_servers, topic, *interfaces, *limited]
    reported = run([sys.executable, WRITE_JOB, *arguments], tmp_path, variables)
    assert_each_wrote_every_row(kafka_broker, topic, reported)
    assert_limit_held(kafka_broker, topic, reported)


@PARTITIONS_OF_CONNECT.needed
def test_partitions_of_spark_connect_refuse_a_time_that_comes_twice(
    kafka_broker: Admin, topic: str, tmp_path: Path
) -> None:
    """Bug: both times were written as the first one, because the rows of Spark Connect do not say which one it is."""
    variables = environment(SPARK_REMOTE="local[1]", PYSPARK_PYTHON=sys.executable, TZ="Europe/Berlin")
    with pytest.raises(AssertionError, match="Spark Connect does not tell foreachPartition which of the two it is"):
        run([sys.executable, WRITE_JOB, kafka_broker.bootstrap_servers, topic, "repeatedHour"], tmp_path, variables)
