"""TLS with a real broker: records of every codec arrive, client certificates are accepted, and unknown certificates are
refused at once.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.certificates import Authority
from support.librdkafka import read_topic
from support.secured_broker import SecuredBroker
from support.tcp_proxy import TcpProxy

from spark_kafka_sink import KafkaSink
from spark_kafka_sink.common.errors import KafkaTimeoutError, SslAuthenticationError
from spark_kafka_sink.local import BrokerSecurity, EmbeddedKafka
from spark_kafka_sink.producer.kafka_producer import KafkaProducer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

StartProducer = Callable[..., KafkaProducer]
PASSWORD = "hunter2"
LIMIT_S = 5.0
"""Less than half the time of an error that waits for max.block.ms here."""


@pytest.fixture
def topic(secured_broker: SecuredBroker) -> Iterator[str]:
    name = f"tls-{uuid.uuid4().hex[:8]}"
    secured_broker.admin.create_topic(name, 3)
    yield name
    secured_broker.admin.delete_topic(name)


@pytest.fixture
def start(start_producer: StartProducer) -> StartProducer:
    def start(settings: dict[str, str], **more: str) -> KafkaProducer:
        given = {**settings, "max.block.ms": "12000", **{key.replace("_", "."): value for key, value in more.items()}}
        return start_producer(given.pop("bootstrap.servers"), **given)

    return start


def send_and_read_back(broker: SecuredBroker, producer: KafkaProducer, topic: str, count: int = 500) -> None:
    values = [b"%06d " % number * 500 for number in range(count)]
    futures = [producer.send(topic, value, key=b"%d" % (number % 17)) for number, value in enumerate(values)]
    producer.flush(30)
    assert {future.result(0).partition for future in futures} == {0, 1, 2}
    found = [message.value() for message in read_topic(broker.kafka.bootstrap_servers, topic, 3)]
    assert sorted(found) == values


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_records_of_every_codec_arrive(
    secured_broker: SecuredBroker, start: StartProducer, topic: str, codec: str
) -> None:
    producer = start(secured_broker.settings("SSL"), compression_type=codec)
    send_and_read_back(secured_broker, producer, topic)


@pytest.mark.parametrize("version", ["TLSv1.2", "TLSv1.3"])
@pytest.mark.parametrize("form", ["file", "text"])
def test_client_certificate_with_an_encrypted_key_is_accepted(
    secured_broker: SecuredBroker, start: StartProducer, topic: str, tmp_path: Path, form: str, version: str
) -> None:
    identity = secured_broker.authority.issue(common_name="alice")
    ours = {"ssl.keystore.location": str(identity.write(tmp_path / "client.pem", PASSWORD))}
    if form == "text":
        ours = {
            "ssl.keystore.certificate.chain": identity.certificate_pem,
            "ssl.keystore.key": identity.key_pem(PASSWORD),
        }
    settings = {**secured_broker.settings("MTLS"), **ours, "ssl.key.password": PASSWORD}
    send_and_read_back(secured_broker, start(settings, ssl_enabled_protocols=version), topic)


def refused(producer: KafkaProducer, topic: str) -> str:
    """The error's text; the error comes long before max.block.ms is over."""
    started = time.monotonic()
    with pytest.raises(SslAuthenticationError) as refusal:
        producer.send(topic, b"x").result(20)
    assert time.monotonic() - started < LIMIT_S
    assert PASSWORD not in str(refusal.value)
    return str(refusal.value)


@pytest.mark.parametrize("version", ["TLSv1.2", "TLSv1.3"])
def test_missing_required_certificate_is_refused(
    secured_broker: SecuredBroker, start: StartProducer, version: str
) -> None:
    settings = {**secured_broker.settings("MTLS"), "ssl.enabled.protocols": version}
    assert "ssl.keystore.location" in refused(start(settings), "any")


def test_certificate_of_an_unknown_authority_is_refused(
    secured_broker: SecuredBroker, start: StartProducer, tmp_path: Path
) -> None:
    stranger = Authority("stranger").issue(common_name="alice").write(tmp_path / "client.pem", PASSWORD)
    settings = {
        **secured_broker.settings("MTLS"),
        "ssl.keystore.location": str(stranger),
        "ssl.key.password": PASSWORD,
    }
    assert "ssl.keystore.location" in refused(start(settings), "any")


def test_broker_of_an_unknown_authority_is_not_contacted_again(
    secured_broker: SecuredBroker, start: StartProducer, tmp_path: Path
) -> None:
    settings = secured_broker.settings("SSL")
    with TcpProxy(settings["bootstrap.servers"]) as proxy:
        settings["bootstrap.servers"] = proxy.address
        settings["ssl.truststore.location"] = str(Authority().write(tmp_path / "other.pem"))
        producer = start(settings)
        for _ in range(3):
            assert "of an unknown authority" in refused(producer, "any")
        attempts = proxy.accepted
        time.sleep(1.0)
        assert proxy.accepted - attempts < 10, "too many connections without a send"


@pytest.mark.parametrize(
    ("listener", "protocol", "text"),
    [("SASL_PLAINTEXT", "SSL", "security.protocol=PLAINTEXT"), ("SSL", "PLAINTEXT", "security.protocol=SSL")],
)
def test_wrong_security_protocol_error_names_the_right_one(
    secured_broker: SecuredBroker, start: StartProducer, listener: str, protocol: str, text: str
) -> None:
    settings = {
        "bootstrap.servers": secured_broker.kafka.secured_servers(listener),
        "security.protocol": protocol,
    }
    with pytest.raises(KafkaTimeoutError, match=text):
        start(settings, max_block_ms="1000").send("any", b"x").result(20)


def test_dataframe_is_written_with_the_certificate(
    secured_broker: SecuredBroker, topic: str, spark: SparkSession, tmp_path: Path
) -> None:
    """Each Spark task of KafkaSink.write and of format connects with the certificate."""
    identity = secured_broker.authority.issue(common_name="alice").write(tmp_path / "client.pem", PASSWORD)
    options = {
        **secured_broker.settings("MTLS", prefix="kafka."),
        "kafka.ssl.keystore.location": str(identity),
        "kafka.ssl.key.password": PASSWORD,
        "kafka.compression.type": "lz4",
        "topic": topic,
    }
    frame = spark.range(1_000, numPartitions=2).selectExpr("CAST(id AS STRING) AS value")
    report = KafkaSink(options).write(frame)
    assert report.records == 1_000
    assert PASSWORD not in f"{report} {KafkaSink(options)}"
    frame.write.format("kafka_sink").options(**options).mode("append").save()
    found = [message.value() for message in read_topic(secured_broker.kafka.bootstrap_servers, topic, 3)]
    assert sorted(found) == sorted(b"%d" % number for number in range(1_000) for _ in range(2))


def test_node_advertising_a_name_outside_its_certificate_is_refused(
    own_kafka: Callable[..., EmbeddedKafka], start: StartProducer, tmp_path: Path
) -> None:
    """The certificate is for `localhost`, which the producer connects to first; the node advertises 127.0.0.1."""
    authority = Authority()
    keystore = authority.issue("localhost").write(tmp_path / "broker.pem")
    kafka = own_kafka(security=BrokerSecurity(listeners={"SSL": "SSL"}, keystore=keystore))
    kafka.create_topic("here")
    settings = {
        "bootstrap.servers": kafka.secured_servers("SSL").replace("127.0.0.1", "localhost"),
        "security.protocol": "SSL",
        "ssl.truststore.certificates": authority.certificate_pem,
    }
    assert "its certificate is not for 127.0.0.1." in refused(start(settings), "here")
    unchecked = start(settings, ssl_endpoint_identification_algorithm="")
    assert unchecked.send("here", b"value").result(10).offset == 0
