"""Every Python example of the README and of five pages of docs/ runs without changes, except for the broker's address
and the checkpoint's folder.
"""

from __future__ import annotations

import json
import logging
import re
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext
from support.librdkafka import read_topic
from support.pyspark_capabilities import FORMAT
from support.schema_registry import SchemaRegistryServer

from spark_kafka_sink.common.errors import TopicExistsError
from spark_kafka_sink.local.admin import Admin

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

NewTopic = Callable[..., None]
reads_polars = pytest.mark.skipif(
    not hasattr(pa, "string_view"), reason="pyarrow before 16 cannot read tables of Polars"
)
ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "docs/producer.md", "docs/monitoring.md", "docs/reports.md", "docs/embedded-broker.md"]
EXAMPLES = [
    example for page in PAGES for example in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
]


def run(marker: str, broker: Admin | None, folder: Path) -> dict[str, Any]:
    """Run the one example that contains `marker`; return its variables."""
    (example,) = [example for example in EXAMPLES if marker in example]
    if broker is not None:
        example = example.replace("127.0.0.1:9092", broker.bootstrap_servers)
    names: dict[str, Any] = {}
    exec(compile(example.replace("/tmp/", f"{folder}/"), "README.md", "exec"), names)
    return names


def stop_after_rows(query: StreamingQuery) -> None:
    while query.isActive and not any(progress["numInputRows"] for progress in query.recentProgress):
        query.awaitTermination(1)
    query.stop()
    assert query.exception() is None


@pytest.fixture
def example_topic(kafka_broker: Admin) -> Iterator[NewTopic]:
    """`example_topic(name, partitions)`: the topic that an example names, deleted after the test."""
    with ExitStack() as stack:

        def create(name: str, partitions: int = 1) -> None:
            try:
                kafka_broker.create_topic(name, partitions)
            except TopicExistsError:  # an idle producer of another example asked for it, and the broker made it again
                kafka_broker.delete_topic(name)
                kafka_broker.create_topic(name, partitions)
            stack.callback(kafka_broker.delete_topic, name)

        yield create


def test_batch_example_of_the_readme_writes_every_row(
    spark: SparkSession, kafka_broker: Admin, example_topic: NewTopic, tmp_path: Path
) -> None:
    example_topic("orders", 4)
    names = run("sink.write(orders)", kafka_broker, tmp_path)
    records = read_topic(kafka_broker.bootstrap_servers, "orders", 4)
    assert len([record for record in records if record.key() is not None]) == names["report"].records == 1000


@FORMAT.needed
def test_stream_example_of_the_readme_writes_each_row_once(
    spark: SparkSession, kafka_broker: Admin, example_topic: NewTopic, tmp_path: Path
) -> None:
    example_topic("payments", 2)
    query = run("exactly-once", kafka_broker, tmp_path)["query"]
    stop_after_rows(query)
    values = [int(record.value()) for record in read_topic(kafka_broker.bootstrap_servers, "payments", 2)]
    assert values
    assert sorted(values) == list(range(len(values)))


def test_log_lines_of_a_program_arrive(kafka_broker: Admin, example_topic: NewTopic, tmp_path: Path) -> None:
    """In another order the first line waits for max.block.ms: the Sender waits for the handler that sends."""
    example_topic("log-lines")
    began, root = time.monotonic(), logging.getLogger()
    before = [*root.handlers]
    try:
        run("QueueListener(", kafka_broker, tmp_path)
    finally:
        root.handlers[:] = before
    assert time.monotonic() - began < 30
    assert [record.value() for record in read_topic(kafka_broker.bootstrap_servers, "log-lines", 1)] == [
        b"disk is almost full"
    ]


@FORMAT.needed
def test_observed_metrics_are_in_the_query_progress(
    spark: SparkSession, kafka_broker: Admin, example_topic: NewTopic, tmp_path: Path
) -> None:
    example_topic("observed", 2)
    query = run("observe(", kafka_broker, tmp_path)["query"]
    stop_after_rows(query)
    observed = [progress["observedMetrics"]["kafka"]["rows"] for progress in query.recentProgress]
    assert len(read_topic(kafka_broker.bootstrap_servers, "observed", 2)) >= sum(observed) > 0


@FORMAT.needed
def test_reports_come_to_the_users_functions(
    spark: SparkSession,
    kafka_broker: Admin,
    example_topic: NewTopic,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    example_topic("reported")
    names = run("ReportListener(", kafka_broker, tmp_path)
    stop_after_rows(names["query"])
    names["listener"].deliver()
    spark.streams.removeListener(names["listener"])
    names["listener"].close()
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "1000 0"
    streamed = [json.loads(line) for line in lines]
    assert streamed
    # a batch that the stop interrupted has no query id if none of its tasks has finished
    assert {each["query_id"] for each in streamed if each["outcome"] == "complete"} == {names["query"].id}
    records = sum(report["records"] for report in streamed)
    # a task that the stop interrupted may have written rows, and has no report
    assert len(read_topic(kafka_broker.bootstrap_servers, "reported")) >= 1000 + records > 1000


def test_producer_example_runs_without_spark(
    kafka_broker: Admin, example_topic: NewTopic, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example_topic("orders")
    run("future = producer.send(", kafka_broker, tmp_path)
    assert "offset=0" in capsys.readouterr().out


@reads_polars
def test_table_example_writes_its_rows(
    kafka_broker: Admin, example_topic: NewTopic, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example_topic("orders")
    run("producer.write(", kafka_broker, tmp_path)
    assert capsys.readouterr().out.startswith("2 records, ")
    records = read_topic(kafka_broker.bootstrap_servers, "orders")
    assert [(each.key(), each.value()) for each in records] == [(b"7", b'{"amount": 42}'), (b"8", None)]


def test_embedded_broker_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("with EmbeddedKafka", None, tmp_path)
    assert re.fullmatch(r"127\.0\.0\.1:\d+\n", capsys.readouterr().out)


@pytest.mark.usefixtures("spark")
@reads_polars
def test_examples_of_the_serialization_page_write_their_rows(kafka_broker: Admin, example_topic: NewTopic) -> None:
    """They are one program: each uses the variables of those before it."""
    servers = kafka_broker.bootstrap_servers
    for topic in ("trips", "orders.changes", "orders.events", "customers", "trips.avro", "trips.registered"):
        example_topic(topic)
    page = (ROOT / "docs" / "serialization.md").read_text()
    program = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    names: dict[str, Any] = {}
    with SchemaRegistryServer() as registry:
        program = program.replace("http://127.0.0.1:8081", registry.url).replace("127.0.0.1:9092", servers)
        exec(compile(program, "serialization.md", "exec"), names)
        with SchemaRegistryClient({"url": registry.url}) as client:
            context = SerializationContext("trips.registered", MessageField.VALUE)
            read = AvroDeserializer(client)
            trips = [read(record.value(), context) for record in read_topic(servers, "trips.registered")]
    values = [record.value() for record in read_topic(kafka_broker.bootstrap_servers, "trips")]
    assert len(values) == 2002
    json_trips, avro_trips = values[:2000], values[2000:]
    assert sorted(json.loads(value)["id"] for value in json_trips) == sorted([*range(1000)] * 2)
    assert avro_trips == [b"\0" + struct.pack("<d", 1.5) + b"\0\6Ada", b"\0" + struct.pack("<d", 2.5) + b"\2"]
    changes = read_topic(kafka_broker.bootstrap_servers, "orders.changes")
    assert sorted(record.key() for record in changes) == [b'{"id":%d}' % number for number in range(5)]
    assert {json.loads(record.value())["before"] for record in changes} == {None}
    events = read_topic(kafka_broker.bootstrap_servers, "orders.events")
    assert sorted(record.value() for record in events) == [b'{"id":%d,"state":"paid"}' % n for n in range(5)]
    assert {dict(record.headers())["content-type"] for record in events} == {b"application/json"}
    assert names["envelope_report"].records == names["events_report"].records == 5
    customers = [(record.key(), record.value()) for record in read_topic(servers, "customers")]
    assert sorted(customers) == [(b"1", b'{"id":1,"name":"Ada"}'), (b"2", b'{"id":2,"name":"Bea"}'), (b"3", None)]
    assert sorted((trip["id"], trip["km"]) for trip in trips) == [(number, number * 1.5) for number in range(1000)]
    bare = sorted(record.value() for record in read_topic(servers, "trips.avro"))
    assert bare == sorted(record.value()[5:] for record in read_topic(servers, "trips.registered"))


@pytest.mark.slow  # fetches 160 MB the first time
def test_embedded_registry_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("with SchemaRegistry", None, tmp_path)
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/apis/ccompat/v7\n", capsys.readouterr().out)


@pytest.mark.usefixtures("spark")
def test_example_of_the_fixtures_is_a_test_that_passes(kafka_broker: Admin, topic: str, tmp_path: Path) -> None:
    run("def test_orders_are_written", None, tmp_path)["test_orders_are_written"](kafka_broker, topic)
    assert len(read_topic(kafka_broker.bootstrap_servers, topic)) == 10


def test_every_example_has_a_test() -> None:
    source = Path(__file__).read_text()
    markers = re.findall(r'run\("(.*?)"', source)
    assert sorted(markers) == sorted(marker for marker in markers if sum(marker in text for text in EXAMPLES) == 1)
    assert len(markers) == len(EXAMPLES), sys.argv
