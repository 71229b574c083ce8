"""A password in the options, hunted for wherever a Spark application leaves something behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.librdkafka import read_values
from support.secured_broker import SecuredBroker

from spark_kafka_sink.local.access import AccessAdmin, Permission

CANARY = "canary-Zx9Qw7"
"""A part of the right password and of the wrong one."""
ROOT = Path(__file__).resolve().parents[3]


def options_with(password: str, broker: SecuredBroker, topic: str) -> dict[str, str]:
    jaas = f'org.apache.kafka.common.security.scram.ScramLoginModule required username="dora" password="{password}";'
    return {
        **broker.settings("SASL_SSL", "kafka."),
        "kafka.sasl.mechanism": "SCRAM-SHA-256",
        "kafka.sasl.jaas.config": jaas,
        "topic": topic,
    }


@pytest.mark.slow
def test_nothing_that_spark_leaves_behind_has_the_password(secured_broker: SecuredBroker, tmp_path: Path) -> None:
    topic = "secrets"
    secured_broker.admin.create_topic(topic)
    access = AccessAdmin(secured_broker.kafka.bootstrap_servers)
    access.set_password("dora", CANARY)
    access.grant(
        Permission("User:dora", "write", "topic", topic),
        Permission("User:dora", "describe", "topic", topic),
        Permission("User:dora", "idempotent_write", "cluster"),
    )
    (tmp_path / "events").mkdir()
    arguments = {
        "folder": str(tmp_path),
        "options": json.dumps(options_with(CANARY, secured_broker, topic)),
        "wrong": json.dumps(options_with(f"{CANARY}-wrong", secured_broker, topic)),
    }
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    job = Path(__file__).with_name("secret_job.py")
    done = subprocess.run(
        [sys.executable, str(job), json.dumps(arguments)],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5_000:].replace(CANARY, "***")
    assert "DONE" in done.stdout
    assert len(re.findall("REFUSED", done.stdout)) == 6
    assert done.stdout.count("SaslAuthenticationError: ") >= 3
    assert "refuses us by SASL SCRAM-SHA-256" in done.stdout
    assert len(read_values(secured_broker.kafka.bootstrap_servers, topic)) == 6 * 10

    assert [line for line in done.stdout.splitlines() if CANARY in line] == []
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any("events" in path.parts for path in files)
    assert any("checkpoints" in path.parts for path in files)
    assert [str(path) for path in files if CANARY.encode() in path.read_bytes()] == []
