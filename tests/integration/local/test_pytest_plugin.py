"""The fixtures, in a separate pytest run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

USES_SHARED = """
def test_that_fails(kafka_broker, topic):
    assert kafka_broker.describe_topic(topic).partitions == "not this"
"""


def run_pytest(folder: Path, source: str, **environment: str) -> str:
    """The output of pytest for one test file with the plugin."""
    (folder / "test_it.py").write_text(source)
    inherited = {name: value for name, value in os.environ.items() if name != "KAFKA_BOOTSTRAP_SERVERS"}
    options = ["-p", "spark_kafka_sink.local.pytest_plugin", "-c", os.devnull, "--rootdir", str(folder)]
    process = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--basetemp", str(folder / "base"), str(folder / "test_it.py")],
        cwd=ROOT,
        env={**inherited, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 1, process.stdout + process.stderr
    return process.stdout


def test_failing_test_reports_its_brokers_log_folder(tmp_path: Path) -> None:
    output = run_pytest(tmp_path, USES_SHARED)
    report = re.search(r"-+ Kafka logs -+\n(.*)", output)
    assert report is not None, output
    assert "Kafka Server started" in (Path(report[1].strip()) / "node-1" / "server.log").read_text()
    assert "test-that-fails" in report[1].replace("_", "-")


STOPS_ITS_OWN = """
def test_that_fails(own_kafka):
    own_kafka().stop()
    assert False
"""


def test_no_log_folder_is_reported_for_a_stopped_cluster(tmp_path: Path) -> None:
    assert "Kafka logs" not in run_pytest(tmp_path, STOPS_ITS_OWN)


LEAVES_NO_ROOM = """
def test_that_fails(kafka_broker, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "kafka-logs0"
    folder.rmdir()
    folder.touch()
    assert False, "the reason"

def test_that_comes_after_it():
    pass
"""


def test_unsaved_logs_do_not_end_the_run(tmp_path: Path) -> None:
    """Bug: with a full disk the first failing test was an INTERNALERROR of pytest, and its reason was lost."""
    output = run_pytest(tmp_path, LEAVES_NO_ROOM)
    assert "The logs cannot be saved: " in output
    assert "the reason" in output
    assert "1 failed, 1 passed" in output


def test_testcontainers_without_docker_is_a_clear_error(tmp_path: Path) -> None:
    output = run_pytest(
        tmp_path, USES_SHARED, SPARK_KAFKA_SINK_TEST_BROKER="testcontainers", DOCKER_HOST="tcp://127.0.0.1:1"
    )
    assert "SPARK_KAFKA_SINK_TEST_BROKER=testcontainers needs a Docker engine, and none answers" in output


def test_an_unknown_source_of_brokers_is_refused(tmp_path: Path) -> None:
    output = run_pytest(tmp_path, USES_SHARED, SPARK_KAFKA_SINK_TEST_BROKER="docker")
    assert "SPARK_KAFKA_SINK_TEST_BROKER=docker: it must be `embedded` (the default) or `testcontainers`" in output


def test_existing_cluster_is_taken_from_the_environment(tmp_path: Path) -> None:
    output = run_pytest(tmp_path, USES_SHARED, KAFKA_BOOTSTRAP_SERVERS="127.0.0.1:1")
    assert re.search(r"No server answers a CreateTopicsRequest: 127\.0\.0\.1:1", output), output
