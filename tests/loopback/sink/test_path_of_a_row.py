"""The path of a row in ARCHITECTURE.md: a write runs code of each file that the page names."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from types import FrameType

import pyarrow as pa
import pytest
from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_server import ScriptedServer

import spark_kafka_sink
from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.producer.kafka_producer import KafkaProducer
from spark_kafka_sink.sink.arrow_writer import write_arrow
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.producer_pool import ProducerPool

PACKAGE = Path(spark_kafka_sink.__file__).parent
MOST_FILES = 30
ON_THE_DRIVER = "sink/kafka_sink.py"


@pytest.fixture
def named() -> set[str]:
    path = (PACKAGE / "ARCHITECTURE.md").read_text().split("## The path of a row")[1].split("6. **Answer to row.**")[0]
    return set(re.findall(r"`(\w+/\w+\.py)`", path))


def files_of_a_write(server: ScriptedServer) -> set[str]:
    """Write a batch as a task does. Return the files of the package that the task and the Sender ran code of."""
    ran: set[str] = set()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            ran.add(frame.f_code.co_filename)

    servers = ",".join(server.bootstrap_servers)
    options = {"kafka.bootstrap.servers": servers, "topic": "t", "kafka.compression.type": "lz4"}
    pool = ProducerPool(KafkaProducer, SystemClock())
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        rows = pa.record_batch({"key": pa.array([b"k"]), "value": pa.array([b"v"])})
        list(write_arrow(SinkConfig.from_options(options), pool, [rows]))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        for _, _, producer in pool.producers():
            producer.close()
    return {str(Path(file).relative_to(PACKAGE)) for file in ran if Path(file).is_relative_to(PACKAGE)}


def test_a_write_runs_each_file_that_the_page_names(named: set[str]) -> None:
    cluster = ScriptedCluster(1)
    cluster.create_topic("t", partitions=2)
    with ScriptedServer(cluster) as server:
        ran = files_of_a_write(server)
    assert named - ran == {ON_THE_DRIVER}
    assert len(named) <= MOST_FILES
