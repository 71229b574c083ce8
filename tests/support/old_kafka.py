"""A Kafka release with ZooKeeper, for tests: jars by a lock file, two JVMs, one node."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from spark_kafka_sink.local import fetch_jars
from spark_kafka_sink.local.jvm import find_java
from spark_kafka_sink.local.properties import ReservedPort
from spark_kafka_sink.local.watchdog import Watchdog

LOCKS = Path(__file__).with_name("old_releases")
ZOOKEEPER_CLASS = "org.apache.zookeeper.server.ZooKeeperServerMain"
_HOST = "127.0.0.1"
_START_LIMIT_S = 90.0
_LOG4J = """\
log4j.rootLogger=WARN, stdout
log4j.logger.kafka.server.KafkaServer=INFO
log4j.appender.stdout=org.apache.log4j.ConsoleAppender
log4j.appender.stdout.layout=org.apache.log4j.PatternLayout
log4j.appender.stdout.layout.ConversionPattern=%d{ISO8601} %-5p %m (%c)%n
"""
_PROPERTIES = """\
broker.id=1
zookeeper.connect={host}:{zookeeper}
zookeeper.connection.timeout.ms=30000
listeners=PLAINTEXT://{host}:{port}
advertised.listeners=PLAINTEXT://{host}:{port}
log.dirs={data}
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
group.initial.rebalance.delay.ms=0
auto.create.topics.enable=true
num.partitions=1
"""


@contextmanager
def old_kafka(version: str, folder: Path) -> Iterator[str]:
    """Start release `version` below `folder`, and yield its bootstrap.servers. Both JVMs are killed at the end, also if
    this process is killed.
    """
    jars = ":".join(map(str, fetch_jars(LOCKS / f"kafka-{version}.lock.json")))
    log_file = folder / "log4j.properties"
    log_file.write_text(_LOG4J)
    ports = ReservedPort(), ReservedPort()
    zookeeper, port = (each.number for each in ports)
    properties = folder / "server.properties"
    properties.write_text(_PROPERTIES.format(host=_HOST, zookeeper=zookeeper, port=port, data=folder / "data"))
    ensemble = folder / "zookeeper.properties"
    ensemble.write_text(f"dataDir={folder / 'zookeeper'}\nclientPort={zookeeper}\nclientPortAddress={_HOST}\n")
    java = [
        str(find_java().path),
        "-Xmx384m",
        "-XX:TieredStopAtLevel=1",
        "-XX:+UseSerialGC",
        "-XX:-UsePerfData",
        f"-Djava.io.tmpdir={folder}",
        f"-Dlog4j.configuration={log_file.as_uri()}",
        "-Dzookeeper.admin.enableServer=false",
        "-Dzookeeper.jmx.log4j.disable=true",  # which needs classes that the jars do not have
        "-cp",
        jars,
    ]
    processes: list[subprocess.Popen[bytes]] = []
    watchdog = Watchdog(None)
    log = folder / "server.log"
    try:
        with log.open("ab") as output:
            for arguments, place in (
                ((ZOOKEEPER_CLASS, str(ensemble)), zookeeper),
                (("kafka.Kafka", str(properties)), port),
            ):
                process = watchdog.spawn([*java, *arguments], folder=folder, output=output)
                processes.append(process)
                _await(partial(_listens, place), process, log)
        yield f"{_HOST}:{port}"
    finally:
        watchdog.close()
        for process in processes:
            process.wait()
        for each in ports:
            each.release()


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection((_HOST, port), timeout=1):
        return True
    return False


def _await(condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_LIMIT_S
    while not condition():
        tail = log.read_text(errors="replace")[-3_000:]
        assert process.poll() is None, f"the JVM ended with {process.returncode}:\n{tail}"
        assert time.monotonic() < deadline, f"it did not start in {_START_LIMIT_S} s:\n{tail}"
        time.sleep(0.1)
