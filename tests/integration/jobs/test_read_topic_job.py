from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from confluent_kafka import Producer

from jobs.read_topic import read_topic
from spark_kafka_sink.local import Admin

JOB = Path(__file__).resolve().parents[3] / "jobs" / "read_topic.py"


@pytest.fixture
def filled_topic(kafka_broker: Admin, new_topic: Callable[..., str]) -> str:
    """A topic of three partitions with 300 records from librdkafka."""
    topic = new_topic(partitions=3)
    producer = Producer({"bootstrap.servers": kafka_broker.bootstrap_servers})
    for n in range(300):
        headers = [("n", str(n).encode()), ("null", None)] if n % 2 else None
        key = None if n % 10 == 0 else f"schlüssel-{n}"
        producer.produce(topic, f"[b]{n}", key, n % 3, timestamp=1_356_998_400_000 + n, headers=headers)  # type: ignore[arg-type]
    assert producer.flush(30) == 0
    return topic


def run(kafka: Admin, topic: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(JOB), "--bootstrap-servers", kafka.bootstrap_servers, "--topic", topic, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_all_fields_come_sorted_by_partition_and_offset(kafka_broker: Admin, filled_topic: str) -> None:
    rows = read_topic(kafka_broker.bootstrap_servers, filled_topic).to_pylist()
    assert [(row["partition"], row["offset"]) for row in rows] == [(p, o) for p in range(3) for o in range(100)]
    for row in rows:
        n = row["offset"] * 3 + row["partition"]
        assert row["topic"] == filled_topic
        assert row["value"] == b"[b]%d" % n
        assert row["key"] == (None if n % 10 == 0 else f"schlüssel-{n}".encode())
        assert row["timestamp"].timestamp() * 1000 == pytest.approx(1_356_998_400_000 + n, abs=0.1)
        headers = [{"key": "n", "value": b"%d" % n}, {"key": "null", "value": None}]
        assert row["headers"] == (headers if n % 2 else [])


def test_an_empty_topic_is_an_empty_table(kafka_broker: Admin, topic: str) -> None:
    assert read_topic(kafka_broker.bootstrap_servers, topic).num_rows == 0
    assert "0 records" in run(kafka_broker, topic).stdout


def test_first_records_and_a_summary_are_shown(kafka_broker: Admin, filled_topic: str) -> None:
    job = run(kafka_broker, filled_topic, "--limit", "7")
    assert job.returncode == 0, job.stderr
    assert "7 of 300 records" in job.stdout
    assert "2013-01-01" in job.stdout
    assert "[b]0" in job.stdout
    assert job.stdout.strip().splitlines()[-1] == "300 records"


@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_the_records_can_be_written_to_a_file(
    kafka_broker: Admin, filled_topic: str, tmp_path: Path, kind: str
) -> None:
    file = tmp_path / f"records.{kind}"
    job = run(kafka_broker, filled_topic, "--output", str(file))
    assert job.returncode == 0, job.stderr
    if kind == "parquet":
        assert pq.read_table(file).equals(read_topic(kafka_broker.bootstrap_servers, filled_topic))
    else:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        assert sorted(row["value"] for row in rows) == sorted(f"[b]{n}" for n in range(300))
        assert rows[1]["headers"][0] == {"key": "n", "value": "3"}


def test_another_kind_of_file_is_refused(kafka_broker: Admin, topic: str) -> None:
    job = run(kafka_broker, topic, "--output", "records.xlsx")
    assert job.returncode == 2
    assert "must end in .parquet or .json" in job.stderr
