"""The doctor at a real broker: TLS, logins, permissions, limits, the clock. One broker for all faults."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from random import Random

import pytest
from support.certificates import Authority
from support.secured_broker import USERS, SecuredBroker

from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.doctor.examination import Examination
from spark_kafka_sink.doctor.findings import Area, Finding, Status
from spark_kafka_sink.local.access import AccessAdmin, Permission

Options = dict[str, str]


class Guest:
    """A user without permissions at first, with a topic, a decision topic and a prefix."""

    def __init__(self, broker: SecuredBroker) -> None:
        self.broker = broker
        self.id = f"guest-{uuid.uuid4().hex[:8]}"
        self.topic, self.decisions, self.prefix = (f"{self.id}-{each}" for each in ("topic", "decisions", "query"))
        self.access = AccessAdmin(broker.kafka.bootstrap_servers)
        self.access.set_password(self.id, self.id)
        broker.admin.create_topic(self.topic, 2, 1)
        broker.admin.create_topic(self.decisions, 2, 1, {"cleanup.policy": "compact"})

    def options(self, **more: str) -> Options:
        login = f'ScramLoginModule required username="{self.id}" password="{self.id}";'
        return {
            **self.broker.settings("SASL_SSL", "kafka."),
            "kafka.sasl.mechanism": "SCRAM-SHA-256",
            "kafka.sasl.jaas.config": login,
            "topic": self.topic,
            **{name.replace("_", "."): value for name, value in more.items()},
        }

    def exactly_once(self, **more: str) -> Options:
        given = {"delivery_guarantee": "exactly-once", "decision_topic": self.decisions, **more}
        return self.options(**given, transactional_id_prefix=self.prefix)

    def permissions(self) -> dict[str, list[Permission]]:
        """Return what exactly once needs: the doctor's name of the lack → the permissions."""
        user = f"User:{self.id}"
        own = [Permission(user, each, "topic", self.decisions) for each in ("read", "write", "describe_configs")]
        return {
            "read-denied": own,
            "write-denied": [Permission(user, "write", "topic", self.topic)],
            "transactional-id-denied": [Permission(user, "write", "transactional_id", self.prefix, is_prefix=True)],
            "group-denied": [Permission(user, "read", "group", self.prefix, is_prefix=True)],
        }


@pytest.fixture
def guest(secured_broker: SecuredBroker) -> Guest:
    return Guest(secured_broker)


def examine(options: Options, limit_ms: int = 20_000) -> list[Finding]:
    return Examination(options, lambda _: "", limit_ms, SystemClock(), Random(1)).run()


def names(findings: list[Finding]) -> set[str]:
    """Return the problems, without that of the certificate, which every run by TLS has."""
    return {each.name for each in findings if each.name} - {"certificate-expires-soon"}


def test_permissions_are_found_missing_one_by_one(guest: Guest) -> None:
    describe = [Permission(f"User:{guest.id}", "describe", "topic", name) for name in (guest.topic, guest.decisions)]
    assert names(examine(guest.options())) == {"describe-denied", "idempotent-write-denied"}
    guest.access.grant(*describe)
    missing = guest.permissions()
    assert names(examine(guest.exactly_once())) == set(missing)
    for name, permissions in missing.items():
        guest.access.grant(*permissions)
        assert name not in names(examine(guest.exactly_once()))
    assert names(examine(guest.exactly_once())) == set()
    assert names(examine(guest.options())) == set()


def test_healthy_broker_is_seen_whole(secured_broker: SecuredBroker) -> None:
    """The certificates of the tests are valid for a day."""
    topic = f"doctor-{uuid.uuid4().hex[:8]}"
    secured_broker.admin.create_topic(topic, 2, 1)
    findings = examine({**alice(secured_broker, "SASL_SSL"), "topic": topic})
    assert {each.name for each in findings if each.name} == {"certificate-expires-soon"}
    seen = {each.area: each.status for each in findings if not each.name}
    good = (Area.OPTIONS, Area.BROKERS, Area.TOPICS, Area.PERMISSIONS, Area.CLOCK)
    assert seen == dict.fromkeys(good, Status.OK)


def alice(broker: SecuredBroker, listener: str, password: str = USERS["alice"]) -> Options:
    quoted = password.replace('"', '\\"')
    login = f'PlainLoginModule required username="alice" password="{quoted}";'
    return {
        **broker.settings(listener, "kafka."),
        "kafka.sasl.mechanism": "PLAIN",
        "kafka.sasl.jaas.config": login,
    }


def wrong_password(broker: SecuredBroker) -> Options:
    return alice(broker, "SASL_SSL", "canary-p4ss")


def login_at_a_tls_listener(broker: SecuredBroker) -> Options:
    return {**alice(broker, "SASL_SSL"), "kafka.bootstrap.servers": broker.kafka.secured_servers("SSL")}


def no_login(broker: SecuredBroker) -> Options:
    servers = broker.kafka.secured_servers("SASL_SSL")
    return {**broker.settings("SSL", "kafka."), "kafka.bootstrap.servers": servers}


def no_certificate(broker: SecuredBroker) -> Options:
    return {
        **broker.settings("SSL", "kafka."),
        "kafka.bootstrap.servers": broker.kafka.secured_servers("MTLS"),
    }


def no_tls(broker: SecuredBroker) -> Options:
    return {"kafka.bootstrap.servers": broker.kafka.secured_servers("SSL")}


def tls_at_a_plain_listener(broker: SecuredBroker) -> Options:
    return {**broker.settings("SSL", "kafka."), "kafka.bootstrap.servers": broker.kafka.bootstrap_servers}


def other_authority(broker: SecuredBroker) -> Options:
    settings = Authority("another authority").settings(broker.kafka.secured_servers("SSL"))
    return {f"kafka.{name}": str(value) for name, value in settings.items()}


@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (wrong_password, "login-refused"),
        (login_at_a_tls_listener, "login-not-offered"),
        (no_login, "login-required"),
        (no_certificate, "client-certificate-refused"),
        (no_tls, "port-speaks-tls"),
        (tls_at_a_plain_listener, "port-speaks-plaintext"),
        (other_authority, "certificate-of-unknown-authority"),
    ],
)
def test_planted_fault_of_the_connection_is_found_by_its_name(
    secured_broker: SecuredBroker, plant: Callable[[SecuredBroker], Options], name: str
) -> None:
    findings = examine({"topic": "orders", **plant(secured_broker)})
    assert names(findings) == {name}, findings
    assert "canary-p4ss" not in str(findings)


def test_limits_of_a_real_broker_are_found(guest: Guest, secured_broker: SecuredBroker) -> None:
    for permissions in guest.permissions().values():
        guest.access.grant(*permissions)
    assert names(examine(guest.exactly_once(kafka_transaction_timeout_ms="900001"))) == {"transaction-timeout-too-long"}
    kept = f"{guest.id}-kept"
    secured_broker.admin.create_topic(kept, 1, 1, {"cleanup.policy": "delete"})
    user = f"User:{guest.id}"
    guest.access.grant(*(Permission(user, each, "topic", kept) for each in ("read", "write", "describe_configs")))
    found = examine({**guest.exactly_once(), "decision.topic": kept})
    assert names(found) == {"decision-topic-not-compacted"}


def test_missing_topic_of_a_real_broker_is_not_created(secured_broker: SecuredBroker) -> None:
    """The embedded broker creates topics at the first record."""
    missing = f"missing-{uuid.uuid4().hex[:8]}"
    options = {**alice(secured_broker, "SASL_SSL"), "topic": missing}
    for _ in range(2):
        assert names(examine(options)) == {"topic-would-be-created"}
    assert names(examine({**options, "topic.create": "if-missing"})) == set()
    assert names(examine(options)) == {"topic-would-be-created"}
    refused = {**options, "topic.create": "if-missing", "topic.replication.factor": "5"}
    assert names(examine(refused)) == {"create-refused"}
