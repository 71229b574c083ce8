"""GSSAPI with a real KDC, a real broker and MIT's library: `make test-kerberos`."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.certificates import Authority
from support.kerberos import REALM, Realm, missing_tools, realm
from support.librdkafka import read_values
from support.logins import refused_login

from spark_kafka_sink import KafkaProducer
from spark_kafka_sink.local import BrokerSecurity, EmbeddedKafka
from spark_kafka_sink.local.security import BrokerKerberos

MISSING = missing_tools() + ["the package gssapi"] * (importlib.util.find_spec("gssapi") is None)
pytestmark = [
    pytest.mark.kerberos,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]


@dataclass(frozen=True)
class KerberizedBroker:
    kafka: EmbeddedKafka
    realm: Realm
    alices_keytab: Path
    authority_file: Path


@pytest.fixture(scope="module")
def broker(
    module_kafka: Callable[..., EmbeddedKafka], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KerberizedBroker]:
    folder = tmp_path_factory.mktemp("realm")
    authority = Authority()
    with realm(folder) as own_realm:
        service = "kafka/127.0.0.1"
        kerberos = BrokerKerberos(f"{service}@{REALM}", own_realm.add(service), own_realm.configuration)
        security = BrokerSecurity(
            listeners={"SASL_PLAINTEXT": "SASL_PLAINTEXT", "SASL_SSL": "SASL_SSL"},
            keystore=authority.issue().write(folder / "broker.pem"),
            mechanisms=("GSSAPI",),
            kerberos=kerberos,
        )
        kafka = module_kafka(security=security, properties={"connections.max.reauth.ms": 3_000})
        authority_file = authority.write(folder / "authority.pem")
        yield KerberizedBroker(kafka, own_realm, own_realm.add("alice"), authority_file)


@pytest.fixture(autouse=True)
def environment(broker: KerberizedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The realm's environment, without a ticket in the default cache."""
    monkeypatch.setenv("KRB5_CONFIG", str(broker.realm.configuration))
    monkeypatch.setenv("KRB5CCNAME", f"FILE:{tmp_path / 'empty.cache'}")


@pytest.fixture
def topic(broker: KerberizedBroker, fresh_name: str) -> str:
    broker.kafka.create_topic(fresh_name)
    return fresh_name


def settings(broker: KerberizedBroker, jaas: str | None, listener: str = "SASL_PLAINTEXT") -> dict[str, Any]:
    found: dict[str, Any] = {
        "bootstrap.servers": broker.kafka.secured_servers(listener),
        "security.protocol": listener,
        "sasl.mechanism": "GSSAPI",
        "sasl.kerberos.service.name": "kafka",
        "linger.ms": 0,
    }
    if listener == "SASL_SSL":
        found["ssl.truststore.location"] = str(broker.authority_file)
    if jaas is not None:
        found["sasl.jaas.config"] = f"com.sun.security.auth.module.Krb5LoginModule required {jaas};"
    return found


def by_keytab(broker: KerberizedBroker, name: str = "alice") -> str:
    return f'useKeyTab=true keyTab="{broker.alices_keytab}" principal="{name}@{REALM}"'


def send_one(given: dict[str, Any], topic: str) -> None:
    with KafkaProducer(given) as producer:
        assert producer.send(topic, b"in").result(30).offset >= 0


@pytest.mark.parametrize("listener", ["SASL_PLAINTEXT", "SASL_SSL"])
def test_keytab_logs_in(broker: KerberizedBroker, topic: str, listener: str) -> None:
    send_one(settings(broker, by_keytab(broker), listener), topic)
    assert read_values(broker.kafka.bootstrap_servers, topic) == ["in"]


def test_ticket_of_default_or_named_cache_logs_in(
    broker: KerberizedBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = broker.realm.ticket("alice", broker.alices_keytab)
    send_one(settings(broker, f'useTicketCache=true ticketCache="{cache}"'), topic)
    monkeypatch.setenv("KRB5CCNAME", cache)
    send_one(settings(broker, None), topic)
    assert read_values(broker.kafka.bootstrap_servers, topic) == ["in", "in"]


def test_missing_ticket_is_an_error(broker: KerberizedBroker, topic: str) -> None:
    reported = str(refused_login(settings(broker, None), topic))
    assert "SASL GSSAPI" in reported
    assert "redentials" in reported
    assert read_values(broker.kafka.bootstrap_servers, topic) == []


def test_principal_missing_from_the_keytab_is_refused(broker: KerberizedBroker, topic: str) -> None:
    broker.realm.add("bob")
    reported = str(refused_login(settings(broker, by_keytab(broker, "bob")), topic))
    assert "SASL GSSAPI" in reported
    assert "No credentials were supplied" in reported


def test_unknown_service_is_named_in_the_error(broker: KerberizedBroker, topic: str) -> None:
    given = settings(broker, by_keytab(broker)) | {"sasl.kerberos.service.name": "other"}
    assert f"other/127.0.0.1@{REALM}" in str(refused_login(given, topic))


def test_outdated_keytab_is_refused(broker: KerberizedBroker, topic: str) -> None:
    keytab = broker.realm.add("carol")
    broker.realm.change_key("carol")
    reported = str(
        refused_login(settings(broker, f'useKeyTab=true keyTab="{keytab}" principal="carol@{REALM}"'), topic)
    )
    assert "SASL GSSAPI" in reported


def test_short_sessions_are_renewed_without_loss(broker: KerberizedBroker, topic: str) -> None:
    sent = 0
    with KafkaProducer(settings(broker, by_keytab(broker))) as producer:
        futures = []
        deadline_s = time.monotonic() + 6.5
        while time.monotonic() < deadline_s:
            futures.append(producer.send(topic, b"%d" % sent))
            sent += 1
            time.sleep(0.002)
        assert [future.result(30).offset for future in futures] == list(range(sent))
    assert read_values(broker.kafka.bootstrap_servers, topic) == [str(number) for number in range(sent)]
