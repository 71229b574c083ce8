"""The example runs as a user runs it, and its records arrive."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from pathlib import Path

from support.librdkafka import read_topic

from spark_kafka_sink.local import Admin

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "columns_from_polars.py"


def test_example_writes_a_polars_dataframe(kafka_broker: Admin) -> None:
    """Bug: the program took two words without names, where all other examples take --bootstrap-servers and --topic."""
    topic = f"readings-{uuid.uuid4().hex[:8]}"
    kafka_broker.create_topic(topic)
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--bootstrap-servers", kafka_broker.bootstrap_servers, "--topic", topic],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 records, ")
    assert done.stdout.endswith(f"{topic}-0: the last offset is 2\n")
    messages = read_topic(kafka_broker.bootstrap_servers, topic)
    assert [message.key() for message in messages] == [b"north", b"south", b"north"]
    assert [json.loads(message.value())["celsius"] for message in messages] == [20.5, None, 21.25]
    assert [message.timestamp()[1] for message in messages] == [
        1_795_593_600_000 + minute * 60_000 for minute in range(3)
    ]
    assert {tuple(message.headers()) for message in messages} == {(("origin", b"example"),)}
