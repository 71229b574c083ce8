"""A Spark application with secrets in its options; the tests look for them in everything that it leaves behind."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyspark
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from support.librdkafka import read_values
from support.pyspark_capabilities import FORMAT
from support.secured_broker import SecuredBroker

from spark_kafka_sink.local.access import AccessAdmin, Permission

CANARY = "canary-Zx9Qw7"
"""A part of the right password and of the wrong one."""
KEY_CANARY = "canary-Pm4Kd2"
"""The key's own password. The words that Spark redacts by are only in the name of its option."""
ROOT = Path(__file__).resolve().parents[3]
DOCUMENTED = dict(
    re.findall(r"^(spark\.\S*redaction\S*?)=(.+)$", (ROOT / "docs" / "security.md").read_text(), re.MULTILINE)
)
"""The settings that docs/security.md gives for Spark's redaction."""
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "PYSPARK_PYTHON": sys.executable,
    "SPARK_LOCAL_IP": "127.0.0.1",
}


@dataclass(frozen=True)
class Hunt:
    """An application's output and files, which must hold none of the secrets."""

    folder: Path
    printed: str
    canaries: tuple[str, ...]

    def assert_nothing_is_left(self) -> None:
        for canary in self.canaries:
            assert [line[:200] for line in self.printed.splitlines() if canary in line] == []
            files = [path for path in self.folder.rglob("*") if path.is_file()]
            assert any("events" in path.parts for path in files)
            assert [str(path) for path in files if canary.encode() in path.read_bytes()] == []


@dataclass(frozen=True)
class Stage:
    """A broker with a topic that only one user may write to, and that user's options."""

    broker: SecuredBroker
    topic: str
    folder: Path
    key_pem: str
    options: Mapping[str, str]

    def run(self, kind: str, settings: Mapping[str, str]) -> Hunt:
        """Run secret_job.py as `kind`, with more Spark settings."""
        (self.folder / "events").mkdir()
        wrong = {key: value.replace(CANARY, f"{CANARY}-wrong") for key, value in self.options.items()}
        arguments = {
            "kind": kind,
            "folder": str(self.folder),
            "options": json.dumps(self.options),
            "wrong": json.dumps(wrong),
            "settings": json.dumps(settings),
            "ui_port": str(free_port()),
        }
        hunt = self._hunt([sys.executable, str(Path(__file__).with_name("secret_job.py")), json.dumps(arguments)])
        assert "DONE" in hunt.printed
        return hunt

    def run_sql(self, settings: Mapping[str, str]) -> Hunt:
        """Run the command spark-sql, which writes ten rows by a view and ten by INSERT, with more Spark settings."""
        (self.folder / "events").mkdir()
        options = ", ".join(f"'{key}' '{_in_sql(value)}'" for key, value in self.options.items())
        statements = self.folder / "statements.sql"
        statements.write_text(
            f"CREATE TEMPORARY VIEW v (value STRING) USING kafka_sink OPTIONS ({options});\n"
            "INSERT INTO v SELECT CAST(id AS STRING) FROM range(10);\n"
            "CREATE TABLE t (value STRING) USING kafka_sink;\n"
            f"INSERT INTO t WITH ({options}) SELECT CAST(id AS STRING) FROM range(10);\n"
        )
        all_settings = {
            "spark.master": "local[2]",
            "spark.ui.enabled": "false",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.compress": "false",
            "spark.eventLog.dir": (self.folder / "events").as_uri(),
            **settings,
        }
        command = [str(Path(pyspark.__path__[0], "bin", "spark-sql")), "-f", str(statements)]
        command += [part for key, value in all_settings.items() for part in ("--conf", f"{key}={value}")]
        hunt = self._hunt(command, SPARK_HOME=pyspark.__path__[0])
        statements.unlink()
        return hunt

    def _hunt(self, command: Sequence[str], **environment: str) -> Hunt:
        done = subprocess.run(
            command,
            env={**ENVIRONMENT, **environment},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-5_000:].replace(CANARY, "***")
        return Hunt(self.folder, done.stdout, self.canaries())

    def canaries(self) -> tuple[str, ...]:
        lines = [line for line in self.key_pem.splitlines() if "-----" not in line]
        return CANARY, KEY_CANARY, lines[1], lines[-2]

    def written(self) -> int:
        return len(read_values(self.broker.kafka.bootstrap_servers, self.topic))


@pytest.fixture
def stage(secured_broker: SecuredBroker, tmp_path: Path, request: pytest.FixtureRequest) -> Stage:
    topic = re.sub(r"[^\w.-]", "-", request.node.name)
    secured_broker.admin.create_topic(topic)
    access = AccessAdmin(secured_broker.kafka.bootstrap_servers)
    access.set_password("dora", CANARY)
    access.grant(
        Permission("User:dora", "write", "topic", topic),
        Permission("User:dora", "describe", "topic", topic),
        Permission("User:dora", "idempotent_write", "cluster"),
    )
    key = rsa.generate_private_key(65_537, 2_048)  # so long that Spark truncates it in its log
    identity = secured_broker.authority.issue("dora", key=key)
    pem = identity.key_pem(KEY_CANARY)
    jaas = f'org.apache.kafka.common.security.scram.ScramLoginModule required username="dora" password="{CANARY}";'
    options = {
        **secured_broker.settings("SASL_SSL", "kafka."),
        "kafka.sasl.mechanism": "SCRAM-SHA-256",
        "kafka.sasl.jaas.config": jaas,
        "kafka.ssl.keystore.key": pem,
        "kafka.ssl.keystore.certificate.chain": identity.certificate_pem,
        "kafka.ssl.key.password": KEY_CANARY,
        "topic": topic,
    }
    return Stage(secured_broker, topic, tmp_path, pem, options)


def _in_sql(text: str) -> str:
    """Return the text for a literal. The command cuts statements at semicolons, and joins lines by blanks."""
    for sign, escape in (("\\", "\\\\"), ("'", "\\'"), (";", "\\u003B"), ("\n", "\\n")):
        text = text.replace(sign, escape)
    return text


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.slow
def test_classic_spark_leaves_no_secret_behind(stage: Stage) -> None:
    hunt = stage.run("classic", {})
    assert len(re.findall("REFUSED", hunt.printed)) == 5 + FORMAT.is_there
    assert hunt.printed.count("SaslAuthenticationError: ") >= 2 + FORMAT.is_there
    assert "refuses the login by SASL SCRAM-SHA-256" in hunt.printed
    assert stage.written() == (4 + 2 * FORMAT.is_there) * 10
    assert any("checkpoints" in path.parts for path in stage.folder.rglob("*"))
    hunt.assert_nothing_is_left()


@pytest.mark.slow
def test_connect_leaves_no_secret_of_kafkasink_behind(stage: Stage) -> None:
    """This needs no Spark setting: a `KafkaSink` is sent pickled."""
    hunt = stage.run("connect-sink", {})
    assert stage.written() == 2 * 10
    hunt.assert_nothing_is_left()


@FORMAT.needed
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "writes"), [("view", 1), ("connect-format", 3)])
def test_the_documented_redaction_hides_options_in_plans(stage: Stage, kind: str, writes: int) -> None:
    """Bug: seven fields of a Connect server's event log held the password, and classic Spark showed the key of a
    view.
    """
    assert len(DOCUMENTED) == 2
    hunt = stage.run(kind, DOCUMENTED)
    assert stage.written() == writes * 10
    assert "redacted" in hunt.printed
    hunt.assert_nothing_is_left()


@FORMAT.needed
@pytest.mark.slow
def test_the_documented_redaction_hides_options_of_the_command_spark_sql(stage: Stage) -> None:
    """Bug: the page said that classic Spark shows no more than a key. The command makes each statement the description
    of its job, so that the event log had every option.
    """
    hunt = stage.run_sql(DOCUMENTED)
    assert stage.written() == 20
    hunt.assert_nothing_is_left()
