"""Every interface where users run it: one machine, executors of their own, a standalone cluster that gets the package
with the job, Spark Connect. Each time a job of a user's is run as it stands (write_job.py).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from integration.deploy.conftest import WRITE_JOB, Told, environment, run
from support.librdkafka import read_topic

from spark_kafka_sink.local import Admin

INTERFACES = ("write", "foreachPartition", "format", "foreach", "foreachBatch", "stream")

Submit = Callable[..., Told]


def assert_each_wrote_every_row(broker: Admin, topic: str, told: Told, interfaces: tuple[str, ...]) -> None:
    assert told.done == ["places", *interfaces]
    records = Counter((record.key(), record.value()) for record in read_topic(broker.bootstrap_servers, topic))
    assert records == {(b"%d" % number, b"%d" % number): len(interfaces) for number in range(300)}


@pytest.mark.parametrize("master", ["local[3]", "local-cluster[2,1,800]"])
def test_on_one_machine(submit: Submit, kafka_broker: Admin, topic: str, master: str) -> None:
    """local-cluster has executors in processes of their own."""
    told = submit(master, [kafka_broker.bootstrap_servers, topic, "places", *INTERFACES])
    assert_each_wrote_every_row(kafka_broker, topic, told, INTERFACES)
    assert len({place["folder"] for place in told.places}) == (2 if "cluster" in master else 1)


def test_a_packed_environment_on_a_standalone_cluster(
    submit: Submit, standalone: str, packed_environment: Path, kafka_broker: Admin, topic: str
) -> None:
    told = submit(
        standalone,
        [kafka_broker.bootstrap_servers, topic, "places", *INTERFACES],
        ["--archives", f"{packed_environment}#environment"],
        {"PYSPARK_DRIVER_PYTHON": sys.executable, "PYSPARK_PYTHON": "./environment/bin/python"},
    )
    assert_each_wrote_every_row(kafka_broker, topic, told, INTERFACES)
    assert told.places
    for place in told.places:
        assert "/work/app-" in place["folder"]
        assert place["package"].startswith(f"{place['folder']}/environment/")


def test_a_zip_of_the_package_on_a_standalone_cluster(
    submit: Submit, standalone: str, bare_python: Path, zipped_package: Path, kafka_broker: Admin, topic: str
) -> None:
    told = submit(
        standalone,
        [kafka_broker.bootstrap_servers, topic, "places", *INTERFACES],
        ["--py-files", zipped_package],
        {"PYSPARK_PYTHON": str(bare_python)},
    )
    assert_each_wrote_every_row(kafka_broker, topic, told, INTERFACES)
    assert told.places
    for place in told.places:
        assert "/work/app-" in place["folder"]
        assert "spark_kafka_sink.zip/" in place["package"]


def test_executors_without_the_package_say_so(
    submit: Submit, bare_python: Path, kafka_broker: Admin, topic: str
) -> None:
    arguments = [kafka_broker.bootstrap_servers, topic, "write"]
    variables = {"PYSPARK_DRIVER_PYTHON": sys.executable, "PYSPARK_PYTHON": str(bare_python)}
    with pytest.raises(AssertionError, match="No module named 'spark_kafka_sink'"):
        submit("local[1]", arguments, variables=variables)


def test_spark_connect(kafka_broker: Admin, topic: str, tmp_path: Path) -> None:
    arguments = [kafka_broker.bootstrap_servers, topic, "places", *INTERFACES]
    variables = environment(SPARK_REMOTE="local[2]", PYSPARK_PYTHON=sys.executable)
    told = run([sys.executable, WRITE_JOB, *arguments], tmp_path, variables)
    assert_each_wrote_every_row(kafka_broker, topic, told, INTERFACES)
