"""Releases of Kafka from before 3.9, each started from its own jars, and read back by librdkafka.

Kafka 1.1 has no zstd, and 2.8 cannot list transactions. 3.5 has all that the sink needs: the test writes whole
batches to it exactly once, under version 1 of transactions.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from support.exactly_once_batches import check_batches
from support.librdkafka import read_topic
from support.old_kafka import old_kafka

from spark_kafka_sink.client.api_versions import ApiVersions
from spark_kafka_sink.common.errors import UnsupportedVersionError
from spark_kafka_sink.producer.kafka_producer import KafkaProducer
from spark_kafka_sink.protocol.versions import SUPPORTED_VERSIONS, ApiKey, first_release
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.sink.exactly_once.cluster import process_driver
from spark_kafka_sink.sink.options import SinkConfig

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
RECORDS: list[tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]]]] = [
    (None, b"v", []),
    (b"", b"", [("h", b"")]),
    (b"k", None, [("h", None), ("h", b"twice")]),
    *((b"key-%d" % n, b"value-%d" % n * (n % 40), []) for n in range(500)),
]


@pytest.fixture(params=["1.1.1", "2.8.2", "3.5.2"])
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextmanager
def producing(servers: str, **settings: object) -> Iterator[KafkaProducer]:
    producer = KafkaProducer({"bootstrap.servers": servers, "linger.ms": 5, **settings})
    try:
        yield producer
    finally:
        producer.close(timeout=10)


def by_send(producer: KafkaProducer, topic: str) -> None:
    futures = [producer.send(topic, value, key, headers=headers) for key, value, headers in RECORDS]
    producer.flush()
    for future in futures:
        future.result(30)


def by_columns(producer: KafkaProducer, topic: str) -> None:
    keys, values, headers = zip(*RECORDS, strict=True)
    failures: list[object] = []
    columns = RecordColumns.from_rows(values, keys, headers)
    producer.send_columns(topic, columns, lambda _, error: failures.append(error) if error else None)
    producer.flush()
    assert failures == []


def assert_same(servers: str, topic: str) -> None:
    read = [(message.key(), message.value(), message.headers() or []) for message in read_topic(servers, topic)]
    assert read == RECORDS


def refuse_zstd(servers: str) -> None:
    with producing(servers, **{"compression.type": "zstd"}) as producer:
        future = producer.send("refused", b"v")
        with pytest.raises(UnsupportedVersionError, match=r"compression\.type=zstd needs Kafka 2\.1 or newer"):
            future.result(60)


def write_every_way(servers: str, *, has_zstd: bool) -> None:
    ways: dict[str, Callable[[KafkaProducer, str], None]] = {"send": by_send, "columns": by_columns}
    for codec in CODECS if has_zstd else CODECS[:-1]:
        with producing(servers, **{"compression.type": codec}) as producer:
            for name, write in ways.items():
                write(producer, f"{name}-{codec}")
                assert_same(servers, f"{name}-{codec}")


def assert_table_of_releases(servers: str, release: str) -> None:
    """Check that every spoken version came with this release or earlier, and the next version of each request later."""
    api_versions = ApiVersions()
    with KafkaProducer({"bootstrap.servers": servers}, api_versions=api_versions) as producer:
        producer.send("versions", b"v").result(30)
        spoken = api_versions.get("1")
    assert spoken is not None
    wrong = []
    for api_key, ours in SUPPORTED_VERSIONS.items():
        if api_key is ApiKey.DESCRIBE_QUORUM:
            continue  # these releases run with ZooKeeper, and have no quorum
        latest = spoken.ranges[api_key].latest if api_key in spoken.ranges else -1
        if 0 <= latest <= ours.latest and numbers(first_release(api_key, latest)) > numbers(release):
            wrong.append((api_key.name, latest, first_release(api_key, latest)))
        if latest < ours.latest and numbers(first_release(api_key, latest + 1)) <= numbers(release):
            wrong.append((api_key.name, latest + 1, first_release(api_key, latest + 1)))
    assert wrong == []


def numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def commit_and_abort(servers: str) -> None:
    with producing(servers, **{"transactional.id": "tx"}) as producer:
        producer.init_transactions()
        for value, end in ((b"kept", producer.commit_transaction), (b"dropped", producer.abort_transaction)):
            producer.begin_transaction()
            producer.send("transactions", value)
            producer.flush()
            end()
    assert [message.value() for message in read_topic(servers, "transactions")] == [b"kept"]


def begin_exactly_once(servers: str) -> None:
    """Begin a batch as a driver does before any task; this needs all APIs of exactly-once delivery."""
    config = SinkConfig.from_options(
        {"kafka.bootstrap.servers": servers, "topic": "t", "delivery.guarantee": "exactly-once"}
    )
    with process_driver(config, "old-release") as driver:
        assert driver.abort(driver.begin(), ())


def test_killed_test_process_leaves_no_jvm(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from support.old_kafka import old_kafka\n"
        f"with old_kafka('2.8.2', Path({str(tmp_path)!r})): print('up', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        assert process.stdout.readline() == b"up\n"
        jvms = [child for child in psutil.Process(process.pid).children(recursive=True) if "java" in child.name()]
        assert len(jvms) == 2
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(jvms, timeout=10)
    alive = [
        child for child in alive if child.status() != psutil.STATUS_ZOMBIE
    ]  # without an init process that reaps orphans
    for child in alive:
        child.kill()
    assert alive == []


def test_release_supports_its_features_and_refuses_others_by_name(release: str, tmp_path: Path) -> None:
    with old_kafka(release, tmp_path) as servers:
        assert_table_of_releases(servers, release)
        write_every_way(servers, has_zstd=release != "1.1.1")
        if release == "1.1.1":
            refuse_zstd(servers)
        commit_and_abort(servers)
        if release == "3.5.2":
            begin_exactly_once(servers)
            check_batches(servers, "batches", transaction_version=1)
        else:
            with pytest.raises(UnsupportedVersionError, match=r"exactly-once needs Kafka 3\.0 or newer"):
                begin_exactly_once(servers)
