"""The topic of topic.create=if-missing, on scripted nodes: created, found, compared, refused, and by which calls."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from support.coordinator_bench import CoordinatorBench
from support.scripted_broker import faults
from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_broker.exchange import Answer, Exchange

from spark_kafka_sink import KafkaSink
from spark_kafka_sink.common.errors import (
    ClusterAuthorizationError,
    ConfigError,
    InvalidTopicError,
    KafkaError,
    KafkaTimeoutError,
    TopicAuthorizationError,
)
from spark_kafka_sink.protocol.versions import ApiKey
from spark_kafka_sink.sink import topic_creation
from spark_kafka_sink.sink.data_source import KafkaBatchWriter, KafkaStreamWriter
from spark_kafka_sink.sink.exactly_once import cluster as cluster_module
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.topic_creation import create_missing_topic

SERVERS = {"kafka.bootstrap.servers": "broker-0:9092"}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> CoordinatorBench:
    made = CoordinatorBench()
    monkeypatch.setattr(cluster_module, "_CLIENTS", {})
    monkeypatch.setattr(cluster_module, "connect", lambda _: made.coordinator)
    monkeypatch.setattr(made.coordinator, "close", lambda: None)
    return made


@pytest.fixture(autouse=True)
def _nothing_warned_of(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO, "spark_kafka_sink")
    topic_creation._warned.clear()
    yield
    topic_creation._warned.clear()


def config(topic: str = "orders", **options: object) -> SinkConfig:
    given = {key.replace("_", "."): value for key, value in options.items()}
    return SinkConfig.from_options({**SERVERS, "topic": topic, "topic.create": "if-missing", **given})


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_missing_topic_is_created_and_the_log_says_how(
    bench: CoordinatorBench, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = config(topic_partitions=4, topic_replication_factor=2, topic_config_retention_ms=1000)
    for _ in range(2):
        create_missing_topic(wanted)
    assert len(bench.cluster.topics["orders"].partitions) == 4
    assert len(bench.asked(ApiKey.CREATE_TOPICS)) == 1
    assert caplog.messages == [
        "Topic orders did not exist, and was created: partitions=4, replication.factor=2, retention.ms=1000"
    ]


def test_without_the_option_no_broker_is_asked(bench: CoordinatorBench) -> None:
    create_missing_topic(SinkConfig.from_options({**SERVERS, "topic": "orders"}))
    assert bench.asked(ApiKey.METADATA) == []


def test_one_warning_says_how_an_existing_topic_differs(
    bench: CoordinatorBench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.cluster.create_topic("orders", 2, configs={"retention.ms": "5"})
    configs: dict[str, Any] = {
        "topic_config_retention_ms": 1000,
        "topic_config_cleanup_policy": "Delete",
        "topic_config_zebra": 1,
    }
    for _ in range(2):
        create_missing_topic(config(topic_partitions=4, topic_replication_factor=7, **configs))
    replicas = len(bench.cluster.topics["orders"].partitions[0].replica_ids)
    assert warnings(caplog) == [
        "Topic orders exists, and topic.create=if-missing changes nothing of it. It differs from the options: it has 2"
        f" partitions, not topic.partitions=4; its replication factor is {replicas}, not topic.replication.factor=7;"
        " its retention.ms is 5, not 1000; the cluster has no setting zebra"
    ]
    assert bench.asked(ApiKey.CREATE_TOPICS) == []
    assert bench.cluster.topics["orders"].configs == {"retention.ms": "5"}


def test_comparison_that_failed_is_made_by_the_next_batch(
    bench: CoordinatorBench, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: the one warning was used up by a comparison that timed out."""
    bench.cluster.create_topic("orders", 2, configs={"retention.ms": "5"})
    wanted = config(topic_config_retention_ms=1000, kafka_max_block_ms=1_000)
    refusals = bench.cluster.on(
        ApiKey.DESCRIBE_CONFIGS, faults.fail_with(ErrorCode.coordinator_load_in_progress), times=None
    )
    with pytest.raises(KafkaTimeoutError, match="The settings of topic orders were not read"):
        create_missing_topic(wanted)
    refusals.times = 0
    for _ in range(2):
        create_missing_topic(wanted)
    (text,) = warnings(caplog)
    assert "its retention.ms is 5, not 1000" in text


def test_topic_as_requested_is_no_warning(bench: CoordinatorBench, caplog: pytest.LogCaptureFixture) -> None:
    bench.cluster.create_topic("orders", 2, configs={"cleanup.policy": "compact, delete"})
    create_missing_topic(config(topic_partitions=2, topic_config_cleanup_policy="compact,delete"))
    create_missing_topic(config())
    assert caplog.messages == []


def test_settings_that_may_not_be_read_are_part_of_the_warning(
    bench: CoordinatorBench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.cluster.create_topic("orders", 2)
    bench.cluster.on(ApiKey.DESCRIBE_CONFIGS, faults.fail_with(ErrorCode.topic_authorization_failed))
    create_missing_topic(config(topic_config_retention_ms=1000))
    (text,) = warnings(caplog)
    assert "its settings could not be compared with topic.config.* (Topic orders: Not authorized for the topic" in text


def saying(code: int, message: str) -> faults.Hook:
    """Refuse a creation in a broker's words."""

    def refuse(cluster: ScriptedCluster, exchange: Exchange, proceed: faults.Proceed) -> Answer:
        answer = faults.fail_with(code)(cluster, exchange, proceed)
        (topic,) = answer.values["topics"]  # type: ignore[index]
        return Answer({"throttle_time": 0, "topics": [{**topic, "error_message": message}]})

    return refuse


BY_HAND = "or create the topic by hand and leave topic.create out."


@pytest.mark.parametrize(
    ("code", "said", "advice"),
    [
        (
            ErrorCode.invalid_replication_factor,
            "Unable to replicate the partition 3 time(s): The target replication factor of 3 cannot be reached.",
            " Set topic.replication.factor to at most the number of brokers.",
        ),
        (ErrorCode.invalid_partitions, "Number of partitions must be larger than 0.", " Set topic.partitions."),
        (
            ErrorCode.invalid_config,
            "Unknown topic config name: zebra",
            " Correct topic.config.*.",
        ),
        (
            ErrorCode.policy_violation,
            "Topics need 3 replicas.",
            " Choose topic.partitions, topic.replication.factor and topic.config.* as that policy allows, " + BY_HAND,
        ),
        (ErrorCode.invalid_topic_exception, "The topic name is too long.", " Correct the option topic."),
    ],
)
def test_refusal_is_in_the_brokers_words_with_what_to_change(
    bench: CoordinatorBench, code: int, said: str, advice: str
) -> None:
    bench.cluster.on(ApiKey.CREATE_TOPICS, saying(code, said))
    with pytest.raises(KafkaError) as caught:
        create_missing_topic(config())
    assert str(caught.value) == f"Topic orders: {said}{advice}"
    assert (caught.value.error_code, caught.value.topic) == (code, "orders")


@pytest.mark.parametrize("kind", [TopicAuthorizationError, ClusterAuthorizationError])
def test_missing_permission_is_named(bench: CoordinatorBench, kind: type[KafkaError]) -> None:
    bench.cluster.on(ApiKey.CREATE_TOPICS, faults.fail_with(kind))
    with pytest.raises(kind) as caught:
        create_missing_topic(config())
    assert str(caught.value) == (
        "Topic orders: not authorized to find or create it. topic.create=if-missing needs CREATE and DESCRIBE on the"
        f" topic: grant them, {BY_HAND}"
    )


def test_name_that_brokers_refuse_is_an_error(bench: CoordinatorBench) -> None:
    bench.cluster.on(ApiKey.METADATA, faults.refuse_topic("my.orders", InvalidTopicError), times=None)
    with pytest.raises(InvalidTopicError, match=r"my\.orders.*Correct the option topic\.$"):
        create_missing_topic(config("my.orders"))


# ---- where it happens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writer", [KafkaBatchWriter, KafkaStreamWriter])
def test_writer_of_the_data_source_creates_the_topic_once_before_its_tasks(
    bench: CoordinatorBench, writer: type[Any]
) -> None:
    made = writer(config())
    assert bench.asked(ApiKey.CREATE_TOPICS) == []
    for _ in range(2):  # Spark pickles it twice
        pickle.dumps(made)
    assert len(bench.asked(ApiKey.METADATA)) > 0
    asked = len(bench.asked(ApiKey.METADATA))
    pickle.loads(pickle.dumps(made)).__getstate__()  # in a task: no broker is asked
    assert len(bench.asked(ApiKey.METADATA)) == asked
    assert len(bench.asked(ApiKey.CREATE_TOPICS)) == 1


@pytest.mark.parametrize("writer", [KafkaBatchWriter, KafkaStreamWriter])
def test_refused_creation_fails_the_write_before_its_tasks(bench: CoordinatorBench, writer: type[Any]) -> None:
    bench.cluster.on(ApiKey.CREATE_TOPICS, faults.fail_with(ErrorCode.policy_violation), times=2)
    made = writer(config())
    for _ in range(2):
        with pytest.raises(KafkaError, match="as that policy allows"):
            pickle.dumps(made)


def test_rows_refuse_the_option_with_a_reason() -> None:
    sink = KafkaSink({**SERVERS, "topic": "orders", "topic.create": "if-missing"})
    text = r"^topic\.create=if-missing has no effect on foreach and foreachPartition: Spark calls nothing on the driver"
    with pytest.raises(ConfigError, match=text):
        sink.open(0, 0)
    with pytest.raises(ConfigError, match=text):
        sink.write_partition([])
