"""The least permissions of exactly-once delivery, as docs/security.md lists them, on a broker with an authorizer."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PythonException
from support.librdkafka import read_values
from support.secured_broker import SecuredBroker

from spark_kafka_sink import KafkaSink
from spark_kafka_sink.common.errors import AuthorizationError
from spark_kafka_sink.local.access import AccessAdmin, Permission

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_each_missing_permission_is_named_and_all_suffice(
    secured_broker: SecuredBroker, spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    """Grant each permission that a refusal names, in that order, until the write succeeds.

    DESCRIBE_CONFIGS on the decision topic is not needed: a warning names it.
    """
    user = f"guest-{uuid.uuid4().hex[:8]}"
    topic, prefix, decisions = f"{user}-topic", f"{user}-query", f"{user}-decisions"
    access = AccessAdmin(secured_broker.kafka.bootstrap_servers)
    access.set_password(user, user)
    secured_broker.admin.create_topic(topic, 2)
    options = {
        **secured_broker.settings("SASL_SSL", "kafka."),
        "kafka.sasl.mechanism": "SCRAM-SHA-256",
        "kafka.sasl.jaas.config": f'ScramLoginModule required username="{user}" password="{user}";',
        "kafka.max.block.ms": "15000",
        "delivery.guarantee": "exactly-once",
        "transactional.id.prefix": prefix,
        "decision.topic": decisions,
        "topic": topic,
    }
    frame = spark.range(100, numPartitions=2).selectExpr("CAST(id AS STRING) AS value")
    principal = f"User:{user}"
    left: dict[str, Any] = {
        decisions: (
            "CREATE",
            Permission(principal, "create", "topic", decisions),
            Permission(principal, "write", "topic", decisions),
            Permission(principal, "read", "topic", decisions),
        ),
        "Not authorized for the transactional id": (
            "WRITE",
            Permission(principal, "write", "transactional_id", prefix, is_prefix=True),
        ),
        "Not authorized for the group": ("READ", Permission(principal, "read", "group", prefix, is_prefix=True)),
        topic: ("WRITE", Permission(principal, "write", "topic", topic)),
    }
    while left:
        with pytest.raises((AuthorizationError, PythonException)) as refusal:
            KafkaSink(options).write(frame)
        text = str(refusal.value)
        named = [what for what in left if what in text]
        assert named, text
        expected, *permissions = left.pop(named[0])
        assert expected in text
        access.grant(*permissions)
    KafkaSink(options).write(frame)
    (warning,) = {record.getMessage() for record in caplog.records if "were not checked" in record.getMessage()}
    assert f"decision.topic={decisions}" in warning
    assert f"--operation DescribeConfigs --topic {decisions}" in warning
    found = read_values(secured_broker.kafka.bootstrap_servers, topic, 2)
    assert sorted(map(int, found)) == list(range(100))
