"""The broker of a benchmark: its certificate, and topics that are warmed before a run and counted after it."""

from __future__ import annotations

import datetime
import ipaddress
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol

from jobs.read_topic import topic_reader
from spark_kafka_sink import KafkaProducer
from spark_kafka_sink.common.errors import KafkaTimeoutError
from spark_kafka_sink.local import BrokerSecurity
from spark_kafka_sink.protocol.fetch import LATEST_TIMESTAMP, READ_COMMITTED


def secured_listener(folder: Path) -> BrokerSecurity:
    """Return the security of a listener SSL, with a key and a certificate in `folder`, for the loopback interface and
    one day. The certificate is self-signed: clients trust the file `truststore`.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "benchmark")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    certificate = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    keystore, truststore = folder / "broker.pem", folder / "authority.pem"
    keystore.touch(mode=0o600)
    keystore.write_bytes(private + certificate)
    truststore.write_bytes(certificate)
    return BrokerSecurity(listeners={"SSL": "SSL"}, keystore=keystore, truststore=truststore)


class Broker(Protocol):
    """The part of EmbeddedKafka that a benchmark uses. Without TLS an Admin has it too."""

    @property
    def bootstrap_servers(self) -> str: ...

    def secured_servers(self, listener: str) -> str: ...

    def create_topic(
        self, name: str, partitions: int = 1, *, config: Mapping[str, str | int] | None = None
    ) -> None: ...

    def delete_topic(self, name: str) -> None: ...


MARKERS_WITHIN_S: Final = 30.0
QUICK_DELETION: Final = {"log.segment.delete.delay.ms": 1000, "log.retention.check.interval.ms": 1000}
"""The broker deletes old segments before they reach the disk, which frees their memory."""
KEPT: Final = {"segment.bytes": 64 << 20, "retention.bytes": 64 << 20}
"""Limits of each partition. Without them a process writes several gigabytes in a minute, the kernel slows the writers
down to the speed of the disk, and the benchmark compares disks. With 200 partitions no segment gets full, and nothing
is deleted. Smaller segments would change that, but the many new segments halve the rate of a producer.
"""


def warm_topic(broker: Broker, topic: str, partitions: int) -> None:
    """Create a topic and write to every partition once, because the first append opens the files of a partition."""
    broker.create_topic(topic, partitions=partitions, config=KEPT)
    producer = KafkaProducer({"bootstrap.servers": broker.bootstrap_servers, "client.id": "benchmark"})
    try:
        sent = [producer.send(topic, b"first", partition=partition) for partition in range(partitions)]
        producer.flush()
        for future in sent:
            future.result()
    finally:
        producer.close()


def count_records(servers: str, topic: str) -> int:
    """Count the records of a topic that no transaction has written to, by its offsets."""
    with topic_reader(servers, topic, "benchmark") as reader:
        return sum(reader.offsets(reader.partitions(topic), LATEST_TIMESTAMP).values())


def count_committed(servers: str, topic: str) -> int:
    """Count the records that a reader finds under read_committed, once no transaction is open."""
    deadline = time.monotonic() + MARKERS_WITHIN_S
    with topic_reader(servers, topic, "benchmark") as reader:
        places = reader.partitions(topic)
        while reader.offsets(places, LATEST_TIMESTAMP, READ_COMMITTED) != reader.offsets(places, LATEST_TIMESTAMP):
            if time.monotonic() > deadline:
                raise KafkaTimeoutError(f"{topic} has an open transaction after {MARKERS_WITHIN_S:g} s.")
            time.sleep(0.02)
        return sum(len(found.records) for found in reader.read([topic], READ_COMMITTED))
