"""Telemetry of real Spark jobs: an OTLP server receives the spans and metrics of each way of writing. A batch is one
trace, and the records in Kafka have the span of their task.
"""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.fresh_process import ROOT, run_script
from support.librdkafka import read_topic
from support.otlp_receiver import ERROR, INTERNAL, PRODUCER, OtlpReceiver, ReceivedSpan, receiving_otlp
from support.pyspark_capabilities import FORMAT

from spark_kafka_sink.local import Admin

pytestmark = FORMAT.needed
CANARY = "canary-Zx9Qw7"
ROWS, PARTITIONS = 10, 2
WAYS = ("write", "each", "format", "save", "once", "once-write", "broken", "rows")
JOB = f"""
import json
import sys

from pyspark.sql import SparkSession

from spark_kafka_sink import KafkaSink

servers, topics = sys.argv[1], json.loads(sys.argv[2])
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
spark.range({ROWS}).selectExpr("string(id) AS value").repartition({PARTITIONS}).write.text("in")
batch = spark.read.text("in")
files = spark.readStream.schema("value STRING").text("in")
broken = files.selectExpr("raise_error('{CANARY}') || value AS value")


def options(way):
    known = {{
        "kafka.bootstrap.servers": servers,
        "kafka.client.id": f"client-{{way}}",
        "topic": topics[way],
        "telemetry.opentelemetry": "true",
        "telemetry.headers.traceparent": "true",
    }}
    return known | {{"delivery.guarantee": "exactly-once"}} if way.startswith("once") else known


def run(frame, way, choose):
    writer = frame.writeStream.queryName(way).option("checkpointLocation", way).trigger(availableNow=True)
    choose(writer).start().awaitTermination()


def refused(call):
    try:
        call()
    except Exception as error:
        assert "{CANARY}" in str(error), error
    else:
        raise AssertionError("this must fail")


KafkaSink(options("write")).write(batch)
run(files, "each", lambda writer: writer.foreachBatch(KafkaSink(options("each")).write_batch))
run(files, "format", lambda writer: writer.format("kafka_sink").options(**options("format")))
batch.write.format("kafka_sink").options(**options("save")).mode("append").save()
run(files, "once", lambda writer: writer.format("kafka_sink").options(**options("once")))
KafkaSink(options("once-write")).write(batch)
refused(lambda: run(broken, "broken", lambda writer: writer.format("kafka_sink").options(**options("broken"))))
run(files, "rows", lambda writer: writer.foreach(KafkaSink(options("rows"))))
spark.stop()
"""


def traceparents(servers: str, topic: str) -> Counter[tuple[str, str]]:
    """Return how many records name each span."""
    found: Counter[tuple[str, str]] = Counter()
    for message in read_topic(servers, topic, PARTITIONS):
        headers: Any = message.headers()
        ((name, value),) = headers
        version, trace_id, span_id, flags = value.decode().split("-")
        assert (name, version, int(flags, 16) & 1) == ("traceparent", "00", 1)
        found[trace_id, span_id] += 1
    return found


def check_batch(receiver: OtlpReceiver, topic: str, way: str, servers: str) -> None:
    """One trace: the batch, and inside of it its phases and its tasks, whose records name them."""
    (batch,) = receiver.named(f"write {topic}")
    assert (batch.kind, batch.parent, batch.status[0]) == (INTERNAL, "", 0)
    assert batch.attributes["messaging.batch.message_count"] == ROWS
    assert batch.attributes.get("kafka_sink.batch.id") == (None if way in {"write", "save", "once-write"} else 0)
    assert batch.attributes.get("kafka_sink.query.name") == (None if way in {"write", "save", "once-write"} else way)
    assert batch.attributes["kafka_sink.guarantee"] == ("exactly-once" if way.startswith("once") else "at-least-once")
    inside = [span for span in receiver.spans if span.parent == batch.span_id]
    assert {span.trace_id for span in inside} == {batch.trace_id}
    tasks = [span for span in inside if span.name == f"send {topic}"]
    phases = {"plan", "tasks", "decide", "commit"} if way.startswith("once") else {"plan", "tasks"}
    assert {span.name for span in inside} - {f"send {topic}"} == phases
    check_tasks(tasks, topic, way, servers)


def check_tasks(tasks: list[ReceivedSpan], topic: str, way: str, servers: str) -> None:
    records = traceparents(servers, topic)
    assert {span.traceparent: span.attributes["messaging.batch.message_count"] for span in tasks} == records
    assert records.total() == ROWS
    for span in tasks:
        assert (span.kind, span.status[0]) == (PRODUCER, 0)
        assert span.attributes["messaging.client.id"].startswith(f"client-{way}")
        assert span.attributes["server.address"] == servers.split(",")[0].rpartition(":")[0]
        assert span.resource["service.name"] == "orders"
        assert span.start < span.end


def test_each_way_of_writing_is_one_trace_of_a_batch_its_tasks_and_its_records(
    kafka_broker: Admin, new_topic: Callable[..., str], tmp_path: Path
) -> None:
    topics = {way: new_topic(PARTITIONS) for way in WAYS}
    servers = kafka_broker.bootstrap_servers
    with receiving_otlp() as receiver:
        variables = receiver.environment(
            OTEL_EXPORTER_OTLP_HEADERS=f"api-key={CANARY}",
            OTEL_SERVICE_NAME="orders",
            OTEL_METRIC_EXPORT_INTERVAL="100",
        )
        done = run_script(JOB, tmp_path, servers, json.dumps(topics), **variables)
    for way in WAYS[:6]:
        check_batch(receiver, topics[way], way, servers)
    rows = receiver.named(f"send {topics['rows']}")
    check_tasks(rows, topics["rows"], "rows", servers)
    assert {span.parent for span in rows} == {""}
    assert len({span.trace_id for span in rows}) == 1  # of the micro-batch
    (failed,) = receiver.named(f"write {topics['broken']}")
    assert failed.status[0] == ERROR
    assert failed.attributes["kafka_sink.outcome"] == "failed"
    check_metrics(receiver, topics)
    assert all(CANARY.encode() not in body for body in receiver.bodies)
    assert {headers["api-key"] for headers in receiver.headers} == {CANARY}
    assert "OpenTelemetry" not in done.stderr


def check_metrics(receiver: OtlpReceiver, topics: dict[str, str]) -> None:
    written = {(topics[way],): ROWS for way in WAYS if way != "broken"}
    sent = receiver.sums("messaging.client.sent.messages", "messaging.destination.name")
    assert sent == written
    spans = Counter(
        (span.attributes["messaging.destination.name"],) for span in receiver.spans if span.kind == PRODUCER
    )
    assert receiver.sums("messaging.client.operation.duration", "messaging.destination.name") == spans
    assert receiver.units("messaging.client.operation.duration") == {"s"}
    of_kafka = receiver.sums("kafka.producer.record_send_total", "topic")
    first = (topics["write"],)  # its last counts have come while the other ways were written
    assert of_kafka[first] == written[first]
    assert receiver.sums("kafka_sink.batches", "kafka_sink.outcome") == {("complete",): 6, ("failed",): 1}
    assert sum(receiver.sums("kafka_sink.records").values()) == 6 * ROWS


def test_example_of_the_page_runs(kafka_broker: Admin, new_topic: Callable[..., str], tmp_path: Path) -> None:
    topic, servers = new_topic(PARTITIONS), kafka_broker.bootstrap_servers
    page = (ROOT / "docs" / "opentelemetry.md").read_text()
    source = page.split("```python\n")[1].split("```")[0]
    for documented, used in (("127.0.0.1:9092", servers), ('"topic": "orders"', f'"topic": "{topic}"')):
        assert documented in source
        source = source.replace(documented, used)
    with receiving_otlp() as receiver:
        run_script(source, tmp_path, **receiver.environment())
    (batch,) = receiver.named(f"write {topic}")
    inside = {span.name for span in receiver.spans if span.parent == batch.span_id}
    assert inside == {"plan", "tasks", f"send {topic}"}
    records = traceparents(servers, topic)
    assert records.total() == 1_000
    assert set(records) == {span.traceparent for span in receiver.named(f"send {topic}")}


SLOW_JOB = """
import logging
import sys
import time

from pyspark.sql import SparkSession

from spark_kafka_sink import KafkaSink

logging.basicConfig(stream=sys.stdout)
servers, topic = sys.argv[1:]
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
# so that all ten tasks stay, however small they are
spark = builder.config("spark.dynamicAllocation.enabled", "true").getOrCreate()
options = {"kafka.bootstrap.servers": servers, "topic": topic, "telemetry.opentelemetry": "true"}
frame = spark.range(20).selectExpr("string(id) AS value").repartition(10)
KafkaSink(options | {"telemetry.opentelemetry": "false"}).write(frame)
for _ in range(2):
    began = time.monotonic()
    KafkaSink(options).write(frame)
    print("seconds", time.monotonic() - began)
frame.write.format("kafka_sink").options(**options).mode("append").save()
spark.stop()
"""


@pytest.mark.parametrize(
    "is_down", [pytest.param(True, marks=pytest.mark.slow, id="down"), pytest.param(False, id="silent")]
)
def test_receiver_that_does_not_answer_costs_one_second_and_no_row(
    kafka_broker: Admin, new_topic: Callable[..., str], tmp_path: Path, is_down: bool
) -> None:
    topic = new_topic(1)
    with receiving_otlp() as receiver, socket.socket() as unused:
        receiver.may_answer.clear()
        unused.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{unused.getsockname()[1]}" if is_down else receiver.url
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"{url}?token={CANARY}", "OTEL_EXPORTER_OTLP_TIMEOUT": "3"}
        done = run_script(SLOW_JOB, tmp_path, kafka_broker.bootstrap_servers, topic, **variables)
    seconds = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("seconds")]
    assert seconds[1] < 10, seconds  # ten tasks that each wait a second would take longer
    assert len(read_topic(kafka_broker.bootstrap_servers, topic)) == 80
    output = done.stdout + done.stderr
    assert "OpenTelemetry spans are not received" in output
    assert CANARY not in output
