"""The decision topics that are refused, and those that log a warning, on scripted nodes."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from kio.schema.errors import ErrorCode
from support.coordinator_bench import CoordinatorBench
from support.driver_steps import CONFIG, driver_of
from support.scripted_broker import faults

from spark_kafka_sink.common.errors import IllegalStateError, KafkaError, KafkaTimeoutError, RequestTimedOutError
from spark_kafka_sink.protocol.versions import ApiKey
from spark_kafka_sink.sink.exactly_once import cluster as cluster_module

TOPIC = CONFIG.decision_topic


@pytest.fixture(autouse=True)
def _nothing_warned_of() -> Iterator[None]:
    cluster_module._warned.clear()
    yield
    cluster_module._warned.clear()


@pytest.fixture
def bench() -> CoordinatorBench:
    return CoordinatorBench()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("policy", ["delete", "compact,delete", "delete,compact"])
def test_deleting_topic_is_refused_with_the_command_to_type(bench: CoordinatorBench, policy: str) -> None:
    bench.cluster.create_topic(TOPIC, 16, configs={"cleanup.policy": policy})
    with pytest.raises(IllegalStateError) as refused:
        driver_of(bench, "P").begin()
    assert f"decision.topic={TOPIC} has cleanup.policy={policy}: Kafka deletes decisions" in str(refused.value)
    assert str(refused.value).endswith(
        "kafka-configs.sh --bootstrap-server HOST:PORT --alter --entity-type topics --entity-name"
        " __spark_kafka_sink_decisions --add-config cleanup.policy=compact"
    )
    assert "P/driver" not in bench.cluster.transactions.transactions, "a driver was fenced"
    bench.cluster.topics[TOPIC].configs["cleanup.policy"] = "compact"
    assert driver_of(bench, "P").begin().last_batch_id is None


def test_new_topic_is_accepted(bench: CoordinatorBench, caplog: pytest.LogCaptureFixture) -> None:
    driver_of(bench, "P").begin()
    assert warnings(caplog) == []


@pytest.mark.parametrize("code", [ErrorCode.invalid_config, ErrorCode.policy_violation])
def test_refused_segment_size_is_left_to_the_cluster(bench: CoordinatorBench, code: int) -> None:
    """Bug: Confluent Cloud allows no segment.bytes below 50 MiB, so the first exactly-once query there was refused."""
    bench.cluster.on(ApiKey.CREATE_TOPICS, faults.fail_with(code))
    driver_of(bench, "P").begin()
    first, second = (
        {str(config.name): str(config.value) for config in exchange.request.topics[0].configs}
        for exchange in bench.asked(ApiKey.CREATE_TOPICS)
    )
    del first["segment.bytes"]
    assert second == first
    assert {"cleanup.policy", "max.message.bytes", "min.insync.replicas"} == set(second)


def test_topic_that_a_policy_refuses_is_left_to_the_user(bench: CoordinatorBench) -> None:
    bench.cluster.on(ApiKey.CREATE_TOPICS, faults.fail_with(ErrorCode.policy_violation), times=2)
    with pytest.raises(KafkaError) as refused:
        driver_of(bench, "P").begin()
    assert refused.value.error_code == ErrorCode.policy_violation
    assert str(refused.value).startswith(f"Topic {TOPIC}: ")
    assert str(refused.value).endswith(
        f" Create decision.topic={TOPIC} by hand (16 partitions, cleanup.policy=compact)."
    )


def test_topic_is_checked_once_for_each_prefix_of_a_client(bench: CoordinatorBench) -> None:
    for _ in range(3):
        driver_of(bench, "P").begin()
    assert len(bench.asked(ApiKey.DESCRIBE_CONFIGS)) == 1


@pytest.mark.parametrize(
    "error_code",
    [ErrorCode.topic_authorization_failed, ErrorCode.cluster_authorization_failed, ErrorCode.unsupported_version],
    ids=["of the topic", "of the cluster", "unsupported"],
)
def test_missing_describe_right_logs_one_warning(
    bench: CoordinatorBench, caplog: pytest.LogCaptureFixture, error_code: int
) -> None:
    bench.cluster.create_topic(TOPIC, 16)
    bench.cluster.on(ApiKey.DESCRIBE_CONFIGS, faults.fail_with(error_code), times=None)
    for prefix in ("P", "Q"):
        assert driver_of(bench, prefix).begin().last_batch_id is None
    (text,) = warnings(caplog)
    assert f"decision.topic={TOPIC}: its cleanup.policy and unclean.leader.election.enable were not checked" in text
    assert text.endswith(f"--operation DescribeConfigs --topic {TOPIC}")


def test_check_with_retriable_error_is_repeated(bench: CoordinatorBench) -> None:
    bench.cluster.create_topic(TOPIC, 16, configs={"cleanup.policy": "delete"})
    bench.cluster.on(ApiKey.DESCRIBE_CONFIGS, faults.fail_with(RequestTimedOutError), times=3)
    with pytest.raises(IllegalStateError, match=r"cleanup\.policy=delete"):
        driver_of(bench, "P").begin()


def test_check_without_an_answer_ends_with_a_timeout(bench: CoordinatorBench) -> None:
    bench.cluster.on(ApiKey.DESCRIBE_CONFIGS, faults.fail_with(RequestTimedOutError), times=None)
    with pytest.raises(KafkaTimeoutError, match=f"settings of topic {TOPIC} were not read within 60000 ms"):
        driver_of(bench, "P").begin()


def test_unclean_leader_election_logs_a_warning(bench: CoordinatorBench, caplog: pytest.LogCaptureFixture) -> None:
    configs = {"cleanup.policy": "compact", "unclean.leader.election.enable": "true"}
    bench.cluster.create_topic(TOPIC, 16, configs=configs)
    driver_of(bench, "P").begin()
    (text,) = warnings(caplog)
    assert text.endswith("--add-config unclean.leader.election.enable=false")


@pytest.mark.parametrize(("nodes", "replicas", "is_warned"), [(3, 1, True), (3, 2, False), (2, 1, False)])
def test_single_replica_in_a_larger_cluster_logs_a_warning(
    caplog: pytest.LogCaptureFixture, nodes: int, replicas: int, is_warned: bool
) -> None:
    bench = CoordinatorBench(node_count=nodes)
    for partition in bench.cluster.create_topic(TOPIC, 16, configs={"cleanup.policy": "compact"}).partitions:
        partition.replica_ids = partition.replica_ids[:replicas]
    driver_of(bench, "P").begin()
    assert ["kafka-reassign-partitions.sh" in text for text in warnings(caplog)] == [True] * is_warned
