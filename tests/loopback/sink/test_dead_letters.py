"""Dead letters of a task over sockets: what the brokers say about a topic decides which rows they get."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from kio.schema.errors import ErrorCode
from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_broker.faults import fail_with, refuse_topic
from support.scripted_server import ScriptedServer

from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.common.errors import InvalidTopicError, KafkaTimeoutError, RecordTooLargeError
from spark_kafka_sink.producer.kafka_producer import KafkaProducer
from spark_kafka_sink.sink import topic_limits
from spark_kafka_sink.sink.arrow_writer import write_arrow
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.producer_pool import ProducerPool

DESCRIBE_CONFIGS = 32
METADATA = 3


class Stage:
    """A scripted broker with topics, and tasks that write to it."""

    def __init__(self, cluster: ScriptedCluster, server: ScriptedServer) -> None:
        self.cluster = cluster
        self.pool = ProducerPool(KafkaProducer, SystemClock())
        self._servers = ",".join(server.bootstrap_servers)

    def write(
        self, *, max_block_ms: int = 20_000, topic_option: str | None = None, **columns: pa.Array
    ) -> dict[str, Any]:
        """Write the columns as one task. Return its own counts."""
        options = {
            "kafka.bootstrap.servers": self._servers,
            "errors.tolerance": "all",
            "errors.deadletterqueue.topic.name": "dead",
            "kafka.max.request.size": "100000",
            "kafka.max.block.ms": str(max_block_ms),
            "topic": topic_option,
        }
        batch = pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
        (report,) = write_arrow(SinkConfig.from_options(options), self.pool, [batch])
        own: dict[str, Any] = report.to_pylist()[-1]
        return own

    def values(self, topic: str) -> list[bytes]:
        records = self.cluster.records(topic)
        return sorted(record.value or b"" for partition in records for record in partition)

    def questions(self, api_key: int) -> int:
        return sum(exchange.api_key == api_key for exchange in self.cluster.requests)


@pytest.fixture
def stage() -> Iterator[Stage]:
    cluster = ScriptedCluster(1)
    for name, most in (("orders", 50_000), ("small", 1_000), ("dead", 1_000_000)):
        topic = cluster.create_topic(name, partitions=2, configs={"max.message.bytes": str(most)})
        topic.max_message_bytes = most
    with ScriptedServer(cluster) as server:
        made = Stage(cluster, server)
        yield made
        for _, _, producer in made.pool.producers():
            producer.close()


def column(*cells: Any, of: pa.DataType | None = None) -> pa.Array:
    return pa.array(cells, of or pa.string())


def test_each_topic_takes_what_fits_and_the_dead_letters_the_rest(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_limits, "_NEW_MS", 600_000)  # each answer is new, also on a slow machine
    own = stage.write(
        value=column("a" * 2_000, "b" * 2_000, "c", "d", "e" * 60_000, "f" * 200_000, "g"),
        topic=column("orders", "small", "small", "orders", "orders", "small", None),
        partition=column(0, None, 1, 2, None, None, 0, of=pa.int32()),
    )
    assert stage.values("orders") == [b"a" * 2_000]
    assert stage.values("small") == [b"c"]
    assert stage.values("dead") == [b"", b"b" * 2_000, b"d", b"e" * 60_000, b"g"]  # "f" is too large for any request
    assert own["first_dead_letter"].startswith("row 1 of partition 0: the record takes 20")
    assert stage.questions(DESCRIBE_CONFIGS) == 3


def test_a_partition_that_was_added_is_no_fault(stage: Stage) -> None:
    """The producer's view is older than the question for the row's partition."""
    rows = {"topic": column("orders"), "value": column("v"), "partition": column(2, of=pa.int32())}
    stage.write(**rows)
    assert stage.values("dead") == [b"v"]
    stage.cluster.add_partitions("orders", 1)
    stage.write(**rows)
    assert (stage.values("orders"), stage.values("dead")) == ([b"v"], [b"v"])


def test_without_the_permission_a_large_record_fails_its_task(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """It cannot be known beforehand then, and the broker refuses the record."""
    stage.cluster.on(DESCRIBE_CONFIGS, fail_with(int(ErrorCode.topic_authorization_failed)), times=None)
    with caplog.at_level(logging.WARNING), pytest.raises(RecordTooLargeError):
        stage.write(value=column("b" * 2_000), topic=column("small"))
    (warning,) = [text for text in caplog.messages if "max.message.bytes of topic small is not known" in text]
    assert "--operation DescribeConfigs --topic small" in warning
    assert stage.values("dead") == []


def test_a_topic_that_brokers_call_invalid_is_a_fault_of_its_rows(stage: Stage) -> None:
    """Some brokers have narrower rules. The error does not come back with the questions for other topics."""
    stage.cluster.on(METADATA, refuse_topic("odd", InvalidTopicError), times=None)
    stage.write(value=column("v", "w"), topic=column("odd", "orders"))
    stage.write(value=column("x"), topic=column("small"), partition=column(5, of=pa.int32()))
    assert (stage.values("orders"), stage.values("dead")) == ([b"w"], [b"v", b"x"])


def test_option_topic_that_brokers_call_invalid_fails_the_task(stage: Stage) -> None:
    """Bug: every row of such a query went to the dead letters, a thousand in each batch."""
    stage.cluster.on(METADATA, refuse_topic("my.orders", InvalidTopicError), times=None)
    with pytest.raises(InvalidTopicError, match=r"my\.orders"):
        stage.write(value=column("v", "w"), topic_option="my.orders")
    assert stage.values("dead") == []


def test_a_topic_that_does_not_exist_is_no_fault_of_its_rows(stage: Stage) -> None:
    with pytest.raises(KafkaTimeoutError, match="Topic missing is not in the metadata"):
        stage.write(value=column("v"), topic=column("missing"), partition=column(7, of=pa.int32()), max_block_ms=300)
    assert stage.values("dead") == []


def test_brokers_that_do_not_answer_fail_the_task(stage: Stage) -> None:
    stage.cluster.on(DESCRIBE_CONFIGS, fail_with(int(ErrorCode.coordinator_not_available)), times=None)
    with pytest.raises(KafkaTimeoutError, match="The settings of topic small were not read within 300 ms"):
        stage.write(value=column("v"), topic=column("small"), max_block_ms=300)
    assert stage.values("dead") == []
