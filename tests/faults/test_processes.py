"""Rows 43 to 46 and 52: faults of the process, its memory and a disk, and a producer that is closed during a fault."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from integration.producer import test_process as process
from pyspark.sql import SparkSession
from support.fault_stage import PROPERTIES, FaultStage, Timeline
from support.lateness import Stopwatch
from support.librdkafka import read_topic, read_values
from support.spark_workers import python_workers
from support.tcp_proxy import Way
from support.workload import Workload, draw_settings, finish

from spark_kafka_sink.common.errors import KafkaTimeoutError, ProducerClosedError, TransactionAbortedError
from spark_kafka_sink.local import Admin, EmbeddedKafka
from spark_kafka_sink.producer.futures import FutureRecordMetadata
from spark_kafka_sink.producer.kafka_producer import KafkaProducer
from spark_kafka_sink.sink.kafka_sink import KafkaSink

ROOT = Path(__file__).resolve().parents[2]
MEGABYTE = 1024 * 1024
StartProducer = Callable[..., KafkaProducer]


def test_row_43_fork_with_an_open_producer(broker: Admin, fresh_name: str) -> None:
    process.test_forked_child_is_refused_and_changes_nothing(broker, fresh_name)


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_row_44_idle_worker_ended(spark: SparkSession, one_node: FaultStage, kind: signal.Signals) -> None:
    """A task's rows are acknowledged at its end. The later death of its worker loses none, and the next task gets a new
    worker.
    """
    places = one_node.new_topic(partitions=2)
    topic = places[0][0]
    sink = KafkaSink({"kafka.bootstrap.servers": one_node.direct, "kafka.linger.ms": "5000"}, topic=topic)
    count = 0
    for _ in range(3):
        spark.range(count, count + 100).selectExpr("CAST(id AS STRING) AS value").foreachPartition(sink.write_partition)
        count += 100
        workers = python_workers(os.getpid())
        one_node.note(f"{kind.name} to {len(workers)} idle workers")
        assert workers
        for worker in workers:
            worker.send_signal(kind)
        psutil.wait_procs(workers, timeout=5)
        values = sorted(int(value) for value in read_values(one_node.direct, topic, 2))
        assert values == list(range(count))


STALLED = """
import json, os, sys, threading, time
from spark_kafka_sink.producer.futures import FutureRecordMetadata
from spark_kafka_sink.producer.kafka_producer import KafkaProducer

servers, topic = sys.argv[1:]
producer = KafkaProducer({"bootstrap.servers": servers, "buffer.memory": 8 << 20, "max.block.ms": 1500,
                          "request.timeout.ms": 1000, "batch.size": 1 << 20})
producer.send(topic, "first" + "." * 90_000, partition=0).result(30)

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

before = resident()
print("warm", flush=True)
sys.stdin.readline()  # the broker is silent now
taken, longest = 0, 0.0
while True:
    began = time.monotonic()
    future = producer.send(topic, f"{taken}-" + "." * 100_000, partition=0)
    longest = max(longest, time.monotonic() - began)
    if future.done():
        break
    taken += 1
error = future.exception()
grown = resident() - before
order = []

def wait(number):
    producer.send(topic, f"waiter {number}-" + "." * 100_000, partition=0,
                  on_completion=lambda metadata, error: order.append([number, str(error) if error else None]))

threads = []
for number in range(5):
    threads.append(threading.Thread(target=wait, args=[number]))
    threads[-1].start()
    time.sleep(0.1)
print("blocked", flush=True)
sys.stdin.readline()  # the broker goes on
for thread in threads:
    thread.join()
producer.flush(60)
print(json.dumps({"taken": taken, "longest": longest, "error": f"{type(error).__name__}: {error}", "order": order,
                  "grown": grown}), flush=True)
producer.close()
"""


def test_row_45_buffer_full_before_a_silent_broker(one_node: FaultStage) -> None:
    ((topic, _),) = one_node.new_topic()
    command = [sys.executable, "-W", "error", "-c", STALLED, one_node.direct, topic]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "warm\n"
        one_node.suspend(1)
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "blocked\n"
        one_node.resume(1)
        child.stdin.write("\n")
        child.stdin.flush()
        found = json.loads(child.stdout.readline())
    one_node.note(f"{found}")
    assert child.returncode == 0
    assert 60 <= found["taken"] <= 84
    assert 1.4 <= found["longest"] <= 1.5 * 1.1
    assert found["error"].startswith("BufferExhaustedError: ")
    assert "max.block.ms=1500" in found["error"]
    assert 4 * MEGABYTE < found["grown"] < (8 + 24) * MEGABYTE
    # Threads get memory in the order of their requests; the scheduler decides which one appends first.
    assert sorted(found["order"]) == [[number, None] for number in range(5)]
    values = [value.partition(b"-")[0] for value in (each.value() for each in read_topic(one_node.direct, topic)[1:])]
    taken = [str(number).encode() for number in range(found["taken"])]
    assert values == taken + [f"waiter {number}".encode() for number, _ in found["order"]]


def test_row_46_log_dir_fails(
    own_kafka: Callable[..., EmbeddedKafka], start_producer: StartProducer, timeline: Timeline, seed: int
) -> None:
    """One of the leader's two disks fails: it gives up its partitions there, and the next leader takes the records."""
    rng = random.Random(seed)
    quick = {
        "log.initial.task.delay.ms": 500,
        "log.flush.offset.checkpoint.interval.ms": 500,
        "log.dir.failure.timeout.ms": 60_000,
    }
    kafka = own_kafka(3, properties=PROPERTIES | quick, log_dirs=2)
    kafka.create_topic("t", 6, 3, {"min.insync.replicas": 2})
    producer = start_producer(kafka.bootstrap_servers, **draw_settings(rng))
    places = [("t", partition) for partition in range(6)]
    before = {each.partition: each.leader for each in kafka.describe_topic("t").partitions}
    with Workload(producer, places, rng) as work:
        work.await_acknowledged(50)
        broken = kafka.log_dirs(1)[1]
        lost = [place for place in places if before[place[1]] == 1 and (broken / f"t-{place[1]}").exists()]
        timeline.note(f"the second disk of node 1, with {len(lost)} partitions that it leads, is gone")
        assert lost
        broken.rename(broken.with_name("gone"))
        broken.touch()
        work.await_acknowledged(50)
        deadline = time.monotonic() + 20
        while 1 in {each.leader for each in kafka.describe_topic("t").partitions if ("t", each.partition) in lost}:
            assert time.monotonic() < deadline, "the node goes on leading partitions whose disk is gone"
            time.sleep(0.1)
        work.await_acknowledged(50)
    assert kafka.node_running(1)
    timeline.note(finish(kafka.bootstrap_servers, work))


SITUATIONS: dict[str, Callable[[FaultStage], None]] = {
    "suspended": lambda stage: stage.suspend(1),
    "killed": lambda stage: stage.kill(1),
    "refused": lambda stage: stage.proxies[1].refuse(),
    "black_hole": lambda stage: stage.proxies[1].black_hole(),
    "half_open": lambda stage: stage.proxies[1].half_open(),
    "narrow": lambda stage: stage.proxies[1].shape(Way.UP, bytes_per_s=1.0),
    "well": lambda stage: None,
}


def sent_until_it_blocks(producer: KafkaProducer, topic: str) -> list[FutureRecordMetadata]:
    """Send 2,000 records, or fewer if the producer has found out that no broker answers: then each send would wait for
    max.block.ms.
    """
    futures: list[FutureRecordMetadata] = []
    for _ in range(2_000):
        futures.append(producer.send(topic, b"." * 1_000, partition=0))
        if futures[-1].done() and isinstance(futures[-1].exception(), KafkaTimeoutError):
            break
    return futures


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("transactional_id", [None, "id"], ids=["idempotent", "transactional"])
def test_row_52_close_in_trouble(
    one_node: FaultStage, start_producer: StartProducer, situation: str, transactional_id: str | None
) -> None:
    """Close with a timeout returns by then, every future has its outcome, and the fixture finds nothing left."""
    ((topic, _),) = one_node.new_topic()
    settings: dict[str, object] = {"send.buffer.bytes": 4_096, "max.block.ms": 2_000}
    if transactional_id is not None:
        settings["transactional.id"] = f"{transactional_id}-{topic}"
    producer = start_producer(one_node.proxied, **settings)
    if transactional_id is not None:
        producer.init_transactions()
        producer.begin_transaction()
    producer.send(topic, b"first", partition=0).result(30)
    SITUATIONS[situation](one_node)
    futures = sent_until_it_blocks(producer, topic)
    with Stopwatch() as watch:
        producer.close(timeout=1.5)
    failed = [future.exception() for future in futures if future.exception() is not None]
    one_node.note(f"{situation}: closed in {watch.took_s:.2f} s, {len(failed)} of {len(futures)} records failed")
    assert watch.own_s < 2.0
    assert all(future.done() for future in futures)
    kinds = {type(error) for error in failed}
    expected = {ProducerClosedError, KafkaTimeoutError} | ({TransactionAbortedError} if transactional_id else set())
    assert kinds <= expected
    assert transactional_id or bool(failed) == (situation != "well")
