"""The sample on the doctor's page is what the doctor prints.

`PYTHONPATH=tests python tests/loopback/doctor/test_page.py` writes it again, and the table of problems.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from random import Random

from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_server import ScriptedServer

from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.doctor.examination import Examination
from spark_kafka_sink.doctor.findings import PROBLEMS, Status, in_capitals
from spark_kafka_sink.doctor.report import table

PAGE = Path(__file__).resolve().parents[3] / "docs" / "doctor.md"
SAMPLE = re.compile(r"(?<=```text\n).*?(?=```)", re.DOTALL)
READ, WRITE, DESCRIBE, DESCRIBE_CONFIGS = (1 << number for number in (3, 4, 8, 10))
WIDTH = 118


def sample() -> str:
    cluster = ScriptedCluster(3)
    cluster.quorum_ahead_ms = 0
    orders = cluster.create_topic("orders", 6, configs={"min.insync.replicas": "2"})
    orders.operations = DESCRIBE
    orders.partitions[4].replica_ids = [1]
    decisions = cluster.create_topic("__spark_kafka_sink_decisions", 16, configs={"cleanup.policy": "compact"})
    decisions.operations = READ | WRITE | DESCRIBE
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ScriptedServer(cluster))
        options = {
            "kafka.bootstrap.servers": ",".join(server.bootstrap_servers),
            "topic": "orders",
            "delivery.guarantee": "exactly-once",
            "transactional.id.prefix": "orders",
        }
        findings = Examination(options, lambda _: "", 10_000, SystemClock(), Random(1)).run()
        text = table(findings, WIDTH, has_signs=True, has_colours=False)
        for number, address in enumerate(server.bootstrap_servers):
            text = text.replace(address, f"127.0.0.1:{str(19092 + number).ljust(len(address) - len('127.0.0.1:'))}")
    return text


def rows() -> str:
    signs = {Status.FAULT: "✗", Status.WARNING: "!"}
    return "\n".join(
        f"| `{name}` | {signs[each.status]} | {each.meaning} | {in_capitals(each.change)} |"
        for name, each in PROBLEMS.items()
    )


def test_sample_of_the_page_is_what_the_doctor_prints() -> None:
    found = SAMPLE.search(PAGE.read_text())
    assert found is not None
    assert found[0] == sample()


if __name__ == "__main__":
    page = SAMPLE.sub(lambda _: sample(), PAGE.read_text())
    PAGE.write_text(re.sub(r"(?<=\|---\|---\|---\|---\|\n)(?:\|.*\n|TABLE\n)+", lambda _: f"{rows()}\n", page))
