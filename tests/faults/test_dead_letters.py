"""Row 55: rows that do not fit the schema of their format, among good ones, while the processes that write them die.

Each topic has every row that fits, and the dead letters every other one, as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
from confluent_kafka import Consumer, KafkaException, TopicPartition
from support import unfit_rows
from support.exactly_once_streams import check_nothing_open
from support.fault_stage import FaultStage
from support.killed_query import KEYS, Query
from support.librdkafka import read_topic

from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.producer.kafka_producer import KafkaProducer
from spark_kafka_sink.producer.writes import WriteReport
from spark_kafka_sink.sink.arrow_writer import write_arrow
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.producer_pool import ProducerPool

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
ROWS = 4_000
PARTITIONS = 3
TASK = """
import sys
from faults.test_dead_letters import write_once
report = write_once(*sys.argv[1:4])
print(report.records, report.dead_letters)
"""
AGAIN_AND_AGAIN = """
import sys
from faults.test_dead_letters import write_once
while True:
    write_once(*sys.argv[1:4])
"""
"""This process is still writing when it is killed, even if a busy machine is late to see its first rows."""


class Topics:
    """A topic and its dead letters on the broker of a stage."""

    def __init__(self, stage: FaultStage) -> None:
        self.servers = stage.direct
        self.topic = stage.new_topic(PARTITIONS)[0][0]
        self.dead = stage.new_topic(PARTITIONS)[0][0]
        for name in (self.topic, self.dead):
            stage.await_in_sync(name)
        self.places = [self.servers, self.topic, self.dead]

    def written(self) -> int:
        """Return the number of records in both topics."""
        consumer = Consumer({"bootstrap.servers": self.servers, "group.id": "unused"})
        try:
            places = [TopicPartition(name, part) for name in (self.topic, self.dead) for part in range(PARTITIONS)]
            return sum(end_of(consumer, place) for place in places)
        finally:
            consumer.close()

    def write(self) -> None:
        """Write all rows in a process, at least once."""
        task = [sys.executable, "-c", TASK, *self.places]
        ended = subprocess.run(task, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False)
        assert ended.stdout.split() == [str(ROWS * 3 // 4), str(ROWS // 4)], ended.stderr[-2_000:]

    def write_and_die(self, after_s: float) -> None:
        """Kill a process that writes all rows again and again, some seconds after its first rows are there."""
        before, deadline = self.written(), time.monotonic() + 60
        task = [sys.executable, "-c", AGAIN_AND_AGAIN, *self.places]
        with subprocess.Popen(task, env=ENVIRONMENT, stdout=subprocess.DEVNULL) as process:
            try:
                while process.poll() is None and self.written() == before and time.monotonic() < deadline:
                    time.sleep(0.005)
                time.sleep(after_s)
            finally:
                process.kill()
        assert process.returncode == -signal.SIGKILL
        assert self.written() > before

    def numbers(self, isolation_level: str = "read_committed") -> tuple[Counter[int], Counter[int]]:
        """Check every record. Return how often each row is in the topic and in the dead letters."""
        good = read_topic(self.servers, self.topic, PARTITIONS, isolation_level=isolation_level)
        letters = read_topic(self.servers, self.dead, PARTITIONS, isolation_level=isolation_level)
        return (
            Counter(unfit_rows.check_good(each, KEYS) for each in good),
            Counter(unfit_rows.check_letter(each, KEYS) for each in letters),
        )


def end_of(consumer: Consumer, place: TopicPartition, within_s: float = 60.0) -> int:
    """Return the end of a partition. A new topic may have no leader yet, and a busy machine may answer late."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return int(consumer.get_watermark_offsets(place, timeout=10)[1])
        except KafkaException:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def expected(rows: int) -> tuple[Counter[int], Counter[int]]:
    bad = {row for row in range(rows) if unfit_rows.is_bad(row)}
    return Counter(set(range(rows)) - bad), Counter(bad)


def write_once(servers: str, topic: str, dead: str) -> WriteReport:
    """Write all rows as one task of the sink, at least once."""
    options = {
        "kafka.bootstrap.servers": servers,
        "topic": topic,
        "errors.tolerance": "all",
        "errors.deadletterqueue.topic.name": dead,
        "kafka.batch.size": "20000",
    }
    config = replace(SinkConfig.from_options(options), column_formats=unfit_rows.formats())
    pool = ProducerPool(KafkaProducer, SystemClock())
    batches = []
    for first in range(0, ROWS, 500):
        each = unfit_rows.columns(list(range(first, first + 500)), KEYS)
        batches.append(pa.RecordBatch.from_arrays([*each.values()], [*each]))
    try:
        (report,) = write_arrow(config, pool, batches)
        return WriteReport.of(report.to_pylist(), 1.0)
    finally:
        for _, _, producer in pool.producers():
            producer.close(5)


def test_row_55_rows_that_do_not_fit(one_node: FaultStage) -> None:
    topics = Topics(one_node)
    topics.write()
    assert topics.numbers() == expected(ROWS)


def test_row_55_task_killed_and_run_again(one_node: FaultStage, seed: int) -> None:
    """At least once: each row is there, and in no other place than its own."""
    topics, rng = Topics(one_node), random.Random(seed)
    for _ in range(3):
        topics.write_and_die(rng.random() * 0.05)
    one_node.note(f"3 tasks were killed; {topics.written()} records are there")
    topics.write()
    good, bad = topics.numbers()
    assert (set(good), set(bad)) == tuple(map(set, expected(ROWS)))


def test_row_55_drivers_killed_repeatedly(one_node: FaultStage, tmp_path: Path, seed: int) -> None:
    """Exactly once: each row is visible once, in its topic or in the dead letters."""
    topics = Topics(one_node)
    query = Query(topics.servers, topics.topic, tmp_path / "checkpoint", dead=topics.dead, has_formats=True)
    command = [sys.executable, "-m", "support.killed_query", "--servers", topics.servers, "--topic", topics.topic]
    command += ["--checkpoint", str(query.checkpoint), "--dead", topics.dead, "--formats"]
    command += ["--kills", "8", "--seed", str(seed)]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr[-2_000:]
    one_node.note(ended.stdout.strip())
    reported = json.loads(ended.stdout)
    assert set(reported["ends"]) <= {"killed", "killed itself"}, ended.stderr[-2_000:]
    assert (reported["finished"], reported["status"]) == (reported["last"], 0), ended.stderr[-2_000:]
    check_nothing_open(topics.servers, topics.topic)
    assert topics.numbers() == expected(reported["finished"] * query.rows)
