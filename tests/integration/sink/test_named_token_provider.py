"""OAUTHBEARER with a token function that the options name: `format` takes only text. Real brokers check the tokens."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException
from support.librdkafka import read_values
from support.secured_broker import SecuredBroker

from spark_kafka_sink import KafkaSink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PROVIDER = """
import base64
import json
import time


def token():
    now_s = time.time()
    parts = {"alg": "none"}, {"sub": "alice", "iat": now_s - 10, "exp": now_s + 3_600}
    text = ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)
    return text + ".", int((now_s + 3_600) * 1_000)
"""
"""An unsigned token: the broker has no keys, and takes only a token that has not ended (RFC 7515, appendix A.5)."""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    """The file of a module with the function `token`. No process has it on its path."""
    path = tmp_path / f"tokens_{uuid.uuid4().hex[:8]}.py"
    path.write_text(PROVIDER)
    return path


@pytest.fixture
def shipped(module: Path, spark: SparkSession) -> str:
    """The name of a module that Spark ships as it ships the files of --py-files."""
    spark.sparkContext.addPyFile(str(module))
    return module.stem


@pytest.fixture
def topic(secured_broker: SecuredBroker) -> str:
    name = f"tokens-{uuid.uuid4().hex[:8]}"
    secured_broker.admin.create_topic(name, 2)
    return name


def options(broker: SecuredBroker, topic: str, provider: str) -> dict[str, str]:
    return {
        **broker.settings("SASL_SSL", "kafka."),
        "kafka.sasl.mechanism": "OAUTHBEARER",
        "kafka.sasl.oauthbearer.token.provider": provider,
        "topic": topic,
    }


def rows(spark: SparkSession) -> DataFrame:
    return spark.range(40, numPartitions=2).selectExpr("CAST(id AS STRING) AS value")


def values(broker: SecuredBroker, topic: str) -> list[str]:
    return sorted(read_values(broker.kafka.bootstrap_servers, topic, 2), key=int)


EXPECTED = [str(n) for n in range(40)]


@pytest.mark.parametrize("guarantee", ["at-least-once", "exactly-once"])
def test_format_logs_in_by_the_named_function(
    secured_broker: SecuredBroker, spark: SparkSession, topic: str, shipped: str, guarantee: str, tmp_path: Path
) -> None:
    """Exactly once the driver logs in too, in a worker of its own."""
    given = options(secured_broker, topic, f"{shipped}:token") | {"delivery.guarantee": guarantee}
    rows(spark).write.mode("append").parquet(str(tmp_path / "in"))
    query = (
        spark.readStream.schema("value STRING")
        .parquet(str(tmp_path / "in"))
        .writeStream.format("kafka_sink")
        .options(**given)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(60)
    assert query.exception() is None
    assert values(secured_broker, topic) == EXPECTED


def test_kafka_sink_takes_the_name_too(
    secured_broker: SecuredBroker, spark: SparkSession, topic: str, shipped: str
) -> None:
    assert KafkaSink(options(secured_broker, topic, f"{shipped}:token")).write(rows(spark)).records == 40
    assert values(secured_broker, topic) == EXPECTED


@pytest.mark.parametrize(
    ("provider", "text"),
    [
        ("no_such_module:token", "there is no module no_such_module for "),
        ("{shipped}:tokens", "has no function tokens. Correct the name, or define the function there."),
    ],
)
def test_name_that_leads_nowhere_fails_with_the_option_and_the_remedy(
    secured_broker: SecuredBroker, spark: SparkSession, topic: str, shipped: str, provider: str, text: str
) -> None:
    given = options(secured_broker, topic, provider.format(shipped=shipped))
    with pytest.raises(PySparkException) as caught:
        rows(spark).write.format("kafka_sink").options(**given).mode("append").save()
    shown = str(caught.value)
    assert f"sasl.oauthbearer.token.provider={provider.format(shipped=shipped)}: " in shown
    assert text in shown
    assert values(secured_broker, topic) == []


def test_name_in_a_wrong_form_starts_no_task(secured_broker: SecuredBroker, spark: SparkSession, topic: str) -> None:
    given = options(secured_broker, topic, "hunter2")
    with pytest.raises(PySparkException) as caught:
        rows(spark).write.format("kafka_sink").options(**given).mode("append").save()
    assert "kafka.sasl.oauthbearer.token.provider=*** must be a Python function, or its name" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_operators_command_logs_in_by_the_named_function(
    secured_broker: SecuredBroker, module: Path, tmp_path: Path
) -> None:
    file = tmp_path / "query.properties"
    given = options(secured_broker, "any", f"{module.stem}:token") | {"decision.topic": f"none-{module.stem}"}
    file.write_text("".join(f"{key} = {value}\n" for key, value in given.items()))
    done = subprocess.run(
        [sys.executable, "-m", "spark_kafka_sink.transactions", "list", "--properties", str(file)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert f"none-{module.stem}" in done.stdout
